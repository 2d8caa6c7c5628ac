"""`capture` and `value_and_grad` against the plain call, against NumPy, and against `jax.grad`."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import flax
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from models import ZOO, batch, rngs
from record_checks import arrays_in, assert_rows, assert_summary, summaries

from nnx_inspector.errors import InspectorWarning
from nnx_inspector.hooks import hook
from nnx_inspector.hooks.sites import module_sites
from nnx_inspector.records.capture import capture, value_and_grad

pytestmark = pytest.mark.filterwarnings(
    r"ignore:[\s\S]*Using 'Module\.(sow|perturb):DeprecationWarning",
)


def assert_same(a, b, **tolerance):
    """Equal structure; arrays equal (within a tolerance, if given), everything else equal."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if hasattr(x, "dtype"):
            assert (type(x), x.dtype, x.shape) == (type(y), y.dtype, y.shape)
            if tolerance and jnp.issubdtype(x.dtype, jnp.inexact):
                x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
                np.testing.assert_allclose(x, y, **tolerance)
            else:
                np.testing.assert_array_equal(x, y)
        else:
            assert x == y


@contextlib.contextmanager
def recorded_by_hand(model):
    """Path -> the inputs and outputs of `__call__`, by plain patching of classes.

    Does not use nnx_inspector. Works for eager calls outside transforms.
    """
    paths = {id(m): "/".join(map(str, p)) for p, m in nnx.iter_modules(model)}
    seen: dict[str, list] = {}
    undo = []

    def patch(cls):
        original = cls.__call__

        def call(self, *args, **kwargs):
            out = original(self, *args, **kwargs)
            if type(self) is cls and id(self) in paths:
                seen.setdefault(paths[id(self)], []).append(((args, kwargs), out))
            return out

        undo.append((cls, vars(cls).get("__call__")))
        type.__setattr__(cls, "__call__", call)

    classes = {type(m) for _, m in nnx.iter_modules(model) if callable(m)}
    for cls in sorted(classes, key=lambda cls: -len(cls.__mro__)):
        patch(cls)
    try:
        yield seen
    finally:
        for cls, own in undo:
            if own is None:
                type.__delattr__(cls, "__call__")
            else:
                type.__setattr__(cls, "__call__", own)


# --------------------------------------------------------- the public names


def test_the_public_names_are_functions_in_whatever_order_they_are_used():
    code = "import nnx_inspector as n; n.value_and_grad; assert not hasattr(n.capture, '__file__')"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# ------------------------------------------------- the zoo: results and state


