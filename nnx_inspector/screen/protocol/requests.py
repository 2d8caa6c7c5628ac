"""Messages from the browser: one dataclass for each request."""

from __future__ import annotations

from typing import Literal

from nnx_inspector.screen.protocol.constants import Component, Part, ValuePart
from nnx_inspector.screen.protocol.headers import Request, Struct, ToKernel


class Hello(ToKernel, type="hello"):
    """Browser to kernel, on the control comm: a view has opened; send it everything.

    `streams` is False if the page has no stream comm, because its front end makes a widget's model
    only when the widget is displayed (marimo): then everything goes over control. `page` is new
    each time the notebook is loaded; `said` counts the hellos of a page.
    """

    version: int
    streams: bool
    page: str
    said: int


class Ack(ToKernel, type="ack"):
    """Browser to kernel: the frame with this number has been drawn."""

    seq: int


class Select(Request, type="select"):
    """Browser to kernel: show this site's histogram and history."""

    site: str


class ChooseExample(Request, type="choose_example"):
    """Browser to kernel: later views and saved pages begin with this example."""

    example: int


class ChooseBatch(Request, type="choose_batch"):
    """Browser to kernel: all panels look at the batch of the last forward pass ("run"), or of the
    last step; that pass is made again.
    """

    which: Literal["run", "step"]


class Perturb(Request, type="perturb"):
    """Browser to kernel: add a perturbation of the menu to one site, switched on. A `strength` of
    None means the offer's default. `units` along `axis` are those that change; () for all.
    """

    site: str
    kind: str
    strength: float | None
    at: Part
    units: tuple[int, ...] = ()
    axis: int = -1


class Adjust(Request, type="adjust"):
    """Browser to kernel: switch a perturbation on or off and set its strength (None keeps it)."""

    perturbation: int
    enabled: bool
    strength: float | None


class Remove(Request, type="remove"):
    """Browser to kernel: remove a perturbation."""

    perturbation: int


class SwitchAll(Request, type="switch_all"):
    """Browser to kernel: switch all perturbations on or off."""

    enabled: bool


class SetEvery(Request, type="set_every"):
    """Browser to kernel: let a run that happens elsewhere measure every `every`-th step."""

    every: int


class MeasureNext(Request, type="measure_next"):
    """Browser to kernel: let a run that happens elsewhere measure its next step too."""


class ReadSite(Request, type="read_site"):
    """Browser to kernel: let a run that happens elsewhere send what a site returns in its next
    step; of an `example`, its entry of the first axis alone.
    """

    site: str
    example: int | None = None


class ShowNnx(Request, type="show_nnx"):
    """Browser to kernel: send the `Nnx` of the module at this site, before the reply."""

    site: str


class SwitchMode(Request, type="switch_mode"):
    """Browser to kernel: set a mode of one module for inspected passes, as `insp.modes.set` does;
    None restores the model's own mode.
    """

    module: str
    name: str
    value: bool | None


class SetMask(Request, type="set_mask"):
    """Browser to kernel: set the mask of a perturbation (None: of a new one on `site`), `units`
    bits as in `Perturbation.mask`, along `axis` or, in rows of `columns`, from `axis` on.
    """

    perturbation: int | None
    site: str
    units: int
    mask: str
    axis: int = -1
    columns: int = 0


class OpenBeside(Request, type="open_beside"):
    """Browser to kernel: show the view beside the notebook, in a pane of its own."""


class Look(Request, type="look"):
    """Browser to kernel: send the units or code of a site, or (of no site) what was compiled, or
    what lower precision would make of the newest pass. They come before the reply, with the number
    of this request. Units are those along `axis`.
    """

    what: Literal["units", "code", "compilations", "casts"]
    site: str
    axis: int = -1


class StartSweep(Request, type="start_sweep"):
    """Browser to kernel: perturb each of some sites alone, in a thread. `sites` is a glob; the
    other fields are as in `Perturb`. A `kind` of "" means the default of `nni.sweep`.
    """

    sites: str
    kind: str
    strength: float | None
    at: Part


class StopSweep(Request, type="stop_sweep"):
    """Browser to kernel: stop the running sweep after the pass that is being computed."""


class ShowPass(Request, type="show_pass"):
    """Browser to kernel: send the frame of the recording's pass `number`, with the histograms of
    `site`. Live frames continue.
    """

    number: int
    site: str


class Compare(Request, type="compare"):
    """Browser to kernel: compare the recording's pass `number` with `pinned`, site by site. Either
    may be OTHER. A `Compared` comes before the reply.
    """

    number: int
    pinned: int


class ShowValues(Request, type="show_values"):
    """Browser to kernel: make the arrays of a part of a site readable. `clean`: those of a pass
    without perturbations. An `Arrays` comes before the reply.
    """

    site: str
    part: ValuePart
    clean: bool


class ReadValues(Request, type="read_values"):
    """Browser to kernel: read a window of an array. A `Values` comes before the reply.

    `axes` are the axes shown as tiles, rows and columns (-1: none). `starts` and `ends` are the
    window along them, `most` is the largest number of blocks along them. `index` has a number for
    every axis; those of the shown axes are ignored. `norm_over` is an axis whose norms are read
    instead of values, or -1; `axes` and `index` then refer to the remaining axes. `exact`: read
    the values of a small window with every digit.
    """

    array: int
    index: tuple[int, ...]
    axes: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    most: tuple[int, ...]
    norm_over: int
    component: Component
    exact: bool


class ShowFlow(Request, type="show_flow"):
    """Browser to kernel: send the `Flow` between the modules that a site calls."""

    site: str


class ShowOperations(Request, type="show_operations"):
    """Browser to kernel: show (or hide) the operations within a site's call as rows."""

    site: str
    shown: bool


class GetLayoutLibrary(Request, type="get_layout_library"):
    """Browser to kernel: send the `LayoutLibrary`; it is not part of the widget."""


class Offer(Struct):
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


class ShowPositions(Request, type="show_positions"):
    """Browser to kernel: read the figures of a site at each position of an example's tokens, along
    `axis`; None to find it.
    """

    site: str
    example: int
    unit: int
    axis: int | None


class Study(Request, type="study"):
    """Browser to kernel: study the examined batch, in a thread. `example`, `position` and `unit`
    say what is shown of the result; `again` is False to show another part of the last result.
    `unembed` and `norm` are sites, "" for a proposal; `token` is a class or token, None for the
    model's own answer; `method` and `axis` are as in `nni.attribute` and `nni.top_examples`.
    """

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


class StopStudy(Request, type="stop_study"):
    """Browser to kernel: stop the study that runs and keep what it found."""
