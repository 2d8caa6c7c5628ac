"""A program of the user's, after it was traced: which passes begin in it, and what it says of each.

A pass is a run of the mark where a call begins: in a scan there is one for each iteration. What a
call returns belongs to the pass that began last before it, and the gradient of that to the pass
whose number its mark has. Invariant: a figure that cannot be attributed is left out. Starts
nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence, Set

import jax
import numpy as np

from nnx_inspector._compat import jaxprs
from nnx_inspector.live.pass_boundaries import Program, TopLevelCall
from nnx_inspector.live.pass_start import GRADIENT, ReachedSite
from nnx_inspector.live.programs.ownership import Trees
from nnx_inspector.live.programs.program_marks import (
    Index,
    Loop,
    Moves,
    ProgramMark,
    differentiated,
    iteration_of,
    values_of,
)
from nnx_inspector.live.programs.value_request import ValueRequest
from nnx_inspector.program.choices.marking import mark_choices
from nnx_inspector.program.editing import slots
from nnx_inspector.program.editing.position_masks import misfit_of
from nnx_inspector.program.editing.rules import RING_PASSES
from nnx_inspector.program.instrument import instrument
from nnx_inspector.program.marks import BEGIN, OUTPUT
from nnx_inspector.program.plan import Keep, Plan
from nnx_inspector.program.survey import (
    Item,
    Survey,
    calls_with_inputs,
    row_stride,
    scan_depths,
    survey,
    without_calls,
    without_jaxprs,
)
from nnx_inspector.stats.samples.sample_units import sample_units, sample_units_unreduced
from nnx_inspector.stats.unreduced import has_several_cpus
from nnx_inspector.typing import Jaxpr, PyTree, Value


@dataclasses.dataclass(frozen=True)
class ProgramPass:
    """A pass of a run.

    Attributes:
        number: that of the mark where it begins, among those of the program.
        index: its iteration.
        kept: whether what is measured of it is kept.
    """

    number: int
    index: Index
    kept: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class EditedProgram:
    """A program of the user's with more inputs and outputs.

    Attributes:
        keys: what its inputs are: `("launch_input", place, call)`, or a constant, whose value is in
            `values`.
        measures: whether it measures.
        seen: the slots of what its marks see, nested like the survey.
        places: its marks, each with its slots.
    """

    program: Jaxpr
    inputs: int
    outputs: int
    keys: tuple[tuple[Value, ...], ...]
    values: tuple[Value, ...]
    measures: bool
    seen: list[PyTree]
    places: tuple[ProgramMark, ...]
    is_compiled: bool = True

    def read(self, arrays: Sequence[Value]) -> list[ProgramMark]:
        """Its marks, each with what was seen of it; waits for the program."""
        here, (leaves, tree) = jax.device_get(list(arrays)), self._leaves
        found = [x.read(here, _ones) if slots.is_slot(x) else x for x in leaves]
        pairs = zip(self.places, jax.tree.unflatten(tree, found), strict=True)
        return [ProgramMark(one.mark, one.loops, *of, begins=one.begins) for one, of in pairs]

    @functools.cached_property
    def _leaves(self) -> tuple[list[Value], PyTree]:
        every = [(one.seen, one.moves) for one in self.places]
        return jax.tree.flatten(every, is_leaf=slots.is_slot)


_ones = functools.cache(functools.partial(np.ones, dtype=np.uint32))


class TracedProgram:
    """What a program says of one session's model.

    Attributes:
        begins: the places where passes begin, in the order of the program.
        is_known: whether it is known before a run how many begin.
        is_single: whether it is one equation.
        graded: the numbers of those whose gradients are in the program too.
        joins: whether something belongs to a pass that has begun outside the program.
        numbers: the passes, by the numbers that marks know them by, of which it has outputs.
        awaits: those of earlier programs of which it has gradients.
        unseen: the sites that cannot be seen, each with the reason.
        takes: the passes to which it gives the numbers of perturbations.
        reached: the sites and places that perturbations reach; see `Reached`.
        trees: where the parameters of its calls come from.
        misfit: see `counting.misfit_of`.
    """

    def __init__(
        self,
        program: Jaxpr,
        owner: tuple[str, int],
        unmeasured: tuple[str, ...],
        whole: TracedProgram | None = None,
        others: Set[int] = frozenset(),
    ):
        self._owner, self._unmeasured = owner, unmeasured
        self._whole, self._others = whole, others
        found = self._survey(program)
        self.trees = Trees.of(found) if whole is None else whole.trees
        self.is_single = len(found.jaxpr.eqns) == 1
        self._depths = scan_depths(found)
        self._found = without_jaxprs(found)
        self.unseen = dict(found.unseen)
        self.is_empty = not found.items
        places = list(self._walk(self._found))
        self.misfit = misfit_of([one.mark for one in places])
        self.begins = [one for one in places if one.mark.part == BEGIN]
        self._trained = {i for i, one in enumerate(self.begins) if differentiated(one.mark)}
        self._numbers = {id(one.mark): i for i, one in enumerate(self.begins)}
        self._of = self._starts_of_marks(places)
        self.is_known = not _is_data_dependent(found)
        pairs = list(zip(places, self._of, strict=True))
        self.graded = {b for one, b in pairs if one.mark.part == GRADIENT}
        self.joins = any(b is None and one.mark.part != GRADIENT for one, b in pairs)
        calls = [one.mark.of[0] for one in places if one.mark.part == OUTPUT]
        self.numbers = tuple(dict.fromkeys(calls))
        later = [one.mark.of[0][0] for one, b in pairs if one.mark.part == GRADIENT and b is None]
        self.awaits = tuple(dict.fromkeys(later))
        outputs = (one.mark for one in places if one.mark.part == OUTPUT)
        rows = ((mark.site, None, "", None) for mark in outputs)
        of_places = (x for one in places for x in one.mark.reached)
        of_parameters = (x for one in self.begins for x in one.mark.begun.reached)
        self.reached: frozenset[ReachedSite] = frozenset([*rows, *of_places, *of_parameters])
        self.takes = tuple(dict.fromkeys(calls_with_inputs(found)))
        self._edited: dict[bool | Keep, EditedProgram] = {}

    def without(self, program: Jaxpr, others: Set[int]) -> TracedProgram:
        """What it says of the model if these of the places where calls begin are not the model's:
        then they are part of the user's program.
        """
        return TracedProgram(program, self._owner, self._unmeasured, self, others)

    def _survey(self, program: Jaxpr) -> Survey:
        program = mark_choices(program, self._owner, finished=True)
        found, whole = survey(program, self._owner, finished=True), self._whole
        if whole is None:
            return found
        kept = {one.mark.of for i, one in enumerate(whole.begins) if i not in self._others}
        left = {one.mark.of for one in whole.begins} - kept
        return without_calls(found, iter(whole._of), self._others, left)

    def has_variant(self, measures: bool) -> bool:
        return measures in self._edited

    def has_site(self, site: str) -> bool:
        return any(one[0] == site and one[1] is None for one in self.reached)

    def edited(
        self, program: Jaxpr, *, measures: bool, request: ValueRequest | None = None
    ) -> EditedProgram:
        """The program, measuring or only perturbed; measuring, it may also keep what was asked.

        Raises:
            InspectorError: what was asked cannot be kept, or is too large.
        """
        apart = has_several_cpus()
        keep = Keep()
        if measures:
            keep = Keep(
                sample_units_unreduced if apart else sample_units, parts=(OUTPUT,), counts=True
            )
        which: bool | Keep = measures
        if request is not None:
            which = keep = request.with_site(keep)
        if which not in self._edited:
            found = self._survey(program)
            plan = Plan(summarise=measures, keep=keep, unmeasured=self._unmeasured)
            new = instrument(found, plan, most_rows=RING_PASSES, join=True, apart=apart)
            bare = jaxprs.open_jaxpr(program)[0]
            others = new.jaxpr.outvars[len(bare.outvars) :]
            for site in new.outside:
                self.unseen[site] = UNKNOWN_LAYER
            pairs = zip(self._walk(self._found, new.seen), self._of, strict=True)
            places = tuple(self._with_start(one, begins) for one, begins in pairs)
            if request is not None:
                types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in others]
                kept = [x for one in places for x in values_of(one)]
                request.require_room(slots.read_slots(kept, types))
                several = [one for one in self._edited if isinstance(one, Keep)]
                for one in several[: 1 - MOST_KEEPING_VARIANTS]:
                    del self._edited[one]
            self._edited[which] = EditedProgram(
                jaxprs.closed_like(program, new.jaxpr),
                len(new.keys),
                len(others),
                new.keys,
                new.given,
                measures,
                new.seen,
                places,
            )
        return self._edited[which]

    def _with_start(self, one: ProgramMark, begins: int | None) -> ProgramMark:
        """A mark with the pass that it belongs to. An update is made for the passes that are
        differentiated: a rollout, or a teacher's call, in the same program has no part in it.
        """
        shares = not self._trained or begins in self._trained
        return dataclasses.replace(one, begins=begins, moves=one.moves if shares else ())

    def calls(self, order: Sequence[ProgramPass]) -> list[TopLevelCall]:
        """The calls of some passes of one run."""
        found: list[TopLevelCall] = []
        before: Index | None = None
        for one in order:  # each iteration is like a run of its own
            starts = before is None or one.index != before
            found.append(
                TopLevelCall(self.begins[one.number].mark.site, self._program_key, starts=starts)
            )
            before = one.index
        return found

    @functools.cached_property
    def _program_key(self) -> Program:
        sites = [one.mark.site for one in self.begins]
        graded = frozenset(site for i, site in enumerate(sites) if i in self.graded)
        return Program(tuple(dict.fromkeys(sites)), graded)

    @functools.cached_property
    def known_passes(self) -> list[ProgramPass]:
        """The passes of each run, if it is known before a run how many begin."""
        return self.passes()

    @functools.cached_property
    def known_calls(self) -> list[TopLevelCall]:
        """The calls of these passes."""
        return self.calls(self.known_passes)

    def passes(self, seen: list[PyTree] | None = None) -> list[ProgramPass]:
        """The passes of a run in their order; of one that has run if that is not known before."""
        return list(self._iterate_passes(self._found, seen, ()))

    def _iterate_passes(
        self, found: Survey, seen: PyTree, around: tuple[tuple[Loop, int], ...]
    ) -> Iterator[ProgramPass]:
        index = tuple(i for _, i in around)
        rows = tuple(loop.row(i) for loop, i in around)
        kept = all(loop.keeps(i) for loop, i in around)
        for number, item in enumerate(found.items.values()):
            here = seen[number] if seen else None
            if item.again or not (item.mark is not None or any(c.begins for c in item.children)):
                continue
            if item.mark is not None:
                if item.mark.part == BEGIN:
                    ran = 1 if here is None else int(iteration_of(here.ran, rows))
                    yield from [ProgramPass(self._numbers[id(item.mark)], index, kept)] * ran
            elif item.kind == "scan":
                loop = Loop(item, self._stride(item, [loop for loop, _ in around]))
                steps = range(abs(item.length))
                for i in steps if item.length > 0 else reversed(steps):
                    inner = here[0] if here else None
                    yield from self._iterate_passes(item.children[0], inner, (*around, (loop, i)))
            elif item.kind == "while" and here and here[0]:
                count = int(iteration_of(here[0][0], rows))
                loop = Loop(item, 0, max(0, count - RING_PASSES))
                for i in range(count):
                    yield from self._iterate_passes(item.children[1], here[1], (*around, (loop, i)))
            else:
                for i, child in enumerate(item.children):
                    yield from self._iterate_passes(child, here[i] if here else None, around)

    def _stride(self, item: Item, loops: Sequence[Loop]) -> int:
        if any(loop.every > 1 for loop in loops):
            return 1
        depth = sum(loop.item.kind == "scan" for loop in loops)
        return row_stride(item, self._depths, depth, RING_PASSES)

    def _walk(
        self,
        found: Survey,
        seen: PyTree = None,
        loops: tuple[Loop, ...] = (),
        moves: Moves = (),
        *,
        again: bool = False,
    ) -> Iterator[ProgramMark]:
        """The marks of a survey, each with the slots of what is seen of it."""
        if seen and len(seen) > len(found.items):
            moves = ((seen[-1], len(loops)), *moves)
        for number, item in enumerate(found.items.values()):
            here = seen[number] if seen else None
            if item.mark is not None:
                if item.mark.part == GRADIENT or not again:
                    begins = item.mark.part == BEGIN
                    yield ProgramMark(item.mark, loops, here, moves if begins else ())
                continue
            for i, child in enumerate(item.children):
                inner = loops
                if item.kind == "scan":
                    inner = (*loops, Loop(item, self._stride(item, loops)))
                elif item.kind == "while" and item.children[1].begins:
                    inner = (*loops, Loop(item, 0))
                below = here[i] if here else None
                yield from self._walk(child, below, inner, moves, again=again or item.again)

    def _starts_of_marks(self, places: Sequence[ProgramMark]) -> list[int | None]:
        """For each mark the number of the place where its pass begins; None if it is not here."""
        of: dict[Hashable, list[int]] = {}
        found: list[int | None] = []
        now, count = None, 0
        for one in places:
            if one.mark.part == BEGIN:
                of.setdefault(one.mark.of, []).append(count)
                now, count = count, count + 1
            at = now
            if at is not None and one.mark.part != GRADIENT:
                loops = self.begins[at].loops
                same = (a.item is b.item for a, b in zip(one.loops, loops, strict=False))
                at = at if len(one.loops) >= len(loops) and all(same) else None
            found.append(at)
        seen: Counter[Hashable] = Counter()
        for i, one in enumerate(places):
            if one.mark.part != GRADIENT:
                continue
            mine, key = of.get(one.mark.of[0][0], []), (one.mark.site, one.mark.of)
            number = seen[key]
            seen[key] += 1  # the last call comes first
            found[i] = mine[-1 - min(number, len(mine) - 1)] if mine else None
        return found


MOST_KEEPING_VARIANTS = 8
"""How many variants are kept that keep a site's values, the last ones."""
UNKNOWN_LAYER = (
    "its layer cannot be identified here, outside a call of the model, so a perturbation of a "
    "single layer does not act"
)


def _is_data_dependent(found: Survey) -> bool:
    """Whether a pass begins in a branch, or in a loop that ends when it wants."""
    return any(
        (item.kind in ("cond", "while") and any(c.begins for c in item.children))
        or any(map(_is_data_dependent, item.children))
        for item in found.items.values()
    )