IN_OTHER_TESTS = {
    "mlp",
    "shared",
    "scan",
    "inner_jit",
    "tree",
    "string",
    "integer",
    "bf16",
    "linear",
}
"""Similar cases are tested below: these run only in the long tests."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long if n in IN_OTHER_TESTS else ()) for n in ZOO],
)
def test_eagerly_result_state_and_classes_are_those_of_the_plain_call(name):
    plain, ours = ZOO[name](), ZOO[name]()
    expected = plain.run()
    calls = {type(m): vars(type(m)).get("__call__") for _, m in nnx.iter_modules(ours.model)}
    out, record = capture(ours.model)(*ours.args, **ours.kwargs)
    assert_same(out, expected)
    assert_same(nnx.state(ours.model), nnx.state(plain.model))
    assert nnx.graphdef(ours.model) == nnx.graphdef(plain.model)
    assert {cls: vars(cls).get("__call__") for cls in calls} == calls
    sown = {"features", "hidden"}  # the sites of values in the user's own sow and perturb
    assert set(record) - sown <= {site.key for site in module_sites(ours.model)}
    assert record.unseen == {}


@pytest.mark.parametrize("name", ["cnn", "scan_remat", "cond", "none", "tree_kwargs"])
def test_under_jit_result_and_state_are_those_of_the_plain_call(name):
    plain, ours = ZOO[name](), ZOO[name]()

    @nnx.jit
    def run(model, args, kwargs):
        return model(*args, **kwargs)

    @nnx.jit
    def captured(model, args, kwargs):
        return capture(model)(*args, **kwargs)

    expected = run(plain.model, plain.args, plain.kwargs)
    out, record = captured(ours.model, ours.args, ours.kwargs)
    assert_same(out, expected, atol=1e-6)
    assert_same(nnx.state(ours.model), nnx.state(plain.model), atol=1e-6)
    assert record[""].calls[0].took_place


@pytest.mark.parametrize(
    "name",
    ["nested", "shared", "super", "tree_kwargs", "numpy", "recursive", "integer", "bf16", "keys"],
)
def test_every_summary_is_that_of_the_values_seen_by_hand(name):
    by_hand, ours = ZOO[name](), ZOO[name]()
    with recorded_by_hand(by_hand.model) as seen:
        by_hand.run()
    _, record = capture(ours.model)(*ours.args, **ours.kwargs)
    assert set(record) == set(seen)
    loose = {"rtol": 1e-4, "atol": 1e-5}
    for site, calls in seen.items():
        assert len(record[site].calls) == len(calls), site
        for measured, (arguments, out) in zip(record[site].calls, calls, strict=False):
            if name == "recursive" and site == "":
                continue  # calls end in another order than they begin; see below
            for part, values in (
                ("output", arrays_in(out)),
                ("input", arrays_in(arguments)),
            ):
                of_part = [s for s in summaries(getattr(measured, part)) if not s.opaque]
                assert len(of_part) == len(values), (site, part)
                for summary, value in zip(of_part, values, strict=True):
                    assert_summary(summary, value, **loose)


def test_nested_calls_of_one_site_pair_their_inputs_with_their_outputs():
    model, x = models.Recursive(rngs()), batch(4, 3)
    _, record = capture(model)(x, 2)
    first = jnp.tanh(model.linear(x))
    second = jnp.tanh(model.linear(first))
    for call, received in zip(record[""].calls, (second, first, x), strict=True):
        assert_summary(call.input, received)
        assert_summary(call.output, second)


def test_batch_norm_and_rng_counts_advance_exactly_once():
    case = ZOO["cnn"]()
    model, before = case.model, nnx.clone(case.model)
    capture(model)(*case.args)
    assert int(model.dropout.rngs.count[...]) == int(before.dropout.rngs.count[...]) + 1
    conv = np.asarray(before.conv(*case.args), np.float64)
    expected = 0.01 * conv.mean(axis=(0, 1, 2))
    np.testing.assert_allclose(model.norm.mean[...], expected, atol=1e-6)


def test_a_plain_attribute_that_the_call_sets_is_set_once():
    class Counts(nnx.Module):
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            return x

    model = Counts()
    capture(model)(batch(1, 3))
    assert model.calls == 1


def test_a_module_that_the_call_adds_is_added():
    class Grows(nnx.Module):
        def __call__(self, x):
            if not hasattr(self, "made"):
                self.made = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            return self.made(x)

    model, x = Grows(), batch(4, 3)
    y, _ = capture(model)(x)
    np.testing.assert_array_equal(y, model.made(x))


def test_nan_and_infinity_are_counted():
    x = jnp.array([[jnp.nan, jnp.inf, -jnp.inf], [1.0, 2.0, 3.0]])
    _, record = capture(models.Frozen())(x)
    out = record[""].output
    assert (out.nan, out.posinf, out.neginf, out.finite) == (1, 1, 1, 3)
    assert (out.min, out.max) == (3.0, 9.0)


# ---------------------------------------------------------- control flow


def test_scan_gives_one_row_a_layer():
    model, x = models.Stacked(rngs()), batch(4, 3)
    _, record = capture(model)(x)
    kernels = np.asarray(model.blocks.linear.kernel[...], np.float64)
    biases = np.asarray(model.blocks.linear.bias[...], np.float64)
    hidden, blocks, inputs, y = [], [], [], np.asarray(x, np.float64)
    for kernel, bias in zip(kernels, biases, strict=True):
        inputs.append(y)
        hidden.append(y @ kernel + bias)
        y = y + np.tanh(hidden[-1])
        blocks.append(y)
    assert_rows(record["blocks/linear"].calls[0].output, hidden)
    assert_rows(record["blocks"].calls[0].output, blocks)
    assert_rows(record["blocks"].calls[0].input, inputs)
    assert_summary(record["blocks/linear"].output, np.concatenate(hidden))
    assert_summary(record["blocks[1]"].output, blocks[1])


def test_a_while_loop_that_runs_no_time_has_seen_nothing():
    class Never(models.While):
        def __call__(self, x):
            def body(carry):
                return carry[0], carry[0](carry[1])

            return nnx.while_loop(lambda c: c[1].sum() > 1e9, body, (self.linear, x))[1]

    _, record = capture(Never(rngs()))(batch(4, 3))
    assert record["linear"].output is None
    assert not record["linear"].calls[0].took_place


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond_records_the_taken_branch_alone(sign):
    """TRAPS: `cond` traces both branches; call counts must not come from tracing alone."""
    model, x = models.Cond(rngs()), sign * jnp.abs(batch(4, 3))
    _, record = capture(model)(x)
    taken, other = ("positive", "negative") if sign > 0 else ("negative", "positive")
    assert_summary(record[taken].output, getattr(model, taken)(x))
    assert record[other].output is None


def test_a_cached_inner_jit_is_seen_every_time():
    """TRAPS: a cached inner nnx.jit is not traced again."""
    model, x = models.InnerJit(rngs()), batch(4, 3)
    model(x)
    for _ in range(2):
        _, record = capture(model)(x)
        assert_summary(record["linear"].output, model.linear(x))


def test_a_module_level_jit_works_in_two_traces_of_ours():
    """TRAPS: a cached inner jit in two outer traces with an equal plan: UnexpectedTracerError."""
    model, x = models.InnerJit(rngs()), batch(4, 3)
    first = nnx.jit(lambda m, x: value_and_grad(lambda m, x: m(x).sum())(m, x)[0][1])
    second = nnx.jit(lambda m, x: value_and_grad(lambda m, x: 2 * m(x).sum())(m, x)[0][1])
    a, b = first(model, x)["linear"].gradient, second(model, x)["linear"].gradient
    np.testing.assert_allclose(b.mean, 2 * a.mean, rtol=1e-5)


def test_a_custom_vjp_functions_inside_is_unseen_and_not_an_error():
    """TRAPS: a tap on a closed-over custom_vjp function's inside raises."""

    class Custom(models.Base):
        def __call__(self, x):
            graphdef, state = nnx.split(self.linear)

            @jax.custom_vjp
            def f(state, x):
                return nnx.merge(graphdef, state)(x)

            f.defvjp(lambda s, x: (f(s, x), s), lambda s, g: (jax.tree.map(jnp.zeros_like, s), g))
            return f(state, x)

    model, x = Custom(rngs()), batch(4, 3)
    (loss, record), _ = value_and_grad(lambda m, x: m(x).sum())(model, x)
    np.testing.assert_allclose(loss, model(x).sum(), rtol=1e-6)
    assert "custom_vjp" in record.unseen["linear"]
    with pytest.raises(KeyError, match=r"'linear' could not be read: .*custom_vjp"):
        record["linear"]


