"""Where `nnx.capture` works it is the oracle, value by value; the hooks do not disturb it."""

from __future__ import annotations

import contextlib
import inspect
import threading
import types

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import linen, nnx
from interceptors import pass_through
from leftovers import nothing_is_left_behind  # noqa: F401
from models import ZOO, batch, rngs
from record_checks import arrays_in, assert_summary, summaries

import nnx_inspector
from nnx_inspector.errors import InspectorWarning
from nnx_inspector.hooks.intercept import intercept_methods
from nnx_inspector.perturbations.activations import Scale
from nnx_inspector.perturbations.perturb import perturb
from nnx_inspector.records.capture import capture, value_and_grad

pytestmark = pytest.mark.filterwarnings(
    r"ignore:[\s\S]*Using 'Module\.(sow|perturb):DeprecationWarning",
)


def method_outputs(f):
    """Flax's capture: the output of every method is sown where the method is called."""
    return nnx.capture(f, nnx.Intermediate, method_outputs=nnx.Intermediate)


def flat(state):
    """A nested State as {path with the name last: value}."""
    out = {}

    def visit(node, path):
        for key, value in node.items():
            if isinstance(value, nnx.Variable):
                out[(*path, key)] = value.get_value()
            else:
                visit(value, (*path, key))

    visit(state, ())
    return out


METHODS = {"head", "encode"}
"""Names that are methods in the models of this file."""


def site_of(path):
    """The site key of what flax sows under a path: a method's output, or the user's own value."""
    head, name = "/".join(map(str, path[:-1])), path[-1]
    if name == "__call__":
        return head
    return f"{head}:{name}" if name in METHODS else "/".join(map(str, path))


def is_function(x):
    return isinstance(x, types.FunctionType)


def bits(tree):
    """The leaves of a tree with arrays as bytes, to compare them bit for bit."""
    out = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        is_array = isinstance(leaf, (jax.Array, np.ndarray))
        out.append((np.asarray(leaf).dtype, np.asarray(leaf).tobytes()) if is_array else leaf)
    return out


