"""The examples in `uses/` are short and show the papers' results, against models by hand."""

from __future__ import annotations

import ast
import importlib
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits
from uses import (
    activation_patching,
    batchnorm_precision,
    class_activation,
    diffmask,
    parameter_noise,
    pruning,
    steering,
)

FILES = sorted((pathlib.Path(__file__).parents[1] / "uses").glob("*.py"))
LABELS = load_digits().target


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_at_most_forty_lines_and_names_its_source(path):
    text = path.read_text()
    docstring = ast.parse(text).body[0]
    code = [line for line in text.splitlines()[docstring.end_lineno :] if line.strip()]
    assert len(code) <= 40
    module = importlib.import_module(f"uses.{path.stem}")
    assert "Source: " in module.__doc__
    assert callable(module.main)


def weights(layer):
    return [np.asarray(p[...], np.float64) for p in (layer.kernel, layer.bias)]


def mlp(x, first, last, change=lambda hidden: hidden):
    """Linear, relu, linear in float64."""
    (up, up_bias), (down, down_bias) = weights(first), weights(last)
    hidden = np.maximum(change(np.asarray(x, np.float64) @ up + up_bias), 0.0)
    return hidden @ down + down_bias


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.long
def test_a_learned_mask_drops_what_does_not_matter_and_keeps_the_predictions():
    found = diffmask.main()
    kept, model, x = np.asarray(found["kept"]), found["model"], found["x"]
    assert kept[64:].sum() <= 4  # pixels of another image
    assert 10 <= kept[:64].sum() <= 60
    clean, masked = found["accuracy"]
    assert clean > 0.98
    assert masked > clean - 0.06
    by_hand = mlp(np.where(kept, x, 0.0), model.layers[0], model.layers[2])
    np.testing.assert_allclose(masked, np.mean(by_hand.argmax(-1) == LABELS), atol=1e-6)
    complement = mlp(np.where(kept, 0.0, x), model.layers[0], model.layers[2])
    assert np.mean(complement.argmax(-1) == LABELS) < 0.5
    assert found["losses"][-1] < 0.7 * found["losses"][0]


@pytest.mark.long
def test_noisy_losses_are_those_of_models_with_noise_added_by_hand():
    found = parameter_noise.main(std=0.1, count=32)
    model, x = found["model"], found["x"]

    @jax.jit
    def noisy(seed):
        def parameter(layer, name):
            own = getattr(getattr(model, layer), name)[...]
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(f"{layer}/{name}".encode()))
            return own + 0.1 * jax.random.normal(key, own.shape)

        hidden = nnx.relu(x @ parameter("hidden", "kernel") + parameter("hidden", "bias"))
        logits = hidden @ parameter("head", "kernel") + parameter("head", "bias")
        return cross_entropy(logits, LABELS)

    by_hand = [noisy(seed) for seed in range(32)]
    np.testing.assert_allclose(found["losses"], by_hand, rtol=1e-4)
    np.testing.assert_allclose(found["clean"], cross_entropy(model(x), LABELS), rtol=1e-5)
    assert found["losses"].min() > found["clean"]
    assert len(set(map(float, found["losses"]))) == 32


@pytest.mark.long
def test_pruned_models_keep_their_accuracy_and_their_pruned_weights():
    found = pruning.main()
    dense, tuned, x = found["dense"], found["model"], found["x"]
    kernels = [np.asarray(dense.layers[i].kernel[...]) for i in (0, 2)]
    for sparsity, accuracy in found["accuracies"].items():
        cut = nnx.clone(dense)
        for i, kernel in zip((0, 2), kernels, strict=True):
            smallest = np.abs(kernel) <= np.quantile(np.abs(kernel), sparsity)
            cut.layers[i].kernel[...] = np.where(smallest, 0.0, kernel)
        by_hand = mlp(x, cut.layers[0], cut.layers[2]).argmax(-1) == LABELS
        np.testing.assert_allclose(accuracy, by_hand.mean(), atol=2e-3)
    dense_accuracy, third, half, _, most = found["accuracies"].values()
    assert dense_accuracy > 0.98
    assert third > dense_accuracy - 0.01
    assert half > dense_accuracy - 0.05
    assert most < 0.8
    assert found["tuned"] > dense_accuracy - 0.02  # at 70 %, trained on
    for i, kernel in zip((0, 2), kernels, strict=True):
        pruned = np.abs(kernel) < np.quantile(np.abs(kernel), 0.69)
        new = np.asarray(tuned.layers[i].kernel[...])
        np.testing.assert_array_equal(new[pruned], kernel[pruned])
        assert not np.allclose(new[~pruned], kernel[~pruned])


