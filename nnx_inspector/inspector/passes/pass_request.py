"""The passes that an inspector can run again: the example, or the last step's loss and batch.

Invariant: the perturbed pass and its clean pass differ only in the perturbations: they have the
same program, model, arguments and modes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat.configuration import Configuration
from nnx_inspector._compat.processes import spans_processes
from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.metrics import scalars_of
from nnx_inspector.inspector.nnx.switches import Switches
from nnx_inspector.inspector.passes.call import DEFAULT_ENTRY, Call
from nnx_inspector.inspector.passes.entry import Entry
from nnx_inspector.inspector.passes.owned_passes import OwnedPasses, Result
from nnx_inspector.perturbations.effects import Differences, relative_change
from nnx_inspector.perturbations.places import Setting
from nnx_inspector.program.analysis.describe import value_in_words
from nnx_inspector.records.donated import WeakArrays, are_alive, raise_if_deleted
from nnx_inspector.records.record import Record
from nnx_inspector.screen import protocol
from nnx_inspector.typing import Function, Kwargs, Value


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a pass.

    Attributes:
        clean: the clean pass; None if nothing was perturbed.
        differences: None if nothing was perturbed, or until their program is compiled.
        alone: the effect of each of several perturbations by itself; () until that is measured.
        root: the site whose output is the model's output; `""` if it is not called.
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
        clean, found = self.clean or self.perturbed, self.differences
        root = self.root if found is None or self.root in found.sites else ""
        of_logits = found if self.of_a_loss else None
        moved = [] if found is None else _output_changes(found, self.perturbed)
        apart = {"", root, *self.setting.sites}  # what is perturbed itself is not downstream
        downstream = [(site, change) for site, change in moved if site not in apart and change != 0]
        before, after = (
            scalars_of(one.value) if self.of_a_loss else {} for one in (clean, self.perturbed)
        )
        return protocol.Effect(
            source="",
            clean={**before},
            perturbed={**after},
            output_change=protocol.finite(self._output_change(clean, root)),
            kl=protocol.finite(of_logits and of_logits.kl),
            top1_changed=protocol.finite(of_logits and of_logits.top1_changed),
            sites=tuple(
                protocol.SiteEffect(site=site, change=protocol.finite(change))
                for site, change in downstream[: protocol.MOST_EFFECTS]
            ),
            moved={site: protocol.finite(change) for site, change in moved[: protocol.MOST_MOVED]},
            alone=self.alone,
        )

    def _output_change(self, clean: Result, root: str) -> float | None:
        """How far the model's output moved. Without a loss, the results of the passes are it."""
        found = self.differences
        if self.of_a_loss:
            return None if found is None else found.sites.get(root)
        if found is not None and found.result is not None:
            return found.result
        return None if self.counts else relative_change(clean.value, self.perturbed.value)


def _output_changes(differences: Differences, perturbed: Result) -> list[tuple[str, float]]:
    """How far the output of each site moved, the farthest first; infinity if it is not finite."""
    found: list[tuple[str, float]] = []
    for site, change in differences.sites.items():
        if np.isfinite(change):
            found.append((site, float(change)))
        elif not _is_finite(perturbed.record, site):
            found.append((site, np.inf))  # else it was zero everywhere: nothing is relative to it
    return sorted(found, key=lambda one: -one[1])


def _is_finite(record: Record, site: str) -> bool:
    if site not in record:
        return True
    summaries = [s for call in record[site].calls for s in call.outputs]
    return not any(s.nan or s.posinf or s.neginf for s in summaries)


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
    loss_fn: Function | None = None
    configuration: Configuration = dataclasses.field(default_factory=Configuration.current)
    entry: Entry = DEFAULT_ENTRY
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
            raise_if_deleted(jax.tree.leaves((self.args, self.kwargs)))
        except RuntimeError as error:
            raise InspectorError(
                f"{self.name} cannot be run again: its arguments were donated to a step, which "
                f"has deleted them. Pass new ones: insp.run(x), or insp.step(loss_fn, batch)."
            ) from error

    @functools.cached_property
    def shape(self) -> jax.ShapeDtypeStruct | None:
        """An argument that is a shape in place of an array, if there is one."""
        leaves = jax.tree.leaves((self.args, self.kwargs))
        return next((x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)), None)

    def require_arrays(self) -> None:
        """Raise an InspectorError if an argument is a shape in place of an array."""
        if self.shape is not None:
            raise InspectorError(
                f"{self.name} cannot be run: it holds shapes in place of arrays, such as "
                f"{value_in_words(self.shape)}, which can only be traced. Pass arrays: "
                f"insp.run(x), or insp.step(loss_fn, batch)."
            )

    def call(self, model: nnx.Module, switches: Switches) -> Call:
        of_it = (self.args, self.kwargs, self.loss_fn, switches, self.configuration, self.entry)
        return Call(model, *of_it)


def run_pass(
    passes: OwnedPasses, call: Call, setting: Setting, *, clean: Result | None = None
) -> Outcome:
    """Run a call, and also its clean pass if something is perturbed and `clean` is missing."""
    perturbed, found = passes.run(call, setting), None
    if setting.active:
        clean = clean or passes.run(call, setting.clean())
        # what runs in all processes of a job may not depend on what a thread has compiled by now
        if passes.missing_program("compare", call, setting) is None or spans_processes(call.arrays):
            found = passes.compare(call, setting)
    is_loss, entry = call.loss_fn is not None, call.entry
    counts = entry.where is not None
    return Outcome(setting, perturbed, clean, found, is_loss, root=entry.site, counts=counts)


def effects_alone(
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
    if not _are_close(again.value, clean.value):
        return None
    for number, setting in settings.items():
        if not wanted():
            return None
        effect = run_pass(passes, call, setting, clean=again).effect()
        if effect is None:
            continue
        before, after = (metrics.get("loss") for metrics in (effect.clean, effect.perturbed))
        change = None if before is None or after is None else after - before
        found.append(
            protocol.EffectAlone(
                perturbation=number,
                loss_change=protocol.finite(change),
                output_change=effect.output_change,
                kl=effect.kl,
                top1_changed=effect.top1_changed,
            )
        )
    return tuple(found)


def _are_close(a: object, b: object) -> bool:
    """Whether two results come from the same model, up to differences in rounding."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    arrays = [(np.asarray(x), np.asarray(y)) for x, y in pairs if isinstance(x, jax.Array)]
    numbers = [(x, y) for x, y in arrays if jnp.issubdtype(x.dtype, jnp.number)]
    return all(np.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True) for x, y in numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class ShownPass:
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
        return words if are_alive(self.arrays) else f"{words}, before the model was updated"
