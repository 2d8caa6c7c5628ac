"""`sweep(units=...)` against `perturbed` with a mask, unit by unit and head by head."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from language import LAYERS, TOKENS, D, Language

import nnx_inspector as nni


def loss_fn(model: Any, tokens: Any) -> Any:
    return (model(tokens) ** 2).mean()


def swept(model: Any, *args: Any, **kwargs: Any) -> Any:
    return nni.sweep(model, loss_fn, *(args or (TOKENS,)), progress=False, **kwargs)


@pytest.mark.parametrize("scan", [False, True])
def test_a_head_alone_is_as_a_mask_of_it(scan: bool):
    model = Language(scan=scan)
    head = nni.Zero(at="input")
    frame = swept(model, sites="**/attention/out", units=-2, perturbation=head)
    assert list(frame.columns[:2]) == ["site", "unit"]
    assert len(frame) == LAYERS * 2
    for _, row in frame.head(3).iterrows():
        mask = nni.Mask(np.arange(2) != row["unit"], axis=-2, at="input")
        by_hand = nni.perturbed(loss_fn)({row["site"]: mask}, model, TOKENS)
        np.testing.assert_allclose(row["loss"], by_hand, rtol=1e-5)
    assert frame["loss_change"].abs().is_monotonic_decreasing


def test_other_kinds_act_on_one_unit():
    model = Language()
    for kind in (nni.Noise(1.0, seed=3), nni.Mean(axis=(0, 1))):
        frame = swept(model, sites="blocks/1/mlp", units=-1, perturbation=kind)
        assert sorted(frame["unit"]) == list(range(D))
        _, record = nni.capture(model, only="blocks/1/mlp", values=True)(TOKENS)
        clean = record["blocks/1/mlp"].values
        changed = kind.apply_at(clean, "blocks/1/mlp/0/0")
        for _, row in frame.head(3).iterrows():
            where = jnp.arange(D) == row["unit"]
            patch = nni.Patch(jnp.where(where, changed, clean))
            by_hand = nni.perturbed(loss_fn)({"blocks/1/mlp": patch}, model, TOKENS)
            np.testing.assert_allclose(row["loss"], by_hand, rtol=1e-5)


def test_an_example_alone_and_vmapped_examples():
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.relu)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    alone = swept(model, x, sites="layers/0", units=0)
    assert sorted(alone["unit"]) == list(range(5))

    def mapped(model: Any, x: Any) -> Any:
        return (nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, x) ** 2).mean()

    frame: Any = nni.sweep(model, mapped, x, sites="layers/0", units=0, progress=False)
    expected = swept(model, x, sites="layers/0", units=1)
    frame, expected = (f.set_index("unit")["loss"].sort_index() for f in (frame, expected))
    np.testing.assert_allclose(frame, expected, rtol=1e-5)


def test_a_site_without_the_axis_is_listed_or_refused():
    frame = swept(Language(), sites=["place", "token"], units=2)
    refused = frame[frame["why_not"].notna()]
    assert refused["site"].tolist() == ["place"]
    assert "no axis 2" in refused["why_not"].iloc[0]
    with pytest.raises(ValueError, match="has no axis 5"):
        swept(Language(), sites="token", units=5)
