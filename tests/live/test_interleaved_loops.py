"""Several watched loops in one thread, whose steps overlap and which end in any order."""

from __future__ import annotations

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import TwoLayers

import nnx_inspector as nni

pytestmark = pytest.mark.usefixtures("leaves_nothing")
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
STEPS = 4


@nnx.jit
def step(model, x):
    grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))


def norm_of(model):
    return float(jnp.linalg.norm(model(X)))


@functools.cache
def bare(seed):
    """The norm of the output in each step of an unwatched training."""
    model, norms = TwoLayers(nnx.Rngs(seed)), []
    for _ in range(STEPS):
        norms.append(norm_of(model))
        step(model, X)
    return norms


def made(seed):
    model = TwoLayers(nnx.Rngs(seed))
    return model, nni.Inspector(model, X, display=False)


def check(recording, seed, steps=STEPS):
    passes = [one for one in recording.passes if one.kind == "watch"]
    assert [one.step for one in passes] == list(range(steps))
    for quantity in ("output", "gradient"):
        assert {site for site, q in passes[-1].keys if q == quantity} == {"", "a", "b"}
    norms = [one.summary("").norm for one in passes]
    np.testing.assert_allclose(norms, bare(seed)[:steps], rtol=1e-4)


def test_two_loops_side_by_side():
    (one, first), (two, second) = made(1), made(2)
    loops = first.watch(range(STEPS), every=1), second.watch(range(STEPS), every=1)
    for _ in zip(*loops, strict=True):
        step(one, X)
        step(two, X)
    check(first.recording, 1)
    check(second.recording, 2)


@pytest.mark.parametrize("ticks", [(0, 1), (1, 0), (0,), (1,)])
def test_two_regions_each_or_one_of_them_with_ticks(ticks):
    (one, first), (two, second) = made(1), made(2)
    with first.watch(every=1), second.watch(every=1):
        for _ in range(STEPS):
            for number in ticks:
                (first, second)[number].tick()
            step(one, X)
            step(two, X)
    check(first.recording, 1)
    check(second.recording, 2)


@pytest.mark.parametrize("steps", [(2, 4), (4, 2)])
def test_regions_are_left_in_any_order(steps):
    def trained(seed, steps):
        model = TwoLayers(nnx.Rngs(seed))
        with nni.watch(model, every=1) as recording:
            for _ in range(steps):
                step(model, X)
                yield recording

    every = list(itertools.zip_longest(trained(1, steps[0]), trained(2, steps[1])))
    for number, recording in enumerate(every[0]):
        check(recording, number + 1, steps[number])


def call_ahead(model):
    ahead = jax.jit(lambda x: 2 * x).lower(X).compile()
    with nni.watch(model):
        ahead(X)
        norm_of(model)


def test_a_perturbation_ends_with_its_own_region():
    model = TwoLayers(nnx.Rngs(1))
    with pytest.warns(nni.InspectorWarning, match="compiled ahead"):
        call_ahead(model)  # before the regions, and of no concern to them
    outer, inner = contextlib.ExitStack(), contextlib.ExitStack()
    outer.enter_context(nni.perturb("b", nni.Zero(), model=model))
    inner.enter_context(nni.perturb("b", nni.Scale(2.0), model=model))
    clean = bare(1)[0]
    norms = [norm_of(model)]
    outer.close()
    norms.append(norm_of(model))
    inner.close()
    norms.append(norm_of(model))
    np.testing.assert_allclose(norms, [0.0, 2 * clean, clean], rtol=1e-5)
