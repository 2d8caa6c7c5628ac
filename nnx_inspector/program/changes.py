"""Marks the Variables that a call changes, with their values before and after.

Invariant: a Variable that holds the same value object after a call gets no mark and costs nothing.
If the object differs, the program (`analysis.identity`) shows whether the value does too, or only
passed through a transform. Does not write to any Variable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector.hooks.sites import Path, site_key
from nnx_inspector.hooks.variables import Contents, changed_variables
from nnx_inspector.program.analysis.describe import value_in_words
from nnx_inspector.program.marks import CHANGE, mark_tree
from nnx_inspector.program.structure import Structure
from nnx_inspector.typing import Array, Equation, PyTree, Value


@dataclasses.dataclass(frozen=True)
class ChangedVariable:
    """One Variable (or one array of it) that a call changed.

    Attributes:
        name: its path relative to the module that was called, `"norm/mean"`.
        type: the name of the Variable's class: `"BatchStat"`, `"Cache"`, `"RngCount"`.
        before: dtype and shape of its value before the call; `""` if the call created it.
        after: the same after the call; `""` if the call deleted it.
    """

    name: str
    type: str
    before: str
    after: str

    def __str__(self) -> str:
        if self.before == self.after:
            return f"{self.name} ({self.type})"
        how = f"{self.before} -> {self.after}" if self.before and self.after else ""
        return f"{self.name} ({self.type} {how or ('created' if self.after else 'deleted')})"


_NOTHING = Structure(jax.tree.structure(None), (), ())
_PAIR = Structure(jax.tree.structure((0, 0)), ("", ""), (0, 1))


def mark_changes(out: object, before: Contents, module: nnx.Module, **params: Value) -> PyTree:
    """`out`, a call's result, with marks of the Variables that hold another value object than
    `before` the call.

    A mark's first two operands are the arrays before and after. If they cannot be subtracted (a
    new Variable, another shape), the mark has no such operands, and its structure says so.
    `params` are the mark's other parameters.
    """
    for path, old, new in changed_variables(before, module):
        for change, pair in _arrays(path, old, new):
            structure = _PAIR if pair else _NOTHING
            out = mark_tree(out, *pair, structure=structure, part=CHANGE, variable=change, **params)
    return out


def _arrays(path: Path, old: Value, new: Value) -> Any:
    """For each array of a Variable that differs: its description, and the pair of its values."""
    name, kind = site_key(path), type((new or old)[0]).__name__
    olds, old_tree = jax.tree_util.tree_flatten_with_path(None if old is None else old[1])
    news, new_tree = jax.tree_util.tree_flatten_with_path(None if new is None else new[1])
    if old is None or new is None or old_tree != new_tree:
        texts = ["" if one is None else value_in_words(one[1]) for one in (old, new)]
        yield ChangedVariable(name, kind, *texts), ()
        return
    for (inner, a), (_, b) in zip(olds, news, strict=True):
        if a is b or isinstance(a, jax.Ref):  # a reference: see `variables.unseen_references`
            continue
        a, b = _as_array(a), _as_array(b)
        change = ChangedVariable(
            name + jax.tree_util.keystr(inner), kind, value_in_words(a), value_in_words(b)
        )
        alike = isinstance(a, jax.Array) and isinstance(b, jax.Array) and a.shape == b.shape
        if alike:
            yield change, (a, b)
        elif change.before != change.after or isinstance(a, jax.Array) or a != b:
            yield change, ()


def _as_array(value: Value) -> Array:
    return (
        jnp.asarray(value)
        if isinstance(value, bool | int | float | complex | np.ndarray)
        else value
    )


def pair_of(equation: Equation) -> list[Value]:
    """The operands of a mark of a change that hold the value before and after, if it has them."""
    return list(equation.invars[: len(equation.params["structure"].arrays)])


def is_unmeasurable(equation: Equation, same: Callable[[Any, Any], bool]) -> bool:
    """Whether a marked change has no figures: a PRNG key, no pair of values, or the same value."""
    if equation.params.get("part") != CHANGE:
        return False
    pair = pair_of(equation)
    if not pair or jnp.issubdtype(pair[0].aval.dtype, jax.dtypes.extended):
        return True
    return same(*pair)


@internal_config()
def difference(old: jax.Array, new: jax.Array) -> jax.Array:
    """`new - old`, exact for integers (up to 32 bits: within the range of int32)."""
    old, new = jnp.asarray(old), jnp.asarray(new)  # outside jit it may be a Python number
    dtype = jnp.promote_types(old.dtype, new.dtype)
    old, new = (jax.lax.stop_gradient(x).astype(dtype) for x in (old, new))
    if jnp.issubdtype(dtype, jnp.inexact):
        wide = dtype if dtype.itemsize >= 4 else jnp.float32
        return new.astype(wide) - old.astype(wide)
    if dtype == jnp.bool_ or dtype.itemsize < 4:
        return new.astype(jnp.int32) - old.astype(jnp.int32)
    signed = jnp.int32 if dtype.itemsize == 4 else jnp.int64
    return jax.lax.bitcast_convert_type(new - old, signed)  # it may be negative