def assert_close(a, b, tolerance=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
        else:
            assert bits(x) == bits(y)


# ------------------------------------------------- the oracle, value for value

BEYOND_THE_ORACLE = {
    "rnn": TypeError,
    "while": ValueError,
    "cond": TypeError,
    "decorated": ValueError,
    "methods": TypeError,
    "frozen_sealed": Exception,
}
"""Models that nnx.capture(method_outputs=) cannot run, and the errors that it raises."""

ROWS = {"scan", "scan_remat", "ensemble"}
"""Models whose oracle gives one array with a row for each layer or member."""

CHAINS = {"supers": 2, "twice": 3}
"""Sites whose `super()` chain the oracle logs at each of its steps, the site's own last."""

LARGER = ["cnn", "nested", "inner_jit"]
"""Models similar to others: tested with gradients in the long tests only."""

ORACLE = sorted(ZOO.keys() - BEYOND_THE_ORACLE)


def oracle(name, *, jit=False):
    """{site: [one value per call]} by flax, and the result."""
    case = ZOO[name]()
    run = lambda m, args, kwargs: method_outputs(m)(*args, **kwargs)  # noqa: E731
    out, state = (nnx.jit(run) if jit else run)(case.model, case.args, case.kwargs)
    sown = {site_of(path): list(values) for path, values in flat(state).items()}
    if name == "super":
        for site, steps in CHAINS.items():
            assert len(sown[site]) == steps
            sown[site] = sown[site][-1:]
    return out, sown


@pytest.mark.parametrize("name", sorted(BEYOND_THE_ORACLE))
def test_what_the_oracle_cannot_run_we_can(name):
    """When flax supports it, remove the name from the list: then it is compared."""
    with pytest.raises(BEYOND_THE_ORACLE[name]):
        oracle(name)
    case = ZOO[name]()
    _, record = capture(case.model)(*case.args, **case.kwargs)
    assert record.unseen == {}
    assert record[""].calls[0].took_place


@pytest.mark.parametrize("name", [n for n in ORACLE if n not in models.TRANSFORMED])
def test_an_interceptor_sees_exactly_the_values_that_the_oracle_sows(name):
    seen, case = {}, ZOO[name]()

    def collect(next_fun, args, kwargs, context):
        out = next_fun(*args, **kwargs)
        if context.path is not None:
            seen.setdefault(context.site, []).append(out)
        return out

    with intercept_methods(collect):
        ours = case.run()
    out, sown = oracle(name)
    sown.pop("features", None)  # the user's own: not a method
    assert bits(ours) == bits(out)
    assert seen.keys() == sown.keys()
    for site, values in sown.items():
        assert jax.tree.structure(seen[site]) == jax.tree.structure(values), site
        assert bits(seen[site]) == bits(values), site


@pytest.mark.parametrize("name", ["scan", "scan_remat", "inner_jit", "remat_super", "ensemble"])
def test_inside_transforms_an_interceptor_sees_exactly_the_values_of_the_oracle(name):
    """Values leave the transform by a callback: one per layer, one per member."""
    seen, case = {}, ZOO[name]()

    def collect(next_fun, args, kwargs, context):
        out = next_fun(*args, **kwargs)
        receive = seen.setdefault(context.site, []).append
        jax.debug.callback(receive, out, ordered=name != "ensemble")
        return out

    with intercept_methods(collect, model=case.model):
        case.run()
    jax.effects_barrier()
    _, sown = oracle(name)
    assert seen.keys() == sown.keys()
    for site, (values,) in sown.items():
        expected = list(values) if name in ROWS and site else [values]
        assert sorted(np.asarray(v).tobytes() for v in seen[site]) == sorted(
            np.asarray(v).tobytes() for v in expected
        ), site


@pytest.mark.parametrize("name", [n for n in ORACLE if n not in models.EAGER_ONLY])
def test_every_summary_is_that_of_the_values_that_the_oracle_sows(name):
    out, sown = oracle(name, jit=True)
    case = ZOO[name]()
    ours, record = nnx.jit(lambda m, args, kwargs: capture(m)(*args, **kwargs))(
        case.model, case.args, case.kwargs
    )
    assert_close(ours, out)
    of_perturb = {"hidden"} if name == "perturbs" else set()  # another type of Variable
    assert set(record) == set(sown) | of_perturb
    for site, values in sown.items():
        calls = [call for call in record[site].calls if call.took_place]
        assert len(calls) == len(values), site
        for call, value in zip(calls, values, strict=True):
            found = [s for s in summaries(call.output) if not s.opaque]
            assert len(found) == len(arrays_in(value)), site
            for summary, array in zip(found, arrays_in(value), strict=True):
                if name in ROWS and site:
                    assert summary.rows == array.shape[:1]
                    for i, row in enumerate(array):
                        assert_summary(summary.row(i), row)
                else:
                    assert_summary(summary, array)


@pytest.mark.parametrize(
    "name", ["shared", "scan_remat", *(pytest.param(n, marks=pytest.mark.long) for n in LARGER)]
)
def test_within_value_and_grad_the_values_are_those_of_the_oracle(name):
    def loss(model, *args):
        y, sown = method_outputs(model)(*args)
        return (y**2).mean(), sown

    case, ours = ZOO[name](), ZOO[name]()
    grads, state = nnx.jit(nnx.grad(loss, has_aux=True))(case.model, *case.args)
    (_, record), our_grads = nnx.jit(value_and_grad(lambda m, *args: (m(*args) ** 2).mean()))(
        ours.model, *ours.args
    )
    assert_close(our_grads, grads, 1e-5)
    for path, values in flat(state).items():
        assert_summary(record[site_of(path)].output, np.stack(values))


def test_methods_of_a_bound_method_are_those_of_the_oracle():
    class Encodes(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(3, 3, rngs=rngs)

        def encode(self, x):
            return jnp.tanh(self.inner(x))

        def head(self, x):
            return {"logits": 2.0 * x, "norm": (x**2).sum()}

        def run(self, x, *, scale):
            return self.head(self.encode(scale * x))

        def __call__(self, x):
            raise AssertionError("never called")

    model, x = Encodes(rngs()), batch(4, 3)
    y, state = method_outputs(model.run)(x, scale=2.0)
    ours, record = capture(model.run, only="**:*")(x, scale=2.0)
    assert bits(ours) == bits(y)
    sown = {site_of(path): value for path, value in flat(state).items()}
    assert set(record) == {":run", *sown} == {":run", ":head", ":encode", "inner"}
    for site, (value,) in sown.items():
        for summary, array in zip(summaries(record[site].output), arrays_in(value), strict=True):
            assert_summary(summary, array)


def test_a_vmap_over_members_gives_the_values_of_the_oracle():
    x = batch(4, 3)

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return models.Base(rngs)

    def each(f):
        return nnx.vmap(f, in_axes=(0, None))(make(rngs()), x)

    sown = flat(each(lambda m, x: method_outputs(m)(x)[1]))
    record = nnx.jit(lambda: each(lambda m, x: capture(m)(x)[1]))()
    assert {site_of(path) for path in sown} == set(record)
    for path, (values,) in sown.items():
        for i in range(2):
            assert_summary(record[site_of(path)].calls[0].output.row(i), values[i])


# --------------------------------------------------- each beside the other


def around(f, *args):
    with intercept_methods(pass_through):
        return f(*args)


def around_of_model(f, *args):
    with intercept_methods(pass_through, model=args[0]):
        return f(*args)


def recorded(f, *args):
    return capture(f)(*args)[0]


def perturbed(f, *args):
    with perturb("", Scale(1.0), model=args[0]):
        return f(*args)


HOOKS = [around, around_of_model, recorded, perturbed]
"""Ways to open hooks around a function of a model; none changes its result."""

hooks = pytest.mark.parametrize("hook", HOOKS, ids=lambda f: f.__name__)


def sown_by(name, wrap_inside, wrap_outside):
    """The result and all sown values, with hooks opened inside and outside nnx.capture."""
    case = ZOO[name]()

    def inside(model, args, kwargs):
        return wrap_inside(lambda m, args, kwargs: m(*args, **kwargs), model, args, kwargs)

    def captured(model, args, kwargs):
        return method_outputs(inside)(model, args, kwargs)

    out, state = wrap_outside(captured, case.model, case.args, case.kwargs)
    return bits(out), {path: bits(value) for path, value in flat(state).items()}


def plainly(f, *args):
    return f(*args)


def beside(*short):
    """Models to combine with every hook: a few by default, all in the long tests."""
    names = ["cnn", "shared", "scan_remat", "super", "tree_kwargs", "sows"]
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=() if n in short else pytest.mark.long) for n in names]
    )


