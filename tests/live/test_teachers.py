"""A teacher, a target network or an average that is merged from the student's graphdef."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from record_checks import assert_summary

import nnx_inspector as nni

X = jax.random.normal(jax.random.key(3), (5, 3))
IGNORED = "ignore:.*could not be attributed:nnx_inspector.errors.InspectorWarning"
pytestmark = pytest.mark.filterwarnings(IGNORED)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a, self.drop = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.0)

    def __call__(self, x):
        return self.drop(self.a(x))


def made():
    student = Net(nnx.Rngs(0))
    return student, jax.tree.map(lambda x: 10 * x, nnx.state(student))


def two(a, b):
    return ((a - jax.lax.stop_gradient(b)) ** 2).mean()


def teacher_first(graphdef, target, x):
    def loss_fn(params):
        y = nnx.merge(graphdef, target)(x)
        return two(nnx.merge(graphdef, params)(x), y)

    return loss_fn


def student_first(graphdef, target, x):
    return lambda params: two(nnx.merge(graphdef, params)(x), nnx.merge(graphdef, target)(x))


def both_alive(graphdef, target, x):
    def loss_fn(params):
        teacher, student = nnx.merge(graphdef, target), nnx.merge(graphdef, params)
        return two(student(x), teacher(x))

    return loss_fn


def mapped_teacher(graphdef, target, x):
    def loss_fn(params):
        y = jax.vmap(lambda x: nnx.merge(graphdef, target)(x))(x)
        return two(nnx.merge(graphdef, params)(x), y)

    return loss_fn


def mapped_student(graphdef, target, x):
    def loss_fn(params):
        y = nnx.merge(graphdef, target)(x)
        return two(jax.vmap(lambda x: nnx.merge(graphdef, params)(x))(x), y)

    return loss_fn


LOSSES = (teacher_first, student_first, both_alive, mapped_teacher, mapped_student)


def split_within(loss):
    """The step gets the model itself, and the state of the teacher."""

    @nnx.jit
    def step(student, target, x):
        graphdef, params = nnx.split(student)
        return jax.value_and_grad(loss(graphdef, target, x))(params)[0]

    return step


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("plain", [False, True], ids=["inspector", "watch"])
def test_the_student_alone_is_measured(loss, plain):
    (student, target), step = made(), split_within(loss)
    if plain:
        with nni.watch(student, every=2) as recording:
            for _ in range(4):
                step(student, target, X)
    else:
        insp = nni.Inspector(student, X, display=False)
        recording = insp.recording
        for _ in insp.watch(range(4), every=2):
            step(student, target, X)
        insp.close()
    passes = [one for one in recording.passes if one.kind == "watch"]
    assert [one.step for one in passes] == [0, 2]
    for one in passes:
        assert_summary(one.summary("a"), student.a(X))
        assert one.summary("drop").size == X.shape[0] * 2
        assert one.summary("a", "gradient").size == X.shape[0] * 2


@pytest.mark.parametrize("loss", LOSSES)
def test_the_student_alone_is_captured_and_perturbed(loss):
    (student, target), step = made(), split_within(loss)
    _, record = nni.capture(lambda model: step(model, target, X))(student)
    assert_summary(record["a"].output, student.a(X))
    assert len(record["drop"].calls) == 1
    assert "1 unattributed call " in record.unseen["(Net)"]
    y, t = (np.asarray(student.a(X), np.float64) * scale for scale in (0.5, 10.0))
    with nni.perturb("a", nni.Scale(0.5), model=student):
        assert float(step(student, target, X)) == pytest.approx(((y - t) ** 2).mean(), rel=1e-5)
    insp = nni.Inspector(student, X, display=False)
    insp.perturb("a", nni.Scale(0.5))
    for _ in insp.watch(range(2), every=1):
        assert float(step(student, target, X)) == pytest.approx(((y - t) ** 2).mean(), rel=1e-5)
    insp.close()


@pytest.mark.parametrize("loss", LOSSES)
def test_of_two_trees_that_a_program_is_given_the_model_has_its_arrays(loss):
    """The model is split in the loop, but outside the step."""
    student, target = made()

    @jax.jit
    def step(params, target, x):
        return jax.value_and_grad(loss(graphdef, target, x))(params)[0]

    with nni.watch(student, every=1) as recording:
        for _ in range(2):
            graphdef, params = nnx.split(student)
            step(params, target, X)
    assert [one.step for one in recording.passes] == [0, 1]
    for one in recording.passes:
        assert_summary(one.summary("a"), student.a(X))
        assert one.summary("drop").size == X.shape[0] * 2


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tree", [None, 0, 1])
def test_of_two_trees_with_other_arrays_neither_is_taken_without_a_choice(loss, tree):
    """As those of a loop that carries the state itself: nothing tells which is the model."""
    student, target = made()

    @jax.jit
    def step(params, target, x):
        return jax.value_and_grad(loss(graphdef, target, x))(params)[0]

    teacher_is = 1 if loss in (student_first, both_alive) else 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with nni.watch(student, every=1, tree=tree) as recording:
            for _ in range(2):
                graphdef, params = nnx.split(student)
                step(jax.tree.map(jnp.copy, params), target, X)
    if tree is None:
        assert not recording.passes
        assert any("two trees of its structure" in str(one.message) for one in told)
        return
    assert [one.step for one in recording.passes] == [0, 1]
    expected = np.asarray(student.a(X), np.float64) * (10.0 if tree == teacher_is else 1.0)
    for one in recording.passes:
        assert one.summary("a").size == expected.size
        assert one.summary("a").norm == pytest.approx(np.linalg.norm(expected), rel=1e-5)


@pytest.mark.parametrize("kind", ["clone", "state"])
def test_what_a_teacher_shares_with_the_student_stays_the_students(kind):
    """A frozen trunk, say: its calls are the model's, whoever makes them."""
    student, _ = made()
    student.b = nnx.Linear(3, 2, rngs=nnx.Rngs(1))
    teacher = nnx.clone(student)
    teacher.a = student.a

    @nnx.jit
    def step(student, teacher, b, x):
        if kind == "state":
            graphdef, state = nnx.split(student)
            state["b"] = b
            y = jax.vmap(lambda x: nnx.merge(graphdef, state)(x))(x)
        else:
            y = teacher(x)
        return (student(2 * x) - y).mean()

    insp = nni.Inspector(student, X, display=False)
    for _ in insp.watch(range(1)):
        step(student, teacher, jax.tree.map(lambda x: x + 1, nnx.state(student.b)), X)
    found = insp.recording.passes[-1].summary("a")
    one, two = (np.asarray(student.a(x), np.float64) for x in (X, 2 * X))
    assert found.size == 2 * one.size
    np.testing.assert_allclose(found.norm, np.linalg.norm([one, two]), rtol=1e-5)
    insp.close()


