"""Findings on parameters in real loops, with figures that are NumPy's on the arrays themselves."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.findings.findings import Finding, diagnose

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 48)), jnp.float32)
IDS = jnp.asarray(np.random.default_rng(1).integers(0, 40, size=(16, 6)), jnp.int32)


class MLP(nnx.Module):
    """With kernels of which a sample of 256 elements is a small part."""

    def __init__(self, dtype: Any = jnp.float32):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(48, 96, rngs=rngs, param_dtype=dtype)
        self.b = nnx.Linear(96, 96, rngs=rngs, param_dtype=dtype)
        self.c = nnx.Linear(96, 4, rngs=rngs, param_dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c(jnp.tanh(self.b(jnp.tanh(self.a(x)))))


class Words(nnx.Module):
    """An embedding that is frozen, or not."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(40, 48, rngs=rngs)
        self.head = MLP()

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.head(self.embed(ids).mean(axis=1))


class Adapted(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.a = nnx.LoRALinear(48, 96, lora_rank=4, rngs=rngs)
        self.b = nnx.LoRALinear(96, 4, lora_rank=4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(jnp.tanh(self.a(x)))


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return ((model(x) - 1) ** 2).mean()


Flat = dict[str, np.ndarray]


def flat(model: Any) -> Flat:
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, p)): np.asarray(v.get_value(), np.float64) for p, v in leaves}


def trained(
    model: Any, tx: Any, *, steps: int = 6, wrt: Any = nnx.Param, x: Any = X, every: int = 1
) -> tuple[list[Finding], list[Flat]]:
    """The findings of a loop, and the parameters before and after each step."""
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, x)
        optimizer.update(model, grads)

    seen = [flat(model)]
    with nni.watch(model, every=every) as recording:
        for _ in range(steps):
            step(model, optimizer, x)
            seen.append(flat(model))
    return diagnose(recording), seen


def of_rule(found: list[Finding], rule: str) -> list[Finding]:
    every = [*found, *(effect for one in found for effect in one.effects)]
    return [one for one in every if one.rule == rule]


def ratios(seen: list[Flat], paths: list[str]) -> list[list[float]]:
    """For each step the ratio of the update's norm to the weight's, of each of these."""
    return [
        [float(np.linalg.norm(b[p] - a[p]) / np.linalg.norm(a[p])) for p in paths]
        for a, b in itertools.pairwise(seen)
    ]


KERNELS = ["a/kernel", "b/kernel", "c/kernel"]


@pytest.mark.parametrize("rate", [0.08, 0.5])
def test_updates_that_are_too_large_are_named_with_their_exact_size(rate: float) -> None:
    found, seen = trained(MLP(), optax.lion(rate))
    medians = [statistics.median_low(each) for each in ratios(seen, KERNELS)]
    (one,) = of_rule(found, "update-ratio")
    np.testing.assert_allclose(one.evidence["ratio"], max(medians), rtol=1e-4)
    worst = int(np.argmax(medians))
    at = KERNELS[int(np.argsort(ratios(seen, KERNELS)[worst])[1])]
    assert f"up to {max(medians):.2g} times their size (a median over the parameters" in one.what
    assert f"that of {at!r} in step {worst}" in one.what
    assert one.step == next(i for i, x in enumerate(medians) if x >= 0.3)


def test_updates_that_are_too_small_are_named_with_their_exact_size() -> None:
    found, seen = trained(MLP(), optax.adam(1e-7))
    (one,) = of_rule(found, "update-ratio")
    medians = [statistics.median_low(each) for each in ratios(seen, KERNELS)]
    np.testing.assert_allclose(one.evidence["ratio"], max(medians), rtol=0.05)  # float32 rounds
    assert "(a median over the parameters); about 1e-3 is usual" in one.what


def test_one_measured_step_in_ten_says_what_that_step_did() -> None:
    """Not a mean of ten, nor what the samples of them suggest."""
    schedule = lambda count: jnp.where(count % 4 == 0, 0.2, 1e-4)  # noqa: E731
    found, seen = trained(MLP(), optax.lion(schedule), steps=12, every=4)
    (one,) = of_rule(found, "update-ratio")
    medians = [statistics.median_low(each) for each in ratios(seen, KERNELS)]
    np.testing.assert_allclose(one.evidence["ratio"], max(medians[::4]), rtol=1e-4)


def frozen(path: Any, _: Any) -> bool:
    return "embed" not in path


WARM_UP = optax.linear_schedule(0.0, 1e-3, 20)
HEALTHY: dict[str, Callable[[], Any]] = {
    "adam": lambda: trained(MLP(), optax.adam(1e-3)),
    "momentum": lambda: trained(MLP(), optax.sgd(1e-2, momentum=0.9), steps=8),
    "warm-up": lambda: trained(MLP(), optax.adamw(WARM_UP), steps=8),
    "accumulated warm-up": lambda: trained(
        MLP(), optax.MultiSteps(optax.adam(WARM_UP), 3), steps=15
    ),
    "frozen embedding": lambda: trained(
        Words(), optax.adam(1e-3), wrt=nnx.All(nnx.Param, frozen), x=IDS
    ),
    "few ids of an embedding": lambda: trained(Words(), optax.adam(1e-3), x=IDS[:, :1] * 0 + 3),
    "LoRA alone": lambda: trained(Adapted(), optax.adam(1e-3), wrt=nnx.LoRAParam),
    "LoRA for one step": lambda: trained(Adapted(), optax.adam(1e-3), wrt=nnx.LoRAParam, steps=1),
    "flattened": lambda: trained(MLP(), optax.flatten(optax.adam(1e-3))),
}


