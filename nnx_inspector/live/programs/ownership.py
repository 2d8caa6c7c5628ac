"""Whose calls a launched program makes: the model's, or those of another tree of its structure.

A teacher, an average or a clone that is merged in a program may have the model's graphdef. Nothing
is decided while the program is traced: each place where a pass begins has the parameters as
operands, the finished program says from which of its inputs they come (`sources`), and where it is
launched the inputs are arrays. So it is decided for each launch, for all of its calls together. The
model's are those with the arrays that the model's Variables hold. A loop that carries the state
itself gives other arrays from its second step on: then it is the tree which comes from the inputs
that held the model before, or the only one. Only which modules get marks is known earlier; see
`hooks.merged_copies`. Invariant: of two trees of which nothing tells which is the model, neither is
taken for it without a choice of the user's.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.flax_graphs import graph_nodes
from nnx_inspector.hooks.merged_copies import shape_and_kind
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.hooks.sites import site_key
from nnx_inspector.hooks.variables import raw_value
from nnx_inspector.program.editing.input_sources import Sources, input_sources
from nnx_inspector.program.marks import BEGIN
from nnx_inspector.program.survey import Survey
from nnx_inspector.typing import Value, Variable

AMBIGUOUS = (
    "two trees of its structure, split outside the program that calls them (an average of its "
    "weights, or a teacher), and nothing says which is the model"
)
SPLIT_INSIDE = (
    "split the model inside the step that calls it, or say which it is with watch(..., tree=0): 0 "
    "is the one that the program calls first"
)
FOREIGN = "its parameters are not the model's"
_Kind = tuple[object, object]
"""A shape and a dtype; see `shape_and_kind`."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """Parameters that calls of one program have.

    Attributes:
        calls: the numbers of the calls.
        sources: where each parameter comes from, by its path in the model.
        kinds: the shape and dtype of each.
        names: what the program's function calls the inputs that it comes from.
    """

    calls: tuple[int, ...]
    sources: Mapping[str, Sources]
    kinds: Mapping[str, _Kind]
    names: Mapping[str, Set[str]]

    def agrees(self, other: Tree) -> bool | None:
        """Whether another tree may be the same: one that is computed from another, as by a step of
        gradient descent, has its sources too. None if they have no parameter in common.
        """
        mine, its = self.sources, other.sources
        found = [mine[p] <= its[p] or its[p] <= mine[p] for p in mine if p in its]
        return all(found) if found else None


@dataclasses.dataclass(frozen=True, eq=False)
class Trees:
    """The trees that a program calls, in the order of their first calls in its trace.

    Attributes:
        apart: for each tree, those that are other ones.
        akin: for each tree, those that are the same, or computed from it.
        calls: how many calls the program makes.
        made: how many results of each shape and dtype it has.
        function: the name of its function.
        consts: the values behind its inputs.
    """

    trees: tuple[Tree, ...]
    distinct: tuple[Set[int], ...]
    related: tuple[Set[int], ...]
    calls: int
    made: Counter[_Kind]
    function: str
    consts: tuple[Value, ...]

    @staticmethod
    def of(found: Survey) -> Trees:
        bare, marks = found.jaxpr, list(input_sources(found, BEGIN))
        function, names = jit.input_names(bare)
        made = Counter(shape_and_kind(v.aval) for v in bare.outvars)
        is_mark = any(item.mark is not None for item in found.items.values())
        if is_mark and len(bare.eqns) == 1:  # it stands for calls on arrays outside every program
            names, made = tuple[str, ...](), Counter[_Kind]()
        known: dict[tuple[tuple[str, Sources], ...], list[int]] = {}
        for i in sorted(
            range(len(marks)), key=lambda i: marks[i][0].of
        ):  # in the order of the trace, which jax may change
            mark, (_, *those) = marks[i]
            known.setdefault(tuple(zip(mark.begun.paths, those, strict=False)), []).append(i)
        trees = [
            Tree(
                tuple(calls),
                dict(sources),
                dict(
                    zip(
                        dict(sources),
                        map(shape_and_kind, marks[calls[0]][0].avals[1:]),
                        strict=False,
                    )
                ),
                {p: {names[n] for n in x if 0 <= n < len(names)} - {""} for p, x in sources},
            )
            for sources, calls in known.items()
        ]
        agree = [[one.agrees(other) for other in trees] for one in trees]
        apart, akin = (
            [{j for j, x in enumerate(xs) if x is y} for xs in agree] for y in (False, True)
        )
        every = tuple(trees), tuple(apart), tuple(akin)
        return Trees(*every, len(marks), made, function, found.consts)


@dataclasses.dataclass(frozen=True)
class ForeignCalls:
    """Whose calls one launch makes.

    Attributes:
        why: for each call that is not the model's, why.
        is_doubted: whether the others are not either if the loop calls the model beside them.
    """

    why: Mapping[int, str]
    is_doubted: bool = False


class Ownership:
    """Decides for the launches of one loop.

    Args:
        chosen: which tree is the model if a program has several, in the order in which it calls
            them; None if unknown.

    Attributes:
        scope: the model's, whose `readings` says when modules were replaced.
        is_called: whether a program of the loop has called the model, with the arrays it holds.
        is_carried: whether one has called a tree with other arrays and returned new ones: a step of
            a loop that carries the state itself.
        doubted: the numbers of the passes of calls that are doubted; see `ForeignCalls`.
    """

    def __init__(self, model: nnx.Module, scope: Scope, chosen: int | None = None):
        self._model, self._chosen, self.scope = model, chosen, scope
        self._known: weakref.WeakKeyDictionary[Trees, list[_TreeVariables]] = (
            weakref.WeakKeyDictionary()
        )
        self._inputs: dict[str, Mapping[str, Set[str]]] = {}  # by function: where the model came in
        self.begin()

    def begin(self) -> None:
        """A loop begins."""
        self.is_called = self.is_carried = False
        self.doubted: list[int] = []
        self._held: _ModelVariables | None = None
        self._seen: weakref.WeakKeyDictionary[Trees, set[int]] = weakref.WeakKeyDictionary()

    def pop_foreign_passes(self) -> list[int]:
        """The doubted passes that have turned out not to be the model's since the last call."""
        if not self.is_called or self.is_carried:
            return []
        found, self.doubted = self.doubted, []
        return found

    def is_new_call(self, trees: Trees, call: int) -> bool:
        """Whether a program has not made this call before in the loop."""
        before = self._seen.setdefault(trees, set())
        new = call not in before
        before.add(call)
        return new

    def of(self, trees: Trees, arrays: Sequence[object] | None) -> ForeignCalls:
        """Whose calls a program makes that is launched on these arrays; of one that is compiled
        ahead, which has none, as far as that is known.
        """
        every = range(len(trees.trees))
        given = () if arrays is None else (*arrays, *trees.consts)
        compared = self._compared(trees)
        own = {i for i in every if given and compared[i].holds(given)}
        before, mine = self._inputs.get(trees.function, {}), own
        if self._chosen is not None and any(trees.distinct):
            mine = self._chosen_trees(trees, self._chosen)
        elif not own:
            mine = {i for i in every if _has_same_inputs(trees.trees[i].names, before)}
        why = [_reason(trees.distinct[i], i, mine) for i in every]
        related = (any(why[j] == FOREIGN for j in trees.related[i]) for i in every)
        why = [w or FOREIGN * any_related for w, any_related in zip(why, [*related], strict=True)]
        doubted = False
        for i in every if given and not own else ():
            tree = trees.trees[i]
            if why[i] or not compared[i].paths:
                continue
            if i not in mine and _has_other_inputs(tree.names, before):
                why[i] = FOREIGN
            elif not Counter(tree.kinds[path] for path in compared[i].others(given)) - trees.made:
                self.is_carried = True
            elif self._chosen is None and not self.is_carried and not trees.distinct[i]:
                why[i] = FOREIGN * self.is_called
                doubted = not self.is_called
        certain = [i for i in own if not why[i]]
        if certain:
            self.is_called = True
            self._inputs[trees.function] = trees.trees[certain[0]].names
        return ForeignCalls(
            {n: why[i] for i in every if why[i] for n in trees.trees[i].calls}, doubted
        )

    def _chosen_trees(self, trees: Trees, chosen: int) -> Set[int]:
        """The chosen tree, and what is computed from it; none if there are not so many trees."""
        firsts: list[int] = []
        for i, apart in enumerate(trees.distinct):
            if apart >= set(firsts):
                firsts.append(i)
        return trees.related[firsts[chosen]] if chosen < len(firsts) else frozenset()

    def _compared(self, trees: Trees) -> list[_TreeVariables]:
        """For each tree, what its parameters are compared with."""
        readings = self.scope.readings
        if self._held is None or self._held.readings != readings or not self._held.is_there():
            self._held = _ModelVariables.of(self._model, readings)
            self._known.clear()
        if trees not in self._known:
            self._known[trees] = [
                _TreeVariables.of(one, self._held.variables) for one in trees.trees
            ]
        return self._known[trees]


