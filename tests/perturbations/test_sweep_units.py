"""`sweep(units=...)` against `perturbed` with a mask, unit by unit and head by head."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from language_models import LAYERS, TOKENS, D, Language

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
    with pytest.raises(ValueError, match=r"'token' has no axis 5 of units: it has float32\["):
        swept(Language(), sites="token", units=5)


class Routed(nnx.Module):
    """A mixture of experts in small: a value, and what is known about its routing."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.inner(x), {"load": x[0, :3], "loss": x.sum()}


def test_a_site_of_several_arrays_names_them_and_one_within_it_is_swept():
    model, x = nnx.List([Routed(nnx.Rngs(0))]), jnp.arange(8.0).reshape(2, 4)
    net = nnx.Sequential(*model, lambda y, info: y)
    loss = lambda m, x: (m(x) ** 2).mean()  # noqa: E731
    said = (
        r"'layers/0' has float32\[2,4\], float32\[3\], float32\[\], which have no units in common"
    )
    with pytest.raises(ValueError, match=said):
        nni.sweep(net, loss, x, sites="layers/0", units=-1, progress=False)
    frame: Any = nni.sweep(net, loss, x, sites=["layers/0", "layers/0/*"], units=-1, progress=False)
    assert frame["site"][frame["why_not"].isna()].tolist() == ["layers/0/inner"] * 4
    whole: Any = nni.sweep(net, loss, x, sites="layers/0", perturbation=nni.Zero(), progress=False)
    assert whole["loss"].tolist() == [0]


# ---------------------------------------------------------------------- chains


class Through(nnx.Module):
    def __init__(self, skip: bool, rngs: nnx.Rngs):
        self.a, self.b, self.c = (nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(3))
        self.skip = skip

    def __call__(self, x: Any) -> Any:
        y = nnx.jit(lambda b, x: b(x))(self.b, nnx.tanh(self.a(x)))
        return self.c(y + x if self.skip else y)


@pytest.mark.parametrize("jitted", [False, True])
def test_in_a_chain_the_default_tells_sites_apart(jitted: bool):
    model, x = Through(False, nnx.Rngs(0)), jnp.arange(12.0).reshape(3, 4) / 6 - 1
    loss = lambda m, x: ((m(x) - 1) ** 2).mean()  # noqa: E731
    loss_fn = nnx.jit(loss) if jitted else loss
    zeros = nni.sweep(model, loss_fn, x, sites="?", perturbation=nni.Zero(), progress=False)
    assert zeros["loss"].nunique() == 1
    means = nni.sweep(model, loss_fn, x, sites="?", progress=False)
    assert means.attrs["perturbation"] == "Mean"
    assert means["loss"].round(6).nunique() == 2  # b and c are linear: the same mean
    for _, row in means.iterrows():
        by_hand = nni.perturbed(loss)({row["site"]: nni.Mean()}, model, x)
        np.testing.assert_allclose(row["loss"], by_hand, rtol=1e-5)


def test_where_something_passes_by_or_nothing_can_be_averaged_it_is_zeros():
    loss_fn = lambda m, x: ((m(x) - 1) ** 2).mean()  # noqa: E731
    x = jnp.arange(12.0).reshape(3, 4) / 6 - 1
    model = Through(True, nnx.Rngs(0))
    assert nni.sweep(model, loss_fn, x, sites="?", progress=False).attrs["perturbation"] == "Zero"
    model = Through(False, nnx.Rngs(0))
    for more in (dict(sites="a"), dict(sites="?", units=-1)):
        frame = nni.sweep(model, loss_fn, x, progress=False, **more)
        assert frame.attrs["perturbation"] == "Zero"
    one: Any = nni.sweep(model, loss_fn, x[:1], sites="?", progress=False)
    assert one.attrs["perturbation"] == "Zero"
