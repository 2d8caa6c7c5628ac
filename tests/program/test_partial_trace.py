"""A forward pass that raises: the calls up to the failing one, and the user's own exception."""

from __future__ import annotations

import dataclasses
import traceback

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from models import batch, rngs

import nnx_inspector as nni

X = batch(4, 3)


class Mine(Exception):
    """The user's exception."""


class Bad(nnx.Module):
    """Its second layer wants four features and gets three."""

    def __init__(self):
        self.a = nnx.Linear(3, 3, rngs=rngs())
        self.b = nnx.Linear(4, 3, rngs=rngs())

    def __call__(self, x, *, train=True):
        return self.b(self.a(x))  # the user's line


class Model(nnx.Module):
    def __init__(self, run):
        self.first = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs()), nnx.Dropout(0.5, rngs=rngs()))
        self.norm = nnx.BatchNorm(3, rngs=rngs())
        self.bad = Bad()
        self.run = run

    def __call__(self, x):
        return self.run(self.bad, self.norm(self.first(x)))


def call(m, x):
    return m(x)


EVERYWHERE = {
    "plain": call,
    "jit": nnx.jit(call),
    "remat": nnx.remat(call),
    "vmap": nnx.vmap(call, in_axes=(None, 0)),
    "scan": lambda m, x: nnx.scan(call, in_axes=(None, 0), out_axes=0)(m, x[:, None]),
    "scan of remat of jit": lambda m, x: nnx.scan(
        nnx.remat(nnx.jit(call)), in_axes=(None, 0), out_axes=0
    )(m, x[:, None]),
    "cond": lambda m, x: nnx.cond(x.sum() > 0, call, lambda m, x: x, m, x),
    "while_loop": lambda m, x: nnx.while_loop(
        lambda s: s[1].sum() < 3, lambda s: (s[0], s[0](s[1])), (m, x)
    ),
    "grad": lambda m, x: nnx.grad(lambda m: m(x).sum())(m),
}


def raised(f, *args, error=Exception, **kwargs):
    with pytest.raises(error) as caught:
        nni.trace(f, *args, **kwargs)
    return caught.value


def state_of(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))


@pytest.mark.parametrize("where", EVERYWHERE)
def test_the_calls_up_to_the_failing_one_are_there_and_nothing_of_the_model_changes(where):
    model = Model(EVERYWHERE[where])
    graphdef, state = nnx.graphdef(model), state_of(model)
    error = raised(model, X, error=TypeError)
    trace = error.partial_trace
    assert [(c.site, c.depth, c.parent) for c in trace.calls] == [
        ("", 0, None),
        ("first", 1, 0), ("first/layers/0", 2, 1), ("first/layers/1", 2, 1),
        ("norm", 1, 0),
        ("bad", 1, 0), ("bad/a", 2, 5), ("bad/b", 2, 5),
    ]  # fmt: skip
    *before, failing = trace.calls
    assert not any(c.error for c in before)
    assert failing.error.startswith("TypeError: dot_general requires contracting dimensions")
    assert trace.error == failing.error
    returned = {c.site: c.output for c in trace.calls}
    shape = (
        "float32[1,3]" if "scan" in where else "float32[3]" if where == "vmap" else "float32[4,3]"
    )
    assert returned == {
        "": "", "bad": "", "bad/b": "", "bad/a": shape,
        **dict.fromkeys(["first", "first/layers/0", "first/layers/1", "norm"], "float32[4,3]"),
    }  # fmt: skip
    assert failing.inputs == trace.calls[5].inputs == shape
    check_exception(error, where)
    assert nnx.graphdef(model) == graphdef
    jax.tree.map(np.testing.assert_array_equal, state_of(model), state)
    nni.trace(model.first, X)  # the next trace is whole


def check_exception(error, where):
    """It is the user's own, with notes."""
    with pytest.raises(TypeError) as plain:
        Model(EVERYWHERE[where])(X)
    assert type(error) is type(plain.value)
    assert error.args == plain.value.args
    assert any("the user's line" in line for line in traceback.format_tb(error.__traceback__))
    ours = [n for n in error.__notes__ if n.startswith("nnx_inspector")]
    assert len(ours) == 2
    assert ours[0].startswith("nnx_inspector: raised in the call of 'bad/b' (Linear) with inputs ")
    assert "partial_trace" in ours[1]


def test_completed_calls_tell_what_they_are():
    trace = raised(Model(call), X).partial_trace
    first = trace.calls[2]
    assert (first.type, first.shape, first.dtype) == ("Linear", (4, 3), "float32")
    assert (first.parameters, first.parameter_bytes, first.output_bytes) == (12, 48, 48)
    assert first.source.startswith(__file__)
    # these are read from the program, which does not exist
    assert all(c.flops is None and c.times is None and c.changed is None for c in trace.calls)
    assert trace.edges == trace.borders == ()
    assert {site.key for site in trace.modules} >= {"bad/b", "first/layers/0"}


