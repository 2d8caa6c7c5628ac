"""What the rules need besides summaries: facts about the model, and a few figures of each pass.

Facts are read from the model and from its traced program. Figures come from `stats/samples` and are
dropped together with their passes. In a file, facts are columns of numbers and text. Invariant: an
unknown is "", NaN, or -1 for a flag, never a guess; columns that do not fit together are refused.
A `Flow` says which values a traced program computes from which. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.format import column, text_columns, texts_in
from nnx_inspector.recordings.tree_rows import row_numbers
from nnx_inspector.stats.choices.rows import CHOICE_STATS
from nnx_inspector.stats.samples.parameter_stats import PARAMETER_STATS, padded_parameter_stats
from nnx_inspector.stats.samples.unit_stats import MASK_BYTES, MASKS, SITE_STATS, padded_masks
from nnx_inspector.typing import Float, Int

T = TypeVar("T", bound="SiteFacts | ParameterFacts")
UNKNOWN: Final = -1

KINDS: Final = ("", "relu", "tanh", "sigmoid", "gelu", "silu", "sinusoid")
"""The functions that are recognised; a sinusoid (sines, cosines or both) only by its output."""

CHOICE: Final = 1
"""How a value enters another: only by a decision, such as an argmax, a comparison or a branch."""
CARRIED: Final = 2
"""From an earlier iteration of the outermost loop."""
BACKWARDS: Final = 4
"""The outermost loop runs from its last row to its first."""
FIRST: Final = 8
"""As what the outermost loop begins with."""
INNER: Final = 16
"""From an earlier iteration of a loop within another."""
MOST_FLOWS: Final = 8
"""The programs whose flow is kept: those that were traced last."""


class Role(enum.IntEnum):
    """What a value of a `Flow` is: what a call returned, the parameters that a module holds itself,
    or what the program received.
    """

    OUTPUT = 0
    PARAMETERS = 1
    INPUT = 2


@dataclasses.dataclass(frozen=True)
class Flow:
    """How data flows through one traced program, each array that each call returns by itself.

    Attributes:
        sites: the site keys.
        values: int32[values, 3], as bytes: the number of its site, its role, and the number of the
            outermost loop that it is in, or -1.
        edges: int32[edges, 3], as bytes: the value that is used, the value that is computed from it
            with no other in between, and how: a sum of the flags above.
    """

    sites: tuple[str, ...]
    values: bytes
    edges: bytes

    @staticmethod
    def of(sites: Iterable[str], values: npt.ArrayLike, edges: npt.ArrayLike) -> Flow:
        """A flow with these rows of values and of edges."""
        packed = (np.array(rows, np.int32).reshape(-1, 3).tobytes() for rows in (values, edges))
        return Flow(tuple(sites), *packed)

    def rows(self) -> tuple[list[list[int]], list[list[int]]]:
        """The rows of values and of edges."""
        return _rows(self.values).tolist(), _rows(self.edges).tolist()


def _rows(packed: bytes) -> np.ndarray:
    return np.frombuffer(packed, np.int32).reshape(-1, 3)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SiteFacts:
    """What is known about one site.

    Attributes:
        site: its key.
        type: the name of the module's class.
        order: its place in the order in which calls return; -1 if it was never seen called.
        activation: the only activation function that its output goes into, one of KINDS.
        made_by: the function that its output comes from, one of KINDS.
        entering: the dtype of the floating-point arrays that it receives; "" for none or several.
        leaving: the dtype of the floating-point arrays that it returns; "" for none or several.
        declared: the dtype that the module says it computes in; "" for none.
        examples: how many values of its output enter a statistic over the batch; -1 unknown.
        running: whether a module with running statistics uses them (1) or the batch's (0).
        deterministic: whether a Dropout is off (1) or on (0).
        rate: the rate of a Dropout; -1 for other modules.
        embeddings: the number of embeddings of an `nnx.Embed`; -1 for other modules.
        affine: whether its output is a product with what it receives, plus a bias (1) or not (0).
        conditional: whether all its calls are in branches that may not be taken (1) or not (0).
        given: whether an `nnx.Embed` receives ids of two axes as the call was given them (1).
    """

    site: str
    type: str = ""
    order: int = UNKNOWN
    activation: str = ""
    made_by: str = ""
    entering: str = ""
    leaving: str = ""
    declared: str = ""
    examples: int = UNKNOWN
    running: int = UNKNOWN
    deterministic: int = UNKNOWN
    rate: float = float(UNKNOWN)
    embeddings: int = UNKNOWN
    affine: int = UNKNOWN
    conditional: int = UNKNOWN
    given: int = UNKNOWN


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterFacts:
    """What is known about one Variable that holds an array of floats.

    Attributes:
        path: its key, `"blocks/0/attn/kernel"`.
        site: the key of the module that holds it.
        type: the type of the Variable: "Param", "BatchStat".
        dtype: the dtype of its array.
        size: the number of elements.
        needed: whether the results of the pass depend on it (1) or not (0).
        axes: the number of axes of its array.
        in_loss: whether the loss of a pass with gradients depends on it (1) or not (0).
        ended: the last step of the loop after which it was counted how many elements are not
            finite; -1 if it was not, or if all were finite in every loop.
        nan, infinite: how many were NaN and infinite then.
    """

    path: str
    site: str
    type: str = ""
    dtype: str = ""
    size: int = 0
    needed: int = UNKNOWN
    axes: int = UNKNOWN
    in_loss: int = UNKNOWN
    ended: int = UNKNOWN
    nan: int = UNKNOWN
    infinite: int = UNKNOWN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uncalled:
    """A watched loop that never called the model.

    Attributes:
        step: the first measured step.
        steps: how many steps were measured.
        calls: how many calls of other modules of the model's types were seen.
        what: a clause that says so and names what was called instead.
        advice: a clause with a way out.
    """

    step: int
    steps: int
    calls: int
    what: str
    advice: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about a model from its structure and its traced passes.

    Attributes:
        uncalled: set while the loop watched last has not called the model.
        where: which positions count, as a clause such as "tokens != 0"; "" for all.
        flows: of the traced programs, the newest first; none of an eager one or an older file.
    """

    sites: tuple[SiteFacts, ...] = ()
    parameters: tuple[ParameterFacts, ...] = ()
    uncalled: Uncalled | None = None
    flows: tuple[Flow, ...] = ()
    where: str = ""

    def joined(self, other: Facts) -> Facts:
        """The facts of both; `other` wins, except for what either saw called or needed."""
        sites = {one.site: one for one in self.sites}
        for one in other.sites:
            old = sites.get(one.site)
            seen = one.order != UNKNOWN or old is None or old.order == UNKNOWN
            flags = {"running": one.running, "deterministic": one.deterministic, "rate": one.rate}
            sites[one.site] = one if seen or old is None else dataclasses.replace(old, **flags)
        parameters = {one.path: one for one in self.parameters}
        for one in other.parameters:
            old = parameters.get(one.path, one)
            kept = {"needed": max(one.needed, old.needed), "in_loss": max(one.in_loss, old.in_loss)}
            if one.ended == UNKNOWN:
                kept |= {"ended": old.ended, "nan": old.nan, "infinite": old.infinite}
            parameters[one.path] = dataclasses.replace(one, **kept)
        return Facts(
            sites=tuple(sites.values()),
            parameters=tuple(parameters.values()),
            uncalled=self.uncalled,
            where=other.where or self.where,
            flows=tuple(dict.fromkeys((*other.flows, *self.flows)))[:MOST_FLOWS],
        )

    def to_columns(self) -> dict[str, np.ndarray]:
        """The facts as arrays of numbers and UTF-8 bytes, which `from_columns` reads."""
        out: dict[str, np.ndarray] = {}
        for prefix, cls, items in (
            ("site", SiteFacts, self.sites),
            ("parameter", ParameterFacts, self.parameters),
        ):
            for field in dataclasses.fields(cls):
                name, values = f"{prefix}_{field.name}", [getattr(one, field.name) for one in items]
                dtype = _DTYPES.get(str(field.type))
                out |= {name: np.array(values, dtype)} if dtype else text_columns(name, values)
        absent = [] if self.uncalled is None else [self.uncalled]
        out |= text_columns("where", [self.where] * bool(self.where))
        out |= text_columns("uncalled_what", [one.what for one in absent])
        out |= text_columns("uncalled_advice", [one.advice for one in absent])
        counts = [[one.step, one.steps, one.calls] for one in absent]
        parts = [(len(one.sites), len(one.values), len(one.edges)) for one in self.flows]
        for name, rows in (("uncalled", counts), ("flow_parts", parts)):
            out[name] = np.array(rows, np.int64).reshape(-1, 3)
        out |= text_columns("flow_sites", [site for one in self.flows for site in one.sites])
        for name in ("values", "edges"):
            packed = b"".join(getattr(one, name) for one in self.flows)
            out[f"flow_{name}"] = _rows(packed).astype(np.int64)
        return out

    @staticmethod
    def from_columns(columns: Mapping[str, object]) -> Facts:
        """The facts that `to_columns` was called on. Other columns are ignored.

        Raises:
            InspectorError: a column is missing, has another type, or does not fit the others.
        """
        try:
            found = Facts(
                sites=tuple(_facts_of(columns, "site", SiteFacts)),
                parameters=tuple(_facts_of(columns, "parameter", ParameterFacts)),
                uncalled=_uncalled(columns),
                where=_where(columns),
                flows=tuple(_flows(columns)),
            )
            for one in found.sites:
                if one.activation not in KINDS or one.made_by not in KINDS:
                    raise ValueError(f"site_activation holds {one.activation!r}, {one.made_by!r}")
        except ValueError as error:
            raise InspectorError(
                f"These columns are not the facts that rules need: {error}. Record the run again, "
                f"or leave the columns out; rules that need them are then skipped."
            ) from error
        return found


