"""Perturbations: against hand-written models, and what they must leave alone."""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import nnx_inspector as nni
from nnx_inspector.perturbations import perturb, places
from nnx_inspector.perturbations.apply_setting import check_applies
from nnx_inspector.perturbations.places import OFF, SCALE, ZERO, apply_row, combine_rows
from nnx_inspector.stats.samples.sample_units import sample_units
from nnx_inspector.stats.summarize import summarize


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


def by_hand(model, x, factor):
    return model.b(jnp.tanh(model.a(x) * factor))


@pytest.fixture
def model():
    return Net(nnx.Rngs(0))


X = jnp.arange(6.0).reshape(2, 3)


def test_two_on_one_site_multiply_and_nesting_ends_in_order(model):
    with nni.perturb("a", nni.Scale(2.0)):
        with nni.perturb("a", nni.Scale(3.0)):
            np.testing.assert_allclose(model(X), by_hand(model, X, 6.0), rtol=1e-6)
        np.testing.assert_allclose(model(X), by_hand(model, X, 2.0), rtol=1e-6)


def test_only_the_given_model_is_perturbed(model):
    other = Net(nnx.Rngs(0))
    with nni.perturb("a", nni.Zero(), model=model):
        assert np.array_equal(other(X), by_hand(other, X, 1.0))
        np.testing.assert_allclose(model(X), by_hand(model, X, 0.0), rtol=1e-6)


def test_an_exception_inside_leaves_nothing(model):
    clean, before = model(X), dict(perturb._numbers)  # what a call may not add to
    with pytest.raises(KeyError, match="mine"), nni.perturb("a", nni.Zero()):
        raise KeyError("mine")
    assert np.array_equal(model(X), clean)
    assert perturb._numbers == before


def test_zero_removes_nan_and_scale_by_zero_does_not():
    x = jnp.array([jnp.nan, jnp.inf, 1.0])
    assert np.array_equal(apply_row(x, jnp.array([[ZERO, 0.0]]), 0), [0.0, 0.0, 0.0])
    assert np.isnan(apply_row(x, jnp.array([[ZERO, 0.0], [SCALE, 0.0]]), 1)[:2]).all()


@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_a_row_of_zeros_changes_no_bit(values):
    x = jnp.array(values, jnp.float32)
    got = apply_row(x, jnp.zeros((1, 2)), 0)
    assert np.array_equal(np.asarray(x).view(np.uint32), np.asarray(got).view(np.uint32))


@pytest.mark.parametrize("in_c", [True, False])
def test_a_perturbed_value_is_made_once(in_c, monkeypatch):
    monkeypatch.setattr(places, "can_call_everywhere", lambda: in_c)

    def program(x, rows):
        y = apply_row(x @ x, rows, 0)
        return y @ y, summarize(y), sample_units(y)

    compiled = jax.jit(program).lower(jnp.ones((4, 4)), jnp.zeros((1, 2))).compile().as_text()
    fused = r"^[^\n=]*fused[^\n=]*\bf32\[1,2\][^\n]*\{$"
    called = 'custom_call_target="nnx_inspector_apply"'
    readers = [*re.findall(fused, compiled, re.MULTILINE), *re.findall(called, compiled)]
    assert len(readers) == 1, readers


