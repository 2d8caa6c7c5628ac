"""The cost of watching and perturbing a user's step: ratios to the bare loop, side by side.

    python -m tests.benchmarks.live [--steps N] [--rounds N] [--widths 128 512]

The 4-layer transformer of the cost table, its step jitted by nnx and donated, without a screen.
Variants take turns within a round; medians of the rounds, of the time that passed and of the CPU
time of all threads (which other work on the machine changes little). Not a test: a shared machine's
times mean nothing alone.
"""

from __future__ import annotations

import argparse
import statistics
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
from tests.benchmarks.machine import device

Loop = Callable[[int], Any]


def loops(width: int) -> dict[str, Loop]:
    """For each variant a function that trains for some steps."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 129)))
    x, y = tokens[:, :-1], tokens[:, 1:]
    model = nets.Transformer(width, 4, 256, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)
    inspector = nni.Inspector(model, x, display=False)
    half = inspector.perturb("blocks/1/mlp", nni.Scale(0.5))
    half.enabled = False

    def train() -> Any:
        return nets.train_step(model, optimizer, x, y)

    def bare(steps: int) -> Any:
        for _ in range(steps):
            loss = train()
        return loss

    def watched(every: int, **options: Any) -> Loop:
        def run(steps: int) -> Any:
            for _ in inspector.watch(range(steps), every=every, **options):
                loss = train()
            return loss

        return run

    def region(every: int) -> Loop:
        def run(steps: int) -> Any:
            with inspector.watch(every=every):
                return bare(steps)

        return run

    def recorded(steps: int) -> Any:
        with nni.watch(model, every=10):
            return bare(steps)

    def perturbed(steps: int, *, toggle: bool = False) -> Any:
        for i, _ in enumerate(inspector.watch(range(steps), every=10**9)):
            half.enabled = not toggle or i % 2 == 0
            loss = train()
        half.enabled = False
        return loss

    return {
        "bare": bare,
        "for _ in insp.watch(..., every=10)": watched(10),
        "the same, gradients=False": watched(10, gradients=False),
        "for _ in insp.watch(..., every=1)": watched(1),
        "for _ in insp.watch(...), no step measured": watched(10**9),
        "with insp.watch(every=10)": region(10),
        "with insp.watch(every=10**9)": region(10**9),
        "with nni.watch(model, every=10)": recorded,
        "perturbed, not measured": perturbed,
        "switched on and off in every step": lambda steps: perturbed(steps, toggle=True),
    }


def compare(width: int, steps: int, rounds: int) -> None:
    """Prints for each variant what its steps take, as ratios to the bare loop's."""
    every = loops(width)
    for loop in every.values():
        jax.block_until_ready(loop(12))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, loop in every.items():
            began = time.perf_counter(), time.process_time()
            jax.block_until_ready(loop(steps))
            times[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    bare = times["bare"]
    seconds = statistics.median(elapsed for elapsed, _ in bare) / steps
    print(f"\n| d={width}, {1e3 * seconds:.0f} ms a step | time | CPU time | machine |")
    print("|---|--:|--:|---|")
    for name, found in times.items():
        pairs = [
            [mine / theirs for mine, theirs in zip(one, of_bare, strict=True)]
            for one, of_bare in zip(found, bare, strict=True)
        ]
        elapsed, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| `{name}` | {elapsed:.3f} | {cpu:.3f} | {device()} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512])
    options = parser.parse_args()
    for width in options.widths:
        compare(width, options.steps, options.rounds)


if __name__ == "__main__":
    main()
