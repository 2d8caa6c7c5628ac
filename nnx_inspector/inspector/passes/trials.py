"""What an inspector runs and can run again: the example, or the last step's loss and batch.

Invariant: the perturbed pass and the clean one beside it differ in what is perturbed and in
nothing else: same program, model, arguments and modes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat.configuration import Configuration
from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.metrics import alone_of, effect_of, scalars_of
from nnx_inspector.inspector.nnx.switches import Switches
from nnx_inspector.inspector.passes.call import ITSELF, Call
from nnx_inspector.inspector.passes.entry import Entry
from nnx_inspector.inspector.passes.programs import OwnedPasses, Result
from nnx_inspector.perturbations.effects import Differences
from nnx_inspector.perturbations.slots import Setting
from nnx_inspector.program.donated import Marks, are_there, require_there
from nnx_inspector.screen import protocol


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trial gave.

    Attributes:
        clean: None where nothing was perturbed.
        differences: None there too, and as long as their program is not compiled.
        alone: the effect of each perturbation by itself, where there are several; () as long as
            that is not measured.
        root: the site that returns what the model returns.
    """

    setting: Setting
    perturbed: Result
    clean: Result | None
    differences: Differences | None
    of_a_loss: bool
    alone: tuple[protocol.EffectAlone, ...] = ()
    root: str = ""

    def effect(self, source: str = "") -> protocol.Effect | None:
        """What perturbing changes. Of a loss there is one without a perturbation too.

        Args:
            source: what pass it is of, in words.
        """
        found = self._effect
        return None if found is None else dataclasses.replace(found, source=source)

    @functools.cached_property  # each state of the screen has it
    def _effect(self) -> protocol.Effect | None:
        if self.clean is None and not self.of_a_loss:
            return None
        clean = self.clean or self.perturbed
        metrics = [scalars_of(r.value) for r in (clean, self.perturbed) if self.of_a_loss]
        return effect_of(
            "",
            clean,
            self.perturbed,
            *metrics,
            differences=self.differences,
            direct=self.setting.sites,
            alone=self.alone,
            root=self.root,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """One forward pass of the model; with a loss function one forward and backward pass of it.

    Attributes:
        args: without the model.
        entry: how the model is called where there is no loss function.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., Any] | None = None
    configuration: Configuration = dataclasses.field(default_factory=Configuration.here)
    entry: Entry = ITSELF

    @classmethod
    def of_a_loss(
        cls, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, entry: Entry
    ) -> Trial:
        """A forward and backward pass, as `Inspector.step` is asked for."""
        if not callable(loss_fn):
            raise TypeError(
                f"step takes a function loss_fn(model, *args), got {type(loss_fn).__name__}."
            )
        return cls(args, kwargs, loss_fn, entry=entry)

    @property
    def name(self) -> str:
        return "The example" if self.loss_fn is None else "The last step"

    @property
    def kind(self) -> str:
        return "run" if self.loss_fn is None else "step"

    def require_there(self) -> None:
        """Raise an InspectorError where the arguments were donated to a step."""
        try:
            require_there(jax.tree.leaves((self.args, self.kwargs)))
        except RuntimeError as error:
            raise InspectorError(
                f"{self.name} cannot be run again: its arguments were donated to a step, which "
                f"has deleted them. Pass others: insp.run(x), or insp.step(loss_fn, batch)."
            ) from error

    def call(self, model: nnx.Module, switches: Switches) -> Call:
        """It, of a model in its modes."""
        return Call(
            model,
            self.args,
            self.kwargs,
            self.loss_fn,
            switches,
            configuration=self.configuration,
            entry=self.entry,
        )


def made(passes: OwnedPasses, call: Call, setting: Setting) -> Outcome:
    """Run a call, and its clean pass too where anything is perturbed."""
    perturbed, of_a_loss = passes.run(call, setting), call.loss_fn is not None
    if not setting.active:
        return Outcome(setting, perturbed, None, None, of_a_loss, root=call.entry.site)
    clean = passes.run(call, setting.clean())
    ready = passes.missing("compare", call, setting) is None
    found = passes.compare(call, setting) if ready else None
    return Outcome(setting, perturbed, clean, found, of_a_loss, root=call.entry.site)


def each_alone(
    passes: OwnedPasses,
    call: Call,
    *,
    settings: Mapping[int, Setting],
    clean: Result,
    wanted: Callable[[], bool],
) -> tuple[protocol.EffectAlone, ...] | None:
    """The effect of each perturbation by itself, against one clean pass.

    Args:
        settings: by its number, that perturbation on and all others off; all of one program.
        clean: that of the effect beside which they are shown.
        wanted: asked before each.

    Returns:
        None where they are not wanted any more, or the model is not what it was then.
    """
    found: list[protocol.EffectAlone] = []
    again = passes.run(call, next(iter(settings.values())).clean())
    if not _are_alike(again.value, clean.value):
        return None
    for number, setting in settings.items():
        if not wanted():
            return None
        outcome = Outcome(
            setting,
            passes.run(call, setting),
            again,
            passes.compare(call, setting),
            call.loss_fn is not None,
            root=call.entry.site,
        )
        effect = outcome.effect()
        if effect is not None:
            found.append(alone_of(number, effect))
    return tuple(found)


def _are_alike(a: Any, b: Any) -> bool:
    """Whether two results are of the same model: a device may round one pass in two ways."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    arrays = [(np.asarray(x), np.asarray(y)) for x, y in pairs if isinstance(x, jax.Array)]
    numbers = [(x, y) for x, y in arrays if jnp.issubdtype(x.dtype, jnp.number)]
    return all(np.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True) for x, y in numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class Shown:
    """A pass that was made for the screen, and what it was made with.

    Attributes:
        step: where the run stood.
        looping: whether a watched loop ran: it has the screen, and only the effect is of this pass.
        marks: the model's arrays.
    """

    trial: Trial
    switches: Switches
    setting: Setting
    outcome: Outcome
    step: int
    looping: bool
    marks: Marks

    def source(self, step: int, *, looping: bool) -> str:
        """What its effect is of, in words, where the run stands at `step` now."""
        words = "the example"
        if self.trial.loss_fn is not None:
            words = "the last insp.step's batch" if self.looping else "the last step"
        if looping or step != self.step:
            return f"{words}, at step {self.step}"
        return words if are_there(self.marks) else f"{words}, before the model was updated"
