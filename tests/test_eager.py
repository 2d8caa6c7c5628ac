"""Calls whose Python reads the values of arrays run eagerly, measured as traced ones are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector import _private, staging

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)


class Plain(nnx.Module):
    """Statistics, random numbers, a module that is called twice, a method."""

    def __init__(self, rngs, read):
        self.read = read
        self.first = nnx.Linear(4, 4, use_bias=False, rngs=rngs)  # BatchNorm has it
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = self.drop(self.norm(self.first(x)))
        if self.read:
            assert np.isfinite(float(jax.lax.stop_gradient(x.sum())))
        return jnp.tanh(self.last(self.last(x)))


class Jitted(Plain):
    """A jitted part, which a loop calls again and again, and which changes statistics."""

    def __call__(self, x):
        steps = int((x > 1e3).sum()) + 2 if self.read else 2
        for _ in range(steps):
            x = _part(self, x)
        return self.last(x)


@nnx.jit
def _part(model, x):
    return model.drop(model.norm(model.first(x)))


class Stacked(nnx.Module):
    """A scan over layers, within remat."""

    def __init__(self, rngs, read):
        self.read = read
        make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = make(rngs.split(3))

    def __call__(self, x):
        @nnx.remat
        def layer(x, linear):
            return jnp.tanh(linear(x))

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def all_layers(x, linear):
            return layer(x, linear)

        if self.read and x.sum() > 1e6:
            raise AssertionError
        return all_layers(x, self.layers)


class Mapped(nnx.Module):
    """A module under jax.vmap, and one in the branch of a cond."""

    def __init__(self, rngs, read):
        self.read = read
        self.each = nnx.Linear(4, 4, rngs=rngs)
        self.one, self.other = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = jax.vmap(self.each)(x)
        go = bool((x == x).all()) if self.read else (x == x).all()
        return nnx.cond(jnp.asarray(go), lambda m, x: m.one(x), lambda m, x: m.other(x), self, x)


MODELS = [Plain, Jitted, Stacked, Mapped]


def _both(cls):
    return cls(nnx.Rngs(0), True), cls(nnx.Rngs(0), False)


def _same_state(a, b):
    a, b = (jax.tree.leaves(nnx.state(m)) for m in (a, b))
    for x, y in zip(a, b, strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def _same_records(eager, traced):
    assert "reads the value of an array" in eager.eager
    assert traced.eager == ""
    assert list(eager) == list(traced)
    assert eager.unseen == traced.unseen
    pd.testing.assert_frame_equal(eager.to_frame(), traced.to_frame(), rtol=1e-4, atol=1e-5)
    for site in eager:
        a, b = eager[site].calls, traced[site].calls
        assert [c.loops for c in a] == [c.loops for c in b]
        assert [c.variables for c in a] == [c.variables for c in b]
        for one, two in zip(a, b, strict=True):
            close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
            jax.tree.map(close, (one.values, one.input_values), (two.values, two.input_values))


@pytest.mark.parametrize("cls", MODELS)
def test_a_call_is_measured_as_the_traced_one(cls):
    (eager, traced), (plain, _) = _both(cls), _both(cls)
    wanted = {"values": True, "units": -1, "parameters": True}
    y, of_eager = nni.capture(eager, **wanted)(X)
    y_traced, of_traced = nnx.jit(nni.capture(cls.__call__, **wanted))(traced, X)
    np.testing.assert_allclose(y, plain(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y, y_traced, rtol=1e-5, atol=1e-6)
    _same_records(of_eager, of_traced)
    _same_state(eager, plain)
    for site in of_eager:
        for call in of_eager[site].calls:
            if call.loops == 0 and call.took_place:
                found = np.asarray(call.values, np.float64)
                assert call.output.mean == pytest.approx(found.mean(), rel=1e-4, abs=1e-6)
                assert call.units.mean == pytest.approx(
                    found.reshape(-1, found.shape[-1]).mean(0), rel=1e-4, abs=1e-6
                )


@pytest.mark.parametrize("cls", MODELS)
def test_gradients_are_those_of_the_traced_one(cls):
    def loss_fn(model, x):
        y = model(x)
        return (y**2).mean(), {"top": y.max()}

    (eager, traced), (plain, _) = _both(cls), _both(cls)
    graded = nni.value_and_grad(loss_fn, has_aux=True, parameters=True)
    (loss, aux, of_eager), grads = graded(eager, X)
    (_, _, of_traced), _ = nnx.jit(graded)(traced, X)
    (expected, expected_aux), of_plain = nnx.value_and_grad(loss_fn, has_aux=True)(plain, X)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(aux["top"]) == pytest.approx(float(expected_aux["top"]), rel=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, grads, of_plain)
    _same_records(of_eager, of_traced)
    _same_state(eager, plain)
    assert any(of_eager[site].gradient is not None for site in of_eager)


class Sampler(nnx.Module):
    """Decodes token by token until it meets an end, with a jitted step and a cache."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.out = nnx.Linear(4, 8, rngs=rngs)
        self.seen = nnx.Cache(jnp.zeros(4))

    def step(self, token):
        self.seen[...] = self.seen[...] + self.embed(token)
        return self.out(self.seen[...])


