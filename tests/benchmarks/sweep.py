"""The effect of zeroing each of 50 sites: `nni.sweep` against Python loops of separate runs.

    python -m tests.benchmarks.sweep [--rounds N] [--chunks]

Each row is the whole job, all sites, compiling included where it must compile, and beside it the
same job once everything is compiled. Rows take turns within a round, caches are cleared between
rounds; medians. `--chunks` prints instead what the size of a chunk does to the time. Not a test.

The rows: the sweep; the loop that a user writes, `with nni.perturb(site, nni.Zero()):
loss_jit(model, batch)`; a jitted `nni.perturbed` with the site fixed in it; one jitted function
that takes a gate for each site as data, called once a site.
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

Job = Callable[[], Any]


def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def mlp() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
    return nets.MLP(64, 48, rngs=nnx.Rngs(0)), (x, jnp.zeros(64, jnp.int32))


def transformer(width: int, batch: int) -> tuple[Any, Any]:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (batch, 32)))
    return nets.Transformer(width, 5, 64, rngs=nnx.Rngs(0)), (tokens, tokens)


CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "MLP, 49 layers, d=64, batch 64": mlp,
    "transformer, 5 layers, d=64, 4 x 32 tokens": lambda: transformer(64, 4),
    "transformer, 5 layers, d=256, 16 x 32 tokens": lambda: transformer(256, 16),
}


def sites_of(model: Any, data: Any) -> list[str]:
    """The first 50 sites that the loss reaches."""
    reached = nni.sweep(model, loss_fn, *data, progress=False)
    return list(reached["site"])[:50]


def jobs(model: Any, data: Any, sites: list[str]) -> dict[str, Callable[[], Job]]:
    """For each row what makes a fresh job: nothing in it is compiled yet."""

    def sweep() -> Job:
        return lambda: nni.sweep(model, loss_fn, *data, sites=sites, progress=False)

    def user_loop() -> Job:
        loss_jit = nnx.jit(lambda model, *data: loss_fn(model, *data))

        def run() -> Any:
            out = []
            for site in sites:
                with nni.perturb(site, nni.Zero(), model=model):
                    out.append(float(loss_jit(model, *data)))
            return out

        return run

    def fixed() -> Job:
        def one(site: str) -> Any:
            return nnx.jit(
                lambda model, *data: nni.perturbed(loss_fn)({site: nni.Zero()}, model, *data)
            )

        functions = [one(site) for site in sites]
        return lambda: [float(f(model, *data)) for f in functions]

    def as_data() -> Job:
        @nnx.jit
        def gated(model: Any, gates: Any, *data: Any) -> Any:
            perturbations = {site: nni.Scale(g) for site, g in zip(sites, gates, strict=True)}
            return nni.perturbed(loss_fn)(perturbations, model, *data)

        rows = 1.0 - np.eye(len(sites), dtype=np.float32)
        return lambda: [float(gated(model, list(row), *data)) for row in rows]

    return {
        "nni.sweep": sweep,
        "loop: with nni.perturb(site, Zero())": user_loop,
        "loop: nni.perturbed, jitted for each site": fixed,
        "loop: one jitted function, gates as data": as_data,
    }


def seconds(job: Job) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def compare(name: str, rounds: int) -> None:
    model, data = CASES[name]()
    sites = sites_of(model, data)
    made = jobs(model, data, sites)
    first: dict[str, list[float]] = {label: [] for label in made}
    again: dict[str, list[float]] = {label: [] for label in made}
    for _ in range(rounds):
        for label, make in made.items():
            jax.clear_caches()
            job = make()
            first[label].append(seconds(job))
            again[label].append(seconds(job))
    ours = statistics.median(first["nni.sweep"])
    print(f"\n{name}: {len(sites)} sites\n")
    print("| | s, compiling included | to the sweep | s, compiled before | to the sweep |")
    print("|---|--:|--:|--:|--:|")
    for label in made:
        a, b = statistics.median(first[label]), statistics.median(again[label])
        print(f"| {label} | {a:.2f} | {a / ours:.2f}x | {b:.3f} | {b / ours:.3f}x |")


def compare_chunks(name: str, rounds: int) -> None:
    model, data = CASES[name]()
    sites = sites_of(model, data)
    print(f"\n{name}: {len(sites)} sites\n\n| chunk | s, the passes alone |\n|--:|--:|")
    for chunk in (1, 4, 8, 16, 32, 51):
        times: list[float] = []
        for _ in range(rounds):
            began: list[float] = []
            nni.sweep(
                model,
                loss_fn,
                *data,
                sites=sites,
                chunk=chunk,
                progress=lambda done, total, began=began: began.append(time.perf_counter()),
            )
            # the first report is from before compiling, the second after the first chunk
            each = np.diff(began[1:]) if len(began) > 2 else [np.nan]
            times.append(float(np.median(each)) / chunk * len(sites))
        print(f"| {chunk} | {statistics.median(times):.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the model's name")
    parser.add_argument("--chunks", action="store_true")
    options = parser.parse_args()
    for name in CASES:
        if options.only in name:
            (compare_chunks if options.chunks else compare)(name, options.rounds)


if __name__ == "__main__":
    main()
