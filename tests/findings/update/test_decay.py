"""Weight decay that moves a parameter farther than its gradient does, against NumPy in float64.

One program holds every form: each parameter has an optimizer of its own, and how strong its decay
is comes in as a number. So a fault is one strong decay among weak ones, and compiles nothing.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
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

RATE = 0.01
X = jax.random.normal(jax.random.key(0), (16, 6))
Update = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""(gradient, state, parameter, decay) -> the new parameter, the new state."""


def with_optax(make: Callable[[Any], optax.GradientTransformation]) -> Update:
    def update(g: Any, state: Any, p: Any, decay: Any) -> tuple[Any, Any]:
        added, state = make(decay).update(g, state, p)
        return optax.apply_updates(p, added), state

    return update


def masked(decay: Any) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(decay, mask=True), optax.sgd(RATE))


def scheduled(decay: Any) -> optax.GradientTransformation:
    strength = lambda count: jnp.where(count < 100, decay, 0.0)  # noqa: E731
    return optax.chain(optax.add_decayed_weights(strength), optax.sgd(RATE))


DECAYED: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "adamw": lambda decay: optax.adamw(RATE, weight_decay=decay),
    "lion": lambda decay: optax.lion(RATE, weight_decay=decay),
    "before sgd": lambda decay: optax.chain(optax.add_decayed_weights(decay), optax.sgd(RATE)),
    "before momentum": lambda decay: optax.chain(
        optax.add_decayed_weights(decay), optax.sgd(RATE, momentum=0.9)
    ),
    "before adam": lambda decay: optax.chain(optax.add_decayed_weights(decay), optax.adam(RATE)),
    "masked": masked,
    "scheduled": scheduled,
}
FORMS: dict[str, Update] = {
    **{name: with_optax(make) for name, make in DECAYED.items()},
    "shrunk by hand": lambda g, state, p, decay: (p * (1 - RATE * decay) - RATE * g, state),
    "subtracted by hand": lambda g, state, p, decay: (p - RATE * g - RATE * decay * p, state),
    "in the loss": lambda g, state, p, decay: (p - RATE * g, state),
}
NAMES = list(FORMS)
COUPLED = [name for name in NAMES if name not in ("adamw", "lion")]


def loss_of(model: Rows, x: jax.Array, decay: jax.Array) -> jax.Array:
    in_loss = model.layers[NAMES.index("in the loss")].kernel[...]
    penalty = decay[NAMES.index("in the loss")] * jnp.sum(in_loss**2) / 2
    return (model(x) ** 2).mean(axis=(1, 2)).sum() + penalty


@nnx.jit
def step(model: Rows, states: Any, x: jax.Array, decay: jax.Array) -> Any:
    grads = nnx.grad(loss_of)(model, x, decay)
    states = list(states)
    for i, name in enumerate(NAMES):
        layer, g = model.layers[i], grads["layers"][i]["kernel"][...]
        new, states[i] = FORMS[name](g, states[i], layer.kernel[...], decay[i])
        layer.kernel[...] = new
    return states, grads


def path(name: str) -> str:
    return f"layers/{NAMES.index(name)}/kernel"


def kernels(tree: Any) -> list[np.ndarray]:
    return [np.asarray(tree["layers"][i]["kernel"][...], np.float64) for i in range(len(NAMES))]


History = list[tuple[list[np.ndarray], list[np.ndarray]]]
"""Of each step the values before it, and the gradients."""


def trained(decay: np.ndarray, *, x: Any = X, steps: int = 4) -> tuple[Any, History]:
    model, history = Rows(len(NAMES)), History()
    states: Any = [
        DECAYED[name](0.1).init(model.layers[i].kernel[...]) if name in DECAYED else ()
        for i, name in enumerate(NAMES)
    ]
    with nni.watch(model, every=1) as recording:
        for _ in range(steps):
            values = kernels(nnx.state(model))
            states, grads = step(model, states, x, jnp.asarray(decay))
            history.append((values, kernels(grads)))
    at = NAMES.index("in the loss")
    for values, grads in history:
        grads[at] = grads[at] - decay[at] * values[at]
    return recording, history


def ratios(name: str, strength: float, history: History) -> list[float]:
    """norm(decay) / norm(rest) of each step, in float64."""
    m = v = 0.0
    found: list[float] = []
    for t, (values, grads) in enumerate(history, 1):
        p, g = values[NAMES.index(name)], grads[NAMES.index(name)]
        rest = g
        if name == "adamw":
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            rest = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        if name == "lion":
            rest, m = np.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g
        found.append(strength * float(np.linalg.norm(p) / np.linalg.norm(rest)))
    return found


def weak() -> np.ndarray:
    return np.full(len(NAMES), 1e-3, np.float32)


def found_in(recording: Any) -> list[Finding]:
    return [one for one in nni.diagnose(recording) if one.rule == "weight-decay"]


