"""The heads of attentions in traced programs, against NumPy in float64."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attentions import FIGURES, Attention, causal, heads_in_numpy, padded
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.stats.choices.rows import CHOICE_STATS, merge_rows

T, WIDTH = 6, 12


class Net(nnx.Module):
    def __init__(self, **how: Any):
        rngs = nnx.Rngs(0)
        self.attn = Attention(rngs=rngs, scale=3.0, **how)
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x: Any, context: Any = None, mask: Any = None) -> Any:
        return jax.nn.softmax(self.head(self.attn(x, context, mask)))


def inputs(length: int = T, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (3, length, WIDTH))


def check(rows: Any, expected: dict[str, np.ndarray], **how: Any) -> None:
    for name in FIGURES:
        found = rows[:, CHOICE_STATS.index(name)]
        tolerance = {"rtol": 1e-4, "atol": 1e-5, **how}
        np.testing.assert_allclose(found, expected[name], err_msg=name, **tolerance)


def captured(f: Any, *args: Any) -> dict[str, np.ndarray]:
    _, record = nni.capture(f)(*args)
    return {site: merge_rows(rows) for site, rows in record.choices.items()}


WAYS = ["jax", "plain", "where", "added", "log", "two", "bare", "dropped"]
MASKS = {
    "causal": jnp.asarray(causal(T)),
    "padded": jnp.asarray(padded([6, 2, 4], T)),
    "both": jnp.asarray(causal(T) & padded([6, 2, 4], T)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", MASKS)
def test_each_way_to_write_it(way: str, mask: str):
    net, x = Net(way=way), inputs()
    (site, rows), *others = captured(net, x, None, MASKS[mask]).items()
    assert (site, others) == ("attn@attention", [])
    check(rows, heads_in_numpy(net.attn.logits(x), MASKS[mask]))


@pytest.mark.parametrize("way", WAYS)
def test_in_a_step_of_a_loop(way: str):
    """With the backward pass, whose products are no attentions."""
    net, x, mask = Net(way=way), inputs(), MASKS["causal"]
    expected = heads_in_numpy(net.attn.logits(x), mask)
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(net: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda net: (net(x, None, mask) ** 2).mean())(net)
        optimizer.update(net, grads)
        return loss

    with contextlib.closing(nni.Inspector(net, x, None, mask, display=False)) as insp:
        for batch in insp.watch([x] * 3, every=2):
            step(net, optimizer, batch)
        passes = [one.figures.of_choices for one in insp.recording.passes if one.kind == "watch"]
        frame = insp.recording.heads_frame()
    assert [list(one) for one in passes] == [["attn@attention"]] * 2
    check(passes[0]["attn@attention"], expected)
    assert len(frame) == 2 * 4
    np.testing.assert_allclose(frame["entropy"][:4], expected["entropy"], rtol=1e-4)
    assert not np.allclose(passes[1]["attn@attention"], passes[0]["attn@attention"])


def test_runs_and_steps_of_an_inspector():
    net, x = Net(), inputs()
    with contextlib.closing(nni.Inspector(net, x, display=False)) as insp:
        insp.run()
        insp.step(lambda net, x: net(x).sum(), x)
        frame = insp.recording.heads_frame()
    assert frame["site"].unique().tolist() == ["attn@attention"]
    expected = heads_in_numpy(net.attn.logits(x))
    for _, one in frame.groupby("pass"):
        for name in FIGURES:
            np.testing.assert_allclose(one[name], expected[name], rtol=1e-4, atol=1e-5)


def test_cross_attention():
    net, x, context = Net(), inputs(), inputs(9, seed=1)
    rows = captured(net, x, context)["attn@attention"]
    check(rows, heads_in_numpy(net.attn.logits(x, context)))
    assert np.isnan(rows[:, CHOICE_STATS.index("distance")]).all()


def test_flax_attention_with_dropout():
    attn = nnx.MultiHeadAttention(
        4,
        WIDTH,
        dropout_rate=0.5,
        deterministic=False,
        decode=False,
        rngs=nnx.Rngs(0),
        broadcast_dropout=False,
    )
    x = inputs()
    mask = nnx.make_causal_mask(x[..., 0])
    _, record = nni.capture(attn, values=True)(x, mask=mask)
    q, k = (np.asarray(record[name].values, np.float64) for name in ("query", "key"))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(3)
    rows = {site: merge_rows(found) for site, found in record.choices.items()}
    assert list(rows) == ["@attention"]
    check(rows["@attention"], heads_in_numpy(logits, mask))


def test_in_bfloat16():
    net, x = Net(way="plain"), inputs().astype(jnp.bfloat16)
    nnx.update(net, jax.tree.map(lambda p: p.astype(jnp.bfloat16), nnx.state(net, nnx.Param)))
    q, k = net.attn.q(x), jnp.repeat(net.attn.k(x), 2, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(3).astype(jnp.bfloat16)
    rows = captured(nnx.jit(lambda net, x: net(x)), net, x)["attn@attention"]
    check(rows, heads_in_numpy(scores), rtol=0.02, atol=0.02)


class Layers(nnx.Module):
    def __init__(self, *, remat: bool = False, way: str = "jax"):
        rngs = nnx.Rngs(0)

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: Any) -> Any:
            return Attention(rngs=rngs, scale=3.0, way=way)

        self.blocks, self.remat = make(rngs), remat

    def __call__(self, x: Any) -> Any:
        def block(x: Any, one: Any) -> Any:
            return x + one(x)

        def body(x: Any, one: Any) -> Any:
            return nnx.remat(block)(x, one) if self.remat else block(x, one)

        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)

    def expected(self, x: Any) -> list[dict[str, np.ndarray]]:
        graphdef, state = nnx.split(self.blocks)
        found = []
        for layer in range(3):
            one = nnx.merge(graphdef, jax.tree.map(lambda p, layer=layer: p[layer], state))
            found.append(heads_in_numpy(one.logits(x)))
            x = x + one(x)
        return found


@pytest.mark.parametrize("remat", [False, True])
def test_each_layer_of_a_scan(remat: bool):
    net, x = Layers(remat=remat), inputs()
    expected = net.expected(x)

    @nnx.jit
    def step(net: Any, x: Any) -> Any:
        return nnx.value_and_grad(lambda net: (net(x) ** 2).mean())(net)[0]

    with contextlib.closing(nni.Inspector(net, x, display=False)) as insp:
        insp.run()
        for batch in insp.watch([x], every=1):
            step(net, batch)
        passes = [one.figures.of_choices for one in insp.recording.passes]
    assert len(passes) == 2
    for found in passes:
        keys = [f"blocks[{layer}]@attention" for layer in range(3)]
        assert set(found) == {"blocks@attention", *keys}
        for key, of_layer in zip(keys, expected, strict=True):
            check(found[key], of_layer, rtol=1e-3)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit, nnx.remat])
def test_examples_by_vmap(wrap: Any):
    net, x = Net(way="plain"), inputs()

    def of_each(net: Any, x: Any) -> Any:
        return nnx.vmap(wrap(lambda x, net: net(x[None])[0]), in_axes=(0, None))(x, net)

    rows = captured(of_each, net, x)["attn@attention"]
    check(rows, heads_in_numpy(net.attn.logits(x)))


def test_two_attentions_of_a_call_and_two_calls_of_an_attention():
    class Two(nnx.Module):
        def __init__(self) -> None:
            self.attn = Attention(rngs=nnx.Rngs(0), scale=3.0)

        def __call__(self, x: Any) -> Any:
            q = x.reshape(3, T, 4, 3)
            for scale in (1.0, 2.0):
                x = x + jax.nn.dot_product_attention(q, q * scale, q).reshape(x.shape)
            return self.attn(self.attn(x))

    net, x = Two(), inputs()
    found = captured(net, x)
    assert list(found) == ["@attention", "@attention[1]", "attn@attention"]
    q = np.asarray(x, np.float64).reshape(3, T, 4, 3)
    logits = np.einsum("bqhd,bkhd->bhqk", q, q) / np.sqrt(3)
    check(found["@attention"], heads_in_numpy(logits))
    check(found["@attention[1]"], heads_in_numpy(2 * logits))


def test_what_is_no_attention_has_no_rows():
    """A softmax of a layer, one that mixes with parameters, and a loss."""

    class Others(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.Param(jax.random.normal(jax.random.key(0), (7, WIDTH)))
            self.head = nnx.Linear(WIDTH, 7, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            looked_up = jax.nn.softmax(x @ self.table[...].T) @ self.table[...]
            return jax.nn.log_softmax(self.head(looked_up))

    assert captured(Others(), inputs()) == {}


def test_nothing_is_put_into_a_program_without_attention():
    net = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.gelu)
    _, record = nni.capture(net)(jnp.ones((2, 4)))
    assert record.choices == {}


def test_of_sites_that_are_not_selected_nothing_is_measured():
    net, x = Net(), inputs()
    _, record = nni.capture(net, only="head")(x)
    assert record.choices == {}


def test_a_while_loop_has_none_and_a_branch_that_is_not_taken_counts_nothing():
    class Loops(nnx.Module):
        def __init__(self) -> None:
            self.attn = Attention(rngs=nnx.Rngs(0))

        def __call__(self, x: Any, often: Any, way: Any) -> Any:
            if way is None:
                return nnx.while_loop(
                    lambda c: c[1] < often,
                    lambda c: (c[0], c[1] + 1, c[0](c[2])),
                    (self.attn, 0, x),
                )[2]
            return nnx.cond(way, lambda attn, x: attn(x), lambda attn, x: x, self.attn, x)

    net, x = Loops(), inputs()
    assert captured(net, x, jnp.int32(2), None) == {}
    taken = captured(net, x, None, jnp.array(True))["attn@attention"]
    check(taken, heads_in_numpy(net.attn.logits(x)))
    assert np.isnan(captured(net, x, None, jnp.array(False))["attn@attention"]).all()


def test_a_recording_keeps_them(tmp_path: Any):
    net, x = Net(), inputs()
    with contextlib.closing(nni.Inspector(net, x, display=False)) as insp:
        insp.run()
        insp.save(tmp_path / "run.nni")
        before = insp.recording.heads_frame()
    after = nni.open(tmp_path / "run.nni").recording.heads_frame()
    assert len(before) == 4
    assert before.equals(after)
