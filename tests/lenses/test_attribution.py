"""`attribute`: the oracle is `jax.grad` of the model by hand; integrals are sums in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from language_models import LENGTH, TOKENS, VOCABULARY, D, Language, language

import nnx_inspector as nni

X = np.random.default_rng(0).normal(size=(4, 6, 6, 1)).astype(np.float32)


class Named(NamedTuple):
    hidden: Any
    logits: Any


class Pictures(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(nnx.gelu(self.dropout(self.conv(x))).mean((1, 2)))


def pictures() -> Pictures:
    model = Pictures()
    model.eval()
    return model


def test_pixels_have_the_gradient_of_jax():
    model = pictures()
    gradient = jax.jit(jax.grad(lambda x: model(x)[:, 2].sum()))(X)
    expected: dict[Any, Any] = {"gradient": gradient, "gradient_times_input": gradient * X}
    for method, values in expected.items():
        found = nni.attribute(model, X, output=2, method=method)
        np.testing.assert_allclose(found.values, values, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(found.scores, found.values)
        np.testing.assert_allclose(found.output, model(X)[:, 2], rtol=1e-5)
        assert (found.of, found.error, found.baseline_output) == ("", None, None)
        assert list(found.to_frame().columns) == ["example", "row", "column", "channel", "score"]


def test_tokens_have_the_gradient_of_their_embedding():
    model = language()

    @jax.jit
    @jax.grad
    def gradient_of(embedded: jax.Array) -> jax.Array:
        x = embedded + model.place(jnp.arange(LENGTH))
        for block in model.blocks:
            x = block(x)
        return model.head(model.final_norm(x))[:, 2, 3].sum()

    embedded = model.token(jnp.asarray(TOKENS))
    gradient = gradient_of(embedded)
    found = nni.attribute(model, TOKENS, output=3, position=2)
    np.testing.assert_allclose(found.values, gradient * embedded, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.scores, found.values.sum(-1))
    assert found.of == "token"
    assert not found.scores[:, 3:].any()  # later positions cannot count
    frame: Any = found.to_frame()
    assert list(frame.columns) == ["example", "position", "score"]


def test_integrated_gradients_add_up_to_the_difference_of_outputs():
    model, classes = pictures(), np.array([0, 1, 2, 0])
    base = np.float32(0.5)
    found = nni.attribute(
        model, X, output=classes, method="integrated_gradients", baseline=base, steps=40
    )
    rows = np.arange(4)
    difference = (model(X) - model(np.full_like(X, base)))[rows, classes]
    np.testing.assert_allclose(found.values.sum((1, 2, 3)), difference, atol=1e-3)
    assert found.error is not None
    sums = found.values.astype(np.float64).sum((1, 2, 3))
    np.testing.assert_allclose(found.error, abs(sums - difference).max(), atol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: model(x)[rows, classes].sum()))
    total = 0.0
    for share in (np.arange(40) + 0.5) / 40:
        x = base + np.float32(share) * (X - base)
        total += np.asarray(gradient(x), np.float64)
    np.testing.assert_allclose(found.values, total / 40 * (X - base), rtol=1e-3, atol=1e-5)
    of_tokens = nni.attribute(language(), TOKENS, method="integrated_gradients", steps=200)
    assert of_tokens.error is not None
    assert of_tokens.baseline_output is not None
    change = of_tokens.output - of_tokens.baseline_output
    np.testing.assert_allclose(of_tokens.scores.sum(-1), change, atol=of_tokens.error + 1e-5)


def test_the_largest_logit_and_functions_of_the_output():
    model = pictures()
    found = nni.attribute(model, X, method="gradient")
    np.testing.assert_allclose(found.output, model(X).max(-1), rtol=1e-5)
    whole = nni.attribute(model, X, output=lambda y: (y**2).sum(), method="integrated_gradients")
    assert whole.output.shape == ()
    assert whole.error is not None
    assert whole.error < 0.05
    within = nni.attribute(model, X, site="@gelu", method="gradient_times_input")
    assert within.values.shape == (4, 6, 6, 4)
    deep = nni.attribute(model, X, site="conv", method="gradient")
    assert deep.values.shape == (4, 6, 6, 4)
    assert deep.scores.shape == (4, 6, 6)


def test_of_several_outputs_that_named_logits_is_meant():
    def named(model: Any, x: Any) -> Any:
        logits = model(x)
        return Named(jnp.tanh(logits[..., :2]), logits)

    def keyed(model: Any, x: Any) -> Any:
        return named(model, x)._asdict()

    plain = nni.attribute(pictures(), X, output=2).values
    for forward in (named, keyed):
        np.testing.assert_array_equal(nni.attribute(forward, pictures(), X, output=2).values, plain)
    model = language()
    assert nni.lens(named, model, TOKENS).unembed == "head"
    shares = nni.logit_attribution(keyed, model, TOKENS, token=4)
    np.testing.assert_allclose(shares.logit, model(TOKENS)[..., 4], rtol=1e-5, atol=1e-5)


def test_the_model_does_not_change():
    model = Pictures()  # its dropout is on
    before = jax.tree.leaves(nnx.state(model))
    nni.attribute(model, X)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


class BatchCoupled(nnx.Module):
    """Its BatchNorm in training makes each output depend on all examples."""

    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.head(nnx.tanh(self.norm(x)))


@pytest.mark.parametrize("method", ["gradient", "integrated_gradients"])
def test_each_example_is_attributed_with_the_others_as_they_are(method: Any):
    x = X.reshape(-1, 3)[:4]
    found = nni.attribute(BatchCoupled(), x, output=1, method=method, steps=200)
    output = lambda x: BatchCoupled()(x)[:, 1]  # noqa: E731
    np.testing.assert_allclose(found.output, output(x), rtol=1e-5)
    if method == "gradient":
        own = jax.jit(jax.jacobian(output))(jnp.asarray(x))[np.arange(4), np.arange(4)]
        np.testing.assert_allclose(found.values, own, rtol=1e-4, atol=1e-6)
        return
    assert found.error is not None
    assert found.error < 1e-3
    without = [output(x * (np.arange(4) != i)[:, None])[i] for i in range(4)]
    np.testing.assert_allclose(found.baseline_output, without, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("apart", [1, 2])
def test_examples_that_meet_after_the_first_are_attributed_one_by_one(apart: int):
    model = language()

    def messages(model: Language, x: Any) -> Any:  # as in a graph, from some nodes to others
        received = jnp.concatenate([jnp.zeros((apart, D)), x[:-apart]])
        return model.head(jnp.tanh(x + 2 * received))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, D)), jnp.float32)
    found = nni.attribute(messages, model, x, output=1, method="gradient")
    own = jax.jacobian(lambda x: messages(model, x)[:, 1])(x)[np.arange(4), np.arange(4)]
    np.testing.assert_allclose(found.values, own, rtol=1e-4, atol=1e-6)


class Translator(nnx.Module):
    """One embedding for what is read and what is written, and a mask that comes before both."""

    def __init__(self):
        self.token = nnx.Embed(VOCABULARY, D, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(D, 3, rngs=nnx.Rngs(1))

    def __call__(self, mask: Any, written: Any, read: Any) -> Any:
        x = (self.token(read) * mask[..., None]).mean(1)
        return self.head(nnx.tanh(x) * self.token(written).mean(1))


def test_of_several_calls_of_an_embedding_that_of_the_first_tokens_is_meant():
    model, read = Translator(), jnp.asarray(TOKENS)
    mask, written = jnp.ones_like(read), read[:, :3]
    found = nni.attribute(model, mask, written, read, output=2, method="gradient")
    by_hand = lambda x: model.head(nnx.tanh(model.token(read).mean(1)) * x.mean(1))[:, 2].sum()  # noqa: E731
    expected = jax.grad(by_hand)(model.token(written))
    np.testing.assert_allclose(found.values, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.scores, np.linalg.norm(expected, axis=-1), rtol=1e-4)
    assert found.of == "token call 1"
    with pytest.raises(ValueError, match="'token' is called 2 times"):
        nni.attribute(model, mask, read, read)


class OneHot(nnx.Module):
    def __init__(self):
        self.head = nnx.Linear(VOCABULARY, 3, rngs=nnx.Rngs(0))

    def __call__(self, tokens: Any) -> Any:
        return self.head(jax.nn.one_hot(tokens, VOCABULARY))


def test_what_cannot_be_attributed_is_named():
    model = pictures()
    with pytest.raises(ValueError, match="no module returns floating-point numbers for it"):
        nni.attribute(OneHot(), TOKENS)
    with pytest.raises(ValueError, match="method must be one of"):
        nni.attribute(model, X, method="saliency")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is not a site of this call. The closest are 'conv'"):
        nni.attribute(model, X, site="cnov")
    with pytest.raises(ValueError, match="calls no module of the model"):
        nni.attribute(lambda model, x: x.sum(), model, X, site="conv")
    with pytest.raises(ValueError, match="logit that output= chooses is out of range: there are 3"):
        nni.attribute(model, X, output=3)
    with pytest.raises(ValueError, match=r"baseline= must be a number, .* got float32\[2,2\]"):
        nni.attribute(model, X, baseline=jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="one for each of the 4 examples"):
        nni.attribute(model, X, output=lambda y: y)
    with pytest.raises(TypeError, match="must be a real number"):
        nni.attribute(model, X, output=lambda y: y.argmax())
    with pytest.raises(ValueError, match="There are 5 positions; there is no 5"):
        nni.attribute(language(), TOKENS, position=5)
    with pytest.raises(ValueError, match="'blocks/mlp' is called in a scan of 3"):
        nni.attribute(language(scan=True), TOKENS, site="blocks/mlp")
    with pytest.raises(ValueError, match="not logits"):
        nni.attribute(lambda model, x: model(x).sum(), model, X)
    assert nni.attribute(language(scan=True), TOKENS).values.shape == (*TOKENS.shape, D)
