"""A module as NNX sees it, against `nnx.split` itself: nodes, Variables, shared references."""

import flax.linen
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx

from nnx_inspector.hooks.sites import site_key
from nnx_inspector.inspector.nnx.graph import (
    Leaf,
    Node,
    References,
    node_row,
    nodes_and_leaves,
    variable_row,
    variable_totals,
)
from nnx_inspector.screen import protocol


class Own(nnx.Variable):
    """A type of the user's."""


class Everything(nnx.Module):
    """One attribute of each kind that NNX splits."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.tied = self.linear
        self.kernel_again = self.linear.kernel
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.listed = nnx.List([nnx.Param(jnp.ones(1)), 3, nnx.Linear(1, 1, rngs=rngs)])
        self.named = nnx.Dict(one=Own(jnp.arange(4)), two="text")
        self.several = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), nnx.relu)
        self.in_a_tuple = nnx.data((nnx.Linear(1, 2, rngs=rngs), jnp.ones(3)))
        self.bare, self.on_host = jnp.ones(2), np.ones(2)
        self.nested = nnx.Variable({"a": jnp.ones(2), "b": jnp.ones(3)})
        self.half, self.pair, self.nothing = 0.5, (1, 2), None


CASES = {
    "everything": lambda: Everything(nnx.Rngs(0)),
    "shared": lambda: models.Shared(models.rngs()),
    "stacked": lambda: models.Stacked(models.rngs()),
    "cnn": lambda: models.CNN(models.rngs()),
    "linen": lambda: nnx.bridge.lazy_init(
        nnx.bridge.ToNNX(flax.linen.Dense(3), rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    ),
    "rngs": lambda: nnx.Rngs(0, params=1),
    "multihead": lambda: nnx.MultiHeadAttention(2, 4, 4, decode=False, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_leaves_are_those_of_split(name):
    module = CASES[name]()
    _, state = nnx.split(module, graph=True)
    expected = [
        (path, value.get_raw_value() if isinstance(value, nnx.Variable) else value)
        for path, value in nnx.to_flat_state(state)
    ]
    found = [
        one for one in nodes_and_leaves(module) if isinstance(one, Leaf) and not one.is_repeated
    ]
    assert [tuple(map(str, one.path)) for one in found] == [
        tuple(map(str, path)) for path, _ in expected
    ]
    for one, (_, value) in zip(found, expected, strict=True):
        ours, theirs = (jax.tree.leaves(x) for x in (one.value, value))
        assert all(a is b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_second_path_is_told_for_each_duplicate(name):
    module = CASES[name]()
    expected = {
        frozenset(site_key(tuple(p)) for p in paths) for paths in nnx.find_duplicates(module)
    }
    paths: dict[int, set[str]] = {}
    for one in nodes_and_leaves(module):
        value = one.owner if isinstance(one, Leaf) else one.value
        if isinstance(value, nnx.Pytree | nnx.Variable):
            paths.setdefault(id(value), set()).add(site_key(one.path))
    assert {frozenset(p) for p in paths.values() if len(p) > 1} == expected


@pytest.fixture
def everything():
    return Everything(nnx.Rngs(0))


def rows(module, prefix=(), model=()):
    found = nodes_and_leaves(module, prefix)
    references = References(found, model)
    nodes = {n.path: n for n in (node_row(x, references) for x in found if isinstance(x, Node))}
    leaves = [variable_row(x, references, None, None) for x in found if isinstance(x, Leaf)]
    return nodes, {v.path: v for v in leaves}


def test_what_is_static_is_an_attribute(everything):
    nodes, _ = rows(everything)
    of = {path: {a.name: a.text for a in node.attributes} for path, node in nodes.items()}
    assert of[""] == {"half": "0.5", "nothing": "None", "pair": "(1, 2)"}
    assert of["linear"]["in_features"] == "2"
    assert of["linear"]["param_dtype"] == "float32"
    assert of["drop"]["rate"] == "0.5"
    assert of["listed"] == {"1": "3"}
    assert of["named"] == {"two": "'text'"}
    assert of["several/layers"] == {"1": "relu"}
    depths = {path: node.depth for path, node in nodes.items()}
    assert (depths[""], depths["several"], depths["several/layers/0"]) == (0, 1, 3)


def test_a_shared_object_has_one_number(everything):
    nodes, leaves = rows(everything)
    assert nodes["linear"].reference == nodes["tied"].reference != 0
    assert (nodes["linear"].first, nodes["tied"].first) == (None, "linear")
    one, other = leaves["linear/kernel"], leaves["kernel_again"]
    assert one.reference == other.reference not in (0, nodes["linear"].reference)
    # the first in NNX's order is complete, the other refers to it
    assert {one.first, other.first} == {None, "kernel_again"}
    assert leaves["linear/bias"].reference == 0


def test_what_is_shared_with_the_rest_of_the_model_is_told(everything):
    nodes, leaves = rows(everything.linear, ("linear",), nodes_and_leaves(everything))
    assert nodes["linear"].also == ("tied",)
    assert nodes["linear"].reference != 0
    assert leaves["linear/kernel"].also == ("kernel_again",)
    assert leaves["linear/bias"].also == ()


def test_a_variable_is_told_with_its_array(everything):
    _, leaves = rows(everything)
    kernel = leaves["several/layers/0/kernel"]
    assert (kernel.type, kernel.shape, kernel.dtype, kernel.bytes) == (
        "Param", "(3, 3)", "float32", 36,
    )  # fmt: skip
    assert (kernel.module, kernel.held, kernel.value) == ("several/layers/0", "array", "")
    assert leaves["named/one"].type == "Own"
    assert leaves["nested"].shape == "{a: float32[2], b: float32[3]}"
    assert leaves["nested"].bytes == 20
    assert leaves["bare"].type == ""
    assert leaves["on_host"].sharding == "host"
    count = leaves["drop/rngs/count"]
    assert (count.type, count.value, count.metadata) == ("RngCount", "0", "tag='default'")
    assert leaves["in_a_tuple/0/kernel"].module == "in_a_tuple/0"


def test_the_kinds_add_up(everything):
    found = [one for one in nodes_and_leaves(everything) if isinstance(one, Leaf)]
    kinds = {kind.type: kind for kind in variable_totals(found)}
    params = jax.tree.leaves(nnx.state(everything, nnx.Param))
    assert kinds["Param"].variables == len(params)
    assert kinds["Param"].elements == sum(p.size for p in params)
    assert kinds["Param"].bytes == sum(p.nbytes for p in params)
    assert kinds["Own"].elements == 4
    assert kinds[""].bytes == 12 + 8 + 16
    assert kinds["RngCount"].variables == 1


def test_where_an_array_is_and_whether_it_is_there():
    device = jax.devices()[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("data",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    gone = jnp.ones(3)
    gone.delete()
    module = nnx.Dict(
        spread=nnx.Param(jax.device_put(jnp.ones(4), spread)),
        gone=nnx.Param(gone),
        put=nnx.Param(jax.device_put(jnp.ones(4), device)),
        free=nnx.Param(jnp.ones(4)),
    )
    _, leaves = rows(module)
    assert leaves["spread"].sharding == "P('data',) on mesh (data=1)"
    assert (leaves["gone"].held, leaves["gone"].value, leaves["gone"].shape) == (
        "deleted", "", "(3,)",
    )  # fmt: skip
    assert (leaves["put"].committed, leaves["free"].committed) == (True, False)
    told = []

    @nnx.jit
    def traced(module):
        told.append(rows(module)[1]["free"])

    traced(nnx.Dict(free=nnx.Param(jnp.ones(4))))
    assert (told[0].held, told[0].sharding) == ("traced", "")
    shapes = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert rows(shapes)[1]["kernel"].held == "shape"


def test_tree_mode_is_told_alike():
    before = rows(Everything(nnx.Rngs(0)))
    nnx.set_graph_mode(False)
    try:
        linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        assert set(rows(linear)[1]) == {"kernel", "bias"}
    finally:
        nnx.set_graph_mode(True)
    assert set(rows(Everything(nnx.Rngs(0)))[1]) == set(before[1])


def test_long_texts_are_cut():
    module = nnx.Dict(**{"x" * 500: nnx.Param(jnp.ones(1)), "y": "z" * 5000})
    nodes, leaves = rows(module)
    assert max(map(len, leaves)) == protocol.LONGEST_TEXT
    assert all(len(a.text) <= protocol.LONGEST_TEXT for n in nodes.values() for a in n.attributes)