def test_a_remat_of_the_users_own_gradient_is_counted_once():
    """TRAPS: under remat what is traced runs twice, the second time in the backward pass."""

    def step(model, x):
        return nnx.grad(lambda m: m(x).sum())(model)

    model, x = models.Stacked(rngs(), remat=True), batch(4, 3)
    _, record = capture(step)(model, x)
    assert int(sum(np.sum(call.ran) for call in record["blocks"].calls)) == 3


# ------------------------------------------------------- what is captured


def test_a_bound_method():
    model, x = models.Methods(rngs()), batch(4, 3)
    y, record = capture(model.encode)(x)
    np.testing.assert_array_equal(y, model.encode(x))
    assert list(record) == ["encoder"]


def test_a_bound_method_that_jit_decorates():
    model, x = models.Decorated(rngs()), batch(4, 3)
    y, record = capture(model.jitted, only="**:*")(x)
    np.testing.assert_array_equal(y, model.jitted(x))
    assert set(record) == {":jitted", "linear"}


def test_other_methods_are_recorded_when_asked_for():
    model, x = models.Methods(rngs()), batch(4, 3)
    _, record = capture(model, only="**:*")(x)
    assert set(record) == {"", ":encode", ":decode", ":update", "encoder", "decoder"}
    assert_summary(record[":encode"].output, model.encode(x))


