"""Turns the data that a pass has sent into figures of sites, single layers and parameters.

Invariant: a layer's figures are its own, and a parameter that was sent only once has no change.
Runs nothing on a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

import numpy as np

from nnx_inspector.program.editing.functions import UNIT
from nnx_inspector.recordings.facts import UNKNOWN, PassStats
from nnx_inspector.recordings.tree_rows import (
    PARAMETER_QUANTITIES,
    Stack,
    layer_key,
    site_of_parameter,
)
from nnx_inspector.records.record import Parameter, Record
from nnx_inspector.stats.choices.rows import CHOICE_STATS, merge_rows
from nnx_inspector.stats.samples.parameter_stats import (
    EXAMPLES_VARY,
    ID_STATS,
    IDS_PREFIX,
    PARAMETER_STATS,
    STATE_HEAD,
    STATE_LENGTH,
    UPDATE_STATS,
    parameter_stat,
    parameter_stats,
    probability_of_superiority,
    sampled_elements,
)
from nnx_inspector.stats.samples.unit_stats import LENGTH, UnitSamples, site_stats
from nnx_inspector.stats.summary import Summary

AT = len(STATE_HEAD)
"""The index of a parameter's first element."""
UnitVectors = Mapping[str, Sequence[np.ndarray]]
"""Site -> the samples of units of its calls, each `[..., LENGTH]`."""
States = Mapping[str, np.ndarray]
"""Path of a parameter -> its state, `[STATE_LENGTH]`."""
Update = tuple[float, ...]
"""`UPDATE_STATS` of a parameter."""
Summaries = Mapping[str, Mapping[str, Summary | None]]
"""Site, layer or parameter -> quantity -> its summary in a pass."""
_NO_CHOICES = np.zeros((0, len(CHOICE_STATS)), np.float32)
_NO_UPDATE: Final[Update] = (math.nan,) * len(UPDATE_STATS)
_UNKNOWN = np.full(STATE_LENGTH, np.nan, np.float32)
"""The state of a parameter that no pass has sent."""


def unit_samples_of(record: Record, stacks: Mapping[str, int]) -> dict[str, list[np.ndarray]]:
    """The samples of units that are the `values` of a record, including single layers of stacks.

    Of a call that returns several arrays, they are those of the main one.

    Args:
        record: the record of one pass, on the host.
        stacks: site -> how many of its layers have sites of their own.
    """
    out: dict[str, list[np.ndarray]] = {}
    for site in record:
        for call in record[site].calls:
            if not call.kept or call.kept[call.structure.main].value is None:
                continue
            found = np.asarray(call.kept[call.structure.main].value)
            if found.shape[-1:] != (LENGTH,) or not (found[..., 0] == 1).any():
                continue
            out.setdefault(site, []).append(found)
            if call.loops and found.ndim > 1:
                for layer in range(min(stacks.get(site, 0), len(found))):
                    out.setdefault(layer_key(site, layer), []).append(found[layer])
    return out


def unit_samples_with_layers(
    passes: Iterable[UnitVectors], stacks: Mapping[str, Stack], *, axes: int
) -> dict[str, list[np.ndarray]]:
    """The samples of units of watched passes, or the rows of their softmaxes that choose, also of
    single layers. Each array has so many axes behind those of iterations.
    """
    out: dict[str, list[np.ndarray]] = {}
    for one in passes:
        for site, arrays in one.items():
            out.setdefault(site, []).extend(arrays)
            stack = stacks.get(site if axes == 1 else site.rpartition("@")[0])
            if stack is None or not all(stack.has_rows_in(x.shape[:-axes]) for x in arrays):
                continue
            for layer in range(stack.layers):
                out.setdefault(layer_key(site, layer), []).extend(x[layer] for x in arrays)
    return out


def choices_of(record: Record, stacks: Mapping[str, int]) -> dict[str, list[np.ndarray]]:
    """The rows of a record's softmaxes that choose, including single layers of stacks."""
    out: dict[str, list[np.ndarray]] = {}
    for site, arrays in record.choices.items():
        out.setdefault(site, []).extend(arrays)
        for found in (x for x in arrays if x.ndim > 2):
            for layer in range(min(stacks.get(site.rpartition("@")[0], 0), len(found))):
                out.setdefault(layer_key(site, layer), []).append(found[layer])
    return out


