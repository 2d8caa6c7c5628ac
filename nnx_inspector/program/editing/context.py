"""What holds for all bodies of a program that is edited, and what their additional inputs are.

Invariant: equal functions of equal operands in one context share a trace. Edits nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from nnx_inspector._compat import eqn_params, jaxprs
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.survey import Item, Mark
from nnx_inspector.typing import (
    Array,
    Atom,
    Equation,
    Function,
    Jaxpr,
    Params,
    PyTree,
    Treedef,
    Value,
)

Key = tuple[Value, ...]
"""What an additional input of a body is: a constant, a seed, or the number of an iteration."""

SEED: Key = ("seed",)
PRESENT: Key = ("present",)
"""Whether an example of a vmap takes the branch that it stands in, or has not left the loop."""
GATE: Key = ("gate",)
"""Whether an iteration of a long scan is measured."""
WHERE = "where"
"""First in a key of the positions that count: then the owner, and for that of a value its shape and
how many vmaps map it."""


EditRule = Callable[[Any, Item, Equation, list[Atom]], PyTree]
"""Adds an equation that holds marks: of a `JaxprEditor`, the survey's item, the equation and its
operands; returns what its marks see."""


class EditContext:
    """What holds for all bodies of a program."""

    def __init__(
        self,
        plan: Plan,
        seeds: Callable[[Mark], bool] | None,
        enter: Mapping[str, EditRule],
        *,
        tickets: bool = False,
        most_rows: int = 0,
        presence: bool = False,
        apart: bool = False,
        depths: Mapping[Hashable, int] | None = None,
    ):
        self.enter = enter
        self.most_rows, self.presence = most_rows, presence
        self.apart = apart  # whether what devices have found is added up at the end of a body
        self.gated = False  # within a scan that measures some of its iterations
        self.plan, self.seeds, self.tickets = plan, seeds, tickets
        self.again = False  # within the second pass of a remat
        self.axes: tuple[str, ...] = ()  # the manual axes of the shard_maps around
        self.inside: Params = {}  # the parameters of the innermost one
        self.counted = itertools.count()
        self.depths = depths or {}  # the scans around each call that begins
        self.outside: set[str] = set()  # sites without the layer that a value is given to
        self._traced: dict[Hashable, tuple[Jaxpr, Treedef]] = {}
        self._meshes: dict[Hashable, jax.sharding.AbstractMesh] = {}
        # the parameters that a scan over layers takes by rows; those of calls whose update is seen
        self.stacked, self.moved = set[str](), set[tuple[int, str]]()

    @property
    def checked(self) -> bool:
        """Whether types say along which axes devices differ."""
        return bool(self.inside.get("check_vma", True))

    @staticmethod
    def context_of(like: Equation | None) -> contextlib.AbstractContextManager[None]:
        """The context of an equation; None stands for the one that the program is edited in."""
        return contextlib.nullcontext() if like is None else jaxprs.context_of(like)

    def mesh_of(self, like: Equation | None) -> jax.sharding.AbstractMesh:
        """The mesh in the context of an equation."""
        key = None if like is None else like.ctx
        if key not in self._meshes:
            with self.context_of(like):
                self._meshes[key] = jax.sharding.get_abstract_mesh()
        return self._meshes[key]

    def trace(
        self, f: Function, atoms: Sequence[Atom], like: Equation | None
    ) -> tuple[Jaxpr, Treedef]:
        """The program of `f` for such operands, in the context of an equation, and its result's
        tree. Equal functions share it.
        """
        avals = tuple(atom.aval for atom in atoms)
        around: Any = contextlib.nullcontext()
        if self.inside:
            around = eqn_params.inside_shard_map(self.inside)
        with self.context_of(like), around, internal_config():
            key = None
            if dataclasses.is_dataclass(type(f)):
                key = f, avals, like and like.ctx, self.axes, self.checked
            known = None if key is None else self._traced.get(key)
            if known is None:
                tree: list[Treedef] = []

                def flat(*xs: object) -> list[Array]:
                    leaves, structure = jax.tree.flatten(f(*xs))
                    tree.append(structure)
                    return leaves

                closed = jax.make_jaxpr(flat)(*map(jaxprs.aval_argument, avals))
                known = closed, tree[0]
                if key is not None:
                    self._traced[key] = known
        return known
