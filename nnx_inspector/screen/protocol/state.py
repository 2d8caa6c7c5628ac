"""Messages to the browser: the rows, the passes, and everything that is always on screen."""

from __future__ import annotations

from typing import Literal

from nnx_inspector.recordings.tree_rows import Site as Site
from nnx_inspector.screen.protocol.headers import Message, Struct, ToBrowser


class Layout(ToBrowser, type="layout"):
    """The sites that later frames refer to by index. Buffer: none. `attending` are the keys of
    those whose call computes an attention. `sequences` is whether the model reads sequences, which
    is where a lens can work. `where` says which positions the sites that are `counted` count, as a
    clause; "" for all.
    """

    layout: int
    model: str
    sites: tuple[Site, ...]
    attending: tuple[str, ...] = ()
    sequences: bool = False
    where: str = ""


class Progress(Struct):
    """The progress of a run. `total` and `rate` (steps per second) are None while unknown."""

    kind: str
    running: bool
    step: int
    total: int | None
    rate: float | None


class Histogram(Struct):
    """A full histogram in a frame's buffer: the counts of one site's quantity, in `bytes` bytes as
    a recording keeps them (`nnx_inspector.stats.encoding`).

    A bin is the upper 12 bits of the float32 values in it (sign, exponent, three mantissa bits),
    so the float with those bits gives its edges. The counts of a sample are still to be scaled up.
    """

    site: int
    quantity: int
    bytes: int


class FrameParameter(Struct):
    """A parameter that the selected site itself holds, in one pass; `name` is its path below the
    site. `update_ratio` is the norm of the change that the step made, divided by the norm of the
    value before: 0 in a step without an update, None if no update was seen (or the value was 0).
    `bytes` is the length of each of its histograms in the buffer, in the order of
    PARAMETER_QUANTITIES; -1 for a quantity that was not measured.
    """

    path: str
    name: str
    update_ratio: float | None
    bytes: tuple[int, ...]


class Frame(ToBrowser, type="frame"):
    """One pass. Buffer: float64 table [site, quantity, statistic], float64 [site, ROW_STATS] (NaN
    for a row without parameters), float64 [parameter, PARAMETER_QUANTITIES, statistic], then uint8
    sparklines [site, quantity, SPARK], then the bytes of each of `histograms`, and of the
    histograms of each of `parameters`.

    `parameters` are those of the selected site, and `more` counts the others. `number` is the
    pass's number in the recording. `held`: a ShowPass asked for this frame; a live frame shows the
    newest pass.
    """

    seq: int
    layout: int
    step: int
    perturbed: bool
    metrics: dict[str, float | None]
    histograms: tuple[Histogram, ...]
    parameters: tuple[FrameParameter, ...]
    more: int
    progress: Progress
    number: int
    held: bool


class History(ToBrowser, type="history"):
    """One site's quantity over the steps so far. Buffer, all float64: steps [steps]; quantiles
    [steps, len(HISTORY_QUANTILES)]; edges [HISTORY_BINS + 1]; fractions [steps, HISTORY_BINS].
    Edges are spaced on a symmetric-log axis; the fractions of one step add up to 1. A step without
    a finite value is NaN throughout. With `parameter`, the path of one that the site holds, it is
    that of its value or gradient, and `quantity` is an index into PARAMETER_QUANTITIES.
    """

    layout: int
    site: int
    quantity: int
    steps: int
    parameter: str = ""


class Updates(ToBrowser, type="updates"):
    """The update ratios of the parameters of one site over the steps; see `FrameParameter`. Buffer,
    float64: steps [steps], then ratios [parameters, steps], then the shares of updates that round
    to nothing, alike; NaN where it is unknown. `inside`: the site holds none itself, and these are
    the ones within it that moved most.
    """

    layout: int
    site: int
    parameters: tuple[str, ...]
    steps: int
    inside: bool = False


