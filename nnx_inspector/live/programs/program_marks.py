"""A mark of a watched program: the loops around it, and how what was seen of it reaches its pass.

Invariant: a quantity that was not measured is left out of what a pass sends. Knows no program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from nnx_inspector.live.inbox import PassData
from nnx_inspector.live.pass_start import GRADIENT, PassStart
from nnx_inspector.live.programs.value_request import CallValues
from nnx_inspector.program.editing.rules import RING_PASSES
from nnx_inspector.program.marks import INPUT, OUTPUT, PARAMETER
from nnx_inspector.program.plan import KeptArray, Observation
from nnx_inspector.program.survey import Item, Mark
from nnx_inspector.recordings.tree_rows import leaf_key, leaf_of
from nnx_inspector.stats.samples.parameter_stats import EXAMPLES_VARY
from nnx_inspector.typing import Value

Moves = tuple[tuple[Mapping[str, Value], int], ...]
Index = tuple[int, ...]
"""The iteration of each loop around the call that begins a pass, outermost first."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop around a mark.

    Attributes:
        item: where it is in the survey.
        every: it keeps every so many iterations; 0 if it keeps the last `RING_PASSES`.
        first: the first iteration that it keeps.
    """

    item: Item
    every: int
    first: int = 0

    def row(self, iteration: int) -> int:
        """Where an iteration is among those that are kept."""
        return iteration // self.every if self.every else iteration % RING_PASSES

    def keeps(self, iteration: int) -> bool:
        if self.every:
            return iteration % self.every == 0
        return iteration >= self.first


@dataclasses.dataclass(frozen=True)
class ProgramMark:
    """A mark of a program.

    Attributes:
        loops: the loops around it.
        seen: what was seen of it, or the slots of that; None if nothing is measured there.
        moves: where a call begins, how far each body around it moves parameters, the innermost
            first, with the number of loops around that.
        begins: the number of the place where its pass begins; None if that is in no place of the
            program.
    """

    mark: Mark
    loops: tuple[Loop, ...]
    seen: Observation | None = None
    moves: Moves = ()
    begins: int | None = None


def put_beginning(
    one: ProgramMark, at: Index, sent: PassData, *, known: PassStart | None = None
) -> None:
    """Put what was seen where a call begins; `known` is it, if the program stands for any call."""
    begun: PassStart = known or one.mark.begun
    sent.calls.append(begun.call)
    sent.differentiated.update(differentiated(one.mark))
    weights = (path for path in begun.paths if path in begun.weights)
    for path, summary in zip(weights, one.seen.summaries if one.seen else (), strict=False):
        sent.arrived[path, "parameter"].append(summary.row(at) if at else summary)
    if one.seen is not None and one.seen.kept:
        states = one.seen.kept[0].value[at]
        for name, state in zip((*begun.paths, EXAMPLES_VARY), states, strict=True):
            sent.states.setdefault(name, state)
    for moves, depth in one.moves:
        for path, sums in moves.items():
            sent.moves.setdefault(path, np.asarray(sums)[at[:depth]])


def put_choice(one: ProgramMark, at: Index, sent: PassData) -> None:
    found = (np.asarray(kept.value)[at] for kept in (one.seen.kept if one.seen else ()))
    sent.choices.setdefault(one.mark.site, []).extend(found)


def put_gradient(one: ProgramMark, at: Index, sent: PassData) -> None:
    key, leaf, what = one.mark.site, one.mark.of[1], "parameter_gradient"
    if leaf != PARAMETER:
        key, what = leaf_key(key, leaf), GRADIENT
    for summary in one.seen.summaries if one.seen else ():
        found = summary.row(at) if at else summary
        if np.any(found.bins):  # else no cotangent reached it
            sent.arrived[key, what].append(found)


def put_values(one: ProgramMark, at: Index, sent: PassData) -> None:
    mark, seen = one.mark, one.seen
    assert seen is not None
    sent.members = max(sent.members, mark.members)
    for i, summary in enumerate(seen.summaries):
        found = summary.row(at) if at else summary
        counted = any(mark.counted[i : i + 1]) and np.any(iteration_of(seen.ran, at))
        sent.is_empty |= bool(counted) and not np.any(found.bins)
        if mark.part == INPUT and not jnp.issubdtype(found.points.dtype, jnp.integer):
            continue  # of what a call receives only ids are shown
        key = leaf_key(mark.site, mark.structure.parts[i] if mark.part == OUTPUT else "")
        sent.arrived[key, mark.part].append(found)
        # the figures of a site are those of its main array
        if mark.part == OUTPUT and seen.kept and not leaf_of(key)[1]:
            sent.unit_samples.setdefault(key, []).append(_unit_sample(seen.kept[i])[at])
    if values := values_of(one):
        sent.values.append(
            CallValues(
                names=mark.structure.names or ("",) * len(values),
                values=tuple(value[at] for value in values),
                mapped=tuple(map(len, mark.mapped)),
                loops=len(one.loops) - len(at),
                members=mark.members > 0,
                ran=iteration_of(seen.ran, at),
            )
        )


def _unit_sample(kept: KeptArray) -> np.ndarray:
    return kept.value[0] if isinstance(kept.value, tuple) else kept.value


def values_of(one: ProgramMark) -> list[Value]:
    """The arrays of a call that are kept because somebody asked for them."""
    kept = one.seen.kept if one.mark.part == OUTPUT and one.seen is not None else ()
    return [each.value[1] for each in kept if isinstance(each.value, tuple)]


def differentiated(mark: Mark) -> set[str]:
    """The paths of the parameters by which a pass is differentiated."""
    begun: PassStart = mark.begun
    paths = ["", *begun.paths]
    moved = (paths[i] for i in mark.moved if i < len(paths))
    return {path for path in moved if path in begun.parameters}


def iteration_of(x: object, rows: Index) -> np.ndarray:
    found = np.asarray(x)
    return found[rows[: found.ndim]] if found.ndim else found
