"""`lens`: oracles are the model's own modules, applied by hand, and plain matrix products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import linen, nnx
from language_models import LAYERS, TOKENS, VOCABULARY, D, Language, gap_of, language

import nnx_inspector as nni

FORMS: dict[str, dict[str, bool]] = {"list": {}, "scan": {"scan": True}, "tied": {"tied": True}}


@nnx.jit
def streams_by_hand(model: Language) -> list[jax.Array]:
    x = model.token(TOKENS) + model.place(jnp.arange(TOKENS.shape[1]))
    found = [x]
    for number in range(LAYERS):
        found.append(x := model.block(number)(x))
    return found


def logits_by_hand(model: Language, x: jax.Array) -> np.ndarray:
    centred = np.asarray(x, np.float64) - np.mean(np.asarray(x, np.float64), -1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    normal = normal * np.asarray(model.final_norm.scale[...]) + np.asarray(
        model.final_norm.bias[...]
    )
    bias = 0 if model.tied else np.asarray(model.head.bias[...])
    return normal @ np.asarray(model.matrix()) + bias


@pytest.mark.parametrize("form", FORMS)
def test_each_layer_says_what_the_matrices_say(form: str):
    model = language(**FORMS[form])
    found = nni.lens(model, TOKENS, answer=4, k=3)
    assert (found.unembed, found.norm) == ("token:attend" if model.tied else "head", "final_norm")
    first = "blocks" if model.scan else "blocks/0"
    rows = [f"blocks[{i}]" if model.scan else f"blocks/{i}" for i in range(LAYERS)]
    assert found.sites == (f"{first} input", *rows)
    for layer, x in enumerate(streams_by_hand(model)):
        logits = logits_by_hand(model, x)
        probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        order = np.argsort(-logits, axis=-1, kind="stable")
        np.testing.assert_array_equal(found.tokens[layer], order[..., :3])
        top = np.take_along_axis(probability, order[..., :3], -1)
        np.testing.assert_allclose(found.probabilities[layer], top, rtol=1e-4)
        np.testing.assert_allclose(
            found.answer_probability[layer], probability[..., 4], rtol=1e-4, atol=1e-7
        )
        np.testing.assert_array_equal(found.answer_rank[layer], 1 + np.argmax(order == 4, -1))
    assert gap_of(found) < 1e-4


def test_the_answer_is_what_the_model_says_at_last():
    model = language()
    found = nni.lens(model, TOKENS)
    np.testing.assert_array_equal(found.answer, model(TOKENS).argmax(-1))
    assert (found.answer_rank[-1] == 1).all()


def test_positions_that_the_head_does_not_see_are_read_too():
    found = nni.lens(language(last="position"), TOKENS, answer=TOKENS[:, 0])
    assert found.tokens.shape == (LAYERS + 1, *TOKENS.shape, 5)
    assert gap_of(found) < 1e-4
    np.testing.assert_array_equal(found.answer[:, 3], TOKENS[:, 0])


def test_the_frame_has_a_row_for_each_layer_and_position():
    frame: Any = nni.lens(language(), TOKENS).to_frame(decode=lambda token: f"<{token}>")
    assert len(frame) == (LAYERS + 1) * TOKENS.size
    assert list(frame.columns[:4]) == ["layer", "site", "example", "position"]
    assert frame["token"].iloc[-1] == frame["answer"].iloc[-1]
    assert frame["token"].str.fullmatch(r"<\d+>").all()
    texts = [f"<{token}>" for token in range(VOCABULARY)]
    pd.testing.assert_frame_equal(nni.lens(language(), TOKENS).to_frame(decode=texts), frame)


def test_the_model_does_not_change():
    model = language()
    before = jax.tree.leaves(nnx.state(model))
    nni.lens(model, TOKENS)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


def test_functions_serve_where_no_module_unembeds():
    model = language(last="product")
    table = model.token.embedding[...]
    found = nni.lens(model, TOKENS, unembed=lambda x: x @ table.T, norm="final_norm")
    assert (found.unembed, found.norm) == ("(function)", "final_norm")
    with pytest.raises(ValueError, match="it comes from 'final_norm', a LayerNorm"):
        nni.lens(model, TOKENS, norm="final_norm")
    assert gap_of(found) < 1e-4


class ByLinen(nnx.Module):
    """With an unembedding in Linen."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner = language(last="norm")
        self.head = nnx.bridge.ToNNX(linen.Dense(VOCABULARY), rngs=rngs)
        nnx.bridge.lazy_init(self.head, jnp.zeros((1, D)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.inner(tokens))


def test_an_unembedding_in_linen_is_called_as_a_whole_or_refused():
    found = nni.lens(ByLinen(), TOKENS)
    assert (found.unembed, found.norm) == ("head", "inner/final_norm")
    assert gap_of(found) < 1e-4
    whole = nnx.bridge.ToNNX(linen.Dense(VOCABULARY), rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(whole, jnp.zeros((1, D)))
    with pytest.raises(ValueError, match="No block that repeats"):
        nni.lens(whole, jnp.ones((2, D)))


def test_what_cannot_be_read_is_named():
    model = language()
    with pytest.raises(ValueError, match=r"returns no logits.*returns int32"):
        nni.lens(lambda model, tokens: model(tokens).argmax(-1), model, TOKENS)
    named = nni.lens(lambda m, x: m(x).argmax(-1), model, TOKENS, unembed="head", norm="final_norm")
    assert named.gap is None
    assert (named.answer == nni.lens(model, TOKENS).answer).all()
    with pytest.raises(
        ValueError, match=r"'haed' is not a site of this call. The closest are 'head'"
    ):
        nni.lens(model, TOKENS, unembed="haed")
    with pytest.raises(ValueError, match="calls no module of the model"):
        nni.lens(lambda m, x: jax.nn.one_hot(x, VOCABULARY), model, TOKENS)
    with pytest.raises(ValueError, match="No module's matrix makes"):
        nni.lens(language(last="norm"), TOKENS)
    with pytest.raises(ValueError, match="out of range: there are 11, from 0 to 10"):
        nni.lens(model, TOKENS, answer=11)
    with pytest.raises(TypeError, match="A token is an integer"):
        nni.lens(model, TOKENS, answer=0.5)
    with pytest.raises(TypeError, match="A token is an integer"):
        nni.lens(model, TOKENS, answer="the")
    with pytest.raises(ValueError, match="do not fit the positions"):
        nni.lens(model, TOKENS, answer=np.zeros(3, int))
    with pytest.raises(ValueError, match="k must be a number"):
        nni.lens(model, TOKENS, k=0)
    with pytest.raises(ValueError, match=r"'head' returns .* not the residual stream"):
        nni.lens(model, TOKENS, sites="head")
    with pytest.raises(ValueError, match="matches no site"):
        nni.lens(model, TOKENS, sites="blok/*")
    with pytest.raises(nni.InspectorError, match="outside jit"):
        jax.jit(lambda tokens: nni.lens(model, tokens).answer)(TOKENS)
    two = nnx.Sequential(nnx.Linear(D, D, rngs=nnx.Rngs(0)), nnx.Linear(D, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"No block that repeats.*'layers/0'"):
        nni.lens(two, jnp.ones((2, D)))


class After(nnx.Module):
    """A block that normalises what it returns."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(D, D, rngs=rngs)
        self.inner, self.norm = nnx.LayerNorm(D, rngs=rngs), nnx.LayerNorm(D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x + nnx.tanh(self.up(self.inner(x))))


class Stack(nnx.Module):
    """A stack with its own norm, which may be in a module of its own."""

    def __init__(self, rngs: nnx.Rngs, wrapped: bool):
        make = nnx.vmap(After, in_axes=(0,), out_axes=0)
        self.blocks = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        norm = nnx.RMSNorm(D, rngs=rngs)
        self.norm = nnx.Sequential(norm, nnx.Dropout(0.0)) if wrapped else norm

    def __call__(self, x: jax.Array) -> jax.Array:
        one = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.norm(one(x, self.blocks))


class Forms(nnx.Module):
    def __init__(self, form: str):
        rngs = nnx.Rngs(0)
        half = jnp.bfloat16 if form == "half" else None
        self.token = nnx.Embed(VOCABULARY, D, rngs=rngs, dtype=half)
        if form in ("own", "wrapped"):
            self.body: Any = Stack(rngs, form == "wrapped")
        else:
            self.body = nnx.Sequential(*[After(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(D, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.body(self.token(tokens)))


@pytest.mark.parametrize(
    ("form", "norm", "first"),
    [
        ("after", "", "body/layers/0 input"),  # the norms of the blocks are no final norm
        ("half", "", "body/layers/0 input"),  # an embedding of another dtype is a stream too
        ("own", "body/norm", "body/blocks input"),
        ("wrapped", "body/norm/layers/0", "body/blocks input"),
    ],
)
def test_the_blocks_are_the_layers_wherever_the_norms_are(form: str, norm: str, first: str):
    model = Forms(form)
    found = nni.lens(model, TOKENS, k=1)
    assert (found.unembed, found.norm, found.sites[0]) == ("head", norm, first)
    assert len(found.sites) == LAYERS + 1
    normal = model.body.norm if norm else lambda x: x
    for row, x in ((0, model.token(jnp.asarray(TOKENS))), (-1, None)):
        logits = model(jnp.asarray(TOKENS)) if x is None else model.head(normal(x))
        expected = np.asarray(jax.nn.softmax(logits)).max(-1)
        np.testing.assert_allclose(found.probabilities[row, ..., 0], expected, rtol=1e-4)


def test_an_ensemble_is_told_to_be_one():
    make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: Forms("after"), in_axes=(0,), out_axes=0))
    run = nnx.vmap(lambda model, tokens: model(tokens), in_axes=(0, None), out_axes=0)
    with pytest.raises(ValueError, match="belongs to an ensemble of 2 models"):
        nni.lens(lambda models, tokens: run(models, tokens).mean(0), make(nnx.Rngs(0)), TOKENS)


def test_chosen_sites_are_the_layers():
    found = nni.lens(language(), TOKENS, sites=["token", "blocks/1", "blocks/2"])
    assert found.sites == ("token", "blocks/1", "blocks/2")


def mapped(model: Language, tokens: Any) -> Any:
    return nnx.vmap(lambda model, one: model(one[None])[0], in_axes=(None, 0))(model, tokens)


def test_what_a_function_does_around_the_model_is_seen_through():
    whole = nni.lens(language(), TOKENS)
    found = nni.lens(mapped, language(), TOKENS)
    np.testing.assert_array_equal(found.tokens[:, :, 0], whole.tokens)
    assert gap_of(found) < 1e-4
    more = nni.lens(lambda model, tokens: (model(tokens), {"n": 1}), language(), TOKENS)
    np.testing.assert_array_equal(more.tokens, whole.tokens)
    np.testing.assert_allclose(
        nni.attribute(mapped, language(), TOKENS).scores[:, 0],
        nni.attribute(language(), TOKENS).scores,
        rtol=1e-4,
        atol=1e-6,
    )

    def reads(model: Language, tokens: Any) -> Any:
        return model(tokens) if float(tokens.sum()) > 0 else tokens

    with pytest.raises(nni.InspectorError, match=r"lens cannot trace this call: .*float"):
        nni.lens(reads, language(), jnp.asarray(TOKENS))