def test_only_selects_sites():
    _, record = capture(models.Nested(rngs()), only=["blocks/*", nnx.Dict])(batch(4, 3))
    assert set(record) == {"blocks/0", "blocks/1"}


def test_only_that_matches_nothing_names_the_nearest():
    with pytest.raises(ValueError, match=r"'upp' matches no site of this model.*'up'"):
        capture(models.MLP(rngs()), only="upp")(batch(4, 3))


def test_a_number_that_the_model_passes_on_is_an_input():
    class Told(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(5, 3, rngs=nnx.Rngs(0))

        def __call__(self, kind):
            return self.embed(jnp.asarray(kind))  # a constant of the program, in 64 bits

    _, record = capture(Told())(2)
    assert record["embed"].input.mean == 2


def test_constants_of_the_model_are_arrays_of_jax_as_in_a_plain_call():
    class Counts(nnx.Module):
        def __init__(self):
            self.linear, self.last = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.last[...] = jnp.asarray(7.0)
            constants = jnp.asarray(3), jnp.asarray(True), jnp.asarray([1, 2]), np.ones(2)
            return self.linear(x), constants

    plain, model, x = Counts(), Counts(), jnp.ones((1, 2))
    found, expected = capture(model)(x)[0], plain(x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (type(a), a.dtype, a.shape) == (type(b), b.dtype, b.shape)
    assert isinstance(model.last.get_value(), jax.Array)


def test_without_inputs_there_are_none():
    _, record = capture(models.MLP(rngs()), inputs=False)(batch(4, 3))
    assert record["up"].input is None
    assert record["up"].output.size == 16


def test_paths_are_relative_to_the_argument_when_its_submodules_are_called():
    model, x = models.MLP(rngs()), batch(4, 3)
    _, record = capture(lambda model, x: model.down(model.up(x)))(model, x)
    assert set(record) == {"up", "down"}


def test_with_several_modules_keys_begin_with_the_arguments_name():
    def f(student, pair, *, extra, x):
        return student(x) + pair["a"][0](x) + extra(x)

    a, b, c = (models.MLP(rngs(i)) for i in range(3))
    x = batch(4, 3)
    _, record = capture(f)(a, {"a": [b]}, extra=c, x=x)
    assert {k for k in record if k.endswith("up")} == {"student/up", "pair/a/0/up", "extra/up"}
    assert_summary(record["pair/a/0/up"].output, b.up(x))


def test_teacher_and_student_as_two_arguments_are_told_apart():
    """TRAPS: teacher and student (or EMA copy) of equal structure in one jit."""
    student, teacher, x = models.MLP(rngs(0)), models.MLP(rngs(1)), batch(4, 3)

    @nnx.jit
    def run(student, teacher, x):
        return capture(lambda student, teacher: student(x) - teacher(x))(student, teacher)

    _, record = run(student, teacher, x)
    assert_summary(record["student"].output, student(x))
    assert_summary(record["teacher"].output, teacher(x))


def test_one_module_in_two_arguments_is_one_site():
    model, x = models.MLP(rngs()), batch(4, 3)
    _, record = capture(lambda a, b: a(x) + b(x))(model, model)
    assert len(record[""].calls) == 2


def test_calls_of_a_clone_are_unattributed_and_counted_once_each():
    """TRAPS: never merge the calls of a clone with the model's."""
    model, x = models.MLP(rngs()), batch(4, 3)
    with pytest.warns(InspectorWarning, match="1 of MLP, 2 of Linear"):
        _, record = capture(lambda m: m(x) + nnx.clone(m)(x))(model)
    assert len(record[""].calls) == 1
    assert record.unseen["(MLP)"].startswith("1 unattributed call of modules of this type")
    assert record.unseen["(Linear)"].startswith("2 unattributed calls")


def test_without_a_module_there_is_nothing_to_capture():
    def f(x):
        return x

    with pytest.raises(TypeError, match=r"None of the arguments of f holds an nnx.Module"):
        capture(f)(batch(4, 3))


def test_a_module_without_a_call_is_told_so():
    class Mute(nnx.Module):
        pass

    with pytest.raises(TypeError, match=r"capture got a Mute, which has no __call__"):
        capture(Mute())


def test_a_class_is_no_model():
    with pytest.raises(TypeError, match=r"capture is the class MLP|is the class MLP"):
        capture(models.MLP)


def test_the_exception_of_the_forward_pass_is_the_users_and_changes_nothing():
    """TRAPS: an exception leaves `__captures__` on every module."""
    model = models.Fails(rngs())
    before, attributes = nnx.state(model), {p: set(vars(m)) for p, m in nnx.iter_modules(model)}
    before = jax.tree.map(np.asarray, before)
    call = vars(models.Fails)["__call__"]
    for run in (capture(model), value_and_grad(model)):
        with pytest.raises(models.ForwardError) as error:
            run(batch(4, 3))
        assert error.value.args == ("the user's own",)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    assert {p: set(vars(m)) for p, m in nnx.iter_modules(model)} == attributes
    assert vars(models.Fails)["__call__"] is call
    assert hook.open_hooks() == ()
    assert capture(models.MLP(rngs()))(batch(4, 3))[1]["up"].output.size == 16


def test_capture_inside_capture():
    """TRAPS: with nnx.capture the outer one's records are lost."""
    model, x = models.MLP(rngs()), batch(4, 3)

    def f(model, x):
        y, inner = capture(model.up)(x)
        return model.down(jnp.tanh(y)), inner

    (y, inner), record = capture(f)(model, x)
    np.testing.assert_array_equal(y, model(x))
    assert set(inner) == {""}
    assert_summary(inner[""].output, model.up(x))
    assert_summary(record["up"].output, model.up(x))


def test_a_model_of_an_outer_trace_that_cannot_be_written_stays_whole():
    """The plain call raises here too: flax does not change Variables from another trace."""
    model, x = models.InnerJit(rngs()), batch(4, 3)
    with pytest.raises(flax.errors.TraceContextError):
        jax.jit(lambda x: capture(model)(x)[0])(x)
    np.testing.assert_array_equal(model(x), models.InnerJit(rngs())(x))


def test_a_model_that_does_not_change_may_be_closed_over_by_jit():
    model, x = models.MLP(rngs()), batch(4, 3)
    y, record = jax.jit(lambda x: capture(model)(x))(x)
    np.testing.assert_allclose(y, model(x), atol=1e-6)
    assert_summary(record["up"].output, model.up(x))


def test_unattributed_calls_within_a_cached_inner_jit_are_told_every_time():
    @nnx.jit
    def run(module, x):
        return nnx.clone(module)(x)

    model, x = models.Base(rngs()), batch(4, 3)
    with pytest.warns(InspectorWarning, match="1 of Linear"):
        records = [capture(lambda m, x: run(m.linear, x))(model, x)[1] for _ in range(2)]
    assert records[0].unseen == records[1].unseen != {}


def test_a_module_that_the_function_returns_is_returned():
    model, x = models.MLP(rngs()), batch(4, 3)
    (same, y), _ = capture(lambda m, x: (m, m(x)))(model, x)
    assert same is model
    np.testing.assert_array_equal(y, model(x))


# -------------------------------------------------------- value_and_grad


def graded(loss, *args, **options):
    """`value_and_grad`, compiled as one program: eagerly each operation compiles by itself."""
    return nnx.jit(value_and_grad(loss, **options))(*args)


def squares(model, x):
    return (model(x) ** 2).mean()


@pytest.mark.parametrize("name", ["cnn", "nested", "scan_remat", "ensemble", "decorated"])
def test_loss_gradients_and_state_are_those_of_nnx_value_and_grad(name):
    plain, ours = ZOO[name](), ZOO[name]()
    expected, grads = nnx.jit(nnx.value_and_grad(squares))(plain.model, *plain.args)
    (loss, record), our_grads = nnx.jit(value_and_grad(squares))(ours.model, *ours.args)
    assert_same(loss, expected, rtol=1e-6)
    assert_same(our_grads, grads, rtol=1e-5, atol=1e-6)
    assert_same(nnx.state(ours.model), nnx.state(plain.model), atol=1e-6)
    assert record[""].gradient.size == record[""].output.size


@pytest.mark.parametrize(
    "argnums",
    [
        0,
        1,
        -1,
        (0, 1),
        (2,),
        (1, 2),
        nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("up"))),
        (nnx.DiffState(0, nnx.Param), 1),
    ],
    ids=str,
)
def test_argnums_are_those_of_nnx_value_and_grad(argnums):
    def loss(model, x, tree):
        return (model(x) * tree["w"]).sum()

    model, x, tree = models.MLP(rngs()), batch(4, 3), {"w": jnp.float32(2.0)}
    expected, grads = nnx.value_and_grad(loss, argnums=argnums)(model, x, tree)
    (value, _), ours = value_and_grad(loss, argnums=argnums)(model, x, tree)
    assert_same(value, expected, rtol=1e-6)
    assert_same(ours, grads, rtol=1e-5, atol=1e-6)


