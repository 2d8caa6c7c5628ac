"""The experts of routers in traced programs, against NumPy in float64."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mixtures import D, E, Limited, Mixture

import nnx_inspector as nni
from nnx_inspector.stats.choices.rows import CHOICE_STATS, merge_rows


class Net(nnx.Module):
    def __init__(self, way: str, **how: Any):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(D, D, rngs=rngs)
        self.moe = Mixture(way, rngs=rngs, **how)
        self.head = nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.moe(self.first(x)))


def inputs() -> jax.Array:
    return 2 * jax.random.normal(jax.random.key(0), (32, D))


def check(found: Any, expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        rows = found[:, CHOICE_STATS.index(name)]
        np.testing.assert_allclose(rows, values, rtol=1e-4, atol=1e-5, err_msg=name)


def captured(f: Any, *args: Any) -> dict[str, Any]:
    _, record = nni.capture(f)(*args)
    return {site: merge_rows(rows) for site, rows in record.choices.items()}


@pytest.mark.parametrize("way", ["argmax", "one_hot", "logits", "gather", "list", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2])
def test_each_way_to_write_it(way: str, k: int):
    k = 1 if way == "argmax" else k
    net, x = Net(way, k=k, bias=(0.0, 1.0, -1e4, 0.0)), inputs()
    ((site, rows),) = captured(net, x).items()
    assert site == "moe@experts"
    expected = net.moe.expected(net.first(x))
    assert expected["load"][2] == 0
    assert expected["load"].sum() == pytest.approx(k)
    check(rows, expected)
    assert np.isnan(rows[:, CHOICE_STATS.index("dropped")]).all()


@pytest.mark.parametrize("way", ["argmax", "list"])
def test_in_a_step_of_a_loop(way: str):
    net, x = Net(way), inputs()
    expected = net.moe.expected(net.first(x))

    @nnx.jit
    def step(net: Any, x: Any) -> Any:
        return nnx.value_and_grad(lambda net: (net(x) ** 2).mean())(net)[0]

    with contextlib.closing(nni.Inspector(net, x, display=False)) as insp:
        for batch in insp.watch([x], every=1):
            step(net, batch)
        frame = insp.recording.experts_frame()
        assert insp.recording.heads_frame().empty
    assert frame["site"].unique().tolist() == ["moe@experts"]
    assert frame["expert"].tolist() == list(range(E))
    np.testing.assert_allclose(frame["load"], expected["load"])
    np.testing.assert_allclose(frame["entropy"], expected["entropy"], rtol=1e-4)


@pytest.mark.parametrize(
    ("way", "k"),
    [("slots", 1), ("less", 2), ("where", 2), ("grouped", 2), ("slots", 2), ("less", 1)],
)
def test_what_exceeds_the_capacity_is_dropped(way: str, k: int):
    model, x = Limited(way, k=k, bias=(0.0, 1.0, -1e4, 0.0)), inputs()
    ((site, rows),) = captured(model, x).items()
    assert site == "@experts"
    expected = model.dropped(x)
    assert np.isnan(expected).tolist() == [False, False, True, False]
    assert np.nanmax(expected) > 0
    check(rows, {"dropped": expected})


def test_what_is_dropped_in_steps_of_a_loop():
    """With the backward pass, in a layer that a remat computes again."""
    model, x = Limited("where", k=2), inputs()

    @nnx.jit
    def step(model: Any, x: Any) -> Any:
        call = nnx.remat(lambda model, x: model(x))
        return nnx.value_and_grad(lambda model: (call(model, x) ** 2).mean())(model)[0]

    with contextlib.closing(nni.Inspector(model, x, display=False)) as insp:
        for batch in insp.watch([x], every=1):
            step(model, batch)
        frame = insp.recording.experts_frame()
    np.testing.assert_allclose(frame["dropped"], model.dropped(x), rtol=1e-6)


def test_places_that_only_a_metric_is_made_of_are_no_capacity():
    class Counted(Limited):
        def __call__(self, x: jax.Array) -> Any:
            weights, index = jax.lax.top_k(jax.nn.softmax(self.router(x)), self.k)
            mask = jax.nn.one_hot(index[:, 0], E)
            place = jnp.cumsum(mask, axis=0) * mask
            full = (place.max(0) > self.room).mean() + (place > 0).mean()
            chances = jnp.cumsum(mask, axis=1) < 2
            given = jnp.einsum("ne,nd->end", mask * weights, x)
            outs = nnx.vmap(lambda expert, x: expert(x))(self.experts, given)
            return outs.sum(0), full + chances.mean()

    ((_, rows),) = captured(Counted("", room=2), inputs()).items()
    assert np.isfinite(rows[:, CHOICE_STATS.index("load")]).all()
    assert np.isnan(rows[:, CHOICE_STATS.index("dropped")]).all()


class Other(nnx.Module):
    """Choices that are no routers: of a class, a word, a code, and a metric."""

    def __init__(self, way: str):
        rngs = nnx.Rngs(0)
        self.way = way
        self.head, self.embed = nnx.Linear(D, E, rngs=rngs), nnx.Embed(E, D, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(3)])

    def __call__(self, x: Any) -> Any:
        logits = self.head(x)
        for layer in self.layers:
            x = layer(x)
        if self.way == "class":
            return jax.nn.softmax(logits), logits.argmax(-1)
        if self.way == "word":
            return self.embed(logits.argmax(-1))
        if self.way == "code":
            return jax.nn.one_hot(logits.argmax(-1), E) @ self.embed.embedding[...]
        if self.way == "accuracy":
            return (logits.argmax(-1) == jnp.arange(32) % E).mean()
        return jax.lax.top_k(jax.nn.softmax(logits), 2)


@pytest.mark.parametrize("way", ["class", "word", "code", "accuracy", "top"])
def test_what_is_no_router_has_no_rows(way: str):
    assert captured(Other(way), inputs()) == {}
