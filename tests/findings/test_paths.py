"""What reaches what, in traced programs: the flow of each is compared with what changes what."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.findings.facts import facts_of_stage
from nnx_inspector.findings.paths import Paths
from nnx_inspector.hooks.sites import Selection
from nnx_inspector.program.analysis.trace import staged_for_trace
from nnx_inspector.program.function import module_function
from nnx_inspector.recordings.facts import Role

X = jnp.linspace(-1.0, 1.0, 24).reshape(6, 4)


def paths_of(model: Any, *args: Any, only: Any = None, stacks: Any = ()) -> Paths:
    how: Any = dict(selection=Selection(only), roots={(): model})
    with staged_for_trace(module_function(model, "trace"), args or (X,), {}, **how) as stage:
        return Paths(facts_of_stage(stage).flows, stacks)


def linear(seed: int = 0) -> nnx.Linear:
    return nnx.Linear(4, 4, rngs=nnx.Rngs(seed))


class Net(nnx.Module):
    """Layers a to e, joined by a function."""

    def __init__(self, run: Any):
        for i, name in enumerate("abcde"):
            setattr(self, name, linear(i))
        self.scale = nnx.Param(jnp.ones(4))
        self.run = run

    def __call__(self, x: jax.Array) -> Any:
        return self.run(self, x)


def heads(m: Any, x: jax.Array) -> Any:
    h = m.a(x)
    return m.b(h), m.c(h)


def towers(m: Any, x: jax.Array) -> Any:
    return m.c(m.a(x)) + m.d(m.b(x))


def shared(m: Any, x: jax.Array) -> Any:
    """e is called on what a returns for b, and on what c returns for d."""
    return m.b(m.e(m.a(x))), m.d(m.e(m.c(x)))


def residual(m: Any, x: jax.Array) -> Any:
    for layer in (m.a, m.b, m.c, m.d):
        x = x + layer(x)
    return x


def chosen(m: Any, x: jax.Array) -> Any:
    return m.b(jax.nn.one_hot(m.a(x).argmax(-1), 4) * x)


def recurrent(m: Any, x: jax.Array) -> Any:
    def body(h: Any, row: Any) -> Any:
        y = m.a(h + row)
        return m.b(y), m.c(y)

    return jax.lax.scan(body, jnp.zeros(4), x)[1]


CASES: Any = [
    (heads, {"ab", "ac"}),
    (towers, {"ac", "bd"}),
    (shared, {"ae", "eb", "ab", "ce", "ed", "cd"}),
    (residual, {"ab", "ac", "ad", "bc", "bd", "cd"}),
    (chosen, {"ab"}),
    (recurrent, {"ab", "ac", "ba", "bc"}),
]


@pytest.mark.parametrize(("run", "expected"), CASES)
def test_a_site_reaches_what_is_computed_from_it_and_nothing_else(run: Any, expected: Any) -> None:
    paths = paths_of(Net(run))
    found = {a + b for a in "abcde" for b in "abcde" if a != b and paths.reaches(a, b)}
    assert found == expected


@pytest.mark.parametrize("run", [heads, towers, shared, residual])
def test_it_reaches_what_a_change_of_it_changes(run: Any) -> None:
    """The oracle: one layer's output is scaled, and the others are compared."""
    model = Net(run)
    paths, names = paths_of(model), [n for n in "abcde" if paths_of(model).knows(n)]
    clean = nni.capture(model)(X)[1]
    for one in names:
        with nni.perturb(one, nni.Scale(1.5)):
            changed = nni.capture(model)(X)[1]
        for other in names:
            before, after = clean[other].output, changed[other].output
            moved = float(before.mean) != float(after.mean)
            assert moved == paths.reaches(one, other), (one, other)


def test_a_choice_is_no_value() -> None:
    paths = paths_of(Net(chosen))
    assert paths.reaches("a", "b")
    assert not paths.reaches("a", "b", values=True)
    assert {(f.site, f.role, f.chosen) for f in paths.feeds("b")} == {
        ("a", Role.OUTPUT, True),
        ("", Role.INPUT, False),
    }


def test_parameters_of_a_module_around_the_layers_have_paths_of_their_own() -> None:
    paths = paths_of(Net(lambda m, x: m.b(m.a(x) * m.scale)))
    assert paths.reaches("", "b", parameters=True)
    assert not paths.reaches("", "a", parameters=True)
    assert {f.site for f in paths.feeds("b") if f.role == Role.PARAMETERS} == {""}


class Stack(nnx.Module):
    """Three layers in a scan, one of which has an inner part, then a head."""

    def __init__(self) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(axis_size=3)
        def make(rngs: nnx.Rngs) -> nnx.Module:
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers, self.head = make(nnx.Rngs(0)), linear(1)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: Any, x: jax.Array) -> jax.Array:
            return jnp.tanh(layer(x))

        return self.head(run(self.layers, x))


def test_single_layers_of_a_stack_reach_the_later_ones() -> None:
    paths = paths_of(Stack(), stacks={"layers"})
    assert paths.reaches("layers[0]", "layers[2]")
    assert not paths.reaches("layers[2]", "layers[0]")
    assert paths.reaches("layers[2]", "head")
    assert paths.reaches("layers", "layers[1]")
    assert not paths.reaches("head", "layers[0]")
    assert [f.site for f in paths.feeds("layers[2]")] == ["layers[1]"]
    assert [f.role for f in paths.feeds("layers[0]")] == [Role.INPUT]


def test_methods_and_operations_are_sites_like_others() -> None:
    class Auto(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = linear(0), linear(1)

        def encode(self, x: jax.Array) -> jax.Array:
            return self.a(x)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.b(jax.nn.softmax(self.encode(x)))

    paths = paths_of(Auto(), only=["*", "@softmax", ":encode"])
    for one, other in (("a", ":encode"), (":encode", "@softmax"), ("@softmax", "b"), ("a", "b")):
        assert paths.reaches(one, other), (one, other)
        assert not paths.reaches(other, one), (other, one)


def test_what_no_program_calls_reaches_only_itself() -> None:
    paths = Paths((), ())
    assert paths.reaches("a", "a")
    assert not paths.reaches("a", "b")
    assert not paths.knows("a")
    assert paths.feeds("a") == []