def test_one_array_given_twice_has_two_gradients():
    model, x = models.MLP(rngs()), batch(4, 3)

    def loss(model, a, b):
        return (model(a) + 3.0 * b.sum()).mean()

    _, expected = nnx.value_and_grad(loss, argnums=(1, 2))(model, x, x)
    _, ours = value_and_grad(loss, argnums=(1, 2))(model, x, x)
    assert_same(ours, expected, rtol=1e-5)


def test_python_numbers_can_be_differentiated():
    model, x = models.MLP(rngs()), batch(4, 3)
    loss = lambda model, x, scale: (scale * model(x)).sum()  # noqa: E731
    _, expected = nnx.value_and_grad(loss, argnums=2)(model, x, 2.0)
    _, ours = value_and_grad(loss, argnums=2)(model, x, 2.0)
    assert_same(ours, expected, rtol=1e-6)


def test_has_aux_keeps_the_auxiliary_values_as_they_are():
    def loss(model, x):
        y = model(x)
        return y.sum(), {"y": y, "n": 3, "name": "logits"}

    model, x = models.MLP(rngs()), batch(4, 3)
    (value, aux, record), grads = value_and_grad(loss, has_aux=True)(model, x)
    (expected, expected_aux), expected_grads = nnx.value_and_grad(loss, has_aux=True)(model, x)
    assert_same((value, aux), (expected, expected_aux), rtol=1e-6)
    assert_same(grads, expected_grads, rtol=1e-5, atol=1e-6)
    assert "up" in record


