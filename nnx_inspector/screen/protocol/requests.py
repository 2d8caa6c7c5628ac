"""Messages from the browser: what it may ask, one dataclass each."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from nnx_inspector.screen.protocol.terms import Component, Part, ValuePart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """Browser to kernel, on the control comm: a view is there; answer with everything.

    `streams` is False where the page has no other comm, because its front end makes a widget's
    model only when that widget is displayed (marimo): then all goes over control. `page` is another
    each time that the notebook is loaded; `said` counts the hellos of a page.
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
    """Browser to kernel: add one of the menu on one site, switched on. Without a strength it has
    the offer's own.
    """

    type: ClassVar[str] = "perturb"
    id: int
    site: str
    kind: str
    strength: float | None
    at: Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adjust:
    """Browser to kernel: switch a perturbation and set its strength (None leaves it)."""

    type: ClassVar[str] = "adjust"
    id: int
    perturbation: int
    enabled: bool
    strength: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remove:
    """Browser to kernel: take a perturbation away."""

    type: ClassVar[str] = "remove"
    id: int
    perturbation: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchAll:
    """Browser to kernel: switch all perturbations on, or off."""

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
    """Browser to kernel: switch a mode of one module for inspected passes, as `insp.modes.set`
    does; None takes the switch back.
    """

    type: ClassVar[str] = "switch_mode"
    id: int
    module: str
    name: str
    value: bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetMask:
    """Browser to kernel: the mask of a perturbation (None: of a new one on `site`), `units` bits
    as in `Perturbation.mask`.
    """

    type: ClassVar[str] = "set_mask"
    id: int
    perturbation: int | None
    site: str
    units: int
    mask: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """Browser to kernel: what is there of a site, at this moment. It comes before the reply, with
    the number of this request.
    """

    type: ClassVar[str] = "look"
    id: int
    what: Literal["parameters", "units", "code"]
    site: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartSweep:
    """Browser to kernel: perturb each of some sites alone, in a thread. `sites` is a glob, the
    rest as of `Perturb`.
    """

    type: ClassVar[str] = "start_sweep"
    id: int
    sites: str
    kind: str
    strength: float | None
    at: Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopSweep:
    """Browser to kernel: stop the sweep that runs, after what is being computed."""

    type: ClassVar[str] = "stop_sweep"
    id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowPass:
    """Browser to kernel: send the frame of the recording's pass `number`, with the histograms of
    `site`. Live frames go on.
    """

    type: ClassVar[str] = "show_pass"
    id: int
    number: int
    site: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Browser to kernel: compare the recording's pass `number` with `pinned`, site by site. A
    `Compared` comes before the reply. Each may be OTHER.
    """

    type: ClassVar[str] = "compare"
    id: int
    number: int
    pinned: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowValues:
    """Browser to kernel: make the arrays of a part of a site readable. `clean`: without what is
    perturbed. An `Arrays` comes before the reply.
    """

    type: ClassVar[str] = "show_values"
    id: int
    site: str
    part: ValuePart
    clean: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadValues:
    """Browser to kernel: a window of an array. A `Values` comes before the reply.

    `axes` are those shown as tiles, rows and columns (-1: none), `starts` and `ends` the window
    along them, `most` how many blocks there may be along them, `index` a number for every axis
    (those of the shown ones do not count). `norm_over` is an axis whose norms are read instead of
    the values, or -1; axes and index are then those of what is left. `exact`: values of a small
    window, every digit.
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
    """Browser to kernel: what flows between the modules that a site calls? A `Flow` comes."""

    type: ClassVar[str] = "show_flow"
    id: int
    site: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetLayoutLibrary:
    """Browser to kernel: send the `LayoutLibrary`; it is not part of the widget."""

    type: ClassVar[str] = "get_layout_library"
    id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """A kind of perturbation that the screen may add: no message, but a row of its menu.

    `does` ends the sentence "This will ...". `strength` is what it is added with at first (None:
    it has none); `low` and `high` are the slider's range; `least` is the least it may be.
    """

    kind: str
    group: Literal["value", "gradient"]
    does: str
    strength_name: str = ""
    strength: float | None = None
    low: float = 0.0
    high: float = 0.0
    least: float | None = None
