"""An array, read where it lies: exact counts, extremes and moments, and a sample of it in bins.

It is a primitive because its best program depends on the platform, which is known only when it is
lowered: a CPU vectorises integer reductions and float sums apart, an accelerator reads the array
once, and a TPU has no fast scatter. Invariant: counts and extremes are the same on every
platform, bit for bit; no sample reads beyond its array or depends on its values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from nnx_inspector._compat.lowering.partition import Part, partitioned, put_into_rows
from nnx_inspector._compat.native import (
    ARRAY_STATS,
    call,
    can_call_on,
    register_cpu_lowering,
    with_x64_of_operands,
)
from nnx_inspector._compat.sharding import pad_axes_evenly
from nnx_inspector.stats.arithmetic import (
    add,
    as_words,
    bit_pattern,
    counters,
    from_counters,
    from_words,
    fused_stack,
    infinity_pattern,
    is_finite,
    is_floating,
    merge_counters,
    merge_parts,
    merge_words,
    move_shift,
    points_dtype,
    real_values,
    scale_for,
    scaled_difference,
    single_parts,
    sum_dtype,
    sums_of_part,
    width_of_words,
    words_of,
)
from nnx_inspector.stats.bins import (
    BINS,
    LOW_BITS,
    NAN_BIN,
    NEGINF_BIN,
    POSINF_BIN,
    SIGN,
    UNSEEN_BIN,
    ZERO_BIN,
)
from nnx_inspector.typing import Array, Num, UInt32, Value

Sample = int | Literal["auto"]
"""See `summarize`."""
SAMPLE: Final = 2**16
"""The least number of values in a sample: the rank of a quantile is within 1.1 % (`rank_error`)."""
_MIDDLE, _LAST = 32, 64
"""Indices that a sample keeps of the axes between the first and the last, and of the last."""
_SHIFT_SAMPLE: Final = 2**12
_CONTENDED: Final = 2**20
"""From this many values on, a GPU uses private counters: additions to one would queue up."""
_COUNTERS: Final = 512
_LARGE: Final = 2**24
"""The values of a large array: reading it twice takes less time there than merging parts, which is
ten times the arithmetic."""
_BLOCK: Final = 2**18
"""Values that a TPU counts at once."""
_LARGEST: Final = 2**32 - 1
_IN_C: Final = frozenset(
    ["bool", "float16", "bfloat16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
"""The dtypes that the function in C reads; others are converted first."""

_Fields = tuple[jax.Array, jax.Array, jax.Array]
_Axes = tuple[int, ...]


def array_stats(x: jax.Array, *, batch_rank: int, sample: Sample) -> _Fields:
    """The `bins`, `points` and `sums` of a Summary.

    Args:
        x: an array of numbers with an axis after the first `batch_rank`, none of them empty. It
            keeps its shape, because a sharded array could not be flattened in place.
        batch_rank, sample: see `summarize`.
    """
    steps = strides(x.shape[batch_rank:], sample)
    bins, points, sums = _array_stats.bind(x, batch_rank=batch_rank, steps=steps)
    return bins, points, sums


def strides(shape: tuple[int, ...], sample: Sample) -> tuple[int, ...]:
    """The step along each axis that takes a sample of an array of this shape, without axes of
    length 0.

    Axes between the first and the last are thinned first (tokens, pixels), then the last (units),
    then the first (examples). The last axis has an odd step: an even one would meet the same unit
    of each pair, or of each head. With several devices, a step divides what one of them may hold of
    an axis, so that no value is sent to another.

    Example:
        >>> strides((16, 512, 1024), "auto"), strides((16, 512, 1024), 8), strides((9, 9), "auto")
        ((1, 17, 7), (1, 8, 1), (1, 1))
    """
    if sample == "auto":
        return _strides(shape, SAMPLE)
    long = [axis for axis, n in enumerate(shape[:-1]) if n >= 8 * sample]
    return tuple(sample if [axis] == long[-1:] else 1 for axis in range(len(shape)))


def _strides(shape: tuple[int, ...], least: int) -> tuple[int, ...]:
    """The steps that leave at least this many values."""
    steps, last = [1] * len(shape), len(shape) - 1
    inner = sorted(range(1, last), key=lambda axis: -shape[axis])
    gently = [*((axis, _MIDDLE) for axis in inner), (last, _LAST)]
    for axis, keep in [*gently, (0, 1), *((axis, 1) for axis in inner), (last, 1)]:
        kept = [_kept_length(n, step) for n, step in zip(shape, steps, strict=True)]
        wanted = max(keep, -(-least * kept[axis] // math.prod(kept)))
        step = max(shape[axis] // wanted, 1)
        while step > 1 and not (
            _may_step(step, shape[axis], odd=axis == last)
            and _kept_length(shape[axis], step) >= wanted
        ):
            step -= 1
        steps[axis] = max(step, steps[axis])
    return tuple(steps)


def _may_step(step: int, length: int, *, odd: bool) -> bool:
    devices = jax.device_count()
    if devices == 1:
        return not odd or step % 2 == 1
    return (length // math.gcd(length, devices)) % step == 0


def _kept_length(length: int, step: int) -> int:
    return -(-(length - step // 2) // step)


def _sample(x: jax.Array, batch_rank: int, steps: tuple[int, ...]) -> jax.Array:
    if all(step == 1 for step in steps):
        return x
    every = (1,) * batch_rank + steps
    return lax.slice(x, [step // 2 for step in every], x.shape, every)


_array_stats = Primitive("nnx_inspector_array_stats")
_array_stats.multiple_results = True


@_array_stats.def_abstract_eval
def _abstract_eval(x: Value, *, batch_rank: int, steps: tuple[int, ...]) -> list[Value]:
    rows, exact = x.shape[:batch_rank], points_dtype(x.dtype)
    spec = PartitionSpec(*[None] * (batch_rank + 1))
    sharding = NamedSharding(x.sharding.mesh, spec)
    kinds = [(BINS, np.dtype(np.uint32)), (3, exact), (3, sum_dtype(exact))]
    return [
        x.update(shape=(*rows, n), dtype=dtype, weak_type=False, sharding=sharding)
        for n, dtype in kinds
    ]


@_array_stats.def_impl
def _impl(x: Value, **how: Any) -> Sequence[Value]:
    x = jnp.asarray(x)  # without jit (`jax_disable_jit`) a NumPy array arrives as it is
    (platform,) = {device.platform for device in x.devices()}
    if platform == "cpu" and not can_call_on(len(x.devices())):
        platform = "cpus"
    return _program_for(platform)(x, **how)


def _batch_rule(
    args: Sequence[Value], dims: Sequence[int], *, batch_rank: int, steps: tuple[int, ...]
) -> tuple[list[Value], list[int]]:
    x = jnp.moveaxis(args[0], dims[0], 0)
    return _array_stats.bind(x, batch_rank=batch_rank + 1, steps=steps), [0, 0, 0]


batching.primitive_batchers[_array_stats] = _batch_rule


# ------------------------------------------------------------------ a program for each platform


def _on_one_cpu(x: jax.Array, *, batch_rank: int, steps: tuple[int, ...]) -> _Fields:
    """On one CPU: a function in C that reads once and needs no compiler."""
    exact = points_dtype(x.dtype)
    if x.dtype.name not in _IN_C:
        x = real_values(x)
    kinds = zip((BINS, 3, 3), (np.uint32, exact, sum_dtype(exact)), strict=True)
    out = [jax.ShapeDtypeStruct((*x.shape[:batch_rank], n), dtype) for n, dtype in kinds]
    bins, points, sums = call(ARRAY_STATS, out, x, batch_rank=batch_rank, steps=steps)
    return bins, points, sums


def _on_cpus(x: jax.Array, *, batch_rank: int, steps: tuple[int, ...]) -> _Fields:
    """On several CPUs: integers in one reduction, sums in others, so that each is vectorised."""
    value, part = real_values(x), real_values(_sample(x, batch_rank, steps))
    axes = tuple(range(batch_rank, x.ndim))
    points, sums, apart = _two_reductions(x, value, axes)
    bins = _count_bins(_scatter, value, part, axes, apart)
    return bins, fused_stack(points, axis=-1), fused_stack(sums, axis=-1)


def _on_cpus_in_parts(
    x: jax.Array, *, batch_rank: int, steps: tuple[int, ...], devices: int
) -> _Fields:
    """On several CPUs: each reads what it holds, and one exchange adds up what they find."""
    (words,) = _words(x, rows=batch_rank, steps=steps, devices=devices)
    return from_parts(words, points_dtype(x.dtype))


def array_stats_unreduced(
    x: Num[Array, "..."], *, batch_rank: int, sample: Sample
) -> UInt32[Array, "*rows words"]:
    """What `from_parts` makes figures of, once `sum_over_devices` has added it up."""
    how = {"steps": strides(x.shape[batch_rank:], sample), "devices": jax.device_count()}
    return _words(x, rows=batch_rank, apart=True, **how)[0]


def from_parts(words: UInt32[Array, "*rows words"], exact: np.dtype[Any]) -> _Fields:
    """The figures of an array, from what all devices have found in their parts."""
    parts = words[..., BINS:].reshape(*words.shape[:-1], -1, width_of_words(exact))
    first, second = merge_words(parts, exact)
    return words[..., :BINS], fused_stack(first, axis=-1), fused_stack(second, axis=-1)


def _words_of_part(
    x: jax.Array, part: Part, *, rows: int, steps: tuple[int, ...], devices: int
) -> list[jax.Array]:
    bins, points, sums = _array_stats.bind(x, batch_rank=rows, steps=steps)
    # What the devices return is added up. Counts may be; extremes and moments may not, so the
    # vector has a place for those of each device, in which all others have zeros.
    n = jnp.uint32(math.prod(x.shape[rows:]))
    finite = n - sum(bins[..., i] for i in (NAN_BIN, POSINF_BIN, NEGINF_BIN))
    mine = as_words(finite, points, sums)[..., None, :]
    number = lax.broadcasted_iota(jnp.int32, (*bins.shape[:-1], devices, 1), rows)
    table = jnp.where(number == part.number, mine, jnp.uint32(0))
    found = jnp.concatenate([bins, table.reshape(*bins.shape[:-1], -1)], axis=-1)
    return [put_into_rows(found, part, rows)]


def _keeps_sample(
    axis: int, length: int, *, rows: int, steps: tuple[int, ...], devices: int
) -> bool:
    del devices
    return axis < rows or length % steps[axis - rows] == 0


_words = partitioned(_words_of_part, _keeps_sample)


def _on_accelerator(
    x: jax.Array,
    *,
    batch_rank: int,
    steps: tuple[int, ...],
    count: Callable[..., jax.Array],
) -> _Fields:
    """On an accelerator: exact figures, of most arrays in one reduction."""
    # XLA computes at compile time what depends on constants only. A parameter that the user's
    # function closes over is one, and XLA's own interpreter takes minutes to reduce it. Behind the
    # barrier it is no constant.
    x = lax.optimization_barrier(x)
    value, part = real_values(x), real_values(_sample(x, batch_rank, steps))
    axes = tuple(range(batch_rank, x.ndim))
    is_large = x.size >= _LARGE
    points, sums, apart = (
        _two_reductions(x, value, axes) if is_large else _one_reduction(value, axes)
    )
    # All results of an array are words of one vector, which one kernel makes and one copy joins to
    # those of other arrays. As three outputs they would be three kernels.
    behind = [word for x in (*points, *sums) for word in words_of(x)]
    whole = _count_bins(count, value, part, axes, apart, behind)
    half = BINS + len(behind) // 2
    first, second = (
        from_words(words, x[0].dtype)
        for words, x in ((whole[..., BINS:half], points), (whole[..., half:], sums))
    )
    return whole[..., :BINS], first, second


_Stats = tuple[list[jax.Array], list[jax.Array], dict[int, jax.Array]]
"""Points, sums and the counts of `EXACT_BINS`."""


def _two_reductions(x: jax.Array, value: jax.Array, axes: _Axes) -> _Stats:
    """First the counts and extremes, which are the scale of the sums, then these."""
    operands, initial = counters(value)
    found = lax.reduce(tuple(operands), tuple(initial), merge_counters, axes)
    low, high, apart = from_counters(value, found)
    shift = _mean_of(_shift_sample(x, axes[0]), axes, low, high)
    scale, factor = scale_for(
        scaled_difference(high, shift, 0.5), scaled_difference(low, shift, 0.5)
    )
    d = scaled_difference(value, _expand(shift, axes), _expand(factor, axes))
    d = jnp.where(is_finite(value), d, 0)
    return [low, high, shift], [scale, d.sum(axis=axes), (d * d).sum(axis=axes)], apart


def _merge_counters_and_parts(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    return *merge_counters(a[:-5], b[:-5]), *merge_parts(a[-5:], b[-5:])


def _one_reduction(value: jax.Array, axes: _Axes) -> _Stats:
    """All from one reduction: see `merge_parts`."""
    operands, initial = counters(value)
    parts, none = single_parts(value)
    *found, n, origin, e, mean, square = lax.reduce(
        (*operands, *parts),
        (*initial, *none),
        _merge_counters_and_parts,
        axes,
    )
    low, high, apart = from_counters(value, found)
    shift, *sums = sums_of_part((n, origin, e, mean, square))
    return [low, high, shift], sums, apart


def _shift_sample(x: jax.Array, batch_rank: int) -> jax.Array:
    """The values about whose mean all others are summed.

    The mean of m of n values is at most sqrt(n / m - 1) standard deviations from the mean of all,
    so the sums cancel little (Chan, Golub and LeVeque 1983).
    """
    return real_values(_sample(x, batch_rank, _strides(x.shape[batch_rank:], _SHIFT_SAMPLE)))


def _mean_of(value: jax.Array, axes: _Axes, low: jax.Array, high: jax.Array) -> jax.Array:
    """The mean of the finite values of each row, within [low, high]."""
    real, n = sum_dtype(value.dtype), math.prod(value.shape[axis] for axis in axes)
    # Each value is first divided by at least n, because the sum of the values could overflow.
    share = math.ldexp(1.0, -max(n - 1, 1).bit_length())
    origin = jnp.zeros_like(low) if is_floating(value) else low
    shares = scaled_difference(value, _expand(origin, axes), jnp.asarray(share, real))
    finite = is_finite(value)
    zero = np.array(0, real)
    total, many = lax.reduce(
        (jnp.where(finite, shares, 0), finite.astype(real)),
        (zero, zero),
        add,
        axes,
    )
    return move_shift(origin, total * (1 / (share * jnp.maximum(many, 1))), low, high)


def _expand(figure: jax.Array, axes: _Axes) -> jax.Array:
    """A figure of each row, with axes of length 1 in place of the reduced ones."""
    return lax.expand_dims(figure, axes)


def _bins_of(value: Num[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The bin of each value, uint32, in the values' shape."""
    wide = value.dtype == np.float64
    top = np.finfo(np.float32).max
    single = (jnp.clip(value, -top, top) if wide else value).astype(jnp.float32)
    index = lax.bitcast_convert_type(single, jnp.uint32) >> LOW_BITS
    if not is_floating(value):
        return jnp.where(value == 0, jnp.uint32(ZERO_BIN), index)
    bits, infinity = bit_pattern(value), infinity_pattern(value.dtype)
    magnitude = bits & np.iinfo(bits.dtype).max
    index = jnp.where(magnitude == 0, (index & SIGN) | ZERO_BIN, index)
    if wide:
        index = jnp.where(magnitude == infinity, (index & SIGN) | POSINF_BIN, index)
    return jnp.where(magnitude > infinity, jnp.uint32(NAN_BIN), index)


