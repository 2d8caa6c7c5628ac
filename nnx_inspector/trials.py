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

    setting: Setting
    perturbed: Result
    clean: Result | None
    differences: Differences | None
    of_a_loss: bool

    def effect(self, step: str = "the last step") -> protocol.Effect | None:
        """What perturbing changes. Of a loss there is one without a perturbation too.

        Args:
            step: what the loss's batch is called on screen.
        """
        if self.clean is None and not self.of_a_loss:
            return None
        clean = self.clean or self.perturbed
        metrics = [scalars_of(r.value) for r in (clean, self.perturbed) if self.of_a_loss]
        return effect_of(
            step if self.of_a_loss else "the example",
            clean,
            self.perturbed,
            *metrics,
            differences=self.differences,
            direct=self.setting.sites,
        )


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


def made(passes: OwnedPasses, call: Call, setting: Setting) -> Outcome:
    """Run a call, and its clean pass too where anything is perturbed."""
    perturbed, of_a_loss = passes.run(call, setting), call.loss_fn is not None
    if not setting.active:
        return Outcome(setting, perturbed, None, None, of_a_loss)
    clean = passes.run(call, setting.clean())
    ready = passes.missing("compare", call, setting) is None
    found = passes.compare(call, setting) if ready else None
    return Outcome(setting, perturbed, clean, found, of_a_loss)


@dataclasses.dataclass(frozen=True, eq=False)
class Shown:
    """The pass that is on screen, and what it was made with."""

    trial: Trial
    switches: Switches
    setting: Setting
    outcome: Outcome
