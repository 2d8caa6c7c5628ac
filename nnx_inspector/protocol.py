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

VERSION: Final = 2

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

Part = Literal["output", "input"]
"""Where at a site a perturbation of a value or of its gradient acts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """One row of the tree. `parent` is an index into the layout's sites, -1 for the root."""

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
class Perturbation:
    """One perturbation in force (or switched off), as the browser shows it.

    `site` is the pattern it was made with; `sites` are the keys it acts on, the first MOST_SITES
    of `reach`. `kind` is its class and `expression` the Python text that makes it. `strength` is
    the one number that can be tuned, called `strength_name` (None and "": there is none); `low`
    and `high` are its slider's range, and restrict nothing. `units` is the length of a boolean
    mask along its axis (0: it is none), `units_off` how many of them it switches off. `pending`
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
class Effect:
    """The perturbed pass beside the clean one. Values by metric name ("loss" first).

    `output_change` is the relative norm of the difference of the outputs; where those are logits,
    `kl` is the mean divergence of the perturbed from the clean distribution in nats, and
    `top1_changed` the fraction of predictions that are others. None: not measured, or without
    meaning. `sites` are those downstream that moved most, at most MOST_EFFECTS, largest first.
    """

    source: str
    clean: dict[str, float | None]
    perturbed: dict[str, float | None]
    output_change: float | None
    kl: float | None
    top1_changed: float | None
    sites: tuple[SiteEffect, ...]


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
    a program is being compiled.
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
    closed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """The one answer to a request. `error` is "" when it succeeded."""

    type: ClassVar[str] = "reply"
    id: int
    ok: bool
    error: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """Browser to kernel, on the control comm: a view is there; answer with everything."""

    type: ClassVar[str] = "hello"
    version: int


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

TO_BROWSER: Final = (Layout, Frame, History, Curves, State, Reply)
TO_KERNEL: Final = (Hello, Ack, Select, Perturb, Adjust, SwitchAll, Remove)
_TYPES: Final = {cls.type: cls for cls in (*TO_BROWSER, *TO_KERNEL)}


class ProtocolError(ValueError):
    """A message that does not fit its type."""


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


def to_json(message: Any) -> str:
    """The header as text, for size accounting and the golden messages."""
    return json.dumps(to_header(message), allow_nan=False, ensure_ascii=False, sort_keys=True)