@beside("cnn", "super", "sows")
@hooks
def test_hooks_around_nnx_capture_change_nothing_that_it_gives(name, hook):
    assert sown_by(name, plainly, hook) == sown_by(name, plainly, plainly)


@beside("shared", "scan_remat", "sows")
@hooks
def test_hooks_inside_nnx_capture_change_nothing_that_it_gives(name, hook):
    assert sown_by(name, hook, plainly) == sown_by(name, plainly, plainly)


def captures_on_lists():
    """Whether nnx.capture puts its buffers onto an nnx.List too (flax < 0.12.10 or so)."""
    found = []
    look = lambda m: found.append(hasattr(m.layers, "__captures__"))  # noqa: E731
    nnx.capture(look, nnx.Intermediate)(nnx.Sequential())
    return found[0]


captures_sit_on_lists = pytest.mark.xfail(
    "captures_on_lists()",
    strict=True,
    raises=ValueError,
    reason="with its buffer an nnx.List has keys that do not sort, in our State as in nnx.grad's "
    "and jax.jit's; nnx.jit, which flattens otherwise, works",
)


@hooks
def test_hooks_inside_and_around_nnx_capture_change_nothing_that_it_gives(hook):
    assert sown_by("cnn", hook, hook) == sown_by("cnn", plainly, plainly)


@captures_sit_on_lists
def test_a_record_made_inside_nnx_capture_is_that_of_one_made_outside():
    x = batch(4, 3)

    def f(model, x):
        return capture(model)(x)[1]

    inside, _ = method_outputs(f)(models.Nested(rngs()), x)
    jax.tree.map(np.testing.assert_array_equal, inside, f(models.Nested(rngs()), x))


def test_a_record_made_around_nnx_capture_has_the_sites_of_the_model_each_once():
    model, x = models.Nested(rngs()), batch(4, 3)
    (_, state), record = capture(lambda m, x: method_outputs(m)(x))(model, x)
    assert record.unseen == {}
    for path, (value,) in flat(state).items():
        (call,) = record[site_of(path)].calls
        assert_summary(call.output, value)


@hooks
def test_nnx_capture_of_a_function_jitted_before_and_after_the_hooks(hook):
    case = ZOO["cnn"]()
    run = nnx.jit(lambda m, x: method_outputs(m)(x))
    before = run(nnx.clone(case.model), *case.args)
    with_hooks = hook(run, nnx.clone(case.model), *case.args)
    after = run(nnx.clone(case.model), *case.args)
    assert_close(with_hooks, before)
    assert bits(after) == bits(before)


# ------------------------------------------------- the recipe of four steps


