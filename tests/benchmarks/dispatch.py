"""What interception costs: where nothing is hooked, where another thread is, while tracing.

`python tests/benchmarks/dispatch.py` prints a table of medians, each figure beside the bare one
of the same round. It asserts nothing: times depend on the machine, ratios less so.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_inspector as nni


class Same(nnx.Module):
    """Does nothing: what is left of a call is the call."""

    def __call__(self, x):
        return x


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.before = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.between = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.before(x))
        return x + self.down(nnx.gelu(self.up(self.between(x))))


def passive(next_fun, args, kwargs, context):
    return next_fun(*args, **kwargs)


@contextlib.contextmanager
def hooked_elsewhere() -> Iterator[None]:
    """Another thread has hooks open."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with nni.intercept_methods(passive):
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


def seconds(call: Callable[[], object], times: int) -> float:
    """Of one call, on average over `times`."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def compare(
    name: str, bare: Callable[[], float], other: Callable[[], float], rounds: int, unit: str
) -> str:
    """A row: medians of both over alternating rounds, and of the ratio within a round."""
    scale = {"ns": 1e9, "us": 1e6, "ms": 1e3}[unit]
    pairs = [(bare(), other()) for _ in range(rounds)]
    first, second = (statistics.median(column) * scale for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return f"| {name} | {first:.2f} {unit} | {second:.2f} {unit} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds

    linear, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((4, 8))
    jitted = nnx.jit(lambda m, x: m(x))
    graphdef, state = nnx.split(linear)
    pure = jax.jit(lambda s, x: nnx.merge(graphdef, s)(x))
    same = Same()
    model = nnx.Sequential(*[Block(16, nnx.Rngs(i)) for i in range(24)])
    tokens = jnp.ones((2, 8, 16))
    for call in (lambda: jitted(linear, x), lambda: pure(state, x), lambda: same(x)):
        call()

    def elsewhere(call: Callable[[], object], times: int) -> Callable[[], float]:
        def measured() -> float:
            with hooked_elsewhere():
                return seconds(call, times)

        return measured

    def traced(hooked: bool, relative: bool) -> Callable[[], float]:
        def measured() -> float:
            # a new function each time: jax keeps traces
            fresh = nnx.jit(lambda m, x: m(x))
            context = (
                nni.intercept_methods(passive, model=model if relative else None)
                if hooked
                else contextlib.nullcontext()
            )
            with context:
                return seconds(lambda: fresh.trace(model, tokens), 1)

        return measured

    def region() -> None:
        with nni.intercept_methods(passive):
            pass

    print("| what | bare | with | ratio |\n|---|---|---|---|")
    rows = [
        ("`nnx.jit` call, hooks came and went", lambda: jitted(linear, x), 2000, "us"),
        ("`jax.jit` call, hooks came and went", lambda: pure(state, x), 5000, "us"),
        ("eager call, hooks came and went", lambda: same(x), 20000, "ns"),
    ]
    for name, call, times, unit in rows:

        def afterwards(call: Callable[[], object] = call, times: int = times) -> float:
            region()
            return seconds(call, times)

        bare = lambda call=call, times=times: seconds(call, times)  # noqa: E731
        print(compare(name, bare, afterwards, rounds, unit), flush=True)
        other = name.replace("hooks came and went", "another thread is hooked")
        print(compare(other, bare, elsewhere(call, times), rounds, unit), flush=True)
    few = max(3, rounds // 3)
    for relative in (False, True):
        traced(True, relative)()  # what jax keeps of its own functions is there in every round
        name = f"trace of 24 blocks under an interceptor{', model=' if relative else ''}"
        print(compare(name, traced(False, relative), traced(True, relative), few, "ms"), flush=True)
    entering = statistics.median(seconds(region, 1) for _ in range(rounds))
    print(f"| entering and leaving | | {1e3 * entering:.2f} ms | |")


if __name__ == "__main__":
    main()