def test_one_tree_that_a_program_is_given_is_the_model():
    """In branches and in a second run, too: each has arrays of its own."""
    student, _ = made()

    @jax.jit
    def step(params, x):
        call = lambda params: nnx.merge(graphdef, params)(x)  # noqa: E731
        y = jax.lax.cond(x[0, 0] > 0, call, lambda params: 2 * call(params), params)
        z = jax.checkpoint(call)(params)
        return y.mean() + call(params).mean() + z.mean()

    insp = nni.Inspector(student, X, display=False)
    for _ in insp.watch(range(2), every=1):
        graphdef, params = nnx.split(student)
        step(params, X)
    sizes = [one.summary("a").size for one in insp.recording.passes if one.kind == "watch"]
    assert sizes == [3 * X.shape[0] * 2] * 2
    insp.close()


@pytest.mark.parametrize("tasks", [None, 3])
def test_adapted_parameters_are_the_models(tasks):
    """MAML: they are computed from the model's, in the program; with a vmap, for each task."""
    student, _ = made()
    xs = [X] if tasks is None else [(i + 1) * X for i in range(tasks)]

    @nnx.jit
    def step(student, xs):
        graphdef, params = nnx.split(student)

        def loss_fn(params, x):
            inner = lambda params: (nnx.merge(graphdef, params)(x) ** 2).mean()  # noqa: E731
            slope = jax.grad(inner)(params)
            return inner(jax.tree.map(lambda p, g: p - 0.5 * g, params, slope))

        if tasks is not None:
            every = lambda params: jax.vmap(loss_fn, (None, 0))(params, xs).sum()  # noqa: E731
        else:
            every = lambda params: loss_fn(params, xs[0])  # noqa: E731
        return jax.value_and_grad(every)(params)

    insp = nni.Inspector(student, X, display=False)
    for _ in insp.watch(range(1)):
        step(student, jnp.stack(xs))
    found = insp.recording.passes[-1].summary("a")
    kernel, bias = (np.asarray(p[...], np.float64) for p in (student.a.kernel, student.a.bias))
    both = []
    for x in (np.asarray(x, np.float64) for x in xs):
        first = x @ kernel + bias
        slope = 2 * first / first.size
        both += [first, x @ (kernel - 0.5 * x.T @ slope) + bias - 0.5 * slope.sum(0)]
    assert found.size == sum(y.size for y in both)
    np.testing.assert_allclose(found.norm, np.linalg.norm(both), rtol=1e-5)
    insp.close()
