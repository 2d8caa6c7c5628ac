"""The cost of watching: a small convolutional network and its step, bare and watched, side by side.

Run by hand: `python tests/benchmarks/watching.py [--steps N] [--rounds N]`. Prints a table of
ratios to the bare loop, medians over rounds in which the variants take turns. Not a test: a shared
machine's times mean nothing alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import nnx_inspector as nni


class Block(nnx.Module):
    """Convolution, batch norm, relu."""

    def __init__(self, features_in: int, features_out: int, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(features_in, features_out, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(features_out, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.norm(self.conv(x)))


class Digits(nnx.Module):
    """A network for images of digits, `width` times 8 channels wide at first."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8 * width, kernel_size=(3, 3), rngs=rngs)
        self.block1 = Block(8 * width, 16 * width, rngs=rngs)
        self.block2 = Block(16 * width, 32 * width, rngs=rngs)
        self.head = nnx.Linear(32 * width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.conv1(x))
        x = nnx.max_pool(self.block1(x), (2, 2), (2, 2))
        return self.head(self.block2(x).mean(axis=(1, 2)))


def loss_fn(model: Digits, batch: Any) -> jax.Array:
    """Cross entropy."""
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@nnx.jit
def train_step(model: Digits, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    """An ordinary step that knows nothing of the inspector."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def seconds(loop: Callable[[], Any]) -> float:
    """Wall time of one loop, until everything it started has finished."""
    began = time.perf_counter()
    jax.block_until_ready(loop())
    return time.perf_counter() - began


def compare(width: int, batch_size: int, steps: int, rounds: int) -> dict[str, float]:
    """Median seconds of `steps` steps for each variant, taking turns."""
    digits = load_digits()
    images = jnp.asarray(digits.images[:batch_size, ..., None] / 16, jnp.float32)
    batches = [(images, jnp.asarray(digits.target[:batch_size]))] * steps
    model = Digits(width, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    inspector = nni.Inspector(model, images)

    def run(over: Iterable[Any]) -> Any:
        loss = None
        for batch in over:
            loss = train_step(model, optimizer, batch)
        return loss

    variants = {
        "bare": lambda: run(batches),
        "watch(every=10)": lambda: run(inspector.watch(batches, every=10)),
        "watch(every=1)": lambda: run(inspector.watch(batches, every=1)),
        "watch(every=1, gradients=False)": lambda: run(
            inspector.watch(batches, every=1, gradients=False)
        ),
    }
    for loop in variants.values():
        loop()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, loop in variants.items():
            times[name].append(seconds(loop))
    inspector.close()
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{'model':>24}  {'variant':32} {'ms/step':>8} {'ratio':>7}")
    for width, batch_size in ((1, 60), (4, 256)):
        found = compare(width, batch_size, options.steps, options.rounds)
        for name, value in found.items():
            label = f"width x{width}, batch {batch_size}"
            step = 1e3 * value / options.steps
            print(f"{label:>24}  {name:32} {step:8.2f} {value / found['bare']:7.2f}")


if __name__ == "__main__":
    main()
