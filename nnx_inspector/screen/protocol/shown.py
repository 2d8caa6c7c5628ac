"""Messages to the browser: the rows, the passes, and everything that is on screen all the time."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal


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
    bits), so its edges are read from the float with those bits. See `nnx_inspector.stats.summary`.
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
    program has no place for it yet and another one is being made, while the old one goes on;
    `not_acting`, why it does nothing in what ran last ("" where it acts, or that is not known).
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
    not_acting: str


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
    """What inspection costs. Seconds are medians of recent steps that were not measured, and of
    such as were and are like them in all else: both perturbed, or neither. None where there are
    none.
    """

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
