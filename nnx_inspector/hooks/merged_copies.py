"""What the parameters of a merged module say about it, while its program is traced.

Where the model was split within a program, its parameters tell it from a teacher or an average that
is merged from its graphdef: they are followed to what they are outside `grad` and `vmap`, the
program was given the teacher's, and the model never held them there. This has to be known while the
program is traced, because it says whose the parts are that two trees share, and because
`intercept_methods` and `nni.perturb` act there. Of a tree whose parameters the program was given as
a whole it says little: of two, only the first counts. For a watched loop `live.programs.whose`
decides that later.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector.hooks.variables import held_by


@dataclasses.dataclass(frozen=True)
class Merged:
    """What the parameters of a merged module say about it.

    Attributes:
        held: whether the model has held one of them in the program.
        new: whether it has not held one of them.
        others: whether the program was given such a one, as it was given the model's.
        givers: the programs that were given them; None among them if one was computed.
        values: a number that is the same for the same parameters; 0 if there is none.
    """

    held: bool = False
    new: bool = False
    others: bool = False
    givers: frozenset[Hashable] = frozenset()
    values: int = 0

    @property
    def giver(self) -> Hashable:
        """The program that was given all parameters, which are all new; None if there is none."""
        whole = self.new and not self.held and len(self.givers) == 1
        return next(iter(self.givers)) if whole else None


class Held:
    """The parameters that the model has held in each program that is being traced."""

    def __init__(self) -> None:
        self._programs: weakref.WeakKeyDictionary[object, _Parameters] = weakref.WeakKeyDictionary()

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
        self._read: dict[int, tuple[weakref.ref[object], Merged]] = {}
        self._numbers: dict[Hashable, int] = {}

    def hold(self, module: nnx.Pytree) -> None:
        for node in held_by(module):
            for one in _parameters(node):
                self._held[id(one.value)] = one
                self._programs.add(one.program)
            if isinstance(node, nnx.Pytree) and not isinstance(node, nnx.Module):
                self.hold(node)  # a module is noted by itself

    def read(self, module: object) -> Merged:
        ref, known = self._read.get(id(module), (None, Merged()))
        if ref is not None and ref() is module:
            return known
        nodes = list(held_by(module))
        parts = [self.read(node) for node in nodes if not isinstance(node, nnx.Variable)]
        mine = [one for node in nodes for one in _parameters(node)]
        new = [one for one in mine if id(one.value) not in self._held]
        key = (*(id(one.value) for one in mine), None, *(part.values for part in parts))
        found = Merged(
            held=len(new) < len(mine) or any(part.held for part in parts),
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


def _parameters(node: object) -> Iterator[jit.Origin]:
    if isinstance(node, nnx.Param):
        yield from map(jit.origin_of, jax.tree.leaves(node.get_raw_value()))


def counterparts(own: nnx.Module, tree: nnx.Module) -> list[tuple[nnx.Module, nnx.Module]]:
    """(module, its counterpart in a tree of the same structure) for each; none if it has another:
    other paths or types of objects, or shapes or dtypes of arrays. A step of mixed precision casts
    the parameters before it merges them, so all dtypes of floats are alike.
    """
    nodes = [list(nnx.iter_graph(one, graph=True)) for one in (own, tree)]
    if list(map(_described, nodes[0])) != list(map(_described, nodes[1])):
        return []
    pairs = [(a, b) for (_, a), (_, b) in zip(*nodes, strict=True)]
    return [pair for pair in pairs if isinstance(pair[0], nnx.Module)]


def _described(entry: tuple[Hashable, object]) -> tuple[object, ...]:
    path, node = entry
    value = node.get_raw_value() if isinstance(node, nnx.Variable) else node
    return path, type(node), *kind_of(value)


def kind_of(value: object) -> tuple[object, object]:
    """The shape of an array and its dtype; of any dtype of floats only that it is one."""
    dtype = getattr(value, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return getattr(value, "shape", None), jnp.floating if is_float else dtype
