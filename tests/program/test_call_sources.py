"""The line of the user's code that makes each call, wherever the call is made.

A line that makes calls ends with a comment that names the sites it calls, in order.
"""

from __future__ import annotations

import pathlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from models import batch, rngs

import nnx_inspector as nni
from nnx_inspector.program.analysis.trace import Trace

X = batch(4, 3)


def linear() -> nnx.Linear:
    return nnx.Linear(3, 3, rngs=rngs())


def comment_at(source: str) -> str:
    """The comment at the end of the line `file:line`."""
    file, _, line = source.rpartition(":")
    assert file == __file__
    found = re.search(r"  # (.*)$", pathlib.Path(file).read_text().splitlines()[int(line) - 1])
    return found.group(1) if found else ""


def check(trace: Trace) -> None:
    """Check that every call, except the test's own, comes from a line that names it."""
    named = {c.site: comment_at(c.source).split() for c in trace.calls if c.depth}
    assert named
    for site, words in named.items():
        assert site in words, (site, words)


class Parts(nnx.Module):
    def __init__(self, call):
        self.a, self.b = linear(), linear()
        self.seq = nnx.Sequential(linear(), jax.nn.relu, nnx.Sequential(linear()))
        self.attend = nnx.MultiHeadAttention(1, 3, decode=False, rngs=rngs())
        self.rnn = nnx.RNN(nnx.SimpleCell(3, 3, rngs=rngs()))
        make = nnx.vmap(lambda r: nnx.Linear(3, 3, rngs=r), in_axes=0, out_axes=0)
        self.stack = nnx.split_rngs(splits=2)(make)(rngs())
        self.call = call

    def __call__(self, x):
        return self.call(self, x)


def plain(m, x):
    y = m.a(x)  # a
    return m.b(
        y + 1,
    )  # the call begins two lines above


def two_on_a_line(m, x):
    return m.b(m.a(x))  # b a


def in_jit(m, x):
    @nnx.jit
    def inner(m, x):
        return m.a(x)  # a

    return inner(m, x) + m.b(x)  # b


def in_raw_jit(m, x):
    graphdef, state = nnx.split(m.a)

    @jax.jit
    def inner(state, x):
        return nnx.merge(graphdef, state)(x)  # unattributed: a copy

    return inner(state, x) + m.b(x)  # b


def in_remat(m, x):
    return nnx.remat(lambda m, x: m.a(x))(m, x)  # a


def in_scan(m, x):
    def body(layer, x):
        x = layer(x)  # stack
        return x

    return nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(m.stack, x)


def in_scan_of_remat(m, x):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def body(layer, x):
        return layer(x)  # stack

    return body(m.stack, x)


def in_vmap(m, x):
    return nnx.vmap(lambda m, x: m.a(x), in_axes=(None, 0))(m, x)  # a


def in_cond(m, x):
    return nnx.cond(
        x.sum() > 0,
        lambda m, x: m.a(x),  # a
        lambda m, x: m.b(x),  # b
        m,
        x,
    )


def in_while(m, x):
    return nnx.while_loop(
        lambda s: s[1].sum() < 3,
        lambda s: (s[0], s[0].a(s[1])),  # a
        (m, x),
    )[1]


def in_grad(m, x):
    def loss(m):
        return m.a(x).sum()  # a

    return nnx.grad(loss)(m)["a"]["kernel"][...]


def by_flax(m, x):
    x = m.seq(x)  # seq seq/layers/0 seq/layers/2 seq/layers/2/layers/0
    x = m.attend(x[None])  # attend attend/query attend/key attend/value attend/out
    return m.rnn(x)  # rnn rnn/cell rnn/cell/dense_i rnn/cell/dense_h


def a_module_is_transformed_itself(m, x):
    y = nnx.jit(nnx.Linear.__call__)(m.a, x)  # a
    return nnx.remat(nnx.Linear.__call__)(m.b, y)  # b


def through_a_helper(m, x):
    return partial(apply, m.a)(x)


def apply(module, x):
    return module(x)  # a


@pytest.mark.parametrize(
    "call",
    [
        two_on_a_line,
        in_jit,
        in_raw_jit,
        in_remat,
        in_scan,
        in_scan_of_remat,
        in_vmap,
        in_cond,
        in_while,
        in_grad,
        by_flax,
        a_module_is_transformed_itself,
        through_a_helper,
    ],
)
@pytest.mark.filterwarnings("ignore::nnx_inspector.errors.InspectorWarning")
def test_a_call_is_at_the_line_that_makes_it(call):
    model = Parts(call)
    check(nni.trace(model, X))
    check(nni.trace(model, X))  # functions that jax has traced before


def test_a_call_over_several_lines_is_where_it_begins():
    first, second = nni.trace(Parts(plain), X).calls[1:]
    lines = [int(c.source.rpartition(":")[2]) for c in (first, second)]
    assert (comment_at(first.source), lines[1] - lines[0]) == ("a", 1)


jitted_linear = nnx.jit(nnx.Linear.__call__)
jitted_function = nnx.jit(lambda m, x: m(x))  # in the function


def test_one_traced_function_is_at_each_line_that_uses_it():
    def call(m, x):
        x = jitted_linear(m.a, x)  # first
        x = jitted_linear(m.a, x)  # second
        return jitted_function(m.a, x)

    for _ in range(2):
        found = [comment_at(c.source) for c in nni.trace(Parts(call), X).calls]
        assert found[1:] == ["first", "second", "in the function"]


def test_an_inner_jit_of_a_module_is_at_the_line_within_the_outer_function():
    def call(m, x):
        @nnx.jit
        def outer(m, x):
            return jitted_linear(m.a, jnp.tanh(x))  # a

        return outer(m, x) + outer(m, x)

    check(nni.trace(Parts(call), X))


def test_the_outermost_call_is_where_trace_is_called():
    calls = nni.trace(linear(), X).calls  # traces
    assert comment_at(calls[0].source) == "traces"


def test_an_interceptor_does_not_hide_the_line_of_the_call():
    def passes_on(next_fun, args, kwargs, context):
        return next_fun(*args, **kwargs)

    with nni.intercept_methods(passes_on):
        check(nni.trace(Parts(two_on_a_line), X))