def updates_of(moves: Mapping[str, np.ndarray], stacks: Mapping[str, Stack]) -> dict[str, Update]:
    """`UPDATE_STATS` of each parameter, also of single layers, by what `Update` finds."""
    out: dict[str, Update] = {}
    for path, sums in moves.items():
        rows = np.asarray(sums, np.float64).reshape(-1, 8)
        out[path] = _of_update(rows.sum(axis=0))
        stack = stacks.get(site_of_parameter(path, stacks) or "") if len(rows) > 1 else None
        if stack is not None and stack.length == len(rows):
            out |= {layer_key(path, i): _of_update(rows[i]) for i in range(stack.layers)}
    return out


def updates_in(parameters: Mapping[str, Parameter]) -> dict[str, Update]:
    """The same of the parameters of a record, as far as an optimizer was given: of an update that
    is not made, it is not known what is lost.
    """
    found = ((path, one.update, one.value.merged().norm) for path, one in parameters.items())
    sizes = ((path, update.merged().norm, norm) for path, update, norm in found if update)
    return {
        p: (_ratio(*np.square([size / UNIT, norm])), *_NO_UPDATE[1:]) for p, size, norm in sizes
    }


def _of_update(sums: np.ndarray) -> Update:
    change, value, meant, lost, decay, rest, cut, whole = sums.tolist()
    decayed = _ratio(decay / UNIT / UNIT, rest) if decay or rest else math.nan
    clipped = _ratio(cut, whole) if whole else math.nan
    return _ratio(change, value), lost / meant if meant else math.nan, decayed, clipped


def _ratio(change: float, value: float) -> float:
    change, value = math.sqrt(change), math.sqrt(value)
    if not (math.isfinite(change) and math.isfinite(value)):
        return math.nan
    return change * UNIT / value if value else math.inf if change else 0.0


