"""Whose calls a launched program makes is read from the program and the arrays that it is given."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree
from models import TwoLayers

import nnx_inspector as nni

X = jax.random.normal(jax.random.key(3), (5, 3))
IGNORED = "ignore:.*could not be attributed:nnx_inspector.errors.InspectorWarning"
pytestmark = pytest.mark.filterwarnings(IGNORED)


def made():
    """A model, a graphdef that was split before the loop, its state, and that of a teacher."""
    model = TwoLayers(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    return model, graphdef, state, jax.tree.map(lambda x: 10 * x, state)


def copied(state):
    return jax.tree.map(jnp.copy, state)


def called(graphdef, state, x):
    return nnx.merge(graphdef, state)(x)


def two(a, b):
    return ((a - jax.lax.stop_gradient(b)) ** 2).mean()


def norm_of(state):
    """The norm of the output, without a call."""
    x = np.asarray(X, np.float64)
    for part, then in (("a", np.tanh), ("b", np.asarray)):
        kernel, bias = (np.asarray(state[part][name][...]) for name in ("kernel", "bias"))
        x = then(x @ kernel + bias)
    return np.linalg.norm(x)


def watched(way, model, steps, step, **how):
    """The norms of the output in each recorded pass of a loop, and the warnings that it gave."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if way == "region":
            with nni.watch(model, every=1, **how) as recording:
                for i in range(steps):
                    step(i)
        else:
            insp = nni.Inspector(model, X, display=False)
            recording = insp.recording
            for i in insp.watch(range(steps), every=1, **how):
                step(i)
            insp.close()
    passes = [one for one in recording.passes if one.kind == "watch"]
    assert all(one.summary("").size == X.shape[0] * 2 for one in passes)
    return [one.summary("").norm for one in passes], [str(one.message) for one in told]


WAYS = ("region", "iterator")


def trained(model):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    return lambda: train(model, optimizer, X)


# ------------------------------------------------------------ programs of their own


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_a_teacher_with_a_program_of_its_own_is_not_the_model(way, first, average):
    model, graphdef, _, teacher = made()
    train, expected = trained(model), []
    teach = jax.jit(lambda state, x: called(graphdef, state, x))
    now = [teacher]

    def step(i):
        if first:
            teach(now[0], X)
        expected.append(norm_of(nnx.state(model)))
        train()
        if not first:
            teach(now[0], X)
        if average:
            now[0] = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, now[0], nnx.state(model))

    found, told = watched(way, model, 4, step)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert way != "region" or any("of TwoLayers in the traced programs" in text for text in told)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [True, False])
