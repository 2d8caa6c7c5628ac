"""The pattern of an attention whose keys stand in a cache, against a softmax in NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni

B, LENGTH, STEPS, H, G, D = 2, 4, 6, 4, 2, 4
"""`STEPS` tokens pass, and a ring holds the last `LENGTH` of them."""


class Held(nnx.Variable):
    """A cache of a user's own type."""


def turned(x: Any, positions: Any) -> Any:
    """Rotary embedding, for jax and for NumPy."""
    np_ = jnp if isinstance(x, jax.Array) else np
    angles = np_.asarray(positions)[..., None, None] * np.asarray([1.0, 0.1])
    a, b = x[..., : D // 2], x[..., D // 2 :]
    cos, sin = np_.cos(angles), np_.sin(angles)
    return np_.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class Decoder(nnx.Module):
    """One token at a time; `kind` says how keys are stored."""

    def __init__(self, kind: str, rngs: nnx.Rngs):
        self.kind = kind
        self.q = nnx.Linear(D, H * D, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(D, G * D, use_bias=False, rngs=rngs)
        size = LENGTH if kind == "ring" else STEPS
        held = Held if kind in ("at set", "by a method") else nnx.Cache
        self.keys, self.values = (held(jnp.zeros((B, size, G, D))) for _ in range(2))
        self.at = held(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        now = self.at[...]
        q = turned(self.q(x).reshape(B, 1, H, D), now[None])
        k = turned(self.k(x).reshape(B, 1, G, D), now[None])
        self._store(k, jnp.repeat(x[:, :, None], G, 2), now)
        self.at[...] = now + 1
        return (self.attend if self.kind == "by a method" else self._attend)(q, now)

    def attend(self, q: jax.Array, now: jax.Array) -> jax.Array:
        return self._attend(q, now)

    def _store(self, k: jax.Array, v: jax.Array, now: jax.Array) -> None:
        for held, new in ((self.keys, k), (self.values, v)):
            if self.kind == "at set":
                held[...] = held[...].at[:, now].set(new[:, 0])
            else:
                place = now % LENGTH if self.kind == "ring" else now
                held[...] = jax.lax.dynamic_update_slice(held[...], new, (0, place, 0, 0))

    def _attend(self, q: jax.Array, now: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x[...], H // G, axis=2) for x in (self.keys, self.values))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        seen = jnp.arange(k.shape[1]) <= now  # of a ring: all, once it is full
        pattern = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", pattern, v).reshape(B, 1, -1)


def explicit(model: Any, xs: Any, step: int) -> np.ndarray:
    """The pattern of the last of `step + 1` tokens, `[batch, head, 1, place in the cache]`."""
    past = np.asarray(xs[:, : step + 1], np.float64)
    q, k = (past @ np.asarray(one.kernel[...], np.float64) for one in (model.q, model.k))
    q = turned(q.reshape(B, -1, H, D), np.arange(step + 1))[:, -1:]
    k = turned(k.reshape(B, -1, G, D), np.arange(step + 1)).repeat(H // G, axis=2)
    size = model.keys[...].shape[1]
    scores = np.full((B, H, 1, size), -np.inf)
    for position in range(max(0, step + 1 - size), step + 1):
        one = np.einsum("bqhd,bhd->bhq", q, k[:, position]) / 2
        scores[..., position % size] = one
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


XS = jax.random.normal(jax.random.key(5), (B, STEPS, D))


@pytest.mark.parametrize("kind", ["update slice", "at set", "ring", "by a method"])
def test_keys_of_a_cache_are_no_parameters(kind: str) -> None:
    model = Decoder(kind, nnx.Rngs(0))
    site = ":attend@attention" if kind == "by a method" else "@attention"
    run = nnx.jit(lambda m, x: nni.capture(m, only=site, values=True)(x)[1])
    for step in range(STEPS):
        pattern = run(model, XS[:, step : step + 1])[site].values
        np.testing.assert_allclose(pattern, explicit(model, XS, step), atol=1e-6)
    assert nni.trace(model, XS[:, :1]).calls[0].attends == 1


def test_a_pattern_over_a_cache_is_perturbed() -> None:
    model = Decoder("ring", nnx.Rngs(0))
    for x in (XS[:, :1], XS[:, 1:2]):
        half = nni.perturbed(nnx.clone(model))({"@attention": nni.Scale(0.5)}, x)
        with nni.perturb("@attention", nni.Zero()):
            assert not nnx.clone(model)(x).any()
        np.testing.assert_allclose(2 * half, model(x), rtol=1e-5)


def test_a_scan_over_time_has_the_pattern_of_each_step() -> None:
    def decode(model: Decoder, xs: jax.Array) -> jax.Array:
        over_time = nnx.scan(
            lambda m, x: m(x),
            in_axes=(nnx.StateAxes({nnx.Cache: nnx.Carry, ...: None}), 1),
            out_axes=1,
        )
        return over_time(model, xs[:, :, None])

    model = Decoder("ring", nnx.Rngs(0))
    _, record = nni.capture(decode, only="@attention", values=True)(model, XS)
    for step in range(STEPS):
        pattern = record["@attention"].row(step).values
        np.testing.assert_allclose(pattern, explicit(model, XS, step), atol=1e-6)


class Crossing(nnx.Module):
    """Keys and values that an earlier call has left, which this one only reads."""

    def __init__(self, rngs: nnx.Rngs):
        keys = jax.random.normal(rngs.params(), (B, 5, H, D))
        self.keys, self.values = nnx.Cache(keys), nnx.Cache(keys[::-1])

    def __call__(self, q: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, self.keys[...], self.values[...])


def test_keys_that_are_only_read_are_a_cache_too() -> None:
    model, q = Crossing(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (B, 3, H, D))
    _, record = nni.capture(model, only="@attention", values=True)(q)
    scores = np.einsum(
        "bqhd,bkhd->bhqk", *(np.asarray(x, np.float64) for x in (q, model.keys[...]))
    )
    weights = np.exp(scores / 2)
    wanted = weights / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(record["@attention"].values, wanted, atol=1e-6)
    assert nni.trace(model, q).calls[0].attends == 1


def test_a_decoder_of_flax_attends_over_its_cache() -> None:
    attn = nnx.MultiHeadAttention(H, D * H, decode=True, rngs=nnx.Rngs(0))
    attn.init_cache((B, STEPS, D * H))
    xs = jax.random.normal(jax.random.key(3), (B, STEPS, D * H))
    model = nnx.Sequential(attn)
    for step in range(3):
        _, record = nni.capture(model, only="**@attention", values=True)(xs[:, step : step + 1])
        pattern = record["layers/0@attention"].values
        past = xs[:, : step + 1]
        q, k = attn.query(past[:, -1:]), attn.key(past)
        wanted = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(D))
        np.testing.assert_allclose(pattern[..., : step + 1], wanted, atol=1e-6)
        assert not pattern[..., step + 1 :].any()
