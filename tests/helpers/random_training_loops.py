"""Training loops made from a number: how a step is compiled, what is in it, and how it is watched.

A step has one to three parts in one program. Each part calls the watched model once or twice,
within a transform or none, and trains on that call or only evaluates it. The weights that a later
part sees are those that the earlier ones have left.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from training import Call, Loop, Net, by, descended, gradient_of, loss_of, numbers_of

WAYS = ("iterated", "ticked", "region", "script")
PROGRAMS = ("nnx.jit", "donated", "split", "cached", "eager")


def halves(x: Any) -> Any:
    return x.reshape(2, -1, x.shape[-1])


def twice(model, x):
    first, second = halves(x)
    return loss_of(model, first) + loss_of(model, second)


def scanned(model, x):
    return jax.lax.scan(lambda sum_, part: (sum_ + loss_of(model, part), None), 0.0, halves(x))[0]


def checkpointed(model, x):
    return jax.checkpoint(lambda x: loss_of(model, x))(x)


def mapped(model, x):
    return jax.vmap(lambda example: loss_of(model, example))(x).mean()


def in_a_branch(model, x):
    return jax.lax.cond(x[0, 0] > -100, lambda: loss_of(model, x), lambda: 0.0)


def jitted(model, x):
    return jax.jit(lambda x: loss_of(model, x))(x)


LOSSES = (loss_of, twice, scanned, checkpointed, mapped, in_a_branch, jitted)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a step: its loss, and whether it trains."""

    loss: Callable[[Any, Any], Any]
    trains: bool

    def run(self, model: Any, optimizer: Any, x: Any) -> Any:
        if not self.trains:
            return self.loss(model, x)
        loss, grads = nnx.value_and_grad(self.loss)(model, x)
        optimizer.update(model, grads)
        return loss

    def calls(self, weights: Any, x: Any) -> list[Call]:
        parts = halves(x) if self.loss in (twice, scanned) else [x]
        back = Call(weights, x).back if self.trains else None
        return [Call(weights, part, back) for part in parts]


@dataclasses.dataclass(frozen=True)
class Made:
    """The choices for one loop."""

    program: str
    parts: tuple[Part, ...]
    way: str
    perturbed: bool

    def __call__(self, factor: float) -> Loop:
        model = Net(factor=factor)
        optimizer = by(model)

        def step(model: Any, optimizer: Any, x: Any) -> Any:
            return sum(part.run(model, optimizer, x) for part in self.parts)

        def calls(x: Any) -> Iterator[Call]:
            weights = numbers_of(model)
            for part in self.parts:
                here = part.calls(weights, x)
                yield from here
                for call in here if part.trains else ():
                    weights = descended(weights, gradient_of(call, factor))

        return Loop(
            model,
            _compiled(step, self.program, model, optimizer),
            calls,
            lambda: nnx.state((model, optimizer)),
            factor,
            told=False,
            unordered=True,
        )


def _compiled(step: Any, program: str, model: Any, optimizer: Any) -> Callable[[Any], Any]:
    if program == "split":

        @jax.jit
        def pure(state: Any, x: Any) -> Any:
            own = nnx.merge(graphdef, state)
            loss = step(*own, x)
            return nnx.state(own), loss

        graphdef = nnx.graphdef((model, optimizer))

        def split(x: Any) -> Any:
            state, loss = pure(nnx.state((model, optimizer)), x)
            nnx.update((model, optimizer), state)
            return loss

        return split
    if program == "cached":
        return nnx.cached_partial(nnx.jit(step), model, optimizer)
    if program == "eager":
        return lambda x: step(model, optimizer, x)
    one = nnx.jit(step, donate_argnums=(0, 1)) if program == "donated" else nnx.jit(step)
    return lambda x: one(model, optimizer, x)


def made(seed: int) -> Made:
    """A loop, the same for the same number."""
    draw = np.random.default_rng(seed)
    parts = tuple(
        Part(LOSSES[draw.integers(len(LOSSES))], bool(draw.random() < 0.7))
        for _ in range(draw.integers(1, 4))
    )
    way, program = WAYS[draw.integers(len(WAYS))], PROGRAMS[draw.integers(len(PROGRAMS))]
    return Made(program, parts, way, perturbed=way != "script" and bool(draw.random() < 0.4))
