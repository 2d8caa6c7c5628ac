"""What the parameters of a merged module say about it, while its program is traced.

Where the model was split within a program, its parameters tell it from a teacher or an average that
is merged from its graphdef: they are followed to what they are outside `grad` and `vmap`, the
program was given the teacher's, and the model never held them there. This has to be known while the
program is traced, because it says whose the parts are that two trees share, and because
`intercept_methods` and `nni.perturb` act there. Of a tree whose parameters the program was given as
a whole it says little: of two, only the first counts. For a watched loop `live.programs.ownership`
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
from nnx_inspector.hooks.variables import child_nodes


@dataclasses.dataclass(frozen=True)
class MergedParameters:
    """What the parameters of a merged module say about it.

    Attributes:
        held: whether the model has held one of them in the program.
        new: whether it has not held one of them.
        of_another_model: whether one that is new is an input of a program, which also has the
            model's parameters as inputs.
        programs: the programs that have them as inputs; None among them if one was computed.
        fingerprint: a number that is the same for the same parameters; 0 if there is none.
    """

    held: bool = False
    new: bool = False
    of_another_model: bool = False
    programs: frozenset[Hashable] = frozenset()
    fingerprint: int = 0

    @property
    def program(self) -> Hashable:
        """The program that was given all parameters, which are all new; None if there is none."""
        whole = self.new and not self.held and len(self.programs) == 1
        return next(iter(self.programs)) if whole else None


class ModelParameters:
    """The parameters that the model has held in each program that is being traced."""

    def __init__(self) -> None:
        self._programs: weakref.WeakKeyDictionary[object, _ProgramParameters] = (
            weakref.WeakKeyDictionary()
        )

    def _of_this_program(self) -> _ProgramParameters | None:
        program = jit.outermost_program()
        return None if program is None else self._programs.setdefault(program, _ProgramParameters())

    def note_flattened(self, module: nnx.Module) -> None:
        """Note the parameters of one of the model's modules that is taken apart."""
        parameters = self._of_this_program()
        if parameters is not None:
            parameters.hold(module)

    def read(self, module: nnx.Module) -> MergedParameters:
        """What the parameters of a module say that has just been merged, after its parts."""
        parameters = self._of_this_program()
        return MergedParameters() if parameters is None else parameters.read(module)

    def is_second_tree(self, tree: MergedParameters, path: Hashable) -> bool:
        """Whether the program that was given a tree was given another one for this path before."""
        parameters = self._of_this_program()
        if parameters is None or tree.program is None:
            return False
        return (
            parameters.firsts.setdefault((tree.program, path), tree.fingerprint) != tree.fingerprint
        )


class _ProgramParameters:
    """The parameters of the model in one program, and what was merged in it.

    Attributes:
        firsts: the first tree that was merged of those given to a program for a path.
    """

    def __init__(self) -> None:
        self.firsts: dict[Hashable, int] = {}
        self._held: dict[int, jit.OuterValue] = {}
        self._programs: set[Hashable] = set()
        self._read: dict[int, tuple[weakref.ref[object], MergedParameters]] = {}
        self._numbers: dict[Hashable, int] = {}

    def hold(self, module: nnx.Pytree) -> None:
        for node in child_nodes(module):
            for one in _parameter_origins(node):
                self._held[id(one.value)] = one
                self._programs.add(one.program)
            if isinstance(node, nnx.Pytree) and not isinstance(node, nnx.Module):
                self.hold(node)  # a module is noted by itself

    def read(self, module: object) -> MergedParameters:
        ref, known = self._read.get(id(module), (None, MergedParameters()))
        if ref is not None and ref() is module:
            return known
        nodes = list(child_nodes(module))
        parts = [self.read(node) for node in nodes if not isinstance(node, nnx.Variable)]
        mine = [one for node in nodes for one in _parameter_origins(node)]
        new = [one for one in mine if id(one.value) not in self._held]
        key = (*(id(one.value) for one in mine), None, *(part.fingerprint for part in parts))
        found = MergedParameters(
            held=len(new) < len(mine) or any(part.held for part in parts),
            new=bool(new) or any(part.new for part in parts),
            of_another_model=any(map(self._is_of_another_model, new))
            or any(part.of_another_model for part in parts),
            programs=frozenset(one.program if one.given else None for one in mine).union(
                *(part.programs for part in parts)
            ),
            fingerprint=self._numbers.setdefault(key, len(self._numbers) + 1) if any(key) else 0,
        )
        self._read[id(module)] = weakref.ref(module), found
        return found

    def _is_of_another_model(self, new: jit.OuterValue) -> bool:
        if new.program is None:  # an array: it is not computed from what a program is given
            return bool(self._programs) and None not in self._programs
        return new.given and new.program in self._programs


def _parameter_origins(node: object) -> Iterator[jit.OuterValue]:
    if isinstance(node, nnx.Param):
        yield from map(jit.outer_value, jax.tree.leaves(node.get_raw_value()))


def counterparts(own: nnx.Module, tree: nnx.Module) -> list[tuple[nnx.Module, nnx.Module]]:
    """(module, its counterpart in a tree of the same structure) for each; none if it has another:
    other paths or types of objects, or shapes or dtypes of arrays. A step of mixed precision casts
    the parameters before it merges them, so all dtypes of floats are alike.
    """
    nodes = [list(nnx.iter_graph(one, graph=True)) for one in (own, tree)]
    if list(map(_entry_type, nodes[0])) != list(map(_entry_type, nodes[1])):
        return []
    pairs = [(a, b) for (_, a), (_, b) in zip(*nodes, strict=True)]
    return [pair for pair in pairs if isinstance(pair[0], nnx.Module)]


def _entry_type(entry: tuple[Hashable, object]) -> tuple[object, ...]:
    path, node = entry
    value = node.get_raw_value() if isinstance(node, nnx.Variable) else node
    return path, type(node), *shape_and_kind(value)


def shape_and_kind(value: object) -> tuple[object, object]:
    """The shape of an array and its dtype; of any dtype of floats only that it is one."""
    dtype = getattr(value, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return getattr(value, "shape", None), jnp.floating if is_float else dtype
