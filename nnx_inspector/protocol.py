"""The messages between kernel and browser: what travels, in which shape, and nothing else.

Every message is a JSON header (one of the dataclasses below, with its name in `type`) and at most
one binary buffer. These types are the authority: `js/src/protocol.ts` and the golden messages are
generated from them. Invariant: headers are valid JSON (never NaN) and hold no arrays of numbers.
Knows no jax, no widget and no model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import numpy as np

VERSION: Final = 4

QUANTITIES: Final = ("output", "gradient")
"""What is measured at a site; the second axis of `Frame`'s table."""

STATISTICS: Final = (
    "size", "mean", "std", "min", "max", "norm", "zeros", "nan", "posinf", "neginf"
)  # fmt: skip
"""The figures of one summary; the third axis of `Frame`'s table. All NaN: not measured."""

SPARK: Final = 32
"""Heights in a sparkline: bytes, the highest is 255."""

HISTORY_QUANTILES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
HISTORY_BINS: Final = 48

MOST_SITES: Final = 100
"""Sites that are named of one perturbation; `reach` counts them all."""
MOST_EFFECTS: Final = 12
"""Downstream sites in an `Effect`."""
MOST_FINDINGS: Final = 30
"""In a `Findings`; `more` counts the others."""

MOST_NODES: Final = 200
"""Nodes of a graphdef in an `Nnx`; `nodes_total` counts them all, and so for what follows."""
MOST_VARIABLES: Final = 300
MOST_MODES: Final = 60
MOST_ATTRIBUTES: Final = 24
"""Static attributes that are told of one node."""
MOST_ALIASES: Final = 4
"""Other paths that are told of one node or Variable."""
LONGEST_ERROR: Final = 400
"""Characters of what is wrong with a message."""
LONGEST_TEXT: Final = 160
"""Characters of one text of a user's model in an `Nnx`."""

MOST_UNITS: Final = 16_384
"""Units of a mask that can be edited on screen, and of a `UnitFigures`."""
MOST_ROWS: Final = 300
"""Sites in a `Sweep`, ranked; `measured` counts them all."""

UNIT_FIGURES: Final = ("mean", "std", "norm", "min", "max", "zero_fraction", "nonfinite")
"""What is known of each unit; the first axis of the buffer of `UnitFigures`."""

Part = Literal["output", "input"]
"""Where at a site a perturbation of a value or of its gradient acts."""


