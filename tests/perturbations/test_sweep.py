"""`sweep` against models that have the ablation built in, and against `perturbed` site by site."""

from __future__ import annotations

import math
import types

import generated
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import leftovers
import models
import numpy as np
import optax
import pytest
from effect_oracle import kl_oracle, relative_oracle, top1_oracle
from flax import nnx
from hypothesis import example, given, settings
from models import batch, rngs

import nnx_inspector as nni
from nnx_inspector import progress
from nnx_inspector._compat import jit
from nnx_inspector.perturbations import sweep as sweeping
from nnx_inspector.perturbations.sweep import sweep
from nnx_inspector.program.analysis.cost import available_bytes, peak_bytes

X = batch(4, 3)


def loss_fn(model, x):
    y = model(x)
    return (y**2).mean(), {"mean": y.mean(), "positive": (y > 0).sum(), "y": y}


def rows(frame):
    return {row["site"]: row for row in frame.to_dict("records")}


def assert_frames_equal(a, b, rtol=1e-5):
    a, b = rows(a), rows(b)
    assert set(a) == set(b)
    for site, row in a.items():
        for name, value in row.items():
            if isinstance(value, float):
                np.testing.assert_allclose(
                    value, b[site][name], rtol=rtol, atol=1e-6, err_msg=f"{site} {name}"
                )


def numbers(nodes):
    return [np.array(x) for x in leftovers.arrays_of(nnx.state(nodes))]


def assert_same_numbers(before, after):
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


# -------------------------------------------------- the ablation built in
# `touch(site, value)` is called on each module's output


class TinyTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        return self.head(x)


def mlp(model, x, touch):
    return touch("", touch("down", model.down(jnp.tanh(touch("up", model.up(x))))))


def cnn(model, x, touch):
    x = nnx.relu(touch("norm", model.norm(touch("conv", model.conv(x)))))
    x = touch("dropout", model.dropout(x.mean(axis=(1, 2))))
    return touch("", touch("head", model.head(x)))


def transformer(model, tokens, touch):
    x, parts = touch("embed", model.embed(tokens)), model.attention
    normed = touch("norm", model.norm(x))
    heads = [
        touch(f"attention/{name}", getattr(parts, name)(normed))
        for name in ("query", "key", "value")
    ]
    mixed = touch("attention/out", parts.out(nnx.dot_product_attention(*heads)))
    return touch("", touch("head", model.head(x + touch("attention", mixed))))


def stacked(model, x, touch):
    kernel, bias = model.blocks.linear.kernel[...], model.blocks.linear.bias[...]
    for i in range(model.depth):
        inner = touch(f"blocks[{i}]/linear", x @ kernel[i] + bias[i])
        x = touch(f"blocks[{i}]", x + jnp.tanh(inner))
    return touch("", x)


def shared(model, x, touch):
    x = touch("first", model.first(x))
    return touch("", touch("first", model.first(jnp.tanh(x))))


def ensemble(model, x, touch):
    kernel, bias = model.members.kernel[...], model.members.bias[...]
    every = jnp.stack([x @ k + b for k, b in zip(kernel, bias, strict=True)])
    return touch("", touch("members", every).mean(axis=0))


def recurrent(model, x, touch):
    cell, out = model.rnn.cell, []
    h = jnp.zeros((x.shape[0], 2))
    for t in range(x.shape[1]):
        i = touch(f"rnn/cell[{t}]/dense_i", cell.dense_i(x[:, t]))
        h = jnp.tanh(i + touch(f"rnn/cell[{t}]/dense_h", cell.dense_h(h)))
        h = touch(f"rnn/cell[{t}]", h)
        out.append(h)
    return touch("", touch("rnn", jnp.stack(out, axis=1)))


def looped(model, x, touch):
    for _ in range(3):
        x = jnp.tanh(touch("linear", model.linear(x)))
    return touch("", x)