def test_the_very_object_that_was_raised_comes_out():
    error = Mine("mine", 3)

    class Raises(nnx.Module):
        def __call__(self, x):
            raise error

    assert raised(Raises(), X, error=Mine) is error
    assert error.args == ("mine", 3)
    assert error.partial_trace.calls[0].error.endswith("Mine: ('mine', 3)")


def test_arguments_of_the_failing_call_are_told_as_written():
    error = raised(lambda m, x: m(x, train=False), Bad(), X)
    assert error.partial_trace.calls[0].inputs == "float32[4,3], train=False"
    assert "with inputs float32[4,3]." in error.__notes__[0]


def test_an_exception_outside_of_any_call_is_no_calls():
    def forward(model, x):
        model.a(x)
        raise Mine

    trace = raised(forward, Bad(), X, error=Mine).partial_trace
    assert [(c.site, c.error) for c in trace.calls] == [("a", "")]
    assert trace.error.endswith("Mine")


def test_an_error_of_a_transform_comes_after_the_calls_inside_it():
    def mismatch(m, x):
        return jax.lax.scan(lambda x, _: (m.a(x).sum(), None), x, None, length=2)

    trace = raised(Model(mismatch), X, error=TypeError).partial_trace
    assert trace.calls[-1].site == "bad/a"
    assert trace.calls[-1].output == "float32[4,3]"
    assert [c.site for c in trace.calls if c.error] == [""]


def test_calls_of_functions_that_jax_traced_before_are_there_too():
    jitted = nnx.jit(call)

    class Uses(nnx.Module):
        def __init__(self):
            self.inner = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs()))
            self.fail = False

        def __call__(self, x):
            x = jitted(self.inner, x)
            if self.fail:
                raise Mine
            return x

    model = Uses()
    sites = [c.site for c in nni.trace(model, X).calls]
    model.fail = True
    assert [c.site for c in raised(model, X).partial_trace.calls] == sites


def test_an_exception_that_the_model_catches_is_told_and_ends_nothing():
    class Tries(nnx.Module):
        def __init__(self):
            self.bad, self.last = Bad(), nnx.Linear(3, 3, rngs=rngs())

        def __call__(self, x, fail):
            try:
                x = self.bad(x)
            except TypeError:
                x = self.last(x)
            if fail:
                raise Mine
            return x

    assert [c.site for c in nni.trace(Tries(), X, False).calls][-1] == "last"
    trace = raised(Tries(), X, True).partial_trace
    assert {c.site: c.error[:9] for c in trace.calls if c.error} == {
        "bad/b": "TypeError",
        "": trace.error[:9],
    }
    assert trace.calls[-1].output == "float32[4,3]"


def test_a_pass_that_fails_only_sometimes_keeps_what_the_first_saw():
    class Flaky(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(3, 3, rngs=rngs())

        def __call__(self, x):
            x = self.a(x)
            if not tries:
                tries.append(1)
                raise Mine
            return x

    tries: list[int] = []
    trace = raised(Flaky(), X, error=Mine).partial_trace
    assert [(c.site, bool(c.error)) for c in trace.calls] == [("", True), ("a", False)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_no_error_passes_untouched(error):
    class Stops(nnx.Module):
        def __call__(self, x):
            raise error

    caught = raised(Stops(), X, error=error)
    assert not hasattr(caught, "partial_trace")
    assert not hasattr(caught, "__notes__")


def test_an_exception_whose_text_cannot_be_made_is_raised_all_the_same():
    class Silent(Exception):
        def __str__(self):
            raise ZeroDivisionError

    class Raises(nnx.Module):
        def __call__(self, x):
            raise Silent

    assert "Silent" in raised(Raises(), X, error=Silent).partial_trace.error


def test_the_repr_shows_where_it_ended():
    lines = repr(raised(Model(call), X).partial_trace).splitlines()
    assert lines[1].split() == ["(root)", "Model", "float32[4,3]", "(did", "not", "return)", "45"]
    assert lines[-2].split()[:5] == ["b", "Linear", "float32[4,3]", "raised", "TypeError:"]
    assert lines[-1].startswith("raised TypeError: dot_general requires")


def test_the_frame_has_the_error():
    frame = raised(Model(call), X).partial_trace.to_frame()
    assert list(frame.error.str[:9]) == [""] * 7 + ["TypeError"]


def test_a_model_that_is_no_module_has_no_partial_trace():
    assert not hasattr(raised(3, X, error=TypeError), "partial_trace")


def test_nothing_is_kept_of_the_pass():
    error = raised(models.Nested(rngs()), jnp.ones((4, 7)))
    trace = error.partial_trace
    assert trace.calls[-1].error
    leaves = [leaf for call in trace.calls for leaf in dataclasses.astuple(call)]
    assert not any(isinstance(leaf, jax.Array) for leaf in leaves)