def _count_bins(
    count: Callable[..., jax.Array],
    value: jax.Array,
    part: jax.Array,
    axes: _Axes,
    apart: dict[int, jax.Array],
    behind: Sequence[jax.Array] = (),
) -> jax.Array:
    """The bins of a part, with the known counts of `EXACT_BINS` and of the unseen values in place
    of those of the part, and the numbers `behind` them.

    Known counts come in last: where counting begins with zeros, XLA makes those of all arrays of a
    program in one kernel.
    """
    index = _bins_of(part)
    known = {BINS + i: number for i, number in enumerate(behind)}
    if part.shape != value.shape:
        n, m = (math.prod(x.shape[axis] for axis in axes) for x in (value, part))
        unseen = jnp.uint32(min(n, _LARGEST)) - jnp.uint32(m) - sum(apart.values())  # modulo 2**32
        known |= {**apart, UNSEEN_BIN: unseen}
        for one in apart:
            index = jnp.where(index == one, jnp.uint32(UNSEEN_BIN), index)
    counts = count(index, axes[0])
    counts = jnp.pad(counts, [(0, 0)] * axes[0] + [(0, len(behind))])
    place = lax.broadcasted_iota(np.int32, counts.shape, axes[0])
    for one, number in known.items():
        counts = jnp.where(place == one, counts + number[..., None], counts)
    return counts


