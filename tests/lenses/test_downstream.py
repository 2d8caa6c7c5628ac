"""Lenses where the unembedding or the norm is no module, or more happens to the logits: the oracle
is the model written by hand in NumPy, in float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from language_models import gap_of

import nnx_inspector as nni
from nnx_inspector.lenses.lens import Lens

CLASSES, D, LAYERS, CAP, TOKEN = 7, 6, 2, 0.8, 3
TOKENS = np.random.default_rng(0).integers(0, CLASSES, (2, 4))


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.mlp = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.mlp(jnp.tanh(x))


class Small(nnx.Module):
    """A residual stream that is read in the way that its options name."""

    def __init__(self, head: str = "product", norm: str = "rms", end: str = "", scan: bool = False):
        rngs = nnx.Rngs(0)
        self.how, self.end, self.token = (head, norm), end, nnx.Embed(CLASSES, D, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        if scan:
            states = [nnx.state(block) for block in self.blocks]
            stack = jax.tree.map(lambda *x: jnp.stack(x), *states)
            self.blocks = nnx.merge(nnx.graphdef(self.blocks[0]), stack)
        if norm in ("rms", "layer"):
            kind = nnx.RMSNorm if norm == "rms" else nnx.LayerNorm
            self.norm = kind(D, rngs=rngs)
            self.norm.scale[...] = jax.random.normal(rngs(), (D,))
        elif norm == "bare":
            self.norm = nnx.LayerNorm(D, use_scale=False, use_bias=False, rngs=rngs)
        if head == "linear":
            self.head = nnx.Linear(D, CLASSES, rngs=rngs)
            self.head.bias[...] = jax.random.normal(rngs(), (CLASSES,))
        elif head == "bias-free":
            self.head = nnx.Linear(D, CLASSES, use_bias=False, rngs=rngs)
        elif head == "einsum":
            self.head = nnx.Einsum("btd,dv->btv", (D, CLASSES), (CLASSES,), rngs=rngs)
            self.head.bias[...] = jax.random.normal(rngs(), (CLASSES,))
        elif head == "linen":
            self.head = nnx.bridge.ToNNX(linen.Embed(CLASSES, D), rngs=rngs)
            nnx.bridge.lazy_init(self.head, jnp.zeros((1, 1), int))

    def __call__(self, tokens: Any) -> Any:
        x = self.token(tokens)
        if isinstance(self.blocks, Block):
            run = nnx.scan(lambda x, b: b(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = run(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        head, norm = self.how
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) if norm == "own" else self.norm(x)
        if head == "product":
            x = jnp.einsum("btd,vd->btv", x, self.token.embedding[...])
        elif head == "attend":
            x = self.token.attend(x)
        else:
            x = self.head(x, method="attend") if head == "linen" else self.head(x)
        if self.end == "cap":
            x = CAP * jnp.tanh(x / CAP)
        if self.end == "pool":
            x = x.mean(1)
        return nnx.softmax(x) if self.end == "softmax" else x


def f64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def assert_probabilities(found: Lens, expected: Iterable[Any], atol: float = 1e-6) -> None:
    """Those of each layer's tokens are those expected of all tokens."""
    for tokens, shown, wanted in zip(found.tokens, found.probabilities, expected, strict=True):
        in_order = np.take_along_axis(np.asarray(wanted), tokens, -1)
        np.testing.assert_allclose(shown, in_order, atol=atol)


def by_hand(model: Small, plain: Small) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """The log probabilities of each layer, the last logits, and what each site adds to that of
    TOKEN: where there is a cap, before it.
    """
    x = f64(plain.token.embedding[...])[TOKENS]
    streams, terms = [x], {"token": x}
    for number, block in enumerate(plain.blocks):
        added = np.tanh(x) @ f64(block.mlp.kernel[...]) + f64(block.mlp.bias[...])
        terms[f"{number}"], x = added, x + added
        streams.append(x)
    head, norm = model.how
    if head in ("product", "attend"):
        matrix, bias = f64(model.token.embedding[...]).T, np.zeros(CLASSES)
    elif head == "linen":
        matrix, bias = f64(model.head.embedding[...]).T, np.zeros(CLASSES)
    else:
        matrix = f64(model.head.kernel[...])
        bias = np.zeros(CLASSES) if head == "bias-free" else f64(model.head.bias[...])
    centred = norm in ("layer", "bare")
    scale = f64(model.norm.scale[...]) if norm in ("rms", "layer") else np.ones(D)

    def normal(x: np.ndarray, of: np.ndarray) -> np.ndarray:
        x, of = (y - y.mean(-1, keepdims=True) if centred else y for y in (x, of))
        return x / np.sqrt((of**2).mean(-1, keepdims=True) + 1e-6) * scale

    def ended(logits: np.ndarray) -> np.ndarray:
        logits = CAP * np.tanh(logits / CAP) if model.end == "cap" else logits
        return logits.mean(1) if model.end == "pool" else logits

    layers = np.stack([ended(normal(s, s) @ matrix + bias) for s in streams])
    top = layers - layers.max(-1, keepdims=True)
    chances = top - np.log(np.exp(top).sum(-1, keepdims=True))
    parts = {name: (normal(term, x) @ matrix)[..., TOKEN] for name, term in terms.items()}
    if model.end == "pool":
        parts = {name: part.mean(1) for name, part in parts.items()}
    return chances, layers[-1], parts | {"(biases)": np.full_like(parts["token"], bias[TOKEN])}


CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "modules": [
        ("head after norm", {"head": "linear", "norm": "layer"}),
        ("head after norm", {"head": "bias-free", "norm": "bare"}),
        ("head after norm", {"head": "einsum"}),
        ("token:attend after norm", {"head": "attend"}),
        ("head after norm", {"head": "linear", "end": "softmax"}),
    ],
    "no modules": [
        ("(all after blocks/1)", {}),
        ("(all after blocks/1)", {"head": "linen", "norm": "layer"}),
        ("(all after blocks/1)", {"head": "linear", "norm": "own"}),
        ("(all after blocks)", {"norm": "own", "scan": True}),
    ],
    "more": [
        ("(all after blocks/1)", {"head": "attend", "end": "cap"}),
        ("(all after blocks)", {"end": "cap", "scan": True}),
        ("(all after blocks/1)", {"head": "linear", "end": "pool"}),
        ("(all after blocks/1)", {"end": "softmax"}),
    ],
}


@pytest.mark.parametrize("group", CASES)
def test_the_last_layer_says_what_the_model_says(group: str):
    for how, options in CASES[group]:
        model = Small(**options)
        chances, _, _ = by_hand(model, Small(**{**options, "scan": False}))
        found = nni.lens(model, TOKENS, answer=TOKEN, k=CLASSES)
        text = str(options)
        assert " after ".join(filter(None, (found.unembed, found.norm))) == how, text
        in_order = np.take_along_axis(chances, found.tokens, -1)
        np.testing.assert_allclose(np.log(found.probabilities), in_order, atol=2e-4, err_msg=text)
        assert (np.diff(in_order) < 1e-5).all(), text
        assert gap_of(found) < 1e-5, text


@pytest.mark.parametrize("group", CASES)
def test_the_parts_of_a_logit_are_those_of_the_matrices(group: str):
    for _, options in CASES[group]:
        model = Small(**options)
        _, last, parts = by_hand(model, Small(**{**options, "scan": False}))
        found = nni.logit_attribution(model, TOKENS, token=TOKEN)
        rows = dict(zip(found.sites, found.contributions, strict=True))
        text = str(options)
        np.testing.assert_allclose(sum(rows.values()), found.logit, atol=1e-5, err_msg=text)
        np.testing.assert_allclose(found.logit, last[..., TOKEN], atol=1e-5, err_msg=text)
        np.testing.assert_allclose(rows["(biases)"], parts["(biases)"], atol=1e-5, err_msg=text)
        beyond = last[..., TOKEN] - sum(parts.values())
        if model.end == "cap":
            np.testing.assert_allclose(rows["(not additive)"], beyond, atol=1e-5, err_msg=text)
            assert abs(beyond).max() > 0.1
        else:
            assert "(not additive)" not in rows, text
        if options.get("norm") == "own" and options.get("scan"):
            continue  # no module receives the sum: it is the rest
        assert abs(rows["(rest of the stream)"]).max() < 1e-5, text
        names = [n.replace("blocks/mlp[", "").strip("]") for n in rows if n != "(biases)"]
        names = [n.removeprefix("blocks/").removesuffix("/mlp") for n in names]
        for name, row in zip(names, rows.values(), strict=False):
            if name in parts:
                np.testing.assert_allclose(row, parts[name], atol=1e-5, err_msg=f"{text} {name}")
        assert {"token", *map(str, range(LAYERS))} <= set(names), text


