"""Launches of marked functions are taken, and what is seen is compared."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import ad_checkpoint, pjit
from jax._src.interpreters import batching
from jax._src.lax.control_flow import conditionals, loops
from leftovers import patched_in_jax
from marked import Watch, knob, mark

from nnx_inspector._compat import configuration
from nnx_inspector._compat.launching import jit_calls
from nnx_inspector._compat.launching.launch import LaunchInterception
from nnx_inspector.resources import open_all

X = jnp.arange(1.0, 5.0)
SUM = 10.0


@contextlib.contextmanager
def taken(watch: Watch) -> Iterator[Watch]:
    """As a session does: under a key of its own in jit's caches."""
    with configuration.hooks_key(object()), open_all(LaunchInterception(watch)):
        yield watch


def patched() -> list[Any]:
    """What the package may replace in jax."""
    rules = batching.fancy_primitive_batchers
    return [
        *patched_in_jax(),
        pjit.jit_p.impl,
        ad_checkpoint.remat_p.impl,
        rules[conditionals.cond_p],
        rules[loops.while_p],
        jax.stages.Compiled.__call__.__code__,
        jax.stages.Compiled.__init__.__code__,
    ]


BARE = patched()


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def run(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[str, Any]]:
    """What is seen in two calls, each with the results of one that is not taken."""
    with taken(Watch()) as watch:
        results, seen = [], []
        for _ in range(2):
            results.append(f(*args, **kwargs))
            seen.append(watch.sums())
        assert not watch.errors
    for result in results:
        same(result, f(*args, **kwargs))
    assert patched() == BARE
    close(seen[1], *seen[0])
    return seen[0]


def close(seen: list[tuple[str, Any]], *expected: tuple[str, Any]) -> None:
    assert [name for name, _ in seen] == [name for name, _ in expected]
    for (name, ours), (_, theirs) in zip(seen, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=name)


def twice(x: Any) -> Any:
    return mark("out", 2 * mark("in", x) * knob("k"))


def loss(x: Any) -> Any:
    return (mark("b", jnp.sin(mark("a", x))) ** 2).sum()


COS, SIN = np.cos(X), np.sin(X)
LOSS = [
    ("a", X.sum()),
    ("b", SIN.sum()),
    ("d b", (2 * SIN).sum()),
    ("d a", (2 * SIN * COS).sum()),
]


@contextlib.contextmanager
def no_misses() -> Iterator[None]:
    """Within it, jax runs jitted functions in its fast path alone."""
    misses: list[Any] = []
    undo = jit_calls.patch_jit_misses(lambda program, *_: misses.append(program))
    yield
    undo()
    assert not misses


def in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            found.append(work())
        except BaseException as error:  # raised again below
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


BATCH = jnp.array([-3.0, 1.0, -1.0, 5.0])


def branches(x: Any) -> Any:
    return jax.lax.cond(x > 0, lambda x: mark("up", 2 * x), lambda x: mark("down", x * x), x)


HALVES = jnp.array([9.0, 0.5, 2.0, 4.0])


def halved(x: Any) -> Any:
    return jax.lax.while_loop(lambda x: x > 1, lambda x: mark("x", x / 2), x)


def halvings(x: float) -> float:
    total = 0.0
    while x > 1:
        x /= 2
        total += x
    return total
