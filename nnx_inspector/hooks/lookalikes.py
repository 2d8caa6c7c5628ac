"""Trees that were merged from a graphdef without our tag, and may therefore be a scope's model.

Loops that split a model once and merge it in a `jax.jit` make such trees: their graphdef is older
than the hooks. A tree is the model's if it has the model's structure and no other tree of the same
program can be the model's. Whether another one can is known only after the program has been traced,
so a tree comes with a claim, which is withdrawn if a second tree appears. Invariant: if a program
has two such trees, an EMA beside its student, neither is taken for the model without a choice of
the user's.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable
from typing import Any

from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector.hooks.variables import contents

TWINS = (
    "two trees of its structure, split before the loop, are called in one program (an average of "
    "its weights, or a teacher), and nothing says which is the model"
)
SPLIT_INSIDE = (
    "split them inside the watched loop, or say which it is with watch(..., tree=0): 0 is the one "
    "that the program calls first"
)
OTHER = "another tree of its structure was chosen"


@dataclasses.dataclass(eq=False)
class Claim:
    """The claim that a tree is the model's.

    Attributes:
        withdrawn: why it does not hold, in words; "" while it holds.
    """

    withdrawn: str = ""


class _Program:
    """The trees of one program, by the values they were merged from, in order of calls."""

    def __init__(self, chosen: int | None) -> None:
        self._chosen = chosen
        self.claims: dict[Hashable, Claim] = {}
        self.certain = False

    def claim_of(self, tree: nnx.Module) -> Claim:
        values = tuple(jit.identity_of(x) for *_, x in contents(tree) if jit.is_tracer(x))
        claim = self.claims.setdefault(values, Claim())
        self.judge()
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
        claim = self._programs.setdefault(trace, _Program(self._chosen)).claim_of(tree)
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
        if claim is not None:
            return claim
        trace = jit.outermost_trace()
        if trace is not None:
            program = self._programs.setdefault(trace, _Program(self._chosen))
            program.certain = True
            program.judge()
        return None

    def leaves(self, module: nnx.Module, path: Hashable) -> None:
        """Note the claim on a module that a transform takes apart."""
        self._leaving[path] = self._known(module)

    def arrives(self, module: nnx.Module, path: Hashable) -> None:
        """Give a transform's stand-in the claim on the module that it took apart last."""
        self._share(self._leaving.get(path), module)

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
