"""The examples of all units of a site among 10,000 inputs, against the bare forward passes.

    python -m tests.benchmarks.examples [--rounds N] [--only NAME]

Everything runs in one process and takes turns within a round; medians of the ratios. The first
search, which traces and compiles, is not counted; `nni.top_examples` traces in each call, an
Inspector keeps the program. Not a test.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

import nnx_inspector as nni
from tests.benchmarks import nets

COUNT, BATCH = 10_000, 100
RNG, RNGS = np.random.default_rng(0), nnx.Rngs(0)


def normal(*shape: int) -> Any:
    return RNG.normal(size=(COUNT, *shape)).astype(np.float32)


CASES: dict[str, Callable[[], tuple[Any, str, Any]]] = {
    "MLP, d=64": lambda: (nets.MLP(64, 3, rngs=RNGS), "layers/1", normal(64)),
    "MLP, d=1024": lambda: (nets.MLP(1024, 3, rngs=RNGS), "layers/1", normal(1024)),
    "transformer, 4 layers, d=64, 32 tokens": lambda: (
        nets.Transformer(64, 4, 100, rngs=RNGS), "blocks/3", RNG.integers(0, 100, (COUNT, 32))
    ),
    "ResNet, 2 blocks, 16x16": lambda: (
        nets.ResNet(16, 2, 1, rngs=RNGS), "stages/1/0/conv2", normal(16, 16, 3)
    ),
}  # fmt: skip


def compare(name: str, rounds: int) -> None:
    model, site, x = CASES[name]()
    model.eval()
    data = [x[i : i + BATCH] for i in range(0, COUNT, BATCH)]
    graphdef, state = nnx.split(model)
    inspector = nni.Inspector(model, data[0], display=False)
    by_nnx = nnx.jit(lambda model, x: model(x))
    by_jax = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    jobs: dict[str, Callable[[], Any]] = {
        "nnx.jit": lambda: jax.block_until_ready([by_nnx(model, x) for x in data][-1]),
        "jax.jit": lambda: jax.block_until_ready([by_jax(state, x) for x in data][-1]),
        "insp.examples": lambda: inspector.examples(data, site, progress=False),
        "nni.top_examples": lambda: nni.top_examples(model, data, site, progress=False),
    }
    taken: dict[str, list[float]] = {job: [] for job in jobs}
    for number in range(rounds + 1):
        for job, run in jobs.items():
            began = time.perf_counter()
            run()
            if number:
                taken[job].append(time.perf_counter() - began)
    inspector.close()

    def ratio(job: str, bare: str) -> str:
        pairs = zip(taken[job], taken[bare], strict=True)
        return f"{statistics.median(a / b for a, b in pairs):.2f}"

    bare = 1000 * statistics.median(taken["nnx.jit"])
    figures = [f"{ratio(job, 'nnx.jit')}, {ratio(job, 'jax.jit')}" for job in list(jobs)[2:]]
    print(f"| {name} | {bare:.0f} | {' | '.join(figures)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="a part of the model's name")
    options = parser.parse_args()
    for name in CASES:
        if options.only in name:
            compare(name, options.rounds)


if __name__ == "__main__":
    main()