def test_a_bound_method_is_differentiated_by_its_module():
    class Trains(models.MLP):
        def loss(self, x, scale):
            return scale * (self(x) ** 2).mean()

    model, x = Trains(rngs()), batch(4, 3)
    (loss, _), grads = value_and_grad(model.loss)(x, 1.0)
    assert_same(grads, nnx.grad(lambda m: m.loss(x, 1.0))(model), rtol=1e-5, atol=1e-7)
    _, by_scale = value_and_grad(model.loss, argnums=-1)(x, 2.0)
    np.testing.assert_allclose(by_scale, loss, rtol=1e-6)


def test_the_optimizer_takes_the_gradients():
    import optax

    model, x = models.MLP(rngs()), batch(4, 3)
    plain = nnx.clone(model)
    for m, transform in ((model, value_and_grad), (plain, nnx.value_and_grad)):
        optimizer = nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param)
        optimizer.update(m, transform(squares)(m, x)[1])
    assert_same(nnx.state(model), nnx.state(plain), rtol=1e-5, atol=1e-6)


def test_a_loss_and_more_without_has_aux_is_an_error():
    with pytest.raises(TypeError, match=r"must be one scalar array.*pass has_aux=True"):
        value_and_grad(lambda m, x: (m(x).sum(), m(x)))(models.MLP(rngs()), batch(4, 3))