class Choices(ToBrowser, type="choices"):
    """What each head of an attention, or each expert of a router, of one site did over the steps;
    `key` is as in `Recording.heads_frame` or `experts_frame`, and so are `figures`, but for
    "router_entropy", the "evenness" that all experts share. Buffer, float64: steps [steps], then
    [figures, rows, steps], NaN where it is unknown. `more` counts the rows that are left out.
    """

    layout: int
    site: int
    key: str
    experts: bool
    figures: tuple[str, ...]
    rows: int
    steps: int
    more: int


class Curves(ToBrowser, type="curves"):
    """The metrics over the steps so far. Buffer: for each of `names`, float64 [points, 2]: step
    and value (NaN if it was not finite), with `points[i]` rows for `names[i]`. The recording has
    `recorded[i]` values of it, and `not_finite[i]` of these are NaN or Inf.
    """

    names: tuple[str, ...]
    points: tuple[int, ...]
    recorded: tuple[int, ...]
    not_finite: tuple[int, ...]


class Passes(ToBrowser, type="passes"):
    """The passes that the recording still has, oldest first. Buffer: float64 [passes, 5]: number,
    step, whether something was perturbed (0 or 1), index into `kinds`, and the setting's number.
    That number differs from the one before if the perturbations changed; 0 means that nothing was
    perturbed, or that the perturbations are unknown. `thinned` older passes are gone.
    """

    passes: int
    kinds: tuple[str, ...]
    thinned: int


class Perturbation(Struct):
    """One perturbation in force (or switched off), as the browser shows it.

    `site` is the pattern it was made with; `sites` are the keys it acts on, the first MOST_SITES
    of `reach`. `kind` is its class and `expression` the Python text that makes it. `strength` is
    the one number that can be tuned, and `strength_name` its name (None and "": there is none);
    `low` and `high` are the slider's range, which is not a limit. `units` is the length of a
    boolean mask along its axis (0: it is not a mask) and `units_off` the number of units switched
    off. `mask` is its bits in hexadecimal: unit 0 is the highest bit of the first byte, 1 is on
    ("" if it cannot be edited), and `axis` the axis of the units; `columns` is the length of the
    second axis of a mask over two, 0 for one. `python` is the text that adds it
    in a cell, "" if it holds a user's array. `pending`: the running loop applies it from its next
    step on. `compiling`: a program with a place for it is being compiled while the old one runs.
    `not_acting` says why it does nothing in the last pass ("" if it acts, or if that is unknown).
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
    axis: int = -1
    columns: int = 0


class SiteEffect(Struct):
    """The change of one site's output, `|perturbed - clean| / |clean|`; None if not finite."""

    site: str
    change: float | None


class EffectAlone(Struct):
    """The effect of one of several perturbations by itself; see `Effect`."""

    perturbation: int
    loss_change: float | None
    output_change: float | None
    kl: float | None
    top1_changed: float | None


class Effect(Struct):
    """The perturbed pass beside the clean one. Values by metric name ("loss" first).

    `output_change` is the relative norm of the difference of the outputs. If they are logits, `kl`
    is the mean divergence of the perturbed from the clean distribution in nats, and `top1_changed`
    the fraction of predictions that changed. None: not measured, or meaningless. `sites` are the
    downstream sites that changed most, at most MOST_EFFECTS, largest first. `alone` is the effect
    of each of several perturbations by itself; () until it is measured. `moved` is, by site, the
    relative norm of the change of its output, None if that is not finite: of all sites, or of the
    MOST_MOVED that changed most.
    """

    source: str
    clean: dict[str, float | None]
    perturbed: dict[str, float | None]
    output_change: float | None
    kl: float | None
    top1_changed: float | None
    sites: tuple[SiteEffect, ...]
    alone: tuple[EffectAlone, ...]
    moved: dict[str, float | None]

    def __str__(self) -> str:
        """Loss and metrics, clean and perturbed, then the changes, a line for each."""
        known = [n for n, x in self.clean.items() if None not in (x, self.perturbed.get(n))]
        lines = [f"{n}: {self.clean[n]:.4g} -> {self.perturbed[n]:.4g}" for n in known]
        if self.output_change is not None:
            lines.append(f"the output changes by {self.output_change:.3g} of its norm")
        if self.kl is not None and self.top1_changed is not None:
            lines.append(f"KL divergence {self.kl:.3g}, {self.top1_changed:.1%} of top-1 changed")
        moved = [f"{s.site} {s.change:.3g}" for s in self.sites if s.change is not None]
        lines += ["downstream: " + ", ".join(moved)] if moved else []
        return "\n".join([f"effect on {self.source}", *(f"  {line}" for line in lines)])