SENTENCE = (
    r"From step 0 to step 3, weight decay moves '(\S+)' (\S+) times as far as its gradient does, "
    r"in the median over 4 measured steps \(norms of the two parts of its update\); a step changes "
    r"it by (\S+) times its size"
)


@pytest.mark.parametrize("name", NAMES)
def test_a_decay_that_is_too_strong_is_named_with_its_figures(name: str) -> None:
    strength = weak()
    strength[NAMES.index(name)] = 20.0
    recording, history = trained(strength)
    for number, one in enumerate(NAMES):
        wanted = ratios(one, float(strength[number]), history)
        seen = [p.updates("decayed")[path(one)] for p in recording.passes]
        np.testing.assert_allclose(seen, wanted, rtol=2e-3, err_msg=one)
    (one,) = found_in(recording)
    parts = re.fullmatch(SENTENCE, one.what)
    assert parts is not None, one.what
    wanted = ratios(name, 20.0, history)
    moved = [p.update_ratio(path(name)) for p in recording.passes]
    assert parts[1] == path(name)
    assert close(parts[2], float(np.median(wanted)))
    assert close(parts[3], float(np.median(moved)))
    assert (one.severity, one.step, one.site) == ("warning", 0, path(name).rpartition("/")[0])
    assert one.evidence["parameters"] == 1


def test_all_that_decay_too_strongly_are_one_finding() -> None:
    recording, history = trained(np.full(len(NAMES), 50.0, np.float32))
    (one,) = found_in(recording)
    assert one.evidence["parameters"] == len(NAMES)
    medians = {name: float(np.median(ratios(name, 50.0, history))) for name in NAMES}
    first, second, third = sorted(NAMES, key=lambda name: -medians[name])[:3]
    assert one.site == path(first).rpartition("/")[0]
    more = re.search(r"\(also '(\S+)', (\S+) times, '(\S+)', (\S+) times and 7 more", one.what)
    assert more is not None, one.what
    assert (more[1], more[3]) == (path(second), path(third))
    assert close(more[2], medians[second])
    assert close(more[4], medians[third])


def test_a_decay_that_took_half_of_a_parameter_at_first_is_named_with_those_steps() -> None:
    strength = weak()
    strength[NAMES.index("adamw")] = 8.0
    recording, history = trained(strength, steps=40)
    each = ratios("adamw", 8.0, history)
    first = next(i for i, x in enumerate(each) if x <= 1)
    sizes = [np.linalg.norm(values[NAMES.index("adamw")]) for values, _ in history]
    assert 3 <= first < 37
    assert sizes[first - 1] <= sizes[0] / 2
    (one,) = found_in(recording)
    said = re.match(
        r"From step 0 to step (\d+), weight decay moves '(\S+)' (\S+) times as far", one.what
    )
    assert said is not None, one.what
    assert (int(said[1]), said[2]) == (first - 1, path("adamw"))
    assert close(said[3], float(np.median(each[:first])))


@pytest.mark.parametrize("what", ["weak", "usual", "ended", "at first", "balanced"])
def test_a_healthy_decay_has_no_finding(what: str) -> None:
    strength, steps = weak(), 4
    if what == "usual":  # of language models
        strength = np.full(len(NAMES), 0.1, np.float32)
    if what == "ended":
        strength = np.zeros(len(NAMES), np.float32)
    if what == "balanced":  # the gradient of the loss holds the parameter where it is
        strength = np.array([float(np.median([0.9 / x for x in of])) for of in unit_ratios()])
    recording, _ = trained(strength.astype(np.float32), steps=steps)
    if what == "at first":  # strong in a single step, as in a warm-up
        strength[:] = 50.0
        recording, _ = trained(strength, steps=1)
    assert [str(one) for one in found_in(recording)] == []


def unit_ratios() -> list[list[float]]:
    _, history = trained(weak())
    return [ratios(name, 1.0, history) for name in NAMES]


def test_a_parameter_without_a_gradient_that_decays_is_named() -> None:
    strength = np.zeros(len(NAMES), np.float32)
    strength[NAMES.index("before sgd")] = 1.0
    recording, _ = trained(strength, x=jnp.zeros_like(X))
    infinite = [p.updates("decayed")[path("before sgd")] for p in recording.passes]
    assert all(map(math.isinf, infinite))
    (one,) = found_in(recording)
    assert f"weight decay moves '{path('before sgd')}' and its gradient does not" in one.what


def test_what_is_masked_out_or_frozen_has_no_decay() -> None:
    model = Rows(len(NAMES))
    tx = optax.adamw(RATE, weight_decay=50.0, mask=lambda tree: jax.tree.map(lambda _: False, tree))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def masked_step(model: Rows, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(loss_of)(model, X, jnp.zeros(len(NAMES))))

    with nni.watch(model, every=1) as recording:
        for _ in range(4):
            masked_step(model, optimizer)
    figures = recording.passes[0].updates("decayed")
    assert figures.pop(path("in the loss")) == 0
    assert all(map(math.isnan, figures.values()))
    assert found_in(recording) == []
