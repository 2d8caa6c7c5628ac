"""The Variables found without NNX's own walk are the same, under the same names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import models
import pytest
from flax import nnx
from models import ZOO, rngs

from nnx_inspector.hooks.variables import byte_count, changed_variables, contents, shared_contents


def by_nnx(model):
    every = nnx.iter_graph(model, graph=True)
    return {path: v for path, v in every if isinstance(v, nnx.Variable)}


@pytest.mark.parametrize("name", sorted(ZOO))
def test_they_are_nnxs_own_under_nnxs_own_paths(name):
    model = ZOO[name]().model
    expected = by_nnx(model)
    assert_found(contents(model), expected)


def assert_found(found, expected):
    assert [path for path, _, _ in found] == list(expected)
    assert all(expected[path] is variable for path, variable, _ in found)
    assert all(value is variable.get_raw_value() for _, variable, value in found)


@pytest.mark.parametrize("name", [*sorted(ZOO), "odd"])
def test_what_modules_inside_hold_is_the_same_without_another_walk(name):
    model = odd_model() if name == "odd" else ZOO[name]().model
    with shared_contents(model) as whole:
        assert_found(whole, by_nnx(model))
        for _, module in nnx.iter_modules(model, graph=True):
            assert_found(contents(module), by_nnx(module))


def odd_model():
    class Odd(nnx.Module):
        def __init__(self):
            shared = nnx.Linear(2, 2, rngs=rngs())
            self.z = nnx.Dict(b=shared, a=nnx.Variable(jnp.ones(3)))
            self.list = nnx.List(
                [nnx.List([shared, nnx.Variable(1.0)]), nnx.BatchStat(jnp.ones(1))]
            )
            self.tree = nnx.data({"k": (nnx.Cache(jnp.zeros(2)), [nnx.Param(jnp.ones(2))])})
            self.again = self.z
            self.text, self.number, self.function = "text", 3, jnp.tanh

    return Odd()


def test_shared_modules_containers_and_plain_pytrees_are_looked_into_once():
    model = odd_model()
    assert_found(contents(model), by_nnx(model))
    assert len(contents(model).variables) == 7


def changed(model, change):
    before = contents(model)
    change(model)
    found = [(path, old, new) for path, old, new in changed_variables(before, model)]
    with shared_contents((model, model)) as whole:  # also inside another container
        assert len(list(whole)) == len(list(contents(model)))
    return found


def test_nothing_differs_where_nothing_was_written():
    assert changed(odd_model(), lambda m: None) == []


def test_a_variable_that_was_written_differs_and_tells_both_values():
    model = odd_model()
    old_value = model.list[1].get_raw_value()

    def write(m):
        m.list[1][...] = jnp.zeros(1)

    ((path, old, new),) = changed(model, write)
    assert path == ("list", 1)
    assert old[1] is old_value
    assert new[1] is model.list[1].get_raw_value()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: setattr(m, "new", nnx.Cache(jnp.ones(2))), [("new", False, True)]),
        (lambda m: delattr(m, "number"), []),
        (lambda m: delattr(m, "tree"), [("tree", True, False)] * 2),
        (lambda m: setattr(m.z, "a", nnx.Variable(jnp.ones(3))), [("again", True, True)]),
        (lambda m: m.list.append(nnx.Variable(2.0)), [("list", False, True)]),
        (lambda m: m.tree["k"][1].append(nnx.Param(jnp.ones(1))), [("tree", False, True)]),
    ],
)
def test_variables_that_come_and_go_differ(change, expected):
    found = changed(odd_model(), change)
    assert [(path[0], old is not None, new is not None) for path, old, new in found] == expected


def test_a_shared_variable_is_told_once():
    def write(m):
        m.z.b.kernel[...] = jnp.zeros((2, 2))

    assert [path for path, _, _ in changed(odd_model(), write)] == [("again", "b", "kernel")]


def test_parameters_are_counted_on_abstract_models_too():
    model = nnx.eval_shape(lambda: models.Nested(rngs()))
    for found in (model, models.Nested(rngs())):
        assert contents(found).parameter_sizes() == (46, 4 * 46)
    half = nnx.Linear(3, 4, rngs=rngs(), param_dtype=jnp.bfloat16)
    arrays = [v.get_raw_value() for v in by_nnx(half).values()]
    sizes = 3 * 4 + 4, 2 * (3 * 4 + 4)
    assert byte_count(arrays) == sizes[1]
    assert contents(half).parameter_sizes() == sizes


@pytest.mark.parametrize("model", [odd_model(), models.Nested(rngs())])
def test_the_parameters_of_an_inner_module_are_counted_within_an_outer_one(model: Any):
    def sizes(module: Any) -> tuple[int, int]:
        arrays = [p.get_raw_value() for p in by_nnx(module).values() if isinstance(p, nnx.Param)]
        leaves = jax.tree.leaves(arrays)
        return sum(x.size for x in leaves), sum(x.nbytes for x in leaves)

    modules = [module for _, module in nnx.iter_modules(model)]
    with shared_contents(model):
        found = [contents(module).parameter_sizes() for module in modules]
    assert found == list(map(sizes, modules))
    assert len(set(found)) > 1
