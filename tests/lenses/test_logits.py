"""`logit_attribution`: the oracle is the sum of plain matrix products, with the scale held."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from language_models import LAYERS, TOKENS, VOCABULARY, D, Language, gap_of, language

import nnx_inspector as nni

FORMS: dict[str, dict[str, bool]] = {"list": {}, "scan": {"scan": True}, "tied": {"tied": True}}
TOKEN = 3


def by_hand(model: Language) -> dict[str, np.ndarray]:
    """What each site adds to the logit of TOKEN, by NumPy."""
    place = np.broadcast_to(model.place(jnp.arange(TOKENS.shape[1])), (*TOKENS.shape, D))
    terms = {"token": np.asarray(model.token(TOKENS)), "place": place}
    x = terms["token"] + terms["place"]
    for number in range(LAYERS):
        block = model.block(number)
        causal = nnx.make_causal_mask(jnp.ones(TOKENS.shape))
        name, row = ("blocks", f"[{number}]") if model.scan else (f"blocks/{number}", "")
        added = np.asarray(block.attention(block.norm1(x), mask=causal))
        terms[f"{name}/attention{row}"], x = added, x + added
        added = np.asarray(block.mlp(block.norm2(x)))
        terms[f"{name}/mlp{row}"], x = added, x + added
    scale = np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    column = np.asarray(model.matrix())[:, TOKEN]
    weights = np.asarray(model.final_norm.scale[...]) * column
    found = {n: ((t - t.mean(-1, keepdims=True)) / scale) @ weights for n, t in terms.items()}
    biases = np.asarray(model.final_norm.bias[...]) @ column
    biases = biases + (0 if model.tied else np.asarray(model.head.bias[...])[TOKEN])
    return found | {"(biases)": np.broadcast_to(biases, TOKENS.shape)}


@pytest.mark.parametrize("form", FORMS)
def test_each_site_adds_what_the_matrices_say(form: str):
    model = language(**FORMS[form])
    found = nni.logit_attribution(model, TOKENS, token=TOKEN)
    rows = dict(zip(found.sites, found.contributions, strict=True))
    rest = rows.pop("(rest of the stream)")
    expected = by_hand(model)
    assert set(rows) == set(expected)
    for site, row in expected.items():
        np.testing.assert_allclose(rows[site], row, rtol=2e-4, atol=2e-5, err_msg=site)
    assert abs(rest).max() < 1e-5
    np.testing.assert_allclose(found.contributions.sum(0), found.logit, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.logit, model(TOKENS)[..., TOKEN], rtol=1e-5, atol=1e-5)
    assert gap_of(found) < 1e-4


def test_sites_that_are_left_out_are_in_the_rest():
    model = language()
    whole = nni.logit_attribution(model, TOKENS, token=TOKEN)
    few = nni.logit_attribution(model, TOKENS, token=TOKEN, sites="**/mlp")
    assert few.sites[:-2] == tuple(f"blocks/{i}/mlp" for i in range(LAYERS))
    others = [i for i, s in enumerate(whole.sites[:-2]) if not s.endswith("mlp")]
    expected = whole.contributions[others].sum(0)
    np.testing.assert_allclose(few.contributions[-2], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="None of the chosen sites adds"):
        nni.logit_attribution(model, TOKENS, sites="**/norm1")
    with pytest.raises(ValueError, match="matches no site"):
        nni.logit_attribution(model, TOKENS, sites="nothing")


def test_the_difference_of_two_logits():
    model = language()
    one, other = (nni.logit_attribution(model, TOKENS, token=t).contributions for t in (3, 5))
    found = nni.logit_attribution(model, TOKENS, token=3, minus=5)
    np.testing.assert_allclose(found.contributions, one - other, rtol=1e-3, atol=1e-5)


class Scaled(nnx.Module):
    """An embedding that is scaled, an addend that no module returns, and a norm of its own."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.token, self.up = nnx.Embed(VOCABULARY, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.norm, self.head = OwnRMS(), nnx.Linear(D, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.token(tokens) * 4.0
        x = x + nnx.relu(self.up(x))
        return self.head(self.norm(x))


class OwnRMS(nnx.Module):
    def __call__(self, x):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True))


def test_what_no_module_returns_is_the_rest():
    model = Scaled()
    found = nni.logit_attribution(model, TOKENS)
    assert found.sites == ("(rest of the stream)", "(biases)")
    np.testing.assert_allclose(found.contributions[0], found.logit, rtol=1e-5)
    np.testing.assert_allclose(found.contributions[1], 0, atol=1e-5)
    np.testing.assert_array_equal(found.token, model(TOKENS).argmax(-1))
    assert found.norm == "norm"


def test_an_operation_may_be_an_addend():
    model = Scaled()
    found = nni.logit_attribution(model, TOKENS, token=TOKEN, sites=["**", "@*"])
    rows = dict(zip(found.sites, found.contributions, strict=True))
    scaled = np.asarray(model.token(TOKENS)) * 4
    added = np.asarray(nnx.relu(model.up(scaled)))
    x = scaled + added
    weights = np.asarray(model.head.kernel[...])[:, TOKEN] / np.sqrt((x**2).mean(-1, keepdims=True))
    np.testing.assert_allclose(rows["@relu"], (added * weights).sum(-1), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(rows["@mul"], (scaled * weights).sum(-1), rtol=1e-3, atol=1e-5)
    assert abs(rows["(rest of the stream)"]).max() < 1e-4
    whole = nni.lens(model, TOKENS, sites=["@mul", "@add"])
    assert whole.sites == ("@mul input", "@mul", "@add")
    assert (whole.unembed, whole.norm) == ("head", "norm")
    assert gap_of(whole) < 1e-4


class Adds(nnx.Module):
    def __init__(self, rngs, sign=1):
        self.up, self.sign = nnx.Linear(D, D, rngs=rngs), sign

    def __call__(self, x):
        return x + self.up(x) if self.sign > 0 else x - self.up(x)


class Patches(nnx.Module):
    """Its stream begins with what no module returns, and one block takes something away."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.patch, self.head = nnx.Linear(2, D, rngs=rngs), nnx.Linear(D, 3, rngs=rngs)
        self.blocks = nnx.List([Adds(rngs), Adds(rngs, -1), Adds(rngs)])

    def __call__(self, x):
        x = jnp.concatenate([jnp.ones((len(x), 1, D)), self.patch(x)], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_block_that_adds_to_what_no_module_returns_is_walked_into():
    model, x = Patches(), jnp.arange(12.0).reshape(2, 3, 2)
    found = nni.logit_attribution(model, x, token=1)
    assert found.sites == ("blocks/0/up", "blocks/2/up", "(rest of the stream)", "(biases)")
    stream = jnp.concatenate([jnp.ones((2, 1, D)), model.patch(x)], 1)
    first = model.blocks[0].up(stream)
    stream = model.blocks[1](stream + first)
    column = model.head.kernel[:, 1]
    np.testing.assert_allclose(found.contributions[0], first @ column, rtol=1e-4, atol=1e-4)
    last = model.blocks[2].up(stream) @ column
    np.testing.assert_allclose(found.contributions[1], last, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.contributions.sum(0), model(x)[..., 1], rtol=1e-4)


def test_the_frame_adds_up_for_each_position():
    found = nni.logit_attribution(language(), TOKENS)
    frame: Any = found.to_frame(decode=str)
    sums = frame.groupby(["example", "position"])["contribution"].sum().to_numpy()
    np.testing.assert_allclose(sums.reshape(TOKENS.shape), found.logit, rtol=1e-4, atol=1e-5)
    assert frame["token"].map(type).eq(str).all()