TOKENS = jnp.array([[0, 1, 2], [3, 4, 0]])
BY_HAND = {
    "mlp": (lambda: models.MLP(rngs()), X, mlp),
    "conv and BatchNorm": (lambda: models.CNN(rngs()), batch(4, 3, 3, 1), cnn),
    "transformer": (lambda: TinyTransformer(rngs()), TOKENS, transformer),
    "scan": (lambda: models.Stacked(rngs()), X, stacked),
    "scan and remat": (lambda: models.Stacked(rngs(), remat=True), X, stacked),
    "shared": (lambda: models.Shared(rngs()), X, shared),
    "vmap": (lambda: models.Ensemble(rngs()), X, ensemble),
    "rnn": (lambda: models.Recurrent(rngs()), batch(2, 3, 3), recurrent),
    "while": (lambda: models.While(rngs()), X, looped),
}
CHANGE = nni.Apply(lambda a: 0.5 * jnp.roll(a, 1, axis=0) - 0.25)
KINDS_BY_HAND = {"zero": (nni.Zero(), lambda a: 0 * a), "apply": (CHANGE, CHANGE.fn)}


def expected_row(make, x, by_hand, site, change):
    """The expected row of a site: loss and output of the model with the change built in."""
    touched = []

    def touch(name, value):
        touched.append(name)
        return change(value) if name == site else value

    y = nnx.jit(lambda model, x: by_hand(model, x, touch))(make(), x)
    return float((y**2).mean()), y, set(touched)


DAILY = {("transformer", "zero"), ("conv and BatchNorm", "zero"), ("scan and remat", "apply"),
         ("shared", "apply"), ("vmap", "zero"), ("while", "zero")}  # fmt: skip
HAND_CASES = [
    pytest.param(name, kind, marks=() if (name, kind) in DAILY else pytest.mark.long)
    for name in BY_HAND
    for kind in KINDS_BY_HAND
    if not (kind == "apply" and name in ("vmap", "while", "conv and BatchNorm"))
]
"""The change moves examples, which a module in a vmap does not see; there Zero is used."""


@pytest.mark.parametrize(("name", "kind"), HAND_CASES)
def test_each_row_is_that_of_the_hand_written_model(name, kind):
    make, x, by_hand = BY_HAND[name]
    perturbation, change = KINDS_BY_HAND[kind]
    frame = sweep(make(), loss_fn, x, perturbation=perturbation, logits=True, progress=False)
    loss, clean, sites = expected_row(make, x, by_hand, None, change)
    found = rows(frame)
    assert set(found) == sites
    np.testing.assert_allclose(frame.attrs["clean"]["loss"], loss, rtol=1e-5)
    for site in sites:
        expected, y, _ = expected_row(make, x, by_hand, site, change)
        row = found[site]
        np.testing.assert_allclose(row["loss"], expected, rtol=1e-4, atol=1e-6, err_msg=site)
        np.testing.assert_allclose(row["loss_change"], expected - loss, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(row["mean"], y.mean(), rtol=1e-4, atol=1e-5)
        assert row["positive"] == (y > 0).sum()
        np.testing.assert_allclose(
            row["output_change"], relative_oracle([clean], [y]), rtol=1e-3, atol=1e-6
        )
        np.testing.assert_allclose(row["kl"], kl_oracle(clean, y), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(row["top1_changed"], top1_oracle(clean, y), atol=1e-6)
    sizes = frame["loss_change"].abs()
    assert (sizes.diff().dropna() <= 0).all()


# ------------------------------------------------------- every kind, as `perturbed`

UNITS = jnp.array([1.0, 0.0])
VALUES = {
    "zero": nni.Zero(),
    "scale": nni.Scale(0.5),
    "shift": nni.Shift(0.25),
    "noise": nni.Noise(0.3, seed=3),
    "clamp": nni.Clamp(-0.1, 0.2),
    "mean": nni.Mean(),
    "mask of examples": nni.Mask(jnp.array([1.0, 0.0, 0.5, 1.0]), axis=0),
    "patch": nni.Patch(batch(1, 1, seed=2)),
    "patch of a part": nni.Patch(1.0, where=jnp.array([True, False, False, True])[:, None]),
    "cast": nni.Cast(jnp.bfloat16),
    "input": nni.Scale(0.5, at="input"),
    "noise of inputs": nni.Noise(0.3, at="input"),
}


def assert_as_perturbed(model, frame, perturbation, *args, loss_fn=loss_fn):
    measured = frame[frame["why_not"].isna()]
    assert len(measured)
    for row in measured.to_dict("records"):
        copy, perturbed = nnx.clone(model), nnx.jit(nni.perturbed(loss_fn))
        loss, aux = perturbed({row["site"]: perturbation}, copy, *args)
        np.testing.assert_allclose(row["loss"], loss, rtol=1e-4, atol=1e-6, err_msg=row["site"])
        if aux:
            np.testing.assert_allclose(row["mean"], aux["mean"], rtol=1e-4, atol=1e-5)


DAILY_KINDS = {"noise", "mean", "patch of a part", "input"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in DAILY_KINDS else pytest.mark.long) for n in VALUES]
)
def test_every_kind_does_what_it_does_in_perturbed(name):
    model = models.Shared(rngs()) if "noise" in name else models.MLP(rngs())
    frame = sweep(model, loss_fn, X, perturbation=VALUES[name], progress=False)
    assert_as_perturbed(model, frame, VALUES[name], X)
    assert frame.attrs["perturbation"] == type(VALUES[name]).__name__


