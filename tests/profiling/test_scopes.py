"""The names of modules in compiled programs, and what they leave as it was."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st

import nnx_inspector as nni
from nnx_inspector.hooks.sites import site_key
from nnx_inspector.profiling.scopes import path_in, scope_name


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.head(x)


X = jnp.linspace(-1, 1, 12).reshape(3, 4)


def names_in(compiled: Any) -> set[str]:
    return set(re.findall(r'op_name="([^"]*)"', compiled.as_text()))


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
@example(["a;b"])  # XLA joins names by semicolons
def test_a_name_gives_its_path_back(segments: list[str]):
    path = site_key(segments)
    assert path_in(f"jit(f)/jvp([.])/{scope_name(path)}/add") == path
    assert path_in(f"jit(f)/transpose(jvp({scope_name(path)}))/add") == path


def test_names_of_others_are_no_modules():
    assert path_in("jit(f)/add") is None
    assert path_in("model.states[0][3]") is None  # an argument
    assert path_in("jit(f)/[.]/add") == ""
    assert path_in("jit(f)/[a]/mul;jit(f)/[b]/add") == "a"


def test_operations_have_the_names_of_their_modules_forward_and_backward():
    model = Net()
    step = nnx.jit(nnx.grad(lambda m, x: (m(x) ** 2).sum()))
    with nni.named_scopes(model):
        names = names_in(step.lower(model, X).compile())
    paths = {(path_in(name), "transpose(" in name) for name in names}
    assert {("blocks/0", False), ("blocks/1", False), ("head", False)} <= paths
    assert {("blocks/0", True), ("blocks/1", True), ("head", True)} <= paths


def test_results_are_the_same_and_outside_there_are_no_names():
    model = Net()
    step = nnx.jit(lambda m, x: m(x))
    before = step(model, X)
    with nni.named_scopes(model):
        inside = step(model, X)
    np.testing.assert_array_equal(before, inside)
    assert not any(path_in(name) is not None for name in names_in(step.lower(model, X).compile()))


def test_a_step_is_traced_once_more_and_then_no_more():
    model, traces = Net(), 0

    @nnx.jit
    def step(model: Net, x: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        return model(x)

    step(model, X)
    for _ in range(3):
        with nni.named_scopes(model):
            step(model, X)
            step(model, X)
        step(model, X)
    assert traces == 2


def test_a_cache_on_disk_does_not_give_the_program_without_names():
    model, (graphdef, state) = Net(), nnx.split(Net())
    plain = jax.jit(lambda s, x: nnx.merge(graphdef, s)(x)).lower(state, X).compile()
    assert not any(path_in(name) is not None for name in names_in(plain))
    with nni.named_scopes(model):  # the suite's cache on disk has the program by now
        names = names_in(nnx.jit(lambda m, x: m(x)).lower(model, X).compile())
    assert any(path_in(name) == "head" for name in names)


def test_a_model_is_needed():
    with pytest.raises(TypeError, match="Module"):
        with nni.named_scopes(3):  # type: ignore[arg-type]
            pass
