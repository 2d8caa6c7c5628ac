"""The flow of small models, against nodes and edges written by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from models import SplitAndJoin, batch, rngs

import nnx_inspector as nni
from nnx_inspector.records.rows import rows_of
from nnx_inspector.screen import protocol
from nnx_inspector.screen.flow import flow_of

D = 3
X = "float32[4,3]"


def linear() -> nnx.Linear:
    return nnx.Linear(D, D, rngs=rngs())


class Parts(nnx.Module):
    """Three layers and a list of two, called by a test's function."""

    def __init__(self, call, **parts):
        self.call = call
        for name in "abc":
            setattr(self, name, linear())
        self.list = nnx.List([linear(), linear()])
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, *args):
        return self.call(self, *args)


def flow(model, site: str = "", args=(), only=None) -> protocol.Flow:
    trace = nni.trace(model, *(args or (batch(4, D),)), only=only)
    layout = protocol.Layout(layout=5, model="", sites=rows_of(trace, unseen={}))
    found = flow_of(trace, layout, site, number=7)
    assert (found.id, found.layout, found.site) == (7, 5, site)
    assert protocol.from_header(protocol.to_header(found)) == found
    return found


def name(node: protocol.FlowNode) -> str:
    special = {"join": "+", "input": "IN", "output": "OUT", "outside": f"({node.name})"}
    return special.get(node.role, node.name)


def edges(found: protocol.Flow) -> set[str]:
    """Edges in a short form: "a b", "a b loop"; a shape other than X comes last."""
    out = [
        " ".join(
            [name(found.nodes[edge.producer]), name(found.nodes[edge.consumer])]
            + ["loop"] * edge.loop
            + [s for s in edge.shapes if s != X]
            + ["?"] * (not edge.shapes)
        )
        for edge in found.edges
    ]
    return set(out)


def nodes(found: protocol.Flow) -> list[str]:
    return [name(node) for node in found.nodes]


def drawn(call, *args, site: str = "", **parts) -> set[str]:
    return edges(flow(Parts(call, **parts), site, args))


def test_a_chain():
    found = flow(Parts(lambda m, x: m.c(jnp.tanh(m.b(m.a(x))))))
    assert edges(found) == {"IN a", "a b", "b c", "c OUT"}
    assert nodes(found) == ["IN", "a", "b", "c", "OUT"]
    assert [(n.role, n.site, n.kind, n.output) for n in found.nodes] == [
        ("input", "", "", X), ("module", "a", "Linear", X), ("module", "b", "Linear", X),
        ("module", "c", "Linear", X), ("output", "", "", X),
    ]  # fmt: skip
    assert {(n.calls, n.times, n.conditional) for n in found.nodes} == {(1, 1, False)}
    assert [(a.site, a.why) for a in found.absent] == [
        ("list/0", "it is not called by the example"),
        ("list/1", "it is not called by the example"),
    ]


def test_a_residual_connection_joins_what_it_adds():
    def call(m, x):
        x = x + m.a(x)
        return x + m.b(x)

    found = flow(Parts(call))
    assert edges(found) == {"IN a", "IN +", "a +", "+ b", "b +", "+ OUT"}
    joins = [n for n in found.nodes if n.role == "join"]
    assert [(n.kind, n.output) for n in joins] == [("made of 2 values", X), ("made of 3 values", X)]
    second = found.nodes.index(joins[1])
    into = {name(found.nodes[e.producer]) for e in found.edges if e.consumer == second}
    assert into == {"IN", "a", "b"}, "what is returned is made of all three"


def test_a_skip_past_the_only_module():
    assert drawn(lambda m, x: x + m.a(x)) == {"IN a", "IN +", "a +", "+ OUT"}


def test_branches_that_are_joined_once_and_taken_twice():
    def call(m, x):
        y = m.a(x) * m.b(x)
        return m.c(y) + m.list[0](y)

    found = flow(Parts(call))
    assert edges(found) == {
        "IN a", "IN b", "a +", "b +", "+ c", "+ list/0", "c +", "list/0 +", "+ OUT"
    }  # fmt: skip
    assert nodes(found).count("+") == 2, "the same value is one join, however many take it"