@pytest.mark.parametrize("name", list(HEALTHY))
def test_a_healthy_loop_has_no_finding_on_its_parameters(name: str) -> None:
    found, _ = HEALTHY[name]()
    rules = ("update-ratio", "no-gradient", "nonfinite", "unused")
    grave = [one for rule in rules for one in of_rule(found, rule) if one.severity != "info"]
    assert grave == []


# ------------------------------------------------------------------- gradients


class Gated(nnx.Module):
    """Two branches, of which one is multiplied by a constant."""

    def __init__(self, gate: float):
        self.main, self.side, self.gate = MLP(), MLP(), gate

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.main(x) + self.gate * self.side(x)


@pytest.mark.parametrize("gate", [0.0, 0.5])
def test_a_gradient_that_is_exactly_zero_in_a_loop_is_named(gate: float) -> None:
    found, _ = trained(Gated(gate), optax.adam(1e-3))
    named = of_rule(found, "no-gradient")
    assert bool(named) == (gate == 0)
    if named:
        assert all("side/" in one.what and "gradient of exactly 0" in one.what for one in named)


class Rooted(nnx.Module):
    """A norm of its own parameters, which has no derivative at 0, enters the output."""

    def __init__(self, *, safe: bool = False, at: float = 0.0):
        self.first = nnx.Linear(48, 4, rngs=nnx.Rngs(0))
        self.scale = nnx.Param(jnp.full((5,), at))
        self.safe = safe

    def __call__(self, x: jax.Array) -> jax.Array:
        size = (self.scale[...] ** 2).sum()
        return self.first(x) + jnp.sqrt(size + 1e-6 if self.safe else size)


def test_a_nan_in_the_gradient_of_a_parameter_alone_is_named_where_it_arose() -> None:
    found, _ = trained(Rooted(), optax.sgd(0.1), steps=3)
    (one,) = [one for one in found if one.rule == "nonfinite"]
    assert (one.step, one.site, one.severity) == (0, "", "error")
    said = (
        "At step 0, the gradient of the parameter 'scale' (5 NaN among 5 elements) was not finite"
    )
    assert said in one.what
    effects = of_rule([*one.effects], "nonfinite")
    assert any("'scale' (5 NaN among 5 elements)" in effect.what for effect in effects)


def test_the_update_is_not_accused_of_what_the_gradient_had() -> None:
    """Also of the last step, whose parameters no pass begins with."""
    model = Rooted()
    insp = nni.Inspector(model, X, display=False)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = nnx.jit(lambda m, o: o.update(m, nnx.grad(loss_fn)(m, X)))
    for _ in insp.watch(range(1), every=1):
        step(model, optimizer)
    with contextlib.closing(insp):
        said = [one.message for one in of_rule(insp.findings, "nonfinite")]
    assert any("the gradient of the parameter 'scale'" in text for text in said)
    assert not any("so the update of step" in text for text in said)


@pytest.mark.parametrize("model", [lambda: Rooted(safe=True), lambda: Rooted(at=0.3)])
def test_a_norm_with_a_derivative_is_healthy(model: Any) -> None:
    found, _ = trained(model(), optax.sgd(0.01), steps=3)
    assert of_rule(found, "nonfinite") == []


# --------------------------------------------------------------------- figures


def test_the_figures_of_the_rules_are_those_of_all_elements() -> None:
    model = MLP()
    before = flat(model)
    grads = nnx.grad(loss_fn)(model, X)
    insp = nni.Inspector(model, X, display=False)
    for _ in insp.watch(range(1), every=1):
        nnx.jit(nnx.grad(loss_fn))(model, X)
    insp.step(loss_fn, X)
    with contextlib.closing(insp):
        passes = insp.recording.passes[-2:]
    for one in passes:
        figures: Any = one.figures
        for path, value in before.items():
            size = np.sqrt((value**2).mean())
            np.testing.assert_allclose(figures.parameter(path, "norm"), size, rtol=1e-5)
            layer, name = path.split("/")
            gradient = np.asarray(grads[layer][name].get_value(), np.float64)
            norm = np.linalg.norm(gradient)
            np.testing.assert_allclose(figures.parameter(path, "gradient"), norm, rtol=1e-4)
            part = (gradient != 0).mean()
            np.testing.assert_allclose(figures.parameter(path, "graded"), part, rtol=1e-5)


def test_bfloat16_that_rounds_updates_off_is_judged_by_all_elements() -> None:
    found, _ = trained(MLP(jnp.bfloat16), optax.adam(1e-6), steps=8)
    (one,) = of_rule(found, "update-ratio")
    assert "of the elements of 'a/kernel' (bfloat16) to which something was added" in one.what