class Recipe(nnx.Module):
    """The model of the recipe in flax's guide, with a parameter and modules."""

    def __init__(self, rngs):
        self.up, self.inner = nnx.Linear(3, 3, rngs=rngs), Inner()

    def __call__(self, x):
        h = self.perturb("grad_of_h", self.up(x))
        self.sow(nnx.Intermediate, "activations", h)
        return (self.inner(jnp.tanh(h)) ** 2).sum()


class Inner(nnx.Module):
    def __call__(self, x):
        x = self.perturb("grad_of_x", x)
        y = 3.0 * x
        self.sow(nnx.Intermediate, "y", y)
        return y


def four_steps(model, x, hook=plainly):
    """One: zero perturbations. Two: the model with them. Three: gradients. Four: all in one."""
    _, perturbations = hook(lambda m: nnx.capture(m, nnx.Perturbation)(x), model)

    def loss(model, perturbations, x):
        run = lambda m: nnx.capture(m, nnx.Intermediate, init=perturbations)(x)  # noqa: E731
        return hook(run, model)

    (grads, perturb_grads), sown = nnx.grad(loss, argnums=(0, 1), has_aux=True)(
        model, perturbations, x
    )
    return grads, nnx.merge_state(perturb_grads, sown)


def by_hand(model, x):
    """Cotangents of h and of the inner x, the sown h and y, in float64."""
    w = lambda v: np.asarray(v[...], np.float64)  # noqa: E731
    h = np.asarray(x, np.float64) @ w(model.up.kernel) + w(model.up.bias)
    inner = np.tanh(h)
    by_inner = 18.0 * inner
    return by_inner * (1 - inner**2), by_inner, h, 3.0 * inner


def test_the_recipe_without_us_is_what_we_think_it_is():
    model, x = Recipe(rngs()), batch(4, 3)
    _, found = four_steps(model, x)
    grad_h, grad_x, h, y = by_hand(model, x)
    np.testing.assert_allclose(found["grad_of_h"].get_value(), grad_h, rtol=1e-4)
    np.testing.assert_allclose(found["inner"]["grad_of_x"].get_value(), grad_x, rtol=1e-5)
    np.testing.assert_allclose(found["activations"].get_value()[0], h, rtol=1e-5)
    np.testing.assert_allclose(found["inner"]["y"].get_value()[0], y, rtol=1e-5)


@hooks
@pytest.mark.parametrize("where", ["around", "inside"])
def test_the_recipe_gives_to_the_bit_what_it_gives_without_us(hook, where):
    model, x = Recipe(rngs()), batch(4, 3)
    expected = bits(four_steps(model, x))
    found = hook(four_steps, model, x) if where == "around" else four_steps(model, x, hook)
    assert bits(found) == expected
    assert bits(four_steps(model, x)) == expected
    assert not any(hasattr(m, "__captures__") for _, m in nnx.iter_modules(model))


@hooks
def test_the_recipe_in_a_jitted_step_made_before_the_hooks(hook):
    model, x = Recipe(rngs()), batch(4, 3)
    step = nnx.jit(four_steps)
    expected = step(model, x)
    assert_close(hook(step, model, x), expected)
    assert bits(step(model, x)) == bits(expected)


@hooks
def test_the_recipe_under_vmap(hook):
    """Perturbations with a batch axis, from a batched first step, as in the guide."""
    model, x = Recipe(rngs()), batch(4, 3)

    @nnx.jit
    def step(model, x):
        def first(model, x):
            graphdef, captures, params = nnx.split(model, nnx.Intermediate, nnx.Param)
            forward = lambda c, p, x: nnx.merge(graphdef, c, p)(x)  # noqa: E731
            return nnx.vmap(forward, in_axes=(0, None, 0))(captures, params, x)

        _, perturbations = nnx.capture(first, nnx.Perturbation)(model, x)

        def gradients(model, perturbations, x):
            def loss(model, perturbations, x):
                return nnx.capture(model, nnx.Intermediate, init=perturbations)(x)

            transform = nnx.grad(loss, argnums=(0, 1), has_aux=True)
            (_, perturb_grads), sown = transform(model, perturbations, x)
            return nnx.merge_state(perturb_grads, sown)

        return nnx.vmap(gradients, in_axes=(None, 0, 0))(model, perturbations, x)

    expected = step(model, x)
    assert_close(hook(step, model, x), expected)
    assert bits(step(model, x)) == bits(expected)


