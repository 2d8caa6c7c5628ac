"""The state of optimizers as a measured pass begins: each figure is that of NumPy."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from inside import inside
from optimizer_models import Plain, batches, carried, loss_of, trained

import nnx_inspector as nni
from nnx_inspector.screen.frames import table_of
from nnx_inspector.stats.summary import STATISTICS

ADAM = {"b1": 0.9, "b2": 0.999}


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss


def moments(steps):
    """Adam's moments as each step begins, in float64, from the gradients of the same training."""
    model = Plain()
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    found, mu, nu = [], None, None
    for x in batches(steps):
        grads = nnx.grad(loss_of)(model, x)
        flat = {"/".join(p): np.asarray(v[...], np.float64) for p, v in nnx.to_flat_state(grads)}
        if mu is None:
            mu, nu = ({p: np.zeros_like(g) for p, g in flat.items()} for _ in range(2))
        found.append((mu, nu))
        mu = {p: 0.9 * mu[p] + 0.1 * g for p, g in flat.items()}
        nu = {p: 0.999 * nu[p] + 0.001 * g**2 for p, g in flat.items()}
        optimizer.update(model, grads)
    return found


def check(recording, *, every=1, head="optimizer/"):
    expected = moments(recording.passes[-1].step + 1)
    for one in recording.passes:
        states = one.states
        assert one.step % every == 0
        for name, of in zip(("mu", "nu"), expected[one.step], strict=True):
            for path, value in of.items():
                summary = states[f"{head}{name}/{path}"]
                assert summary.size == value.size
                for figure in ("mean", "std", "min", "max"):
                    assert getattr(summary, figure) == pytest.approx(
                        getattr(value, figure)(), rel=2e-4, abs=1e-9
                    )
        assert states[f"{head}count"].max == one.step


def test_moments_and_counts_are_those_of_adam():
    recording = trained(Plain(), optax.adam(0.01), batches(5))
    check(recording)
    assert recording.states[:2] == ("optimizer/count", "optimizer/mu/body/bias")
    steps, summaries = recording.series("optimizer/nu/used/kernel", "state")
    assert steps == [0, 1, 2, 3, 4]
    counts = summaries[-1].whole_bins().sum()
    assert counts == summaries[-1].size == 32  # the histogram holds all of them


def test_a_watched_loop_has_them():
    model = Plain()
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    insp = nni.Inspector(model, batches(1)[0], display=False)
    try:
        for x in insp.watch(batches(7), every=3, optimizer=optimizer):
            step(model, optimizer, x)
        check(insp.recording, every=3)
    finally:
        insp.close()


def test_an_update_outside_jit_has_them():
    model = Plain()
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    with nni.watch(model, every=2, optimizer=optimizer) as recording:
        for x in batches(5):
            optimizer.update(model, nnx.grad(loss_of)(model, x))
    check(recording, every=2)


