"""The cost of watching and perturbing a user's step: ratios to the bare loop, side by side.

    python -m tests.benchmarks.live [--steps N] [--rounds N] [--only TEXT] [--loops TEXT]
        [--processes N]

The transformers of the cost table, their step jitted by nnx, without a screen: of 4 layers on a
CPU, the small and the medium one on an accelerator. Variants take turns within a round; medians of
the rounds, of the time that passed, of the CPU time of all threads (which other work on the machine
changes little), and of the CPU time that the user's own thread takes more in a step than in the
bare loop. With `--processes`, so many processes of one CPU device each share the batch, as a job of
`jax.distributed` does, and the first prints its own figures. Not a test: a shared machine's times
mean nothing alone.
"""

from __future__ import annotations

import argparse
import os
import socket
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nnx_inspector as nni
from tests.benchmarks import nets
from tests.benchmarks.cost import LARGE
from tests.benchmarks.cost_jax import Case, model_of
from tests.benchmarks.machine import device

Loop = Callable[[int], Any]
ON_CPU = [Case(f"d={width}", "Transformer", (width, 4, 256), (8, 128), 256) for width in (128, 512)]


def loops(case: Case) -> dict[str, Loop]:
    """For each variant a function that trains for some steps."""
    x, y = (jnp.asarray(array) for array in case.data())
    model = model_of(case)
    optimizer = nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)
    if jax.process_count() > 1:
        x, y = shard((x, y), "data")
        for one in (model, optimizer):
            nnx.update(one, shard(nnx.state(one)))
    inspector = nni.Inspector(model, x, display=False)
    half = inspector.perturb("blocks/1/mlp", nni.Scale(0.5))
    half.enabled = False
    perturbing = nni.Inspector(model, x, display=False)
    perturbing.perturb("blocks/1/mlp", nni.Scale(0.5))
    counted = jnp.ones(x.shape, bool).at[:, -8:].set(False)
    asking = nni.Inspector(model, x, display=False, where=counted)
    written: list[Any] = []

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

    def all_options(steps: int) -> Any:
        for _ in asking.watch(range(steps), every=10, optimizer=optimizer, to=written.append):
            loss = train()
        written.clear()
        return loss

    def perturbed(steps: int) -> Any:
        for _ in perturbing.watch(range(steps), every=10**9):
            loss = train()
        return loss

    def toggled(steps: int) -> Any:
        for i, _ in enumerate(inspector.watch(range(steps), every=10**9)):
            half.enabled = i % 2 == 0
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
        "every=10, optimizer=, to=, where=": all_options,
        "perturbed, not measured": perturbed,
        "switched on and off in every step": toggled,
    }


def shard(tree: Any, *axes: str) -> Any:
    """Arrays over the devices of all processes; each process makes its own part of them."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec(*axes))

    def place(x: jax.Array) -> jax.Array:
        whole = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: whole[index])

    return jax.tree.map(place, tree)


def run_processes(count: int) -> None:
    """Run this again in so many processes, with the arguments that it was given."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = {**os.environ, "XLA_FLAGS": "", "NPROC": "64"}
    command = [sys.executable, "-m", "tests.benchmarks.live", *sys.argv[1:], "--address", address]
    each = [
        subprocess.Popen(
            [*command, "--number", str(number)],
            env=env,
            stdout=None if number == 0 else subprocess.DEVNULL,
        )
        for number in range(count)
    ]
    sys.exit(max(one.wait() for one in each))


def time_loop(loop: Loop, steps: int) -> tuple[float, float, float]:
    """Seconds of a loop: that passed, of the CPU, of the CPU in this thread."""
    clocks = (time.perf_counter, time.process_time, time.thread_time)
    began = [clock() for clock in clocks]
    jax.block_until_ready(loop(steps))
    elapsed, cpu, here = (clock() - at for clock, at in zip(clocks, began, strict=True))
    return elapsed, cpu, here


def compare(case: Case, steps: int, rounds: int, chosen: str) -> None:
    """Prints for each variant what its steps take, as ratios to the bare loop's."""
    every = {name: loop for name, loop in loops(case).items() if name == "bare" or chosen in name}
    for loop in every.values():
        jax.block_until_ready(loop(12))
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, loop in every.items():
            times[name].append(time_loop(loop, steps))
    bare = times["bare"]
    seconds = statistics.median(elapsed for elapsed, _, _ in bare) / steps
    print(f"\n| {case.name}, {1e3 * seconds:.0f} ms a step | time | CPU | thread, ms | machine |")
    print("|---|--:|--:|--:|---|")
    for name, found in times.items():
        pairs = list(zip(found, bare, strict=True))
        elapsed = statistics.median(one[0] / base[0] for one, base in pairs)
        cpu = statistics.median(one[1] / base[1] for one, base in pairs)
        here = statistics.median(1e3 * (one[2] - base[2]) / steps for one, base in pairs)
        row = f"| `{name}` | {elapsed:.3f} | {cpu:.3f} | {here:.2f} | {device()} |"
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--loops", default="", help="loops whose name holds this text")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.address is not None:
        jax.distributed.initialize(options.address, options.processes, options.number)
    elif options.processes > 1:
        run_processes(options.processes)
    for case in ON_CPU if jax.default_backend() == "cpu" else LARGE:
        if options.only in case.name:
            compare(case, options.steps, options.rounds, options.loops)


if __name__ == "__main__":
    main()