def test_a_program_that_gets_other_trees_later_is_decided_by_its_arrays(way, first):
    model, graphdef, state, teacher = made()
    forward = jax.jit(lambda state, x: called(graphdef, state, x))

    def step(i):
        for one in (state, teacher) if first else (teacher, state):
            forward(one, X)

    found, _ = watched(way, model, 3, step)
    np.testing.assert_allclose(found, [norm_of(state)] * 3, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_perturbation_acts_on_the_models_launches_alone(way):
    model, graphdef, state, teacher = made()
    forward = jax.jit(lambda state, x: called(graphdef, state, x))
    insp = nni.Inspector(model, X, display=False)
    handle = insp.perturb("b", nni.Zero())
    outs = []
    if way == "region":
        with insp.watch(every=2):
            outs = [(forward(state, X), forward(teacher, X)) for _ in range(4)]
    else:
        outs = [(forward(state, X), forward(teacher, X)) for _ in insp.watch(range(4), every=2)]
    assert handle.not_acting == ""
    for mine, other in outs:
        assert not mine.any()
        np.testing.assert_allclose(other, called(graphdef, teacher, X), rtol=1e-6)
    insp.close()


@pytest.mark.parametrize("way", WAYS)
def test_eager_calls_are_decided_by_their_arrays(way):
    model, graphdef, state, teacher = made()
    slope = jax.grad(lambda state, x: (called(graphdef, state, x) ** 2).mean())

    def step(i):
        slope(state, X)
        slope(teacher, X)

    found, _ = watched(way, model, 2, step)
    np.testing.assert_allclose(found, [norm_of(state)] * 2, rtol=1e-5)
    insp = nni.Inspector(model, X, display=False)
    insp.perturb("b", nni.Zero())
    (both,) = [(slope(state, X), slope(teacher, X)) for _ in insp.watch(range(1), every=1)]
    assert not any(x.any() for x in jax.tree.leaves(both[0]))
    jax.tree.map(np.testing.assert_array_equal, both[1], slope(teacher, X))
    insp.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copies", [True, False])
def test_a_loop_that_carries_the_state_itself_is_recorded_whole(way, copies):
    """Healthy: from its second step on no array is the model's own, with copies never."""
    model, graphdef, state, _ = made()
    now, expected = [copied(state) if copies else state], []

    @jax.jit
    def train(state, x):
        grads = jax.grad(lambda state: (called(graphdef, state, x) ** 2).mean())(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    def step(i):
        expected.append(norm_of(now[0]))
        now[0] = train(now[0], X)

    found, told = watched(way, model, 4, step)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not told


@pytest.mark.parametrize("way", WAYS)
def test_a_state_of_which_a_part_is_carried_is_the_models(way):
    """Healthy: a frozen trunk stays the model's own, and the step returns the head alone."""
    model, graphdef, state, _ = made()
    trunk, head = state["a"], [state["b"]]
    expected = []

    @jax.jit
    def train(trunk, head, x):
        whole = lambda head: nnx.State({"a": trunk, "b": head})  # noqa: E731
        grads = jax.grad(lambda head: (called(graphdef, whole(head), x) ** 2).mean())(head)
        return jax.tree.map(lambda p, g: p - 0.1 * g, head, grads)

    def step(i):
        expected.append(norm_of(nnx.State({"a": trunk, "b": head[0]})))
        head[0] = train(trunk, head[0], X)

    found, _ = watched(way, model, 4, step)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("with_teacher", [True, False])
def test_a_program_that_is_one_scan_of_steps_carries_the_state(with_teacher):
    """Healthy: after its first run no array is the model's own."""
    model, graphdef, state, teacher = made()

    def one(carry, x):
        state, teacher = carry
        y = called(graphdef, teacher, x) if with_teacher else 0.0
        grads = jax.grad(lambda state: two(called(graphdef, state, x), y))(state)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), teacher), None

    train = jax.jit(lambda state, teacher, xs: jax.lax.scan(one, (state, teacher), xs)[0])
    now, single, expected = [state], [state], []
    for _ in range(6):
        expected.append(norm_of(single[0]))
        single[0], _ = train(single[0], teacher, X[None])

    def step(i):
        now[0], _ = train(now[0], teacher, jnp.stack([X] * 3))

    found, _ = watched("region", model, 2, step)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# -------------------------------------------------------------- one program