@nnx.jit
def _step(model, token):
    return model.step(token)


def _sample(model, rngs, n, *, noise):
    tokens = [1]
    while len(tokens) <= n:
        logits = _step(model, jnp.asarray(tokens[-1]))
        logits = logits + noise * jax.random.normal(rngs(), (8,))
        tokens.append(logits.argmax().item())
    return tokens, np.asarray(logits)


def test_a_sampler_records_each_token_and_compiles_one():
    counted = []
    undo = _private.compilation_events(lambda kind, _: counted.append(kind))
    try:
        counts = []
        for n in (3, 3, 9):
            model, rngs, before = Sampler(nnx.Rngs(0)), nnx.Rngs(7), len(counted)
            (tokens, logits), record = nni.capture(_sample)(model, rngs, n, noise=0.5)
            counts.append(counted[before:].count("compile"))
            plain, own = Sampler(nnx.Rngs(0)), nnx.Rngs(7)
            expected, of_last = _sample(plain, own, n, noise=0.5)
            assert tokens == expected
            assert isinstance(logits, np.ndarray)
            np.testing.assert_allclose(logits, of_last, rtol=1e-5)
            np.testing.assert_allclose(model.seen[...], plain.seen[...], rtol=1e-5)
            assert int(rngs.default.count[...]) == int(own.default.count[...]) == n
            assert [len(record[site].calls) for site in record] == [n, n]
    finally:
        undo()
    assert counts[2] == counts[1]  # nothing for each token
    assert record["embed"].output.size == 9 * 4
    assert "item" in record.eager


def test_what_is_told_of_a_wrong_call():
    model, calls = Plain(nnx.Rngs(0), True), []

    class Wrong(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.count[...] += 1
            calls.append(x)
            if float(x.sum()) > 1e6 or len(calls) == 2:
                raise LookupError("mine")
            return x

    wrong = Wrong()
    with pytest.raises(LookupError, match="mine"):
        nni.capture(wrong)(X)  # once in vain, once eagerly
    assert len(calls) == 2
    assert float(wrong.count[...]) == 0
    with pytest.raises(TypeError) as caught:  # no second try: it is no matter of tracing
        nni.capture(Plain(nnx.Rngs(0), False))(X[:, :3])
    assert not isinstance(caught.value, jax.errors.ConcretizationTypeError)
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        jax.jit(lambda x: nni.capture(model)(x)[0])(X)
    assert any("runs eagerly" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="closest"):
        nni.capture(model, only="frist")(X)


def test_a_call_that_is_known_to_run_eagerly_is_not_traced_again():
    traced = []

    def call(model, x):
        traced.append(isinstance(x, jax.core.Tracer))
        return model(x)

    staging._eagerly.clear()
    model = Plain(nnx.Rngs(0), True)
    captured = nni.capture(call)
    captured(model, X)
    captured(model, 2 * X)
    assert traced == [True, False, False]
    captured(model, X[:3])
    assert traced == [True, False, False, True, False]


def test_what_a_closure_holds_may_be_changed():
    rngs, own = nnx.Rngs(3), nnx.Rngs(3)
    model = Plain(nnx.Rngs(0), True)

    def call(model, x, rngs=rngs):
        return model.last(x) + jax.random.normal(rngs(), x.shape)

    y, record = nni.capture(lambda m, x: call(m, x, rngs))(model, X)
    np.testing.assert_allclose(y, call(model, X, own), rtol=1e-5)
    assert int(rngs.default.count[...]) == 1
    assert list(record) == ["last"]