ValuePart = Literal["output", "input", "gradient", "parameter"]
"""Which arrays of a site."""
Component = Literal["value", "real", "imag", "abs"]
"""What of complex numbers is shown; "value" is their magnitude."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """One row of the tree. `parent` is an index into the layout's sites, -1 for the root.

    `layer` is the number of a single layer of a stacked module, -1 for a whole site. `note` says
    what a row leaves out, "" for nothing.
    """

    key: str
    name: str
    kind: str
    parent: int
    depth: int
    inputs: str
    output: str
    parameters: int
    flops: float | None
    calls: int
    stacked: int
    aliases: tuple[str, ...]
    source: str
    perturbable: bool
    unseen: str
    layer: int = -1
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The sites that later frames refer to by index. Buffer: none."""

    type: ClassVar[str] = "layout"
    version: int
    layout: int
    model: str
    sites: tuple[Site, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands. `total` and `rate` (steps a second) are None while unknown."""

    kind: str
    running: bool
    step: int
    total: int | None
    rate: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram:
    """A full histogram in a frame's buffer: `bins` pairs (bin, count) of one site's quantity.

    A bin is the upper 12 bits of the float32 values it holds (sign, exponent, three mantissa
    bits), so its edges are read from the float with those bits. See `nnx_inspector.summary`.
    """

    site: int
    quantity: int
    bins: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """One pass. Buffer: float64 table [site, quantity, statistic], then for each of `histograms`
    float64 [bins, 2], then uint8 sparklines [site, quantity, SPARK].

    `number` is the pass's in the recording. `held` says that a ShowPass asked for it; a live frame
    is of the newest pass.
    """

    type: ClassVar[str] = "frame"
    version: int
    seq: int
    layout: int
    step: int
    perturbed: bool
    metrics: dict[str, float | None]
    histograms: tuple[Histogram, ...]
    progress: Progress
    number: int
    held: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """One site's quantity over the steps so far. Buffer, all float64: steps [steps]; quantiles
    [steps, len(HISTORY_QUANTILES)]; edges [HISTORY_BINS + 1]; fractions [steps, HISTORY_BINS].
    Edges are spaced on a symmetric-log axis; fractions of one step add up to 1. A step in which
    nothing finite was measured is NaN throughout.
    """

    type: ClassVar[str] = "history"
    version: int
    layout: int
    site: int
    quantity: int
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """The metrics over the steps so far. Buffer: for each of `names`, float64 [points, 2]: step
    and value (NaN where it was not finite), `points[i]` rows for `names[i]`.
    """

    type: ClassVar[str] = "curves"
    version: int
    names: tuple[str, ...]
    points: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes that the recording still has, oldest first. Buffer: float64 [passes, 5]: number,
    step, whether something was perturbed (0 or 1), index into `kinds`, and which setting was in
    force: another number than that of the pass before says that what is perturbed changed. 0 says
    that nothing was perturbed, or that it is not known what was. `thinned` older ones are gone.
    """

    type: ClassVar[str] = "passes"
    version: int
    passes: int
    kinds: tuple[str, ...]
    thinned: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perturbation:
    """One perturbation in force (or switched off), as the browser shows it.

    `site` is the pattern it was made with; `sites` are the keys it acts on, the first MOST_SITES
    of `reach`. `kind` is its class and `expression` the Python text that makes it. `strength` is
    the one number that can be tuned, called `strength_name` (None and "": there is none); `low`
    and `high` are its slider's range, and restrict nothing. `units` is the length of a boolean
    mask along its axis (0: it is none), `units_off` how many of them it switches off; `mask` is
    its bits in hexadecimal, unit 0 the highest bit of the first byte, 1 is on ("" where there is
    none that can be edited). `python` is the text that adds it in a cell, "" for one that holds an
    array of the user's. `pending`
    says that the running loop takes it over at its next step; `compiling`, that the running
    program has no place for it yet and another one is being made, while the old one goes on.
    """

    id: int
    site: str
    sites: tuple[str, ...]
    reach: int
    kind: str
    at: Literal["output", "input", "parameter"]
    acts_on: Literal["value", "gradient", "parameter"]
    expression: str
    strength: float | None
    strength_name: str
    low: float
    high: float
    units: int
    units_off: int
    mask: str
    python: str
    enabled: bool
    pending: bool
    compiling: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteEffect:
    """How far one site's output moved: `|perturbed - clean| / |clean|`, a fraction; None where
    that is not finite.
    """

    site: str
    change: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EffectAlone:
    """What one of several perturbations changes by itself; see `Effect`."""

    perturbation: int
    loss_change: float | None
    output_change: float | None
    kl: float | None
    top1_changed: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """The perturbed pass beside the clean one. Values by metric name ("loss" first).

    `output_change` is the relative norm of the difference of the outputs; where those are logits,
    `kl` is the mean divergence of the perturbed from the clean distribution in nats, and
    `top1_changed` the fraction of predictions that are others. None: not measured, or without
    meaning. `sites` are those downstream that moved most, at most MOST_EFFECTS, largest first.
    `alone`: where several perturbations are on, each by itself; () until that is measured.
    """

    source: str
    clean: dict[str, float | None]
    perturbed: dict[str, float | None]
    output_change: float | None
    kl: float | None
    top1_changed: float | None
    sites: tuple[SiteEffect, ...]
    alone: tuple[EffectAlone, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What inspection costs. Seconds are medians of recent steps, None until measured."""

    plain_seconds: float | None
    inspected_seconds: float | None
    compilations: int
    bytes_sent: int
    frames_dropped: int
    errors: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notice:
    """Something the person should know: `level` is "info", "warning" or "error"."""

    level: str
    text: str
    site: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """Everything small that the screen shows, whole each time. Buffer: none.

    `training_perturbed` is True while a watched loop runs with a perturbation that is on.
    `no_effect` says why there is no effect to show. `listening` says how a change reaches a
    running loop: "during" a cell (the kernel handles messages beside it), because the loop runs
    in a "thread", or "after" the cell has ended. `compiling` counts the perturbations for which
    a program is being compiled. `python` is the text that does in a cell what the screen was
    asked for last.
    """

    type: ClassVar[str] = "state"
    version: int
    seq: int
    selected: str
    perturbations: tuple[Perturbation, ...]
    training_perturbed: bool
    listening: Literal["during", "thread", "after"]
    compiling: int
    effect: Effect | None
    no_effect: str
    progress: Progress
    cost: Cost
    notices: tuple[Notice, ...]
    python: str
    closed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxAttribute:
    """A static attribute of a node: part of the graphdef, hence of a compiled program's key."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxNode:
    """One node of the graphdef, under one of its paths.

    `module` is the site key where it is a module, else None. `reference` is the number that all
    paths to one object have, 0 where there is one path only. `first` is None, or the path above
    where the same object stood already: what is inside is not told again. `also` are its paths
    elsewhere in the model.
    """

    path: str
    name: str
    type: str
    depth: int
    module: str | None
    reference: int
    first: str | None
    also: tuple[str, ...]
    attributes: tuple[NnxAttribute, ...]
    attributes_total: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxChange:
    """How a Variable's value moved: `distance` is the norm of the difference, `relative` that over
    the norm of the value before; None where that says nothing (a PRNG key, a norm of 0, another
    shape). `before` and `after` are the values of a scalar, else "".
    """

    same: bool
    distance: float | None
    relative: float | None
    before: str
    after: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxVariable:
    """One leaf of the state: a Variable, or an array that is none (`type` is "").

    `path`, `module`, `reference`, `first` and `also` are as of an `NnxNode`; `module` is the
    innermost one around it. `value` is that of a scalar, else "". `committed` is None for what is
    no array on a device. `change` is between two looks at the model, `passed` what the last pass
    of the inspector changed in its own copy; None where there is nothing to compare.
    """

    path: str
    module: str
    type: str
    shape: str
    dtype: str
    bytes: int
    sharding: str
    held: Literal["array", "traced", "deleted", "shape", "reference", "other"]
    committed: bool | None
    metadata: str
    value: str
    reference: int
    first: str | None
    also: tuple[str, ...]
    change: NnxChange | None
    passed: NnxChange | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxKind:
    """All Variables of one type in a module, a shared one once."""

    type: str
    variables: int
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxMode:
    """A mode of a module. `value` is the one in force where that is True or False, else None;
    `flag` says that it takes these only, `switched` that it is not the model's own.
    """

    module: str
    type: str
    name: str
    own: str
    in_force: str
    value: bool | None
    flag: bool
    switched: bool
    documentation: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nnx:
    """The module at a site as NNX sees it, in answer to the ShowNnx with this id. Buffer: none.

    `nodes` come parents first; `variables` in the order of their paths. `since` is the step of the
    look that `change` compares with, None where there was none; `passed` is the pass of
    `NnxVariable.passed`, "run", "step" or "". `uncompared` says why Variables have no `change`.
    """

    type: ClassVar[str] = "nnx"
    version: int
    id: int
    site: str
    nodes: tuple[NnxNode, ...]
    nodes_total: int
    variables: tuple[NnxVariable, ...]
    variables_total: int
    kinds: tuple[NnxKind, ...]
    modes: tuple[NnxMode, ...]
    modes_total: int
    step: int
    since: int | None
    passed: str
    uncompared: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a module: its path, and its dtype and shape in words. `bins` pairs of its
    histogram are in the buffer of `Parameters`.
    """

    path: str
    array: str
    bins: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters of a module as they are now, for a `Look`. Buffer: float64 [parameters,
    statistic], then for each of them float64 [bins, 2], as in a `Frame`. `more` counts those that
    are left out, `why` says why there are none.
    """

    type: ClassVar[str] = "parameters"
    version: int
    id: int
    site: str
    parameters: tuple[Parameter, ...]
    more: int
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitFigures:
    """Figures for each unit of the last axis of what a site returns, for a `Look`. Buffer:
    float64 [UNIT_FIGURES, units], NaN where nothing finite was seen. `each` is how many values a
    unit has in that pass, `source` which pass it was, `more` counts the units that are left out,
    `why` says why there are none.
    """

    type: ClassVar[str] = "units"
    version: int
    id: int
    site: str
    each: int
    source: str
    units: int
    more: int
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Excerpt:
    """Lines of a file from `first` on; `line` is the one that makes a call, in `function`."""

    file: str
    function: str
    first: int
    line: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Code:
    """Where a module is called and what its type says of itself, for a `Look`. Buffer: none.
    `sown` are the sites of the values that the module hands to `sow` or `perturb`.
    """

    type: ClassVar[str] = "code"
    version: int
    id: int
    site: str
    kind: str
    documentation: str
    excerpts: tuple[Excerpt, ...]
    sown: tuple[str, ...]
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRow:
    """What perturbing one site alone does; `why_not` says why it could not be measured. None
    where a figure is not finite, or not among the `measures`.
    """

    site: str
    loss_change: float | None
    output_change: float | None
    kl: float | None
    top1_changed: float | None
    why_not: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The sweep that runs or ran last. Buffer: none.

    `sites` is the selection and `perturbation` the Python text of what is done at each; `source`
    names the pass. `total` is 0 until it is known; a program is compiled while `done` is 0.
    `measures` are the figures that there are, of the fields of `rows`. `rows` come at its end,
    the first MOST_ROWS of `measured`, largest change first. `error` says why it failed.
    """

    type: ClassVar[str] = "sweep"
    version: int
    running: bool
    stopped: bool
    done: int
    total: int
    sites: str
    perturbation: str
    source: str
    measures: tuple[str, ...]
    loss: float | None
    rows: tuple[SweepRow, ...]
    measured: int
    error: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldArray:
    """One array that can be read: `number` names it in `ReadValues`, `call` counts the calls of
    the site, `name` tells it from the others of its call ("" where it is alone).
    """

    number: int
    call: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays:
    """What `ShowValues` opened: the arrays of a part of a site. `parts` are those there are of the
    site; `perturbed` says that something is perturbed in this pass; `source` says in words which
    pass and which parameters these are, `notes` what else a person should know.
    """

    type: ClassVar[str] = "arrays"
    version: int
    request: int
    site: str
    part: ValuePart
    clean: bool
    parts: tuple[str, ...]
    arrays: tuple[HeldArray, ...]
    perturbed: bool
    source: str
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    """What `ReadValues` asked for: a window of an array in blocks. Buffer: for each of `planes` an
    array [tiles, rows, columns] of `encoding`, each padded to a multiple of 8 bytes.

    With blocks of one element the plane is "value" (for exact values of complex numbers "real" and
    "imag"). Otherwise "mean", "low" and "high" of the finite values of each block (NaN where there
    are none) and, where any value is not finite, "nan", "posinf" and "neginf": how many of each
    block are. `starts` and `ends` are of tiles, rows and columns, in elements; `block` likewise.
    """

    type: ClassVar[str] = "values"
    version: int
    request: int
    array: int
    index: tuple[int, ...]
    axes: tuple[int, ...]
    norm_over: int
    component: Component
    exact: bool
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    block: tuple[int, ...]
    counts: tuple[int, ...]
    planes: tuple[str, ...]
    encoding: Literal["float32", "float64", "int64", "uint64"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowNode:
    """A node of a `Flow`. `role`: a "module" that is called in it; its "input" or "output"; a
    "join", one value that is made of several; or "outside": a module elsewhere that gives or takes
    a value by another way than arguments and results. `name` is the key as seen from the flow's
    site. `output` is what it gives, in words (of an "output": what it takes). `calls` counts the
    calls in one call of the site; `times` the loops around them too (None: a while loop).
    `conditional`: it is called in a branch that may not be taken.
    """

    role: Literal["module", "input", "output", "join", "outside"]
    site: str
    name: str
    kind: str
    output: str
    calls: int
    times: int | None
    conditional: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowEdge:
    """Values that go from one node to another (numbers of nodes), by dtype and shape; `shapes` is
    empty where they are not known. `loop`: from one iteration of a loop to a later one.
    """

    producer: int
    consumer: int
    shapes: tuple[str, ...]
    loop: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowAbsent:
    """A module below a flow's site that is not called in it, and why."""

    site: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """What flows between the modules that a site calls. `id` is the request's. Buffer: none."""

    type: ClassVar[str] = "flow"
    version: int
    layout: int
    site: str
    id: int
    nodes: tuple[FlowNode, ...]
    edges: tuple[FlowEdge, ...]
    absent: tuple[FlowAbsent, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutLibrary:
    """What lays a flow out. Buffer: a JavaScript module in UTF-8, `static/layout.js`."""

    type: ClassVar[str] = "layout_library"
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FindingRow:
    """One thing that is wrong, or may be; see `findings.Finding`."""

    rule: str
    site: str
    step: int
    severity: Literal["error", "warning", "info"]
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What is wrong as far as the rules can tell, worst first. Buffer: none. `more` counts what is
    left out beyond MOST_FINDINGS.
    """

    type: ClassVar[str] = "findings"
    version: int
    findings: tuple[FindingRow, ...]
    more: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """The one answer to a request. `error` is "" when it succeeded."""

    type: ClassVar[str] = "reply"
    id: int
    ok: bool
    error: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """Browser to kernel, on the control comm: a view is there; answer with everything.

    `streams` is False where the page has no other comm, because its front end makes a widget's
    model only when that widget is displayed (marimo): then all goes over control. `page` is another
    each time that the notebook is loaded.
    """

    type: ClassVar[str] = "hello"
    version: int
    streams: bool
    page: str


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
    """Browser to kernel: add one of OFFERS on one site, switched on. Without a strength it has
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
    """A kind that the screen may add: no message, but a row of OFFERS.

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


OFFERS: Final = (
    Offer(kind="Zero", group="value", does="replace it by zeros"),
    Offer(kind="Mean", group="value", does="replace it by its mean over the batch"),
    Offer(
        kind="Scale", group="value", does="multiply it by the factor",
        strength_name="factor", strength=1.0, low=0.0, high=2.0,
    ),
    Offer(
        kind="Shift", group="value", does="add the strength to every number",
        strength_name="strength", strength=1.0, low=-2.0, high=2.0,
    ),
    Offer(
        kind="Noise", group="value", does="add Gaussian noise of this std",
        strength_name="std", strength=0.1, low=0.0, high=1.0, least=0.0,
    ),
    Offer(
        kind="Clamp", group="value", does="cut it off at ± the limit",
        strength_name="limit", strength=1.0, low=0.0, high=4.0, least=0.0,
    ),
    Offer(kind="Cast", group="value", does="round it to bfloat16 and back"),
    Offer(
        kind="ScaleGradient", group="gradient", does="multiply its gradient by the factor",
        strength_name="factor", strength=1.0, low=0.0, high=2.0,
    ),
    Offer(kind="StopGradient", group="gradient", does="let no gradient back through it"),
    Offer(
        kind="ReverseGradient", group="gradient", does="multiply its gradient by −factor",
        strength_name="factor", strength=1.0, low=0.0, high=2.0,
    ),
    Offer(
        kind="ClipGradient", group="gradient", does="limit its gradient to this norm",
        strength_name="norm", strength=1.0, low=0.0, high=10.0, least=0.0,
    ),
)  # fmt: skip
"""What can be added by a click, in the order of the menu. Python can do more."""

TO_BROWSER: Final = (
    Layout, Frame, History, Curves, State, Reply, Flow, LayoutLibrary, Arrays, Values, Passes,
    Parameters, UnitFigures, Code, Sweep, Nnx, Findings,
)  # fmt: skip
TO_KERNEL: Final = (
    Hello, Ack, Select, Perturb, Adjust, SwitchAll, Remove, ShowFlow, GetLayoutLibrary,
    ShowValues, ReadValues, ShowPass, SetMask, Look, StartSweep, StopSweep, ShowNnx, SwitchMode,
)  # fmt: skip
_TYPES: Final = {cls.type: cls for cls in (*TO_BROWSER, *TO_KERNEL)}


class ProtocolError(ValueError):
    """A message that does not fit its type. Its text is bounded, whatever the message held."""

    def __init__(self, text: str):
        super().__init__(text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]} …")


def to_header(message: Any) -> dict[str, Any]:
    """The JSON header of a message.

    Floats that are not finite become None: a header is always valid JSON.
    """
    header = _plain(message)
    header["type"] = message.type
    return header


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str) and not value.isascii():
        # half of a surrogate pair, which Python takes for a name, is no text that can be sent
        return value.encode("utf-8", "replace").decode("utf-8")
    return value


def from_header(header: Any) -> Any:
    """The message of a JSON header, checked field by field.

    Raises:
        ProtocolError: the header is not an object, its type is unknown, a field is missing,
            unknown, or of another type than declared.
    """
    if not isinstance(header, Mapping):
        raise ProtocolError(f"A message must be an object, got {type(header).__name__}.")
    kind = header.get("type")
    cls = _TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError(f"Unknown message type {kind!r}.")
    return _build(cls, {k: v for k, v in header.items() if k != "type"}, cls.type)


def _build(cls: type, fields: Mapping[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    if missing := names - fields.keys():
        raise ProtocolError(f"Message {where!r} lacks {sorted(missing)}.")
    if unknown := fields.keys() - names:
        raise ProtocolError(f"Message {where!r} has unknown fields {sorted(unknown)}.")
    return cls(**{n: _checked(hints[n], fields[n], f"{where}.{n}") for n in names})


def _checked(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is Literal:
        words = typing.get_args(hint)
        if not isinstance(value, str) or value not in words:
            raise ProtocolError(f"{where} must be {_either(words)}, got {value!r}.")
        return value
    if origin in (typing.Union, types.UnionType):
        inner = [h for h in typing.get_args(hint) if h is not type(None)]
        return None if value is None else _checked(inner[0], value, where)
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ProtocolError(f"{where} must be a list, got {type(value).__name__}.")
        item = typing.get_args(hint)[0]
        return tuple(_checked(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{where} must be an object, got {type(value).__name__}.")
        item = typing.get_args(hint)[1]
        return {str(k): _checked(item, v, f"{where}[{k!r}]") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{where} must be an object, got {type(value).__name__}.")
        return _build(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ProtocolError(f"{where} must be {hint.__name__}, got {type(value).__name__}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ProtocolError(f"{where} must be finite.")
    return value


def _either(words: Sequence[str]) -> str:
    return " or ".join(map(repr, words))


def frame_buffer(
    table: np.ndarray, histograms: Sequence[np.ndarray], sparklines: np.ndarray
) -> bytes:
    """The buffer of a `Frame`: see its docstring for the order. Little-endian throughout."""
    parts = [np.ascontiguousarray(table, "<f8").tobytes()]
    parts += [np.ascontiguousarray(h, "<f8").tobytes() for h in histograms]
    parts.append(np.ascontiguousarray(sparklines, "u1").tobytes())
    return b"".join(parts)


def history_buffer(
    steps: np.ndarray, quantiles: np.ndarray, edges: np.ndarray, fractions: np.ndarray
) -> bytes:
    """The buffer of a `History`."""
    arrays = (steps, quantiles, edges, fractions)
    return b"".join(np.ascontiguousarray(a, "<f8").tobytes() for a in arrays)


def curves_buffer(curves: Sequence[np.ndarray]) -> bytes:
    """The buffer of a `Curves`: one float64 [points, 2] for each name."""
    return b"".join(np.ascontiguousarray(c, "<f8").tobytes() for c in curves)


def parameters_buffer(table: np.ndarray, histograms: Sequence[np.ndarray]) -> bytes:
    """The buffer of a `Parameters`: float64 [parameters, statistic], then each histogram."""
    return b"".join(np.ascontiguousarray(a, "<f8").tobytes() for a in (table, *histograms))


def units_buffer(figures: np.ndarray) -> bytes:
    """The buffer of a `UnitFigures`: float64 [UNIT_FIGURES, units]."""
    return np.ascontiguousarray(figures, "<f8").tobytes()


def passes_buffer(rows: Sequence[Sequence[float]]) -> bytes:
    """The buffer of a `Passes`: number, step, perturbed, kind and setting of each."""
    return np.array(rows, "<f8").reshape(-1, 5).tobytes()


def values_buffer(planes: Sequence[np.ndarray], encoding: str) -> bytes:
    """The buffer of a `Values`: see its docstring."""
    dtypes = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "uint64": "<u8"}
    parts = [np.ascontiguousarray(p, dtypes[encoding]).tobytes() for p in planes]
    return b"".join(part + bytes(-len(part) % 8) for part in parts)


def to_json(message: Any) -> str:
    """The header as text, for size accounting and the golden messages."""
    return json.dumps(to_header(message), allow_nan=False, ensure_ascii=False, sort_keys=True)
