"""Attentions of unusual forms, whose pattern is the one that multiplies the values, and softmaxes
that are not attention. The oracles are computed by NumPy in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni

B, Q, K, H, D = 2, 5, 6, 4, 3
ARRAYS = [jax.random.normal(jax.random.key(i), (B, n, H, D)) for i, n in enumerate((Q, K, K))]


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    scores = np.exp(scores - scores.max(axis, keepdims=True))
    return scores / scores.sum(axis, keepdims=True)


def products(q: Any, k: Any) -> np.ndarray:
    return np.einsum("bqhd,bkhd->bhqk", np.asarray(q, np.float64), np.asarray(k, np.float64))


class Form(nnx.Module):
    def __init__(self, f: Callable[..., Any]):
        rngs = nnx.Rngs(0)
        self.f = nnx.static(f)
        self.pre = nnx.Param(jax.random.normal(rngs.params(), (H, H)))
        self.post = nnx.Param(jax.random.normal(rngs.params(), (H, H)))
        self.mix = nnx.Linear(H, H, rngs=rngs)
        self.router = nnx.Param(jax.random.normal(rngs.params(), (2, D, 5)))
        self.head = nnx.Linear(D, 5, rngs=rngs)

    def __call__(self, *args: Any) -> Any:
        return self.f(self, *args)


def talking(m: Form, q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    pattern = jax.nn.softmax(jnp.einsum("bhqk,hg->bgqk", scores, m.pre[...]))
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.einsum("bgqk,gh->bhqk", pattern, m.post[...]), v)


def talking_in_numpy(m: Form, q: Any, k: Any) -> np.ndarray:
    pattern = softmax(np.einsum("bhqk,hg->bgqk", products(q, k), m.pre[...]))
    return np.einsum("bgqk,gh->bhqk", pattern, m.post[...])


def by_a_layer(m: Form, q: Any, k: Any, v: Any) -> Any:
    scores = m.mix(jnp.einsum("bqhd,bkhd->bqkh", q, k)).transpose(0, 3, 1, 2)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def by_a_layer_in_numpy(m: Form, q: Any, k: Any) -> np.ndarray:
    mixed = np.einsum("bhqk,hg->bgqk", products(q, k), m.mix.kernel[...])
    return softmax(mixed)  # a bias for each head changes nothing


def one_key_head(m: Form, q: Any, k: Any, v: Any) -> Any:
    pattern = jax.nn.softmax(jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]))
    mixed = jnp.einsum("bgqk,gh->bhqk", pattern, m.post[...])
    return jnp.einsum("bhqk,bkd->bqhd", mixed, v[:, :, 0])


def one_key_head_in_numpy(m: Form, q: Any, k: Any) -> np.ndarray:
    pattern = softmax(products(q, np.repeat(k[:, :, :1], H, 2)))
    return np.einsum("bgqk,gh->bhqk", pattern, m.post[...])


def difference(m: Form, q: Any, k: Any, v: Any) -> Any:
    pattern = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    pattern = pattern.reshape(B, H // 2, 2, *pattern.shape[2:])
    pattern = pattern[:, :, 0] - 0.3 * pattern[:, :, 1]
    return jnp.einsum("bhqk,bkhd->bqhd", pattern, v[:, :, ::2])


def of_two(m: Form, q: Any, k: Any, v: Any) -> Any:
    attend = lambda q, k: jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))  # noqa: E731
    pattern = attend(q[:, :, ::2], k[:, :, ::2]) - 0.3 * attend(q[:, :, 1::2], k[:, :, 1::2])
    return jnp.einsum("bhqk,bkhd->bqhd", pattern, v[:, :, ::2])


def of_entries(m: Form, q: Any, k: Any, v: Any) -> Any:
    """Two patterns as entries of an axis of their own, which goes when one is chosen."""
    q, k = (t.reshape(*t.shape[:2], H // 2, 2, D) for t in (q, k))
    pattern = jax.nn.softmax(jnp.einsum("bqhcd,bkhcd->bchqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", pattern[:, 0] - 0.3 * pattern[:, 1], v[:, :, ::2])


def difference_in_numpy(m: Form, q: Any, k: Any) -> np.ndarray:
    pattern = softmax(products(q, k))
    return pattern[:, ::2] - 0.3 * pattern[:, 1::2]


def slots(m: Form, q: Any, k: Any, v: Any) -> Any:
    pattern = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q[:, :, 0], k[:, :, 0]), axis=1)
    return (pattern / pattern.sum(-1, keepdims=True)) @ v[:, :, 0]


def slots_in_numpy(m: Form, q: Any, k: Any) -> np.ndarray:
    pattern = softmax(products(q, k)[:, 0], axis=1)
    return pattern / pattern.sum(-1, keepdims=True)


def keys_lead(m: Form, q: Any, k: Any, v: Any) -> Any:
    pattern = jax.nn.softmax(jnp.einsum("zths,zuhs->uzth", q, k), axis=0)
    return jnp.einsum("uzth,zuhs->zths", pattern, v)


def of_two_products(m: Form, q: Any, k: Any, v: Any) -> Any:
    """A part of the keys is shared by all heads, as in a latent attention."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def softmax1(m: Form, q: Any, k: Any, v: Any) -> Any:
    """With a 1 in the sum, a head may look at nothing."""
    weights = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights / (1 + weights.sum(-1, keepdims=True)), v)