def test_a_layer_of_a_stack_gets_the_noise_that_perturbed_gives_it():
    model = models.Stacked(rngs())
    frame = sweep(model, loss_fn, X, perturbation=nni.Noise(0.5), progress=False)
    some = frame[frame["site"].isin(["blocks[2]/linear", "blocks[1]"])]
    assert len(some) == 2
    assert_as_perturbed(model, some, nni.Noise(0.5), X)


@pytest.mark.long
def test_layers_can_be_taken_together():
    model = models.Stacked(rngs())
    frame = sweep(model, loss_fn, X, layers=False, progress=False)
    assert set(frame["site"]) == {"", "blocks", "blocks/linear"}
    assert_as_perturbed(model, frame, nni.Zero(), X)


@pytest.mark.long
def test_scans_in_scans_have_an_index_each():
    class Stages(nnx.Module):
        def __init__(self):
            self.stages = nnx.List([])

            @nnx.split_rngs(splits=2)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs):
                return models.Stacked(rngs, depth=2)

            self.stages = make(rngs())

        def __call__(self, x):
            run = nnx.scan(lambda x, s: s(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return run(x, self.stages)

    model = Stages()
    frame = sweep(model, loss_fn, X, sites="stages/**", perturbation=CHANGE, progress=False)
    inner = {f"stages[{i}]/blocks[{j}]{s}" for i in (0, 1) for j in (0, 1) for s in ("", "/linear")}
    assert set(frame["site"]) == inner | {"stages[0]", "stages[1]"}
    assert_as_perturbed(model, frame, CHANGE, X)


@pytest.mark.long
def test_a_site_in_unlike_loops_is_one_site():
    class Mixed(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 3, rngs=rngs())

        def __call__(self, x):
            run = nnx.scan(
                lambda m, x: m(x), in_axes=(nnx.StateAxes({...: None}), nnx.Carry),
                out_axes=nnx.Carry, length=2,
            )  # fmt: skip
            return run(self.linear, jnp.tanh(self.linear(x)))

    model = Mixed()
    frame = sweep(model, loss_fn, X, perturbation=CHANGE, progress=False)
    assert set(frame["site"]) == {"", "linear"}
    assert_as_perturbed(model, frame, CHANGE, X)


def test_other_perturbations_that_are_on_belong_to_the_clean_pass():
    model = models.MLP(rngs())
    with nni.perturb("up", nni.Shift(1.0), model=model):
        frame = sweep(model, loss_fn, X, sites="down", perturbation=CHANGE, progress=False)
    y = nni.perturbed(model)({"up": nni.Shift(1.0), "down": CHANGE}, X)
    np.testing.assert_allclose(frame["loss"][0], (y**2).mean(), rtol=1e-5)


# ------------------------------------------------------------------- gates


def test_a_site_in_a_branch_that_is_not_taken_is_missing_and_not_0():
    model = models.Cond(rngs())
    found = rows(sweep(model, loss_fn, jnp.abs(X), perturbation=CHANGE, progress=False))
    assert set(found) == {"", "positive", "negative"}
    assert math.isnan(found["negative"]["loss"])
    assert math.isnan(found["negative"]["output_change"])
    assert "does not pass through it" in found["negative"]["why_not"]
    y = CHANGE.fn(model.positive(jnp.abs(X)))
    np.testing.assert_allclose(found["positive"]["loss"], (y**2).mean(), rtol=1e-5)


def test_what_is_nan_behind_one_gate_stays_there_and_ranks_first():
    model = models.MLP(rngs())
    nan_for_down = nni.Apply(lambda a: a * jnp.nan if a.shape[-1] == 2 else a)
    frame = sweep(model, loss_fn, X, perturbation=nan_for_down, progress=False)
    assert list(frame["site"])[2] == "up"
    assert frame["loss"].isna().tolist() == [True, True, False]
    assert frame["output_change"].isna().tolist() == [True, True, False]
    assert abs(frame["loss_change"][2]) < 1e-6
    assert abs(frame["output_change"][2]) < 1e-6


def test_no_change_is_relative_to_an_output_of_zeros():
    model = models.MLP(rngs())
    model.down.kernel[...] = jnp.zeros_like(model.down.kernel[...])
    frame = sweep(model, loss_fn, X, perturbation=nni.Shift(1.0), progress=False)
    changes = {site: row["loss_change"] for site, row in rows(frame).items()}
    assert changes == {"up": 0, "down": 1, "": 1}
    assert frame["output_change"].isna().all()
    assert frame["why_not"].isna().all()  # the loss was measured


def test_infinite_losses_rank_before_finite_ones():
    model = models.MLP(rngs())
    infinite = nni.Apply(lambda a: a + jnp.inf if a.shape[-1] == 2 else 2 * a)
    frame = sweep(model, lambda m, x: m(x).mean(), X, perturbation=infinite, progress=False)
    assert frame["loss"].tolist()[:2] == [math.inf, math.inf]
    assert frame["output_change"].tolist()[:2] == [math.inf, math.inf]
    assert frame["site"][2] == "up"


@pytest.mark.long
def test_a_loss_that_holds_a_gradient_has_the_perturbation_in_it():
    model = models.MLP(rngs())

    def penalty(model, x):
        return (jax.grad(lambda x: model(x).sum())(x) ** 2).mean(), None

    frame = sweep(model, penalty, X, perturbation=nni.Scale(2.0), progress=False)
    assert_as_perturbed(model, frame, nni.Scale(2.0), X, loss_fn=penalty)


# --------------------------------------------------------- chunks and programs


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_size_of_a_chunk_changes_nothing(chunk):
    model = models.Stacked(rngs())
    whole = sweep(model, loss_fn, X, perturbation=nni.Noise(0.5), progress=False)
    frame = sweep(model, loss_fn, X, perturbation=nni.Noise(0.5), chunk=chunk, progress=False)
    assert_frames_equal(whole, frame)
    assert frame.attrs["chunk"] == min(chunk, 8)
    assert frame.attrs["clean"] == pytest.approx(whole.attrs["clean"], rel=1e-6)


def compiles(model, **kwargs):
    events = []
    sweep(model, loss_fn, X, progress=False, **kwargs)  # small programs of jax itself
    undo = jit.compilation_events(lambda kind, *_: events.append(kind))
    try:
        frame = sweep(model, loss_fn, X, progress=False, **kwargs)
    finally:
        undo()
    return events.count("compile"), len(frame)


@pytest.mark.parametrize("chunk", [None, pytest.param(3, marks=pytest.mark.long)])
def test_one_program_is_compiled_however_many_sites_there_are(chunk):
    few, sites = compiles(models.Stacked(rngs(), depth=2), chunk=chunk)
    many, more = compiles(models.Stacked(rngs(), depth=9), chunk=chunk)
    assert (few, many) == (1, 1)
    assert more > sites


def test_the_loss_function_is_traced_once():
    calls = []

    def counted(model, x):
        calls.append(1)
        return model(x).mean()

    sweep(models.MLP(rngs()), counted, X, chunk=1, progress=False)
    assert len(calls) == 1


def test_a_program_that_needs_more_than_there_is_is_made_smaller(monkeypatch):
    model = models.Stacked(rngs(), depth=9)
    whole = sweep(model, loss_fn, batch(64, 3), progress=False)
    monkeypatch.setattr(sweeping, "peak_bytes", lambda jaxpr: 0)
    monkeypatch.setattr(sweeping, "available_bytes", lambda device: 20_000)
    small = sweep(model, loss_fn, batch(64, 3), progress=False)
    assert 1 <= small.attrs["chunk"] < whole.attrs["chunk"]
    assert_frames_equal(whole, small)


def test_what_a_program_needs_is_counted_from_the_first_to_the_last_use():
    def f(x):
        y = jnp.sin(x)
        z = jnp.cos(y)  # y and z are alive, 4 kB each
        return z.sum()

    assert 8000 <= peak_bytes(jax.make_jaxpr(f)(jnp.ones(1000))) <= 8100

    def scanned(x):
        return jax.lax.scan(lambda c, _: (jnp.cos(jnp.sin(c)), c.sum()), x, None, length=50)

    assert 12000 <= peak_bytes(jax.make_jaxpr(scanned)(jnp.ones(1000))) <= 12500
    assert available_bytes(jax.devices()[0]) > 1 << 20


def test_memory_of_a_device_is_what_its_figures_say():
    figures = {"bytes_limit": 1000, "bytes_in_use": 300}
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: figures)
    assert available_bytes(device) == 700
    unknown = types.SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    assert available_bytes(unknown) > 1 << 20


# -------------------------------------------------------- what stays as it is


def test_model_rng_statistics_and_optimizer_stay_bitwise():
    model = models.CNN(rngs())
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def loss(model, optimizer, x):
        return model(x).mean() + 0.0 * optimizer.step[...]

    objects, before = leftovers.objects(model), numbers((model, optimizer))
    with leftovers.nothing_left():
        sweep(model, loss, optimizer, batch(4, 3, 3, 1), progress=False)
    assert len(before) > 8
    assert_same_numbers(before, numbers((model, optimizer)))
    found = leftovers.object_changes(objects, leftovers.objects(model), exactly=True)
    for _, same, attributes in found.values():
        assert same
        assert all(unchanged for _, _, unchanged in attributes)


def test_a_sweep_that_fails_leaves_nothing_behind():
    model = models.Fails(rngs())
    before = numbers(model)
    with leftovers.nothing_left(), pytest.raises(models.ForwardError):
        sweep(model, lambda m, x: m(x).mean(), X, progress=False)
    assert_same_numbers(before, numbers(model))


# --------------------------------------------------------------- measures


def test_without_the_models_own_output_its_change_is_missing():
    frame = sweep(models.MLP(rngs()), lambda m, x: m.down(m.up(x)).mean(), X, progress=False)
    assert set(frame["site"]) == {"up", "down"}
    assert frame[["output_change", "kl", "top1_changed"]].isna().all(axis=None)
    assert frame["loss"].notna().all()


@pytest.mark.parametrize(
    ("logits", "has"), [(None, False), (True, True), (False, False), (lambda y: 2 * y, True)]
)
def test_logits_are_what_the_caller_says(logits, has):
    model = models.MLP(rngs())
    frame = sweep(model, loss_fn, X, sites="up", logits=logits, progress=False)
    assert frame["kl"].notna().all() == has
    assert frame["top1_changed"].notna().all() == has
    if callable(logits):
        clean, zeroed = model(X), mlp(model, X, lambda n, a: 0 * a if n == "up" else a)
        expected = kl_oracle(2 * clean, 2 * zeroed)
        np.testing.assert_allclose(frame["kl"], expected, rtol=1e-4)


def test_logits_of_a_tree_of_outputs():
    model = models.TreeOutput(rngs())
    args, kwargs = (X,), {"sites": "", "progress": False}

    def loss(model, x):
        return sum(a.mean() for a in jax.tree.leaves(model(x)) if a.dtype == jnp.float32)

    assert sweep(model, loss, *args, **kwargs)["kl"].isna().all()
    with pytest.raises(TypeError, match="logits=True is for an output of one array"):
        sweep(model, loss, *args, logits=True, **kwargs)


def test_a_scalar_of_aux_with_a_name_of_ours_gets_another():
    def loss(model, x):
        return model(x).mean(), {
            "kl": 3.0,
            "loss": model(x).sum(),
            "name": "text",
            "n": jnp.int32(2),
        }

    frame = sweep(models.MLP(rngs()), loss, X, progress=False)
    assert list(frame.columns) == [
        "site", "loss", "loss_change", "aux_kl", "aux_kl_change", "aux_loss", "aux_loss_change",
        "n", "n_change", "output_change", "kl", "top1_changed", "why_not",
    ]  # fmt: skip
    assert frame.attrs["clean"]["aux_kl"] == 3.0
    assert frame.attrs["clean"]["n"] == 2.0


# ------------------------------------------------------------ sites and errors


def test_where_it_has_no_meaning_a_site_is_skipped_and_the_frame_says_why():
    model = TinyTransformer(rngs())
    scale = nni.Scale(0.5, at="input")
    frame = sweep(model, loss_fn, TOKENS, perturbation=scale, progress=False)
    found = rows(frame)
    for site in ("", "embed"):
        assert "needs floating-point values" in found[site]["why_not"]
        assert "int32[2,3]" in found[site]["why_not"]
        assert math.isnan(found[site]["loss"])
    assert set(list(frame["site"])[-2:]) == {"", "embed"}
    assert_as_perturbed(model, frame[frame["site"] == "norm"], scale, TOKENS)
    by_shape = sweep(
        models.MLP(rngs()), loss_fn, X, perturbation=nni.Patch(batch(4, 4)), progress=False
    )
    assert "does not broadcast" in rows(by_shape)["down"]["why_not"]
    assert math.isfinite(rows(by_shape)["up"]["loss"])


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"sites": "embed", "perturbation": nni.Scale(2.0, at="input")}, TypeError, "needs float"),
        ({"sites": "embed", "perturbation": nni.Shift(jnp.ones(7))}, ValueError, "'embed'.*broad"),
        ({"sites": "enbed"}, ValueError, "matches no site.*'embed'"),
        ({"sites": ["**", "unused"]}, ValueError, "'unused' cannot be .*the call does not reach"),
        ({"sites": nnx.BatchNorm}, ValueError, "BatchNorm"),
        ({"perturbation": nni.StopGradient()}, TypeError, "changes only gradients"),
        ({"perturbation": nni.ParameterNoise(0.1)}, TypeError, "acts on parameters"),
        ({"perturbation": nni.Zero}, TypeError, r"instance: nni\.Zero\(\)"),
        ({"perturbation": 0.0}, TypeError, "got float"),
        ({"chunk": 0}, ValueError, "chunk must be a number of passes"),
        ({"chunk": True}, ValueError, "chunk must be a number of passes"),
    ],
)
def test_errors_name_the_site_and_a_way_out(kwargs, error, text):
    model = TinyTransformer(rngs())
    model.unused = nnx.Linear(4, 4, rngs=rngs())
    with pytest.raises(error, match=text):
        sweep(model, loss_fn, TOKENS, progress=False, **kwargs)