def test_a_state_that_the_loop_carries_and_donates_has_them():
    model, tx = Plain(), optax.adam(0.01)
    graphdef, params = nnx.split(model)
    state = tx.init(params)

    def update(params, state, x):
        grads = jax.grad(lambda params: loss_of(nnx.merge(graphdef, params), x))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(update, donate_argnums=(0, 1))
    with nni.watch(model, every=3, optimizer=lambda: state) as recording:
        for x in batches(7):
            params, state = donating(params, state, x)
    check(recording, every=3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    params: Any
    opt_state: Any


def test_a_train_state_of_the_users_has_them():
    model, tx = Plain(), optax.adam(0.01)
    graphdef, params = nnx.split(model)
    held = TrainState(params, tx.init(params))

    @jax.jit
    def update(held, x):
        grads = jax.grad(lambda params: loss_of(nnx.merge(graphdef, params), x))(held.params)
        updates, state = tx.update(grads, held.opt_state, held.params)
        return TrainState(optax.apply_updates(held.params, updates), state)

    with nni.watch(model, every=1, optimizer=lambda: held) as recording:
        for x in batches(4):
            held = update(held, x)
    check(recording)


def test_a_model_and_optimizer_has_the_state_alone():
    model = Plain()
    both = nnx.ModelAndOptimizer(model, optax.adam(0.01))

    @nnx.jit
    def update(both, x):
        both.update(nnx.grad(loss_of)(both.model, x))

    with nni.watch(model, every=1, optimizer=both) as recording:
        for x in batches(4):
            update(both, x)
    check(recording)
    assert len(recording.states) == 1 + 2 * 4


class Momentum(nnx.Module):
    """An optimizer written by hand, which holds the model."""

    def __init__(self, model):
        self.model = model
        self.trace = nnx.data(
            {
                "/".join(p): nnx.Variable(jnp.zeros(v.shape))
                for p, v in nnx.to_flat_state(nnx.state(model))
            }
        )

    def update(self, grads):
        for path, _ in nnx.to_flat_state(nnx.state(self.model)):
            trace = self.trace["/".join(path)]
            trace[...] = 0.9 * trace[...] + dict(nnx.to_flat_state(grads))[path][...]
            node = self.model
            for name in path:
                node = getattr(node, name)
            node[...] -= 0.1 * trace[...]


def test_an_optimizer_by_hand_has_its_variables_without_the_models():
    model = Plain()
    own = Momentum(model)
    expected = []
    with nni.watch(model, every=1, optimizer=own) as recording:
        for x in batches(3):
            expected.append(np.asarray(own.trace["used/kernel"][...], np.float64))
            own.update(nnx.grad(loss_of)(model, x))
    assert len(recording.states) == 4
    (key,) = (key for key in recording.states if "used" in key and "kernel" in key)
    for one, value in zip(recording.passes, expected, strict=True):
        assert one.states[key].std == pytest.approx(value.std(), rel=1e-4)


SCALARS = {
    "MultiSteps": (
        optax.MultiSteps(optax.adam(0.01), 3),
        {"mini_step": lambda i: i % 3, "gradient_step": lambda i: i // 3},
    ),
    "apply_if_finite": (
        optax.apply_if_finite(optax.adam(0.01), 5),
        {"total_notfinite": lambda i: int(i > 2), "notfinite_count": lambda i: int(i == 3)},
    ),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 10)),
        {"hyperparams/learning_rate": lambda i: 0.1 * (1 - max(i - 1, 0) / 10)},
    ),
}


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_of_a_state_are_figures_over_the_steps(name):
    tx, expected = SCALARS[name]
    bad = (2,) if name == "apply_if_finite" else ()
    recording = trained(Plain(), tx, batches(8, bad=bad))
    for key, of in expected.items():
        steps, found = recording.series(f"optimizer/{key}", "state")
        assert steps == list(range(8))
        assert [one.max for one in found] == pytest.approx([of(i) for i in steps], rel=1e-5)


def test_keys_name_moments_alone_as_far_as_they_differ():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01), optax.trace(0.9))
    states = trained(Plain(), tx, batches(1)).states
    assert "optimizer/trace/used/kernel" in states
    assert "optimizer/mu/used/kernel" in states
    twice = trained(Plain(), optax.chain(optax.adam(0.01), optax.adam(0.01)), batches(1)).states
    assert {"optimizer/0/0/mu/used/bias", "optimizer/1/0/mu/used/bias"} <= set(twice)
    assert len(set(twice)) == 2 * 9


def test_two_optimizers_are_told_apart_by_name():
    model = Plain()
    first = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.PathContains("body"))
    second = nnx.Optimizer(model, optax.sgd(0.01, momentum=0.9), wrt=nnx.PathContains("used"))

    @nnx.jit
    def both(model, first, second, x):
        for one, part in ((first, "body"), (second, "used")):
            chosen = nnx.DiffState(0, nnx.PathContains(part))
            one.update(model, nnx.grad(loss_of, argnums=chosen)(model, x))

    with nni.watch(model, every=4, optimizer={"a": first, "b": second}) as recording:
        for x in batches(8):
            both(model, first, second, x)
    assert "optimizer/a/mu/body/kernel" in recording.states
    assert "optimizer/b/trace/used/kernel" in recording.states


def test_several_passes_of_a_step_have_the_state_once():
    model = Plain()
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    insp = nni.Inspector(model, batches(1)[0], display=False)

    @nnx.jit
    def twice(model, optimizer, x):
        def loss(model):
            return loss_of(model, x) + loss_of(model, -x)

        optimizer.update(model, nnx.grad(loss)(model))

    try:
        for x in insp.watch(batches(4), every=2, optimizer=optimizer):
            twice(model, optimizer, x)
        for one in insp.recording.passes:
            assert one.states["optimizer/mu/used/kernel"].size == 32
    finally:
        insp.close()


def test_nothing_is_measured_without_being_asked():
    recording = trained(Plain(), optax.adam(0.01), batches(2), states=False)
    assert recording.states == ()
    assert all(quantity != "state" for _, quantity in recording.passes[0].keys)


def test_training_is_the_same_with_and_without_it():
    ends = []
    for states in (True, False):
        model = Plain()
        trained(model, optax.adam(0.01), batches(6), states=states)
        ends.append(jax.device_get(nnx.to_pure_dict(nnx.state(model))))
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_a_file_a_frame_and_a_figure_have_them(tmp_path):
    recording = trained(Plain(), optax.adam(0.01), batches(3), save=tmp_path / "run.nni")
    loaded = nni.load(tmp_path / "run.nni")
    assert loaded.states == recording.states
    for a, b in zip(recording.passes, loaded.passes, strict=True):
        assert {k: s.mean for k, s in a.states.items()} == {k: s.mean for k, s in b.states.items()}
    frame = loaded.to_frame()
    row = frame[(frame["site"] == "optimizer/count") & (frame["step"] == 2)]
    assert (row["quantity"].item(), row["max"].item()) == ("state", 2.0)
    from nnx_inspector.recordings.figure import figure

    assert "state" in figure(loaded, "optimizer/mu/body/kernel").layout.title.text
    assert loaded.sites == recording.sites
    assert not any(key.startswith("optimizer") for key in loaded.sites)