def softmax1_in_numpy(m: Form, q: Any, k: Any) -> np.ndarray:
    scores = products(q, k)
    return softmax(np.concatenate([scores, np.zeros_like(scores[..., :1])], -1))[..., :-1]


@jax.custom_vjp
def own_softmax(x: jax.Array) -> jax.Array:
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


own_softmax.defvjp(
    lambda x: (own_softmax(x),) * 2, lambda p, g: (p * (g - (p * g).sum(-1, keepdims=True)),)
)


def own_derivative(m: Form, q: Any, k: Any, v: Any) -> Any:
    return own_softmax(q[:, :, 0] @ k[:, :, 0].mT) @ v[:, :, 0]


def folded(m: Form, q: Any, k: Any, v: Any) -> Any:
    """Batch and heads are one axis, as `jnp.matmul` and BERT's code have them."""
    q, k, v = (t.swapaxes(1, 2).reshape(-1, t.shape[1], D) for t in (q, k, v))
    return jax.nn.softmax(q @ k.mT) @ v


def shifted(m: Form, q: Any, k: Any, v: Any) -> Any:
    """The scores of relative positions are moved by a reshape, as in Transformer-XL."""
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores_shifted(q, k)), v)


def scores_shifted(q: Any, k: Any) -> Any:
    np_ = jnp if isinstance(q, jax.Array) else np
    scores = np_.einsum("bqhd,bkhd->bhqk", q, k)
    wide = np_.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0)))
    n, length = scores.shape[2:]
    return scores + wide.reshape(B, H, length + 1, n)[:, :, 1:].reshape(scores.shape)


def shifted_in_numpy(m: Form, q: Any, k: Any) -> np.ndarray:
    return softmax(scores_shifted(np.asarray(q, np.float64), np.asarray(k, np.float64)))


def of_a_shared_memory(m: Form, q: Any, k: Any, v: Any) -> Any:
    """The keys have no batch: all examples look at the same."""
    pattern = jax.nn.softmax(jnp.einsum("bqhd,khd->bhqk", q, k[0]))
    return jnp.einsum("bhqk,khd->bqhd", pattern, v[0])


def heads_trail(m: Form, q: Any, k: Any, v: Any) -> Any:
    pattern = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bqkh", q, k), axis=2)
    return jnp.einsum("bqkh,bkhd->bqhd", pattern, v)


def absorbed(m: Form, q: Any, k: Any, v: Any) -> Any:
    """Keys and values are one latent of all heads, as in DeepSeek."""
    asked = jnp.einsum("bqhd,hd->bqhd", q, m.pre[:, :D])
    pattern = jax.nn.softmax(jnp.einsum("bqhd,bkd->bhqk", asked, k[:, :, 0]))
    return jnp.einsum("bhqk,bkd->bqhd", pattern, k[:, :, 0])


def absorbed_in_numpy(m: Form, q: Any, k: Any) -> np.ndarray:
    return softmax(products(q * np.asarray(m.pre[:, :D]), np.repeat(k[:, :, :1], H, 2)))