class Recurrent(nnx.Module):
    """Its one scan is over time."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.rnn = nnx.RNN(nnx.GRUCell(D, D, rngs=rngs))
        self.head = nnx.Linear(D, CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.rnn(x))


class Deep(nnx.Module):
    """A head of two layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.up, self.head = nnx.Linear(D, 9, rngs=rngs), nnx.Linear(9, CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(nnx.relu(self.up(x)))


def test_models_without_layers_or_logits_are_told_what_they_lack():
    x = jnp.linspace(-1, 1, 2 * 4 * D).reshape(2, 4, D)
    with pytest.raises(
        ValueError, match=r"'rnn/cell' runs in a scan of 4: time steps are not layers"
    ):
        nni.lens(Recurrent(), x)
    assert nni.lens(Deep(), x).gap == 0
    with pytest.raises(ValueError, match=r"'\(all after blocks/1\)' does .* is not linear"):
        nni.logit_attribution(Deep(), x)
    for classes, returned in ((lambda y: y.sum(), r"float32\[\]"), (lambda y: y[..., :1], "2,4,1")):
        with pytest.raises(ValueError, match=f"returns no logits.*it returns .*{returned}"):
            nni.lens(lambda model, x, of=classes: of(model(x)), Deep(), x)
    coder = nnx.Sequential(nnx.Linear(D, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, D, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"float32\[2,4,6\], has the shape of its input.*unembed="):
        nni.lens(coder, x)
    with pytest.raises(ValueError, match=r"No block that repeats.*with sites=, among 'layers/0'"):
        nni.lens(coder, jax.nn.one_hot(TOKENS, D))


class Adding(nnx.Module):
    """The code around the blocks adds what they return to the stream."""

    def __init__(self, how: str):
        rngs, self.how = nnx.Rngs(0), how
        self.token = nnx.Embed(CLASSES, D, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(D, rngs=rngs) for _ in range(2 * LAYERS)])
        self.parts = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(2 * LAYERS)])
        self.drop = nnx.Dropout(0.5, deterministic=True)
        states = [nnx.state(part) for part in self.parts]
        self.stack = nnx.merge(
            nnx.graphdef(self.parts[0]), jax.tree.map(lambda *x: jnp.stack(x), *states)
        )
        self.norm, self.head = nnx.RMSNorm(D, rngs=rngs), nnx.Linear(D, CLASSES, rngs=rngs)

    def streams(self, tokens: Any) -> list[Any]:
        streams = [self.token(tokens)]
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = streams[-1]
            added = part(x) if self.how == "scan" else 0.5 * self.drop(part(norm(x)))
            streams.append(x + added)
        return streams

    def __call__(self, tokens: Any) -> Any:
        x = self.token(tokens)
        if self.how == "scan":
            add = lambda x, part: x + part(x)  # noqa: E731
            x = nnx.scan(add, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)
        else:
            for norm, part in zip(self.norms, self.parts, strict=True):
                x = x + 0.5 * self.drop(part(norm(x)))
        return self.head(self.norm(x)) if self.how != "by hand" else x @ self.token.embedding[...].T


@pytest.mark.parametrize(
    ("how", "first"), [("normed", "norms/0 input"), ("scan", "stack[0] input")]
)
def test_the_stream_is_followed_where_no_block_returns_it(how: str, first: str):
    model = Adding(how)
    found = nni.lens(model, TOKENS, k=CLASSES)
    assert (found.sites[0], found.sites[-1]) == (first, "norm input")
    assert (found.unembed, found.norm) == ("head", "norm")
    streams = model.streams(TOKENS)
    assert_probabilities(found, (jax.nn.softmax(model.head(model.norm(x))) for x in streams))
    shares = nni.logit_attribution(model, TOKENS, token=TOKEN)
    np.testing.assert_allclose(shares.contributions.sum(0), shares.logit, atol=1e-5)


class Compact(linen.Module):
    """Layers that have no module of their own, with a norm before each part or after each sum."""

    after: bool

    @linen.compact
    def __call__(self, tokens: Any) -> Any:
        x, norm = linen.Embed(CLASSES, D)(tokens), lambda: linen.LayerNorm()
        for _ in range(LAYERS):
            if self.after:
                x = norm()(x + linen.Dense(D)(jnp.tanh(linen.Dense(2 * D)(x))))
            else:
                x = x + linen.Dense(D)(jnp.tanh(linen.Dense(2 * D)(norm()(x))))
        return linen.Dense(CLASSES)(x if self.after else norm()(x))


