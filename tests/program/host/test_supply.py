"""What the sinks of a pass receive is sent in one message, whichever values are differentiated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.program.editing.packed import Sunk, joined, taken_apart
from nnx_inspector.program.host.sinks import observe_cotangent, sink_like
from nnx_inspector.program.host.supply import Received, draw, supply_of

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


class Told:
    """Collects the names in each message, and the values under each name."""

    def __init__(self):
        self.messages = []
        self.found = {}
        self.moved = []

    def tap(self, gate, *values):
        """A function of a value and a name, for a pass that may be differentiated by `values`."""
        received, names = Received(), []

        def send(found):
            numbers = sorted(found)
            layout, arrays = joined([Sunk(found[number]) for number in numbers])
            return functools.partial(self.receive, layout, [names[i] for i in numbers]), arrays

        how = {"received": received, "send": send, "moved": self.moved.append}
        supply = supply_of(values, jnp.int32(7), gate, **how)

        def tap(x, name):
            names.append(name)
            sink = draw(supply, sink_like(x), number=len(names) - 1, received=received)
            return observe_cotangent(x, sink, gate=gate, always=False)

        return tap

    def receive(self, layout, names, ticket, *arrays):
        assert ticket == 7
        self.messages.append(names)
        found = taken_apart(layout, [np.asarray(a) for a in arrays])
        for name, one in zip(names, found, strict=True):
            self.found.setdefault(name, []).append(one)


def run(f, *args, gate=True):
    """The result of `f(taps, *args)` under jit, and the messages it has sent."""
    told = Told()
    traced = jax.jit(lambda gate, *args: f(functools.partial(told.tap, gate), *args))
    out = traced(jnp.asarray(gate), *args)
    jax.block_until_ready(out)
    jax.effects_barrier()
    return out, told


def chain(taps, ws, x):
    tap = taps(*ws, x) if taps else lambda x, name: x
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


def check(told, ws, x, numbers, rtol=1e-4):
    assert len(told.messages) == 1
    assert sorted(told.found) == list(numbers)
    for number in numbers:
        ct = cotangents(ws, x)[number]
        (one,) = told.found[number]
        assert one.size == x.size
        np.testing.assert_allclose([one.mean, one.norm], [ct.mean(), np.linalg.norm(ct)], rtol=rtol)
        np.testing.assert_allclose([one.min, one.max], [ct.min(), ct.max()], rtol=rtol)


@pytest.mark.parametrize("count", [1, 9])
def test_all_that_is_differentiated_leaves_at_once(count):
    ws = jnp.linspace(0.8, 1.2, count)
    plain = jax.grad(lambda ws: chain(None, ws, X))(ws)
    grads, told = run(lambda taps, ws: jax.grad(lambda ws: chain(taps, ws, X))(ws), ws)
    np.testing.assert_allclose(grads, plain, rtol=1e-6)
    check(told, ws, X, range(count))


def test_nothing_leaves_through_a_closed_gate_and_what_is_computed_stays():
    ws = jnp.linspace(0.8, 1.2, 3)
    f = lambda taps, ws: jax.value_and_grad(lambda ws: chain(taps, ws, X))(ws)  # noqa: E731
    (loss, grads), told = run(f, ws, gate=False)
    assert told.messages == []
    expected = jax.jit(jax.value_and_grad(lambda ws: chain(None, ws, X)))(ws)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(grads, expected[1], rtol=1e-5)


@pytest.mark.parametrize("frozen", [1, 5])
def test_what_comes_before_the_first_that_is_differentiated_tells_nothing(frozen):
    ws = jnp.linspace(0.8, 1.2, 8)

    def f(taps, ws):
        loss = lambda last: chain(taps, [*ws[:frozen], *last], X)  # noqa: E731
        return jax.grad(loss)(list(ws[frozen:]))

    _, told = run(f, ws)
    check(told, ws, X, range(frozen, 8))


def test_a_sign_of_zero_stays():
    def f(taps, w):
        def loss(w):
            tap = taps(w)
            return (tap(w, "w") * jnp.float32(-0.0)).sum()

        return jax.grad(loss)(w)

    grads, told = run(f, jnp.ones(3))
    assert np.signbit(grads).all()
    assert told.found["w"][0].size == 3


def test_the_examples_of_a_batch_are_told_together():
    ws = jnp.linspace(0.8, 1.2, 3)
    per_example = lambda taps, x: jax.vmap(  # noqa: E731
        lambda x: jax.grad(lambda ws: chain(taps, ws, x))(ws)
    )(x)
    _, told = run(per_example, X)
    check(told, ws, X, range(3))


def test_the_taps_of_a_vmapped_function_are_told_together():
    ws = jnp.linspace(0.8, 1.2, 3)

    def f(taps, ws):
        return jax.grad(lambda ws: jax.vmap(lambda x: chain(taps, ws, x))(X).sum())(ws)

    _, told = run(f, ws)
    check(told, ws, X, range(3))


def test_a_value_that_nobody_needs_tells_nothing():
    def f(taps, ws):
        def loss(ws):
            tap = taps(ws)
            tap(X * ws[0], "unused")
            return (tap(X * ws[1], "used") ** 2).sum()

        return jax.grad(loss)(ws)

    _, told = run(f, jnp.ones(2))
    assert list(told.found) == ["used"]


def test_wide_floats_keep_their_width():
    with jax.enable_x64(True):
        ws = jnp.linspace(0.8, 1.2, 3, dtype=jnp.float64)
        x = jnp.asarray(X, jnp.float64)
        _, told = run(lambda taps, ws: jax.grad(lambda ws: chain(taps, ws, x))(ws), ws)
    check(told, ws, x, range(3), rtol=1e-12)


@pytest.mark.parametrize("around", [jax.checkpoint, jax.jit], ids=["remat", "jit"])
def test_a_transform_around_the_pass_tells_it_once(around):
    ws = jnp.linspace(0.8, 1.2, 3)
    _, told = run(lambda taps, ws: jax.grad(around(lambda ws: chain(taps, ws, X)))(ws), ws)
    check(told, ws, X, range(3))


def test_each_turn_of_a_differentiated_loop_tells_its_own():
    ws = jnp.linspace(0.8, 1.2, 3)

    def f(taps, ws):
        def loss(ws):
            turn = lambda total, x: (total + chain(taps, ws, x), None)  # noqa: E731
            return jax.lax.scan(turn, 0.0, X)[0]

        return jax.grad(loss)(ws)

    _, told = run(f, ws)
    assert told.messages == [[0, 1, 2]] * len(X)
    for number in range(3):
        rows = sorted(np.linalg.norm(cotangents(ws, x)[number]) for x in X)
        norms = sorted(float(one.norm) for one in told.found[number])
        np.testing.assert_allclose(norms, rows, rtol=1e-4)


def test_an_abandoned_backward_pass_leaves_nothing_to_the_next():
    ws, told = jnp.linspace(0.8, 1.2, 3), Told()
    _, back = jax.vjp(lambda ws: chain(functools.partial(told.tap, True), ws, X), ws)

    @jax.custom_vjp
    def fails(x):
        return x

    fails.defvjp(lambda x: (x, None), lambda _, ct: 1 / 0)
    received = []

    def broken(ws):
        tap = told.tap(True, ws)
        received.append(tap)
        return (tap(fails(tap(X * ws[0], "a")), "b") ** 2).sum()

    with pytest.raises(ZeroDivisionError):
        jax.jit(jax.grad(broken))(ws)
    assert told.messages == []
    jax.jit(back)(jnp.float32(1.0))
    jax.effects_barrier()
    assert told.messages == [[0, 1, 2]]


def test_second_derivatives_go_through():
    ws = jnp.linspace(0.8, 1.2, 3)
    found, _ = run(lambda taps, ws: jax.hessian(lambda ws: chain(taps, ws, X))(ws), ws)
    plain = jax.hessian(lambda ws: chain(None, ws, X))(ws)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-6)