FactsSource = Facts | Callable[[], Facts]
"""Facts, or what reads them."""


def known_so_far(known: Facts | None, learnt: Iterable[FactsSource]) -> Facts | None:
    """What is known and has been learnt, without what is yet to be read."""
    found = [one for one in (known, *learnt) if isinstance(one, Facts)]
    return functools.reduce(Facts.joined, found) if found else None


def read_pending(learnt: list[FactsSource], lock: Any) -> Iterator[Facts]:
    """Take the facts out of a list, in order, and read those that are functions. The lock is held
    for each that is given, but not while it is read, which may take long. If a function raises, its
    facts are left out.
    """
    while first := learnt[:1]:
        (one,) = first
        try:
            found = one() if callable(one) else one
        except Exception:  # after an interrupt it can be read again
            with lock:
                if learnt[:1] == first:
                    del learnt[0]
            raise
        with lock:
            if learnt[:1] == first:  # else another thread has read it meanwhile
                del learnt[0]  # first: what takes the facts may ask for those that are left
                yield found


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PassStats:
    """The figures of one pass; see `stats/samples`.

    Attributes:
        sites: site keys, including single layers of stacks (`"blocks[3]"`).
        rows, masks: `SITE_STATS` and `MASKS` of each site.
        parameters, parameter_rows: paths, and `PARAMETER_STATS` of each.
        choices, choice_rows: `"attn@attention"` for each head or expert, and `CHOICE_STATS`.
        varied: whether what the model received differed between examples (1) or not (0).
    """

    sites: tuple[str, ...] = ()
    rows: Float[np.ndarray, "site figure"] = dataclasses.field(
        default_factory=lambda: np.zeros((0, len(SITE_STATS)), np.float32)
    )
    masks: Int[np.ndarray, "site mask byte"] = dataclasses.field(
        default_factory=lambda: np.zeros((0, len(MASKS), MASK_BYTES), np.uint8)
    )
    parameters: tuple[str, ...] = ()
    parameter_rows: Float[np.ndarray, "parameter figure"] = dataclasses.field(
        default_factory=lambda: np.zeros((0, len(PARAMETER_STATS)), np.float32)
    )
    choices: tuple[str, ...] = ()
    choice_rows: Float[np.ndarray, "choice figure"] = dataclasses.field(
        default_factory=lambda: np.zeros((0, len(CHOICE_STATS)), np.float32)
    )
    varied: int = UNKNOWN

    @property
    def nbytes(self) -> int:
        """The memory that it takes, in bytes, without the names that it shares with passes."""
        arrays = self.rows, self.masks, self.parameter_rows, self.choice_rows
        return 400 + sum(x.nbytes for x in arrays)

    @functools.cached_property
    def row_of(self) -> Mapping[str, int]:
        """Site -> its row."""
        return row_numbers(self.sites)

    @functools.cached_property
    def row_of_parameter(self) -> Mapping[str, int]:
        """Path of a parameter -> its row."""
        return row_numbers(self.parameters)

    def figure(self, site: str, name: str) -> float:
        """One figure of a site, NaN if there is none."""
        row = self.row_of.get(site)
        return float("nan") if row is None else float(self.rows[row, SITE_STATS.index(name)])

    @functools.cached_property
    def of_choices(self) -> Mapping[str, Float[np.ndarray, "row figure"]]:
        """Site of a softmax that chooses -> its rows, one for each head or expert."""
        found: dict[str, list[int]] = {}
        for number, site in enumerate(self.choices):
            found.setdefault(site, []).append(number)
        return {site: self.choice_rows[numbers] for site, numbers in found.items()}

    def of_parameters(self, name: str) -> dict[str, float]:
        """One figure of each parameter, by its path."""
        column = self.parameter_rows[:, PARAMETER_STATS.index(name)]
        return dict(zip(self.parameters, column.tolist(), strict=True))

    def parameter(self, path: str, name: str) -> float:
        """One figure of a parameter, NaN if there is none."""
        row, column = self.row_of_parameter.get(path), PARAMETER_STATS.index(name)
        return float("nan") if row is None else float(self.parameter_rows[row, column])


