"""The two primitives are bitwise identities under every transformation, and observe values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from models import batch

from nnx_inspector.program.instrument import evaluate
from nnx_inspector.program.marks import mark, mark_tree, seeded
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.structure import is_observable, structure_of
from nnx_inspector.program.survey import survey

X = batch(4, 3)


def marked(x):
    return mark_tree(x, owner=None, site="s", part="output")


def marks_of(jaxpr):
    return [e for e in jaxpr.eqns if e.primitive is mark]


# -------------------------------------------------------------------- mark


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.complex64])
def test_a_mark_is_the_identity(dtype):
    odd = [jnp.nan, jnp.inf, -jnp.inf] if jnp.issubdtype(dtype, jnp.inexact) else [2.0, 3.0, 4.0]
    x = jnp.array([-0.0, *odd]).astype(dtype)
    for f in (marked, jax.jit(marked), jax.vmap(marked)):
        assert np.asarray(f(x)).tobytes() == np.asarray(x).tobytes()


def test_a_mark_leaves_one_equation_with_its_parameters():
    (found,) = marks_of(jax.make_jaxpr(marked)(X))
    assert (found.params["site"], found.params["part"]) == ("s", "output")
    assert str(found.params["structure"]) == "float32[4,3]"


def test_derivatives_pass_through_a_mark():
    f = lambda x: jnp.sin(marked(x) ** 2).sum()  # noqa: E731
    g = lambda x: jnp.sin(x**2).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(f)(X), jax.grad(g)(X), rtol=1e-6)
    np.testing.assert_allclose(jax.hessian(f)(X), jax.hessian(g)(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(f)(X), jax.jacrev(g)(X), rtol=1e-6)


def test_a_linear_function_with_a_mark_can_be_transposed():
    (ct,) = jax.linear_transpose(lambda x: 2.0 * marked(x), X)(jnp.ones_like(X))
    np.testing.assert_array_equal(ct, np.full((4, 3), 2.0))


def test_only_the_forward_value_is_marked_in_a_gradient():
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: (marked(x) ** 2).sum()))(X)
    assert len(marks_of(jaxpr)) == 1


def test_a_mark_without_arrays_still_leaves_its_equation():
    (found,) = marks_of(jax.make_jaxpr(lambda x: (marked(None), x)[1])(X))
    assert str(found.params["structure"]) == "nothing"


def test_what_is_no_array_passes_by():
    word = object()
    tree = {"a": X, "b": ("text", 3, None, word)}
    out = mark_tree(tree, owner=None, site="s", part="output")
    assert out["b"] == ("text", 3, None, word)
    np.testing.assert_array_equal(out["a"], X)


def test_numpy_arrays_keys_modules_and_variables_stay_the_objects_they_are():
    module, variable = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones(2))
    for x in (np.arange(3.0, dtype=np.float32), jax.random.key(0), module, variable):
        assert marked(x) is x


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (X, True),
        (np.ones(2), True),
        (3, False),
        ("a", False),
        (np.array(["a"]), False),
        (np.array([None]), False),
        (np.zeros(2, jax.dtypes.float0), False),
        (np.zeros(2, [("a", "f4")]), False),
        (np.zeros(2, ml_dtypes.int1), False),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), True),
        (np.zeros(2, ml_dtypes.int4), True),
        (jax.random.key(0), False),
    ],
    ids=str,
)
def test_what_is_observable(value, expected):
    assert is_observable(value) is expected


def test_what_has_a_shape_and_no_numbers_says_so():
    found = []

    def f(x):
        token = jax.lax.create_token(x)
        tree = {"x": x, "key": jax.random.split(jax.random.key(0), 3), "token": token, "n": 3}
        marked(tree | {"zero": np.zeros((2,), jax.dtypes.float0)})
        return x

    for e in marks_of(jax.make_jaxpr(f)(X)):
        found.append(e.params["structure"].summaries(["measured"]))
    ((key, n, token, x, zero),) = [tuple(tree[k] for k in sorted(tree)) for tree in found]
    assert (key.opaque, key.size) == ("key<fry>[3]", 3)
    assert (token.opaque, token.size) == ("token", 0)
    assert (zero.opaque, zero.size) == ("float0[2]", 2)
    assert (n, x) == (None, "measured")
    assert np.isnan([key.mean, token.max, zero.norm]).all()


def test_a_structure_is_hashable_and_puts_values_back():
    tree = lambda x: marked({"a": x, "b": ("t", x + 1)})["a"]  # noqa: E731
    (found,) = marks_of(jax.make_jaxpr(tree)(X))
    structure = found.params["structure"]
    assert hash(structure) == hash(structure)
    assert structure.parts == ("", "b.1")
    assert structure.unflatten([1, 2]) == {"a": 1, "b": (None, 2)}
    assert str(structure) == "float32[4,3], str, float32[4,3]"


def test_an_array_that_occurs_twice_is_marked_once():
    def f(x):
        (c, h), out = marked(((x + 1, x), x))
        return c, h is out, h

    jaxpr = jax.make_jaxpr(lambda x: f(x)[::2])(X)
    (found,) = marks_of(jaxpr)
    structure = found.params["structure"]
    assert len(found.invars) == 2
    assert structure.unflatten([1, 2]) == ((1, 2), 2)
    assert structure.parts == ("0.0", "")  # the state is also the output, the least deep
    assert f(X)[1]


def test_the_main_array_is_floating_has_axes_and_is_the_least_deep():
    whole, part, loss = jnp.ones((2, 3)), jnp.ones((2, 3), jnp.bfloat16), jnp.float32(1)
    cases = [
        ((loss, whole), "1"),
        ((jnp.arange(3), {"b": part, "a": whole}), "1.a"),
        ((({"x": whole},), part, jnp.ones(3)), "1"),
        ((jnp.arange(3), loss), "1"),
        ((jnp.arange(3), jnp.array(True)), "0"),
    ]
    for tree, name in cases:
        structure = structure_of(tree, jax.tree.leaves(tree))
        assert structure.names[structure.main] == name
        assert structure.named_arrays()[0][0] == name


# ---------------------------------------------------------------- gradients

HOW = {"owner": "us", "site": "s", "of": (0, 0), "mapped": ((),), "members": None}
SEED = jnp.float32(0)


def gradients_in(f, *args):
    """The summaries of the gradients that a program marks."""
    found = survey(jax.make_jaxpr(f)(*args), "us")
    _, seen = evaluate(found, jax.tree.leaves(args), plan=Plan())
    return [one.summaries[0] for _, _, one in found.walk(seen)]


def observed(f, x):
    """The summary of the gradient of x in f, differentiated with respect to the seed alone."""
    (found,) = gradients_in(jax.grad(lambda seed: f(seeded(x, seed, **HOW))), SEED)
    return found


def assert_observed(summary, values):
    values = np.asarray(values, np.float64)
    assert summary.size == values.size
    np.testing.assert_allclose(summary.mean, values.mean(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(summary.std, values.std(), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose((summary.min, summary.max), (values.min(), values.max()), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_a_seeded_value_is_bitwise_the_value(dtype):
    x = jnp.asarray([-0.0, jnp.nan, 3.0], dtype)
    f = lambda x: seeded(x, SEED, **HOW)  # noqa: E731
    for run in (f, jax.jit(f), jax.vmap(f)):
        assert np.asarray(run(x)).tobytes() == np.asarray(x).tobytes()


def test_the_gradient_of_a_value_is_marked():
    assert_observed(observed(lambda x: (x**2).sum(), X), 2 * np.asarray(X))


def test_the_gradient_of_the_value_is_what_it_is_without_and_that_of_the_seed_is_0():
    f = lambda x, seed: jnp.sin(seeded(x, seed, **HOW)).sum()  # noqa: E731
    ours, of_seed = jax.grad(f, argnums=(0, 1))(X, SEED)
    np.testing.assert_array_equal(ours, jax.grad(lambda x: jnp.sin(x).sum())(X))
    np.testing.assert_array_equal(jax.grad(f)(X, SEED), ours)
    assert of_seed == 0


def test_a_value_that_nothing_depends_on_has_no_mark():
    f = lambda seed: jax.lax.stop_gradient(seeded(X, seed, **HOW)).sum()  # noqa: E731
    assert gradients_in(jax.grad(f), SEED) == []


def test_nan_and_infinity_of_a_gradient_are_counted():
    weights = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1.0])
    summary = observed(lambda x: (x * weights).sum(), jnp.ones(4))
    assert (summary.nan, summary.posinf, summary.neginf, summary.finite) == (1, 1, 1, 1)


def test_a_complex_gradient_is_summarised_by_its_magnitude():
    x = jnp.array([3.0 + 4.0j, 0.0])
    summary = observed(lambda x: (x * jnp.conj(x)).real.sum(), x)
    np.testing.assert_allclose(summary.max, 10.0, rtol=1e-6)


def test_of_a_batch_the_whole_is_summarised():
    def f(seed):
        return jax.vmap(lambda x: (seeded(x, seed, **HOW) ** 2).sum())(X).sum()

    (found,) = gradients_in(jax.grad(f), SEED)
    assert_observed(found, 2 * np.asarray(X))


def test_of_the_gradient_of_each_example_too():
    one = lambda x: jax.grad(lambda seed: (seeded(x, seed, **HOW) ** 2).sum())(SEED)  # noqa: E731
    (found,) = gradients_in(jax.vmap(one), X)
    assert_observed(found, 2 * np.asarray(X))


def test_in_a_scan_each_iteration_has_a_row_with_remat_too():
    def f(seed):
        step = lambda c, _: (jnp.sin(seeded(c, seed, **HOW)), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(step), X, None, length=3)[0].sum()

    (summary,) = gradients_in(jax.grad(f), SEED)
    x = np.asarray(X, np.float64)
    inputs = [x, np.sin(x), np.sin(np.sin(x))]
    ct = np.ones_like(x)
    expected = []
    for value in reversed(inputs):
        ct = ct * np.cos(value)
        expected.append(ct)
    for i, values in enumerate(reversed(expected)):
        assert_observed(summary.row(i), values)


@pytest.mark.parametrize("ticket", [1, 5])
def test_a_mark_can_have_the_value_of_the_seed(ticket):
    def f(x, seed):
        return (seeded(x, seed, **HOW, ticket=True) ** 2).sum()

    found = survey(jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(X, SEED), "us")
    out, seen = evaluate(found, [X, SEED + ticket], plan=Plan())
    ((_, _, one),) = found.walk(seen)
    assert one.ticket == ticket
    assert_observed(one.summaries[0], 2 * np.asarray(X))
    np.testing.assert_array_equal(out[0], 2 * X)


def test_jvp_and_hessian_go_on_working():
    """TRAPS: a `custom_vjp` tap breaks `jvp` and `hessian`."""
    f = lambda x: jnp.sin(seeded(x, SEED, **HOW)).sum()  # noqa: E731
    g = lambda x: jnp.sin(x).sum()  # noqa: E731
    x, t = X[0], jnp.ones(3)
    np.testing.assert_array_equal(jax.jvp(f, (x,), (t,))[1], jax.jvp(g, (x,), (t,))[1])
    np.testing.assert_allclose(jax.hessian(f)(x), jax.hessian(g)(x), rtol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(jax.jacfwd(f))(x), jax.hessian(g)(x), rtol=1e-6)


def test_a_derivative_of_the_backward_pass_is_what_it_is_without():
    def grads(x):
        f = lambda x, seed: (seeded(x, seed, **HOW) ** 3).sum()  # noqa: E731
        return jax.grad(f, argnums=(0, 1))(x, SEED)

    second, of_seed = jax.jvp(grads, (X[0],), (jnp.ones(3),))[1]
    np.testing.assert_allclose(second, 6 * np.asarray(X[0]), rtol=1e-6)
    assert not np.asarray(of_seed).any()


def test_a_gradient_in_float64_is_summarised_in_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=5))
        np.testing.assert_allclose(
            observed(lambda x: (x**2).sum(), x).mean, 2 * np.asarray(x).mean(), rtol=1e-13
        )
