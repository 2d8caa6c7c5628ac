"""The share of a parameter's update that its dtype rounds to nothing, against NumPy in float64.

What a step adds is known where the step returns it too. Steps that add nothing on purpose have no
share: frozen parameters, accumulated gradients, rows of an embedding that no token chose.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from linear_stack import LinearStack
from parameter_oracle import Flat, flat

import nnx_inspector as nni
from nnx_inspector._compat import native
from nnx_inspector.program.editing.functions import update_squares
from nnx_inspector.recordings.passes import Pass

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
X = jax.random.normal(jax.random.key(0), (16, 24))


class Net(nnx.Module):
    def __init__(self, dtype: Any = BF16):
        k = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.norm, self.up, self.down = (
            nnx.LayerNorm(24, **k),
            nnx.Linear(24, 32, **k),
            nnx.Linear(32, 4, **k),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(self.norm(x))))


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return ((model(x).astype(jnp.float32) - 1) ** 2).mean()


def share(before: np.ndarray, after: np.ndarray, added: np.ndarray) -> float:
    meant, still = added != 0, (before == after) & np.isfinite(after)
    return (meant & still).sum() / meant.sum() if meant.any() else math.nan


def assert_lost(one: Pass, before: Flat, after: Flat, added: Mapping[str, Any]) -> None:
    for path, value in before.items():
        wanted = share(value, after[path], added[path])
        np.testing.assert_allclose(one.update_lost(path), wanted, rtol=1e-6, err_msg=path)


def watched(
    model: Any, tx: Any, x: jax.Array = X, *, wrt: Any = nnx.Param, steps: int = 4
) -> list[float]:
    """Compare all shares of some steps; returns those of all parameters together."""
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, x)
        params, state = nnx.state(model, wrt), optimizer.opt_state
        pure = map(nnx.as_pure, (grads, state, params))
        added = tx.update(*pure)[0]  # XLA computes it once
        optimizer.update(model, grads)
        return added

    wanted = list[tuple[Flat, Flat, Flat]]()
    with nni.watch(model, every=1) as recording:
        for _ in range(steps):
            before = flat(nnx.state(model, wrt))
            added = step(model, optimizer, x)
            wanted.append((before, flat(nnx.state(model, wrt)), flat(added)))
    assert len(recording.passes) == steps
    for one, each in zip(recording.passes, wanted, strict=True):
        assert_lost(one, *each)
    whole = [[np.concatenate([x.ravel() for x in of.values()]) for of in each] for each in wanted]
    return [share(*each) for each in whole]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3),
    "sgd": lambda: optax.sgd(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)),
    "scheduled": lambda: optax.adam(optax.linear_schedule(1e-5, 1e-2, 4), eps=1e-4),
}


@pytest.mark.parametrize("dtype", [BF16, F16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizer(name: str, dtype: Any) -> None:
    parts = watched(Net(dtype), OPTIMIZERS[name]())
    assert dtype != BF16 or max(parts) > 0.01  # so that the comparison is of something


def test_of_parameters_in_float32_it_is_not_counted() -> None:
    model = Net(F32)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    step = nnx.jit(lambda model, optimizer: optimizer.update(model, nnx.grad(loss_fn)(model, X)))
    with nni.watch(model, every=1) as recording:
        step(model, optimizer)
    (one,) = recording.passes
    assert all(map(math.isnan, one.updates("lost").values()))
    assert all(x > 0 for path, x in one.updates("update").items() if path != "norm/bias")


def test_updates_in_float32_of_parameters_in_bfloat16() -> None:
    wide = optax.stateless(lambda u, _: jax.tree.map(lambda x: x.astype(F32), u))
    assert max(watched(Net(), optax.chain(wide, optax.sgd(1e-2)))) > 0.05


def test_a_step_that_subtracts() -> None:
    model = Net()

    @nnx.jit
    def step(model: Any) -> Any:
        added = jax.tree.map(lambda g: 1e-2 * g, nnx.grad(loss_fn)(model, X))
        nnx.update(model, jax.tree.map(jnp.subtract, nnx.state(model, nnx.Param), added))
        return added

    with nni.watch(model, every=1) as recording:
        before = flat(nnx.state(model, nnx.Param))
        added = flat(step(model))
    assert_lost(recording.passes[0], before, flat(nnx.state(model, nnx.Param)), added)


def test_a_step_that_accumulates_has_no_share() -> None:
    model = Net()
    parts = watched(model, optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation())
    assert [math.isnan(part) for part in parts] == [True, False, True, False]


def test_a_frozen_parameter_has_no_share() -> None:
    model = Net()
    labels = lambda params: jax.tree.map_with_path(  # noqa: E731
        lambda path, _: "frozen" if "up" in str(path) else "free", params
    )
    each = {"free": optax.adam(1e-3), "frozen": optax.set_to_zero()}
    watched(model, optax.partition(each, labels))
    model = Net()
    only = nnx.All(nnx.Param, lambda path, _: "up" not in path)
    watched(model, optax.adam(1e-3), wrt=only)


class Words(nnx.Module):
    def __init__(self) -> None:
        k = {"dtype": BF16, "param_dtype": BF16, "rngs": nnx.Rngs(0)}
        self.embed, self.head = nnx.Embed(64, 8, **k), nnx.Linear(8, 4, **k)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.embed(x))


def test_rows_that_no_token_chose_do_not_count() -> None:
    model, tokens = Words(), jnp.arange(12).reshape(3, 4)
    assert max(watched(model, optax.sgd(1e-2), tokens)) > 0.05


class Off(Net):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(self.norm(x)) - 100))


def test_units_that_are_off_do_not_count() -> None:
    parts = watched(Off(), optax.sgd(1.0))
    assert max(parts) < 0.5


class Adapted(nnx.Module):
    def __init__(self) -> None:
        k = {"dtype": BF16, "param_dtype": BF16, "rngs": nnx.Rngs(0)}
        self.base = nnx.Linear(24, 4, **k)
        self.lora = nnx.LoRA(24, 2, 4, base_module=self.base, **k)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.lora(x)


def test_an_adapter_alone() -> None:
    watched(Adapted(), optax.adam(1e-3), wrt=nnx.LoRAParam)


def test_steps_in_a_scan_have_their_own_shares() -> None:
    tx, model = optax.adam(1e-3), Net()
    graphdef, state = nnx.split(model)

    @jax.jit
    def steps(state: Any, moments: Any, xs: Any) -> Any:
        def body(carried: Any, x: Any) -> Any:
            state, moments = carried
            grads = jax.grad(lambda s: loss_fn(nnx.merge(graphdef, s), x))(state)
            added, moments = tx.update(grads, moments, state)
            new = optax.apply_updates(state, added)
            return (new, moments), (state, new, added)

        return jax.lax.scan(body, (state, moments), xs)[1]

    with nni.watch(model, every=1) as recording:
        seen = steps(state, tx.init(state), jnp.stack([X, X + 1, X - 1]))
    for i, one in enumerate(recording.passes):
        before, after, added = (flat(jax.tree.map(lambda x, i=i: x[i], tree)) for tree in seen)
        assert_lost(one, before, after, added)


def test_each_layer_of_a_stack_has_its_own_share() -> None:
    model, tx = LinearStack(nnx.Rngs(0), width=8, dtype=BF16), optax.adam(1e-3)
    optimizer, x = nnx.Optimizer(model, tx, wrt=nnx.Param), X[:, :8].astype(BF16)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        grads = nnx.grad(loss_fn)(model, x)
        pure = map(nnx.as_pure, (grads, optimizer.opt_state, nnx.state(model, nnx.Param)))
        added = tx.update(*pure)[0]
        optimizer.update(model, grads)
        return added

    insp = nni.Inspector(model, x, display=False)
    for _ in insp.watch(range(1), every=1):
        before = flat(nnx.state(model, nnx.Param))
        added = flat(step(model, optimizer))
        after = flat(nnx.state(model, nnx.Param))
    one = insp.recording.passes[-1]
    insp.close()
    assert_lost(one, before, after, added)
    for path in before:
        for i in range(3):
            wanted = share(before[path][i], after[path][i], added[path][i])
            np.testing.assert_allclose(one.update_lost(f"{path}[{i}]"), wanted, rtol=1e-6)


# ------------------------------------------------------------- where it is not known


def rounded_at_random(x: jax.Array, key: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits += jax.random.bits(key, x.shape, jnp.uint32) >> 16
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), F32).astype(BF16)


@pytest.mark.parametrize("how", ["stochastic", "clipped", "chosen", "a copy in float32"])
def test_where_more_than_an_addition_makes_the_value_no_share_is_guessed(how: str) -> None:
    model = Net()
    wide = jax.tree.map(lambda x: x.astype(F32), nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model: Any, wide: Any, key: Any) -> Any:
        grads = nnx.grad(loss_fn)(model, X)
        params = nnx.state(model, nnx.Param)
        wide = jax.tree.map(lambda w, g: w - 1e-3 * g.astype(F32), wide, grads)

        def move(p: Any, g: Any, w: Any) -> Any:
            new = p - (1e-3 * g).astype(BF16)
            if how == "stochastic":
                return rounded_at_random(p.astype(F32) - 1e-3 * g.astype(F32), key)
            if how == "clipped":
                return jnp.clip(new, -0.5, 0.5)
            return jnp.where(jnp.isfinite(g), new, p) if how == "chosen" else w.astype(BF16)

        nnx.update(model, jax.tree.map(move, params, grads, wide))
        return wide

    with nni.watch(model, every=1) as recording:
        for i in range(2):
            wide = step(model, wide, jax.random.key(i))
    for one in recording.passes:
        assert math.isnan(one.update_lost("up/kernel"))


# ------------------------------------------------------------------------- the function


@pytest.mark.parametrize("dtype", [BF16, F16, F32, np.float64], ids=lambda x: x.__name__)
@pytest.mark.parametrize(("shape", "rows"), [((5, 700), 0), ((3, 129, 2), 1), ((0, 4), 0)])
def test_both_forms_of_the_function_count_alike(
    dtype: Any, shape: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jax.enable_x64(dtype is np.float64):
        random = np.random.default_rng(0)
        before = jnp.asarray(random.normal(size=shape), dtype)
        added = jnp.asarray(random.normal(size=shape) * random.choice([0, 1e-4, 1.0], shape), dtype)
        after = before + added
        axes = tuple(range(rows, len(shape)))
        old, new, meant = (np.asarray(x, np.float64) for x in (before, after, added))
        wanted = [(meant != 0).sum(axes), ((meant != 0) & (old == new)).sum(axes)]
        for c in (True, False):
            if not c:
                monkeypatch.setattr(native, "can_call_on", lambda _: False)
            program = jax.jit(functools.partial(update_squares, rows)).lower(before, after, added)
            assert ("nnx_inspector_update" in program.as_text()) == c
            found = program.compile()(before, after, added)
            np.testing.assert_array_equal(found[..., 2:], np.stack(wanted, axis=-1))
            np.testing.assert_array_equal(
                np.isnan(jax.jit(functools.partial(update_squares, rows))(before, after)[..., 2:]),
                True,
            )


@pytest.mark.parametrize("in_c", [True, False])
def test_what_is_not_finite_is_not_lost(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_c:
        monkeypatch.setattr(native, "can_call_on", lambda _: False)
    before = jnp.array([1, 1, 1, 1, np.inf, np.nan], BF16)
    added = jnp.array([np.nan, 1e-9, 0, 1, 1, 1], BF16)
    found = jax.jit(functools.partial(update_squares, 0))(before, before + added, added)
    assert found[2:].tolist() == [5, 1]
