"""The changes of Variables between two snapshots of a module, and in an inspector's last pass.

Invariant: it copies at most MOST_BYTES, on the arrays' own devices, and only reads; an array
that was donated to a running step is left out, never compared wrongly. Knows neither paths nor the
screen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector.hooks.variables import byte_count
from nnx_inspector.inspector.nnx.graph import arrays_in, content_kind, scalar_text
from nnx_inspector.screen import protocol
from nnx_inspector.typing import AnyArray, Value, Variable

MOST_BYTES = 32 << 20
"""The most bytes of copies that are kept between two snapshots."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The values of some Variables at one step.

    Attributes:
        copies: id of a Variable -> the Variable (which keeps its id unique), a copy of its value.
        left_out: how many Variables did not fit.
    """

    step: int
    copies: dict[int, tuple[Variable, AnyArray]]
    left_out: int

    def copy_of(self, variable: object) -> AnyArray | None:
        return self.copies.get(id(variable), (None, None))[1]


def snapshot_of(variables: Iterable[tuple[object, Value]], step: int) -> Snapshot:
    """Copy the values of as many Variables as fit."""
    copies: dict[int, tuple[Variable, AnyArray]] = {}
    total = left_out = 0
    for variable, value in variables:
        if not isinstance(variable, nnx.Variable) or content_kind(value) != "array":
            continue
        size = byte_count(arrays_in(value))
        if total + size > MOST_BYTES:
            left_out += 1
            continue
        copy = _copy(value)
        if copy is not None:
            total += size
            copies[id(variable)] = (variable, copy)
    return Snapshot(step, copies, left_out)


def _copy(value: AnyArray) -> AnyArray | None:
    if isinstance(value, np.ndarray):
        return value.copy()
    try:
        # not jnp.copy: that compiles a program for each shape
        return jax.device_put(value, value.sharding, may_alias=False)
    except (RuntimeError, ValueError):  # deleted since it was read: a step is running
        return None


def change_between(before: AnyArray | None, now: AnyArray | None) -> protocol.NnxChange | None:
    """The change of a value, computed on the host in float64."""
    if before is None or now is None:
        return None
    texts = {"before": scalar_text(before), "after": scalar_text(now)}
    if before.shape != now.shape or before.dtype != now.dtype:
        return protocol.NnxChange(same=False, distance=None, relative=None, **texts)
    if not all(not isinstance(x, jax.Array) or x.is_fully_addressable for x in (before, now)):
        return None
    if jnp.issubdtype(before.dtype, jax.dtypes.prng_key):
        old, new = (np.asarray(jax.random.key_data(x)) for x in (before, now))
        same = bool(np.array_equal(old, new))
        return protocol.NnxChange(same=same, distance=None, relative=None, **texts)
    if jnp.issubdtype(before.dtype, jax.dtypes.extended):
        return None
    old, new = (np.asarray(x) for x in (before, now))
    if old.tobytes() == new.tobytes():
        return protocol.NnxChange(same=True, distance=0.0, relative=0.0, **texts)
    wide = np.complex128 if np.iscomplexobj(old) else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        distance = float(np.linalg.norm((new.astype(wide) - old.astype(wide)).ravel()))
        return norm_change(distance, float(np.linalg.norm(old.astype(wide).ravel())), **texts)


def norm_change(
    distance: float, norm: float, *, before: str = "", after: str = ""
) -> protocol.NnxChange:
    """A change of which only the norms are known."""
    return protocol.NnxChange(
        same=False,
        distance=protocol.finite(distance),
        relative=protocol.finite(distance / norm) if norm > 0 else None,
        before=before,
        after=after,
    )


def norm_of(value: Value) -> float:
    """The norm of a value in float64, NaN if it cannot be read."""
    copy = _copy(value) if content_kind(value) == "array" else None
    if copy is None or (isinstance(copy, jax.Array) and not copy.is_fully_addressable):
        return math.nan
    if jnp.issubdtype(copy.dtype, jax.dtypes.extended):
        return math.nan
    x = np.asarray(copy)
    return float(np.linalg.norm(x.astype(np.complex128 if np.iscomplexobj(x) else float).ravel()))
