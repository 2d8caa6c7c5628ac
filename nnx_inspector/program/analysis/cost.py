"""Floating-point operations of one equation of a jaxpr, from its shapes; memory of a program.

A multiply-add counts as two, an elementwise function as one for each element of its result.
Integer arithmetic, comparisons and data movement count nothing. A convolution counts its whole
window at each position of its output, padding included; a transposed one at each position of its
input. Invariant: the count of an operation whose arithmetic is not known is None, never a guess.
Does not enter loops: the caller multiplies.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from nnx_inspector._compat import jaxprs
from nnx_inspector.arrays import is_array
from nnx_inspector.typing import Atom, Aval, Equation, Jaxpr

_FREE = frozenset(
    """
    after_all all_gather all_gather_invariant all_to_all all_to_all_invariant and approx_top_k
    argmax argmin axis_index bitcast_convert_type broadcast_in_dim clamp clz complex concatenate
    conj convert_element_type copy copy_p create_token dce_sink device_put dynamic_slice
    dynamic_update_slice empty empty2 eq eq_to gather ge get gt imag iota is_finite
    layout_constraint le le_to lt lt_to mesh_cast name ne nextafter nnx_inspector_mark not
    optimization_barrier or pad pbroadcast pcast pmax pmin population_count ppermute psum
    psum_invariant psum_scatter pvary ragged_all_to_all random_bits random_clone random_fold_in
    random_gamma random_seed random_split random_unwrap random_wrap real reduce_and reduce_or
    reduce_precision reduce_scatter reduce_xor reshape reshard rev rng_bit_generator rng_uniform
    scatter select_and_gather_add select_n shard_alike sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical slice sort split squeeze stack stop_gradient swap
    symbolic_zeros threefry2x32 tile top_k transpose unstack xor
    """.split()  # noqa: SIM905
)
_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil cos cosh
    digamma div erf erf_inv erfc exp exp2 expm1 floor igamma igamma_grad_a igammac lgamma log log1p
    log2 logistic max min mul neg one_minus_square polygamma pow regularized_incomplete_beta rem
    round rsqrt sign sin sinh sqrt square sub tan tanh zeta
    """.split()  # noqa: SIM905
)


def equation_flops(equation: Equation) -> float | None:
    """The floating-point operations of one equation; None if they are not known."""
    name = equation.primitive.name
    if name in _FREE or not equation.outvars:
        return 0.0
    if not is_arithmetic(equation):
        return None
    out = equation.outvars[0].aval
    if not jnp.issubdtype(out.dtype, jnp.inexact):
        return 0.0
    counted = _FORMULAS[name](equation) if name in _FORMULAS else math.prod(out.shape)
    return None if counted is None else float(counted)


def is_arithmetic(equation: Equation) -> bool:
    """Whether an equation's name alone says what it computes, whatever jaxprs it holds."""
    name = equation.primitive.name
    return name in _FREE or name in _ELEMENTWISE or name in _FORMULAS


def _product(equation: Equation) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * _results(equation) * math.prod(shape[d] for d in contracted)


def _ragged_product(equation: Equation) -> float | None:
    if equation.outvars[0].aval.ndim != 2:
        return None  # groups along the summed axis, or a batch
    rows, inner = equation.invars[0].aval.shape
    return 2 * rows * inner * equation.invars[1].aval.shape[-1]


def _convolution(equation: Equation) -> float:
    numbers, spread = equation.params["dimension_numbers"], equation.params["lhs_dilation"]
    given, kernel = (v.aval.shape for v in equation.invars)
    out = equation.outvars[0].aval.shape
    places = [
        given[i] if holes > 1 else out[o]  # transposed: each position of its input
        for i, o, holes in zip(numbers.lhs_spec[2:], numbers.out_spec[2:], spread, strict=True)
    ]
    window = math.prod(kernel[k] for k in numbers.rhs_spec[1:])  # input features and taps
    return 2 * math.prod(out[o] for o in numbers.out_spec[:2]) * math.prod(places) * window


