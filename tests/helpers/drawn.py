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

DRAWS = ("normal", "truncated_normal", "uniform")
LONGEST = 2**16
"""Of more numbers, those that are thrown away would take longer than the program."""


def by_length(draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of `jax.random` that draws as many numbers as the next power of 2, outside jit."""
    signature = inspect.signature(draw)

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> jax.Array:
        given = signature.bind(*args, **kwargs)
        shape = given.arguments.get("shape")
        bounds = [given.arguments.get(name, 0) for name in ("lower", "upper", "minval", "maxval")]
        plain = isinstance(shape, (tuple, list)) and all(isinstance(x, int | float) for x in bounds)
        count = math.prod(shape) if plain and given.arguments.get("out_sharding") is None else 0
        here = core.trace_state_clean() and jax.sharding.get_abstract_mesh().empty
        if not 0 < count <= LONGEST or not here or not _by_place(given.arguments["key"]):
            return draw(*args, **kwargs)
        given.arguments["shape"] = (max(64, 2 ** (count - 1).bit_length()),)
        numbers = np.asarray(draw(*given.args, **given.kwargs))[:count]
        return jax.device_put(numbers.reshape(shape), may_alias=False)

    return drawn


def draw_by_length() -> None:
    """Let `jax.random` and jax's initializers draw so."""
    for name in DRAWS:
        draw = by_length(getattr(jax.random, name))
        setattr(jax.random, name, draw)
        setattr(random, name, draw)


def _by_place(key: Any) -> bool:
    """Whether the numbers of a key depend on their place alone, not on how many they are."""
    if not isinstance(key, jax.Array) or isinstance(key, core.Tracer):
        return False
    return jax.config.jax_threefry_partitionable and jax.random.key_impl(key) == "threefry2x32"
