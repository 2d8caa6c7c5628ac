"""Random arrays, drawn by few programs.

jax compiles a program for each shape in which random numbers are wanted, and that takes longer than
most of what the tests run: every layer of every model has shapes of its own. The numbers depend on
the key and on their place alone, so the first numbers of a longer array are the same, bit for bit.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import core, random

DRAW_NAMES = ("normal", "truncated_normal", "uniform")
MOST_NUMBERS = 2**16
"""Of more numbers, those that are thrown away would take longer than the program."""


def draw_power_of_two(draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of `jax.random` that draws as many numbers as the next power of 2, outside jit."""
    signature = inspect.signature(draw)

    @functools.wraps(draw)
    def wrapper(*args: Any, **kwargs: Any) -> jax.Array:
        bound = signature.bind(*args, **kwargs)
        shape = bound.arguments.get("shape")
        bounds = [bound.arguments.get(name, 0) for name in ("lower", "upper", "minval", "maxval")]
        is_static = isinstance(shape, (tuple, list)) and all(
            isinstance(x, int | float) for x in bounds
        )
        count = math.prod(shape) if is_static and bound.arguments.get("out_sharding") is None else 0
        is_eager = core.trace_state_clean() and jax.sharding.get_abstract_mesh().empty
        if (
            not 0 < count <= MOST_NUMBERS
            or not is_eager
            or not _is_counter_based(bound.arguments["key"])
        ):
            return draw(*args, **kwargs)
        bound.arguments["shape"] = (max(64, 2 ** (count - 1).bit_length()),)
        numbers = np.asarray(draw(*bound.args, **bound.kwargs))[:count]
        return jax.device_put(numbers.reshape(shape), may_alias=False)

    return wrapper


def draw_powers_of_two() -> None:
    """Let `jax.random` and jax's initializers draw so."""
    for name in DRAW_NAMES:
        draw = draw_power_of_two(getattr(jax.random, name))
        setattr(jax.random, name, draw)
        setattr(random, name, draw)


def _is_counter_based(key: Any) -> bool:
    """Whether the numbers of a key depend on their place alone, not on how many they are."""
    if not isinstance(key, jax.Array) or isinstance(key, core.Tracer):
        return False
    return jax.config.jax_threefry_partitionable and jax.random.key_impl(key) == "threefry2x32"