_COUNTS: Final = [SITE_STATS.index(name) for name in ("examples", "units", "looked", "positions")]


def stats_of(columns: Mapping[str, object], named: Callable[[np.ndarray], list[str]]) -> PassStats:
    """The figures of a pass, from the columns of a file; `named` gives the names of some numbers.

    Raises:
        ValueError: a column is missing, or does not fit the others.
    """
    of = lambda name: tuple(named(column(columns, name, "uint32")))  # noqa: E731
    sites, parameters = of("site"), of("parameter")
    rows = column(columns, "rows", "float32", (len(sites), len(SITE_STATS)))
    masks = padded_masks(column(columns, "masks", "uint8", (len(sites), None, MASK_BYTES)))
    if masks.shape[1] != len(MASKS):
        raise ValueError(f"column 'masks' has {masks.shape[1]} masks, not {len(MASKS)}")
    states = padded_parameter_stats(column(columns, "states", "float32", (len(parameters), None)))
    if states.shape[1] != len(PARAMETER_STATS):
        raise ValueError(f"column 'states' has {states.shape[1]} figures of a parameter")
    [varied] = column(columns, "varied", "int64", (1,)).tolist()
    found = PassStats(
        sites=sites,
        rows=rows.copy(),  # a view would keep the whole section in memory
        masks=masks.copy(),
        parameters=parameters,
        parameter_rows=states.copy(),
        varied=varied,
    )
    if "choice" not in columns:  # an older file, or a model without such softmaxes
        return found
    choices = of("choice")
    chosen = column(columns, "choices", "float32", (len(choices), len(CHOICE_STATS)))
    return dataclasses.replace(found, choices=choices, choice_rows=chosen.copy())


