"""A user's step that is read after it was traced: each call's output and its gradient, row for row.

The oracle is `nni.value_and_grad` of the same loss, which marks the gradients before the program is
differentiated, and has oracles of its own in `tests/records`.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from step_reader import Read, read_step, rows_of

import nnx_inspector as nni
from nnx_inspector._compat.launching.launch import LaunchInterception
from nnx_inspector.program.instrument import mark_presence
from nnx_inspector.program.survey import survey
from nnx_inspector.stats.summary import Summary

D = 6
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, D)), jnp.float32)
PARTS = X.reshape(2, 2, D)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.a, self.b = nnx.Linear(D, 8, rngs=rngs), nnx.Linear(8, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(jnp.tanh(self.a(x)))


class Stacked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, remat: dict[str, Any] | None = None):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(D, D, rngs=rngs)

        self.layers, self.remat = make(rngs), remat

    def __call__(self, x: jax.Array) -> jax.Array:
        def one(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return x + jnp.tanh(layer(x))

        body = one if self.remat is None else nnx.remat(one, **self.remat)
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class Branches(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.a, self.b = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        taken = lambda model, x: model.a(x)  # noqa: E731
        other = lambda model, x: model.b(x)  # noqa: E731
        return nnx.cond(jnp.isfinite(x).all(), taken, other, self, x)


class Statistics(nnx.Module):
    """Calls its norm only for the statistics: nothing reads what it returns."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.norm = nnx.Linear(D, D, rngs=rngs), nnx.BatchNorm(D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.norm(y)
        return y