@pytest.mark.parametrize(
    ("loss", "text"),
    [(lambda m, x: m(x), r"float32\[4, 2\]"), (lambda m, x: (m(x), "text")[1], "returned str")],
)
def test_a_loss_that_is_no_scalar_is_an_error(loss, text):
    with pytest.raises(TypeError, match=f"must return a real scalar.*{text}"):
        sweep(models.MLP(rngs()), loss, X, progress=False)


def test_what_is_no_model_no_function_or_traced_is_an_error():
    model = models.MLP(rngs())
    with pytest.raises(TypeError, match=r"must be an nnx\.Module"):
        sweep(loss_fn, model, X)
    with pytest.raises(TypeError, match="takes a function loss_fn"):
        sweep(model, X)
    with pytest.raises(nni.InspectorError, match="cannot be part of a traced function"):
        nnx.jit(lambda m, x: len(sweep(m, loss_fn, x)))(model, X)


def test_sites_by_type_by_predicate_and_by_method():
    model = models.MLP(rngs())
    for sites in (nnx.Linear, lambda path, module: len(path) == 1, ["up", "down"]):
        assert set(sweep(model, loss_fn, X, sites=sites, progress=False)["site"]) == {"up", "down"}

    class Encoder(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 3, rngs=rngs())

        def encode(self, x):
            return self.linear(x)

    encoder = Encoder()
    frame = sweep(encoder, lambda m, x: m.encode(x).mean(), X, sites=":encode", progress=False)
    assert list(frame["site"]) == [":encode"]


