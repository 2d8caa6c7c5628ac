"""What an inspector runs and can run again: the example, or the last step's loss and batch.

Invariant: the perturbed pass and the clean one beside it differ in what is perturbed and in
nothing else: same program, model, arguments and modes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from nnx_inspector import protocol
from nnx_inspector.comparing import Differences
from nnx_inspector.measures import effect_of, scalars_of
from nnx_inspector.owned import Call, OwnedPasses, Result
from nnx_inspector.places import Setting
from nnx_inspector.switching import Switches


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trial gave.

    Attributes:
        clean: None where nothing was perturbed.
        differences: None there too, and as long as their program is not compiled.
    """

    perturbed: Result
    clean: Result | None
    differences: Differences | None
    of_a_loss: bool

    def effect(self, step: str = "the last step") -> protocol.Effect | None:
        """What perturbing changes. Of a loss there is one without a perturbation too.

        Args:
            step: what the loss's batch is called on screen.
        """
        clean, perturbed = self.clean or self.perturbed, self.perturbed
        if self.of_a_loss:
            before, after = scalars_of(clean.value), scalars_of(perturbed.value)
            return effect_of(step, clean, perturbed, before, after, self.differences)
        if self.clean is None:
            return None
        return effect_of("the example", clean, perturbed, differences=self.differences)


@dataclasses.dataclass(frozen=True, eq=False)
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

    def call(self, model: nnx.Module, switches: Switches) -> Call:
        """It, of a model in its modes."""
        return Call(model, self.args, self.kwargs, self.loss_fn, switches)

    def make(
        self, passes: OwnedPasses, model: nnx.Module, setting: Setting, switches: Switches
    ) -> Outcome:
        """Run it, and the clean pass too where anything is perturbed."""
        call = self.call(model, switches)
        perturbed = passes.run(call, setting)
        if not setting.active:
            return Outcome(perturbed, None, None, self.loss_fn is not None)
        clean = passes.run(call, setting.clean())
        ready = passes.missing("compare", call, setting) is None
        found = passes.compare(call, setting) if ready else None
        return Outcome(perturbed, clean, found, self.loss_fn is not None)


@dataclasses.dataclass(frozen=True, eq=False)
class Shown:
    """The pass that is on screen, and what it was made with."""

    trial: Trial
    switches: Switches
    setting: Setting
    outcome: Outcome
