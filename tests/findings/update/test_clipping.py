"""Clipping that acts in most steps, in every form, against NumPy in float64.

One program holds every form, each for a parameter of its own, and the limits come in as numbers: a
fault is one low limit among high ones, and compiles nothing.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from finding_oracle import close
from flax import nnx
from side_by_side import Rows

import nnx_inspector as nni
from nnx_inspector.findings.finding import Finding

X = jax.random.normal(jax.random.key(0), (16, 6))


def norm(g: Any) -> Any:
    return jnp.sqrt(jnp.sum(g * g))


def with_optax(make: Callable[[Any], optax.GradientTransformation]) -> Callable[..., Any]:
    def clipped(g: Any, p: Any, limit: Any) -> Any:
        return make(limit).update(g, optax.EmptyState(), p)[0]

    return clipped


BY_NORM: dict[str, Callable[..., Any]] = {
    "clip_by_global_norm": with_optax(optax.clip_by_global_norm),
    "min": lambda g, p, limit: g * jnp.minimum(1.0, limit / (norm(g) + 1e-6)),
    "clip of the factor": lambda g, p, limit: g * jnp.clip(limit / norm(g), 0.0, 1.0),
    "max below": lambda g, p, limit: g * limit / jnp.maximum(norm(g), limit),
    "where": lambda g, p, limit: jnp.where(norm(g) > limit, g * limit / norm(g), g),
    "where of the factor": lambda g, p, limit: g * jnp.where(norm(g) > limit, limit / norm(g), 1.0),
}
FORMS: dict[str, Callable[..., Any]] = {
    **BY_NORM,
    "clip_by_block_rms": with_optax(optax.clip_by_block_rms),
    "clip": with_optax(optax.clip),
    "clamp": lambda g, p, limit: jax.lax.clamp(-limit, g, limit),
    "adaptive_grad_clip": with_optax(optax.adaptive_grad_clip),
}
NAMES = list(FORMS)
NONE = 1e6


def cut(name: str, g: np.ndarray, p: np.ndarray, limit: float) -> np.ndarray:
    """A clipped gradient, in float64."""
    if name in ("clip", "clamp"):
        return np.clip(g, -limit, limit)
    if name == "adaptive_grad_clip":
        most = limit * np.maximum(np.linalg.norm(p, axis=0), 1e-3)
        return g * np.minimum(1, most / np.maximum(np.linalg.norm(g, axis=0), 1e-6))
    size = np.linalg.norm(g) / (np.sqrt(g.size) if name == "clip_by_block_rms" else 1)
    return g * min(1, limit / size)


def loss_of(model: Rows) -> jax.Array:
    return (model(X) ** 2).mean(axis=(1, 2)).sum()


@nnx.jit
def step(model: Rows, scale: jax.Array, limits: jax.Array) -> Any:
    grads = nnx.grad(lambda model: scale * loss_of(model))(model)
    for i, name in enumerate(NAMES):
        layer, g = model.layers[i], grads["layers"][i]["kernel"][...]
        layer.kernel[...] -= 1e-3 * FORMS[name](g, layer.kernel[...], limits[i])
    return grads


def path(name: str) -> str:
    return f"layers/{NAMES.index(name)}/kernel"


def trained(limits: np.ndarray, *, scales: Any = (1.0,) * 6) -> tuple[Any, list[dict[str, float]]]:
    """What was recorded, and of each step what clipping took, relative to the gradient."""
    model, wanted = Rows(len(NAMES)), list[dict[str, float]]()
    with nni.watch(model, every=1) as recording:
        for scale in scales:
            values = [np.asarray(layer.kernel[...], np.float64) for layer in model.layers]
            grads = step(model, jnp.float32(scale), jnp.asarray(limits, jnp.float32))
            taken = dict[str, float]()
            for i, name in enumerate(NAMES):
                g = np.asarray(grads["layers"][i]["kernel"][...], np.float64)
                left = cut(name, g, values[i], float(np.float32(limits[i])))
                taken[path(name)] = float(np.linalg.norm(g - left) / np.linalg.norm(g))
            wanted.append(taken)
    return recording, wanted


def high() -> np.ndarray:
    return np.full(len(NAMES), NONE)


def low(name: str, part: float) -> float:
    """A limit that takes about this part of the first gradient, for the form."""
    grads = nnx.grad(loss_of)(Rows(len(NAMES)))
    g = np.asarray(grads["layers"][NAMES.index(name)]["kernel"][...], np.float64)
    if name in ("clip", "clamp"):
        return float((1 - part) * np.abs(g).max() / 3)
    if name == "adaptive_grad_clip":
        return float((1 - part) * np.linalg.norm(g) / np.sqrt(6))
    size = np.linalg.norm(g) / (np.sqrt(g.size) if name == "clip_by_block_rms" else 1)
    return float((1 - part) * size)


def found_in(recording: Any) -> list[Finding]:
    return [one for one in nni.diagnose(recording) if one.rule == "clipping"]


SENTENCE = (
    r"From step 0 to step 5, clipping shortened the gradient of '(\S+)' \(or what the optimizer "
    r"had made of it\) in (\d+) of 6 measured steps, in the median over all of them by (\d+)% of "
    r"its norm"
)


@pytest.mark.parametrize("part", [0.95, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_clipping_in_most_steps_is_named_with_its_figures(name: str, part: float) -> None:
    limits = high()
    limits[NAMES.index(name)] = low(name, part)
    recording, wanted = trained(limits)
    for one, taken in zip(recording.passes, wanted, strict=True):
        seen = one.updates("clipped")
        for form in NAMES:
            np.testing.assert_allclose(
                seen[path(form)], taken[path(form)], rtol=1e-4, atol=2e-6, err_msg=form
            )
    (one,) = found_in(recording)
    parts = re.fullmatch(SENTENCE, one.what)
    assert parts is not None, one.what
    each = [taken[path(name)] for taken in wanted]
    assert parts[1] == path(name)
    assert int(parts[2]) == sum(x > 1e-5 for x in each) == 6
    assert close(parts[3], float(np.median(each)), percent=True)
    assert one.severity == ("warning" if np.median(each) >= 0.9 else "info")
    assert (one.step, one.site) == (0, path(name).rpartition("/")[0])


HEALTHY = {
    "never": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "at first": (9.0, 9.0, 1.0, 1.0, 1.0, 1.0),
    "in two steps of six": (1.0, 9.0, 1.0, 1.0, 9.0, 1.0),
    "next to nothing": (2.05, 2.05, 2.05, 2.05, 2.05, 2.05),
    "in too few to say": (9.0, 9.0, 9.0, 9.0),
}


@pytest.mark.parametrize("what", HEALTHY)
def test_clipping_that_seldom_acts_has_no_finding(what: str) -> None:
    """The limits are about twice what gradients need."""
    limits = np.array([low(name, 0.0) for name in NAMES]) * 2
    limits[[NAMES.index(name) for name in ("clip", "clamp", "adaptive_grad_clip")]] *= 3
    recording, wanted = trained(limits, scales=HEALTHY[what])
    if what != "never":
        assert any(x > 0.01 for taken in wanted for x in taken.values())
    assert [str(one) for one in found_in(recording)] == []


def test_a_limit_that_leaves_nothing_explains_that_nothing_moves() -> None:
    recording, _ = trained(np.full(len(NAMES), 1e-12))
    (one,) = nni.diagnose(recording)
    assert (one.rule, one.severity, one.evidence["acted"]) == ("clipping", "warning", 6)
    (effect,) = one.effects
    assert effect.what == "From step 0 on, no parameter changed in 6 passes with gradients"
    assert "learning rate is 0" not in one.message


def test_clipping_of_all_gradients_together_is_one_finding() -> None:
    """It is a note: Adam makes its steps as long as it would without it."""
    model = Rows(len(NAMES))
    optimizer = nnx.Optimizer(
        model, optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-3)), wrt=nnx.Param
    )

    @nnx.jit
    def clipped_step(model: Rows, optimizer: Any) -> Any:
        grads = nnx.grad(lambda model: (model(X) ** 2).mean())(model)
        optimizer.update(model, grads)
        return optax.tree.norm(grads)

    with nni.watch(model, every=1) as recording:
        norms = [float(clipped_step(model, optimizer)) for _ in range(6)]
    for one, size in zip(recording.passes, norms, strict=True):
        wanted = np.full(len(NAMES), 1 - 0.01 / size)
        np.testing.assert_allclose(list(one.updates("clipped").values()), wanted, rtol=1e-4)
    (one,) = found_in(recording)
    assert (one.severity, one.evidence["parameters"]) == ("info", len(NAMES))
    taken = re.findall(r"by (\d+)% of its norm", one.what)[0]
    assert close(taken, float(1 - 0.01 / np.median(norms)), percent=True)