def test_class_activation_maps_follow_their_formulas_and_find_the_digit():
    found = class_activation.main()
    model, (x, labels, corners) = found["model"], found["digits"]
    named = np.asarray(found["named"])
    assert np.mean(named == labels) > 0.9
    maps = np.asarray(model.features(x), np.float64)
    kernel, bias = weights(model.head)
    cam = sum(maps[..., c] * kernel[c][named][:, None, None] for c in range(maps.shape[-1]))
    np.testing.assert_allclose(found["cam"], cam, rtol=1e-3, atol=1e-4)
    # the mean of a map is the logit; and with global pooling Grad-CAM is CAM's positive part
    logits = np.asarray(model(x))[np.arange(len(x)), named]
    np.testing.assert_allclose(cam.mean(axis=(1, 2)) + bias[named], logits, rtol=1e-3, atol=1e-3)
    positive = np.maximum(cam, 0.0) / (16 * 16)
    np.testing.assert_allclose(found["grad_cam"], positive, rtol=1e-3, atol=1e-6)
    inside = np.zeros(cam.shape, bool)
    for one, (i, j) in zip(inside, corners, strict=True):
        one[i : i + 8, j : j + 8] = True
    share = (positive * inside).sum(axis=(1, 2)) / positive.sum(axis=(1, 2))
    assert np.median(share) > 0.6  # a quarter of the canvas


def test_batchnorm_in_another_precision_is_the_model_that_rounds_there():
    found = batchnorm_precision.main()
    exact, x = found["model"], found["x"]

    def by_hand(model, dtype, x):
        rounded = lambda a: a.astype(dtype).astype(jnp.float32)  # noqa: E731
        return model.head(nnx.relu(rounded(model.norm(rounded(model.hidden(x))))))

    for dtype, error in found["errors"].items():
        change = by_hand(exact, dtype, x) - exact(x)
        by_norm = jnp.linalg.norm(change) / jnp.linalg.norm(exact(x))
        np.testing.assert_allclose(error, by_norm, rtol=1e-2)
    half, brain, quarter = found["errors"].values()
    assert 0 < half < brain < quarter
    assert 4 < brain / half < 16  # three bits of the mantissa less
    assert 4 < quarter / brain < 64
    in_half, in_full = found["accuracy"].values()
    assert abs(in_half - in_full) < 0.01
    assert in_full > 0.98


def test_training_with_a_rounded_batchnorm_is_training_the_model_that_rounds_there():
    """One step, its statistics and gradients."""
    x = batchnorm_precision.load_digits().data / 16

    def loss(call, model):
        return cross_entropy(call(model, jnp.asarray(x, jnp.float32)), LABELS)

    def by_hand(model, x):
        rounded = lambda a: a.astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
        return model.head(nnx.relu(rounded(model.norm(rounded(model.hidden(x))))))

    def perturbed(model, x):
        what = batchnorm_precision.rounded(jnp.bfloat16)
        return batchnorm_precision.nni.perturbed(model)(what, x)

    results = []
    for call in (perturbed, by_hand):
        model = batchnorm_precision.Classifier(nnx.Rngs(0))
        value, grads = nnx.value_and_grad(lambda model, call=call: loss(call, model))(model)
        results.append((value, grads, nnx.state(model, nnx.BatchStat)))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-5)


def test_patching_restores_the_answer_where_it_must():
    found = activation_patching.main()
    assert found["best"] < 0.01
    token, first, last = (np.asarray(found["traced"][s]) for s in found["traced"])
    source = activation_patching.SOURCE
    # the runs differ in one token: patched it is the clean run, and patched elsewhere nothing is
    np.testing.assert_allclose(token, np.eye(activation_patching.LENGTH)[source], atol=1e-5)
    # the head reads the last position alone
    np.testing.assert_allclose(last, np.eye(activation_patching.LENGTH)[-1], atol=1e-5)
    # the first block moves information to later positions only
    np.testing.assert_allclose(first[:source], 0.0, atol=1e-6)
    assert first[source:].max() > 0.5


def test_patched_runs_are_those_of_a_model_by_hand():
    model = activation_patching.Transformer(nnx.Rngs(0))
    clean, other = jax.random.randint(jax.random.key(1), (2, 4, 6), 0, 8)
    first, second = model.blocks.layers

    def stream(tokens):
        return first(model.token(tokens) + model.place(jnp.arange(6)))

    patched = stream(other).at[:, 3].set(stream(clean)[:, 3])
    patch = activation_patching.nni.Patch(stream(clean), (jnp.arange(6) == 3)[:, None])
    found = activation_patching.nni.perturbed(model)({"blocks/layers/0": patch}, other)
    np.testing.assert_allclose(found, model.head(second(patched)[:, -1]), rtol=1e-5, atol=1e-6)


def test_a_direction_steers_and_another_as_long_does_not():
    found = steering.main(source=1, target=7)
    model, x = found["model"], np.asarray(found["x"], np.float64)
    kernel, bias = weights(model.layers[0])
    hidden = x @ kernel + bias
    direction = hidden[LABELS == 7].mean(0) - hidden[LABELS == 1].mean(0)
    np.testing.assert_allclose(found["direction"], direction, rtol=1e-4, atol=1e-4)
    for strength, predictions in zip(found["strengths"], found["predictions"], strict=True):
        steered = lambda a, s=float(strength): a + s * direction  # noqa: E731
        by_hand = mlp(x[LABELS == 1], model.layers[0], model.layers[2], steered).argmax(-1)
        assert np.mean(by_hand == predictions) > 0.99
    assert found["flipped"][0] < 0.02
    assert found["flipped"][-1] > 0.95
    assert np.all(np.diff(found["flipped"]) >= -0.01)
    assert found["by_chance"][-1] < 0.2
