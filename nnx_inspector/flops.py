"""Floating-point operations of one equation of a jaxpr, counted from its shapes.

A multiply-add counts as two; an elementwise function counts one for each element of its result;
moving data counts nothing. A convolution counts its whole window, padding included. Invariant:
nothing is run or compiled. Does not enter loops: the caller multiplies.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

_FREE = frozenset(
    [
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "concatenate",
        "pad",
        "rev",
        "copy",
        "copy_p",
        "convert_element_type",
        "bitcast_convert_type",
        "iota",
        "select_n",
        "stop_gradient",
        "random_wrap",
        "random_unwrap",
        "random_seed",
        "random_bits",
        "random_fold_in",
        "random_split",
        "threefry2x32",
        "device_put",
        "sharding_constraint",
        "split",
        "reduce_precision",
        "optimization_barrier",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and",
        "or",
        "not",
        "xor",
        "is_finite",
        "shift_left",
        "shift_right_logical",
        "shift_right_arithmetic",
        "nnx_inspector_mark",
        "symbolic_zeros",
        "empty",
        "argmax",
        "argmin",
        "sort",
        "real",
        "imag",
        "complex",
        "clamp",
    ]
)


def equation_flops(equation: Any) -> float:
    """The operations of one equation that holds no jaxpr of its own."""
    name = equation.primitive.name
    if name in _FREE or not equation.outvars:
        return 0.0
    out = equation.outvars[0].aval
    if not hasattr(out, "shape") or not jnp.issubdtype(out.dtype, jnp.inexact):
        return 0.0
    size = float(math.prod(out.shape))
    operands = [v.aval for v in equation.invars]
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * size * math.prod(operands[0].shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = operands[1].shape, equation.params["dimension_numbers"]
        window = math.prod(kernel[d] for d in numbers.rhs_spec[1:])  # input features and space
        return 2.0 * size * window
    if name.startswith("reduce_window") or name in (
        "select_and_scatter_add",
        "select_and_gather_add",
    ):
        return size * math.prod(equation.params.get("window_dimensions", (1,)))
    if name.startswith(("reduce_", "cum", "scatter")):
        largest = max((math.prod(o.shape) for o in operands if hasattr(o, "shape")), default=0)
        updates = operands[-1] if name.startswith("scatter") else None
        return float(math.prod(updates.shape) if updates is not None else largest)
    if name == "integer_pow":
        return size * max(1, math.ceil(math.log2(max(2, abs(equation.params["y"])))))
    return size