def squares(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    return nnx.jit(lambda model, *args: nnx.value_and_grad(loss)(model, *args))


def split_loss(model: Any, loss: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """The state of a model, and a loss as a function of it."""
    graphdef, state = nnx.split(model)
    return state, lambda state, x: loss(nnx.merge(graphdef, state), x)


def explicit(loss: Callable[..., Any], model: Any, *args: Any) -> dict[Any, list[Summary]]:
    (_, record), _ = nni.value_and_grad(loss)(nnx.clone(model), *args)
    found: dict[Any, list[Summary]] = {}
    for site in record:
        for call in record[site].calls:
            for part in ("output", "gradient"):
                summary = getattr(call, part)
                rows = [] if summary is None or not call.took_place else rows_of(summary)
                found.setdefault((site, part), []).extend(rows)
    return found


def check(read: Read, expected: dict[Any, list[Summary]], *, rtol: float = 1e-5) -> None:
    assert read.unseen == {}
    for (site, part), wanted in expected.items():
        found = [one for one in read.rows(site, part) if one.size]
        assert len(found) == len(wanted), (site, part)
        for mine, other in zip(found, wanted, strict=True):
            scale = max(float(np.hypot(other.mean, other.std)), 1e-12)
            for name in ("size", "mean", "std", "min", "max"):
                a, b = float(getattr(mine, name)), float(getattr(other, name))
                assert abs(a - b) <= rtol * scale, (site, part, name)
    ours, own = read.outputs
    for a, b in zip(ours, own, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10)


POLICIES = {
    "scan": None,
    "remat": {},
    "nothing saved": {"policy": jax.checkpoint_policies.nothing_saveable},
    "dots saved": {"policy": jax.checkpoint_policies.dots_saveable},
    "everything saved": {"policy": jax.checkpoint_policies.everything_saveable},
}


@pytest.mark.parametrize("remat", POLICIES.values(), ids=POLICIES)
def test_the_layers_of_a_scan_have_a_row_each_whatever_is_rematerialised(remat: Any):
    model = Stacked(nnx.Rngs(0), remat)
    check(read_step(trained(squares), model, X), explicit(squares, model, X))


def test_a_step_with_an_optimizer():
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(squares)(model, x)
        optimizer.update(model, grads)
        return loss

    check(read_step(step, model, optimizer, X), explicit(squares, model, X))


def test_a_gradient_of_a_jitted_loss():
    def step(model: Any, x: jax.Array) -> Any:
        return nnx.value_and_grad(nnx.jit(squares))(model, x)

    model = MLP(nnx.Rngs(0))
    check(read_step(step, model, X), explicit(squares, model, X))


def test_a_gradient_for_each_example_covers_the_batch():
    @nnx.jit
    def step(model: Any, x: jax.Array) -> Any:
        state, of_one = split_loss(model, squares)
        return jax.vmap(jax.grad(of_one), in_axes=(None, 0))(state, x)

    def all_of_them(model: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: squares(model, x))(x).sum()

    model = MLP(nnx.Rngs(0))
    check(read_step(step, model, X), explicit(all_of_them, model, X))


def test_accumulated_microbatches_have_a_row_each():
    @nnx.jit
    def step(model: Any, parts: jax.Array) -> Any:
        state, of_one = split_loss(model, squares)
        add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(of_one)(state, x)), None)  # noqa: E731
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state), parts)[0]

    model = MLP(nnx.Rngs(0))
    expected: dict[Any, list[Summary]] = {}
    for x in PARTS:
        for key, rows in explicit(squares, model, x).items():
            expected.setdefault(key, []).extend(rows)
    check(read_step(step, model, PARTS), expected)


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_of_a_long_scan_evenly_spaced_rows_are_kept(reverse: bool):
    """Seven training steps in one program, of which at most three are measured: 0, 3 and 6."""
    count, rate = 7, 0.1
    parts = jnp.stack([X * (i + 1) for i in range(count)])

    @nnx.jit
    def steps(model: Any, parts: jax.Array) -> Any:
        state, of_one = split_loss(model, squares)

        def step(state: Any, x: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(of_one)(state, x)
            return jax.tree.map(lambda a, b: a - rate * b, state, grads), loss

        return jax.lax.scan(step, state, parts, reverse=reverse)

    model = Stacked(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    passes: dict[int, Any] = {}
    for i in reversed(range(count)) if reverse else range(count):
        passes[i] = explicit(squares, nnx.merge(graphdef, state), parts[i])
        grads = jax.grad(lambda state, x: squares(nnx.merge(graphdef, state), x))(state, parts[i])
        state = jax.tree.map(lambda a, b: a - rate * b, state, grads)
    expected = {key: [one for i in (0, 3, 6) for one in passes[i][key]] for key in passes[0]}
    check(read_step(steps, model, parts, most_rows=3), expected, rtol=1e-4)


def with_derivative(kind: str) -> Callable[..., Any]:
    """A loss whose call of the model has a derivative of its own."""

    def step(model: Any, x: jax.Array) -> Any:
        graphdef, state = nnx.split(model)
        plain = lambda state, x: nnx.merge(graphdef, state)(x)  # noqa: E731
        call: Any
        if kind == "vjp":
            call = jax.custom_vjp(plain)
            call.defvjp(lambda state, x: jax.vjp(plain, state, x), lambda back, ct: back(ct))
        else:
            call = jax.custom_jvp(plain)
            call.defjvp(lambda values, tangents: jax.jvp(plain, values, tangents))
        return jax.value_and_grad(lambda state: (call(state, x) ** 2).mean())(state)

    return nnx.jit(step)


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_within_a_function_with_a_derivative_of_its_own(kind: str):
    model = MLP(nnx.Rngs(0))
    check(read_step(with_derivative(kind), model, X), explicit(squares, model, X))


def test_within_such_a_function_that_nothing_differentiates():
    @nnx.jit
    def forward(model: Any, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(model)
        call: Any = jax.custom_jvp(lambda state, x: nnx.merge(graphdef, state)(x))
        call.defjvp(lambda values, tangents: (_ for _ in ()).throw(AssertionError))
        return call(state, x)

    model = MLP(nnx.Rngs(0))
    outputs = {key: rows for key, rows in explicit(squares, model, X).items() if key[1] == "output"}
    check(read_step(forward, model, X), outputs)


def test_of_a_cond_the_taken_branch_is_seen_and_the_other_is_empty():
    model = Branches(nnx.Rngs(0))
    read = read_step(trained(squares), model, X)
    check(read, explicit(squares, model, X))
    assert [one.size for one in read.rows("b", "output")] == [0]


def test_what_nothing_reads_is_seen_in_a_scan_that_is_differentiated():
    def loss(model: Any, parts: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def add(carry: Any, x: jax.Array) -> Any:
            total, model = carry
            return total + squares(model, x), model

        return add((0.0, model), parts)[0]

    model = Statistics(nnx.Rngs(0))
    read = read_step(trained(loss), model, PARTS)
    check(read, explicit(loss, model, PARTS))
    assert len(read.rows("norm", "output")) == len(PARTS)


def test_a_while_loop_adds_up():
    def forward(model: Any, x: jax.Array) -> jax.Array:
        def again(carry: Any) -> Any:
            count, model, x = carry
            return count + 1, model, jnp.tanh(model(x))

        return nnx.while_loop(lambda carry: carry[0] < 3, again, (0, model, x))[2]

    model = nnx.Linear(D, D, rngs=nnx.Rngs(0))
    (found,) = read_step(nnx.jit(forward), model, X).rows("", "output")
    outputs: Sequence[Any] = [y := model(X), y := model(jnp.tanh(y)), model(jnp.tanh(y))]
    every = np.stack(outputs).astype(np.float64)
    assert found.size == every.size
    np.testing.assert_allclose([found.mean, found.std], [every.mean(), every.std()], rtol=1e-4)


def test_a_gradient_that_is_differentiated_again_is_told_from_the_last_one():
    def penalty(model: Any, x: jax.Array) -> jax.Array:
        return (jax.grad(lambda x: squares(model, x))(x) ** 2).sum()

    model = MLP(nnx.Rngs(0))
    read = read_step(trained(penalty), model, X)
    inner = [mark.inner for mark, _ in read.seen["b", "gradient"]]
    assert sorted(inner) == [False, True]
    (own,) = [s for mark, s in read.seen["b", "gradient"] if mark.inner]
    y = model(X)
    expected = np.asarray(2 * y / y.size, np.float64)
    np.testing.assert_allclose(own.summaries[0].std, expected.std(), rtol=1e-4)


# ------------------------------------------------- conditions and loops under a vmap


class Present:
    """A chooser that changes no program, and masks the marks of examples that are not there."""

    def prepare(self) -> None: ...

    def choose(self, program: Any, arrays: Any, /, *, alone: Any = None, call: Any = None) -> None:
        return None

    def holds(self, jaxpr: Any, /) -> bool:
        return bool(survey(jaxpr, None).items)

    def with_presence(self, jaxpr: Any, present: Any, /) -> Any:
        return mark_presence(jaxpr, present)

    def escaped(self, name: str, /) -> None: ...

    def failed(self, error: Exception, /) -> None:
        raise error


@pytest.fixture
def present() -> Iterator[None]:
    taking = LaunchInterception(Present())
    taking.open()
    yield
    taking.close()


class Chosen(nnx.Module):
    """Each example takes a branch of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.a, self.b = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.cond(x.sum() > 0, self.a, self.b, x)


def summed(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).sum()


def gradients_inside(model: Any, x: jax.Array) -> Any:
    state, of_one = split_loss(model, summed)
    return jax.vmap(jax.grad(of_one), in_axes=(None, 0))(state, x)


def gradients_outside(model: Any, x: jax.Array) -> Any:
    graphdef, state = nnx.split(model)

    def loss(state: Any) -> jax.Array:
        return jax.vmap(lambda x: summed(nnx.merge(graphdef, state), x))(x).sum()

    return jax.grad(loss)(state)


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize("step", [gradients_inside, gradients_outside])
def test_of_a_cond_under_a_vmap_each_example_counts_in_its_own_branch(step: Callable[..., Any]):
    model = Chosen(nnx.Rngs(0))
    read = read_step(nnx.jit(step), model, X)
    taken = np.asarray(X.sum(axis=1) > 0)
    assert 0 < taken.sum() < len(X)
    for site, module, those in (("a", model.a, taken), ("b", model.b, ~taken)):
        y = np.asarray(module(X), np.float64)[those]
        for part, wanted in (("output", y), ("gradient", 2 * y)):
            (found,) = read.rows(site, part)
            assert found.size == wanted.size
            stats = [wanted.mean(), wanted.std(), wanted.min(), wanted.max()]
            got = [found.mean, found.std, found.min, found.max]
            np.testing.assert_allclose(got, stats, rtol=1e-5, atol=1e-6)


class Again(nnx.Module):
    """Each example leaves the loop after a number of iterations of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def times(self, x: jax.Array) -> jax.Array:
        return 1 + jnp.abs(x).sum().astype(int) % 3

    def __call__(self, x: jax.Array) -> jax.Array:
        def again(carry: Any) -> Any:
            number, x = carry
            return number + 1, jnp.tanh(self.linear(x))

        return jax.lax.while_loop(lambda carry: carry[0] < self.times(x), again, (0, x))[1]


@pytest.mark.usefixtures("present")
def test_of_a_while_under_a_vmap_an_example_counts_until_it_leaves_the_loop():
    @nnx.jit
    def forward(model: Any, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(model)
        return jax.vmap(lambda x: nnx.merge(graphdef, state)(x))(x)

    model = Again(nnx.Rngs(0))
    read = read_step(forward, model, X)
    outputs: list[Any] = []
    for x in X:
        for _ in range(int(model.times(x))):
            outputs.append(model.linear(x))
            x = jnp.tanh(outputs[-1])
    every = np.stack(outputs).astype(np.float64)
    assert len({int(model.times(x)) for x in X}) > 1
    (found,) = read.rows("linear", "output")
    assert found.size == every.size
    np.testing.assert_allclose([found.mean, found.std], [every.mean(), every.std()], rtol=1e-5)
