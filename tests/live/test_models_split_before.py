"""Models that were split before the loop: attributed by their structure, or not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from training import Net

import nnx_inspector as nni

X = jax.random.normal(jax.random.key(3), (5, 3))
IGNORED = "ignore:.*could not be attributed:nnx_inspector.errors.InspectorWarning"
UNATTRIBUTED = pytest.mark.filterwarnings(IGNORED)


def split(seed=0, outs=2):
    model = Net(seed, outs=outs)
    return model, *nnx.split(model)


def sizes(recording):
    return [{site: found.size for site, q, found in one.items() if q == "output"}
            for one in recording.passes]  # fmt: skip


ALL = {"": 10, "a": 20, "b": 10}


def test_a_step_that_merges_an_older_graphdef_is_measured():
    model, graphdef, state = split()

    @jax.jit
    def step(state, x):
        loss_fn = lambda state: (nnx.merge(graphdef, state)(x) ** 2).mean()  # noqa: E731
        grads = jax.grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    with nni.watch(model, every=1) as recording:
        for _ in range(2):
            before = nnx.merge(graphdef, state)
            state = step(state, X)
    assert sizes(recording) == [ALL, ALL]
    last = recording.passes[-1].summary("a", "output")
    np.testing.assert_allclose(last.mean, np.mean(before.a(X)), rtol=1e-5)
    assert recording.passes[-1].summary("a", "gradient").size == 20


@pytest.mark.parametrize("each_step", [False, True])
def test_a_tree_that_is_merged_within_the_loop_stays_the_model(each_step):
    """Merged once, it was the model in the first step, and a clone in all others."""
    model = Net()
    older, step, tree = nnx.graphdef(Net(1)), nnx.jit(lambda m, x: m(x)), None
    insp = nni.Inspector(model, X, display=False)
    for _ in insp.watch(range(4), every=1):
        if each_step or tree is None:
            tree = nnx.merge(older, jax.tree.map(lambda x: 2 * x, nnx.state(model)))
        y = step(tree, X)
    watched = [one for one in insp.recording.passes if one.kind == "watch"]
    assert [one.step for one in watched] == [0, 1, 2, 3]
    for one in watched:
        np.testing.assert_allclose(one.summary("").norm, np.linalg.norm(y), rtol=1e-5)
    insp.close()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_that_the_step_casts_are_the_models(dtype):
    """Mixed precision by hand: the loop carries float32, and the model computes in 16 bits."""
    model, graphdef, state = split()

    @jax.jit
    def step(state, x):
        def loss_fn(state):
            halves = jax.tree.map(lambda p: p.astype(dtype), state)
            return (nnx.merge(graphdef, halves)(x.astype(dtype)).astype(jnp.float32) ** 2).mean()

        grads = jax.grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    ratios = []
    with nni.watch(model, every=1) as recording:
        for _ in range(3):
            old, state = state, step(state, X)
            kernels = (np.asarray(x["a"]["kernel"][...], np.float64) for x in (old, state))
            before, after = kernels
            ratios.append(np.linalg.norm(after - before) / np.linalg.norm(before))
    assert sizes(recording) == [ALL] * 3
    found = [one.update_ratio("a/kernel") for one in recording.passes]
    np.testing.assert_allclose(found, ratios, rtol=1e-3)
    assert {p.dtype for p in recording.facts.parameters} == {"float32"}
    of_dtypes = [str(one) for one in nni.diagnose(recording) if one.rule == "dtype"]
    assert of_dtypes == []
    assert {s.leaving for s in recording.facts.sites} == {jnp.dtype(dtype).name}


def test_of_two_trees_in_one_program_neither_is_taken_for_the_model():
    model, graphdef, state = split()
    student, teacher = (jax.tree.map(jnp.copy, state) for _ in range(2))

    @jax.jit
    def step(student, teacher, x):
        def loss_fn(student):
            y, target = nnx.merge(graphdef, student)(x), nnx.merge(graphdef, teacher)(x)
            return ((y - target) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(student)
        student = jax.tree.map(lambda p, g: p - 0.1 * g, student, grads)
        return student, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, teacher, student), loss

    def watched(student, teacher):
        with nni.watch(model, every=1) as recording:
            for _ in range(2):
                student, teacher, _ = step(student, teacher, X)
        return recording

    for _ in range(2):  # the second region runs the program of the first, or traces it again
        with pytest.warns(nni.InspectorWarning, match="two trees of its structure"):
            recording = watched(student, teacher)
        assert recording.passes == ()


@pytest.mark.parametrize("model_first", [True, False])
@UNATTRIBUTED
@pytest.mark.filterwarnings("ignore:.*two trees:nnx_inspector.errors.InspectorWarning")
def test_beside_the_model_itself_no_other_tree_is_taken_for_it(model_first):
    model, graphdef, _ = split()
    _, _, other = split(seed=1)

    @nnx.jit
    def step(model, other, x):
        first = model(x) if model_first else nnx.merge(graphdef, other)(x)
        second = nnx.merge(graphdef, other)(x) if model_first else model(x)
        return ((first - second) ** 2).mean()

    with nni.watch(model, every=1) as recording:
        step(model, other, X)
    (one,) = recording.passes
    np.testing.assert_allclose(one.summary("", "output").mean, np.mean(model(X)), rtol=1e-5)
    assert one.summary("", "output").size == 10


def test_a_tree_that_is_merged_twice_from_the_same_values_makes_two_calls():
    model, graphdef, state = split()

    @jax.jit
    def step(state, x):
        loss_fn = lambda state: (nnx.merge(graphdef, state)(x) ** 2).mean()  # noqa: E731
        return jax.grad(loss_fn)(state), nnx.merge(graphdef, state)(2 * x)

    with nni.watch(model, every=1) as recording:
        step(state, X)
    assert sizes(recording) == [ALL, ALL]


@UNATTRIBUTED
@pytest.mark.filterwarnings(
    "ignore:Nothing in the watched region:nnx_inspector.errors.InspectorWarning"
)
def test_a_tree_of_another_structure_is_another_model():
    model = Net()
    _, graphdef, state = split(outs=5)
    with nni.watch(model, every=1) as recording:
        jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)
    assert recording.passes == ()


def test_a_perturbation_acts_on_it_and_on_no_twin():
    model, graphdef, state = split()
    forward = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    both = jax.jit(lambda a, b, x: nnx.merge(graphdef, a)(x) + nnx.merge(graphdef, b)(x))
    insp = nni.Inspector(model, X, display=False)
    handle = insp.perturb("b", nni.Zero())
    for _ in insp.watch(range(1), every=1):
        assert not forward(state, X).any()
    assert handle.not_acting == ""
    twin = jax.tree.map(lambda x: x + 1.0, state)

    def watched():
        return [both(state, twin, X) for _ in insp.watch(range(3), every=1)][-1]

    state = jax.tree.map(jnp.copy, state)
    with pytest.warns(nni.InspectorWarning, match="two trees of its structure"):
        found = watched()
    np.testing.assert_allclose(found, forward(state, X) + forward(twin, X), rtol=1e-6)
    assert "two trees" in handle.not_acting
    insp.close()


@UNATTRIBUTED
@pytest.mark.parametrize("tree", [0, 1])
def test_of_two_trees_the_chosen_one_is_the_model(tree):
    """In an iterator; `test_teachers` has a region."""
    model, graphdef, state = split()
    twin = jax.tree.map(lambda x: 2 * x, state)
    both = jax.jit(lambda a, b, x: (nnx.merge(graphdef, a)(x), nnx.merge(graphdef, b)(x)))
    insp = nni.Inspector(model, X, display=False)
    for _ in insp.watch(range(1), every=1, tree=tree):
        out = both(state, twin, X)
    insp.close()
    found = insp.recording.summary("", index=-1)
    np.testing.assert_allclose(found.mean, np.mean(out[tree]), rtol=1e-5)
    assert found.size == out[tree].size


@UNATTRIBUTED
@pytest.mark.parametrize("tree", [None, 0])
def test_the_models_own_arrays_are_the_model_whoever_merges_them(tree):
    model, graphdef, state = split()
    twin = jax.tree.map(lambda x: 2 * x, state)

    @nnx.jit
    def step(model, state, twin, x):
        both = model(x), nnx.merge(graphdef, state)(2 * x)
        return sum(both) + nnx.merge(graphdef, twin)(x)

    with nni.watch(model, every=1, tree=tree) as recording:
        step(model, state, twin, X)
    means = [one.summary("").mean for one in recording.passes]
    np.testing.assert_allclose(means, [np.mean(model(X)), np.mean(model(2 * X))], rtol=1e-5)


@pytest.mark.parametrize("tree", [-1, "student", True])
def test_a_tree_is_a_number(tree):
    with pytest.raises(ValueError, match="tree must be the number of a tree"):
        nni.watch(Net(), tree=tree).__enter__()