FORMS: dict[str, tuple[Any, Any]] = {
    "talking heads": (talking, talking_in_numpy),
    "a layer over heads": (by_a_layer, by_a_layer_in_numpy),
    "talking heads with one key head": (one_key_head, one_key_head_in_numpy),
    "differential": (difference, difference_in_numpy),
    "of two softmaxes": (of_two, difference_in_numpy),
    "of two entries": (of_entries, difference_in_numpy),
    "keys lead": (keys_lead, lambda m, q, k: softmax(products(q, k))),
    "of two products": (of_two_products, lambda m, q, k: softmax(products(q, k + k[:, :, :1]))),
    "softmax1": (softmax1, softmax1_in_numpy),
    "slots": (slots, slots_in_numpy),
    "folded heads": (folded, lambda m, q, k: softmax(products(q, k))),
    "shifted": (shifted, shifted_in_numpy),
    "a shared memory": (
        of_a_shared_memory,
        lambda m, q, k: softmax(products(q, np.repeat(k[:1], B, 0))),
    ),
    "heads trail": (heads_trail, lambda m, q, k: softmax(products(q, k))),
    "absorbed": (absorbed, absorbed_in_numpy),
    "own derivative": (own_derivative, lambda m, q, k: softmax(products(q, k)[:, 0])),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("queries", [Q, 1])
def test_the_pattern_is_what_multiplies_the_values(name: str, queries: int) -> None:
    f, explicit = FORMS[name]
    (q, k, v), model = ARRAYS, Form(f)
    q = q[:, :queries]
    assert [c.site for c in nni.trace(model, q, k, v, only="**@attention*").calls] == ["@attention"]
    assert nni.trace(model, q, k, v).calls[0].attends == 1
    _, record = nni.capture(model, only="@attention", values=True)(q, k, v)
    np.testing.assert_allclose(record["@attention"].values, explicit(model, q, k), atol=5e-6)
    with nni.perturb("@attention", nni.Zero()):
        assert not model(q, k, v).any()


def softly(m: Form, x: Any) -> Any:
    experts = jnp.ones((x.shape[1], 5, D))
    return jnp.einsum("bne,ned->bnd", jax.nn.softmax(x @ m.router[...][0]), experts)


def by_cosine(m: Form, x: Any) -> Any:
    to = m.router[...][1] / jnp.linalg.norm(m.router[...][1], axis=0)
    return jnp.einsum("bne,ned->bnd", jax.nn.softmax(x @ to), jnp.ones((x.shape[1], 5, D)))


def of_the_best(m: Form, x: Any) -> Any:
    best, which = jax.lax.top_k(jax.nn.softmax(m.head(x)), 2)
    return jnp.einsum(
        "bne,bned->bnd", best, jnp.ones((B, x.shape[1], 5, D))[:, :, :2] + which[..., None]
    )


def by_capacity(m: Form, x: Any) -> Any:
    gates = jax.nn.softmax(m.head(x))
    places = jax.nn.one_hot(jnp.cumsum(gates > 0.2, 1), 4) * gates[..., None]
    inside = jnp.einsum("bnec,bnd->becd", jnp.where(places > 0, 1.0, 0.0), x)
    return jnp.einsum("bnec,becd->bnd", places, inside)


def in_layers(m: Form, x: Any) -> Any:
    def layer(x: Any, to: Any) -> Any:
        pattern = jax.nn.softmax(x @ to)
        return x + jnp.einsum("bne,ned->bnd", pattern, jnp.ones((x.shape[1], 5, D))), None

    return jax.lax.scan(layer, x, m.router[...])[0]


def weighted_by_class(m: Form, x: Any) -> Any:
    return jnp.einsum("bnc,bnd->bcd", jax.nn.softmax(m.head(x)), x)


def a_head(m: Form, x: Any) -> Any:
    return jax.nn.softmax(m.head(x.mean(1)))


def linear(m: Form, x: Any) -> Any:
    q = k = jax.nn.elu(m.head(x)) + 1
    return jnp.einsum("bqf,bkf,bkd->bqd", q, k, x) / jnp.einsum("bqf,bkf->bq", q, k)[..., None]


def of_features(m: Form, x: Any) -> Any:
    a = jnp.einsum("bqf,bkf->bqk", jnp.exp(m.head(x)), jnp.exp(m.head(x)))
    return (a / a.sum(-1, keepdims=True)) @ x


def of_states(m: Form, x: Any) -> Any:
    """A selective state space, as in Mamba."""
    steps, b = jax.nn.softplus(m.head(x)), jax.nn.softmax(m.head(x))

    def step(h: Any, at: Any) -> Any:
        x, dt, b = at
        h = h * jnp.exp(-dt)[:, None] + jnp.einsum("bd,bs->bds", x, dt * b)
        return h, jnp.einsum("bds,bs->bd", h, b)

    rows = (x.swapaxes(0, 1), steps.swapaxes(0, 1), b.swapaxes(0, 1))
    return jax.lax.scan(step, jnp.zeros((B, D, 5)), rows)[1]


NONE = [
    softly, by_cosine, of_the_best, by_capacity, in_layers, weighted_by_class, a_head, linear,
    of_features, of_states,
]  # fmt: skip


@pytest.mark.parametrize("f", NONE, ids=lambda f: f.__name__)
def test_what_only_looks_like_it_is_no_attention(f: Any) -> None:
    model, x = Form(f), ARRAYS[1][:, :, 0]
    assert not any(c.attends for c in nni.trace(model, x).calls)
    sites = [c.site for c in nni.trace(model, x, only="**@*").calls]
    assert sites
    assert not any("attention" in site for site in sites)
