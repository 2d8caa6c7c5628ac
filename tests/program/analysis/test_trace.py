"""`trace`: the call tree, shapes, FLOPs and dataflow, with nothing computed."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.program.analysis.trace import Trace


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


@pytest.fixture(scope="module")
def traced():
    return nni.trace(Net(4, nnx.Rngs(0)), jnp.ones((3, 4)))


def test_calls_are_in_program_order_with_their_nesting(traced):
    assert [(c.site, c.depth) for c in traced.calls] == [
        ("", 0), ("first", 1), ("first/linear", 2), ("first/norm", 2),
        ("second", 1), ("second/linear", 2), ("second/norm", 2), ("drop", 1),
    ]  # fmt: skip
    assert [c.parent for c in traced.calls] == [None, 0, 1, 1, 0, 4, 4, 0]


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


def test_flops_of_a_parent_hold_those_of_its_children(traced):
    by_site = {c.site: c.flops for c in traced.calls}
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


def test_the_frame_has_a_row_a_call(traced):
    frame = traced.to_frame()
    columns = (
        "site type depth parent inputs output shape dtype parameters parameter_bytes output_bytes "
        "flops times conditional stacked members source changed error attends"
    )
    assert list(frame.columns) == columns.split()
    assert all(f"{name}," in Trace.to_frame.__doc__ for name in columns.split()[:-1])
    assert list(frame.site) == [c.site for c in traced.calls]
    norm = frame[frame.site == "first/norm"].iloc[0]
    assert norm.changed == "mean (BatchStat), var (BatchStat)"
    assert norm["shape"] == (3, 4)
    assert frame.source[1].startswith(__file__)


class Options(nnx.Module):
    def __call__(self, x, mask=None, *, train, mode="fast"):
        return {"y": x, "used": [mode, None, 3]}


def test_keyword_arguments_and_values_that_are_no_arrays_are_told():
    x = jnp.ones((2, 3))
    (call,) = nni.trace(Options(), x, None, train=True).calls
    assert call.inputs == "float32[2,3], None, train=True"
    assert call.output == "{y: float32[2,3], used: ['fast', None, 3]}"
    (call,) = nni.trace(Options(), [x, (x, 1.5)], train=jnp.tanh, mode={"a": x}).calls
    assert call.inputs == (
        "[float32[2,3], (float32[2,3], 1.5)], train=tanh, mode={a: float32[2,3]}"
    )


def test_bytes_of_parameters_and_of_what_is_returned():
    layer = nnx.Linear(4, 7, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    (call,) = nni.trace(layer, jnp.ones((3, 4), jnp.float32)).calls
    assert (call.parameters, call.parameter_bytes) == (35, 70)
    assert call.output_bytes == 4 * 3 * 7
    (call,) = nni.trace(Options(), jnp.ones((2, 3), jnp.int8), train=False).calls
    assert (call.parameters, call.parameter_bytes, call.output_bytes) == (0, 0, 6)


def test_an_activation_within_a_vmap_has_its_batch_axis():
    linear = nnx.Linear(4, 7, rngs=nnx.Rngs(0))
    each = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))
    (call,) = nni.trace(each, linear, jnp.ones((5, 4))).calls
    assert (call.inputs, call.output) == ("float32[4]", "float32[7]")
    assert (call.shape, call.output_bytes) == ((5, 7), 4 * 5 * 7)


def test_repeated_calls_are_apart():
    class Repeats(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            for _ in range(2):
                x = self.layer(x)
            x = nnx.scan(lambda m, x: (m(x), None), in_axes=(None, nnx.Carry), length=3,
                         out_axes=(nnx.Carry, 0))(self.layer, x)[0]  # fmt: skip
            return self.layer(x[:1])

    calls = [c for c in nni.trace(Repeats(), jnp.ones((3, 4))).calls if c.site == "layer"]
    assert [(c.inputs, c.times) for c in calls] == [
        ("float32[3,4]", 1), ("float32[3,4]", 1), ("float32[3,4]", 3), ("float32[1,4]", 1),
    ]  # fmt: skip
    assert [c.flops for c in calls] == [108, 108, 324, 36]


def test_calls_in_branches_may_not_take_place():
    trace = nni.trace(models.Cond(models.rngs()), models.batch(4, 3))
    assert {c.site: c.conditional for c in trace.calls} == {
        "": False, "negative": True, "positive": True,
    }  # fmt: skip
    branch = next(c.flops for c in trace.calls if c.site == "positive")
    assert branch < trace.calls[0].flops < 2 * branch


def test_an_interceptor_that_skips_a_call_or_makes_it_twice():
    model, x = models.Nested(models.rngs()), models.batch(4, 3)
    whole = [(c.site, c.depth) for c in nni.trace(model, x).calls]

    def skip(next_fun, args, kwargs, context):
        return args[0]

    def twice(next_fun, args, kwargs, context):
        return next_fun(*args, **kwargs) + next_fun(args[0] + 1, **kwargs)

    with nni.intercept_methods(skip, only="blocks/0"):
        calls = nni.trace(model, x).calls
    assert [(c.site, c.depth) for c in calls] == [c for c in whole if c[0] != "blocks/0/linear"]
    assert calls[1].inputs == "(not seen)"
    assert calls[1].output == "float32[4,3]"
    with nni.intercept_methods(twice, only="blocks/0"):
        calls = nni.trace(model, x).calls
    extra = ("blocks/0/linear", 2)
    assert [(c.site, c.depth) for c in calls] == [*whole[:2], extra, *whole[2:]]


def state_of(model):
    pure = nnx.to_pure_dict(nnx.state(model))

    def numbers(x):
        if isinstance(x, str):
            return x
        is_key = jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(numbers, pure)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # sow and perturb outside nnx.capture
@pytest.mark.parametrize("name", sorted(models.ZOO))
def test_no_state_changes_and_no_stream_advances(name):
    case = models.ZOO[name]()
    graphdef, before = nnx.graphdef(case.model), state_of(case.model)
    values = [id(leaf) for leaf in jax.tree.leaves(nnx.state(case.model))]
    nni.trace(case.model, *case.args, **case.kwargs)
    assert nnx.graphdef(case.model) == graphdef
    assert [id(leaf) for leaf in jax.tree.leaves(nnx.state(case.model))] == values
    jax.tree.map(np.testing.assert_array_equal, state_of(case.model), before)


def test_the_same_call_is_traced_the_same_again():
    model, x = models.Nested(models.rngs()), models.batch(4, 3)
    assert nni.trace(model, x).calls == nni.trace(model, x).calls  # traces


@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_a_variable_that_is_a_reference_is_told_as_unseen(kind):
    class Counts(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(jnp.zeros(()), **{kind: True})

        def __call__(self, x):
            return x

    trace = nni.trace(Counts(), jnp.ones(3))
    assert list(trace.unseen) == ["n"]
    assert f"{kind}=True" in trace.unseen["n"]


def test_it_shows_itself_as_a_tree_with_what_each_call_changes_by_itself(traced):
    head, *lines = repr(traced).splitlines()
    assert head.split() == ["site", "type", "inputs", "output", "params", "flops", "changes"]
    assert any(line.startswith("    linear") for line in lines)
    ends = {line.split()[0]: line.split("  ")[-1].strip() for line in lines}
    assert ends["norm"] == "mean, var"
    assert ends["drop"] == "rngs/count"
    assert ends["first"].isdigit()  # the last column is empty; this is the column before it
    assert ends["(root)"].isdigit()


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


def test_code_that_asks_for_a_value_is_told_that_it_is_traced():
    class Branching(nnx.Module):
        def __call__(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        nni.trace(Branching(), jax.ShapeDtypeStruct((3,), jnp.float32))
    assert any("the call is traced, as by jax.jit" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("name", ["a\ud800b", "\udfff", "\u00e4\U0001f600", "plain"])
def test_a_trace_can_be_printed_whatever_the_names(name):
    class Named(nnx.Module):
        def __init__(self):
            setattr(self, name, nnx.Linear(2, 2, rngs=nnx.Rngs(0)))

        def __call__(self, x):
            return getattr(self, name)(x)

    text = repr(nni.trace(Named(), jnp.ones((1, 2))))
    assert name.encode("utf-8", "backslashreplace") in text.encode()
