"""The positions that count, in watched loops and on screen: what a record of the same step has."""

from __future__ import annotations

import functools
import inspect
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from inside import inside, shown_of

import nnx_inspector as nni
from nnx_inspector.program.editing.position_masks import where_of
from nnx_inspector.screen.export.snapshot import snapshot

B, L, D, V = 4, 6, 8, 11
WHERE = lambda tokens, *_: tokens != 0  # noqa: E731


def tokens_of(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, L + 1, (B, 1))
    return jnp.asarray(np.where(np.arange(L) < lengths, rng.integers(1, V, (B, L)), 0))


BATCHES = [tokens_of(i) for i in range(3)]


class Net(nnx.Module):
    def __init__(self, *, remat: bool = True) -> None:
        rngs, self.call = nnx.Rngs(0), remats if remat else calls
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.a, self.b = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.b(self.call(self.a, self.embed(tokens)))


def calls(layer: nnx.Linear, x: jax.Array) -> jax.Array:
    return nnx.relu(layer(x))


remats = nnx.remat(calls)


def loss(model: Net, tokens: Any) -> Any:
    return (model(tokens) ** 2).mean()


def plain_step(model: Net, optimizer: Any, tokens: Any) -> Any:
    value, grads = nnx.value_and_grad(loss)(model, tokens)
    optimizer.update(model, grads)
    return value


def still(model: Net) -> Any:
    """An optimizer that moves nothing, so that each step is of the same model."""
    return nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)


def require_same(found: Any, tokens: Any) -> None:
    """What a recording has of a step is what a record has; a record has oracles of its own."""
    (_, record), _ = nni.value_and_grad(loss, where=WHERE)(Net(), tokens)
    for site in record:
        entry = record[site]
        for quantity, expected in (("output", entry.output), ("gradient", entry.gradient)):
            one = found(site, quantity)
            figures = expected.mean, expected.std, expected.min, expected.max
            assert (one.size, one.zeros) == (expected.size, expected.zeros)
            close = pytest.approx(figures, rel=1e-4, abs=1e-6)
            assert (one.mean, one.std, one.min, one.max) == close
    assert found("embed", "output").size == int((tokens != 0).sum()) * D


@pytest.mark.parametrize("how", ["jit", "eager", "halves", "functional"])
def test_a_watched_step_counts_what_a_record_does(how: str) -> None:
    model = Net(remat=how != "halves")
    step: Any = nnx.jit(plain_step) if how == "jit" else plain_step
    if how == "halves":  # the two halves of the gradient are two programs
        forward = nnx.jit(lambda model, tokens: loss(model, tokens))

        def step(model: Net, optimizer: Any, tokens: Any) -> Any:
            return nnx.value_and_grad(forward)(model, tokens)

    if how == "functional":

        @jax.jit
        def run(state: Any, tokens: Any) -> Any:
            of = lambda state: loss(nnx.merge(graphdef, state), tokens)  # noqa: E731
            return jax.value_and_grad(of)(state)

        graphdef = nnx.graphdef(model)
        step = lambda model, optimizer, tokens: run(nnx.state(model), tokens)  # noqa: E731
    optimizer = still(model)
    with nni.watch(model, every=1, where=WHERE) as recording:
        for tokens in BATCHES:
            step(model, optimizer, tokens)
    for number, tokens in enumerate(BATCHES):
        one = recording.passes[number]
        require_same(lambda site, what, one=one: one.summary(site, what), tokens)


def test_a_backward_pass_that_computes_again_by_itself_is_named() -> None:
    """The program of the backward half has no mask: the forward half kept none for it."""
    model, forward = Net(), nnx.jit(loss)
    with pytest.warns(nni.InspectorWarning, match="gradients there are measured at all positions"):
        with nni.watch(model, every=1, where=WHERE) as recording:
            nnx.value_and_grad(forward)(model, BATCHES[0])
    count = int((BATCHES[0] != 0).sum())
    assert recording.summary("a").size == count * D
    assert recording.summary("b", "gradient").size == count * 3
    assert recording.summary("a", "gradient").size == B * L * D


def test_each_iteration_of_a_loop_on_the_device_has_its_mask() -> None:
    model, batches = Net(), jnp.stack(BATCHES)

    @nnx.jit
    def epoch(model: Net, batches: Any) -> Any:
        def one(model: Net, tokens: Any) -> Any:
            value, _ = nnx.value_and_grad(loss)(model, tokens)
            return model, value

        return nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, batches)[1]

    with nni.watch(model, every=1, where=WHERE) as recording:
        epoch(model, batches)
    for one, tokens in zip(recording.passes, BATCHES, strict=True):
        require_same(lambda site, what, one=one: one.summary(site, what), tokens)


def test_each_call_of_a_step_has_its_own_mask() -> None:
    model = Net()

    @nnx.jit
    def step(model: Net, batches: Any) -> Any:
        return sum(nnx.value_and_grad(loss)(model, tokens)[0] for tokens in batches)

    with nni.watch(model, every=1, where=WHERE) as recording:
        step(model, BATCHES)  # several calls of the model in a region are several passes
    counts = [int((tokens != 0).sum()) * D for tokens in BATCHES]
    assert [one.summary("a").size for one in recording.passes] == counts
    gradients = [one.summary("a", "gradient") for one in recording.passes]
    assert sum(one.size for one in gradients if one is not None) == sum(counts)


def test_one_argument_everywhere() -> None:
    for f in (
        *(nni.capture, nni.value_and_grad, nni.watch, nni.Inspector.__init__),
        *(nni.sweep, nni.top_examples, nni.propagation),
    ):
        assert inspect.signature(f).parameters["where"].default is None