def test_two_values_of_the_same_parts_are_two_joins():
    def call(m, x):
        a, b = m.a(x), m.b(x)
        return m.c(a + b), m.list[0](a * b)

    assert nodes(flow(Parts(call))).count("+") == 2


def test_two_arguments_are_not_joined():
    class Pair(nnx.Module):
        def __call__(self, left, right):
            return left @ right.T

    found = drawn(lambda m, x: m.pair(m.a(x), m.b(x)), pair=Pair())
    assert found == {"IN a", "IN b", "a pair", "b pair", "pair OUT float32[4,4]"}


def test_two_heads_and_an_output_that_is_a_tree():
    def call(m, x):
        x = m.a(x)
        return {"mean": m.b(x), "rest": (m.c(x)[:, 0], x.sum())}

    found = flow(Parts(call))
    assert edges(found) == {"IN a", "a b", "a c", "b OUT", "c OUT float32[4]", "a OUT float32[]"}
    output = found.nodes[-1].output
    assert all(shape in output for shape in (X, "float32[4]", "float32[]"))


def test_several_values_on_one_way():
    found = flow(SplitAndJoin())
    assert [e.shapes for e in found.edges] == [
        (X,),
        ("float32[4,2]", "float32[4]"),
        ("float32[4,2]",),
    ]


def test_a_module_called_twice_is_one_node():
    found = flow(Parts(lambda m, x: m.b(m.a(m.a(x)))))
    assert edges(found) == {"IN a", "a a", "a b", "b OUT"}
    assert [(n.name, n.calls, n.times) for n in found.nodes][1] == ("a", 2, 2)


class Pair(nnx.Module):
    def __init__(self, shared):
        self.own, self.shared = linear(), shared

    def __call__(self, x):
        return self.shared(self.own(x))


class Sharing(nnx.Module):
    """Two pairs that share a layer, which has the first one's name."""

    def __init__(self):
        shared = linear()
        self.left, self.right = Pair(shared), Pair(shared)

    def __call__(self, x):
        return self.right(jnp.tanh(self.left(x)))


def test_a_shared_module_is_in_each_place_with_the_edges_of_that_place():
    model = Sharing()
    assert edges(flow(model)) == {"IN left", "left right", "right OUT"}
    assert edges(flow(model, "left")) == {"IN own", "own shared", "shared OUT"}
    found = flow(model, "right")
    assert edges(found) == {"IN own", "own left/shared", "left/shared OUT"}
    assert found.absent == ()
    assert [n.calls for n in found.nodes] == [1, 1, 1, 1]


def test_a_list_of_modules_is_shown_among_what_is_around_it():
    def call(m, x):
        for layer in m.list:
            x = layer(x)
        return m.b(x) + m.a(x)

    model = Parts(lambda m, x: call(m, m.c(x)))
    assert edges(flow(model)) == {
        "IN c", "c list/0", "list/0 list/1", "list/1 a", "list/1 b", "a +", "b +", "+ OUT"
    }  # fmt: skip
    found = flow(model, "list")
    assert edges(found) == {"(c) 0", "0 1", "1 (a)", "1 (b)"}
    assert [n.site for n in found.nodes] == ["list/0", "list/1", "c", "b", "a"]


def test_a_list_that_begins_and_ends_its_module():
    found = flow(Parts(lambda m, x: m.list[1](m.list[0](x))), "list")
    assert edges(found) == {"(input of (model)) 0", "0 1", "1 (output of (model))"}


def test_a_scanned_stack_is_one_node_that_feeds_itself():
    make = nnx.vmap(lambda r: nnx.Linear(D, D, rngs=r), in_axes=0, out_axes=0)
    stack = nnx.split_rngs(splits=6)(make)(rngs())

    def call(m, x):
        run = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return m.b(run(m.stack, m.a(x)))

    found = flow(Parts(call, stack=stack))
    assert edges(found) == {"IN a", "a stack", "stack stack loop", "stack b", "b OUT"}
    assert [(n.name, n.calls, n.times) for n in found.nodes][2] == ("stack", 1, 6)