@pytest.mark.parametrize("row", [[OFF, 0.0], [ZERO, 0.0], [SCALE, -1.5]])
def test_in_c_it_is_what_it_is_in_jax(row, monkeypatch):
    x, t = jnp.array([[1.0, -2.0, jnp.inf], [0.1, 3e38, 7.0]]), jnp.linspace(-1.0, 1.0, 6)
    t, rows = t.reshape(2, 3), jnp.array([[SCALE, 9.0], row])

    def uses(x, rows):
        return apply_row(x, rows, 1) + 2 * x  # what is changed in place is needed afterwards

    def everything():
        of_x = lambda x: uses(x, rows)  # noqa: E731
        return (
            jax.jit(uses)(x, rows),
            jax.jvp(of_x, (x,), (t,)),
            jax.vjp(of_x, x)[1](t),
            jax.jvp(lambda rows: uses(x[1], rows), (rows,), (jnp.ones_like(rows),)),
            jax.vmap(of_x)(x),
            jax.vmap(uses, in_axes=(None, 0))(x, jnp.stack([rows, 0 * rows])),
            jax.lax.scan(lambda c, y: (c, apply_row(y, rows, 1)), 0, x)[1],
        )

    found = everything()
    monkeypatch.setattr(places, "can_call_everywhere", lambda: False)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(everything()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_dtype_and_shape_are_kept():
    small = jnp.int4, jnp.uint4, jnp.bool_, jnp.bfloat16, jnp.float8_e5m2
    for dtype in (jnp.int32, *small, jnp.complex64):
        x = jnp.full((2, 3), 4, dtype)
        for row, factor in (([OFF, 0.0], 1.0), ([ZERO, 0.0], 0.0), ([SCALE, 0.5], 0.5)):
            got = apply_row(x, jnp.array([row]), 0)
            assert (got.dtype, got.shape) == (x.dtype, x.shape)
            scaled = np.asarray(factor * float(x[0, 0].real)).astype(x.dtype)
            np.testing.assert_array_equal(got, np.full((2, 3), scaled))


def test_combine_lets_zero_win_and_factors_multiply():
    assert combine_rows([]) == (OFF, 0.0)
    assert combine_rows([nni.Scale(2.0), nni.Scale(0.25)]) == (SCALE, 0.5)
    assert combine_rows([nni.Scale(2.0), nni.Zero(), nni.Scale(3.0)]) == (ZERO, 0.0)


@pytest.mark.parametrize(
    ("output", "refused"),
    [
        ("float32[2]", ""),
        ("(float32[3], bfloat16[3,1])", ""),
        ("Out(a=float32[3], b=[complex64[]])", ""),
        ("{'mask': bool[4], 'x': float32[2]}", r"returns bool\[4\]"),
        ("(float32[2], key<fry>[])", "returns key<fry>"),
        ("(None, 'text')", "returns no array"),
    ],
)
def test_scale_needs_floats_wherever_they_are_in_the_result(output, refused):
    if not refused:
        return check_applies(nni.Scale(0.5), "a", output)
    with pytest.raises(TypeError, match=refused):
        check_applies(nni.Scale(0.5), "a", output)


def test_scale_on_integers_is_refused_with_the_site_and_dtype():
    class Argmax(nnx.Module):
        def __call__(self, x):
            return x.argmax(-1)

    with pytest.raises(TypeError, match=r"Argmax.*int32\[2\]|'\(root\)' returns int32\[2\]"):
        with nni.perturb("", nni.Scale(0.5)):
            Argmax()(X)
    with nni.perturb("", nni.Zero()):
        assert np.array_equal(Argmax()(X), [0, 0])


def test_a_site_that_is_not_there_names_the_closest(model):
    with pytest.raises(ValueError, match=r"'c' matches no site.*closest"):
        with nni.perturb("c", nni.Zero(), model=model):
            pass
    with pytest.raises(ValueError, match="'c' matches no site"):
        with nni.perturb("c", nni.Zero()):
            model(X)


def test_it_holds_under_scan_and_remat():
    stack = models.Stacked(nnx.Rngs(0), remat=True)  # x + tanh of a layer
    loss = lambda m, x: m(x).sum()  # noqa: E731
    with nni.perturb("blocks/linear", nni.Zero()):
        value, grads = nnx.jit(nnx.value_and_grad(loss))(stack, X)
    np.testing.assert_allclose(value, X.sum(), rtol=1e-6)
    assert all(not np.any(g) for g in jax.tree.leaves(grads))


def test_a_program_keeps_the_numbers_it_started_with_and_one_compiled_ahead_reads_them(model):
    forward, clean = nnx.jit(lambda model, x: model(x)), model(X)
    with nni.perturb("a", nni.Scale(3.0)):
        out = forward(model, X)  # may still run when the region ends
        compiled = forward.lower(model, X).compile()
        ahead = compiled(model, X)
    for x in (out, ahead):
        np.testing.assert_allclose(x, by_hand(model, X, 3.0), rtol=1e-6)
    for x in (compiled(model, X), forward(model, X)):
        np.testing.assert_allclose(x, clean, rtol=1e-6)


def test_a_function_is_held_by_the_caches_of_jax_alone():
    """`jax.clear_caches()` frees it, and what it closes over, once another program is compiled."""
    model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
    forward, expected, alive = nnx.jit(lambda model, x: model(x)), model(x), []
    for _ in range(3):
        double = lambda v: 2 * v  # noqa: E731
        alive.append(weakref.ref(double))
        with nni.perturb("", nni.Apply(double)), nni.perturb("", nni.Apply(double)):
            np.testing.assert_allclose(forward(model, x), 4 * expected, 1e-6)
        del double
    jax.clear_caches()
    gc.collect()
    with nni.perturb("", nni.Zero()):
        assert not forward(model, x).any()
    assert [one() for one in alive] == [None] * 3