class Cost(Struct):
    """The cost of inspection. Seconds are medians of recent steps, by their ends on the device: of
    plain steps, and of measured steps that are otherwise like them (both perturbed, or neither).
    None if there are no such steps. Three say how long the user waited: for the tree, for the first
    pass, and for the first measured step of a loop, with its compilation; None while unknown. The
    last has the CPU seconds that writing a pass to the user's tracker takes a thread.
    """

    plain_seconds: float | None
    inspected_seconds: float | None
    compilations: int
    bytes_sent: int
    frames_dropped: int
    errors: int
    tree_seconds: float | None = None
    pass_seconds: float | None = None
    step_seconds: float | None = None
    tracker_seconds: float | None = None


class Notice(Struct):
    """Something the user should know; `level` is "info", "warning" or "error"."""

    level: str
    text: str
    site: str | None


class Waiting(Struct):
    """Something that takes a while, such as "compiling the first pass", and the time so far."""

    what: str
    seconds: float


class Recorded(Struct):
    """A run that is read from its file. `text` says in a sentence how it is; `missing` names the
    panels that need the model. `steers` is whether it takes requests: then it measures every
    `every`-th step.
    """

    run: Literal["running", "stalled", "ended", "gone"]
    text: str
    missing: tuple[str, ...]
    steers: bool = False
    every: int = 0


class State(ToBrowser, type="state"):
    """Everything small that the screen shows; each message has all of it. Buffer: none.

    `training_perturbed` is True while a watched loop runs with a perturbation on. `no_effect` says
    why there is no effect to show. `listening` says how a change reaches a running loop: "during" a
    cell (messages are handled while any cell runs), at the "steps" of a loop of ours (in another
    cell, after its end), "thread" (the loop runs in a thread), or "after" the cell has ended.
    `compiling` counts the perturbations for which a program is being compiled. `python` is the
    Python equivalent of the last request from the screen. `waiting` names what the screen waits
    for. `recorded` is None if the model is here; otherwise there is no `cost`.
    """

    seq: int
    selected: str
    perturbations: tuple[Perturbation, ...]
    training_perturbed: bool
    listening: Literal["during", "steps", "thread", "after"]
    compiling: int
    effect: Effect | None
    no_effect: str
    progress: Progress
    cost: Cost | None
    notices: tuple[Notice, ...]
    python: str
    closed: bool
    waiting: tuple[Waiting, ...] = ()
    recorded: Recorded | None = None


class FindingRow(Struct):
    """One thing that is or may be wrong; see `findings.Finding`. `effects` says what follows from
    it, a clause each, and `gone` since which step it is over.
    """

    rule: str
    site: str
    step: int
    severity: Literal["error", "warning", "info"]
    what: str
    advice: str
    effects: tuple[str, ...] = ()
    gone: int | None = None


class Findings(ToBrowser, type="findings"):
    """The findings of the rules, worst first. Buffer: none. `more` counts those left out."""

    findings: tuple[FindingRow, ...]
    more: int


class Reply(Message, type="reply"):
    """The one answer to a request. `error` is "" if the request succeeded."""

    id: int
    ok: bool
    error: str
