"""Passes of loops without steps: what a pass is where parts of the model are called beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import TwoLayers

import nnx_inspector as nni
from nnx_inspector.live.calls import MOST_CALLS, OF_MODEL, Call, Calls, UnderWay

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
H = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4)), jnp.float32)


def numbers(program: list[str], runs: int = 3) -> list[list[int]]:
    """The number of the pass of each call, for each run of a program."""
    traced = Calls()
    for site in program:
        traced.add(site)
    now, found = UnderWay(), []
    for _ in range(runs):
        found.append([])
        for site in program:
            now = now.after(traced.call(site), None)
            found[-1].append(now.count - 1)
    return found


@pytest.mark.parametrize(
    ("program", "first", "last"),
    [
        ([""], [0], [2]),
        (["", ""], [0, 1], [4, 5]),
        (["a", ""], [0, 0], [2, 2]),
        (["a", "a", "b", ""], [0, 0, 0, 0], [2, 2, 2, 2]),
        (["", "cell", "cell", "cell"], [0, 0, 0, 0], [2, 2, 2, 2]),
        (["a", "", "b", ""], [0, 0, 0, 1], [4, 4, 4, 5]),
        ([":encode", ":decode"], [0, 0], [2, 2]),
        (["embed", "block", "block", "head"], [0, 0, 0, 0], [2, 2, 2, 2]),
    ],
)
def test_a_pass_is_a_call_of_the_model_or_of_the_first_part(program, first, last):
    found = numbers(program)
    assert found[0] == first
    assert found[2] == last


def test_programs_of_single_parts_share_a_pass_until_one_of_them_runs_again():
    now, found = UnderWay(), []
    for site in ["a", "b", "a", "b", "b"]:
        now = now.after(Call(site, site), None)
        found.append(now.count - 1)
    assert found == [0, 0, 1, 1, 2]


def test_a_program_of_a_part_that_runs_twice_waits_for_the_model():
    """The first pass ends too early; the others are whole."""
    now, found = UnderWay(), []
    for site in ["a", "a", ""] * 3 + ["a"] * 40:
        now = now.after(Call(site, site), None)
        found.append(now.count - 1)
    assert found[:9] == [0, 1, 1, 2, 2, 2, 3, 3, 3]
    assert found[9:28] == [4] * 16 + [5, 6, 7], "the model is called no more"


def test_a_changed_setting_and_an_ended_step_begin_a_pass():
    now = UnderWay().after(OF_MODEL, "first")
    joining = Call("a", "", leads=False)
    assert now.after(joining, "first").count == 1
    assert now.after(joining, "second").count == 2
    assert now.ended().after(joining, "first").count == 2


def test_a_pass_ends_even_if_the_model_is_called_no_more():
    """In a branch that is not taken, say: what is measured of a pass is kept until it has ended."""
    now = UnderWay()
    for _ in range(2 * MOST_CALLS):
        now = now.after(Call("a", ""), None)
    assert now.count == 2


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
    with nni.watch(model, every=every, gradients=False) as recording:
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


def test_calls_that_are_not_told_in_order_share_a_pass_too():
    first, model = (Call(site, ordered=False) for site in ("a", ""))
    now, found = UnderWay(), []
    for call in [model, first, first, model, model, first]:
        now = now.after(call, None)
        found.append(now.count - 1)
    assert found == [0, 0, 1, 1, 2, 2]


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
