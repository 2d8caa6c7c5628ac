"""`first_nan` names the operation, the line and the operands of planted NaNs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.program.analysis.operation import Operation
from nnx_inspector.records.nan_search import candidates

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


class Planted(nnx.Module):
    """A layer, a function that may make a NaN, and another layer."""

    def __init__(self, function):
        self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.fault = Fault(function)
        self.last = nnx.Linear(3, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(self.fault(self.first(x)))


class Fault(nnx.Module):
    def __init__(self, function):
        self.function = nnx.static(function) if hasattr(nnx, "static") else function

    def __call__(self, x):
        return self.function(x)


def loss_of(model, x):
    return (model(x) ** 2).mean()


def masked_row(x):
    scores = jnp.full((4, 4), -jnp.inf).at[1:].set(0.0)
    return jax.nn.softmax(scores) @ x


def in_scan(x):
    def body(carry, i):
        return carry + jnp.log(3.0 - i), carry.sum()

    return jax.lax.scan(body, x, jnp.arange(6.0))[0]


def in_while(x):
    def body(state):
        i, y = state
        return i + 1, jnp.sqrt(y - 1.0)

    return jax.lax.while_loop(lambda state: state[0] < 5, body, (0, jnp.abs(x) + 1.5))[1]


def linear_norm(x):
    return x + jnp.sqrt((0 * x * x).sum())


FORWARD = {
    "log of a negative": (lambda x: jnp.log(x), "log", ""),
    "sqrt of a negative": (lambda x: jnp.sqrt(x - 10), "sqrt", ""),
    "rsqrt of a negative": (lambda x: jax.lax.rsqrt(x - 10), "rsqrt", ""),
    "zero by zero": (lambda x: (x - x) / (x - x), "div", ""),
    "normalised by a sum of zeros": (lambda x: (0 * x) / (0 * x).sum(), "div", ""),
    "zero times Inf": (lambda x: (0 * x) * jnp.inf, "mul", ""),
    "exp overflows": (lambda x: jnp.exp(100 * jnp.abs(x) + 80) - jnp.exp(200 + x), "sub", "exp"),
    "softmax by hand": (
        lambda x: jnp.exp(200 + x) / jnp.exp(200 + x).sum(-1, keepdims=True), "div", "exp"
    ),
    "half precision": (
        lambda x: (lambda y: (y - y).astype(jnp.float32))((1e6 + x).astype(jnp.float16)),
        "sub", "convert_element_type",
    ),
    "a masked row": (masked_row, "sub", ""),
    "a power": (lambda x: (x - 10) ** 0.5, "pow", ""),
    "arccos": (lambda x: jnp.arccos(x + 5), "acos", ""),
    "a remainder": (lambda x: x % jnp.zeros_like(x), "rem", ""),
    "in a scan": (in_scan, "log", ""),
    "in a while loop": (in_while, "sqrt", ""),
    "in a branch": (
        lambda x: jax.lax.cond(x.size > 0, lambda x: jnp.sqrt(x - 9), lambda x: x, x), "sqrt", ""
    ),
    "in remat": (lambda x: jax.checkpoint(lambda x: jnp.log(x - 9))(x), "log", ""),
    "in an inner jit": (lambda x: jax.jit(lambda x: jnp.log(x - 9))(x), "log", ""),
}  # fmt: skip

BACKWARD = {
    "norm of zeros": (lambda x: x + jnp.linalg.norm(0 * x), "mul"),
    "sqrt at zero": (lambda x: jnp.sqrt(jax.nn.relu(x) * 0 + jax.nn.relu(x) * 0), "mul"),
    "where around a root": (lambda x: jnp.where(x > 1e9, jnp.sqrt(x * 0), x), "mul"),
    "power at zero": (lambda x: (x * 0) ** 0.5, "mul"),
    "a division that is left out": (lambda x: jnp.where(x * 0 != 0, x / (x * 0), x), None),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("jitted", [False, True])
def test_the_operation_of_a_forward_pass_is_named(name, jitted):
    function, primitive, after = FORWARD[name]
    function = jax.jit(function) if jitted else function
    model = Planted(function)
    assert np.isnan(model(X)).any()
    found = nni.first_nan(model)(X)
    assert found.name == primitive, found.in_words()
    assert (found.after.name if found.after else "") == after
    assert found.site == "fault"
    assert found.makes == "NaN"
    assert "test_first_nan.py" in found.source
    assert not found.backward


@pytest.mark.parametrize("name", BACKWARD)
def test_the_operation_of_a_backward_pass_is_named(name):
    function, primitive = BACKWARD[name]
    model = Planted(function)
    gradients = nnx.grad(loss_of)(model, X)
    assert np.isfinite(model(X)).all()
    assert any(np.isnan(g).any() for g in jax.tree.leaves(gradients))
    assert nni.first_nan(loss_of)(model, X) is None
    found = nni.first_nan(loss_of, gradients=True)(model, X)
    assert primitive in (None, found.name), found.in_words()
    assert found.backward
    assert "test_first_nan.py" in found.source


def test_the_iteration_is_named():
    assert nni.first_nan(Planted(in_scan))(X).loops == (("scan", 4),)
    (loop,) = nni.first_nan(Planted(in_while))(X).loops
    assert loop[0] == "while"
    assert loop[1] > 0


def test_what_a_where_leaves_out_is_none():
    model = Planted(lambda x: jnp.where(x > 0, jnp.log(jnp.abs(x)), jnp.where(x < 0, 0.0, x)))
    safe = Planted(lambda x: jnp.where(x > 0, jnp.log(x), 0.0))
    assert nni.first_nan(model)(X) is None
    assert nni.first_nan(safe)(X) is None


def test_a_nan_of_the_arguments_or_parameters_is_named_in_a_warning():
    model = Planted(jnp.tanh)
    with pytest.warns(nni.InspectorWarning, match=r"argument 1, float32\[.*\], has one before"):
        assert nni.first_nan(model)(X.at[0, 0].set(jnp.nan)) is None
    model.first.kernel[...] = jnp.full((3, 3), jnp.nan)
    with pytest.warns(nni.InspectorWarning, match=r"'first/kernel', float32\[3,3\], has one"):
        assert nni.first_nan(model)(X) is None


def test_the_arguments_belong_to_the_function_that_is_returned():
    with pytest.raises(TypeError, match=r"as in first_nan\(f\)\(model, x\)"):
        nni.first_nan(Planted(jnp.log), X)


def test_the_operands_are_counted():
    x = jnp.array([[-1.0, 0.0, 2.0]])
    (operand,) = nni.first_nan(lambda model, x: jnp.log(x) + 0 * model(x).sum())(
        Planted(jnp.tanh), x
    ).operands
    assert (operand.shape, operand.zeros, operand.negative) == ((1, 3), 1, 1)
    assert (operand.low, operand.high, operand.nan, operand.posinf) == (-1.0, 2.0, 0, 0)


def test_the_layer_of_a_scanned_stack_is_named():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)
            self.shift = nnx.Param(jnp.zeros(()))

        def __call__(self, x):
            return jnp.sqrt(jnp.tanh(self.linear(x)) + 2 + self.shift)

    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return Block(rngs)

    class Stack(nnx.Module):
        def __init__(self):
            self.blocks = create(nnx.Rngs(0))

        def __call__(self, x):
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return run(x, self.blocks)

    model = Stack()
    model.blocks.shift[...] = jnp.array([0.0, 0.0, -9.0, 0.0])
    found = nni.first_nan(model)(X)
    assert (found.name, found.site, found.loops) == ("sqrt", "blocks", (("scan", 2),))
    assert found.function == "__call__"


def test_a_message_says_operation_operands_function_and_line():
    def logits(x):
        return jnp.log(x)

    x = jnp.array([[1.0, 0.0, 0.0], [1.0, 1.0, -2.0]])
    text = nni.first_nan(lambda model, x: logits(x) + 0 * model(x).sum())(
        Planted(jnp.tanh), x
    ).in_words()
    begins = "log of 6 values from -2 to 1 with 2 zeros and 1 negative, in logits at test_first_nan"
    assert text.startswith(begins)


def test_the_finding_of_an_inspector_names_the_operation():
    model = Planted(lambda x: jnp.log(x))
    insp = nni.Inspector(model, X, display=False)
    (finding,) = [one for one in insp.findings if one.rule == "nonfinite"]
    assert "the first NaN is made by log of" in finding.message
    assert "test_first_nan.py" in finding.message
    assert insp.first_nan().name == "log"
    insp.close()


def test_the_finding_of_a_step_names_the_operation_of_the_backward_pass():
    model = Planted(lambda x: x + jnp.linalg.norm(0 * x))
    insp = nni.Inspector(model, X, display=False)
    insp.step(loss_of, X)
    (finding,) = [one for one in insp.findings if one.rule == "nonfinite"]
    assert "in the backward pass of" in finding.message
    insp.close()


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_where_the_values_are_gone_the_operations_that_may_have_made_it_are_listed(name):
    """After a step of a loop. What made the NaN, or the infinity that led to it, is among them."""
    model = Planted((FORWARD | BACKWARD)[name][0])
    insp = nni.Inspector(model, X, display=False)
    backward = name in BACKWARD
    found = inside(insp).core.programs.read(
        inside(insp).core.call(),
        lambda stage: candidates(
            stage.survey.jaxpr, "first" if backward else "fault", backward=backward
        ),
    )
    insp.close()
    made = nni.first_nan(loss_of, gradients=backward)(model, X)
    wanted = (made.after or made).source.rpartition(":")[2]
    named = {one.name for one in found if one.source.rpartition(":")[2] == wanted}
    assert named, [str(one) for one in found]
    if not backward:
        assert FORWARD[name][2] in named or FORWARD[name][1] in named


def watched(model, jitted=True):
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return loss

    step = nnx.jit(step) if jitted else step
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    insp = nni.Inspector(model, X, display=False)
    for x in insp.watch([X, X], every=1):
        step(model, optimizer, x)
    (finding,) = [one for one in insp.findings if one.rule == "nonfinite"]
    insp.close()
    return finding


@pytest.mark.parametrize("jitted", [True, False])
def test_after_a_loop_the_finding_lists_them(jitted):
    line = in_scan.__code__.co_firstlineno + 2
    finding = watched(Planted(in_scan), jitted)
    assert (finding.site, finding.step) == ("fault", 0)
    told = (
        f"these operations between the last finite outputs and this one can make it: log, in body "
        f"at test_first_nan.py:{line}. nni"
    )
    assert told in finding.message
    line = linear_norm.__code__.co_firstlineno + 1
    finding = watched(Planted(linear_norm), jitted)
    assert (finding.site, finding.evidence["backward"]) == ("first", 1)
    told = (
        f"can have such a derivative: sqrt, in linear_norm at test_first_nan.py:{line}; one of the"
    )
    assert told in finding.message
    assert "nni.first_nan(loss_fn, gradients=True)(model, batch)" in finding.message  # as here:
    assert nni.first_nan(loss_of, gradients=True)(Planted(linear_norm), X).source.endswith(
        f":{line}"
    )


def test_a_nan_that_the_parameters_had_lists_none():
    model = Planted(jnp.log)
    model.first.kernel[...] = jnp.full((3, 3), jnp.nan)
    assert "the parameter 'first/kernel' (9 NaN among 9 elements)" in (
        message := watched(model).message
    )
    assert "these operations" not in message
    assert "Inf - Inf" not in message


def test_a_finding_names_the_parameter_that_has_the_nan():
    """Of what is computed and not used, nothing is found and nothing said."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    insp = nni.Inspector(lambda model, x: (jnp.log(-jnp.abs(x)), model(x))[1], model, X)
    assert insp.findings == []
    assert insp.first_nan() is None
    model.kernel[...] = model.kernel[...].at[0, 0].set(jnp.nan)
    insp.run(X)
    (finding,) = [one for one in insp.findings if one.rule == "nonfinite"]
    assert "the parameter 'kernel' (1 NaN among 6 elements) was not finite" in finding.message
    assert "what has changed the model since was not measured" in finding.message
    insp.close()


def test_a_healthy_model_has_none():
    insp = nni.Inspector(Planted(jnp.tanh), X, display=False)
    assert insp.first_nan() is None
    insp.step(loss_of, X)
    assert insp.first_nan() is None
    insp.close()


def test_inside_jit_it_says_where_to_call_it():
    model = Planted(jnp.log)
    with pytest.raises(nni.InspectorError, match="call it outside jit, grad and vmap"):
        nnx.jit(lambda model, x: nni.first_nan(model)(x) and 0)(model, X)


def test_a_call_that_reads_values_is_refused():
    class Reads(nnx.Module):
        def __call__(self, x):
            return jnp.log(x) if x.sum() > -1e9 else x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        nni.first_nan(Reads())(X)


def test_the_generated_file_of_a_notebooks_cell_is_not_named():
    made = Operation("log", "NaN", (), source="/tmp/ipykernel_7/1033781271.py:5", function="f")
    assert made.in_words() == "log, in f at line 5 of a notebook cell"
    assert dataclasses.replace(made, function="").in_words() == "log, in line 5 of a notebook cell"
