"""The cost of `trace` compared with tracing alone, and its growth with the model.

Run by hand: `python tests/benchmarks/tracing.py [--rounds N]`. Prints for each model the CPU time
of `jax.make_jaxpr` of the same split and merge, of the hooked pass, and of `nni.trace`: the
smallest of several rounds in which they take turns. Not a test: a shared machine's times mean
nothing alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_inspector as nni


class Block(nnx.Module):
    """A transformer block with dropout."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.attend = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.before, self.between = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attend(self.before(x))
        return x + self.drop(self.down(nnx.relu(self.up(self.between(x)))))


def run(block: Block, x: jax.Array) -> jax.Array:
    """One call, to be transformed."""
    return block(x)


class Transformer(nnx.Module):
    """Blocks in a list, as they are or each within `around`; or stacked and scanned over."""

    def __init__(self, layers: int, width: int, around: Any = None, *, stacked: bool = False):
        if stacked:
            make = nnx.split_rngs(splits=layers)(nnx.vmap(lambda rngs: Block(width, rngs)))
            self.blocks = make(nnx.Rngs(0))
        else:
            self.blocks = nnx.List([Block(width, nnx.Rngs(i)) for i in range(layers)])
        self.around = around

    def __call__(self, x: jax.Array) -> jax.Array:
        if isinstance(self.blocks, Block):
            return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        for block in self.blocks:
            x = (self.around or run)(block, x)
        return x


def bare(model: nnx.Module, x: jax.Array) -> Any:
    """The cost of tracing alone: a fresh function each time, as in `trace`."""
    graphdef, state = nnx.split(model)

    def forward(state: Any, x: jax.Array) -> Any:
        inner = nnx.merge(graphdef, state)
        return inner(x), nnx.state(inner)  # type: ignore[operator]

    return jax.make_jaxpr(forward)(state, x)


def hooked(model: nnx.Module, x: jax.Array) -> Any:
    """The same with an interceptor around every call that does nothing."""
    with nni.intercept_methods(lambda next_fun, args, kwargs, _: next_fun(*args, **kwargs)):
        return bare(model, x)


def smallest(rounds: int, *functions: Callable[[], Any]) -> list[float]:
    """CPU seconds of each, the smallest of all rounds."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            began = time.process_time()
            function()
            best[i] = min(best[i], time.process_time() - began)
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    models = {
        "6 layers": Transformer(6, 64),
        "24 layers": Transformer(24, 64),
        "24 layers, each in remat": Transformer(24, 64, nnx.remat(run)),
        "24 layers, each in jit": Transformer(24, 64, nnx.jit(run)),
        "24 layers, scanned": Transformer(24, 64, stacked=True),
    }
    x = jnp.ones((2, 16, 64))
    print(f"{'model':28}{'make_jaxpr':>12}{'hooked':>9}{'trace':>9}{'ratio':>8}{'calls':>7}")
    for name, model in models.items():
        plain, around, ours = smallest(
            rounds,
            lambda model=model: bare(model, x),
            lambda model=model: hooked(model, x),
            lambda model=model: nni.trace(model, x),
        )
        calls = len(nni.trace(model, x).calls)
        times = f"{plain:11.2f}s{around:8.2f}s{ours:8.2f}s"
        print(f"{name:28}{times}{ours / plain:7.1f}x{calls:7}")


if __name__ == "__main__":
    main()
