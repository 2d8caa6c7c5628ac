"""Trees that were merged in a program, and may or may not be a scope's model.

Where the model was split within the program, its parameters tell: a teacher or an average that is
merged from the model's graphdef has others, which the program was given. Where a loop splits the
model once and merges it in a `jax.jit`, they tell nothing. Such a tree is the model's if it has the
model's structure, or a graphdef of the model's, and no other tree of the same program can be the
model's. Whether another one can is known only after the program has been traced, so a tree comes
with a claim, which is withdrawn if a second tree appears. Invariant: if a program has two such
trees, neither is taken for the model without a choice of the user's.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import jax
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector.hooks.variables import contents, held_by

TWINS = (
    "two trees of its structure, split outside the program that calls them (an average of its "
    "weights, or a teacher), and nothing says which is the model"
)
SPLIT_INSIDE = (
    "split the model inside the step that calls it, or say which it is with watch(..., tree=0): 0 "
    "is the one that the program calls first"
)
OTHER = "another tree of its structure was chosen"


@dataclasses.dataclass(eq=False)
class Claim:
    """The claim that a tree is the model's.

    Attributes:
        withdrawn: why it does not hold, in words; "" while it holds.
        tagged: whether the tree has a graphdef of the model's.
    """

    withdrawn: str = ""
    tagged: bool = False


@dataclasses.dataclass(frozen=True)
class Merged:
    """What the parameters of a merged module say about it.

    Attributes:
        new: whether the model has not held one of them in the program.
        others: whether the program was given such a one, as it was given the model's.
        givers: the programs that were given them; None among them if one was computed.
        values: a number that is the same for the same parameters; 0 if there is none.
    """

    new: bool = False
    others: bool = False
    givers: frozenset[Hashable] = frozenset()
    values: int = 0

    @property
    def giver(self) -> Hashable:
        """The program that was given all parameters, which are new; None if there is none."""
        return next(iter(self.givers)) if self.new and len(self.givers) == 1 else None


class Held:
    """The parameters that the model has held in each program that is being traced."""

    def __init__(self) -> None:
        self._programs: weakref.WeakKeyDictionary[Any, _Parameters] = weakref.WeakKeyDictionary()

    def _here(self) -> _Parameters | None:
        program = jit.outermost_program()
        return None if program is None else self._programs.setdefault(program, _Parameters())

    def leaves(self, module: nnx.Module) -> None:
        """Note the parameters of one of the model's modules that is taken apart."""
        here = self._here()
        if here is not None:
            here.hold(module)

    def read(self, module: nnx.Module) -> Merged:
        """What the parameters of a module say that has just been merged, after its parts."""
        here = self._here()
        return Merged() if here is None else here.read(module)

    def is_second(self, tree: Merged, path: Hashable) -> bool:
        """Whether the program that was given a tree was given another one for this path before."""
        here = self._here()
        if here is None or tree.giver is None:
            return False
        return here.firsts.setdefault((tree.giver, path), tree.values) != tree.values


class _Parameters:
    """The parameters of the model in one program, and what was merged in it.

    Attributes:
        firsts: the first tree that was merged of those given to a program for a path.
    """

    def __init__(self) -> None:
        self.firsts: dict[Hashable, int] = {}
        self._held: dict[int, jit.Origin] = {}
        self._programs: set[Hashable] = set()
        self._read: dict[int, tuple[weakref.ref[Any], Merged]] = {}
        self._numbers: dict[Hashable, int] = {}

    def hold(self, module: nnx.Pytree) -> None:
        for node in held_by(module):
            for one in _parameters(node):
                self._held[id(one.value)] = one
                self._programs.add(one.program)
            if isinstance(node, nnx.Pytree) and not isinstance(node, nnx.Module):
                self.hold(node)  # a module is noted by itself

    def read(self, module: Any) -> Merged:
        ref, known = self._read.get(id(module), (None, Merged()))
        if ref is not None and ref() is module:
            return known
        nodes = list(held_by(module))
        parts = [self.read(node) for node in nodes if not isinstance(node, nnx.Variable)]
        mine = [one for node in nodes for one in _parameters(node)]
        new = [one for one in mine if id(one.value) not in self._held]
        key = (*(id(one.value) for one in mine), None, *(part.values for part in parts))
        found = Merged(
            new=bool(new) or any(part.new for part in parts),
            others=any(map(self._is_anothers, new)) or any(part.others for part in parts),
            givers=frozenset(one.program if one.given else None for one in mine).union(
                *(part.givers for part in parts)
            ),
            values=self._numbers.setdefault(key, len(self._numbers) + 1) if any(key) else 0,
        )
        self._read[id(module)] = weakref.ref(module), found
        return found

    def _is_anothers(self, new: jit.Origin) -> bool:
        if new.program is None:  # an array: it is not computed from what a program is given
            return bool(self._programs) and None not in self._programs
        return new.given and new.program in self._programs