@dataclasses.dataclass(frozen=True)
class _ModelVariables:
    """The model's Variables by their paths, and where each was found: an attribute of an object."""

    readings: int
    variables: Mapping[str, Variable]
    places: tuple[tuple[Value, ...], ...]

    @staticmethod
    def of(model: nnx.Module, readings: int) -> _ModelVariables:
        nodes = [(path, node) for path, node, _ in graph_nodes(model)]
        known = {path: vars(node) for path, node in nodes if isinstance(node, nnx.Pytree)}
        found = [(path, node) for path, node in nodes if isinstance(node, nnx.Variable)]
        places = [(known.get(path[:-1], {}), str(path[-1]), node) for path, node in found]
        places = [one for one in places if one[0].get(one[1]) is one[2]]
        return _ModelVariables(
            readings,
            {site_key(path): node for path, node in found},
            tuple(zip(*places, strict=True)),
        )

    def is_there(self) -> bool:
        """Whether none was replaced by another Variable; `readings` says that of modules."""
        if not self.places:
            return True
        owners, names, variables = self.places
        return all(map(operator.is_, map(dict.get, owners, names), variables))


@dataclasses.dataclass(frozen=True)
class _TreeVariables:
    """The Variables of the model that a tree has parameters for, and the inputs they come from.

    One that is shared has only one path in the model, and is compared under that.
    """

    variables: tuple[Variable, ...]
    inputs: tuple[int, ...]
    several: tuple[tuple[Variable, Sources], ...]
    paths: tuple[str, ...]

    @staticmethod
    def of(tree: Tree, variables: Mapping[str, Variable]) -> _TreeVariables:
        found = [(variables[p], x, p) for p, x in tree.sources.items() if p in variables]
        single = [(v, *x, p) for v, x, p in found if len(x) == 1 and min(x) >= 0]
        several = [(v, x, p) for v, x, p in found if len(x) != 1 or min(x) < 0]
        those, inputs, paths = zip(*single, strict=True) if single else ((), (), ())
        paths = (*paths, *(p for *_, p in several))
        return _TreeVariables(those, inputs, tuple((v, x) for v, x, _ in several), paths)

    def holds(self, given: Sequence[object]) -> bool:
        """Whether all are the arrays that the Variables hold now."""
        return bool(self.paths) and all(self._same(given))

    def others(self, given: Sequence[object]) -> list[str]:
        """The paths of those that are not."""
        return [path for path, same in zip(self.paths, self._same(given), strict=True) if not same]

    def _same(self, given: Sequence[object]) -> Iterator[bool]:
        values = map(raw_value, self.variables)
        yield from map(operator.is_, values, map(given.__getitem__, self.inputs))
        for variable, sources in self.several:
            value = raw_value(variable)
            yield any(n >= 0 and given[n] is value for n in sources)


def _reason(apart: Set[int], i: int, mine: Set[int]) -> str:
    """Why a tree is not the model's, of which some are, as far as is known."""
    if i not in mine and apart & mine:
        return FOREIGN
    return f"{AMBIGUOUS}: {SPLIT_INSIDE}" if apart and (i not in mine or apart & mine) else ""


def _has_same_inputs(names: Mapping[str, Set[str]], before: Mapping[str, Set[str]]) -> bool:
    """Whether a tree comes from the inputs that the model came from before."""
    common = [path for path in names if path in before]
    return bool(common) and all(names[path] & before[path] for path in common)


def _has_other_inputs(names: Mapping[str, Set[str]], before: Mapping[str, Set[str]]) -> bool:
    """Whether a tree comes from other inputs."""
    return any(x and not x & before.get(path, x) for path, x in names.items())
