"""An inspector whose model is called through a method or a function: everything works, figures
equal those of plain Flax and NumPy, and an error for an unusable entry says what to pass.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni

X = jnp.arange(12.0).reshape(4, 3) / 10


class Coder(nnx.Module):
    """Without `__call__`."""

    def __init__(self, rngs: nnx.Rngs):
        self.enc = nnx.Linear(3, 2, rngs=rngs)
        self.dec = nnx.Linear(2, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def encode(self, x: Any, scale: float = 1.0):
        return jnp.tanh(self.drop(self.enc(x))) * scale

    @nnx.jit
    def decode(self, z: Any):
        return self.dec(z)


class Called(Coder):
    def __call__(self, x: Any):
        return self.dec(self.encode(x))


def codes(model: Coder, x: Any = X, scale: float = 1.0) -> np.ndarray:
    kernel, bias = (np.asarray(v[...], np.float64) for v in (model.enc.kernel, model.enc.bias))
    return np.tanh(np.asarray(x, np.float64) @ kernel + bias) * scale


def arrays_of(model: Coder) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey)))]


def forward(model: Coder, x: Any, scale: float = 1.0):
    return model.encode(x, scale)


def arranged(flag: float, x: Any, model: Coder):
    return flag * model.encode(x)


def loss_of(model: Coder, x: Any):
    return (model.encode(x) ** 2).sum()


@pytest.mark.parametrize("way", ["method", pytest.param("function", marks=pytest.mark.long)])
def test_all_of_an_inspector_works(inspect: Any, way: str, tmp_path: pathlib.Path):
    model = Coder(nnx.Rngs(0))
    graphdef, before = nnx.graphdef(model), arrays_of(model)
    classes = {cls: dict(vars(cls)) for cls in (Coder, nnx.Linear)}
    insp = inspect(model.encode, X) if way == "method" else inspect(forward, model, X)
    assert insp.model is model
    own = [":encode"] if way == "method" else []
    assert sorted(insp.recording.sites) == sorted([*own, "drop", "enc"])
    want = codes(model)
    np.testing.assert_allclose(insp.run(), want, rtol=1e-5)
    np.testing.assert_allclose(insp.run(X + 1, scale=2.0), codes(model, X + 1, 2.0), rtol=1e-5)
    insp.run(X)
    for site in own:
        np.testing.assert_allclose(insp.values(site), want, rtol=1e-5)
        assert insp.recording.summary(site).mean == pytest.approx(want.mean(), rel=1e-5)

    handle = insp.perturb("enc", nni.Scale(2.0))
    twice = np.tanh(2 * np.arctanh(want))
    assert insp.effect.output_change == pytest.approx(
        np.linalg.norm(twice - want) / np.linalg.norm(want), rel=1e-4
    )
    np.testing.assert_allclose(insp.run(), twice, rtol=1e-4)
    handle.remove()
    entered = insp.perturb("enc", nni.Zero(at="input"))  # a place needs a new program
    np.testing.assert_allclose(insp.run(), codes(model, 0 * X), rtol=1e-4, atol=1e-6)
    entered.remove()

    frame = insp.sweep("enc", progress=False)
    assert list(frame["site"]) == ["enc"]
    assert "loss" not in frame
    off = np.tanh(0 * want)
    assert frame["output_change"][0] == pytest.approx(
        np.linalg.norm(off - want) / np.linalg.norm(want), rel=1e-5
    )
    np.testing.assert_allclose(insp.step(loss_of, X), (want**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(
        insp.values("enc", part="gradient"), 2 * want * (1 - want**2), rtol=1e-3, atol=1e-5
    )
    change = insp.sweep("enc", progress=False)
    assert change["loss_change"][0] == pytest.approx(-(want**2).sum(), rel=1e-5)
    assert np.isnan(change["output_change"][0]) == (way == "function")  # the loss calls no __call__

    insp.run(X)
    assert sorted(insp.parameters("enc")) == ["enc/bias", "enc/kernel"]
    means = np.arctanh(want).mean(axis=0)
    np.testing.assert_allclose(insp.units("enc").mean, means, rtol=1e-4, atol=1e-6)
    insp.modes.set("drop", deterministic=False)
    dropped = np.asarray(insp.run())
    assert ((np.abs(dropped) < 1e-6) | (np.abs(dropped) > np.abs(want))).all()
    insp.modes.reset()

    html = tmp_path / "page.html"
    insp.save(tmp_path / "run.nni")
    insp.run(X)
    assert insp.to_html(html) == html.stat().st_size
    assert "has no __call__" not in html.read_text()
    for finding in insp.findings:
        assert (finding.rule, finding.site) == ("unused", "dec")  # as in an encoder
    doubled = nnx.clone(model)
    doubled.enc.kernel[...] = 2 * model.enc.kernel[...]
    insp.update(doubled)
    np.testing.assert_allclose(insp.run(), codes(doubled), rtol=1e-5)
    insp.close()
    assert insp.recording.summary("enc").size == nni.load(tmp_path / "run.nni").summary("enc").size
    assert nnx.graphdef(model) == graphdef
    assert classes == {cls: dict(vars(cls)) for cls in classes}
    jax.tree.map(np.testing.assert_array_equal, arrays_of(model), before)


def test_a_watched_loop_shows_the_method_that_is_entered(inspect: Any):
    model = Coder(nnx.Rngs(0))
    insp = inspect(model.encode, X)

    @nnx.jit
    def train(model: Coder, x: Any):
        loss, grads = nnx.value_and_grad(loss_of)(model, x)
        return loss, grads

    clean = [float(train(model, batch)[0]) for batch in [X, 2 * X]]
    assert clean == pytest.approx([(codes(model, k * X) ** 2).sum() for k in (1, 2)], rel=1e-5)
    passes = len(insp.recording.passes)
    for batch in insp.watch([X, 2 * X], every=1):
        insp.metrics(loss=train(model, batch)[0])
    assert len(insp.recording.passes) == passes + 2
    assert insp.recording.summary(":encode").mean == pytest.approx(codes(model, 2 * X).mean())
    insp.perturb("enc", nni.Zero())
    losses = [float(train(model, batch)[0]) for batch in insp.watch([X, X], every=1)]
    assert losses == [0.0, 0.0]


def test_every_way_to_write_the_call(inspect: Any):
    model, rng = Called(nnx.Rngs(0)), nnx.Rngs(1)
    want = codes(model)
    decoded = want @ np.asarray(model.dec.kernel[...]) + np.asarray(model.dec.bias[...])
    ways: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any, Any]] = [
        (nnx.jit(forward), (model, X), {}, (X + 1,), want),
        (functools.partial(forward, scale=1.0), (model, X), {}, (X + 1,), want),
        (Called.encode, (model, X), {}, (X + 1,), want),
        (arranged, (1.0, X, model), {}, (1.0, X + 1), want),
        (lambda x, model: model.encode(x), (X,), {"model": model}, (X + 1,), want),
        (lambda model, key, x: model.encode(x), (model, rng, X), {}, (rng, X + 1), want),
        (model.__call__, (X,), {}, (X + 1,), decoded),
        (model.decode, (jnp.asarray(want),), {}, (codes(model, X + 1),), decoded),
    ]
    for f, args, kwargs, others, expected in ways:
        insp = inspect(f, *args, **kwargs)
        np.testing.assert_allclose(insp.run(), expected, rtol=1e-5, atol=1e-6)
        moved = np.asarray(insp.run(*others))
        assert moved.shape == expected.shape
        assert not np.allclose(moved, expected, atol=1e-3)
        assert insp.model is model
        insp.close()


def test_a_method_under_another_name_than_its_function_has(inspect: Any):
    def bare(method: Any):
        return lambda self, x: method(self, x)

    class Decorated(Coder):
        shrink = bare(Coder.encode)

    model = Decorated(nnx.Rngs(0))
    insp = inspect(model.shrink, X)
    np.testing.assert_allclose(insp.run(), codes(model), rtol=1e-5)
    np.testing.assert_allclose(insp.values(":shrink"), codes(model), rtol=1e-5)


def test_a_method_of_a_linen_module(inspect: Any):
    import flax.linen as nn

    class Dense(nn.Module):
        def setup(self):
            self.layer = nn.Dense(2)

        def __call__(self, x: Any):
            return self.layer(x)

        def double(self, x: Any):
            return 2 * self.layer(x)

    model = nnx.bridge.ToNNX(Dense(), rngs=nnx.Rngs(0)).lazy_init(X)
    insp = inspect(model.double, X)
    np.testing.assert_allclose(insp.run(), model.double(X), rtol=1e-6)
    handle = insp.perturb("layer", nni.Zero())
    np.testing.assert_array_equal(insp.run(), np.zeros((4, 2)))
    handle.remove()


def test_a_method_that_reads_values_runs_eagerly(inspect: Any):
    class Sampler(Coder):
        def draw(self, x: Any, n: Any):
            for _ in range(int(n)):
                x = self.dec(self.enc(x))
            return x

    model = Sampler(nnx.Rngs(0))
    insp = inspect(model.draw, X, jnp.int32(2))
    np.testing.assert_allclose(insp.run(), model.draw(X, 2), rtol=1e-6)
    assert insp.trace.eager
    assert [call.site for call in insp.trace.calls].count("enc") == 2
    insp.perturb("dec", nni.Zero())
    np.testing.assert_array_equal(insp.run(), np.zeros((4, 3)))


def test_a_loss_of_a_method_tells_how_far_its_result_moves(inspect: Any):
    """The model also has a `__call__`, which the loss does not call."""
    model = Called(nnx.Rngs(0))
    insp = inspect(model.encode, X)
    insp.perturb("enc", nni.Zero())
    insp.step(loss_of, X)
    assert insp.effect.output_change == pytest.approx(1.0)
    assert {site.site for site in insp.effect.sites} == {"drop"}
    assert insp.sweep("enc", progress=False)["output_change"][0] == pytest.approx(1.0)


# ------------------------------------------------------------------ ensembles


@nnx.split_rngs(splits=5)
@nnx.vmap
def ensemble_of(rngs: nnx.Rngs):
    return Called(rngs)


def each(model: Called, x: Any):
    return model(x)


def test_an_ensemble_is_entered_by_the_function_that_maps_over_it(inspect: Any):
    ensemble = ensemble_of(nnx.Rngs(0))
    mapped = nnx.vmap(each, in_axes=(0, None))
    enc, dec = (
        [np.asarray(v[...], np.float64) for v in (layer.kernel, layer.bias)]
        for layer in (ensemble.enc, ensemble.dec)
    )
    hidden = np.tanh(X @ enc[0] + enc[1][:, None])
    want = hidden @ dec[0] + dec[1][:, None]
    np.testing.assert_allclose(mapped(ensemble, X), want, rtol=1e-5)
    insp = inspect(mapped, ensemble, X)
    np.testing.assert_allclose(insp.run(X), want, rtol=1e-5)
    np.testing.assert_allclose(insp.values("enc"), X @ enc[0] + enc[1][:, None], rtol=1e-5)
    summary = insp.recording.summary("")
    assert (summary.size, summary.mean) == (want.size, pytest.approx(want.mean(), rel=1e-4))

    def loss(model: Called, x: Any):
        return (mapped(model, x) ** 2).mean()

    np.testing.assert_allclose(insp.step(loss, X), (want**2).mean(), rtol=1e-5)

    @nnx.jit
    def train(model: Called, x: Any):
        return nnx.value_and_grad(loss)(model, x)[0]

    for batch in insp.watch([X, X], every=1):
        assert float(train(ensemble, batch)) == pytest.approx((want**2).mean(), rel=1e-5)
    assert insp.recording.summary("").mean == pytest.approx(want.mean(), rel=1e-4)
    insp.perturb("dec", nni.Zero())
    np.testing.assert_array_equal(insp.run(X), np.zeros_like(want))


def test_an_ensemble_by_itself_says_what_to_pass(inspect: Any):
    with pytest.raises(TypeError, match="contracting dimensions") as raised:
        inspect(ensemble_of(nnx.Rngs(0)), X)
    notes = "\n".join(raised.value.__notes__)
    assert "an extra first axis of 5" in notes
    assert "nni.Inspector(forward, ensemble, x)" in notes
    with pytest.raises(TypeError, match="contracting dimensions") as raised:
        inspect(Called(nnx.Rngs(0)), X[:, :2])  # not an ensemble, but a wrong example
    assert "ensemble" not in "\n".join(raised.value.__notes__)


# --------------------------------------------------------------- what to pass


def test_with_two_models_the_first_is_on_screen(inspect: Any):
    student, teacher = Called(nnx.Rngs(0)), Called(nnx.Rngs(1))
    insp = inspect(lambda s, t, x: s(x) - t(x), student, teacher, X)
    np.testing.assert_allclose(insp.run(), student(X) - teacher(X), rtol=1e-5, atol=1e-6)
    assert insp.model is student
    np.testing.assert_allclose(insp.values(""), student(X), rtol=1e-5)
    assert any("not shown: Called" in notice for notice in inside(insp).notices)
    np.testing.assert_allclose(insp.run(student, X), np.zeros((4, 3)), atol=1e-6)


def test_what_cannot_be_entered_says_what_to_pass(inspect: Any):
    model = Coder(nnx.Rngs(0))
    cases: list[tuple[tuple[Any, ...], str]] = [
        (
            (model,),
            r"has no __call__. Pass one of its methods, such as model.encode or model.decode",
        ),
        ((model, X), r"has no __call__"),
        ((model.encode,), r"Coder.encode takes x .no example .*\(model.encode, x\)"),
        ((forward, model), r"forward takes model, x .*nni.Inspector\(forward, model, x\)"),
        ((lambda x: model.encode(x), X), r"Pass the model as an argument, not through a closure"),
        ((lambda d, x: d["m"].encode(x), {"m": model}, X), r"within a container"),
        ((Coder, X), r"model is the class Coder, not an instance"),
        ((nnx.Rngs(0), X), r"model must be an nnx.Module, got Rngs"),
    ]
    for args, text in cases:
        with pytest.raises(TypeError, match=text):
            inspect(*args)
