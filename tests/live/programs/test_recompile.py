"""A jitted call that was recorded during its trace is compiled again without being made."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from flax import nnx
from interceptors import double_output, pass_through
from leftovers import patched_in_jax

from nnx_inspector.hooks.dispatch import add_hooks
from nnx_inspector.hooks.hook import INTERCEPTOR, Hook
from nnx_inspector.live.programs import recompile as jitcalls
from nnx_inspector.live.programs.recompile import CallLog, CallLogging
from nnx_inspector.resources import open_all

X = jnp.ones((4, 3))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.linear(x)))


BEFORE, AFTER = Hook(pass_through, INTERCEPTOR), Hook(double_output, INTERCEPTOR)


@pytest.fixture
def calls():
    calls = CallLog(lambda layer: layer == BEFORE)
    with open_all(CallLogging(calls)):
        yield calls


@nnx.jit(donate_argnums=0)
def of_nnx(model, x):
    return model(x)


@functools.partial(nnx.jit, static_argnames=("times", "how"))
def static(model, x, *, times, how):
    return times * model(x) if how == "times" else model(x)


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(1,))
def of_jax(graphdef, state, x, scale, offset):
    model = nnx.merge(graphdef, state)
    return model(x) * scale + offset, nnx.state(model)


def committed(model):
    device = jax.devices()[0]
    return of_nnx(model, jax.device_put(X, device))


@nnx.jit
def outer(model, x):
    return of_nnx(model, x) + 1


@jax.jit
def copy(tree):
    return jax.tree.map(jnp.copy, tree)


def copied(model):
    graphdef, state = nnx.split(model)
    return graphdef, copy(state)


CASES = {
    "nnx.jit": lambda model: of_nnx(model, X),
    "an array that lies somewhere": committed,
    "static arguments by name": lambda model: static(model, X, times=2, how="times"),
    "numbers and NumPy arrays": lambda model: of_jax(*copied(model), X, 2.0, np.ones(3)),
    "an inner jit": lambda model: outer(model, X),
    "what runs beside it, eagerly": lambda model: (of_nnx(model, X) - 1.0).sum(axis=0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_next_call_under_the_other_layers_finds_it(name, calls):
    run, model = CASES[name], Net(nnx.Rngs(0))
    jax.clear_caches()
    with add_hooks(BEFORE):
        run(model)
        run(model)  # the first call has placed its state
    every = calls.logged()
    kept = [x for one in every for x in jax.tree.leaves(one.call.args)]
    assert not any(isinstance(x, jax.Array) for x in kept)

    def compile_all():
        for one in every:
            one.compile(lambda layer: AFTER)

    thread = threading.Thread(target=compile_all)
    with Compilations() as in_thread:
        thread.start()
        thread.join()
    assert in_thread.kinds
    with add_hooks(AFTER), Compilations() as compiled:
        run(model)
    assert compiled.kinds == []


def test_what_is_made_under_other_layers_is_not_noted(calls):
    model = Net(nnx.Rngs(0))
    jax.clear_caches()
    of_nnx(model, X)
    with add_hooks(AFTER):
        of_nnx(model, X)
    assert calls.logged() == []


def test_a_call_is_kept_once_however_often_it_is_made(calls):
    model = Net(nnx.Rngs(0))
    for _ in range(3):
        jax.clear_caches()
        with add_hooks(BEFORE):
            of_nnx(model, X)
    first = [one for one in calls.logged() if one.call.nnx is of_nnx]
    assert len(first) == 1
    x = jnp.ones((2, 3))
    with add_hooks(BEFORE):
        of_nnx(model, x)
    assert len([one for one in calls.logged() if one.call.nnx is of_nnx]) == 2


def test_the_oldest_calls_go(calls, monkeypatch):
    monkeypatch.setattr(jitcalls, "MOST_CALLS", 3)
    forward = jax.jit(lambda x: x + 1)
    every = [np.ones(n, np.float32) for n in range(1, 6)]
    with add_hooks(BEFORE):
        for x in every:
            forward(x)
    assert [one.call.args[0].shape for one in calls.logged()] == [(3,), (4,), (5,)]


def test_what_is_within_a_trace_is_not_noted(calls):
    model, x = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), np.ones((4, 3), np.float32)
    graphdef, state = nnx.split(model)
    forward = jax.jit(lambda x: nnx.merge(graphdef, state)(x).sum())
    with add_hooks(BEFORE):
        jax.grad(forward)(x)
    # jax keeps the function that it traces under this name
    assert not any(one.call.function is forward._fun for one in calls.logged())


def test_nothing_is_left_where_nobody_listens():
    before = patched_in_jax()
    one, other = CallLog(lambda layer: True), CallLog(lambda layer: True)
    with open_all(CallLogging(one), CallLogging(other)):
        assert patched_in_jax() != before
    assert patched_in_jax() == before
