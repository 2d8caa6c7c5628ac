"""Samples of parameters and of a model's input, taken on the device beside the summaries.

A bounded number of a parameter's elements is sent. Whether it has changed, and whether it is
finite, is asked of all elements, in one pass over them. Invariant: nothing is differentiated.
`parameter_stats` explains the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.lowering.partition import Part, partitioned, put_into_rows
from nnx_inspector._compat.native import native_primitive
from nnx_inspector._compat.sharding import auto_sharded, to_one_device
from nnx_inspector.arrays import is_array
from nnx_inspector.stats.arithmetic import add, as_real_pairs, fused_stack
from nnx_inspector.stats.samples.parameter_stats import SAMPLE, STATE_HEAD, STATE_LENGTH
from nnx_inspector.stats.samples.strides import (
    as_c_dtype,
    float_vector,
    split_limit,
    strided,
    strided_bits,
    strides_within,
    without_gradient,
)
from nnx_inspector.stats.samples.unit_stats import UNITS
from nnx_inspector.stats.summarize import is_number
from nnx_inspector.typing import AnyArray, Array, Int, PyTree


def is_sampled(x: AnyArray) -> bool:
    """Whether a parameter's array is examined: floats or complex numbers, and not empty."""
    return x.size > 0 and jnp.issubdtype(x.dtype, jnp.inexact)


