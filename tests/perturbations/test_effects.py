"""The measures of an effect, against NumPy and SciPy-like formulas in float64."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from effect_oracle import kl_oracle, relative_oracle, top1_oracle
from hypothesis import given, settings

from nnx_inspector.perturbations.effects import (
    kl_divergence,
    logits_of,
    relative_change,
    relative_change_in_trace,
    top1_changed,
)
from nnx_inspector.program.marks import OUTPUT, mark_tree

RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(2, 5, 7)).astype(np.float32)


def in_trace(f):
    return lambda *args: float(jax.jit(f)(*args))


RELATIVE = {"host": relative_change, "program": in_trace(relative_change_in_trace)}
kl, top1 = in_trace(kl_divergence), in_trace(top1_changed)
both = pytest.mark.parametrize("where", ["host", "program"])


def same(found, expected, **kwargs):
    """The host's form of a measure: None where a program has NaN."""
    assert (found is None) == (expected is None)
    if found is not None:
        np.testing.assert_allclose(found, expected, **kwargs)


def of_program(expected):
    return math.nan if expected is None else expected


# ------------------------------------------------------------------ relative


@both
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_relative_change_is_over_all_arrays_of_a_tree(where, dtype):
    clean = {"a": jnp.asarray(A, dtype), "b": (jnp.asarray(B[0], dtype), jnp.arange(3))}
    other = {"a": jnp.asarray(B, dtype), "b": (jnp.asarray(A[0], dtype), jnp.arange(3) + 9)}
    floats = [[t["a"], t["b"][0]] for t in (clean, other)]
    expected = relative_oracle(*floats)
    np.testing.assert_allclose(RELATIVE[where](clean, other), expected, rtol=1e-6)


@both
def test_relative_change_of_complex_arrays(where):
    clean, other = A + 1j * B, B - 2j * A
    np.testing.assert_allclose(
        RELATIVE[where](jnp.asarray(clean), jnp.asarray(other)),
        relative_oracle([clean], [other]),
        rtol=1e-6,
    )


@both
def test_places_with_the_same_infinity_in_both_count_for_nothing(where):
    masked = np.where(A > 1, -np.inf, A), np.where(A > 1, -np.inf, B)
    expected = relative_oracle([A[A <= 1]], [B[A <= 1]])
    np.testing.assert_allclose(RELATIVE[where](*masked), expected, rtol=1e-6)
    assert RELATIVE[where](masked[0], masked[0]) == 0
    assert RELATIVE[where](masked[0], A) is None or math.isnan(RELATIVE[where](masked[0], A))
    assert RELATIVE[where](A, masked[0]) == math.inf


@both
@pytest.mark.parametrize(
    ("clean", "perturbed"),
    [
        ([3e38, -3e38], [-3e38, 3e38]),
        ([1e-30, 2e-30], [3e-30, -1e-30]),
        ([1e30, 1e-30], [1e30, 1e25]),
        ([1e-15, 0.0], [1e20, 3.0]),
        ([3.3e38] * 64, [3.2e38] * 64),
        ([1.0, 2.0], [1.0, 2.0]),
    ],
)
def test_relative_change_neither_overflows_nor_underflows(where, clean, perturbed):
    clean, perturbed = np.float32(clean), np.float32(perturbed)
    expected = relative_oracle([clean], [perturbed])
    found = RELATIVE[where](jnp.asarray(clean), jnp.asarray(perturbed))
    np.testing.assert_allclose(found, expected, rtol=2e-6)


CASES = {
    "zero norm": ([0.0, 0.0], [1.0, 2.0], None),
    "no elements": ([], [], None),
    "clean NaN": ([math.nan, 1.0], [1.0, 1.0], None),
    "clean Inf": ([math.inf, 1.0], [1.0, 1.0], None),
    "perturbed NaN": ([1.0, 1.0], [math.nan, 1.0], math.nan),
    "perturbed NaN and Inf": ([1.0, 1.0], [math.nan, math.inf], math.nan),
    "perturbed Inf": ([1.0, 1.0], [-math.inf, 1.0], math.inf),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_finite_or_has_no_meaning_is_never_0(name):
    clean, perturbed, expected = CASES[name]
    clean, perturbed = np.float32(clean), np.float32(perturbed)
    same(relative_change(clean, perturbed), expected)
    found = RELATIVE["program"](jnp.asarray(clean), jnp.asarray(perturbed))
    np.testing.assert_equal(found, of_program(expected))


def test_without_a_floating_array_there_is_no_relative_change():
    assert (
        relative_change({"n": np.arange(3), "text": "a"}, {"n": np.ones(3, int), "text": "b"})
        is None
    )
    assert math.isnan(float(relative_change_in_trace(jnp.arange(3), jnp.arange(3))))


def test_unlike_outputs_are_an_error():
    with pytest.raises(ValueError, match="outputs differ in"):
        relative_change({"a": A}, {"b": A})
    with pytest.raises(ValueError, match=r"\[5, 7\] and \[7\]"):
        relative_change(A, A[0])


# -------------------------------------------------------------------- logits


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_kl_divergence_is_that_of_the_formula(scale):
    clean, other = A * scale, (A + 0.3 * B) * scale
    found = kl(jnp.asarray(clean), jnp.asarray(other))
    np.testing.assert_allclose(found, kl_oracle(clean, other), rtol=1e-4)


def test_a_small_divergence_is_no_difference_of_large_numbers():
    clean = np.round(A * 1024) / 1024
    other = clean + np.round(B * 8) / 2**16  # exact in float32
    found = kl(jnp.asarray(clean), jnp.asarray(other))
    np.testing.assert_allclose(found, kl_oracle(clean, other), rtol=2e-2)
    assert kl(jnp.asarray(clean), jnp.asarray(clean)) == 0.0


def test_classes_that_are_masked_by_minus_inf():
    clean, other = A.copy(), B.copy()
    clean[:, 2] = other[:, 2] = -math.inf
    expected = kl_oracle(np.delete(clean, 2, 1), np.delete(other, 2, 1))
    np.testing.assert_allclose(kl(jnp.asarray(clean), jnp.asarray(other)), expected, rtol=1e-5)
    freed = B.copy()
    with np.errstate(invalid="ignore"):
        p = np.exp(clean.astype(np.float64))
        p /= p.sum(-1, keepdims=True)
        q = np.exp(freed.astype(np.float64))
        q /= q.sum(-1, keepdims=True)
    expected = np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / q), 0).sum(-1).mean()
    np.testing.assert_allclose(kl(jnp.asarray(clean), jnp.asarray(freed)), expected, rtol=1e-5)
    assert kl(jnp.asarray(freed), jnp.asarray(clean)) == math.inf


