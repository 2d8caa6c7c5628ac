"""Milliseconds of `summarize` beside its rivals, interleaved in one run: a table, not a test.

python tests/benchmarks/summaries.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector.stats.summarize import summarize

ROUNDS = 30


def scatter(x: jax.Array) -> jax.Array:
    """The histogram alone, with nothing counted apart."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.zeros(4096, jnp.uint32).at[bits >> 20].add(1, mode="promise_in_bounds")


def moments(x: jax.Array) -> tuple[jax.Array, ...]:
    """Mean, min and max in float32."""
    return x.mean(dtype=jnp.float32), x.min(), x.max()


def medians(
    functions: dict[str, Callable[[Any], Any]], arguments: dict[str, Any]
) -> dict[str, float]:
    """Milliseconds of each function, taken in turn so that a busy machine is so for all."""
    for name, function in functions.items():
        jax.block_until_ready(function(arguments[name]))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(arguments[name]))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print the table: median milliseconds, and each rival's time as a multiple of summarize's."""
    functions: dict[str, Callable[[Any], Any]] = {
        "summarize": jax.jit(summarize),
        "scatter": jax.jit(scatter),
        "mean+min+max": jax.jit(moments),
        "jnp.histogram": jax.jit(lambda x: jnp.histogram(x, bins=64)),
        "np.histogram": lambda x: np.histogram(x, bins=64),
    }
    print(f"{'dtype':9} {'size':>8}  " + "  ".join(f"{name:>20}" for name in functions))
    for dtype in (jnp.float32, jnp.bfloat16):
        for power in (12, 16, 20):
            x = jax.random.normal(jax.random.key(0), (1 << power,), dtype)
            arguments = dict.fromkeys(functions, x) | {"np.histogram": np.asarray(x, np.float32)}
            result = medians(functions, arguments)
            cells = (f"{ms:9.3f} ms ({ms / result['summarize']:5.2f}x)" for ms in result.values())
            print(f"{jnp.dtype(dtype).name:9} {1 << power:8}  " + "  ".join(cells))


if __name__ == "__main__":
    main()