def invalid_reason(figures: PassStats) -> str:
    """What is wrong with the figures of a pass, or "". The rules trust figures without checks."""
    counts = figures.rows[:, _COUNTS]
    with np.errstate(invalid="ignore"):  # a NaN is not a count
        whole = (counts >= 1) & (counts <= 2.0**53) & (counts == np.trunc(counts))
    if not whole.all():
        return "a count is not a whole number from 1 to 2**53"
    looked, there = (figures.rows[:, SITE_STATS.index(name)] for name in ("looked", "units"))
    if (looked > there).any() or (looked > 8 * MASK_BYTES).any():
        return "more units were examined than there are"
    unsigned = np.delete(figures.choice_rows, CHOICE_STATS.index("logit"), axis=1)
    if any((one < 0).any() for one in (figures.rows, figures.parameter_rows, unsigned)):
        return "a figure is negative"
    if any(len(set(names)) < len(names) for names in (figures.sites, figures.parameters)):
        return "a name occurs twice"
    return "" if figures.varied in (-1, 0, 1) else "a flag is not -1, 0 or 1"


_DTYPES: Final = {"int": np.int64, "float": np.float64}
_LATER: Final = (
    "site_embeddings", "site_affine", "site_conditional", "site_given", "parameter_in_loss",
    "parameter_ended", "parameter_nan", "parameter_infinite",
)  # fmt: skip
"""Columns that older recordings do not have."""
_ROW: Final = 12
"""Bytes of a value or an edge of a `Flow`."""