@pytest.mark.parametrize("measure", [kl, top1], ids=["kl", "top1"])
def test_nan_among_logits_is_never_0(measure):
    broken = A.copy()
    broken[1, 1] = math.nan
    for pair in ((A, broken), (broken, A), (A[:0], A[:0])):
        assert math.isnan(measure(*map(jnp.asarray, pair)))


def test_a_row_without_any_class_left_has_no_divergence():
    nothing = A.copy()
    nothing[1] = -math.inf
    assert math.isnan(kl(jnp.asarray(A), jnp.asarray(nothing)))


def test_top1_counts_the_places_where_another_class_is_the_likeliest():
    expected = top1_oracle(A, B)
    assert 0 < expected < 1
    np.testing.assert_allclose(top1(jnp.asarray(A), jnp.asarray(B)), expected, rtol=1e-6)
    assert top1(jnp.asarray(A), jnp.asarray(3 * A)) == 0.0


def test_bfloat16_logits_are_measured_in_a_wider_dtype():
    clean, other = (jnp.asarray(x, jnp.bfloat16) for x in (A, B))
    expected = kl_oracle(np.asarray(clean, np.float64), np.asarray(other, np.float64))
    np.testing.assert_allclose(kl(clean, other), expected, rtol=1e-5)


def test_what_counts_as_logits():
    assert logits_of(A) is A
    assert logits_of({"y": A}) is A
    for output in (A[0], (A, B), A.astype(np.int32), A[:, :1], None, A * 1j):
        assert logits_of(output) is None
    assert logits_of(A, False) is None
    assert logits_of(A[0], True).shape == (7,)
    assert logits_of((A, B), lambda output: output[1]) is B


@pytest.mark.parametrize(
    ("loss", "has"),
    [
        (lambda y: optax.softmax_cross_entropy_with_integer_labels(y, jnp.arange(5)).mean(), True),
        (lambda y: (y.argmax(-1) == jnp.arange(5)).mean(), True),
        (lambda y: jax.vmap(jax.jit(jax.nn.log_softmax))(y)[:, 0].mean(), True),
        (lambda y: jax.nn.softmax(y[:, :3]).max(-1).mean(), False),
        (lambda y: optax.sigmoid_binary_cross_entropy(y, jnp.ones_like(y)).mean(), False),
        (lambda y: (y**2).mean() + jax.nn.softmax(y, axis=0).sum(), False),
        (lambda y: (mark_tree(jax.nn.softmax(y), owner=0, site="", part=OUTPUT) ** 2).sum(), False),
        (lambda y: jax.nn.softmax(mark_tree(y, owner=0, site="", part=OUTPUT)).sum(), True),
    ],
    ids=["entropy", "accuracy", "mapped", "part", "several", "regression", "inside", "after"],
)
def test_an_output_is_logits_if_the_loss_chooses_among_its_last_axis(loss, has):
    program = jax.make_jaxpr(loss)(A)
    assert (logits_of(A, program=program) is A) == has
    assert logits_of(A, True, program) is A


def test_logits_that_are_none_are_an_error():
    with pytest.raises(TypeError, match=r"has 2\. Pass a function"):
        logits_of((A, B), True)
    with pytest.raises(TypeError, match=r"int32\[5, 7\]"):
        logits_of(A.astype(np.int32), True)
    with pytest.raises(TypeError, match="got tuple"):
        logits_of((A, B), lambda output: output)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


@settings(max_examples=60)
@given(st.lists(st.tuples(floats, floats), min_size=4, max_size=4))
def test_any_finite_values(pairs):
    clean, perturbed = np.float32(pairs).T
    expected = relative_oracle([clean], [perturbed]) if clean.any() else None
    found = relative_change(clean, perturbed)
    same(found, expected, rtol=1e-6)
    traced = RELATIVE["program"](jnp.asarray(clean), jnp.asarray(perturbed))
    if expected is not None and 1e-30 < expected < 1e30:
        np.testing.assert_allclose(traced, expected, rtol=1e-5)
    elif expected is None:
        assert math.isnan(traced)
