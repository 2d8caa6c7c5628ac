"""The cotangents of many values are sent in few messages, whichever are differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.live import cotangents as collecting
from nnx_inspector.live.cotangents import Collectors, beginning, beginning_if
from nnx_inspector.stats.gauges import STATE_HEAD
from nnx_inspector.stats.packing import unpack

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


class Told:
    """Collects the names in each message, and the values under each name."""

    def __init__(self):
        self.messages = []
        self.found = {}

    def __call__(self, names):
        def host(ticket, *payloads, used=None):
            here = names if used is None else [names[i] for i in used]
            self.messages.append(list(here))
            for name, payload in zip(here, payloads, strict=True):
                self.found.setdefault(name, []).append(unpack(np.asarray(payload)))

        return host


def run(f, *args):
    """Calls `f(tap, *args)` jitted; returns the messages."""
    told = Told()

    @jax.jit
    def traced(gate, *args):
        collectors = Collectors(gate, jnp.zeros(2, jnp.int32), told)
        return f(collectors.tap, *args)

    out = traced(jnp.asarray(True), *args)
    jax.block_until_ready(out)
    jax.effects_barrier()
    return out, told


def chain(tap, ws, x):
    for number, w in enumerate(ws):
        x = tap(jnp.tanh(x * w), number)
    return (x**2).sum()


def cotangents(ws, x):
    """By hand, in float64."""
    ws, x = np.asarray(ws, np.float64), np.asarray(x, np.float64)
    values = []
    for w in ws:
        x = np.tanh(x * w)
        values.append(x)
    ct, out = 2 * values[-1], []
    for w, y in zip(ws[::-1], values[::-1], strict=True):
        out.append(ct)
        ct = ct * (1 - y**2) * w
    return out[::-1]


@pytest.mark.parametrize(("count", "slots", "messages"), [(1, 64, 1), (9, 64, 1), (7, 3, 4)])
def test_all_that_is_differentiated_leaves_at_once(count, slots, messages, monkeypatch):
    monkeypatch.setattr(collecting, "SLOTS", slots)
    ws = jnp.linspace(0.8, 1.2, count)
    plain = jax.grad(lambda ws: chain(lambda x, name: x, ws, X))(ws)
    grads, told = run(lambda tap, ws: jax.grad(lambda ws: chain(tap, ws, X))(ws), ws)
    np.testing.assert_allclose(grads, plain, rtol=1e-5, atol=1e-12)
    assert len(told.messages) <= messages
    assert sorted(told.found) == list(range(count))
    for number, ct in enumerate(cotangents(ws, X)):
        (one,) = told.found[number]
        assert one.size == X.size
        np.testing.assert_allclose([one.mean, one.norm], [ct.mean(), np.linalg.norm(ct)], rtol=1e-4)
        np.testing.assert_allclose([one.min, one.max], [ct.min(), ct.max()], rtol=1e-4)


@pytest.mark.parametrize("frozen", [1, 3, 5, 7])
def test_what_comes_before_the_first_that_is_differentiated_tells_nothing(frozen):
    ws = jnp.linspace(0.8, 1.2, 8)

    def f(tap, ws):
        loss = lambda last: chain(tap, [*ws[:frozen], *last], X)  # noqa: E731
        return jax.grad(loss)(list(ws[frozen:]))

    _, told = run(f, ws)
    assert sorted(told.found) == list(range(frozen, 8))
    assert all(len(found) == 1 for found in told.found.values())
    assert len(told.messages) <= 4  # collectors are at 0, 1, 3, 7; values between send their own
    for number, ct in enumerate(cotangents(ws, X)):
        if number >= frozen:
            np.testing.assert_allclose(told.found[number][0].norm, np.linalg.norm(ct), rtol=1e-4)


def test_the_examples_of_a_batch_are_told_together():
    ws = jnp.linspace(0.8, 1.2, 3)
    per_example = lambda tap, x: jax.vmap(  # noqa: E731
        lambda x: jax.grad(lambda ws: chain(tap, ws, x))(ws)
    )(x)
    _, told = run(per_example, X)
    assert len(told.messages) == 1
    for number, ct in enumerate(cotangents(ws, X)):
        (one,) = told.found[number]
        assert one.size == X.size
        np.testing.assert_allclose(one.norm, np.linalg.norm(ct), rtol=1e-4)


def test_the_taps_of_a_vmapped_function_are_told_together():
    ws = jnp.linspace(0.8, 1.2, 3)

    def f(tap, ws):
        return jax.grad(lambda ws: jax.vmap(lambda x: chain(tap, ws, x))(X).sum())(ws)

    _, told = run(f, ws)
    assert len(told.messages) == 1
    for number, ct in enumerate(cotangents(ws, X)):
        assert told.found[number][0].size == X.size
        np.testing.assert_allclose(told.found[number][0].norm, np.linalg.norm(ct), rtol=1e-4)


def test_a_value_that_nobody_needs_tells_nothing():
    def f(tap, ws):
        def loss(ws):
            tap(X * ws[0], "unused")
            return (tap(X * ws[1], "used") ** 2).sum()

        return jax.grad(loss)(ws)

    _, told = run(f, jnp.ones(2))
    assert list(told.found) == ["used"]


def test_wide_floats_tell_their_own():
    with jax.enable_x64(True):
        ws = jnp.linspace(0.8, 1.2, 3, dtype=jnp.float64)
        x = jnp.asarray(X, jnp.float64)
        _, told = run(lambda tap, ws: jax.grad(lambda ws: chain(tap, ws, x))(ws), ws)
    for number, ct in enumerate(cotangents(ws, x)):
        np.testing.assert_allclose(told.found[number][0].norm, np.linalg.norm(ct), rtol=1e-12)


def test_second_derivatives_go_through():
    ws = jnp.linspace(0.8, 1.2, 3)
    found, _ = run(lambda tap, ws: jax.hessian(lambda ws: chain(tap, ws, X))(ws), ws)
    plain = jax.hessian(lambda ws: chain(lambda x, name: x, ws, X))(ws)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_batch_of_passes_begins_once(jitted):
    """One pass with all of its examples, for the first of its models."""
    kernels = jax.random.normal(jax.random.key(0), (3, 4, 2))
    same, other = jnp.ones((3, 5, 4)), jnp.arange(3.0)
    begin = jax.vmap(beginning_if, in_axes=(None, [0], [0, 0]), out_axes=None)
    begin = jax.jit(begin) if jitted else begin
    told = begin(jnp.array(True), [kernels], [same, other])
    first = beginning([kernels[0]], [same.reshape(15, 4), other])
    np.testing.assert_array_equal(told, first)
    assert told[1, len(STATE_HEAD)] == 1, "the second argument differs"
    alike = begin(jnp.array(True), [kernels], [same, jnp.ones(3)])
    assert alike[1, len(STATE_HEAD)] == 0
    assert not begin(jnp.array(False), [kernels], [same, other]).any()
