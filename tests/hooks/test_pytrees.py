"""Pytrees rebuilt as they were: order, types, and the caller's own containers."""

from __future__ import annotations

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from models import batch, rngs

import nnx_inspector as nni
from nnx_inspector.hooks.pytrees import dict_orders, with_arguments, with_leaves


class Pair(NamedTuple):
    left: object
    right: object


@struct.dataclass
class Own:
    parts: object
    name: str = struct.field(pytree_node=False, default="own")


TREES = [
    1,
    None,
    (),
    {},
    [1, (2, None), Pair(3, [4])],
    {"b": 1, "a": {"z": 2, "y": 3}, "c": None},
    collections.OrderedDict(b=1, a=2),
    collections.defaultdict(list, {"b": 1, "a": 2}),
    Own({"b": 1, "a": [2, 3]}),
]


def looks(tree):
    """A tree in full: types, order and leaves."""
    if isinstance(tree, dict):
        return type(tree), [(k, looks(v)) for k, v in tree.items()]
    if isinstance(tree, list | tuple):
        return type(tree), [looks(v) for v in tree]
    return (type(tree), looks(tree.parts), tree.name) if isinstance(tree, Own) else tree


@pytest.mark.parametrize("tree", TREES)
def test_it_is_as_it_was(tree):
    leaves = jax.tree.leaves(tree)
    assert looks(with_leaves(tree, leaves)) == looks(tree)
    assert jax.tree.leaves(with_leaves(tree, [-x for x in leaves])) == [-x for x in leaves]


def test_leaves_may_be_whole_containers():
    is_leaf = lambda x: isinstance(x, list)  # noqa: E731
    assert with_leaves({"b": [1], "a": 2}, ["a", "b"], is_leaf) == {"b": "b", "a": "a"}


def test_the_order_of_every_dict_is_told():
    assert dict_orders({"b": [{"d": 1, "c": 2}], "a": 3}) == (("b", "a"), ("d", "c"))
    assert dict_orders([1, (2, None)]) == ()
    assert dict_orders(Own({"b": 1, "a": 2})) == (("b", "a"),)
    assert hash(dict_orders({"a": {}})) == hash((("a",), ()))


def test_arguments_are_replaced_through_tuples_and_the_callers_containers_stay():
    mine, table = [1, 2], {"b": 3, "a": 4}
    args, kwargs = (5, mine, (6, table)), {"z": 7, "a": Pair(8, mine)}
    leaves = [-x for x in jax.tree.leaves((args, kwargs))]
    new_args, new_kwargs = with_arguments(args, kwargs, leaves)
    assert new_args == (-5, [1, 2], (-6, {"b": 3, "a": 4}))
    assert new_args[1] is mine
    assert new_args[2][1] is table
    assert list(new_kwargs) == ["z", "a"]
    assert new_kwargs == {"z": -7, "a": Pair(-8, [1, 2])}
    assert type(new_kwargs["a"]) is Pair


# ------------------------------------------------- what hooks make of the user's containers


class Ordered(nnx.Module):
    """Its result is the order in which its entries come."""

    def __call__(self, x, **options):
        entries = {"b": x, "a": 2 * x, "options": list(options)}
        return entries, [n for n in options.values()]


class Joins(nnx.Module):
    def __init__(self):
        self.ordered = Ordered()

    def __call__(self, parts):
        x = jnp.concatenate(list(parts.values()))
        entries, options = self.ordered(x, z=10.0, a=x)
        assert entries.pop("options") == ["z", "a"]
        return jnp.concatenate(list(entries.values())) * options[0], dict(entries)


class Writes(nnx.Module):
    """Passes a list and a dict to its layers, which collect their results in them."""

    def __init__(self):
        self.layer = Appends()

    def __call__(self, x):
        seen, table = [], {"last": x}
        for _ in range(2):
            x = self.layer(x, seen, table=table)
        return sum(seen) + table["last"] + table["new"]


class Appends(nnx.Module):
    def __call__(self, x, seen, *, table):
        seen.append(x + 1)
        table["last"] = table["new"] = 2 * x
        return x * 3


PARTS = {"y": jnp.ones(2), "x": jnp.zeros(2)}
WAYS = {
    "capture": lambda m, x: nni.capture(m)(x)[0],
    "perturb": lambda m, x: _within(nni.perturb("**", nni.Scale(1.0)), m, x),
    "intercept": lambda m, x: _within(nni.intercept_methods(lambda f, a, k, c: f(*a, **k)), m, x),
    "watch": lambda m, x: [m(one) for one in nni.Inspector(m, x).watch([x])].pop(),
    "run": lambda m, x: nni.Inspector(m, x).run(x),
}


def _within(context, m, x):
    with context:
        return m(x)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_keep_the_order_of_the_users_dicts(way):
    expected, entries = Joins()(PARTS)
    found, found_entries = WAYS[way](Joins(), PARTS)
    np.testing.assert_array_equal(found, expected)
    assert list(found_entries) == list(entries) == ["b", "a"]


def test_trace_keeps_the_order_of_the_users_dicts():
    trace = nni.trace(Joins(), PARTS)
    assert [c.inputs for c in trace.calls] == [
        "{y: float32[2], x: float32[2]}",
        "float32[4], z=10.0, a=float32[4]",
    ]
    assert trace.calls[1].output.startswith("({b: float32[4], a: float32[4], options: ")


@pytest.mark.parametrize("way", WAYS)
def test_a_method_may_write_to_what_it_is_handed(way):
    x = batch(4, 3)
    np.testing.assert_allclose(WAYS[way](Writes(), x), Writes()(x), rtol=1e-6)


def test_the_values_in_the_callers_list_are_measured_and_followed():
    class Sums(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(3, 3, rngs=rngs())
            self.sum = Sum()

        def __call__(self, x):
            return self.sum([self.layer(x), x])

    class Sum(nnx.Module):
        def __init__(self):
            self.last = nnx.Linear(3, 3, rngs=rngs())

        def __call__(self, parts):
            return self.last(parts[0] + parts[1])

    x = batch(4, 3)
    _, record = nni.capture(Sums())(x)
    assert [s.size for s in record["sum"].input[0][0]] == [12, 12]
    trace = nni.trace(Sums(), x)
    assert [(e.producer, e.consumer) for e in trace.edges] == [("layer", "sum")]
    assert ("sum", "sum/last") in {(e.producer, e.consumer) for e in trace.borders}