def _largest(equation: Equation) -> float:
    return max(math.prod(v.aval.shape) for v in equation.invars)


def _update_size(equation: Equation) -> float:
    return math.prod(equation.invars[-1].aval.shape)


def _window(equation: Equation) -> float:
    return _results(equation) * math.prod(equation.params["window_dimensions"])


def _power(equation: Equation) -> float:
    return _results(equation) * max(1, math.ceil(math.log2(max(2, abs(equation.params["y"])))))


def _fourier(equation: Equation) -> float:
    before, after = equation.invars[0].aval, equation.outvars[0].aval
    lengths = equation.params["fft_lengths"]
    points = math.prod(before.shape[: -len(lengths)]) * math.prod(lengths)
    whole = jnp.iscomplexobj(before) and jnp.iscomplexobj(after)
    return (5 if whole else 2.5) * points * math.log2(max(2, math.prod(lengths)))


def _cholesky(equation: Equation) -> float:
    return _results(equation) * equation.outvars[0].aval.shape[-1] / 3


def _triangular_solve(equation: Equation) -> float:
    return _results(equation) * equation.invars[0].aval.shape[-1]


def _results(equation: Equation) -> int:
    return math.prod(equation.outvars[0].aval.shape)


_FORMULAS: dict[str, Callable[[Equation], float | None]] = {
    "dot_general": _product,
    "ragged_dot_general": _ragged_product,
    "conv_general_dilated": _convolution,
    "integer_pow": _power,
    "fft": _fourier,
    "cholesky": _cholesky,
    "triangular_solve": _triangular_solve,
    **dict.fromkeys(
        ["reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"], _window
    ),
    **dict.fromkeys(["reduce", "reduce_sum", "reduce_prod", "reduce_max", "reduce_min"], _largest),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _largest),
    **dict.fromkeys(["scatter-add", "scatter-mul", "scatter-max", "scatter-min"], _update_size),
    **dict.fromkeys(["select_and_scatter", "select_and_scatter_add"], _update_size),
}


_MEMINFO = pathlib.Path("/proc/meminfo")
_GROUP = pathlib.Path("/sys/fs/cgroup")
_UNKNOWN = 4 << 30


def peak_bytes(jaxpr: Jaxpr) -> int:
    """An estimate of the most bytes of values alive at once, without the program's inputs."""
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    last: dict[Atom, int] = {}
    for number, equation in enumerate(bare.eqns):
        last.update((v, number) for v in equation.invars if not jaxprs.is_literal(v))
    last.update((v, len(bare.eqns)) for v in bare.outvars if not jaxprs.is_literal(v))
    alive: dict[Atom, int] = {}
    total = most = 0
    for number, equation in enumerate(bare.eqns):
        for v in equation.outvars:
            alive[v] = bytes_of(v.aval)
            total += alive[v]
        inside = max((peak_bytes(inner) for inner in jaxprs.sub_jaxprs(equation)), default=0)
        most = max(most, total + inside)
        for v in {*equation.outvars, *(v for v in equation.invars if not jaxprs.is_literal(v))}:
            if last.get(v, number) == number:
                total -= alive.pop(v, 0)
    return most


def bytes_of(aval: Aval) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize if is_array(aval) else 0


def available_bytes(device: Any) -> int:
    """The bytes that are free on a device; for a CPU, in the machine or the container."""
    figures = device.memory_stats() if device.platform != "cpu" else None
    if figures and "bytes_limit" in figures:
        return max(0, figures["bytes_limit"] - figures.get("bytes_in_use", 0))
    found = [n for n in (_machine_bytes(), _container_bytes()) if n is not None]
    return min(found) if found else _UNKNOWN


def _machine_bytes() -> int | None:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None


def _container_bytes() -> int | None:
    limit, current = (_GROUP / name for name in ("memory.max", "memory.current"))
    if not limit.exists() or not current.exists():
        return None
    text = limit.read_text().strip()
    return max(0, int(text) - int(current.read_text())) if text.isdigit() else None