# ---------------------------------------------------- progress, stop, interrupt


def test_progress_is_told_after_each_chunk():
    told = []
    sweep(models.Stacked(rngs()), loss_fn, X, chunk=3, progress=lambda *args: told.append(args))
    assert told == [(0, 7), (2, 7), (5, 7), (7, 7)]


def test_stopped_it_returns_what_was_measured():
    model = models.Stacked(rngs())
    whole = sweep(model, loss_fn, X, progress=False)
    part = sweep(model, loss_fn, X, chunk=2, progress=lambda done, total: done >= 3)
    assert part.attrs["stopped"] is True
    assert len(part) == 3
    assert len(part.attrs["unmeasured"]) == 4
    assert set(part["site"]) | set(part.attrs["unmeasured"]) == set(whole["site"])
    kept = whole[whole["site"].isin(part["site"])]
    assert_frames_equal(kept, part)
    assert whole.attrs["stopped"] is False
    assert whole.attrs["unmeasured"] == []
    done = sweep(model, loss_fn, X, chunk=2, progress=lambda done, total: done == total)
    assert done.attrs["stopped"] is False


def test_interrupted_it_returns_what_was_measured_if_anything_was():
    def interrupt_at(number):
        def progress(done, total):
            if done == number:
                raise KeyboardInterrupt

        return progress

    model = models.Stacked(rngs())
    part = sweep(model, loss_fn, X, chunk=2, progress=interrupt_at(3))
    assert part.attrs["stopped"] is True
    assert len(part) == 3
    with pytest.raises(KeyboardInterrupt):
        sweep(model, loss_fn, X, chunk=1, progress=interrupt_at(0))


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_a_terminal_has_a_line_and_a_file_has_nothing(monkeypatch, capsys):
    model = models.MLP(rngs())
    sweep(model, loss_fn, X)
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    sweep(model, loss_fn, X, chunk=4)
    assert terminal.text == "\rsweep: 0 of 3\rsweep: 3 of 3\n"
    sweep(model, loss_fn, X, progress=False)
    assert terminal.text.count("\n") == 1