def test_an_inspector_counts_in_all_that_it_measures() -> None:
    model = Net()
    tokens = BATCHES[0]
    insp = nni.Inspector(model, tokens, where=WHERE, display=False)
    count = int((tokens != 0).sum())
    assert insp.recording.summary("a").size == count * D
    insp.run(BATCHES[1])
    assert insp.recording.summary("a").size == int((BATCHES[1] != 0).sum()) * D
    insp.step(loss, tokens)
    require_same(insp.recording.summary, tokens)
    values = np.asarray(insp.values("b"), np.float64)[np.asarray(tokens != 0)]
    found = insp.units("b")
    np.testing.assert_allclose(found.mean, values.mean(0), atol=1e-5)
    assert found.size.tolist() == [count] * 3
    step, optimizer = nnx.jit(plain_step), still(model)
    for batch in insp.watch(BATCHES, every=1):
        step(model, optimizer, batch)
    require_same(insp.recording.summary, BATCHES[-1])
    insp.close()


class Pooled(Net):
    """A network whose own output has no positions."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return super().__call__(tokens).mean(1)


@pytest.mark.parametrize("how", ["inspector", "watch"])
def test_a_recording_and_the_screen_say_which_positions_count(
    tmp_path: pathlib.Path, how: str
) -> None:
    model, file = Pooled(), tmp_path / "run.nni"
    if how == "inspector":
        insp = nni.Inspector(model, BATCHES[0], where=WHERE, display=False)
        insp.save(file)
        assert insp.to_html(tmp_path / "run.html") > 0
        layout, state = inside(insp).view.layout, inside(insp).view.state_at_rest()
        assert layout is not None
        assert state is not None
        of: Any = {"layout": layout, "state": state, "findings": (), "saved": "noon"}
        told = [insp.report(), snapshot(recording=insp.recording, **of)]
        assert {site.key for site in layout.sites if site.counted} == {"embed", "a", "b"}
        insp.close()
    else:
        told = []
        with nni.watch(model, every=1, where=WHERE, save=file):
            nnx.jit(loss)(model, BATCHES[0])
    run = nni.open(file)
    assert run.recording.where == nni.load(file).where == "tokens != 0"
    layout = shown_of(run).layout
    assert layout is not None
    assert layout.where == "tokens != 0"
    assert {site.key for site in layout.sites if site.counted} == {"embed", "a", "b"}
    for text in [*told, run.report()]:
        assert "ounts only positions where tokens != 0" in text.replace("\\", "")
    with nni.watch(model, every=1, save=file, start=1):  # goes on without where=
        nnx.jit(loss)(model, BATCHES[1])
    assert (nni.load(file).where, len(nni.load(file))) == ("", 2)
    run.close()


def padded(tokens: Any, *_: Any) -> Any:
    return tokens != 0


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (WHERE, "tokens != 0"),
        (padded, "padded(...)"),
        (functools.partial(padded), "partial(...)"),
        (np.ones((4, 6), bool), "a mask bool[4,6] is True"),
        (lambda t, *_: (t != 0) & (t < 9), "(t != 0) & (t < 9)"),
        (eval("lambda t: t != 0"), "a lambda"),  # has no source
    ],
)
def test_positions_in_words(where: Any, words: str) -> None:
    found = where_of(where)
    assert found is not None
    assert found.words == words


def test_only_some_sites_of_a_loop() -> None:
    model, step = Net(), nnx.jit(plain_step)
    with nni.watch(model, every=1, only="a", where=WHERE) as recording:
        step(model, still(model), BATCHES[0])
    assert recording.summary("a").size == int((BATCHES[0] != 0).sum()) * D


def test_perturbations_and_bare_steps_go_on_as_before() -> None:
    model, step = Net(), nnx.jit(plain_step)
    insp = nni.Inspector(model, BATCHES[0], where=WHERE, display=False)
    insp.perturb("a", nni.Zero())
    optimizer, losses = still(model), list[float]()
    for batch in insp.watch(BATCHES * 2, every=2):
        losses.append(float(step(model, optimizer, batch)))
    insp.close()
    with nni.perturb("a", nni.Zero()):
        expected = [float(loss(model, batch)) for batch in BATCHES * 2]
    assert losses == pytest.approx(expected)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (lambda tokens: tokens.missing, "raised AttributeError"),
        (lambda tokens: tokens, "int32[4,6]"),
        (lambda a, b: a, "raised TypeError"),
        (np.ones((B, L + 1), bool), "bool[4,7], which fits none"),
    ],
)
def test_what_is_no_mask_warns_and_the_loop_goes_on(where: Any, words: str) -> None:
    model, step = Net(), nnx.jit(plain_step)
    optimizer = still(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with nni.watch(model, every=1, where=where) as recording:
            losses = [float(step(model, optimizer, tokens)) for tokens in BATCHES]
    assert losses == pytest.approx([float(loss(model, tokens)) for tokens in BATCHES])
    assert recording.summary("a").size == B * L * D
    said = [str(one.message) for one in caught if issubclass(one.category, nni.InspectorWarning)]
    assert any(words in one and "All positions are measured" in one for one in said), said


def test_a_batch_of_which_nothing_counts_is_named() -> None:
    model, step = Net(), nnx.jit(plain_step)
    optimizer = still(model)
    with pytest.warns(nni.InspectorWarning, match="selects no position"):
        with nni.watch(model, every=1, where=WHERE) as recording:
            step(model, optimizer, jnp.zeros((B, L), int))
    assert recording.summary("a").size == 0
