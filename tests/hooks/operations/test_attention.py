"""The pattern of an attention, whatever computes it, against a softmax in NumPy with 64 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni
from tests.models.explicit import MODELS, D

B, Q, K, H, G, D_HEAD = 2, 5, 6, 4, 2, 3
MASK = np.random.default_rng(1).random((B, 1, Q, K)) > 0.3
MASK[..., 0] = True  # no query without keys
BIAS = np.random.default_rng(2).normal(size=(B, H, Q, K))
CAUSAL = np.tril(np.ones((Q, K), bool))
WINDOW = CAUSAL & (np.arange(Q)[:, None] - np.arange(K) <= 2)
PADDED = np.arange(K) < np.asarray([3, K])[:, None, None, None]


def weights(q: Any, k: Any, mask: Any = True, bias: Any = 0.0) -> np.ndarray:
    """[batch, head, query, key], of queries and keys as [batch, position, head, feature]."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]) + bias
    scores = np.where(mask, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


def mixed(pattern: np.ndarray, v: Any) -> np.ndarray:
    v = np.repeat(np.asarray(v, np.float64), pattern.shape[1] // v.shape[2], axis=2)
    return np.einsum("bhqk,bkhd->bqhd", pattern, v)


def arrays(heads: int = H, dtype: Any = jnp.float32) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(B, Q, H, D_HEAD), (B, K, heads, D_HEAD), (B, K, heads, D_HEAD)]
    return [jax.random.normal(*of).astype(dtype) for of in zip(keys, shapes, strict=True)]


class Attends(nnx.Module):
    def __init__(self, f: Callable[..., Any]):
        self.f = nnx.static(f)

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return self.f(q, k, v)


class Within(nnx.Module):
    def __init__(self, f: Callable[..., Any]):
        self.attn = Attends(f)

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return self.attn(q, k, v)


SCALE = 1 / np.sqrt(D_HEAD)


def by_hand(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def heads_first(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    p = jax.nn.softmax(q @ k.swapaxes(-1, -2) * SCALE, axis=-1)
    return (p @ v).swapaxes(1, 2)


def written_out(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bkhd,bqhd->bhqk", k, q) * SCALE
    e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return jnp.einsum("bkhd,bhqk->bqhd", v, e / e.sum(-1, keepdims=True))


def by_logarithms(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    p = jnp.exp(scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def mapped(q: Any, k: Any, v: Any) -> Any:
    def one(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) * SCALE) @ v

    return jax.vmap(one, in_axes=2, out_axes=2)(q, k, v)


def grouped(q: Any, k: Any, v: Any) -> Any:
    apart = q.reshape(B, -1, G, H // G, D_HEAD)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", apart, k) * SCALE
    out = jnp.einsum("bkgqs,bskd->bqkgd", jax.nn.softmax(scores), v)
    return out.reshape(q.shape)


def repeated(q: Any, k: Any, v: Any) -> Any:
    return by_hand(q, *(jnp.repeat(x, H // G, axis=2) for x in (k, v)))


def one_key_head(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * SCALE
    return jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(scores), v[:, :, 0])


def with_a_sink(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    scores = jnp.concatenate([scores, jnp.full((*scores.shape[:3], 1), -jnp.inf)], axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores)[..., :-1], v)


def inner_jit(q: Any, k: Any, v: Any) -> Any:
    scores = jax.jit(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE)(q, k)
    mix = jax.jit(lambda p, v: jnp.einsum("bhqk,bkhd->bqhd", p, v))
    return mix(jax.jit(jax.nn.softmax)(scores), v)


def rematerialised(q: Any, k: Any, v: Any) -> Any:
    return jax.checkpoint(by_hand)(q, k, v)


def scanned(q: Any, k: Any, v: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c + by_hand(q, k, v), None), jnp.zeros_like(q), length=1)[0]


def jax_nn(**how: Any) -> Callable[..., Any]:
    return functools.partial(jax.nn.dot_product_attention, implementation="xla", **how)


def flax(**how: Any) -> Callable[..., Any]:
    return functools.partial(nnx.dot_product_attention, **how)


def own_bias(f: Any, q: Any, k: Any, v: Any) -> Any:
    return f(q, k, v, bias=jnp.asarray(BIAS, q.dtype))


CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "by hand": (by_hand, H, {}),
    "heads first": (heads_first, H, {}),
    "written out": (written_out, H, {}),
    "by logarithms": (by_logarithms, H, {}),
    "vmapped over heads": (mapped, H, {}),
    "grouped": (grouped, G, {}),
    "repeated": (repeated, G, {}),
    "one key head": (one_key_head, 1, {}),
    "a sink": (with_a_sink, H, {}),
    "inner jit": (inner_jit, H, {}),
    "remat": (rematerialised, H, {}),
    "jax": (jax_nn(), H, {}),
    "jax, grouped": (jax_nn(), G, {}),
    "jax, causal": (jax_nn(is_causal=True), H, {"mask": CAUSAL}),
    "jax, window": (jax_nn(is_causal=True, local_window_size=2), H, {"mask": WINDOW}),
    "jax, mask": (jax_nn(mask=MASK), H, {"mask": MASK}),
    "jax, padding": (jax_nn(key_value_seq_lengths=jnp.asarray([3, K])), H, {"mask": PADDED}),
    "jax, bias": (functools.partial(own_bias, jax_nn()), H, {"bias": BIAS}),
    "flax": (flax(), H, {}),
    "flax, mask": (flax(mask=MASK), H, {"mask": MASK}),
    "flax, bias": (functools.partial(own_bias, flax()), H, {"bias": BIAS}),
    "flax, grouped": (flax(), G, {}),
    "flax, with dropout": (flax(dropout_rate=0.5, deterministic=True), G, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_pattern_is_that_of_numpy(case: str) -> None:
    f, heads, how = CASES[case]
    q, k, v = arrays(heads)
    pattern = weights(q, k, **how)
    model = Within(f)
    loss = lambda m, *x: (m(*x) ** 2).sum()  # noqa: E731
    grad = nni.value_and_grad(loss, only="**@attention", values=True)
    found = nnx.jit(lambda m, *x: grad(m, *x)[0][1])(model, q, k, v)
    assert list(found) == ["attn@attention"], case
    assert [(c.site, c.attends) for c in nni.trace(model, q, k, v).calls] == [("", 0), ("attn", 1)]
    entry = found["attn@attention"]
    np.testing.assert_allclose(entry.values, pattern, atol=2e-6)
    out = mixed(pattern, v)
    values = np.repeat(np.asarray(v, np.float64), H // heads, axis=2)
    gradient = np.einsum("bqhd,bkhd->bhqk", 2 * out, values)
    assert entry.gradient.norm == pytest.approx(np.linalg.norm(gradient), rel=1e-4)
    wanted = mixed(pattern + 0.25 * (np.arange(H) == 1)[:, None, None], v)
    one_head = nni.Shift(0.25).only([1], axis=-3)
    moved = nni.perturbed(model)({"attn@attention": one_head}, q, k, v)
    np.testing.assert_allclose(moved, wanted, atol=5e-6)
    with nni.perturb("attn@attention", one_head):
        np.testing.assert_allclose(model(q, k, v), wanted, atol=5e-6)


@pytest.mark.parametrize("make", [jax_nn, flax])
def test_in_bfloat16_the_pattern_is_that_of_the_rounded_scores(make: Any) -> None:
    q, k, v = arrays(dtype=jnp.bfloat16)
    _, found = nni.capture(Within(make()), only="**@attention", values=True)(q, k, v)
    pattern = found["attn@attention"].values
    assert pattern.dtype == jnp.bfloat16
    np.testing.assert_allclose(pattern.astype(np.float32), weights(q, k), atol=0.01)


def test_a_model_of_flax_attends_in_every_layer() -> None:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.attn = nnx.MultiHeadAttention(2, 8, decode=False, dropout_rate=0.1, rngs=rngs)

        def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
            return x + self.attn(x, memory, deterministic=False)

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.blocks = nnx.vmap(Block)(rngs.split(3))
            self.cross = Block(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            out = nnx.scan(lambda b, x: b(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return self.cross(out(self.blocks, x), x[:, :3])

    model, x = Net(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, 5, 8))
    trace = nni.trace(model, x, only=["**", "**@attention"])
    rows = {c.site: (c.output, c.times) for c in trace.calls if "@" in c.site}
    plain = nni.trace(model, x).calls
    assert [c.site for c in plain if c.attends == 1] == ["blocks/attn", "cross/attn"]
    assert rows == {
        "blocks/attn@attention": ("float32[2,2,5,5]", 3),
        "cross/attn@attention": ("float32[2,2,5,3]", 1),
    }
    _, found = nni.capture(model, only="blocks/attn@attention", values=True)(x)
    assert found["blocks/attn@attention"].values.shape == (3, 2, 2, 5, 5)
    opened = nni.perturbed(model)({"blocks[1]/attn@attention": nni.Zero()}, x)
    assert not np.allclose(opened, model(x))


def no_heads(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.T) @ v


def test_without_heads_and_under_vmap_the_axes_are_those_there_are() -> None:
    q, k, v = (x[0, :, 0] for x in arrays())
    model, pattern = Attends(no_heads), jax.nn.softmax(q @ k.T)
    keep = lambda q, k, v: nni.capture(model, only="@attention", values=True)(q, k, v)[1]  # noqa: E731
    np.testing.assert_allclose(keep(q, k, v)["@attention"].values, pattern, rtol=1e-5)
    many = jax.vmap(keep, in_axes=(0, None, None))(jnp.stack([q, 2 * q]), k, v)
    assert many["@attention"].values.shape == (2, Q, K)
    pooled = lambda q, k, v: jax.nn.softmax(k @ q[0]) @ v  # noqa: E731
    _, one = nni.capture(Attends(pooled), only="@attention", values=True)(q, k, v)
    assert one["@attention"].values.shape == (1, K)


def unlike(x: jax.Array, w: jax.Array) -> dict[str, Callable[..., Any]]:
    """Products of a softmax that are not attention; `w` is a Variable."""
    return {
        "a layer": lambda w: jax.nn.softmax(x @ w) @ w.T,
        "a router": lambda w: jnp.einsum("ne,end->nd", jax.nn.softmax(x @ w), jnp.ones((D, 3, 2))),
        "no softmax": lambda w: jax.nn.sigmoid(x @ x.T) @ x,
        "no product": lambda w: jax.nn.softmax(x) @ x.T,
        "over queries": lambda w: jax.nn.softmax(x @ x.T).sum(0) @ x,
    }


@pytest.mark.parametrize(
    "name", ["a layer", "a router", "no softmax", "no product", "over queries"]
)
def test_what_is_no_attention_is_not_named_so(name: str) -> None:
    class Own(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((D, D)))

        def __call__(self, x: jax.Array) -> Any:
            return unlike(x, self.w[...])[name](self.w[...])

    x = jnp.ones((3, D))
    assert not any("attention" in c.site for c in nni.trace(Own(), x, only="**@*").calls)
    assert [c.attends for c in nni.trace(Own(), x).calls] == [0]
    with pytest.raises(
        ValueError, match=r"closest sites are '@.*A pattern is found where one call"
    ):
        nni.capture(Own(), only="@attention")(x)


def test_a_mixed_selection_tells_which_operation_is_not_there() -> None:
    x = jax.random.normal(jax.random.key(0), (3, D))
    with pytest.raises(
        ValueError, match=r"'@sofmax' matches no site.*closest sites are '@softmax'"
    ):
        nni.capture(MODELS[0](nnx.Rngs(0)), only=["**", "@sofmax"])(x)
    _, found = nni.capture(MODELS[0](nnx.Rngs(0)), only=["**", "@attention"])(x)
    assert "@attention" in found


def test_an_attention_in_several_modules_is_that_of_the_last_product() -> None:
    class Softmax(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, scores: jax.Array) -> jax.Array:
            return self.dropout(jax.nn.softmax(scores))

    class Pools(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.score, self.pattern = nnx.Linear(D, 1, rngs=rngs), Softmax(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            weights = self.pattern((x @ x.swapaxes(1, 2)) / 2)
            pooled = jax.nn.softmax(self.score(x)[..., 0])
            return (weights @ x).mean(1) + jnp.einsum("bn,bnd->bd", pooled, x)

    model, x = Pools(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, 5, D))
    trace = nni.trace(model, x, only="**@attention*")
    assert [c.output for c in trace.calls] == ["float32[2,5,5]", "float32[2,1,5]"]
    assert [c.attends for c in nni.trace(model, x, only="").calls] == [2]
    _, found = nni.capture(model, only="@attention[1]", values=True)(x)
    wanted = jax.nn.softmax(model.score(x)[..., 0])[:, None]
    np.testing.assert_allclose(found["@attention[1]"].values, wanted, rtol=1e-5)


def test_an_inspector_that_selects_no_operation_says_how_to() -> None:
    q, k, v = arrays()
    insp = nni.Inspector(Within(by_hand), q, k, v, display=False)
    with pytest.raises(ValueError, match=r"only=\['\*\*', 'attn@attention'\]"):
        insp.units("attn@attention")
    insp.close()
    insp = nni.Inspector(Within(by_hand), q, k, v, only=["**", "attn@attention"], display=False)
    insp.perturb("attn@attention", nni.Zero().only([0], axis=-3))
    out = insp.values("attn")
    assert not out[:, :, 0].any()
    assert out[:, :, 1:].all()
    insp.close()
