"""Calls whose Python reads the values of arrays run eagerly, and are measured like traced calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from compilations import Compilations
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.program import eager
from nnx_inspector.program.eager import why_untraceable

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
    """A jitted part that a loop calls repeatedly and that changes statistics."""

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
    """Decodes token by token until an end token, with a jitted step and a cache."""

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
    counts = []
    for n in (3, 3, 9):
        model, rngs = Sampler(nnx.Rngs(0)), nnx.Rngs(7)
        with Compilations() as compilations:
            (tokens, logits), record = nni.capture(_sample)(model, rngs, n, noise=0.5)
        counts.append(compilations.kinds.count("compile"))
        plain, own = Sampler(nnx.Rngs(0)), nnx.Rngs(7)
        expected, of_last = _sample(plain, own, n, noise=0.5)
        assert tokens == expected
        assert isinstance(logits, np.ndarray)
        np.testing.assert_allclose(logits, of_last, rtol=1e-5)
        np.testing.assert_allclose(model.seen[...], plain.seen[...], rtol=1e-5)
        assert int(rngs.default.count[...]) == int(own.default.count[...]) == n
        assert [len(record[site].calls) for site in record] == [n, n]
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
        nni.capture(wrong)(X)  # once for the failed trace, once eagerly
    assert len(calls) == 2
    assert float(wrong.count[...]) == 0
    with pytest.raises(TypeError) as caught:  # not tried again: the error does not concern tracing
        nni.capture(Plain(nnx.Rngs(0), False))(X[:, :3])
    assert not isinstance(caught.value, jax.errors.ConcretizationTypeError)
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        jax.jit(lambda x: nni.capture(model)(x)[0])(X)
    assert any("runs eagerly" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="closest"):
        nni.capture(model, only="frist")(X)


def test_a_call_that_is_known_to_run_eagerly_is_not_traced_again(monkeypatch):
    traced = []

    def call(model, x):
        traced.append(isinstance(x, jax.core.Tracer))
        return model(x)

    monkeypatch.setattr(eager, "_reasons", {})  # what is kept for the whole process
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


def test_a_trace_has_the_calls_as_they_ran():
    eager, traced = _both(Jitted)
    before = jax.tree.leaves(nnx.state(eager))
    of_eager, of_traced = nni.trace(eager, X), nni.trace(traced, X)
    assert "reads the value of an array" in of_eager.eager
    assert "ran eagerly" in repr(of_eager)
    assert of_traced.eager == ""
    for a, b in zip(of_eager.calls, of_traced.calls, strict=True):
        unknown = {"flops": None, "source": ""}
        assert dataclasses.replace(a, **unknown) == dataclasses.replace(b, **unknown)
        assert a.source.startswith(__file__)
    flops = {call.site: (call.flops, own.flops) for call, own in _pairs(of_eager, of_traced)}
    assert flops[""][0] is None
    assert flops["last"][0] is None
    assert flops["first"][0] == flops["first"][1]  # in the jitted part, whose program exists
    assert of_eager.edges == of_eager.borders == of_eager.arrivals == ()
    after = jax.tree.leaves(nnx.state(eager))
    assert all(a is b for a, b in zip(before, after, strict=True))
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        nni.trace(eager, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert any("Call it with arrays" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match="dot_general") as caught:
        nni.trace(eager, X[:, :3])
    partial = caught.value.partial_trace
    assert [call.site for call in partial.calls] == ["", "first"]


def _pairs(a, b):
    return zip(a.calls, b.calls, strict=True)


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (Plain, {"last": nni.Scale(0.5), "drop": nni.Noise(0.1)}),
        (Jitted, {"first": nni.Mask(jnp.array([1.0, 0.0, 1.0, 0.0]))}),
        (Jitted, {"norm": nni.Zero(at="input"), "last/kernel": nni.ParameterNoise(0.1)}),
        (Stacked, {"layers[1]": nni.Scale(3.0)}),
        (Mapped, {"each": nni.Scale(3.0, at="input"), "one": nni.Zero()}),
    ],
)
def test_a_perturbed_call_is_that_of_the_traced_one(cls, what):
    eager, traced = _both(cls)
    y, expected = nni.perturbed(eager)(what, X), nni.perturbed(traced)(what, X)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    _same_state(eager, traced)
    assert float(jnp.abs(y - _both(cls)[1](X)).max()) > 1e-3
    (eager, traced), run = _both(cls), lambda m: nni.perturbed(_loss)(what, m, X)
    grads, expected = nnx.grad(run)(eager), nnx.grad(run)(traced)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, grads, expected)


def test_a_perturbation_of_an_eager_call_that_cannot_be_is_refused_and_changes_nothing():
    eager, plain = _both(Jitted)
    with pytest.raises(ValueError, match="no site"):
        nni.perturbed(eager)({"frist": nni.Zero()}, X)
    with pytest.raises(ValueError, match="does not fit"):
        nni.perturbed(eager)({"last": nni.Mask(jnp.ones(3))}, X)
    _same_state(eager, plain)
    with nni.perturb("last", nni.Zero()):
        assert not np.any(eager(X))


def _loss(model, x):
    return (model(x) ** 2).mean()


@pytest.mark.long
def test_an_inspector_of_an_eager_call_shows_what_that_of_a_traced_one_shows():
    eager, traced = _both(Jitted)
    before = jax.tree.leaves(nnx.state(eager))
    one, other = (nni.Inspector(model, X, display=False) for model in (eager, traced))
    told = [notice.text for notice in inside(one).view.state_at_rest().notices]
    assert any("ran eagerly" in text and "reads the value" in text for text in told)
    assert not inside(other).view.state_at_rest().notices

    def same():
        assert one.recording.sites == other.recording.sites
        passes = [inspector.recording.passes[-1] for inspector in (one, other)]
        assert passes[0].keys == passes[1].keys
        for key in passes[0].keys:
            a, b = (one.summary(*key) for one in passes)
            assert a.size == b.size
            assert [a.mean, a.std, a.max] == pytest.approx([b.mean, b.std, b.max], 1e-4, 1e-5)

    same()
    assert one.step(_loss, X) == pytest.approx(float(other.step(_loss, X)), rel=1e-5)
    same()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for part in ("output", "input", "gradient"):
        close(*(i.values("norm", part=part, call=1) for i in (one, other)))
    close(*(i.units("last").mean for i in (one, other)))
    for inspector in (one, other):
        inspector.perturb("drop", nni.Scale(0.5))
    assert one.run(X).shape == other.run(X).shape
    same()
    assert one.effect.output_change == pytest.approx(other.effect.output_change, rel=1e-4)
    one.modes.set(deterministic=True)
    np.testing.assert_array_equal(one.run(X), one.run(X))
    with pytest.raises(nni.InspectorError, match="cannot be traced"):
        one.sweep(progress=False)
    after = jax.tree.leaves(nnx.state(eager))
    assert all(a is b for a, b in zip(before, after, strict=True))
    one.close()
    other.close()


def test_where_a_derivative_cannot_read_a_value_the_step_has_no_gradients_and_says_so():
    model = Plain(nnx.Rngs(0), True)
    inspector = nni.Inspector(model, X, display=False)

    def loss_fn(model, x):
        y = model(x)
        return (y**2).mean() * np.isfinite(np.asarray(y)).all()

    inspector.step(loss_fn, X)
    told = " ".join(notice.text for notice in inside(inspector).view.state_at_rest().notices)
    assert "there are no gradients" in told
    last = inspector.recording.passes[-1]
    assert ("last", "output") in last.keys
    assert ("last", "gradient") not in last.keys
    with pytest.raises(jax.errors.TracerArrayConversionError):
        nni.value_and_grad(loss_fn)(model, X)
    inspector.close()


def test_a_watched_loop_whose_step_reads_values_is_measured():
    model, plain = Plain(nnx.Rngs(0), True), Plain(nnx.Rngs(0), True)
    inspector = nni.Inspector(model, X, display=False)

    def step(model, x):
        loss, grads = nnx.value_and_grad(_loss)(model, x)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return float(loss)

    losses = [step(model, x) for x in inspector.watch([X, 2 * X, X], every=2)]
    expected = [step(plain, x) for x in (X, 2 * X, X)]
    assert losses == pytest.approx(expected, rel=1e-5)
    first, last = inspector.recording.passes[-2:]
    assert (first.step, last.step) == (0, 2)
    assert last.summary("last").size == 2 * X.size
    assert ("last", "gradient") in last.keys
    inspector.close()


def test_which_exceptions_are_a_matter_of_tracing():
    class Silent(Exception):
        def __str__(self):
            raise ZeroDivisionError

    table, found = {float(X.sum()): 1}, []

    def hides(x):
        try:
            return bool(x.sum() > 0)
        except TypeError:
            raise RuntimeError("mine") from None

    for read in (lambda x: table[x.sum()], hides, np.asarray, lambda x: x[x > 0]):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            jax.jit(read)(X)
        found.append(why_untraceable(caught.value))
    assert all("test_eager.py" in why or "array" in why for why in found)
    with pytest.raises(TypeError, match="DynamicJaxprTracer") as mistake:
        jax.jit(lambda x: () @ x)(X)
    assert why_untraceable(mistake.value) == "", "it fails as well with values"
    assert why_untraceable(Silent()) == ""
    assert why_untraceable(ValueError("shapes do not match")) == ""


@nnx.jit
def _doubled(model, x):
    return 2 * model(x)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_runs_of_one_jitted_part_each_has_its_own_gradient(order):
    """Of the runs, one only decides something, so no gradient comes back to it."""
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def loss_fn(model, x):
        out = {}
        for number in order:
            out[number] = _doubled(model, (1 + number) * x)
        assert float(jax.lax.stop_gradient(out[1]).sum()) < 1e6
        return (out[0] ** 2).sum()

    (_, record), _ = nni.value_and_grad(loss_fn)(model, X)
    assert record.eager
    expected = 8 * np.asarray(model(X), np.float64)
    for number, call in zip(order, record[""].calls, strict=True):
        np.testing.assert_allclose(call.output.mean, np.mean(model((1 + number) * X)), rtol=1e-5)
        if number:
            assert call.gradient is None
        else:
            np.testing.assert_allclose(call.gradient.mean, expected.mean(), rtol=1e-5)


def test_the_values_of_an_eager_call_can_be_differentiated():
    (eager, traced) = _both(Stacked)

    def penalty(model, x):
        _, record = nni.capture(model, values=True)(x)
        return sum((call.values**2).sum() for call in record["layers"].calls)

    ours, expected = nnx.grad(penalty)(eager, X), nnx.grad(penalty)(traced, X)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, ours, expected)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(ours)) > 0


def test_gradients_within_a_shard_map_of_an_eager_call_are_measured():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    part = jax.jit(jax.shard_map(lambda x: 2 * model(x), mesh=mesh, in_specs=spec, out_specs=spec))

    def loss_fn(model, x):
        y = part(x)
        assert np.isfinite(float(jax.lax.stop_gradient(y.sum())))
        return (y**2).sum()

    (_, record), _ = nni.value_and_grad(loss_fn)(model, X)
    assert record.eager
    expected = 8 * np.asarray(model(X), np.float64)
    np.testing.assert_allclose(record[""].gradient.mean, expected.mean(), rtol=1e-5)