class PassStatsBuilder:
    """Builds the figures of successive passes, and remembers the last parameters."""

    def __init__(self) -> None:
        self._before: dict[str, np.ndarray] = {}
        self._still: dict[str, np.ndarray] = {}  # the elements that no pass has seen changed
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def build(
        self,
        unit_samples: UnitVectors,
        states: States,
        choices: UnitVectors,
        *,
        updates: Mapping[str, Update],
        measured: Summaries,
        follow: bool = True,
        differentiated: Set[str] | None = None,
    ) -> PassStats:
        """The figures of a pass.

        Args:
            unit_samples: see `unit_samples_of` and `unit_samples_with_layers`.
            states: the states of its parameters.
            choices: site of a softmax that chooses -> the rows of its calls; see
                `stats.choices.rows`.
            follow: whether to compare the parameters with the pass before; False for a pass outside
                the loop, which is not part of its history.
            differentiated: the paths of the parameters with respect to which the pass is
                differentiated; None for those whose gradient was measured.
            updates: what is known of the updates of parameters, where they were seen.
            measured: what was measured of all elements of a parameter, which the samples in
                `states` only estimate.
        """
        calls = [self._calls(site, vectors, states) for site, vectors in unit_samples.items()]
        numbers, rows, masks = site_stats(calls)
        names = list(unit_samples)
        states = dict(states)
        inputs = states.pop(EXAMPLES_VARY, None)
        ids = {
            key[len(IDS_PREFIX) :]: states.pop(key)
            for key in list(states)
            if key.startswith(IDS_PREFIX)
        }
        now = np.array([_flat(state) for state in states.values()]).reshape(-1, STATE_LENGTH)
        before = [self._before.get(path, _UNKNOWN) if follow else _UNKNOWN for path in states]
        rows_of_parameters = parameter_stats(now, np.array(before).reshape(-1, STATE_LENGTH))
        with np.errstate(over="ignore"):  # the norm of a huge gradient is beyond float32
            for i, path in enumerate(states):
                for name, figure in _stats_from_summaries(measured.get(path, {})):
                    parameter_stat(rows_of_parameters, name)[i] = figure
        graded = ~np.isnan(parameter_stat(rows_of_parameters, "graded"))
        parameter_stat(rows_of_parameters, "differentiated")[:] = (
            graded if differentiated is None else [path in differentiated for path in states]
        )
        for path, found in ids.items():
            for name, figure in zip(ID_STATS, np.asarray(found).tolist(), strict=True):
                parameter_stat(rows_of_parameters, name)[list(states).index(path)] = (
                    figure if figure >= 0 else np.nan
                )
        if follow:
            self._follow(list(states), now, np.array(before), rows_of_parameters)
            self._before.update(zip(states, now, strict=True))
        others = [path for path in updates if path not in states]  # layers of stacks
        paths = [*states, *others]
        unknown = np.full((len(others), len(PARAMETER_STATS)), np.nan, np.float32)
        rows_of_parameters = np.concatenate([rows_of_parameters, unknown])
        found = np.array([updates.get(p, _NO_UPDATE) for p in paths]).reshape(-1, len(UPDATE_STATS))
        with np.errstate(over="ignore"):  # so is the ratio of an update to a parameter near 0
            for name, column in zip(UPDATE_STATS, found.T, strict=True):
                parameter_stat(rows_of_parameters, name)[:] = column
        chosen = {site: merge_rows(arrays) for site, arrays in choices.items() if arrays}
        return PassStats(
            sites=self._shared(names[i] for i in numbers),
            rows=rows,
            masks=masks,
            parameters=self._shared(paths),
            parameter_rows=rows_of_parameters,
            choices=self._shared(site for site, own in chosen.items() for _ in own),
            choice_rows=np.concatenate([_NO_CHOICES, *chosen.values()]),
            varied=UNKNOWN if inputs is None else int(np.any(np.asarray(inputs)[..., AT])),
        )

    def _follow(
        self, paths: Sequence[str], now: np.ndarray, before: np.ndarray, rows: np.ndarray
    ) -> None:
        """Put in how much of each parameter no pass has seen changed, and of what size that is."""
        stuck, larger = parameter_stat(rows, "stuck"), parameter_stat(rows, "larger")
        for i, path in enumerate(paths):
            if math.isnan(parameter_stat(rows, "change")[i]):
                self._still.pop(path, None)
                continue
            values, past = sampled_elements(now[i]), sampled_elements(before[i])
            still = self._still.get(path, np.ones(len(values), bool)) & (values == past)
            self._still[path] = still
            stuck[i], larger[i] = still.mean(), probability_of_superiority(values, still)

    def _calls(self, site: str, vectors: Sequence[np.ndarray], states: States) -> UnitSamples:
        mean, scale, bias = (_sample(states, site, n) for n in ("mean", "scale", "bias"))
        if mean is None:  # not a module that normalises over the batch
            return UnitSamples(vectors)
        return UnitSamples(vectors, np.ones(len(mean)) if scale is None else scale, bias)

    def _shared(self, names: Iterable[str]) -> tuple[str, ...]:
        found = tuple(names)
        return self._names.setdefault(found, found)


def _stats_from_summaries(found: Mapping[str, Summary | None]) -> Iterator[tuple[str, float]]:
    """The figures of a parameter that its summaries give."""
    value, gradient = (found.get(quantity) for quantity in PARAMETER_QUANTITIES)
    if value is not None and not value.saturated and value.size:
        finite = value.finite == value.size
        yield "norm", value.norm / math.sqrt(value.size) if finite else math.nan
    if gradient is not None and not gradient.saturated and gradient.size:
        infinite = math.inf if gradient.posinf or gradient.neginf else gradient.norm
        yield "gradient", math.nan if gradient.nan else infinite
        yield "graded", 1 - gradient.zeros / gradient.size


def _sample(states: States, site: str, name: str) -> np.ndarray | None:
    path = f"{site}/{name}" if site else name
    return sampled_elements(states[path]) if path in states else None


def _flat(state: np.ndarray) -> np.ndarray:
    return np.array(state, np.float32).reshape(-1)[:STATE_LENGTH]
