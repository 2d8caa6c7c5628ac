"""The members of a vmapped ensemble have figures of their own, equal to those of NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.program.analysis.stacks import stacks_of

MEMBERS, BATCH = 4, 4  # equal: the one is never taken for the other


class Rectify(nnx.Module):
    """A module without parameters: a part of the member around it."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(x)


class Member(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.rectify = Rectify()
        self.last = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.rectify(self.first(x)))


class Jitted(nnx.Module):
    """A member with a block that is jitted by itself."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.last = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.jit(lambda layer, x: layer(x))(self.last, self.first(x))


def ensemble(kind: Callable[..., Any] = Member, *, axis: int = 0) -> Any:
    make = nnx.vmap(lambda rngs: kind(rngs=rngs), in_axes=0, out_axes=axis)
    return nnx.split_rngs(splits=MEMBERS)(make)(nnx.Rngs(0))


def inputs(shape: tuple[int, ...] = (BATCH, 3)) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


def forward(model: Any, x: jax.Array) -> jax.Array:
    return nnx.vmap(lambda model, x: model(x), in_axes=(0, None))(model, x)


def own_inputs(model: Any, x: jax.Array) -> jax.Array:
    return nnx.vmap(lambda model, x: model(x), in_axes=(0, 0))(model, x)


def examples_inside(model: Any, x: jax.Array) -> jax.Array:
    one = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))
    return nnx.vmap(one, in_axes=(0, None))(model, x)


def examples_outside(model: Any, x: jax.Array) -> jax.Array:
    members = nnx.vmap(lambda model, x: model(x), in_axes=(0, None))
    return nnx.vmap(members, in_axes=(None, 0))(model, x)


def along_one(model: Any, x: jax.Array) -> jax.Array:
    return nnx.vmap(lambda model, x: model(x), in_axes=(1, None))(model, x)


def hidden(model: Any, x: Any, *, axis: int = 0) -> np.ndarray:
    """What `first` returns of each member, float64."""
    kernel, bias = (
        np.moveaxis(np.asarray(p[...], np.float64), axis, 0)
        for p in (model.first.kernel, model.first.bias)
    )
    x = np.asarray(x, np.float64)
    x = x if x.ndim == 3 else np.stack([x] * MEMBERS)
    return np.einsum("mbi,mio->mbo", x, kernel) + bias[:, None]


def loss(forward: Any, model: Any, x: jax.Array) -> jax.Array:
    return (forward(model, x) ** 2).sum()


CASES = {
    "shared input": (forward, (BATCH, 3), 0),
    "own inputs": (own_inputs, (MEMBERS, BATCH, 3), 0),
    "examples mapped inside": (examples_inside, (BATCH, 3), 0),
    "examples mapped outside": (examples_outside, (BATCH, 3), 0),
    "parameters along axis 1": (along_one, (BATCH, 3), 1),
}
each_case = pytest.mark.parametrize("case", CASES)


def close(summaries: Any, expected: np.ndarray) -> None:
    assert summaries.rows == (MEMBERS,)
    for number, values in enumerate(expected):
        row = summaries.row(number)
        assert row.size == values.size
        np.testing.assert_allclose(row.mean, values.mean(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(row.std, values.std(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(row.max, values.max(), rtol=1e-5)


@each_case
@pytest.mark.parametrize("jitted", [False, True])
def test_each_member_is_measured(case: str, jitted: bool) -> None:
    call, shape, axis = CASES[case]
    model, x = ensemble(axis=axis), inputs(shape)
    measured = nni.capture(call)
    _, record = (nnx.jit(measured) if jitted else measured)(model, x)
    values = hidden(model, x, axis=axis)
    close(record["first"].calls[0].output, values)
    close(record["rectify"].calls[0].output, np.maximum(values, 0))
    close(record["first"].calls[0].input, np.broadcast_to(x, (MEMBERS, BATCH, 3)))


@each_case
def test_gradients_are_those_of_each_member(case: str) -> None:
    call, shape, axis = CASES[case]
    model, x = ensemble(axis=axis), inputs(shape)
    (_, record), _ = nni.value_and_grad(functools.partial(loss, call))(model, x)
    kernel, bias = (
        np.moveaxis(np.asarray(p[...], np.float64), axis, 0)
        for p in (model.last.kernel, model.last.bias)
    )
    before = hidden(model, x, axis=axis)
    out = np.einsum("mbi,mio->mbo", np.maximum(before, 0), kernel) + bias[:, None]
    close(record["last"].calls[0].gradient, 2 * out)
    back = np.einsum("mbo,mio->mbi", 2 * out, kernel)
    close(record["rectify"].calls[0].gradient, back)
    close(record["first"].calls[0].gradient, back * (before > 0))


def test_kept_values_and_units_have_a_row_for_each_member() -> None:
    model, x = ensemble(), inputs()
    _, record = nni.capture(forward, values=True, units=-1)(model, x)
    call, values = record["first"].calls[0], hidden(model, x)
    np.testing.assert_allclose(call.values, values, rtol=1e-5, atol=1e-6)
    found = [call.units.row(i).mean for i in range(MEMBERS)]
    np.testing.assert_allclose(found, values.mean(1), rtol=1e-4, atol=1e-6)


def test_the_examples_of_a_batch_are_no_members() -> None:
    model, x = Member(rngs=nnx.Rngs(0)), inputs()
    each = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))
    assert not stacks_of(nni.trace(each, model, x))
    _, record = nni.capture(each)(model, x)
    assert record["first"].calls[0].output.rows == ()


def test_a_block_that_is_jitted_by_itself_is_measured_as_one() -> None:
    model, x = ensemble(Jitted), inputs()
    _, record = nni.capture(forward)(model, x)
    assert record["first"].calls[0].output.rows == (MEMBERS,)
    whole = record["last"].calls[0].output
    assert whole.rows == ()
    assert whole.size == MEMBERS * BATCH * 2
    assert "last" not in stacks_of(nni.trace(forward, model, x))


@each_case
def test_one_member_is_perturbed(case: str) -> None:
    call, shape, axis = CASES[case]
    model, x = ensemble(axis=axis), inputs(shape)
    plain = call(model, x)
    changed = nni.perturbed(call)({"last[2]": nni.Scale(0.0)}, model, x)
    first = 1 if case == "examples mapped outside" else 0  # the axis of the members
    plain, changed = (np.moveaxis(np.asarray(y), first, 0) for y in (plain, changed))
    expected = plain * (np.arange(MEMBERS) != 2)[:, None, None]
    np.testing.assert_allclose(changed, expected)


def test_an_input_that_all_members_share_is_refused() -> None:
    model, x = ensemble(), inputs()
    with pytest.raises(ValueError, match="4 members of 'first' receive the same array, so what"):
        nni.perturbed(forward)({"first[2]": nni.Scale(0.0, at="input")}, model, x)
    changed = nni.perturbed(forward)({"first": nni.Scale(0.0, at="input")}, model, x)
    np.testing.assert_allclose(changed, forward(model, jnp.zeros_like(x)))


def test_a_sweep_has_a_row_for_each_member() -> None:
    model, x = ensemble(), inputs()
    energy = lambda model, x: loss(forward, model, x)  # noqa: E731
    frame = nni.sweep(model, energy, x, sites="last", progress=False)
    plain = forward(model, x)
    left = [float((plain**2).sum() - (plain[i] ** 2).sum()) for i in range(MEMBERS)]
    found = dict(zip(frame.site, frame.loss, strict=True))
    for i, expected in enumerate(left):
        np.testing.assert_allclose(found[f"last[{i}]"], expected, rtol=1e-5)


def rows_of(recording: Any, quantity: str, site: str) -> list[float]:
    frame = recording.to_frame(layers=True)
    frame = frame[(frame.quantity == quantity) & (frame.step == frame.step.max())]
    means = dict(zip(frame.site, frame["mean"], strict=True))
    return [means.get(f"{site}[{i}]", np.nan) for i in range(MEMBERS)]


def together(model: Any, x: jax.Array) -> Any:
    """One loss of all members."""
    return nnx.grad(functools.partial(loss, forward))(model, x)


@nnx.vmap(in_axes=(0, None))
def apart(model: Any, x: jax.Array) -> Any:
    """A step of each member by itself."""
    return nnx.grad(lambda model: (model(x) ** 2).sum())(model)


@pytest.mark.parametrize("step", [together, apart])
@pytest.mark.parametrize("jitted", [True, False])
def test_a_watched_loop_has_a_row_for_each_member(step: Any, jitted: bool) -> None:
    model, x = ensemble(), inputs()
    step = nnx.jit(step) if jitted else step
    with nni.watch(model, every=1) as recording:
        for _ in range(2):
            step(model, x)
    (_, record), _ = nni.value_and_grad(functools.partial(loss, forward))(model, x)
    for quantity in ("output", "gradient"):
        found = getattr(record["first"].calls[0], quantity)
        expected = [found.row(i).mean for i in range(MEMBERS)]
        actual = rows_of(recording, quantity, "first")
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_an_inspector_shows_and_perturbs_each_member_of_a_loop() -> None:
    model, x = ensemble(), inputs()
    insp = nni.Inspector(forward, model, x)
    step = nnx.jit(lambda model, x: forward(model, x))
    for _ in insp.watch(range(2), every=1):
        step(model, x)
    inside(insp).core.recorder.wait()
    values = hidden(model, x)
    np.testing.assert_allclose(
        rows_of(insp.recording, "output", "first"), values.mean((1, 2)), rtol=1e-4, atol=1e-6
    )
    insp.perturb("last[1]", nni.Scale(0.0))
    inside(insp).arming.wait()
    (out,) = [step(model, x) for _ in insp.watch(range(1), every=1)]
    zero = [bool((out[i] == 0).all()) for i in range(MEMBERS)]
    assert zero == [False, True, False, False]
