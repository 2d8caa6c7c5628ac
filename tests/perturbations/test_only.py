"""`only`: a part of each kind against NumPy, in jit, scan and vmap, and its errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from language_models import TOKENS, D, Language

import nnx_inspector as nni
from nnx_inspector.perturbations.base import Part, is_random

X = np.random.default_rng(0).normal(size=(4, 3, 2, 5)).astype(np.float32)  # [batch, t, head, d]
KINDS: list[Any] = [
    nni.Zero(), nni.Mean(), nni.Mean(0.5), nni.Scale(3.0), nni.Shift(np.arange(5.0), 2.0),
    nni.Noise(1.0, seed=2), nni.Clamp(-0.1, 0.2), nni.Cast(jnp.bfloat16),
    nni.Mask(np.arange(5) % 2 == 0), nni.Patch(7.0), nni.Apply(jnp.sin),
]  # fmt: skip


def expected(kind: Any, units: Any, axis: int, example: int | None) -> np.ndarray:
    """The oracle: an ordinary assignment to a slice of a copy."""
    whole, out = np.asarray(kind.apply_at(jnp.asarray(X), "a")), X.copy()
    where: list[Any] = [slice(None)] * X.ndim
    for unit in range(X.shape[axis]) if units is None else units:
        where[axis] = unit
        if example is not None:
            where[0] = example
        out[tuple(where)] = whole[tuple(where)]
    return out


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.kind_name)
@pytest.mark.parametrize(
    ("units", "axis", "example"), [([1], -2, None), ([0, -1], -1, 2), (None, -1, -1), ([2], 1, 0)]
)
def test_the_rest_of_the_value_stays(kind: Any, units: Any, axis: int, example: int | None):
    part = kind.only(units, axis=axis, example=example)
    wanted = expected(kind, units, axis, example)
    for apply in (part.apply_at, jax.jit(part.apply_at, static_argnums=1)):
        found = np.asarray(apply(jnp.asarray(X), "a"))
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
        untouched = expected(nni.Patch(np.nan), units, axis, example) == X
        np.testing.assert_array_equal(found[untouched], X[untouched])
    assert is_random(part) == is_random(kind)


def test_gradients_change_in_the_part_alone():
    def gradient(one: Any) -> Any:
        return jax.grad(lambda x: (one.apply(x) * jnp.arange(1.0, 6)).sum())(jnp.ones((2, 5)))

    rows = np.tile(np.arange(1.0, 6), (2, 1))
    for kind, change in (
        (nni.ScaleGradient(2.0), lambda g: 2 * g),
        (nni.StopGradient(), lambda g: 0 * g),
        (nni.ReverseGradient(), lambda g: -g),
        (nni.ClipGradient(1.0), lambda g: g / np.linalg.norm(g)),
    ):
        part, out = kind.only([1, 3], example=0), rows.copy()
        out[0, [1, 3]] = change(rows[0, [1, 3]])
        np.testing.assert_allclose(gradient(part), out, rtol=1e-6)
        assert part.acts_on == "gradient"


@pytest.mark.parametrize("scan", [False, True])
def test_a_head_of_one_example_through_jit_and_scan(scan: bool):
    model = Language(scan=scan)
    site = "blocks/attention/value" if scan else "blocks/1/attention/value"
    _, record = nni.capture(model, only=site, values=True)(TOKENS)
    whole = nni.perturbed(model)({site: nni.Zero().only([0, 1], axis=-2)}, TOKENS)
    np.testing.assert_allclose(whole, nni.perturbed(model)({site: nni.Zero()}, TOKENS), rtol=1e-6)
    clean = model(jnp.asarray(TOKENS))
    one: Any = jax.jit(lambda head, i: nni.perturbed(model)(
        {site: nni.Zero().only([head], axis=-2, example=i)}, TOKENS
    ))  # fmt: skip
    for head, example in ((0, 0), (1, 1)):
        mask = np.ones((*np.shape(record[site].values)[-4:-1], 1), bool)
        mask[example, :, head] = False
        by_hand = nni.perturbed(model)({site: nni.Mask(mask, axis=0)}, TOKENS)
        found = one(head, example)
        np.testing.assert_allclose(found, by_hand, rtol=1e-5, atol=1e-6)
        others = np.arange(len(TOKENS)) != example
        np.testing.assert_allclose(found[others], clean[others], rtol=1e-5, atol=1e-6)
        assert np.abs(found[example] - clean[example]).max() > 1e-4
    assert one._cache_size() == 1  # another head compiles nothing


def test_vmapped_over_units_and_over_examples():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    x = jnp.asarray(X[:, 0, 0, :3])
    clean = np.asarray(model(x))
    each = jax.vmap(lambda k: nni.perturbed(model)({"": nni.Zero().only(k)}, x))(jnp.arange(4))
    np.testing.assert_allclose(each, clean * (1 - np.eye(4))[:, None], rtol=1e-6)

    def mapped(model: Any, x: Any) -> Any:
        return nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, x)

    found = nni.perturbed(mapped)({"": nni.Scale(2.0).only([1, -1])}, model, x)
    np.testing.assert_allclose(found, clean * np.array([1, 2, 1, 2]), rtol=1e-6)


def test_regions_and_inspectors_switch_units_without_compiling():
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.relu)
    x, compiled = jnp.asarray(X[:, 0, 0, :3]), []
    forward = nnx.jit(lambda m, x: (compiled.append(1), m(x))[1])
    clean = np.asarray(forward(model, x))
    for unit in (0, 3):
        with nni.perturb("layers/0", nni.Zero().only([unit])):
            np.testing.assert_allclose(forward(model, x), clean * (np.arange(4) != unit))
    assert len(compiled) == 2
    insp = nni.Inspector(model, x)
    handle = insp.perturb("layers/0", nni.Zero().only(units=[1], example=2))
    insp.run()
    place = handle.place
    handle.perturbation = nni.Zero().only(units=[3], example=0)
    out = clean.copy()
    out[0, 3] = 0
    np.testing.assert_allclose(insp.run(), out, rtol=1e-6)
    assert handle.place == place  # so the same program serves
    with pytest.raises(ValueError, match=r"Zero at 'layers/0', float32\[4,4\]: it has 4 units"):
        handle.perturbation = nni.Zero().only([9])
    insp.close()


def test_a_part_of_a_parameter():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    x = jnp.asarray(X[:, 0, 0, :3])
    kernel, bias = np.asarray(model.kernel), np.asarray(model.bias)
    pruned = nni.perturbed(model)({"kernel": nni.PruneMask(False).only([1], axis=0)}, x)
    wanted = kernel * np.array([[1], [0], [1]])
    np.testing.assert_allclose(pruned, x @ wanted + bias, rtol=1e-5, atol=1e-6)
    noisy = nni.perturbed(model)({"kernel": nni.ParameterNoise(1.0).only([2])}, x)
    same = np.isclose(noisy, model(x), rtol=1e-5).all(0)
    assert same.tolist() == [True, True, False, True]
    with pytest.raises(ValueError, match="it has 3 units along axis 0, so there is no unit 3"):
        nni.perturbed(model)({"kernel": nni.PruneMask(False).only([3], axis=0)}, x)


def test_a_sweep_of_heads_in_one_example():
    model = Language()

    def loss_fn(model: Any, tokens: Any) -> Any:
        return (model(tokens) ** 2).mean()

    one = nni.Zero().only(example=1)
    frame: Any = nni.sweep(
        model, loss_fn, TOKENS, sites="**/value", units=-2, perturbation=one, progress=False
    )
    assert frame.attrs["perturbation"] == "Zero"
    for _, row in frame.head(2).iterrows():
        part = nni.Zero().only([row["unit"]], axis=-2, example=1)
        by_hand = nni.perturbed(loss_fn)({row["site"]: part}, model, TOKENS)
        np.testing.assert_allclose(row["loss"], by_hand, rtol=1e-5)


def test_text_and_strength():
    part = nni.Noise(0.5).only([3], axis=-2, example=0)
    assert part.python() == "nni.Noise(std=0.5).only(units=[3], axis=-2, example=0)"
    assert eval(part.python(), {"nni": nni}).python() == part.python()
    assert part.tuned(2.0).python() == part.python().replace("0.5", "2.0")
    assert nni.Zero(at="input").only(np.arange(D) < 2).python().endswith(".only(units=[0, 1])")
    twice = nni.Zero().only([0], axis=1).only([2], axis=-2)
    assert repr(twice) == "Zero().only(units=[0], axis=1).only(units=[2], axis=-2)"
    assert isinstance(twice, Part)
    assert twice.at == "output"


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (dict(), ValueError, "takes units=, example= or both"),
        (dict(units=[]), TypeError, "units= takes indices"),
        (dict(units=[0.5]), TypeError, "units= takes indices"),
        (dict(example=[1]), TypeError, "example= takes one index"),
        (dict(units=[0], axis="head"), TypeError, "axis= must be an integer"),
    ],
)
def test_what_names_no_part_is_refused(given: Any, error: Any, words: str):
    with pytest.raises(error, match=words):
        nni.Zero().only(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(units=[0], axis=4), "it has no axis 4 of units"),
        (dict(units=[2], axis=-2), "it has 2 units along axis -2, so there is no unit 2"),
        (dict(example=4), "it has 4 examples along axis 0, so there is no example 4"),
        (dict(units=[True, False]), r"a mask of shape \(2,\) does not fit the 5 units"),
    ],
)
def test_what_does_not_fit_is_said(given: Any, words: str):
    why = nni.Zero().only(**given).why_not(jax.ShapeDtypeStruct(X.shape, jnp.float32))
    with pytest.raises(ValueError, match=words):
        raise why or AssertionError
