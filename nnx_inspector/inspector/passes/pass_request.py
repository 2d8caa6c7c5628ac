"""The passes that an inspector can run again: the example, or the last step's loss and batch.

Invariant: the perturbed pass and its clean pass differ only in the perturbations: they have the
same program, model, arguments and modes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat.configuration import Configuration
from nnx_inspector._compat.processes import spans
from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.metrics import alone_of, effect_of, scalars_of
from nnx_inspector.inspector.nnx.switches import Switches
from nnx_inspector.inspector.passes.call import ITSELF, Call
from nnx_inspector.inspector.passes.entry import Entry
from nnx_inspector.inspector.passes.programs import OwnedPasses, Result
from nnx_inspector.perturbations.effects import Differences
from nnx_inspector.perturbations.places import Setting
from nnx_inspector.records.donated import WeakArrays, are_there, require_there
from nnx_inspector.screen import protocol
from nnx_inspector.typing import Kwargs, Value


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a pass.

    Attributes:
        clean: the clean pass; None if nothing was perturbed.
        differences: None if nothing was perturbed, or until their program is compiled.
        alone: the effect of each of several perturbations by itself; () until that is measured.
        root: the site whose output is the model's output.
        counts: whether only some positions count.
    """

    setting: Setting
    perturbed: Result
    clean: Result | None
    differences: Differences | None
    of_a_loss: bool
    alone: tuple[protocol.EffectAlone, ...] = ()
    root: str = ""
    counts: bool = False

    def effect(self, source: str = "") -> protocol.Effect | None:
        """The effect of the perturbations. A pass of a loss has one without a perturbation too.

        Args:
            source: the name of the pass, in words.
        """
        found = self._effect
        return None if found is None else dataclasses.replace(found, source=source)

    @functools.cached_property  # each state of the screen needs it
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
            counts=self.counts,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class PassRequest:
    """One forward pass of the model; with a loss function, one forward and backward pass.

    Attributes:
        args: the arguments without the model.
        entry: how the model is called without a loss function.
        number: tells requests apart.
    """

    args: tuple[Value, ...]
    kwargs: Kwargs
    loss_fn: Callable[..., Any] | None = None
    configuration: Configuration = dataclasses.field(default_factory=Configuration.here)
    entry: Entry = ITSELF
    number: int = dataclasses.field(default_factory=itertools.count().__next__)

    @classmethod
    def of_a_loss(
        cls, loss_fn: object, args: tuple[object, ...], kwargs: Kwargs, *, entry: Entry
    ) -> PassRequest:
        """The forward and backward pass of a call of `Inspector.step`."""
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
        """Raise an InspectorError if the arguments were donated to a step."""
        try:
            require_there(jax.tree.leaves((self.args, self.kwargs)))
        except RuntimeError as error:
            raise InspectorError(
                f"{self.name} cannot be run again: its arguments were donated to a step, which "
                f"has deleted them. Pass new ones: insp.run(x), or insp.step(loss_fn, batch)."
            ) from error

    def call(self, model: nnx.Module, switches: Switches) -> Call:
        of_it = (self.args, self.kwargs, self.loss_fn, switches, self.configuration, self.entry)
        return Call(model, *of_it)


def made(
    passes: OwnedPasses, call: Call, setting: Setting, *, clean: Result | None = None
) -> Outcome:
    """Run a call, and also its clean pass if something is perturbed and `clean` is missing."""
    perturbed, found = passes.run(call, setting), None
    if setting.active:
        clean = clean or passes.run(call, setting.clean())
        # what runs in all processes of a job may not depend on what a thread has compiled by now
        if passes.missing("compare", call, setting) is None or spans(call.arrays):
            found = passes.compare(call, setting)
    is_loss, entry = call.loss_fn is not None, call.entry
    how: Any = {"root": entry.site, "counts": entry.where is not None}
    return Outcome(setting, perturbed, clean, found, is_loss, **how)


def each_alone(
    passes: OwnedPasses,
    call: Call,
    *,
    settings: Mapping[int, Setting],
    clean: Result,
    wanted: Callable[[], bool],
) -> tuple[protocol.EffectAlone, ...] | None:
    """The effect of each perturbation by itself, against one clean pass.

    None if `wanted`, called before each pass, returns False, or if the model has changed.
    `settings` has one setting for each perturbation's number, all for one program.
    """
    found: list[protocol.EffectAlone] = []
    again = passes.run(call, next(iter(settings.values())).clean())
    if not _are_alike(again.value, clean.value):
        return None
    for number, setting in settings.items():
        if not wanted():
            return None
        effect = made(passes, call, setting, clean=again).effect()
        if effect is not None:
            found.append(alone_of(number, effect))
    return tuple(found)


def _are_alike(a: object, b: object) -> bool:
    """Whether two results come from the same model, up to differences in rounding."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    arrays = [(np.asarray(x), np.asarray(y)) for x, y in pairs if isinstance(x, jax.Array)]
    numbers = [(x, y) for x, y in arrays if jnp.issubdtype(x.dtype, jnp.number)]
    return all(np.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True) for x, y in numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class Shown:
    """A pass that was made for the screen, and its circumstances.

    Attributes:
        step: the step of the run at that time.
        looping: whether a watched loop ran. Then the screen shows the loop, and only the effect
            comes from this pass.
        arrays: the model's arrays at that time.
    """

    request: PassRequest
    switches: Switches
    setting: Setting
    outcome: Outcome
    step: int
    looping: bool
    arrays: WeakArrays

    def source(self, step: int, *, looping: bool) -> str:
        """The name of the pass in words, if the run is now at `step`."""
        words = "the example"
        if self.request.loss_fn is not None:
            words = "the batch of the last insp.step" if self.looping else "the last step"
        if looping or step != self.step:
            return f"{words}, at step {self.step}"
        return words if are_there(self.arrays) else f"{words}, before the model was updated"