def test_a_recurrent_network_and_what_is_in_its_cell():
    model = nnx.RNN(nnx.SimpleCell(D, D, rngs=rngs()))
    x = batch(2, 5, D)
    found = flow(model, args=(x,))
    assert edges(found) == {
        "IN cell float32[2,3]", "cell cell loop float32[2,3]", "cell OUT float32[2,5,3]"
    }  # fmt: skip
    assert [(n.calls, n.times) for n in found.nodes] == [(1, 1), (1, 5), (1, 1)]
    inside = flow(model, "cell", args=(x,))
    assert {e.rpartition(" float32")[0] for e in edges(inside) if "?" not in e} == {
        "IN dense_i", "IN dense_h", "dense_i +", "dense_h +", "+ OUT"
    }  # fmt: skip
    assert [n.times for n in inside.nodes if n.role == "module"] == [1, 1], "of one step"


def test_branches_of_a_cond_are_marked():
    def call(m, x):
        return nnx.cond(x.sum() > 0, lambda m, x: m.a(x), lambda m, x: m.b(x), m, x)

    found = flow(Parts(call))
    assert edges(found) == {"IN a", "IN b", "a +", "b +", "+ OUT"}
    # the branch for False is the program's first
    assert [n.name for n in found.nodes if n.conditional] == ["b", "a"]


def test_a_while_loop_has_no_number():
    def call(m, x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, m.b, m.a(x))

    found = flow(Parts(call))
    assert edges(found) == {"IN a", "a b", "b b loop", "a +", "b +", "+ OUT"}
    assert [(n.name, n.times) for n in found.nodes if n.role == "module"] == [("a", 1), ("b", None)]


def test_a_method_is_a_node_and_has_a_flow():
    class Coder(nnx.Module):
        def __init__(self):
            self.down, self.up = linear(), linear()

        def encode(self, x):
            return self.down(x)

        def __call__(self, x):
            return self.up(self.encode(x))

    found = flow(Coder(), only="**:*")
    assert edges(found) == {"IN :encode", ":encode up", "up OUT"}
    assert [(a.site, a.why) for a in found.absent] == [("down", "called by :encode")]
    assert edges(flow(Coder(), ":encode", only="**:*")) == {"IN down", "down OUT"}


def test_a_value_that_comes_past_the_arguments_is_from_outside():
    class Keeps(nnx.Module):
        def __init__(self):
            self.kept, self.inside = nnx.Cache(jnp.zeros((4, D))), linear()

        def __call__(self, x):
            self.kept[...] = self.inside(x)
            return x

    class Model(nnx.Module):
        def __init__(self):
            self.keeps, self.reads = Keeps(), linear()

        def __call__(self, x):
            return self.keeps(x) + self.reads(self.keeps.kept[...])

    assert edges(flow(Model())) == {"IN keeps", "keeps reads", "keeps +", "reads +", "+ OUT"}
    assert edges(flow(Model(), "keeps")) == {"IN inside", "inside (reads)", "IN OUT"}


def test_modules_without_calls():
    found = flow(Parts(lambda m, x: 2 * x))
    assert edges(found) == {"IN OUT"}
    assert [a.site for a in found.absent] == ["a", "b", "c", "list/0", "list/1"]
    aside = flow(Parts(lambda m, x: 2 * x), "list")
    assert (aside.nodes, aside.edges) == ((), ())
    assert [a.site for a in aside.absent] == ["list/0", "list/1"]


def test_an_output_that_is_made_of_nothing():
    found = flow(Parts(lambda m, x: (m.a(x), jnp.zeros(2))[1]))
    assert edges(found) == {"IN a"}
    assert nodes(found) == ["IN", "a", "OUT"]


def test_inner_transforms_change_nothing():
    def call(m, x):
        inner = nnx.jit(nnx.remat(lambda m, x: m.b(x + m.a(x))))
        return m.c(inner(m, x))

    assert drawn(call) == {"IN a", "IN +", "a +", "+ b", "b c", "c OUT"}


def test_a_site_that_is_not_there():
    with pytest.raises(ValueError, match="There is no site 'nowhere' in this model"):
        flow(Parts(lambda m, x: x), "nowhere")