def _facts_of(columns: Mapping[str, object], prefix: str, cls: type[T]) -> Iterator[T]:
    found: dict[str, Sequence[object]] = {}
    count: int | None = None
    for field in dataclasses.fields(cls):
        name, dtype = f"{prefix}_{field.name}", _DTYPES.get(str(field.type))
        if name in _LATER and name not in columns:
            values: Sequence[object] = [field.default] * (count or 0)
        elif dtype is None:
            values = list(texts_in(columns, name))
        else:
            values = column(columns, name, dtype).tolist()
        if count not in (None, len(values)):
            raise ValueError(f"{name} has {len(values)} rows, not {count}")
        found[field.name], count = values, len(values)
    for row in zip(*found.values(), strict=True):
        yield cls(**dict(zip(found, row, strict=True)))


def _uncalled(columns: Mapping[str, object]) -> Uncalled | None:
    if "uncalled" not in columns:
        return None  # an older file
    rows = column(columns, "uncalled", np.int64, (None, 3)).tolist()
    what, advice = (list(texts_in(columns, f"uncalled_{name}")) for name in ("what", "advice"))
    if not len(rows) == len(what) == len(advice) <= 1:
        raise ValueError("uncalled has more than one row")
    for (step, steps, calls), text, way_out in zip(rows, what, advice, strict=True):
        return Uncalled(step=step, steps=steps, calls=calls, what=text, advice=way_out)
    return None


def _where(columns: Mapping[str, object]) -> str:
    texts = list(texts_in(columns, "where")) if "where" in columns else []  # an older file
    if texts[1:]:
        raise ValueError("where has more than one row")
    return "".join(texts)


def _flows(columns: Mapping[str, object]) -> Iterator[Flow]:
    if "flow_parts" not in columns:
        return  # an older file
    parts = column(columns, "flow_parts", np.int64, (None, 3))
    sites = list(texts_in(columns, "flow_sites"))
    values, edges = (
        column(columns, f"flow_{name}", np.int64, (None, 3)) for name in ("values", "edges")
    )
    counts, rest = np.divmod(parts, [1, _ROW, _ROW])
    there = [len(sites), len(values), len(edges)]
    inside = ((counts >= 0) & (counts <= there)).all() and len(counts) <= MOST_FLOWS
    if not inside or rest.any() or counts.sum(axis=0).tolist() != there:
        raise ValueError("flow_parts does not fit")
    start = np.zeros(3, np.int64)
    for end in start + np.cumsum(counts, axis=0):
        (s, v, e), (to_s, to_v, to_e), start = start.tolist(), end.tolist(), end
        of_sites, of_values, of_edges = sites[s:to_s], values[v:to_v], edges[e:to_e]
        right = _is_within(of_values, (0, 0, -1), (to_s - s, len(Role), 2**31))
        if not right or not _is_within(of_edges, (0, 0, 0), (to_v - v, to_v - v, 2 * INNER)):
            raise ValueError("a number of a flow is out of range")
        yield Flow.of(of_sites, of_values, of_edges)


def _is_within(rows: np.ndarray, least: Sequence[int], ends: Sequence[int]) -> bool:
    return bool(((rows >= np.array(least)) & (rows < np.array(ends))).all())