def test_in_a_notebook_there_is_a_bar_whose_button_stops_the_sweep(monkeypatch):
    shown = []

    class Pressed(progress.Bar):
        def display(self):
            shown.append(self)

        def report(self, done, total):
            if done == 3:
                self.button.click()
            return super().report(done, total)

    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress, "Bar", Pressed)
    frame = sweep(models.Stacked(rngs()), loss_fn, X, chunk=2)
    assert frame.attrs["stopped"] is True
    assert len(frame) == 3
    (bar,) = shown
    assert (bar.bar.value, bar.bar.max) == (3, 7)
    assert bar.text.value == "sweep: 3 of 7, stopped"
    assert bar.button.comm is None  # closed
    assert not progress.in_notebook.__closure__


# ------------------------------------------------------------- generated models


def check_generated(one, perturbation, chunk):
    model, x = generated.make(one, ()), batch(*generated.SHAPE)
    before = numbers(model)
    frame = sweep(
        model, loss_fn, x, perturbation=perturbation, chunk=chunk, logits=False, progress=False
    )
    assert_same_numbers(before, numbers(model))
    assert_as_perturbed(model, frame, perturbation, x)


SOME = st.sampled_from([nni.Zero(), nni.Scale(0.5), nni.Noise(0.1), nni.Clamp(-0.5, 0.5)])


COPIED = generated.SPECS.filter(lambda one: not one.kinds & generated.CLOSES_OVER)
"""The parts that the clone perturbed by hand has in common with the model."""


@pytest.mark.long
@pytest.mark.filterwarnings(r"ignore:\s*Using 'Module:DeprecationWarning")  # sow, perturb
@settings(max_examples=60)
@given(COPIED, SOME, st.sampled_from([None, 1, 2]))
@example(generated.spec("attention"), nni.Zero(), 2)
def test_generated_models(one, perturbation, chunk):
    check_generated(one, perturbation, chunk)


@pytest.mark.long
def test_two_generated_models():
    check_generated(generated.spec("lstm"), nni.Scale(0.5), 4)
    check_generated(generated.spec("attention"), nni.Noise(0.1), None)
