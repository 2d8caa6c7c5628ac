"""The cost of interception: calls without hooks, hooked traces, entering and leaving.

Run by hand: `python tests/benchmarks/dispatch.py [--rounds N]`. Prints markdown tables; times are
medians over rounds in which the variants take turns, ratios are between medians of one run. Not a
test: a shared machine's times mean nothing alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.live.session import Session

LAYERS, WIDTH, HEADS = 24, 64, 4


def passing(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """An interceptor that does nothing."""
    return next_fun(*args, **kwargs)


class Block(nnx.Module):
    """Attention and a feed-forward network, each normed before and added."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """`LAYERS` blocks in a list, so that each is traced."""

    def __init__(self, rngs: nnx.Rngs, layers: int = LAYERS):
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class Identity(nnx.Module):
    """As little as a call can be."""

    def __call__(self, x: Any) -> Any:
        return x


# ----------------------------------------------------------------- measuring


def per_call(work: Callable[[], Any], times: int) -> float:
    """Seconds per call."""
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def take_turns(variants: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of each variant's seconds."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            found[name].append(measure())
    return {name: statistics.median(times) for name, times in found.items()}


def table(title: str, columns: str, rows: list[tuple[str, ...]]) -> None:
    names = [name.strip() for name in columns.split("|")]
    print(f"\n**{title}**\n\n| {' | '.join(names)} |")
    print("|" + "|".join(["---", *["---:"] * (len(names) - 1)]) + "|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


@contextlib.contextmanager
def hooked_elsewhere() -> Iterator[None]:
    """Another thread holds hooks, and does nothing else."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with nni.intercept_methods(passing):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()


# ---------------------------------------------------------------- the tables


def unhooked_calls(rounds: int) -> None:
    """Calls in a thread without hooks: before there were any, afterwards, and beside others."""
    model, identity = Transformer(nnx.Rngs(0), layers=2), Identity()
    x, times = jnp.ones((2, 8, WIDTH)), 2000
    by_nnx = nnx.jit(lambda m, x: m(x))
    graphdef, state = nnx.split(model)
    by_jax = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    plain = jax.jit(lambda x: x + 1.0)
    for work in (lambda: by_nnx(model, x), lambda: by_jax(state, x), lambda: plain(x)):
        work()
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "`jax.jit` without a module, for comparison": (lambda: plain(x), times),
        "`jax.jit`, split and merged": (lambda: by_jax(state, x), times // 10),
        "`nnx.jit`": (lambda: by_nnx(model, x), times // 20),
        "eager, a call that does nothing": (lambda: identity(x), 50 * times),
    }

    def measured(where: contextlib.AbstractContextManager[Any]) -> dict[str, float]:
        with where:
            return {name: per_call(work, count) for name, (work, count) in calls.items()}

    def medians(found: list[dict[str, float]]) -> dict[str, float]:
        return {name: statistics.median(one[name] for one in found) for name in calls}

    before = medians([measured(contextlib.nullcontext()) for _ in range(rounds)])
    with nni.intercept_methods(passing):
        by_nnx(model, x)
    after_each, beside_each = [], []
    for _ in range(rounds):
        after_each.append(measured(contextlib.nullcontext()))
        beside_each.append(measured(hooked_elsewhere()))
    after, beside = medians(after_each), medians(beside_each)
    unit = 1e6
    rows = [
        (
            name,
            f"{unit * before[name]:.3f}",
            f"{unit * after[name]:.3f}",
            f"{unit * beside[name]:.3f}",
            f"{after[name] / before[name]:.2f}",
            f"{beside[name] / after[name]:.2f}",
        )
        for name in calls
    ]
    table(
        "Calls where no hook is active in this thread, microseconds",
        "call | before any hook | after hooks came and went | while another thread holds hooks "
        "| after / before | while / after",
        rows,
    )
    name = "eager, a call that does nothing"
    print(
        f"\nOverhead of an eager call while another thread holds hooks: "
        f"{1e9 * (beside[name] - after[name]):.0f} ns (target: below 1000); "
        f"after hooks came and went: {1e9 * (after[name] - before[name]):.0f} ns."
    )


def traces(rounds: int) -> None:
    """Time to trace a transformer, plain and hooked."""
    model, x = Transformer(nnx.Rngs(0)), jnp.ones((2, 8, WIDTH))
    session = Session(model)

    def trace() -> float:
        began = time.perf_counter()
        graphdef, state = nnx.split(model)
        jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)
        return time.perf_counter() - began

    def within(region: Callable[[], Any]) -> Callable[[], float]:
        def measure() -> float:
            with region():
                return trace()

        return measure

    variants = {
        "plain": trace,
        "`intercept_methods`": within(lambda: nni.intercept_methods(passing)),
        "`intercept_methods(model=)`": within(lambda: nni.intercept_methods(passing, model=model)),
        '`intercept_methods(only="blocks/0")`': within(
            lambda: nni.intercept_methods(passing, only="blocks/0", model=model)
        ),
        '`perturb("blocks/*", Scale(0.5))`': within(
            lambda: nni.perturb("blocks/*", nni.Scale(0.5), model=model)
        ),
        "a watched pass": within(session.open),
    }
    first = {name: measure() for name, measure in variants.items()}
    found = take_turns(variants, rounds)
    session.take()
    session.close()
    table(
        f"Tracing a transformer of {LAYERS} layers, {sum(1 for _ in nnx.iter_modules(model))} "
        "modules, milliseconds",
        "hooks | first time | median | ratio to plain",
        [
            (
                name,
                f"{1e3 * first[name]:.0f}",
                f"{1e3 * found[name]:.0f}",
                f"{found[name] / found['plain']:.2f}",
            )
            for name in variants
        ],
    )


def regions(rounds: int) -> None:
    """Entering and leaving, nothing called inside."""
    small, large = Transformer(nnx.Rngs(0), layers=1), Transformer(nnx.Rngs(0))
    session = Session(large)

    def empty(region: Callable[[], Any]) -> Callable[[], float]:
        def once() -> None:
            with region():
                pass

        return lambda: per_call(once, 20)

    def inside(region: Callable[[], Any]) -> Callable[[], float]:
        def measure() -> float:
            with nni.intercept_methods(passing):
                return empty(region)()

        return measure

    hooks = {
        "`intercept_methods`": lambda: nni.intercept_methods(passing),
        f"`intercept_methods(model=)`, {sum(1 for _ in nnx.iter_modules(small))} modules": (
            lambda: nni.intercept_methods(passing, model=small)
        ),
        f"`intercept_methods(model=)`, {sum(1 for _ in nnx.iter_modules(large))} modules": (
            lambda: nni.intercept_methods(passing, model=large)
        ),
        '`perturb("blocks/*")`': lambda: nni.perturb("blocks/*", nni.Scale(0.5), model=large),
        "a watched pass": session.open,
    }
    variants = {name: empty(region) for name, region in hooks.items()}
    nested = {f"{name} inside": inside(region) for name, region in hooks.items()}
    found = take_turns({**variants, **nested}, rounds)
    session.close()
    table(
        "Entering and leaving a region, milliseconds",
        "region | alone | inside another region",
        [(n, f"{1e3 * found[n]:.3f}", f"{1e3 * found[f'{n} inside']:.3f}") for n in hooks],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {rounds} rounds")
    unhooked_calls(rounds)
    traces(rounds)
    regions(rounds)


if __name__ == "__main__":
    main()
