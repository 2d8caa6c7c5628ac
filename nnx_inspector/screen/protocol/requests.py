"""Messages from the browser: one dataclass for each request."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from nnx_inspector.screen.protocol.terms import Component, Part, ValuePart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """Browser to kernel, on the control comm: a view has opened; send it everything.

    `streams` is False if the page has no stream comm, because its front end makes a widget's model
    only when the widget is displayed (marimo): then everything goes over control. `page` is new
    each time the notebook is loaded; `said` counts the hellos of a page.
    """

    type: ClassVar[str] = "hello"
    version: int
    streams: bool
    page: str
    said: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ack:
    """Browser to kernel: the frame with this number has been drawn."""

    type: ClassVar[str] = "ack"
    seq: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Select:
    """Browser to kernel: show this site's histogram and history."""

    type: ClassVar[str] = "select"
    id: int
    site: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perturb:
    """Browser to kernel: add a perturbation of the menu to one site, switched on. A `strength` of
    None means the offer's default.
    """

    type: ClassVar[str] = "perturb"
    id: int
    site: str
    kind: str
    strength: float | None
    at: Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adjust:
    """Browser to kernel: switch a perturbation on or off and set its strength (None keeps it)."""

    type: ClassVar[str] = "adjust"
    id: int
    perturbation: int
    enabled: bool
    strength: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remove:
    """Browser to kernel: remove a perturbation."""

    type: ClassVar[str] = "remove"
    id: int
    perturbation: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchAll:
    """Browser to kernel: switch all perturbations on or off."""

    type: ClassVar[str] = "switch_all"
    id: int
    enabled: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowNnx:
    """Browser to kernel: send the `Nnx` of the module at this site, before the reply."""

    type: ClassVar[str] = "show_nnx"
    id: int
    site: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchMode:
    """Browser to kernel: set a mode of one module for inspected passes, as `insp.modes.set` does;
    None restores the model's own mode.
    """

    type: ClassVar[str] = "switch_mode"
    id: int
    module: str
    name: str
    value: bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetMask:
    """Browser to kernel: set the mask of a perturbation (None: of a new one on `site`), `units`
    bits as in `Perturbation.mask`, along `axis` or, in rows of `columns`, from `axis` on.
    """

    type: ClassVar[str] = "set_mask"
    id: int
    perturbation: int | None
    site: str
    units: int
    mask: str
    axis: int = -1
    columns: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """Browser to kernel: send the present parameters, units or code of a site. They come before the
    reply, with the number of this request. Units are those along `axis`.
    """

    type: ClassVar[str] = "look"
    id: int
    what: Literal["parameters", "units", "code"]
    site: str
    axis: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartSweep:
    """Browser to kernel: perturb each of some sites alone, in a thread. `sites` is a glob; the
    other fields are as in `Perturb`.
    """

    type: ClassVar[str] = "start_sweep"
    id: int
    sites: str
    kind: str
    strength: float | None
    at: Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopSweep:
    """Browser to kernel: stop the running sweep after the pass that is being computed."""

    type: ClassVar[str] = "stop_sweep"
    id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowPass:
    """Browser to kernel: send the frame of the recording's pass `number`, with the histograms of
    `site`. Live frames continue.
    """

    type: ClassVar[str] = "show_pass"
    id: int
    number: int
    site: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Browser to kernel: compare the recording's pass `number` with `pinned`, site by site. Either
    may be OTHER. A `Compared` comes before the reply.
    """

    type: ClassVar[str] = "compare"
    id: int
    number: int
    pinned: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowValues:
    """Browser to kernel: make the arrays of a part of a site readable. `clean`: those of a pass
    without perturbations. An `Arrays` comes before the reply.
    """

    type: ClassVar[str] = "show_values"
    id: int
    site: str
    part: ValuePart
    clean: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadValues:
    """Browser to kernel: read a window of an array. A `Values` comes before the reply.

    `axes` are the axes shown as tiles, rows and columns (-1: none). `starts` and `ends` are the
    window along them, `most` is the largest number of blocks along them. `index` has a number for
    every axis; those of the shown axes are ignored. `norm_over` is an axis whose norms are read
    instead of values, or -1; `axes` and `index` then refer to the remaining axes. `exact`: read
    the values of a small window with every digit.
    """

    type: ClassVar[str] = "read_values"
    id: int
    array: int
    index: tuple[int, ...]
    axes: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    most: tuple[int, ...]
    norm_over: int
    component: Component
    exact: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowFlow:
    """Browser to kernel: send the `Flow` between the modules that a site calls."""

    type: ClassVar[str] = "show_flow"
    id: int
    site: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowOperations:
    """Browser to kernel: show (or hide) the operations within a site's call as rows."""

    type: ClassVar[str] = "show_operations"
    id: int
    site: str
    shown: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetLayoutLibrary:
    """Browser to kernel: send the `LayoutLibrary`; it is not part of the widget."""

    type: ClassVar[str] = "get_layout_library"
    id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """A kind of perturbation that the screen can add: a row of its menu, not a message.

    `does` completes the sentence "This will ...". `strength` is the default strength (None: it has
    none); `low` and `high` are the slider's range; `least` is the lowest allowed strength.
    """

    kind: str
    group: Literal["value", "gradient"]
    does: str
    strength_name: str = ""
    strength: float | None = None
    low: float = 0.0
    high: float = 0.0
    least: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowPositions:
    """Browser to kernel: read the figures of a site at each position of an example's tokens."""

    type: ClassVar[str] = "show_positions"
    id: int
    site: str
    example: int
    unit: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Browser to kernel: study the examined batch, in a thread. `example`, `position` and `unit`
    say what is shown of the result; `again` is False to show another part of the last result.
    `unembed` and `norm` are sites, "" for a proposal; `token` is a class or token, None for the
    model's own answer; `method` and `axis` are as in `nni.attribute` and `nni.top_examples`.
    """

    type: ClassVar[str] = "study"
    id: int
    what: Literal["lens", "logits", "attribution", "examples"]
    again: bool
    site: str
    example: int
    position: int
    unit: int
    axis: int
    token: int | None
    unembed: str
    norm: str
    method: Literal["gradient", "gradient_times_input", "integrated_gradients"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopStudy:
    """Browser to kernel: stop the study that runs and keep what it found."""

    type: ClassVar[str] = "stop_study"
    id: int