def test_has_aux_without_aux_is_an_error():
    with pytest.raises(TypeError, match=r"must return \(loss, aux\)"):
        value_and_grad(lambda m, x: m(x).sum(), has_aux=True)(models.MLP(rngs()), batch(4, 3))


def test_a_loss_that_is_no_array_is_an_error():
    with pytest.raises(TypeError, match=r"returned a Python value"):
        value_and_grad(lambda m, x: (3.0, m(x)), has_aux=True)(models.MLP(rngs()), batch(4, 3))


def test_a_loss_that_is_no_scalar_is_an_error():
    with pytest.raises(TypeError, match=r"scalar-output"):
        value_and_grad(lambda m, x: m(x))(models.MLP(rngs()), batch(4, 3))


def test_argnums_out_of_range_is_an_error():
    with pytest.raises(ValueError, match=r"argnums selects argument 5, but there are 2 positional"):
        value_and_grad(squares, argnums=5)(models.MLP(rngs()), batch(4, 3))


def test_argnums_of_something_without_arrays_is_an_error():
    with pytest.raises(TypeError, match=r"argnums names an argument that holds a str"):
        value_and_grad(lambda m, x, s: m(x).sum(), argnums=2)(models.MLP(rngs()), batch(4, 3), "s")


# --------------------------------------------------- gradients of activations


def test_gradients_in_float64():
    with jax.enable_x64(True):
        model = nnx.Linear(3, 2, param_dtype=jnp.float64, rngs=rngs())
        x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
        (_, record), _ = graded(squares, model, x)
        y = np.asarray(x) @ np.asarray(model.kernel[...]) + np.asarray(model.bias[...])
        assert_summary(record[""].gradient, 2 * y / y.size, rtol=1e-13, atol=0)


def test_a_gradient_that_is_zero_is_zero_and_not_none():
    model, x = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs())), batch(4, 3)
    (_, record), _ = graded(lambda m, x: (0.0 * m(x)).sum(), model, x)
    gradient = record["layers/0"].gradient
    assert (gradient.size, gradient.zeros) == (12, 12)


def test_behind_stop_gradient_the_output_is_exact_and_the_gradient_none():
    """TRAPS: a site behind `stop_gradient`: the sink's row stays 0 although the site ran."""
    model, x = models.TeacherStudent(rngs()), batch(4, 3)
    (_, record), _ = graded(lambda m, x: m(x), model, x)
    assert_summary(record["teacher"].output, model.teacher(x))
    assert record["teacher"].gradient is None
    assert record["teacher/up"].gradient is None
    assert record["student"].gradient is not None


def test_an_integer_output_has_no_gradient():
    """TRAPS: an integer output: the sink's row stays 0."""
    model, x = models.Argmax(rngs()), batch(4, 3)
    (_, record), _ = graded(lambda m, x: m(x), model, x)
    assert_summary(record["pick"].output, np.argmax(np.asarray(model.linear(x)), axis=-1))
    assert record["pick"].gradient is None


