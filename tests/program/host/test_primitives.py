"""A program's requests and messages to the host happen once, in order, under every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.program.host.primitives import ask, tell, tied

W, X = jnp.eye(3) * 0.5, jnp.ones((2, 3))
STACK = jnp.stack([W] * 3)
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


class Host:
    """Answers requests with a counter, and records messages."""

    def __init__(self):
        self.asked = 0
        self.told = []

    def answer(self):
        self.asked += 1
        return (np.float32(self.asked),)

    def note(self, *arrays):
        self.told.append([np.asarray(a) for a in arrays])


@pytest.fixture
def host():
    return Host()


def layer_of(host, gate=True):
    def layer(w, x):
        (number,) = ask(host.answer, [NUMBER], x)
        y = jnp.sin(x @ w) * number
        zero = tell(host.note, jnp.asarray(gate), jax.lax.stop_gradient(y).sum() * 0 + number)
        return tied(y, zero)

    return layer


def over(layer):
    return lambda ws, x: jax.lax.scan(lambda c, w: (layer(w, c), None), x, ws)[0].sum()


def summed(f):
    return lambda w, x: f(w, x).sum()


def vmapped(layer):
    return lambda w, x: jax.vmap(layer, (None, 0))(w, x).sum()


def branch(layer):
    return lambda w, x: jax.lax.cond(x.sum() > 0, layer, lambda w, x: x, w, x)


TRANSFORMS = {
    "eager": (lambda f: f, W, 1),
    "jit": (jax.jit, W, 1),
    "grad": (lambda f: jax.jit(jax.grad(summed(f))), W, 1),
    "remat": (lambda f: jax.jit(jax.grad(summed(jax.checkpoint(f)))), W, 1),
    "eager remat": (lambda f: jax.grad(summed(jax.checkpoint(f))), W, 1),
    "scan": (lambda f: jax.jit(over(f)), STACK, 3),
    "grad of scan": (lambda f: jax.jit(jax.grad(over(f))), STACK, 3),
    "grad of scan, eager": (lambda f: jax.grad(over(f)), STACK, 3),
    "grad of scan of remat": (lambda f: jax.jit(jax.grad(over(jax.checkpoint(f)))), STACK, 3),
    "grad of remat of scan": (lambda f: jax.jit(jax.grad(jax.checkpoint(over(f)))), STACK, 3),
    "vmap": (lambda f: jax.jit(vmapped(f)), W, 1),
    "grad of vmap": (lambda f: jax.jit(jax.grad(vmapped(f))), W, 1),
    "vmap of grad": (lambda f: jax.jit(jax.vmap(jax.grad(summed(f)), (None, 0))), W, 1),
    "cond": (lambda f: jax.jit(jax.grad(summed(branch(f)))), W, 1),
    "jvp": (lambda f: jax.jit(lambda w, x: jax.jvp(summed(f), (w, x), (w, x))), W, 1),
    "hessian": (lambda f: jax.jit(jax.hessian(summed(f), argnums=1)), W, 1),
    "while": (
        lambda f: jax.jit(lambda w, x: jax.lax.fori_loop(0, x.size - 4, lambda i, c: f(w, c), x)),
        W,
        2,
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_each_call_is_made_once_and_told_what_was_asked(name, host):
    transform, w, count = TRANSFORMS[name]
    jax.block_until_ready(transform(layer_of(host))(w, X))
    jax.effects_barrier()
    assert host.asked == count
    told = [np.unique(one).tolist() for (one,) in host.told]
    assert sorted(told) == [[float(n)] for n in range(1, count + 1)]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nothing_is_told_while_the_gate_is_shut(name, host):
    transform, w, count = TRANSFORMS[name]
    jax.block_until_ready(transform(layer_of(host, gate=False))(w, X))
    jax.effects_barrier()
    assert (host.asked, host.told) == (count, [])


def test_recomputation_uses_the_number_that_the_forward_pass_asked_for(host):
    def f(x):
        (number,) = ask(host.answer, [NUMBER], x)
        return jnp.sin(x * number)

    y, back = jax.vjp(jax.checkpoint(f), X)
    (first,) = back(jnp.ones_like(y))
    np.testing.assert_allclose(first, jnp.cos(X), rtol=1e-6)  # the number was 1
    assert host.asked == 1


def test_arrays_of_several_kinds_arrive_as_they_were(host):
    arrays = [
        jnp.arange(3),
        jnp.float32(2.5),
        jnp.arange(3, 6),
        jnp.ones((2, 2), bool),
        jnp.float32(-1.0),
    ]

    @jax.jit
    def f(*arrays):
        return tied(arrays[0], tell(host.note, jnp.asarray(True), *arrays))

    np.testing.assert_array_equal(f(*arrays), arrays[0])
    jax.effects_barrier()
    ((*found,),) = host.told
    for a, b in zip(found, arrays, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_an_answer_that_may_come_twice_needs_no_effect(host):
    """Within a while loop in a differentiated function."""

    @jax.jit
    def f(w, x):
        def turn(state):
            y, n = state
            (number,) = ask(host.answer, [NUMBER], y, once=False)
            return y * jnp.minimum(number, 1.0), n + 1

        y = jax.lax.while_loop(lambda s: s[1] < 2, turn, (x, 0))[0]
        return (jax.lax.stop_gradient(y) * w.sum()).sum()

    np.testing.assert_allclose(jax.grad(f)(W, X), jnp.full((3, 3), 6.0))


def test_what_is_linear_stays_linear(host):
    f = lambda x: tied(2.0 * x, jnp.zeros(()))  # noqa: E731
    transposed = jax.linear_transpose(f, X)
    np.testing.assert_array_equal(transposed(X)[0], 2.0 * X)