@internal_config()
def sample_parameter(x: jax.Array) -> jax.Array:
    """What is sent of a parameter (a floating-point or complex array) besides its summary.

    Returns:
        float32[STATE_LENGTH].
    """
    given = jnp.atleast_1d(as_real_pairs(jnp.asarray(x)))
    x = as_c_dtype(given)
    steps = strides_within(x.shape, [*split_limit(x.shape[:-1], SAMPLE // UNITS), UNITS])
    state = without_gradient(_sample, x, steps=steps)
    if given.dtype.itemsize > x.dtype.itemsize:  # what float32 cannot hold is not infinite
        state = state.at[_COUNTS].set(without_gradient(_wide_counts, given))
    return state


_COUNTS: Final = slice(STATE_HEAD.index("nan"), STATE_HEAD.index("infinite") + 1)


def _count_nonfinite(x: jax.Array, bits: jax.Array | None = None) -> list[jax.Array]:
    """The sum of some bits, and how many values are NaN and infinite (as floats)."""
    # Three sums by one reduction of several operands, which a GPU makes in one kernel. The bits are
    # added modulo 2**32, in any order: a sum of the floats would depend on the order and hide a
    # change that rounds off, or that swaps a 0 for a -0.
    found = [x != x, jnp.abs(x) == jnp.inf]
    parts = [jnp.zeros(x.shape, jnp.uint32) if bits is None else bits.astype(jnp.uint32)]
    parts += [part.astype(jnp.uint32) for part in found]
    total, *counts = jax.lax.reduce(parts, [np.uint32(0)] * 3, add, tuple(range(x.ndim)))
    return [total, *(count.astype(jnp.float32) for count in counts)]


def _wide_counts(x: jax.Array, *, rows: int) -> list[jax.Array]:
    return [jnp.stack(_count_nonfinite(x)[1:])]


def _sample_all(x: jax.Array, *, steps: tuple[int, ...]) -> list[jax.Array]:
    word = {4: jnp.uint32, 2: jnp.uint16}[x.dtype.itemsize]
    bits, nan, infinite = _count_nonfinite(x, jax.lax.bitcast_convert_type(x, word))
    y = strided(x, steps).astype(jnp.float32).reshape(-1)
    return [_vector(bits, nan, infinite, y)]


def _vector(bits: jax.Array, nan: jax.Array, infinite: jax.Array, sample: jax.Array) -> jax.Array:
    # A float32 holds whole numbers up to 2**24, so the checksum of 32 bits takes two of them.
    heads = {
        "sum_low": bits & 0xFFFF,
        "sum_high": bits >> 16,
        "elements": jnp.full_like(nan, sample.shape[-1]),
        "nan": nan,
        "infinite": infinite,
    }
    unknown = jnp.full(nan.shape, jnp.nan, jnp.float32)
    first = [heads[name].astype(jnp.float32) if name in heads else unknown for name in STATE_HEAD]
    rest = STATE_LENGTH - len(STATE_HEAD) - sample.shape[-1]
    sample = jnp.pad(sample, [*[(0, 0)] * nan.ndim, (0, rest)])
    return jnp.concatenate([fused_stack(first, axis=-1), sample], axis=-1)


def _count_and_sample_part(
    x: jax.Array, part: Part, *, rows: int, steps: tuple[int, ...]
) -> list[jax.Array]:
    (state,) = _sample(x, rows=rows, steps=x.shape[rows:])
    low, high, nan, infinite = (
        state[..., STATE_HEAD.index(name)].astype(jnp.uint32)
        for name in ("sum_low", "sum_high", "nan", "infinite")
    )
    counts = fused_stack([low + (high << 16), nan, infinite], axis=-1)
    sample = strided_bits(x, part, rows=rows, steps=steps)
    return [put_into_rows(counts, part, rows), *sample]


_count_and_sample_parts = partitioned(_count_and_sample_part)


def _sample_in_parts(
    _: object, x: jax.Array, *, rows: int, steps: tuple[int, ...], devices: int
) -> list[jax.Array]:
    del devices
    counts, sample = _count_and_sample_parts(x, rows=rows, steps=steps)
    sample = jax.lax.bitcast_convert_type(sample, jnp.float32).reshape(*x.shape[:rows], -1)
    bits, nan, infinite = (counts[..., i] for i in range(3))
    return [_vector(bits, nan, infinite, sample)]


_sample = native_primitive(
    "nnx_inspector_sample_parameter",
    _sample_all,
    float_vector(STATE_LENGTH),
    attributes=("steps",),
    in_parts=_sample_in_parts,
)


@internal_config()
def id_stats(ids: Int[Array, "..."]) -> Int[Array, " stats"]:
    """`ID_STATS` of an array of integers that is not empty, float32[4]; an id below 0 as it is."""
    return auto_sharded(_id_stats, ids)


@jax.jit
def _id_stats(ids: jax.Array) -> jax.Array:
    found = jnp.sort(ids.reshape(-1))
    # Of sorted ids the longest run is the commonest one: each place is numbered from where its run
    # begins. A count for each id would need as many counters as there may be ids.
    begins = jnp.concatenate([jnp.ones(1, bool), found[1:] != found[:-1]])
    index = jnp.arange(found.size)
    length = index - jax.lax.cummax(jnp.where(begins, index, 0)) + 1
    last = jnp.argmax(length)
    stats = length[last] / found.size, found[last], begins.sum(), found.size
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in stats])


@internal_config()
def examples_vary(tree: PyTree, *, each: bool = False) -> jax.Array:
    """Whether any array of a pytree (or each) differs along its first axis, as a sample's element.

    Arrays with fewer than two examples do not count.
    """
    leaves = [x for x in jax.tree.leaves(tree) if is_array(x)]
    leaves = [x for x in leaves if x.ndim and x.shape[0] > 1 and x.size and is_number(x.dtype)]
    found = [_differs(jax.lax.stop_gradient(jnp.asarray(x))) for x in leaves]
    of = jnp.all if each else jnp.any
    differ = of(jnp.stack(found)) if found else jnp.zeros((), bool)
    state = jnp.zeros(STATE_LENGTH, jnp.float32)
    state = state.at[STATE_HEAD.index("elements")].set(1.0)
    return state.at[len(STATE_HEAD)].set(differ.astype(jnp.float32))


@jax.jit
def _differs(x: jax.Array) -> jax.Array:
    if jax.device_count() == 1:
        return auto_sharded(lambda x: jnp.any(x != x[:1]), x)

    def differs(x: jax.Array) -> jax.Array:
        """By a sum, whose exchange XLA joins with the others."""
        each = jnp.any(x != x[:1], axis=tuple(range(1, x.ndim)))
        return each.sum(dtype=jnp.uint32) > 0

    return auto_sharded(differs, x)


@internal_config()
def sample_parameters(parameters: Sequence[Any], arguments: object) -> jax.Array:
    """A sample of each parameter, and whether the arguments vary; float32[..., STATE_LENGTH]."""
    return jnp.stack(to_one_device([*map(sample_parameter, parameters), examples_vary(arguments)]))