def test_within_a_while_loop_there_is_no_gradient():
    """TRAPS: a while loop: the sink's row stays 0."""

    def loss(model, x):
        return jax.lax.stop_gradient(model(x)).sum() + model.linear(x).sum()

    model, x = models.While(rngs()), batch(4, 3)
    (_, record), _ = graded(loss, model, x)
    in_loop, outside = record["linear"].calls
    assert int(in_loop.ran) == 3
    assert in_loop.gradient is None
    assert_summary(outside.gradient, np.ones((4, 3)))


def test_an_unused_leaf_of_a_tree_has_no_gradient_and_the_used_one_has():
    model, x = models.TreeOutput(rngs()), batch(4, 3)
    (_, record), _ = graded(lambda m, x: m(x)["y"].sum(), model, x)
    gradient = record[""].gradient
    assert_summary(gradient["y"], np.ones((4, 2)))
    assert gradient["parts"] == (None, [None])
    assert gradient["none"] is None


def test_gradients_of_bfloat16_are_summed_in_float32():
    model, x = models.Half(rngs()), batch(64, 3)
    (_, record), _ = graded(lambda m, x: m(x).astype(jnp.float32).sum() * 0.01, model, x)
    expected = np.full((64, 3), jnp.bfloat16(0.01), np.float64)
    assert_summary(record[""].gradient, expected)


# ------------------------------------------------------------- generated


LAYERS = {
    "linear": lambda r: nnx.Linear(3, 3, rngs=r),
    "norm": lambda r: nnx.BatchNorm(3, rngs=r),
    "layer_norm": lambda r: nnx.LayerNorm(3, rngs=r),
    "dropout": lambda r: nnx.Dropout(0.5, rngs=r),
    "block": lambda r: models.Block(3, r),
    "shared": lambda r: models.Shared(r),
    "stacked": lambda r: models.Stacked(r, depth=2),
    "remat": lambda r: models.Stacked(r, depth=2, remat=True),
    "decorated": lambda r: models.Decorated(r),
    "super": lambda r: models.SupersTwice(r),
}


def build(tree, r):
    """A nested list of names as nested Sequentials."""
    if isinstance(tree, str):
        return LAYERS[tree](r)
    return nnx.Sequential(*(build(child, r) for child in tree))


TREES = st.recursive(
    st.sampled_from(sorted(LAYERS)), lambda c: st.lists(c, min_size=1, max_size=3), max_leaves=4
)
MODES = ("eager", "jit", "grad")


def check_generated(tree, mode):
    plain, ours, x = build(tree, rngs()), build(tree, rngs()), batch(4, 3)
    loss = lambda m, x: (m(x) ** 2).mean()  # noqa: E731
    run = lambda m, x: m(x)  # noqa: E731
    captured = lambda m, x: capture(m)(x)[0]  # noqa: E731
    if mode == "eager":
        assert_same(captured(ours, x), run(plain, x))
    elif mode == "jit":
        assert_same(nnx.jit(captured)(ours, x), nnx.jit(run)(plain, x), atol=1e-6)
    else:
        (value, _), grads = value_and_grad(loss)(ours, x)
        expected, expected_grads = nnx.value_and_grad(loss)(plain, x)
        assert_same(value, expected, rtol=1e-5)
        assert_same(grads, expected_grads, rtol=1e-4, atol=1e-5)
    assert_same(nnx.state(ours), nnx.state(plain), atol=1e-6)
    assert nnx.graphdef(ours) == nnx.graphdef(plain)


@hypothesis.settings(max_examples=6)
@hypothesis.given(tree=TREES, mode=st.sampled_from(MODES))
def test_generated_models_give_what_they_give_without_us(tree, mode):
    check_generated(tree, mode)


@pytest.mark.long
@hypothesis.settings(max_examples=500, derandomize=False)
@hypothesis.given(tree=TREES, mode=st.sampled_from(MODES))
def test_many_generated_models_give_what_they_give_without_us(tree, mode):
    check_generated(tree, mode)