# ------------------------------------------------------------------ counting


def _scatter(
    index: UInt32[Array, "*rows_and_values"], batch_rank: int, *, lanes: int = 1
) -> UInt32[Array, "*rows bins"]:
    """How often each of the 4096 bins occurs, uint32, rows + (4096,).

    With several lanes, neighbours along the last axis have separate counters.
    """
    # An index that XLA knows to be in bounds needs no test. The counter behind the others is that
    # of the padding which `pad_axes_evenly` may add, so that the axis divides among the devices.
    rows = index.shape[:batch_rank]
    length = lanes * BINS
    counters = math.prod(rows) * length
    if math.prod(rows) > 1:  # one scatter into all rows' bins is faster than a batched one
        row = jnp.arange(math.prod(rows), dtype=jnp.uint32)
        index = index + row.reshape(*rows, *[1] * (index.ndim - batch_rank)) * length
    if lanes > 1:
        lane = lax.broadcasted_iota(jnp.uint32, index.shape, index.ndim - 1) % jnp.uint32(lanes)
        index = index + lane * BINS
    even = pad_axes_evenly(index, jnp.uint32(counters))
    counts = jnp.zeros(counters + (even is not index), jnp.uint32)
    counts = counts.at[even].add(jnp.uint32(1), mode="promise_in_bounds")
    counts = counts[:counters].reshape(*rows, lanes, BINS)
    return counts.sum(axis=-2, dtype=jnp.uint32)


