"""`trace`: the call tree, shapes, FLOPs and dataflow, with nothing computed."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni


class Block(nnx.Module):
    def __init__(self, d, rngs):
        self.linear = nnx.Linear(d, d, rngs=rngs)
        self.norm = nnx.BatchNorm(d, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(self.linear(x)))


class Net(nnx.Module):
    def __init__(self, d, rngs):
        self.first, self.second = Block(d, rngs), Block(d, rngs)
        self.unused = nnx.Linear(d, d, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.second(self.first(x)))


class Stacked(nnx.Module):
    def __init__(self, d, n, rngs):
        @nnx.split_rngs(splits=n)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(d, d, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def body(layer, x):
            return jnp.tanh(layer(x))

        return body(self.layers, x)


def test_calls_are_in_program_order_with_their_nesting():
    trace = nni.trace(Net(4, nnx.Rngs(0)), jnp.ones((3, 4)))
    assert [(c.site, c.depth) for c in trace.calls] == [
        ("", 0), ("first", 1), ("first/linear", 2), ("first/norm", 2),
        ("second", 1), ("second/linear", 2), ("second/norm", 2), ("drop", 1),
    ]  # fmt: skip
    assert [c.parent for c in trace.calls] == [None, 0, 1, 1, 0, 4, 4, 0]


def test_shapes_and_dtypes_go_in_and_out():
    call = nni.trace(nnx.Linear(4, 7, rngs=nnx.Rngs(0)), jnp.ones((3, 4), jnp.bfloat16)).calls[0]
    assert (call.inputs, call.output) == ("bfloat16[3,4]", "float32[3,7]")
    assert (call.shape, call.dtype, call.type) == ((3, 7), "float32", "Linear")


def test_parameters_count_children_and_shared_ones_once():
    model = Net(4, nnx.Rngs(0))
    model.second = model.first
    trace = nni.trace(model, jnp.ones((3, 4)))
    block = (4 * 4 + 4) + (4 + 4)
    assert next(c.parameters for c in trace.calls if c.site == "first") == block
    assert trace.calls[0].parameters == block + 20


def test_flops_of_a_linear_layer_and_a_convolution_are_those_of_the_textbook():
    linear = nni.trace(nnx.Linear(5, 7, rngs=nnx.Rngs(0)), jnp.ones((3, 5))).calls[0]
    assert linear.flops == 2 * 3 * 5 * 7 + 3 * 7
    conv = nnx.Conv(2, 6, (3, 3), rngs=nnx.Rngs(0))
    call = nni.trace(conv, jnp.ones((1, 8, 8, 2))).calls[0]
    assert call.flops == 2 * (8 * 8 * 6) * (3 * 3 * 2) + 8 * 8 * 6


def test_flops_of_a_parent_hold_those_of_its_children():
    trace = nni.trace(Net(4, nnx.Rngs(0)), jnp.ones((3, 4)))
    by_site = {c.site: c.flops for c in trace.calls}
    assert by_site[""] >= by_site["first"] + by_site["second"] + by_site["drop"]
    assert by_site["first"] > by_site["first/linear"] + by_site["first/norm"]


def test_a_scan_counts_its_iterations_and_names_the_layers_of_a_stack():
    trace = nni.trace(Stacked(4, 5, nnx.Rngs(0)), jnp.ones((3, 4)))
    call = next(c for c in trace.calls if c.site == "layers")
    assert (call.times, call.stacked) == (5, 5)
    assert call.flops == 5 * (2 * 3 * 4 * 4 + 3 * 4)


def test_a_while_loop_has_no_known_number_of_operations():
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def loop(model, x):
        return nnx.while_loop(lambda s: s[0].sum() < 9, lambda s: (s[1](s[0]), s[1]), (x, model))[0]

    call = nni.trace(loop, linear, jnp.ones((3, 4))).calls[0]
    assert (call.times, call.flops) == (None, None)


def test_edges_are_the_dataflow_between_siblings_through_residual_connections():
    trace = nni.trace(Net(4, nnx.Rngs(0)), jnp.ones((3, 4)))
    assert [tuple(e) for e in trace.edges] == [
        ("first/linear", "first/norm", "float32[3,4]"),
        ("first", "second", "float32[3,4]"),
        ("second/linear", "second/norm", "float32[3,4]"),
        ("second", "drop", "float32[3,4]"),
    ]


def test_edges_go_from_one_iteration_of_a_loop_to_the_next():
    trace = nni.trace(Stacked(4, 5, nnx.Rngs(0)), jnp.ones((3, 4)))
    assert ("layers", "layers", "float32[3,4]") in [tuple(e) for e in trace.edges]


def test_nothing_is_computed_and_nothing_changes():
    model = Net(4, nnx.Rngs(0))
    before, graphdef = jax.tree.leaves(nnx.state(model)), nnx.graphdef(model)
    nni.trace(model, jnp.full((3, 4), jnp.nan))
    after = jax.tree.leaves(nnx.state(model))
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert nnx.graphdef(model) == graphdef


def test_a_model_of_seventy_billion_parameters_traces_without_memory():
    model = nnx.eval_shape(lambda: Stacked(32768, 65, nnx.Rngs(0)))
    trace = nni.trace(model, jax.ShapeDtypeStruct((8, 32768), jnp.float32))
    assert trace.calls[0].parameters > 69e9


def test_a_forward_pass_that_raises_keeps_the_users_exception_and_names_the_site():
    class Broken(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            self.inner(x)
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError) as caught:
        nni.trace(Broken(nnx.Rngs(0)), jnp.ones((3, 4)))
    assert caught.value.args == ("mine",)
    assert caught.value.__notes__[:1] == [
        "nnx_inspector: raised in the call of '(root)' (Broken) with inputs float32[3,4]."
    ]


def test_an_input_of_the_wrong_shape_is_noted_at_the_innermost_site():
    with pytest.raises(TypeError) as caught:
        nni.trace(Net(4, nnx.Rngs(0)), jnp.ones((3, 5)))
    assert "'first/linear' (Linear) with inputs float32[3,5]" in caught.value.__notes__[0]


def test_the_frame_has_a_row_a_call_and_the_source_line():
    frame = nni.trace(Net(4, nnx.Rngs(0)), jnp.ones((3, 4))).to_frame()
    assert list(frame.site)[:2] == ["", "first"]
    source = frame.source[list(frame.site).index("first")]
    line = int(source.rpartition(":")[2])
    assert "self.second(self.first(x))" in pathlib.Path(__file__).read_text().splitlines()[line - 1]


def test_it_shows_itself_as_a_tree():
    text = repr(nni.trace(Net(4, nnx.Rngs(0)), jnp.ones((3, 4))))
    assert text.splitlines()[0].split() == [
        "site",
        "type",
        "inputs",
        "output",
        "params",
        "flops",
        "changes",
    ]
    assert "\n    linear" in text


def test_bound_methods_and_functions_over_modules_are_traced():
    class Auto(nnx.Module):
        def __init__(self, rngs):
            self.encoder, self.decoder = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))

        def encode(self, x):
            return self.encoder(x)

    model = Auto(nnx.Rngs(0))
    x = jnp.ones((3, 4))
    assert [c.site for c in nni.trace(model.encode, x).calls] == ["encoder"]
    both = nni.trace(lambda m, x: m.decoder(m.encode(x)), model, x)
    assert [c.site for c in both.calls] == ["encoder", "decoder"]


def test_a_model_that_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"must be an nnx.Module, got int"):
        nni.trace(3, jnp.ones(3))
    with pytest.raises(TypeError, match="class Net, not an instance"):
        nni.trace(Net, jnp.ones(3))


def test_root_flops_agree_with_xla_for_matrix_products():
    def mlp(model, x):
        return model(x)

    model = nnx.Sequential(*(nnx.Linear(64, 64, rngs=nnx.Rngs(i)) for i in range(3)))
    x = jnp.ones((32, 64))
    cost = jax.jit(lambda x: mlp(model, x)).lower(x).compile().cost_analysis()
    ours = nni.trace(model, x).calls[0].flops
    np.testing.assert_allclose(ours, cost["flops"], rtol=0.01)


def test_code_that_asks_for_a_value_is_told_that_it_is_traced():
    class Branching(nnx.Module):
        def __call__(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        nni.trace(Branching(), jnp.ones(3))
    assert any("the call is traced, as by jax.jit" in note for note in caught.value.__notes__)
