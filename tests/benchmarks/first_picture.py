"""How long one waits for the first picture: ratios to the first call of the bare training step.

    python -m tests.benchmarks.first_picture [--rounds N] [--models NAME ...]

Each figure is taken in a fresh process without a compilation cache, and the bare process and the
inspected ones take turns: the time from `nni.Inspector(model, x)` to the end of the first watched
step, and that of the first call of the same jitted step. The first step is measured, or it is that
of a loop on screen, whose first step runs bare. The imports are over before. Prints the median of
each, and of the ratios. Not a test: a shared machine's times mean nothing alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_inspector as nni
from tests.benchmarks import nets


class AutoEncoder(nnx.Module):
    """Normed dense layers, each a module with two inside: 160 modules."""

    def __init__(self, width: int, layers: int, *, rngs: nnx.Rngs):
        self.layers = nnx.List([
            nnx.Sequential(nnx.Linear(width, width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs))
            for _ in range(layers)
        ])  # fmt: skip

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return x


class Recurrent(nnx.Module):
    """Two LSTM layers over time, and a head."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.layers = nnx.List([
            nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs)) for _ in range(2)
        ])  # fmt: skip
        self.head = nnx.Linear(width, nets.CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


def transformer(layers: int, *, stacked: bool = False) -> tuple[nnx.Module, Any, Any]:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 129)))
    model = nets.Transformer(128, layers, 256, stacked=stacked, rngs=nnx.Rngs(0))
    return model, tokens[:, :-1], tokens[:, 1:]


def labelled(model: nnx.Module, *shape: int) -> tuple[nnx.Module, Any, Any]:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, *shape)).astype(np.float32))
    return model, x, jnp.asarray(rng.integers(0, nets.CLASSES, 8))


MODELS: dict[str, Callable[[], tuple[nnx.Module, Any, Any]]] = {
    "transformer, 4 layers": lambda: transformer(4),
    "transformer, 12 layers": lambda: transformer(12),
    "transformer, 24 layers": lambda: transformer(24),
    "transformer, 12 layers scanned": lambda: transformer(12, stacked=True),
    "ResNet, 8 blocks": lambda: labelled(nets.ResNet(16, 2, 4, rngs=nnx.Rngs(0)), 16, 16, 3),
    "autoencoder, 160 modules": lambda: labelled(AutoEncoder(64, 53, rngs=nnx.Rngs(0)), 64),
    "LSTM, 2 layers": lambda: labelled(Recurrent(64, rngs=nnx.Rngs(0)), 32, 64),
}


def first_step(name: str, how: str) -> dict[str, float]:
    """Seconds until the Inspector is made and its first watched step has ended, or the bare one.

    `how` is "bare", "measured" or "on screen".
    """
    model, x, y = MODELS[name]()
    optimizer = nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)

    jax.block_until_ready((x, y, nnx.state(model)))
    make = nni.Inspector  # imports the package, which is not part of the wait for a picture
    began = time.perf_counter()
    if how == "bare":
        jax.block_until_ready(nets.train_step(model, optimizer, x, y))
        return {"bare": time.perf_counter() - began}
    inspector = make(model, x, display=False)
    made = time.perf_counter()
    shown = how == "on screen"
    if shown:
        inspector._core.view._displayed_in = 1  # what a notebook's cell does
        inspector._rerun.start_first()
    for _ in inspector.watch(range(100), every=10) if shown else inspector.watch(range(1), every=1):
        jax.block_until_ready(nets.train_step(model, optimizer, x, y))
        break
    return {"made": made - began, how: time.perf_counter() - began}


def measured(name: str, how: str) -> dict[str, float]:
    """The same in a process of its own."""
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", "tests.benchmarks.first_picture", "--one", name, "--how", how]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--how", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(first_step(given.one, given.how)))
        return
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, load {os.getloadavg()[0]:.1f}")
    print("| model | bare first call, s | Inspector, s | measured step | step on screen |")
    print("|---|--:|--:|--:|--:|")
    for name in given.models:
        hows = ("bare", "measured", "on screen")
        rounds = [{how: measured(name, how) for how in hows} for _ in range(given.rounds)]
        bare = statistics.median(one["bare"]["bare"] for one in rounds)
        made = statistics.median(one["measured"]["made"] for one in rounds)
        first, shown = (
            statistics.median(one[how][how] / one["bare"]["bare"] for one in rounds)
            for how in hows[1:]
        )
        print(f"| {name} | {bare:.1f} | {made:.1f} | {first:.2f}x | {shown:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