def _parameters(node: Any) -> Iterator[jit.Origin]:
    if isinstance(node, nnx.Param):
        yield from map(jit.origin_of, jax.tree.leaves(node.get_raw_value()))


class _Program:
    """The trees of one program, by the values they were merged from, in order of calls."""

    def __init__(self, chosen: int | None) -> None:
        self._chosen = chosen
        self.claims: dict[Hashable, Claim] = {}
        self._tagged: dict[Hashable, dict[int, Claim]] = {}
        self._values: list[Any] = []  # kept, for their ids
        self.certain = False

    def claim_of(self, tree: nnx.Module) -> Claim:
        values = [jit.origin_of(x).value for *_, x in contents(tree) if jit.is_tracer(x)]
        self._values += values
        claim = self.claims.setdefault(tuple(map(id, values)), Claim())
        self.judge()
        return claim

    def claim_of_tagged(self, tree: Merged, path: Hashable) -> Claim:
        """The claim of a tree with a graphdef of the model's."""
        trees = self._tagged.setdefault((tree.giver, path), {})
        claim = trees.setdefault(tree.values, Claim(tagged=True))
        if len(trees) > 1:
            why = f"{TWINS}: {SPLIT_INSIDE}" if self._chosen is None else OTHER
            for number, one in enumerate(trees.values()):
                one.withdrawn = "" if number == self._chosen else why
        return claim

    def judge(self) -> None:
        alone = len(self.claims) + self.certain < 2
        for number, one in enumerate(self.claims.values()):
            if self._chosen is not None and not self.certain:
                one.withdrawn = "" if number == self._chosen else OTHER
            elif not alone:
                one.withdrawn = f"{TWINS}: {SPLIT_INSIDE}"


class Lookalikes:
    """The claims on one model, by the programs that are being traced.

    Args:
        chosen: which tree is the model if there are several, in the order in which the program
            calls them; None if unknown.
    """

    def __init__(self, chosen: int | None = None) -> None:
        self._chosen = chosen
        self._programs: weakref.WeakKeyDictionary[Any, _Program] = weakref.WeakKeyDictionary()
        self._claims: dict[int, tuple[weakref.ref[Any], Claim]] = {}
        self._leaving: dict[Hashable, Claim | None] = {}

    def claim(self, own: nnx.Module, tree: nnx.Module) -> list[tuple[Any, Any]]:
        """(module, its counterpart in a tree claimed to be the model's) for each; or empty."""
        trace = jit.outermost_trace()
        if trace is None or _structure_of(own) != _structure_of(tree):
            return []
        claim = self._program(trace).claim_of(tree)
        if claim.withdrawn:
            return []
        nodes = (nnx.iter_graph(one, graph=True) for one in (own, tree))
        pairs = [(a, b) for (_, a), (_, b) in zip(*nodes, strict=True)]
        modules = [pair for pair in pairs if isinstance(pair[0], nnx.Module)]
        self._claims.update((id(part), (weakref.ref(part), claim)) for _, part in modules)
        return modules

    def claim_on(self, module: Any) -> Claim | None:
        """The claim by which a called module is the model's; None if it certainly is."""
        claim = self._known(module)
        trace = jit.outermost_trace()
        if trace is not None and (claim is None or claim.tagged):
            program = self._program(trace)
            program.certain = True
            program.judge()
        return claim

    def _program(self, trace: Any) -> _Program:
        return self._programs.setdefault(trace, _Program(self._chosen))

    def leaves(self, module: nnx.Module, path: Hashable) -> None:
        """Note the claim on a module that a transform takes apart."""
        self._leaving[path] = self._known(module)

    def arrives(self, module: nnx.Module, path: Hashable, tree: Merged) -> None:
        """Give a stand-in the claim on the module that a transform took apart last, or its own."""
        claim, trace = self._leaving.get(path), jit.outermost_trace()
        if claim is None and trace is not None and tree.giver is not None:
            claim = self._program(trace).claim_of_tagged(tree, path)
        self._share(claim, module)

    def follow(self, module: nnx.Module, copy: Any) -> None:
        self._share(self._known(module), copy)

    def _share(self, claim: Claim | None, module: Any) -> None:
        if claim is not None:
            self._claims[id(module)] = (weakref.ref(module), claim)

    def _known(self, module: Any) -> Claim | None:
        ref, claim = self._claims.get(id(module), (None, None))
        return claim if ref is not None and ref() is module else None


def _structure_of(module: nnx.Module) -> list[Any]:
    """Paths and types of a module's objects, and shapes and dtypes of its arrays."""
    every: Any = nnx.iter_graph(module, graph=True)
    found: list[Any] = []
    for path, node in every:
        value = node.get_raw_value() if isinstance(node, nnx.Variable) else node
        found.append(
            (path, type(node), getattr(value, "shape", None), getattr(value, "dtype", None))
        )
    return found
