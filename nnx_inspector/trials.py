"""What an inspector runs and can run again: the example, or the last step's loss and batch.

Invariant: the perturbed pass and the clean one beside it differ in what is perturbed and in
nothing else: same model, arguments and modes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from nnx_inspector import protocol
from nnx_inspector.measures import effect_of, scalars_of
from nnx_inspector.owned import OwnedPasses, Result, Rows
from nnx_inspector.switching import Switches


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trial gave; `clean` is None where nothing was perturbed."""

    perturbed: Result
    clean: Result | None
    of_a_loss: bool

    def effect(self, step: str = "the last step") -> protocol.Effect | None:
        """What perturbing changes. Of a loss there is one without a perturbation too.

        Args:
            step: what the loss's batch is called on screen.
        """
        clean, perturbed = self.clean or self.perturbed, self.perturbed
        if self.of_a_loss:
            before, after = scalars_of(clean.value), scalars_of(perturbed.value)
            return effect_of(step, clean, perturbed, before, after)
        return None if self.clean is None else effect_of("the example", clean, perturbed)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One forward pass of the model; with a loss function one forward and backward pass of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return "The example" if self.loss_fn is None else "The last step"

    @property
    def kind(self) -> str:
        return "run" if self.loss_fn is None else "step"

    def make(
        self, passes: OwnedPasses, model: nnx.Module, rows: Rows, switches: Switches
    ) -> Outcome:
        """Run it, and the clean pass too where `rows` perturb anything."""

        def one(rows: Rows) -> Result:
            if self.loss_fn is None:
                return passes.forward(model, self.args, self.kwargs, rows, switches)
            return passes.backward(self.loss_fn, model, self.args, self.kwargs, rows, switches)

        return Outcome(one(rows), one({}) if rows else None, self.loss_fn is not None)