@pytest.mark.parametrize("after", [False, True])
def test_the_norms_of_layers_without_modules_receive_the_stream_or_end_a_layer(after: bool):
    model = nnx.bridge.ToNNX(Compact(after), rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(model, TOKENS)
    for number in range(LAYERS + (not after)):
        norm = getattr(model, f"LayerNorm_{number}")
        norm["scale"][...] = 1 + jnp.arange(D) / (2 + number)

    def dense(number: int, x: np.ndarray) -> np.ndarray:
        part = getattr(model, f"Dense_{number}")
        return x @ f64(part["kernel"][...]) + f64(part["bias"][...])

    def normal(number: int, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        scale = f64(getattr(model, f"LayerNorm_{number}")["scale"][...])
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    x = f64(model.Embed_0["embedding"][...])[TOKENS]
    streams = [x]
    for layer in range(LAYERS):
        added = dense(2 * layer, np.tanh(dense(2 * layer + 1, x if after else normal(layer, x))))
        x = normal(layer, x + added) if after else x + added
        streams.append(x)
    found = nni.lens(model, TOKENS, k=CLASSES)
    names = [f"LayerNorm_{i}" + " input" * (not after) for i in range(LAYERS + (not after))]
    assert list(found.sites) == names
    logits = [dense(2 * LAYERS, x if after else normal(LAYERS, x)) for x in streams[after:]]
    expected = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in logits)
    assert_probabilities(found, expected, atol=1e-5)


class Flat(nnx.Module):
    """Parts without a block around them, whose inner size is another, and perhaps a last norm."""

    def __init__(self, normed: bool):
        rngs = nnx.Rngs(0)
        self.token, self.head = (
            nnx.Embed(CLASSES, D, rngs=rngs),
            nnx.Linear(D, CLASSES, rngs=rngs),
        )
        self.norms = nnx.List([nnx.RMSNorm(D, rngs=rngs) for _ in range(LAYERS)])
        self.ups = nnx.List([nnx.Linear(D, 9, rngs=rngs) for _ in range(LAYERS)])
        self.downs = nnx.List([nnx.Linear(9, D, rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(D, rngs=rngs) if normed else None

    def streams(self, tokens: Any) -> list[Any]:
        found = [self.token(tokens)]
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            found.append(found[-1] + down(nnx.silu(up(norm(found[-1])))))
        return found

    def read(self, x: Any) -> Any:
        return self.head(x if self.norm is None else self.norm(x))

    def __call__(self, tokens: Any) -> Any:
        return self.read(self.streams(tokens)[-1])


@pytest.mark.parametrize(("normed", "last"), [(True, "norm input"), (False, "head input")])
def test_the_norms_before_parts_of_another_size_receive_the_stream(normed: bool, last: str):
    model = Flat(normed)
    found = nni.lens(model, TOKENS, k=CLASSES)
    assert found.sites == ("norms/0 input", "norms/1 input", last)
    assert_probabilities(found, (jax.nn.softmax(model.read(x)) for x in model.streams(TOKENS)))


def test_sums_that_no_module_receives_are_chosen_as_operations():
    model = Adding("by hand")
    with pytest.raises(ValueError, match=r"'parts/3' returns what is added.*sites= the sums.*@add"):
        nni.lens(model, TOKENS)
    added = [f"@add[{i}]" if i else "@add" for i in range(2 * LAYERS)]
    found = nni.lens(model, TOKENS, sites=added)
    assert found.sites == ("@add input", *added)
    assert gap_of(found) < 1e-5


class Picture(nnx.Module):
    """Convolutions, of which the last makes another picture."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(1, D, (1, 1), rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.last = nnx.Conv(D, 3, (3, 3), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_a_convolution_over_positions_is_not_proposed_to_unembed():
    x = jnp.linspace(-1, 1, 2 * 5 * 5).reshape(2, 5, 5, 1)
    for study in (nni.lens, nni.logit_attribution):
        with pytest.raises(
            ValueError, match=r"'last', a Conv over several positions.*no logits ov"
        ):
            study(Picture(), x)
    assert nni.lens(Picture(), x, unembed="last", norm=False).unembed == "last"
    pooled = nni.lens(lambda model, x: model(x).mean((1, 2)), Picture(), x)
    assert (pooled.unembed, pooled.answer.shape) == ("(all after blocks/1)", (2,))


def test_what_the_user_chose_is_kept_and_its_gap_told():
    model = Small("attend", end="cap")
    found = nni.lens(model, TOKENS, unembed="token:attend", norm="norm")
    assert (found.unembed, found.norm) == ("token:attend", "norm")
    assert gap_of(found) > 0.1
