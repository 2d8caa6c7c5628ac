"""Faults of optimizers have a finding each, with its step and figures; healthy ones have none."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optimizer_models import Net, Plain, batches, carried, loss_of, trained

import nnx_inspector as nni


def found(recording, rule):
    return [one for one in nni.diagnose(recording) if one.rule == rule]


# --------------------------------------------------------------- NaN of an update


def scheduled(at, value):
    return lambda count: jnp.where(count == at, value, 0.01)


def by_hand_negative(grads, state, params):
    """A second moment that is subtracted, so that the root of it is NaN."""
    state = jax.tree.map(lambda v, g: 0.9 * v - g**2, state, grads)
    return jax.tree.map(lambda p, g, v: p - 0.01 * g / jnp.sqrt(v), params, grads, state), state


def zeros_like(params):
    return {"v": jax.tree.map(jnp.zeros_like, params)}


def named(update):
    """The same with its state under the name `v`."""

    def of(grads, state, params):
        params, v = update(grads, state["v"], params)
        return params, {"v": v}

    return of


DIVIDES = {
    "adam": optax.adam(0.01, eps=0.0),
    "adamw": optax.adamw(0.01, eps=0.0),
    "MultiSteps": optax.MultiSteps(optax.adam(0.01, eps=0.0), 2),
    "clip and adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01, eps=0.0)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(0.01, eps=0.0),
    "rms": optax.chain(optax.scale_by_rms(eps=0.0), optax.scale(-0.01)),
    "multi_transform": optax.multi_transform(
        {"all": optax.adam(0.01, eps=0.0)}, lambda tree: jax.tree.map(lambda _: "all", tree)
    ),
}


@pytest.mark.parametrize("name", DIVIDES)
@pytest.mark.parametrize("states", [True, False])
def test_a_division_by_zero_in_an_update_is_named(name, states):
    recording = trained(Net(), DIVIDES[name], batches(4), states=states)
    (one,) = found(recording, "nonfinite")
    assert one.severity == "error"
    assert one.step == 1
    assert "so the update of step 0 made it" in one.advice
    assert "'unused/kernel' (8 NaN among 8 elements)" in one.what
    assert "first_nan" not in one.message
    if states:
        key = re.search(
            r"'(optimizer/.*?nu/unused/\w+)' was 0 in (\d) of (\d) elements", one.advice
        )
        assert key is not None, one.advice
        assert key[2] == key[3]
        summary = recording.passes[1].states[key[1]]
        assert (summary.zeros, summary.size) == (int(key[2]), int(key[3]))
        assert "eps that is not 0" in one.advice
    else:
        assert "optimizer=" in one.advice


def test_an_eps_that_is_0_in_float16_is_named():
    tx = optax.chain(optax.scale_by_rms(), optax.scale(-0.01))
    data = [x.astype(np.float16) for x in batches(3)]
    (one,) = found(trained(Net(dtype=jnp.float16), tx, data), "nonfinite")
    assert "an eps that is not 0 in float16" in one.advice


@pytest.mark.parametrize("tx", [optax.sgd, optax.adam, optax.lion], ids=lambda f: f.__name__)
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_schedule_that_is_not_finite_is_an_update_that_made_it(tx, value):
    recording = trained(Plain(), tx(scheduled(2, value)), batches(5))
    (one,) = found(recording, "nonfinite")
    assert "so the update of step 2 made it" in one.advice
    assert one.step == 3


def test_the_root_of_a_negative_moment_is_named():
    recording = carried(Plain(), zeros_like, named(by_hand_negative), batches(3))
    (one,) = found(recording, "nonfinite")
    key, low = re.search(
        r"'(optimizer/v/\S+)' was as low as (-\S+), and the root", one.advice
    ).groups()
    assert recording.passes[1].states[key].min == pytest.approx(float(low), rel=0.01)


def test_a_moment_that_is_not_finite_is_named():
    def overflows(grads, state, params):
        state = jax.tree.map(lambda v, g: v + (g * 1e30) ** 2, state, grads)
        return jax.tree.map(lambda p, v: p - 0.0 * v, params, state), state

    recording = carried(Plain(), zeros_like, named(overflows), batches(3))
    (one,) = found(recording, "nonfinite")
    assert re.search(r"'optimizer/v/\S+' \(\d+ Inf among \d+ elements\)", one.advice), one.advice


# ------------------------------------------------------------------ skipped steps

SKIPPED = {
    "sgd": optax.sgd(0.01),
    "momentum": optax.sgd(0.01, momentum=0.9),
    "adam": optax.adam(0.01),
    "adamw": optax.adamw(0.01),
    "lion": optax.lion(0.001),
    "adafactor": optax.adafactor(0.01),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)),
    "schedule": optax.adam(optax.cosine_decay_schedule(0.01, 100)),
}


@pytest.mark.parametrize("bad", [(2, 3), (1, 5, 9)])
@pytest.mark.parametrize("name", SKIPPED)
def test_skipped_steps_are_counted(name, bad):
    data = batches(12, bad=bad)
    recording = trained(Plain(), optax.apply_if_finite(SKIPPED[name], 5), data)
    (one,) = found(recording, "skipped-steps")
    assert one.evidence["skipped"] == len(bad)
    assert f"From step 0 to step 10, the optimizer skipped {len(bad)} of 11 steps" in one.what
    assert "'optimizer/total_notfinite'" in one.what
    assert one.step == bad[0]
    assert one.severity == "warning"
    assert f"none of them since step {bad[-1] + 1}" in one.what


def test_steps_skipped_in_a_row_are_counted():
    tx = optax.apply_if_finite(optax.adam(0.01), 20)
    recording = trained(Plain(), tx, batches(30, bad=range(25, 30)))
    (one,) = found(recording, "skipped-steps")
    assert one.evidence == {"skipped": 4, "steps": 29, "in_a_row": 4}
    assert "the last 4 in a row" in one.what


def test_a_rare_skip_is_a_note():
    tx = optax.apply_if_finite(optax.adam(0.01), 5)
    recording = trained(Plain(), tx, batches(40, bad=(7,)), every=2)
    (one,) = found(recording, "skipped-steps")
    assert (one.severity, one.step) == ("info", 6)


# -------------------------------------------------------------- a learning rate of 0


def decayed(steps=6):
    return optax.linear_schedule(0.05, 0.0, steps)


def by_hand_decayed(grads, state, params):
    rate = jnp.maximum(0.0, 0.05 * (1 - state["count"] / 6))
    params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    return params, {"count": state["count"] + 1}


def counted(params):
    return {"count": jnp.zeros((), jnp.int32)}


ENDED = {
    "sgd": optax.sgd(decayed()),
    "momentum": optax.sgd(decayed(), momentum=0.9),
    "adam": optax.adam(decayed()),
    "adamw": optax.adamw(decayed()),
    "lion": optax.lion(decayed()),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(decayed())),
    "warm-up and cosine": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 6)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(decayed()),
    "apply_if_finite": optax.apply_if_finite(optax.adam(decayed()), 5),
}


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("name", ENDED)
def test_a_schedule_that_has_ended_at_0_is_found(name, states):
    recording = trained(Plain(), ENDED[name], batches(16), states=states)
    (one,) = found(recording, "update-ratio")
    assert one.severity == "warning"
    assert one.step == 6
    pattern = r"From step 6 on, the 4 parameters with a gradient (.*) in each of 10 measured steps"
    moved = re.match(pattern, one.what)[1]
    most = max(max(p.updates("update").values()) for p in recording.passes[6:])
    assert most < 1e-7
    assert moved == (f"moved by at most {most:.2g} times their size" if most else "did not move")
    if name == "inject_hyperparams" and states:
        key = "optimizer/hyperparams/learning_rate"
        rates = [abs(p.states[key].max) for p in recording.passes[7:]]
        most = f"at most {max(rates):.2g}" if any(rates) else "0"
        assert f"'optimizer/hyperparams/learning_rate' was {most} then" in one.what


def test_a_schedule_that_has_ended_is_not_explained_by_a_layer_that_is_saturated():
    """The head has a gradient all along, so it stands still because of the rate."""
    model = Plain()
    model.body.bias[...] += 20.0
    recording = trained(model, optax.sgd(decayed()), batches(16))
    (one,) = found(recording, "update-ratio")
    assert (one.step, one.effects) == (6, ())
    assert "the 2 parameters with a gradient" in one.what
    assert len(found(recording, "saturated-units")) == 1


def test_an_update_by_hand_whose_rate_has_ended_at_0_is_found():
    recording = carried(Plain(), counted, by_hand_decayed, batches(16))
    (one,) = found(recording, "update-ratio")
    assert (one.step, one.severity) == (6, "warning")


ALWAYS = {
    "adam": optax.adam(0.0),
    "adamw": optax.adamw(0.0),
    "momentum": optax.sgd(0.0, momentum=0.9),
    "inject_hyperparams": optax.inject_hyperparams(optax.sgd)(0.0),
    "MultiSteps": optax.MultiSteps(optax.adam(0.0), 2),
}


@pytest.mark.parametrize("name", ALWAYS)
def test_a_rate_that_always_is_0_is_shown_by_the_state(name):
    recording = trained(Plain(), ALWAYS[name], batches(10))
    (one,) = found(recording, "update-ratio")
    assert one.severity == "warning"
    assert "From step 0, the first measured, on" in one.what
    key = re.search(r"'(optimizer/.*?)'", one.what)[1]
    assert key in recording.states


# ----------------------------------------------------------------------- healthy


def labelled(tree):
    frozen = lambda path, _: "frozen" if path[0].key == "body" else "trained"  # noqa: E731
    return jax.tree_util.tree_map_with_path(frozen, tree)


HEALTHY = {
    "sgd": (optax.sgd(0.05), 12, 1),
    "a warm-up that begins at 0": (optax.adam(optax.linear_schedule(0.0, 0.01, 10)), 12, 1),
    "a long warm-up": (optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.01, 20, 100)), 30, 3),
    "MultiSteps, each step": (optax.MultiSteps(optax.adam(0.01), 8), 33, 1),
    "MultiSteps, every third": (optax.MultiSteps(optax.adam(0.01), 8), 60, 3),
    "MultiSteps, in step with it": (optax.MultiSteps(optax.adam(0.01), 4), 48, 4),
    "a part that is frozen": (
        optax.multi_transform(
            {"trained": optax.adam(0.01), "frozen": optax.set_to_zero()}, labelled
        ),
        12,
        1,
    ),
    "apply_if_finite without a skip": (optax.apply_if_finite(optax.adam(0.01), 5), 12, 1),
    "adafactor": (optax.adafactor(0.01), 12, 1),
    "a gradient of 0 with eps": (optax.adam(0.01), 12, 1),
    "a cosine to a tenth": (optax.adam(optax.cosine_decay_schedule(0.01, 6, alpha=0.1)), 16, 1),
}


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_optimizer_has_no_finding(name, states):
    tx, steps, every = HEALTHY[name]
    model = Net() if name.startswith("a gradient of 0") else Plain()
    recording = trained(model, tx, batches(steps), every=every, states=states)
    rules = ("nonfinite", "skipped-steps", "update-ratio")
    assert [str(one) for one in nni.diagnose(recording) if one.rule in rules] == []


def test_what_is_frozen_on_purpose_is_no_rate_of_0():
    recording = trained(Plain(), optax.set_to_zero(), batches(12))
    assert all(one.severity == "info" for one in nni.diagnose(recording))


def test_a_loss_that_has_ended_is_no_rate_of_0():
    """The gradients become so small that steps of a usual size round to nothing."""
    model = Plain()
    model.used.kernel[...] *= 1e-12
    model.used.bias[...] += 0.5 - 1e-9
    recording = trained(model, optax.sgd(0.05), batches(20))
    assert not [one for one in found(recording, "update-ratio") if one.severity == "warning"]


class LoRAOnly(nnx.Module):
    def __init__(self):
        self.body = nnx.LoRALinear(4, 16, lora_rank=2, rngs=nnx.Rngs(0))
        self.used = nnx.Linear(16, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.used(jnp.tanh(self.body(x)))


def test_an_optimizer_of_a_part_is_healthy():
    recording = trained(LoRAOnly(), optax.adam(0.01), batches(12), wrt=nnx.LoRAParam)
    assert any("lora_b" in key for key in recording.states)
    assert [one for one in nni.diagnose(recording) if one.severity != "info"] == []


def test_counts_that_were_there_before_are_no_skips():
    """As of an optimizer that was restored."""
    model = Plain()
    optimizer = nnx.Optimizer(model, optax.apply_if_finite(optax.adam(0.01), 5), wrt=nnx.Param)
    optimizer.opt_state.total_notfinite[...] = 7

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss_of)(model, x))

    with nni.watch(model, every=1, optimizer=optimizer) as recording:
        for x in batches(8):
            step(model, optimizer, x)
    assert recording.passes[0].states["optimizer/total_notfinite"].max == 7
    assert found(recording, "skipped-steps") == []
    assert math.isfinite(recording.passes[-1].states["optimizer/nu/body/kernel"].norm)