def _scatter_in_lanes(
    index: UInt32[Array, "*rows_and_values"], batch_rank: int
) -> UInt32[Array, "*rows bins"]:
    """On a GPU: additions to one counter queue up, so that many values get several."""
    rows = math.prod(index.shape[:batch_rank])
    lanes = min(_COUNTERS // rows, index.shape[-1]) if index.size >= _CONTENDED else 1
    return _scatter(index, batch_rank, lanes=max(lanes, 1))


def _count_by_products(
    index: UInt32[Array, "*rows_and_values"], batch_rank: int
) -> UInt32[Array, "*rows bins"]:
    """For a TPU, whose scatter is slow: products of one-hot halves of each bin's number."""
    # A bin's number is 64 * upper + lower. The product of the one-hot matrices of both halves has
    # at [upper, lower] how often they occur together: 4096 counters from a matrix product, which is
    # what a TPU does fast. Zeros and ones are exact in bfloat16, and sums of them in float32 up to
    # 2**24, which is why a block has fewer values.
    rows, half = index.shape[:batch_rank], math.isqrt(BINS)
    flat = index.reshape(*rows, -1)
    blocks = -(-flat.shape[-1] // _BLOCK)
    block = -(-flat.shape[-1] // blocks)
    nowhere = [(0, 0)] * batch_rank + [(0, blocks * block - flat.shape[-1])]
    flat = jnp.pad(flat, nowhere, constant_values=BINS)
    each = jnp.moveaxis(flat.reshape(*rows, blocks, block), -2, 0)
    batch = tuple(range(batch_rank))
    inner = (((batch_rank,), (batch_rank,)), (batch, batch))

    def add(total: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
        upper, lower = (
            (n[..., None] == np.arange(half, dtype=np.uint32)).astype(jnp.bfloat16)
            for n in (one // half, one % half)
        )
        found = lax.dot_general(upper, lower, inner, preferred_element_type=jnp.float32)
        return total + found.astype(jnp.uint32), None

    total = lax.scan(add, jnp.zeros((*rows, half, half), jnp.uint32), each)[0]
    return total.reshape(*rows, BINS)


_PROGRAMS: Final[dict[str | None, Callable[..., _Fields]]] = {
    "cpu": _on_one_cpu,
    "cpus": _on_cpus,
    "tpu": functools.partial(_on_accelerator, count=_count_by_products),
    None: functools.partial(_on_accelerator, count=_scatter_in_lanes),
}


def _program_for(platform: str | None) -> Callable[..., _Fields]:
    return with_x64_of_operands(_PROGRAMS.get(platform, _PROGRAMS[None]))


register_cpu_lowering(_array_stats, _on_cpus, _on_one_cpu, _on_cpus_in_parts)
for _platform in (None, "tpu"):
    _lowered = mlir.lower_fun(_program_for(_platform), multiple_results=True)
    mlir.register_lowering(_array_stats, _lowered, platform=_platform)