def test_rows_of_the_tree_show_them_below_the_model(tmp_path):
    model = Plain()
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    insp = nni.Inspector(model, batches(1)[0], display=False)
    try:
        for x in insp.watch(batches(3), every=1, optimizer=optimizer):
            step(model, optimizer, x)
        rows = {row.key: row for row in inside(insp).view.layout.sites}
        assert rows["optimizer"].kind == "optimizer"
        assert rows["optimizer/mu"].depth == 2
        leaf = rows["optimizer/mu/used/kernel"]
        assert (leaf.name, leaf.output, leaf.kind, leaf.depth) == (
            "used/kernel",
            "float32[16,2]",
            "state",
            3,
        )
        assert not any(row.perturbable for key, row in rows.items() if key.startswith("optimizer"))
        inside(insp).core.select("optimizer/nu/body/kernel")
        assert insp.to_html(tmp_path / "page.html") > 0
        one = insp.recording.passes[-1]
        table, _ = table_of(["optimizer/nu/body/kernel"], one)
        expected = one.states["optimizer/nu/body/kernel"].std
        assert table[0, 0, STATISTICS.index("std")] == expected > 0
    finally:
        insp.close()


GIVEN = {
    "a state that is replaced": lambda optimizer: optimizer.opt_state,
    "a number": lambda optimizer: 3,
    "a dict of states": lambda optimizer: {"a": optimizer.opt_state},
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_cannot_be_read_anew_is_refused(name):
    model = Plain()
    given = GIVEN[name](nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param))
    insp = nni.Inspector(model, batches(1)[0], display=False)
    try:
        for watch in (
            lambda: nni.watch(model, optimizer=given).__enter__(),
            lambda: insp.watch([1], optimizer=given),
        ):
            with pytest.raises(TypeError, match="lambda: opt_state"):
                watch()
    finally:
        insp.close()


def test_an_optimizer_without_a_state_has_none_and_a_model_is_refused():
    for given in (lambda: (), nnx.Optimizer(Plain(), optax.sgd(0.1), wrt=nnx.Param)):
        model = Plain()
        with nni.watch(model, every=1, optimizer=given) as recording:
            model(batches(1)[0])
        assert len(recording) == 1
        assert recording.states == ()
    model = Plain()
    with pytest.raises(
        nni.InspectorError, match="It got Plain, which holds no Variable of its own"
    ):
        nni.watch(model, optimizer=model).__enter__()


def test_a_function_that_raises_stops_no_loop():
    model, calls = Plain(), []
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    def state():
        calls.append(0)
        if len(calls) > 3:
            raise RuntimeError("no state")
        return optimizer

    def train():
        with nni.watch(model, every=1, optimizer=state) as recording:
            for x in batches(5):
                step(model, optimizer, x)
        return recording

    with pytest.warns(nni.InspectorWarning, match="reading the optimizer: RuntimeError: no state"):
        recording = train()
    assert len(recording.passes) == 5
    assert "optimizer/count" in recording.passes[0].states


def test_a_state_that_was_donated_is_left_out_with_the_reason():
    model, tx = Plain(), optax.adam(0.01)
    graphdef, params = nnx.split(model)
    state = tx.init(params)
    old = state

    def update(params, state, x):
        grads = jax.grad(lambda params: loss_of(nnx.merge(graphdef, params), x))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(update, donate_argnums=(1,))

    def train(params, state):
        with nni.watch(model, every=1, optimizer=lambda: old) as recording:
            for x in batches(3):
                params, state = donating(params, state, x)
        return recording

    with pytest.warns(nni.InspectorWarning, match="was given the optimizer's arrays for good"):
        recording = train(params, state)
    assert "optimizer/mu/body/kernel" in recording.passes[0].states
    assert recording.passes[1].states == {}


def test_an_update_by_hand_is_read_by_its_own_names():
    def update(grads, state, params):
        state = jax.tree.map(lambda v, g: v + g, state, {"sum": grads})
        return jax.tree.map(lambda p, v: p - 0.01 * v, params, state["sum"]), state

    recording = carried(
        Plain(), lambda p: {"sum": jax.tree.map(jnp.zeros_like, p)}, update, batches(3)
    )
    assert recording.states[0] == "optimizer/sum/body/bias"