def test_our_record_of_the_recipe_agrees_with_it():
    """Gradients of activations in one pass, for which the recipe needs two and a buffer."""
    model, x = Recipe(rngs()), batch(4, 3)
    found = four_steps(model, x)[1]
    (_, record), _ = nnx.jit(value_and_grad(lambda m, x: m(x)))(model, x)
    assert_summary(record["up"].gradient, found["grad_of_h"].get_value())
    assert_summary(record["up"].output, found["activations"].get_value()[0])
    assert_summary(record["inner"].output, found["inner"]["y"].get_value()[0])


@pytest.mark.parametrize("name", ["sows", "perturbs"])
@hooks
def test_sow_and_perturb_outside_of_any_capture_change_the_model_as_without_us(name, hook):
    """Deprecated, and still used: they set an attribute of the module."""
    plain, ours = ZOO[name](), ZOO[name]()
    run = lambda m, x: m(x)  # noqa: E731
    for _ in range(2):
        assert bits(run(plain.model, *plain.args)) == bits(hook(run, ours.model, *ours.args))
    assert nnx.graphdef(ours.model) == nnx.graphdef(plain.model)
    assert bits(nnx.state(ours.model)) == bits(nnx.state(plain.model))


# ------------------------------------------------------------- exceptions


@pytest.mark.parametrize("inside", HOOKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("outside", [plainly, around, recorded], ids=lambda f: f.__name__)
def test_an_exception_within_all_of_them_is_the_users_and_leaves_nothing_of_ours(inside, outside):
    model, x = models.Fails(rngs()), batch(4, 3)
    broken = lambda m, x: m(x)  # noqa: E731
    with pytest.raises(models.ForwardError, match=r"^the user's own"):
        outside(lambda m, x: method_outputs(lambda m, x: inside(broken, m, x))(m, x), model, x)
    plain = models.Fails(rngs())
    with pytest.raises(models.ForwardError):
        method_outputs(plain)(x)
    names, left = ({p: set(vars(m)) for p, m in nnx.iter_modules(m)} for m in (model, plain))
    if outside is recorded:  # a pass that raises changes nothing
        left = {path: own - {"__captures__"} for path, own in left.items()}
    assert names == left
    good = models.MLP(rngs())
    assert bits(around(lambda m: m(x), good)) == bits(good(x))


def test_after_a_failed_nnx_capture_the_model_can_still_be_captured_by_us():
    """TRAPS: an exception leaves `__captures__` on every module."""

    class Fails(models.MLP):
        def __call__(self, x, fail=False):
            y = super().__call__(x)
            if fail:
                raise models.ForwardError("mine")
            return y

    model, x = Fails(rngs()), batch(4, 3)
    expected = capture(models.MLP(rngs()))(x)[1]
    with pytest.raises(models.ForwardError):
        method_outputs(model)(x, fail=True)
    _, record = capture(model)(x)
    for site in expected:
        jax.tree.map(np.testing.assert_array_equal, record[site].output, expected[site].output)


# ----------------------------- the first table of TRAPS, row by row, done right


def test_inherited_methods_are_seen_and_private_ones_pass_by():
    """TRAPS: inherited `__call__`, `_private` methods: silently missing; `super()` logs twice."""

    class Has(nnx.Module):
        def __init__(self, rngs):
            self.heir, self.base = models.Inherits(rngs), models.Base(rngs)
            self.chain = models.SupersTwice(rngs)

        def _mix(self, x):
            return self.heir(x) + self.base(x)

        def __call__(self, x):
            return self.chain(self._mix(x))

    model, x = Has(rngs()), batch(4, 3)
    _, record = capture(model, only="**:*")(x)
    modules = {"", "heir", "base", "chain"}
    assert set(record) == modules | {f"{m}/linear" for m in modules if m}
    assert {len(record[site].calls) for site in record} == {1}
    assert_summary(record["heir"].output, model.heir(x))
    assert_summary(record["chain"].output, model(x))


def test_static_methods_properties_class_methods_and_generators():
    """TRAPS: static method TypeError; property, classmethod not captured; a generator is sown."""

    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        @staticmethod
        def halve(x):
            return x / 2

        @classmethod
        def factor(cls):
            return 2.0

        @property
        def weight(self):
            return self.linear.kernel[...]

        def pieces(self, x):
            for row in range(2):
                yield self.linear(x[row])

        def __call__(self, x):
            return self.halve(sum(self.pieces(x))) * self.factor() + self.weight.sum()

    model, x = Odd(rngs()), batch(4, 3)
    y, record = capture(model, only="**:*")(x)
    assert bits(y) == bits(model(x))
    assert set(record) == {"", ":pieces", "linear"}
    assert record[":pieces"].output is None, "a generator holds no array"
    assert_summary(record["linear"].output, model.linear(x[:2]))


def test_a_string_or_function_returned_within_jit():
    """TRAPS: string or function returned under jit: TypeError."""

    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.words = models.Words(rngs)

        def __call__(self, x):
            name, activation, factor, y = self.words(x)
            assert name == "logits"
            return activation(factor * y)

    model, x = Outer(rngs()), batch(4, 3)
    y, record = nnx.jit(lambda m, x: capture(m)(x))(model, x)
    np.testing.assert_allclose(y, model(x), atol=1e-6)
    first, second, number, summary = record["words"].output
    assert (first, second, number) == (None, None, None)
    assert_summary(summary, model.words.linear(x))


def test_the_same_class_outside_the_tree_is_none_of_the_models():
    """TRAPS: same class outside the tree: ValueError `Expected '__call__' to be a Variable`."""
    helper = nnx.Linear(3, 3, rngs=rngs(1))

    class Uses(models.Base):
        def __call__(self, x):
            return helper(self.linear(x))

    model, x = Uses(rngs()), batch(4, 3)
    y, record = capture(model)(x)
    assert bits(y) == bits(model(x))
    assert set(record) == {"", "linear"}
    (call,) = record["linear"].calls
    assert_summary(call.output, model.linear(x))
    assert "unattributed" in record.unseen["(Linear)"]


def test_a_module_made_during_the_forward_pass():
    """TRAPS: module made during the forward pass: ValueError."""

    class Makes(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return nnx.Linear(3, 3, rngs=nnx.Rngs(7))(self.linear(x))

    model, x = Makes(rngs()), batch(4, 3)
    y, record = capture(model)(x)
    assert bits(y) == bits(model(x))
    assert_summary(record["linear"].output, model.linear(x))
    assert "unattributed" in record.unseen["(Linear)"]


def test_a_merge_of_an_older_graphdef():
    """TRAPS: merge of an older graphdef: ValueError."""
    model, x = models.MLP(rngs()), batch(4, 3)
    graphdef, state = nnx.split(model)
    teacher = jax.tree.map(lambda value: value + 1.0, state)

    def both(model, x):
        return model(x) + nnx.merge(graphdef, teacher)(x)

    with pytest.warns(InspectorWarning, match="split before the hooks"):
        y, record = capture(both)(model, x)
    assert bits(y) == bits(both(model, x))
    (call,) = record[""].calls
    assert_summary(call.output, model(x))
    assert "unattributed" in record.unseen["(MLP)"]


def test_an_nnx_module_inside_linen():
    """TRAPS: ToLinen: ValueError."""

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2)(nnx.bridge.to_linen(nnx.Linear, 3, 2)(x))

    x, seen = batch(4, 3), []

    def look(next_fun, args, kwargs, context):
        seen.append(type(context.module))
        return next_fun(*args, **kwargs)

    outer = Outer()
    variables = outer.init(jax.random.key(0), x)
    plain = outer.apply(variables, x)
    with intercept_methods(look):
        hooked = outer.apply(variables, x)
    assert bits(hooked) == bits(plain)
    assert seen == [nnx.Linear]


def test_captures_in_two_threads_and_one_in_another():
    """TRAPS: two threads, nested capture: silent loss."""
    x, together, found, errors = batch(4, 3), threading.Barrier(2), {}, []

    def work(i):
        try:
            model, both = models.Shared(rngs(i)), nnx.jit(capture(lambda m, x: capture(m)(x)))
            together.wait(60)
            for _ in range(3):
                (_, inner), outer = both(model, x)
            found[i] = model, inner, outer
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for model, inner, outer in found.values():
        for record in (inner, outer):
            assert {site: len(record[site].calls) for site in record} == {"": 1, "first": 2}
            assert_summary(record[""].output, model(x))


@pytest.mark.parametrize("already_traced", [False, True])
def test_a_jit_that_closes_over_the_model(already_traced):
    """TRAPS: `jax.jit` closure: empty if already traced, leaked tracers if not."""
    model, x = models.MLP(rngs()), batch(4, 3)
    forward = jax.jit(lambda x: model(x))
    if already_traced:
        forward(x)
    with jax.checking_leaks():
        _, record = capture(lambda m, x: forward(x))(model, x)
    assert set(record) == {"", "up", "down"}
    assert_summary(record["up"].output, model.up(x))


@pytest.mark.parametrize("partial", [nnx.cached_partial, nnx.jit_partial])
def test_partials_with_the_model_bound(partial):
    """TRAPS: `cached_partial`, `jit_partial`: silently empty."""
    model, x = models.MLP(rngs()), batch(4, 3)
    fun = lambda m, x: capture(m)(x)  # noqa: E731
    if partial is nnx.jit_partial:
        run = partial(fun, model, graph_updates=False)
    else:
        run = partial(nnx.jit(fun), model)
    for _ in range(2):
        y, record = run(x)
        np.testing.assert_allclose(y, model(x), rtol=1e-6)
        assert_summary(record["up"].output, model.up(x))


def test_the_model_need_not_be_the_first_argument():
    """TRAPS: model not the first argument: silently empty."""
    model, x = models.MLP(rngs()), batch(4, 3)
    _, record = capture(lambda x, model: model(x))(x, model)
    _, by_name = capture(lambda x, *, model: model(x))(x, model=model)
    assert set(record) == set(by_name) == {"", "up", "down"}


class UnlikeBranches(models.Cond):
    """Two modules in one branch and one in the other."""

    def __call__(self, x):
        return nnx.cond(
            x.sum() > 0,
            lambda p, n, x: jnp.tanh(p(x)) + n(x),
            lambda p, n, x: n(x),
            self.positive,
            self.negative,
            x,
        )


class Fori(models.While):
    def __call__(self, x):
        return nnx.fori_loop(0, 3, lambda i, c: (c[0], jnp.tanh(c[0](c[1]))), (self.linear, x))[1]


class VmapNone(models.Base):
    def __call__(self, x):
        return nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(self.linear, x)


@pytest.mark.parametrize("cls", [models.While, Fori])
def test_a_loop_whose_body_is_traced_more_than_once_counts_what_ran(cls):
    """TRAPS: nnx.capture raises in while and fori loops, which cannot carry sown values."""
    model, x = cls(rngs()), batch(4, 3)
    y, record = nnx.jit(lambda m, x: capture(m)(x))(model, x)
    outputs, value = [], x
    for _ in range(3):
        outputs.append(model.linear(value))
        value = jnp.tanh(outputs[-1])
    np.testing.assert_allclose(y, value, atol=1e-6)
    (call,) = record["linear"].calls
    assert int(np.sum(call.ran)) == 3
    assert_summary(record["linear"].output, np.stack(outputs), 1e-4)
    assert record.unseen == {}


@pytest.mark.parametrize("cls", [UnlikeBranches, VmapNone, models.Recurrent])
def test_control_flow_that_cannot_carry_sown_values(cls):
    """TRAPS: vmap(in_axes=None), RNN, cond with unlike branches: raises."""
    model = cls(rngs())
    x = jnp.abs(batch(2, 4, 3) if cls is models.Recurrent else batch(4, 3))
    y, record = nnx.jit(lambda m, x: capture(m)(x))(model, x)
    np.testing.assert_allclose(y, model(x), atol=1e-6)
    assert record.unseen == {}
    expected = {
        UnlikeBranches: lambda: {"positive": model.positive(x), "negative": model.negative(x)},
        VmapNone: lambda: {"linear": model.linear(x)},
        models.Recurrent: lambda: {"rnn": model.rnn(x)},
    }[cls]()
    for site, values in expected.items():
        assert_summary(record[site].output, values, 1e-4)
    if cls is models.Recurrent:
        assert record["rnn/cell/dense_h"].output.size == x.shape[0] * x.shape[1] * 2


def test_one_site_called_with_two_shapes():
    """TRAPS: perturb called twice with different shapes: silently broadcasts."""

    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.inner = models.Frozen()

        def __call__(self, x):
            return self.inner(x).sum() + (self.inner(x[0]) ** 2).sum()

    model, x = Twice(rngs()), batch(4, 3)
    (loss, record), _ = nnx.jit(value_and_grad(lambda m, x: m(x)))(model, x)
    np.testing.assert_allclose(loss, model(x), rtol=1e-6)
    first, second = record["inner"].calls
    v = np.asarray(x, np.float64)
    assert_summary(first.output, 3 * v)
    assert_summary(second.output, 3 * v[0])
    assert_summary(first.gradient, np.ones((4, 3)))
    assert_summary(second.gradient, 6 * v[0])
    assert_summary(record["inner"].gradient, np.concatenate([np.ones(12), 6 * v[0]]))


def raw_vmap(linear, x):
    return jax.vmap(linear)(x)


def raw_checkpoint(linear, x):
    return jax.checkpoint(lambda x: linear(x))(x)


def raw_scan(linear, x):
    return jax.lax.scan(lambda carry, row: (carry, linear(row)), 0.0, x)[1]


def raw_jit(linear, x):
    return jax.jit(lambda x: linear(x))(x)


RAW = [raw_vmap, raw_checkpoint, raw_scan, raw_jit]


def test_raw_jax_transforms_within_a_module():
    """TRAPS: raw `jax.vmap` loses the batch axis; `checkpoint`, `lax.scan`, `jit` leak tracers."""

    class Uses(models.Base):
        def __call__(self, x):
            return sum((raw(self.linear, x) ** 2).mean() for raw in RAW)

    model, x = Uses(rngs()), batch(4, 3)
    with jax.checking_leaks():
        (loss, record), grads = nnx.jit(value_and_grad(lambda m, x: m(x)))(model, x)
    plain = lambda m, x: len(RAW) * (m.linear(x) ** 2).mean()  # noqa: E731
    expected, expected_grads = nnx.value_and_grad(plain)(model, x)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(grads, expected_grads, 1e-5)
    y = np.asarray(model.linear(x), np.float64)
    assert len(record["linear"].calls) == len(RAW)
    for call in record["linear"].calls:
        assert_summary(call.output, y)
        assert_summary(call.gradient, 2 * y / y.size)


def fresh_family():
    """Fresh classes, because nnx.tabulate changes a class for good."""

    class Parent(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.linear(x))

        def features(self, x):
            return self(x)

    class Heir(Parent):
        pass

    class Calls(nnx.Module):
        def __init__(self, rngs):
            self.heir = Heir(rngs)

        def __call__(self, x):
            return self.heir.features(x)

    return Calls(rngs()), Heir


ORDERS = ["tabulate, hooks", "hooks, tabulate, hooks", "tabulate within hooks, hooks"]


@pytest.mark.usefixtures("after_tabulate")
def test_tabulate_and_hooks_in_every_order():
    """TRAPS: `nnx.tabulate` leaves inherited methods copied onto subclasses for good."""
    for order in ORDERS:
        tabulated(order)


def tabulated(order):
    x = batch(4, 3)
    untouched, _ = fresh_family()
    expected, table = untouched(x), nnx.tabulate(untouched, x)
    model, heir = fresh_family()

    def hooked(run):
        seen = []

        def look(next_fun, args, kwargs, context):
            seen.append(context.site)
            return next_fun(*args, **kwargs)

        with intercept_methods(look):
            run(model)
            seen.clear()
            out = model(x)
        assert bits(out) == bits(expected)
        assert seen == ["", "heir:features", "heir", "heir/linear"]

    def tabulate(model):
        assert nnx.tabulate(model, x) == table

    if order.startswith("hooks"):
        hooked(lambda model: None)
    if "within" in order:
        hooked(tabulate)
    else:
        tabulate(model)
    hooked(lambda model: None)
    tabulate(model)
    _, record = capture(model, only="**:*")(x)
    assert set(record) == {"", "heir:features", "heir", "heir/linear"}
    assert bits(model(x)) == bits(expected)
    calls = [0]

    def counting(next_fun, args, kwargs, context):
        calls[0] += 1
        return next_fun(*args, **kwargs)

    with intercept_methods(counting, only="heir"):
        model(x)
    assert calls == [1], f"{heir.__name__}.__call__ is one call, though tabulate copied it"


@pytest.mark.usefixtures("after_tabulate")
def test_what_tabulate_within_hooks_leaves_on_a_class_is_none_of_ours():
    """It copies what it finds on the class while the hooks are open."""
    own = nnx_inspector.__file__.rpartition("/")[0]
    model, heir = fresh_family()
    with intercept_methods(pass_through):
        nnx.tabulate(model, batch(4, 3))
    for name, value in vars(heir).items():
        function = inspect.unwrap(value) if callable(value) else value
        if is_function(function):
            assert not function.__code__.co_filename.startswith(own), name


@pytest.mark.usefixtures("after_tabulate")
def test_an_nnx_capture_after_tabulate_within_hooks_is_no_worse_than_without_us():
    """TRAPS: a later capture(method_outputs) recurses without end."""
    x = batch(4, 3)

    def outcome(hooks):
        model, _ = fresh_family()
        with hooks:
            nnx.tabulate(model, x)
        try:
            out, _ = method_outputs(model)(x)
        except (RecursionError, SystemError):
            return "recursion"
        return bits(out)

    expected = bits(fresh_family()[0](x))
    assert outcome(intercept_methods(pass_through)) in (expected, outcome(contextlib.nullcontext()))
