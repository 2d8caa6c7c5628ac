"""The positions that count, in effects, sweeps and means: NumPy in float64 on the chosen ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_examples import examples

import nnx_inspector as nni

B, L, D, V = 4, 6, 8, 11
WHERE = lambda tokens, *_: tokens != 0  # noqa: E731
RNG = np.random.default_rng(0)
LENGTHS = np.array([[6], [1], [3], [3]])
T = jnp.asarray(np.where(np.arange(L) < LENGTHS, RNG.integers(1, V, (B, L)), 0))
W = np.asarray(T != 0)


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.up, self.head = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.up(self.embed(tokens))))


def loss(model: Any, tokens: Any) -> Any:
    """Over all positions, as the user wrote it."""
    return -jax.nn.log_softmax(model(tokens))[..., 0].mean()


def plain(site: str = "", change: Any = None) -> np.ndarray:
    """The logits of `Net` in float64, with what one site returns changed."""
    model, found = Net(), {}
    for name in ("up", "head"):
        layer = getattr(model, name)
        found[name] = [np.asarray(x[...], np.float64) for x in (layer.kernel, layer.bias)]
    touch = lambda here, x: change(x) if here == site else x  # noqa: E731
    x = touch("embed", np.asarray(model.embed.embedding[...], np.float64)[np.asarray(T)])
    x = np.maximum(touch("up", x @ found["up"][0] + found["up"][1]), 0)
    return touch("head", x @ found["head"][0] + found["head"][1])


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def effect(clean: np.ndarray, moved: np.ndarray) -> tuple[float, float, float]:
    """Relative change, KL and changed predictions, of the positions that count."""
    a, b = clean[W], moved[W]
    p, q = log_softmax(a), log_softmax(b)
    kl = (np.exp(p) * (p - q)).sum(-1).mean()
    relative = np.linalg.norm(b - a) / np.linalg.norm(a)
    return relative, kl, (a.argmax(-1) != b.argmax(-1)).mean()


def mean_of(x: np.ndarray, mask: np.ndarray, axes: int | tuple[int, ...] = 0) -> np.ndarray:
    """The mean along axes of what counts; where nothing counts, of all."""
    mask = np.broadcast_to(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x.shape)
    count = mask.sum(axes, keepdims=True)
    some = (x * mask).sum(axes, keepdims=True) / np.maximum(count, 1)
    return np.broadcast_to(np.where(count > 0, some, x.mean(axes, keepdims=True)), x.shape)


def mean(x: np.ndarray) -> np.ndarray:
    return mean_of(x, W)


CLEAN = plain()


@pytest.mark.parametrize(("kind", "change"), [(nni.Zero(), np.zeros_like), (nni.Mean(), mean)])
def test_a_sweep_counts_positions(kind: Any, change: Any) -> None:
    how: Any = {"perturbation": kind, "progress": False}
    frame = nni.sweep(Net(), loss, T, sites=["embed", "up", "head"], where=WHERE, **how)
    for row in frame.to_dict("records"):
        moved = plain(row["site"], change)
        found = row["output_change"], row["kl"], row["top1_changed"]
        np.testing.assert_allclose(found, effect(CLEAN, moved), rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(row["loss"], -log_softmax(moved)[..., 0].mean(), rtol=1e-5)


def test_an_inspector_and_its_loops_count_positions() -> None:
    model = Net()
    insp = nni.Inspector(model, T, where=WHERE, only=["", "up"], display=False)
    insp.perturb("up", nni.Mean())
    moved = plain("up", mean)
    relative, kl, top1 = effect(CLEAN, moved)
    insp.step(loss, T)
    found = insp.effect
    np.testing.assert_allclose(
        (found.output_change, found.kl, found.top1_changed), (relative, kl, top1), rtol=1e-4
    )
    np.testing.assert_allclose(found.perturbed["loss"], -log_softmax(moved)[..., 0].mean(), 1e-5)
    assert found.moved[""] == pytest.approx(relative, rel=1e-4)
    insp.run(T)  # without a loss the output is compared
    assert insp.effect.output_change == pytest.approx(relative, rel=1e-4)
    insp.run(jnp.zeros_like(T))  # of nothing there is no change
    assert insp.effect.output_change is None
    insp.run(T)
    frame = insp.sweep(sites="up", perturbation=nni.Mean(), progress=False)
    assert frame.iloc[0]["output_change"] == pytest.approx(relative, rel=1e-4)

    kept: list[np.ndarray] = []
    plain("up", lambda x: kept.append(x) or x)
    # a vmap over examples leaves the mean of each over its own positions
    apart = np.stack([mean_of(x, w) for x, w in zip(kept[0], W, strict=True)])
    call = lambda model, tokens: model(tokens)  # noqa: E731
    each = lambda model, tokens: jax.vmap(lambda one: model(one))(tokens)  # noqa: E731
    for step, expected in (
        (nnx.jit(call), moved),
        (nnx.jit(each), plain("up", lambda _: apart)),
    ):
        for tokens in insp.watch([T], every=1, gradients=False):
            out = step(model, tokens)
        np.testing.assert_allclose(out, expected, atol=1e-5)
    insp.close()


def test_a_function_of_the_model_counts_what_has_the_form_of_its_output() -> None:
    both = lambda model, tokens: (jax.nn.log_softmax(y := model(tokens)), y.mean(1))  # noqa: E731
    insp = nni.Inspector(both, Net(), T, where=WHERE, only=["", "up"], display=False)
    insp.perturb("up", nni.Zero())
    insp.run(T)
    pair = [np.append(log_softmax(y)[W], y.mean(1)) for y in (CLEAN, plain("up", np.zeros_like))]
    expected = np.linalg.norm(pair[1] - pair[0]) / np.linalg.norm(pair[0])
    assert insp.effect.output_change == pytest.approx(expected, rel=1e-4)
    insp.close()
    insp = nni.Inspector(both, Net(), T, where=WHERE, only="up", display=False)
    insp.perturb("up", nni.Zero())
    insp.run(T)  # nothing says which positions of what the model returns count
    assert insp.effect.output_change is None
    insp.close()


class Ensemble(nnx.Module):
    """Members that share what they receive, behind a scan over layers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        split = nnx.split_rngs(splits=2)
        self.layers = split(nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs)))(rngs)
        self.members = split(nnx.vmap(lambda rngs: nnx.Linear(D, 3, rngs=rngs)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        step = nnx.scan(lambda x, one: nnx.relu(one(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = step(x, self.layers)
        return nnx.vmap(lambda one, x: one(x), in_axes=(0, None))(self.members, x).sum(0)


def test_layers_and_members_have_means_of_their_own() -> None:
    model, x = Ensemble(), RNG.normal(size=(B, L, D))
    kernels = [np.asarray(one.kernel[...], np.float64) for one in (model.layers, model.members)]

    def result(site: str) -> np.ndarray:
        touch = lambda here, x: mean(x) if here == site else x  # noqa: E731
        y = x
        for i in range(2):
            y = np.maximum(touch(f"layers[{i}]", y @ kernels[0][i]), 0)
        return sum(touch(f"members[{i}]", y @ kernels[1][i]) for i in range(2))  # pyright: ignore[reportReturnType]

    frame = nni.sweep(
        model,
        lambda model, x: model(x).sum(),
        jnp.asarray(x, jnp.float32),
        sites=["layers", "members"],
        perturbation=nni.Mean(),
        where=W,
        progress=False,
    )
    assert sorted(frame["site"]) == ["layers[0]", "layers[1]", "members[0]", "members[1]"]
    for site, found in zip(frame["site"], frame["output_change"], strict=True):
        clean, moved = result("")[W], result(site)[W]
        expected = np.linalg.norm(moved - clean) / np.linalg.norm(clean)
        assert found == pytest.approx(expected, rel=1e-4), site


class Stack(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        make = nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs))
        self.layers = nnx.split_rngs(splits=2)(make)(rngs)
        self.head = nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        one = nnx.remat(lambda x, layer: nnx.relu(layer(x)))
        step = nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(step(x, self.layers))


def test_a_layer_and_a_part_in_a_step_that_is_differentiated() -> None:
    """The mean of one layer of a scan that is computed again, and of two units of an input."""
    model, x = Stack(), RNG.normal(size=(B, L, D))
    layers, head = (np.asarray(one.kernel[...], np.float64) for one in (model.layers, model.head))

    @nnx.jit
    def step(model: Stack, x: jax.Array) -> Any:
        return nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, x)[0]

    y = np.maximum(mean(np.maximum(x @ layers[0], 0) @ layers[1]), 0)
    y[..., [0, 3]] = mean(y)[..., [0, 3]]
    insp = nni.Inspector(model, jnp.asarray(x, jnp.float32), where=W, display=False)
    insp.perturb("layers[1]", nni.Mean())
    insp.perturb("head", nni.Mean(at="input").only([0, 3]))
    for batch in insp.watch([jnp.asarray(x, jnp.float32)], every=1):
        assert float(step(model, batch)) == pytest.approx(((y @ head) ** 2).mean(), rel=1e-4)
    insp.close()


@examples(8, of=100)
@given(st.integers(0, 2**32), st.sampled_from([0, 1, (0, 1)]), st.sampled_from([(B, L), (B,)]))
def test_a_mean_of_any_positions(seed: int, axes: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    mask, x = rng.random(shape) < 0.4, rng.normal(size=(B, L, 3)).astype(np.float32)
    mask.flat[0] = True
    counts = np.broadcast_to(mask.reshape(*shape, *[1] * (3 - mask.ndim)), x.shape)
    left_out = counts.any(axes, keepdims=True) & ~counts  # which may be anything
    found = nni.Mean(axis=axes, where=mask).apply(jnp.where(left_out, jnp.nan, x))
    np.testing.assert_allclose(found, mean_of(x.astype(np.float64), mask, axes), atol=1e-5)


def test_a_mask_of_ones_own_in_regions_and_calls() -> None:
    model, one, expected = Net(), nni.Mean(where=W), plain("up", mean)
    with nni.perturb("up", one):
        np.testing.assert_allclose(nnx.jit(model)(T), expected, atol=1e-5)
    run = jax.jit(lambda mask: nni.perturbed(model)({"up": nni.Mean(where=mask)}, T))
    np.testing.assert_allclose(run(W), expected, atol=1e-5)
    assert (one.python(), one.python(short=True)) == ("", "nni.Mean(where=bool[4,6])")


@pytest.mark.parametrize(
    ("where", "kind", "words"),
    [
        (WHERE, TypeError, "where= of nni.Inspector, nni.sweep or nni.watch"),
        (np.ones((B, L)), TypeError, "float64[4, 6]"),
        (np.zeros((B, L), bool), ValueError, "all False"),
    ],
)
def test_a_mean_of_no_mask(where: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind) as found:
        nni.Mean(where=where)
    assert words in str(found.value)


def test_what_does_not_fit_is_named() -> None:
    model, wrong = Net(), np.ones((B, L + 1), bool)
    with pytest.raises(ValueError, match=r"'up', float32\[4,6,8\]: where= of shape \(4, 7\) must"):
        nni.perturbed(model)({"up": nni.Mean(where=wrong)}, T)
    how: Any = {"sites": "up", "progress": False}
    with pytest.warns(nni.InspectorWarning, match=r"bool\[4,7\], which fits none"):
        frame = nni.sweep(model, loss, T, where=wrong, **how)
    a, b = CLEAN, plain("up", np.zeros_like)
    assert frame["output_change"][0] == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a))
    for where, words in ((lambda tokens: tokens.missing, "raised Attr"), (lambda t: t, "int32")):
        with pytest.raises(nni.InspectorError, match=words):
            nni.sweep(model, loss, T, where=where, **how)
    with pytest.raises(ValueError, match="all False"):
        nni.sweep(model, loss, T, where=np.zeros((B, L), bool), **how)
    with pytest.raises(TypeError, match="traced array"):
        jax.jit(lambda mask: nni.sweep(model, loss, T, where=mask, **how))(W)