@pytest.mark.parametrize("order", ["one, then two", "two, then one", "two, then the teacher"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_traced_again_with_other_trees(way, order):
    """The state is carried: after the first step its place among the arguments tells."""
    model, graphdef, state, teacher = made()
    now, expected = [state], []

    @jax.jit
    def train(teacher, state, x):
        y = 0.0 if teacher is None else called(graphdef, teacher, x)
        if state is None:
            return y
        grads = jax.grad(lambda state: two(called(graphdef, state, x), y))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    def step(i):
        late = i >= 2
        given = teacher if (order == "one, then two") == late or order.endswith("teacher") else None
        if late and order.endswith("teacher"):
            train(given, None, X)
            return
        expected.append(norm_of(now[0]))
        now[0] = train(given, now[0], X)

    found, _ = watched(way, model, 4, step)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def step_of(kind, here, teacher):
    """A program that calls the tree that it is given and a teacher, and computes a gradient.

    `here` has the graphdef when it is traced.
    """
    inner = jax.jit(lambda state, x: called(here[0], state, x))
    halved = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)  # noqa: E731

    def loss(state, teacher, x):
        match kind:
            case "shared":  # jax traces the inner function once for both
                return two(inner(state, x), inner(teacher, x))
            case "cast":
                y, t = (called(here[0], halved(one), halved(x)) for one in (state, teacher))
                return two(y.astype(jnp.float32), t.astype(jnp.float32))
            case "checkpoint":
                call = jax.checkpoint(lambda state: called(here[0], state, x))
                return two(call(state), call(teacher))
            case "branch":
                call = lambda state: called(here[0], state, x)  # noqa: E731
                y = jax.lax.cond(x[0, 0] > -9, call, lambda state: 2 * call(state), state)
                return two(y, jax.lax.cond(x[0, 0] > -9, call, lambda s: 2 * call(s), teacher))
            case _:
                return two(called(here[0], state, x), called(here[0], teacher, x))

    if kind == "constant":
        return jax.jit(lambda state, _, x: jax.value_and_grad(loss)(state, teacher, x)[0])
    if kind == "jitted loss":  # two programs: the forward and the backward pass
        slope = jax.value_and_grad(jax.jit(loss))
        return lambda state, teacher, x: slope(state, teacher, x)[0]
    if kind == "scan":

        def steps(state, teacher, x):
            def one(carry, _):
                state, teacher = carry
                value, grads = jax.value_and_grad(loss)(state, teacher, x)
                state = jax.tree.map(lambda p, g: p - 0.0 * g, state, grads)
                teacher = jax.tree.map(lambda a, b: a + 0.0 * b, teacher, state)
                return (state, teacher), value

            return jax.lax.scan(one, (state, teacher), None, length=1)[1][0]

        return jax.jit(steps)
    return jax.jit(lambda state, teacher, x: jax.value_and_grad(loss)(state, teacher, x)[0])


KINDS = ("plain", "shared", "checkpoint", "branch", "constant", "scan", "jitted loss")
TAGGED = [*((kind, False) for kind in KINDS), ("plain", True), ("shared", True), ("cast", True)]
"""Whether the graphdef is split in the loop. A tree of another dtype needs that."""


@pytest.mark.parametrize(("kind", "tagged"), TAGGED)
@pytest.mark.parametrize("way", WAYS)
def test_of_two_trees_the_one_with_the_models_arrays_is_the_model(way, kind, tagged):
    model, graphdef, state, teacher = made()
    here = [graphdef]
    run = step_of(kind, here, teacher)

    def step(i):
        here[:] = [nnx.graphdef(model)] if tagged else here
        run(state, teacher, X)

    found, told = watched(way, model, 2, step)
    tolerance = 1e-2 if kind == "cast" else 1e-5
    np.testing.assert_allclose(found, [norm_of(state)] * 2, rtol=tolerance)
    assert not any("two trees" in text for text in told)


@pytest.mark.parametrize(("kind", "tagged"), TAGGED)
def test_of_two_trees_with_other_arrays_neither_is_the_model(kind, tagged):
    model, graphdef, state, teacher = made()
    here = [graphdef]
    run = step_of(kind, here, teacher)

    def step(i):
        here[:] = [nnx.graphdef(model)] if tagged else here
        run(copied(state), teacher, X)

    found, told = watched("region", model, 2, step)
    assert not found
    assert any("two trees" in text for text in told)


def test_two_inspectors_decide_for_themselves():
    """The program of the second one has inputs in front that the first one puts in."""
    model, graphdef, state, teacher = made()
    _, graphdef_of_b, state_of_b, _ = made()
    other = nnx.merge(graphdef_of_b, state_of_b)
    now = [[state, nnx.state(other)]]

    @jax.jit
    def train(mine, its, teacher, x):
        def loss(mine, its):
            y, z = called(graphdef, mine, x), called(nnx.graphdef(other), its, x)
            return two(y, called(graphdef, teacher, x)) + (z**2).mean()

        slopes = jax.grad(loss, (0, 1))(mine, its)
        return jax.tree.map(lambda p, g: p - 0.1 * g, [mine, its], list(slopes))

    first, second = (nni.Inspector(one, X, display=False) for one in (model, other))
    second.perturb("b", nni.Scale(1.0))
    expected = []
    for _ in first.watch(range(3), every=1):
        with second.watch(every=1):
            expected.append(norm_of(now[0][0]))
            now[0] = train(*now[0], teacher, X)
    for insp in (first, second):
        insp.close()
    found = [one.summary("") for one in first.recording.passes if one.kind == "watch"]
    assert len(found) == 3
    assert found[0] is not None
    np.testing.assert_allclose(found[0].norm, expected[0], rtol=1e-5)


def test_an_average_that_the_program_computes_from_a_teacher_it_calls_is_not_the_model():
    model, graphdef, state, teacher = made()

    @jax.jit
    def run(state, teacher, x):
        mean = jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, state, teacher)
        return [called(graphdef, one, x) for one in (teacher, mean, state)]

    found, _ = watched("region", model, 2, lambda i: run(state, teacher, X))
    np.testing.assert_allclose(found, [norm_of(state)] * 2, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_from_one_vector_are_the_models_if_no_others_are(way):
    """Healthy: nothing of the vector is the model's own array."""
    model, graphdef, state, _ = made()
    vector, unravel = ravel_pytree(state)
    run = jax.jit(lambda vector, x: called(graphdef, unravel(vector), x))
    found, _ = watched(way, model, 2, lambda i: run(vector, X))
    np.testing.assert_allclose(found, [norm_of(state)] * 2, rtol=1e-5)


def test_the_first_step_of_an_average_that_begins_as_the_model():
    """The same arrays are the student's and the average's: nothing tells which is which."""
    model, graphdef, state, _ = made()
    run, expected, now = step_of("plain", [graphdef], None), [], [state]
    train = trained(model)

    def step(i):
        run(nnx.state(model), now[0], X)
        train_alone = [norm_of(nnx.state(model))]
        expected.extend(train_alone * (2 if i else 1))
        train()
        now[0] = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, now[0], nnx.state(model))

    found, told = watched("region", model, 3, step)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert any("two trees" in text for text in told)
