"""Passes of loops without steps: what a pass is where parts of the model are called beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import TwoLayers

import nnx_inspector as nni
from nnx_inspector.live.pass_boundaries import MODEL, MODEL_CALL, PassState, Program, TopLevelCall

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


def passes(runs: list[str], every: int = 1):
    """For each run of a program, the number of the pass of each call and whether it is measured.

    A program is written as its sites, the model as "M": "aM" calls a part and then the model.
    """
    now, found, setting = PassState(), [], object()
    for program in runs:
        sites = [MODEL if site == "M" else site for site in program]
        found.append([])
        for i, site in enumerate(sites):
            call = TopLevelCall(site, Program(tuple(dict.fromkeys(sites))), i == 0)
            due = now.may_measure([call], setting, every)
            now = now.after(call, setting, every)
            assert due or not now.measures(call, every)
            found[-1].append((now.begun - 1, now.measures(call, every)))
    return found


def numbers(runs: list[str]) -> list[list[int]]:
    return [[number for number, _ in run] for run in passes(runs)]


@pytest.mark.parametrize(
    ("step", "first", "third"),
    [
        (["M"], [[0]], [[2]]),
        (["MM"], [[0, 1]], [[4, 5]]),
        (["aM"], [[0, 0]], [[2, 2]]),
        (["aabM"], [[0, 0, 0, 0]], [[2, 2, 2, 2]]),
        (["Maaaaaaaaa"], [[0] * 10], [[2] * 10]),
        (["aMbM"], [[0, 0, 0, 1]], [[4, 4, 4, 5]]),
        (["ed"], [[0, 0]], [[2, 2]]),
        (["ebbbbbbh"], [[0] * 8], [[2] * 8]),
        (["eepp"], [[0] * 4], [[2] * 4]),
        (["ba", "bac"], [[0, 0], [0, 0, 0]], [[2, 2], [2, 2, 2]]),
        (["M", "a"], [[0], [0]], [[2], [2]]),
        (["M", "a", "a", "a"], [[0], [0], [0], [0]], [[2], [2], [2], [2]]),
        (["a", "M"], [[0], [0]], [[2], [2]]),
    ],
)
def test_what_each_step_calls_is_one_pass(step, first, third):
    found = numbers(step * 3)
    assert found[: len(step)] == first
    assert found[2 * len(step) :] == third


def test_a_part_that_runs_twice_before_the_model_waits_for_it():
    """The first pass ends too early; the others are whole."""
    assert numbers(["a", "a", "M"] * 3) == [[n] for n in (0, 1, 1, 2, 2, 2, 3, 3, 3)]


@pytest.mark.parametrize("after", range(10))
def test_a_model_that_is_evaluated_now_and_then_does_not_collect_steps(after):
    """A VAE, say, that calls its parts; with the first evaluation a few steps may share a pass."""
    runs = [run for i in range(60) for run in ("ed", "M") if run == "ed" or i % 10 == after]
    found = [run[0] for run in numbers(runs) if len(run) == 2]
    assert max(found.count(number) for number in set(found)) <= 4
    assert found[-40:] == list(range(found[-40], found[-40] + 40))


@pytest.mark.parametrize("at", [9, None])
@pytest.mark.parametrize("program", [("e", "d", MODEL), (MODEL, "e", "d")])
def test_a_model_in_a_branch_that_is_seldom_taken_does_not_collect_steps(program, at):
    now, found = PassState(), []
    for i in range(40):
        for site in program if i % 10 == at else ("e", "d"):
            now = now.after(TopLevelCall(site, Program(program)), None, 1)
        found.append(now.begun - 1)
    assert found[-30:] == list(range(found[-30], found[-30] + 30))


def test_calls_that_are_not_told_in_order_share_a_pass_too():
    now, found = PassState(), []
    for site in ["M", "a", "a", "M", "M", "a"]:
        site = MODEL if site == "M" else site
        now = now.after(TopLevelCall(site, Program(("a", MODEL))), None, 1)
        found.append(now.begun - 1)
    assert found == [0, 0, 1, 1, 2, 2]


def test_a_changed_setting_and_an_ended_step_begin_a_pass():
    now = PassState().after(MODEL_CALL, "first", 1)
    joining = TopLevelCall("a", Program(("a",)))
    assert now.after(joining, "first", 1).begun == 1
    assert now.after(joining, "second", 1).begun == 2
    assert now.ended().after(joining, "first", 1).begun == 2


@pytest.mark.parametrize("every", [2, 3, 10])
@pytest.mark.parametrize(
    "step",
    [
        ["M"],
        ["eepp"],
        ["ba", "bac"],
        ["D", "D", "D", "D", "GD"],
        ["a"] * 5 + ["M"],
        ["M"] + ["a"] * 7,
        ["a", "a", "M"],
        ["x"] * 32 + ["M", "M"],
    ],
)
def test_no_call_is_left_out_for_long(step, every):
    """Whatever a loop calls is measured again and again, with an even `every` too."""
    runs = step * (8 * every)
    found = passes(runs, every)
    last, passed = {}, {}
    for program, run in zip(runs, found, strict=True):
        for site, (number, measured) in zip(program, run, strict=True):
            key = site, program
            passed.setdefault(key, set()).add(number)
            if measured:
                last[key] = passed[key] = {number}
    assert last.keys() == {(site, program) for program in step for site in program}
    assert all(len(numbers) <= every + 1 for numbers in passed.values())


def test_of_a_model_alone_each_nth_call_is_measured_and_no_other():
    found = [measured for ((_, measured),) in passes(["M"] * 100, 10)]
    assert found == [i % 10 == 0 for i in range(100)]


# -------------------------------------------------------------------- loops


@nnx.jit
def beside(model, x):
    """An auxiliary loss on a layer comes first."""
    loss = lambda m: (m.a(2 * x) ** 2).sum() + (m(x) ** 2).sum()  # noqa: E731
    return nnx.grad(loss)(model)


@nnx.jit
def parts(model, x):
    return model.b(jnp.tanh(model.a(x)))


def eagerly(model, x):
    model.a(2 * x)
    model(x)


def norms(model, x):
    hidden = np.asarray(model.a(x), np.float64)
    return np.linalg.norm(hidden), np.linalg.norm(np.asarray(model(x), np.float64))


LOOPS = {"one program": beside, "eager": eagerly, "parts": parts}


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_every_nth_pass_measures_all_that_is_called(name, every):
    """With an even `every`, only the layer beside the model was measured, and never the model."""
    model, loop = TwoLayers(nnx.Rngs(0)), LOOPS[name]
    with nni.watch(model, every=every, gradients=False, parameters=False) as recording:
        for i in range(2 * every + 1):
            loop(model, (i + 1) * X)
    assert [one.step for one in recording.passes] == [0, every, 2 * every]
    for one in recording.passes:
        x = (one.step + 1) * X
        (a, out), (twice, _) = norms(model, x), norms(model, 2 * x)
        if loop is parts:
            assert {site for site, _ in one.keys} == {"a", "b"}
            found = {"a": a, "b": out}
        else:
            found = {"a": np.hypot(a, twice), "": out, "b": out}
        for site, norm in found.items():
            np.testing.assert_allclose(one.summary(site).norm, norm, rtol=1e-4)


def test_the_calls_of_a_scan_over_steps_join_their_own_pass():
    model = TwoLayers(nnx.Rngs(0))

    @nnx.jit
    def steps(model, xs):
        graphdef, state = nnx.split(model)

        def one(state, x):
            model = nnx.merge(graphdef, state)
            return state, model.a(2 * x).sum() + model(x).sum()

        return jax.lax.scan(one, state, xs)[1]

    xs = jnp.stack([(i + 1) * X for i in range(7)])
    with nni.watch(model, every=3, gradients=False) as recording:
        steps(model, xs)
    assert [one.step for one in recording.passes] == [0, 3, 6]
    for one in recording.passes:
        (a, out), (twice, _) = norms(model, xs[one.step]), norms(model, 2 * xs[one.step])
        np.testing.assert_allclose(one.summary("").norm, out, rtol=1e-4)
        np.testing.assert_allclose(one.summary("a").norm, np.hypot(a, twice), rtol=1e-4)


@nnx.jit
def train_a(model, x):
    return nnx.grad(lambda a: model.b(a(x)).sum())(model.a)


@nnx.jit
def train_b(model, x):
    return nnx.grad(lambda b: b(model.a(x)).sum())(model.b)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_two_steps_that_train_different_parts_are_one_pass(every):
    """A GAN: with an even `every`, only the first of the two was measured."""
    model = TwoLayers(nnx.Rngs(0))
    with nni.watch(model, every=every) as recording:
        for _ in range(6):
            train_b(model, X)
            train_a(model, X)
    assert recording.steps == [*range(0, 6, every)]
    for one in recording.passes:
        graded = {site for site, quantity in one.keys if quantity == "gradient"}
        assert graded == {"a", "b"}


def test_an_evaluation_beside_each_training_step_is_measured_too():
    model = TwoLayers(nnx.Rngs(0))
    evaluate = nnx.jit(lambda model, x: model(x))
    with nni.watch(model, every=10) as recording:
        for _ in range(40):
            beside(model, X)
            evaluate(model, X)
    graded = [("", "gradient") in one.keys for one in recording.passes]
    assert graded.count(True) == 8  # passes 0, 10, ..., 70
    assert graded.count(False) == 3  # one of eleven evaluations


def test_an_update_belongs_to_the_passes_that_are_differentiated():
    """A rollout and two updates, in one program."""
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    values = [np.asarray(model.kernel[...], np.float64)]

    @nnx.jit
    def train(model, x):
        graphdef, state = nnx.split(model)
        act = lambda x, _: (jnp.tanh(nnx.merge(graphdef, state)(x)), None)  # noqa: E731
        x, _ = jax.lax.scan(act, x, None, length=3)
        for _ in range(2):
            grads = nnx.grad(lambda model: (model(x) ** 2).sum())(model)
            update = lambda p, g: p - 0.01 * g  # noqa: E731
            nnx.update(model, jax.tree.map(update, nnx.state(model), grads))

    with nni.watch(model, every=1) as recording:
        for _ in range(2):
            train(model, X)
            values.append(np.asarray(model.kernel[...], np.float64))
    assert len(recording.passes) == 10
    for number, one in enumerate(recording.passes):
        run, at = divmod(number, 5)
        old, new = values[run : run + 2]
        moved = np.linalg.norm(new - old) / np.linalg.norm(old) if at >= 3 else np.nan
        np.testing.assert_allclose(one.update_ratio("kernel"), moved, rtol=1e-4)


def test_a_backward_pass_that_calls_a_layer_again_begins_no_pass():
    """A DEQ's backward pass iterates the layer that its forward pass has called."""
    model = TwoLayers(nnx.Rngs(0))

    @nnx.jit
    def step(model, x):
        @jax.custom_vjp
        def solution(z):
            return z

        def backward(_, g):
            for _ in range(3):
                solved = model.a(2 * x)
            return (g * solved.sum(),)

        solution.defvjp(lambda z: (z, None), backward)
        return jax.grad(lambda x: solution(model(x)).sum())(x)

    with nni.watch(model, every=2, gradients=False) as recording:
        for _ in range(5):
            step(model, X)
    assert [one.step for one in recording.passes] == [0, 2, 4]
    (a, out), (twice, _) = norms(model, X), norms(model, 2 * X)
    for one in recording.passes:
        np.testing.assert_allclose(one.summary("").norm, out, rtol=1e-4)
        found = one.summary("a")
        np.testing.assert_allclose(found.norm, np.sqrt(a**2 + 3 * twice**2), rtol=1e-4)


def test_a_region_with_and_without_ticks_records_the_same():
    model = TwoLayers(nnx.Rngs(0))
    inspectors = [nni.Inspector(model, X, display=False) for _ in range(2)]
    for insp, ticks in zip(inspectors, (True, False), strict=True):
        with insp.watch(every=2):
            for i in range(5):
                if ticks:
                    insp.tick()
                beside(model, (i + 1) * X)
    with_ticks, without = (
        [one for one in insp.recording.passes if one.kind == "watch"] for insp in inspectors
    )
    assert [one.step for one in without] == [one.step for one in with_ticks] == [0, 2, 4]
    for one, other in zip(with_ticks, without, strict=True):
        assert one.keys == other.keys
        for site, quantity in one.keys:
            mine, theirs = one.summary(site, quantity), other.summary(site, quantity)
            np.testing.assert_array_equal(mine.bins, theirs.bins)
            np.testing.assert_allclose(mine.norm, theirs.norm, rtol=1e-6)
    for insp in inspectors:
        insp.close()
