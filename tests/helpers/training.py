"""The parts of training loops: a model, its figures in float64, and the expectations of a loop.

A loop is built anew for each way in which it is watched. Before each step, `calls` derives the
step's calls of the watched model from the current state; `figures` evaluates one call in NumPy.
Invariant: nothing here uses nnx_inspector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Weights = dict[str, np.ndarray]
Figures = dict[tuple[str, str], np.ndarray]
"""(site, quantity) -> its values."""

RATE = 0.1
SGD = optax.sgd(RATE)  # its functions are part of each program's key: share it among all loops
ADAM = optax.adam(RATE / 2)


class Net(nnx.Module):
    """Two layers; `factor` has the effect of a perturbation `Scale(factor)` of `a`."""

    def __init__(self, seed: int = 0, *, factor: float = 1.0, ins: int = 3, outs: int = 2):
        rngs = nnx.Rngs(seed)
        self.a, self.b = nnx.Linear(ins, 4, rngs=rngs), nnx.Linear(4, outs, rngs=rngs)
        self.factor = factor

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x) * self.factor))


def batches(count: int = 5, size: int = 4, ins: int = 3) -> list[jax.Array]:
    values = np.random.default_rng(1).normal(size=(count, size, ins))
    return [jnp.asarray(x, jnp.float32) for x in values]


def loss_of(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


def update(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss


def back_of_loss(y: np.ndarray) -> np.ndarray:
    """The cotangent of `y` in `loss_of`."""
    return 2 * y / y.size


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the watched model.

    Attributes:
        weights: the weights at that time.
        x: its argument.
        back: a function of its output that gives the output's cotangent; None without a gradient.
        seen: whether it can be measured; if not, it still counts as a pass.
    """

    weights: Weights
    x: Any
    back: Callable[[np.ndarray], np.ndarray] | None = back_of_loss
    seen: bool = True


@dataclasses.dataclass
class Loop:
    """A training loop.

    Attributes:
        model: the watched model.
        step: trains on a batch and returns a loss.
        calls: see above.
        state: the state that must be equal after watched and bare steps.
        batches: the batches of the steps.
        figures: a function that gives the figures of one call.
        told: whether a part of a step cannot be seen, which must be reported; None if a report is
            neither required nor wrong.
        hidden: whether no part of a step can be seen.
        unordered: whether a step's calls may run in any order, because they are independent.
        evaluates: whether calls without a gradient are in a program of their own.
        inspected: whether the model can be called with a batch, as with an inspector's example.
        tolerance: the relative tolerance of the figures.
    """

    model: nnx.Module
    step: Callable[[Any], Any]
    calls: Callable[[Any], Iterable[Call]]
    state: Callable[[], Any]
    factor: float
    batches: Sequence[Any] = dataclasses.field(default_factory=batches)
    figures: Callable[[Call, float], Figures] | None = None
    told: bool | None = False
    hidden: bool = False
    unordered: bool = False
    evaluates: bool = False
    inspected: bool = True
    tolerance: float = 1e-4

    def figures_of(self, call: Call) -> Figures:
        """The values of all sites and their cotangents; empty for a call that cannot be seen."""
        if not call.seen:
            return {}
        return (self.figures or figures)(call, 1.0 if self.hidden else self.factor)


def with_members(each: Sequence[Figures]) -> Figures:
    """The figures of an ensemble, and those of each of its members."""
    whole = {key: np.stack([one[key] for one in each]) for key in each[0]}
    rows = {(f"{s}[{i}]", q): x for i, one in enumerate(each) for (s, q), x in one.items()}
    return whole | rows


def numbers_of(model: nnx.Module) -> Weights:
    """Copies of a model's parameters, by path."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.array(value[...], np.float64) for path, value in flat}


def forward(weights: Weights, x: Any, factor: float = 1.0) -> tuple[np.ndarray, ...]:
    """The outputs of `a` and `b`."""
    a = factor * (np.asarray(x, np.float64) @ weights["a/kernel"] + weights["a/bias"])
    return a, np.tanh(a) @ weights["b/kernel"] + weights["b/bias"]


def figures(call: Call, factor: float = 1.0) -> Figures:
    """Of a Net."""
    a, y = forward(call.weights, call.x, factor)
    found = {("", "output"): y, ("a", "output"): a, ("b", "output"): y}
    if call.back is not None:
        dy = call.back(y)
        da = (dy @ call.weights["b/kernel"].T) * (1 - np.tanh(a) ** 2)
        found |= {("", "gradient"): dy, ("a", "gradient"): da, ("b", "gradient"): dy}
    return found


def gradient_of(call: Call, factor: float = 1.0) -> Weights:
    """By the weights of a Net."""
    found = figures(call, factor)
    x, h = np.asarray(call.x, np.float64), np.tanh(found["a", "output"])
    dy, da = found["b", "gradient"], factor * found["a", "gradient"]
    flat = lambda v: v.reshape(-1, v.shape[-1])  # noqa: E731
    return {
        "a/kernel": flat(x).T @ flat(da),
        "a/bias": flat(da).sum(0),
        "b/kernel": flat(h).T @ flat(dy),
        "b/bias": flat(dy).sum(0),
    }


def descended(weights: Weights, gradient: Weights, rate: float = RATE) -> Weights:
    """The weights after a step of plain gradient descent."""
    return {name: value - rate * gradient[name] for name, value in weights.items()}


def by(model: Any) -> nnx.Optimizer:
    return nnx.Optimizer(model, SGD, wrt=nnx.Param)
