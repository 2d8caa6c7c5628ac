"""Small measurements besides the passes: metrics, the cost of inspection, the effect of perturbing.

Invariant: an unknown figure is None, and a metric on the device never holds up the training loop.
Does not know the widget.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.launching.started import is_awaited
from nnx_inspector.errors import warn
from nnx_inspector.inspector.passes.programs import Result
from nnx_inspector.perturbations.effects import Differences, relative_change
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.records.record import Record
from nnx_inspector.screen import protocol


class Metrics:
    """The user's scalars on their way into the recording.

    Args:
        notice: called with `(level, text)` about values that are not scalars.

    Attributes:
        latest: the newest number of each metric.
        step: the step of the newest metric.
        flawed: called once for each metric, when a first number of it that is not finite is
            recorded, which may be long before the next measured step.
    """

    def __init__(self, recording: Recording, notice: Callable[[str, str], None]):
        self._recording = recording
        self._notice = notice
        self._waiting: deque[tuple[int, str, Any]] = deque()
        self._warned: set[str] = set()
        self._flawed: set[str] = set()
        self.flawed: Callable[[], object] = lambda: None
        self.latest: dict[str, float] = {}
        self.step = -1
        self.errors = 0
        self._steps: dict[str, int] = {}

    def next_of(self, values: Mapping[str, object], least: int) -> int:
        """The step of metrics given once per step: `least`, or the one after their last."""
        return max([least, *(self._steps.get(name, -1) + 1 for name in values)])

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Take the metrics of a step; `settle` fetches arrays on the device."""
        bad: list[str] = []
        for name, value in values.items():
            value = value.get_raw_value() if isinstance(value, nnx.Variable) else value
            if _is_scalar(value):
                self._waiting.append((step, name, value))
                self.step = self._steps[name] = step
                continue
            self.errors += 1
            text = (
                f"The metric {name!r} is not a real scalar ({_in_words(value)}) and was left out. "
                f"{_way_out(value)}"
            )
            self._notice("warning", text)
            if name not in self._warned:
                self._warned.add(name)
                bad.append(text)
        for text in bad:  # after the good ones are taken: a filter may turn warnings into errors
            warn(text)

    def unsettled(self, step: int) -> list[jax.Array]:
        """The arrays among the metrics up to a step that are not recorded."""
        return [x for one, _, x in self._waiting if one <= step and isinstance(x, jax.Array)]

    def settle(self, *, wait_until: float = -math.inf) -> None:
        """Record the metrics that are ready, in order, and wait for those up to a step."""
        while self._waiting:
            step, name, value = self._waiting[0]
            if step > wait_until and isinstance(value, jax.Array) and is_awaited(value):
                return
            self._waiting.popleft()
            if isinstance(value, jax.Array) and value.is_deleted():
                self.errors += 1
                self._notice(
                    "warning", f"The metric {name!r} of step {step} was donated and is lost."
                )
                continue
            number = float(value)
            self._recording.add_metrics(step, {name: number})
            self.latest[name] = number
            if not math.isfinite(number) and name not in self._flawed:
                self._flawed.add(name)
                self.flawed()


def require_named(unnamed: tuple[object, ...]) -> None:
    """Raise a TypeError for values of `insp.metrics` that have no name."""
    if unnamed:
        raise TypeError("insp.metrics takes scalars by name: insp.metrics(loss=0.3).")


def _is_scalar(value: object) -> bool:
    if isinstance(value, (int, float)):
        return not _is_too_large(value)
    if jit.is_tracer(value) or not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return False
    is_real = not jax.numpy.issubdtype(value.dtype, np.complexfloating)
    return value.shape == () and is_real and jax.numpy.issubdtype(value.dtype, np.number)


def _is_too_large(value: object) -> bool:
    """Whether a whole number is beyond the largest float, 1.8e308."""
    return isinstance(value, int) and value.bit_length() > sys.float_info.max_exp


def _in_words(value: Any) -> str:
    if jit.is_tracer(value):
        return "a traced value"
    if _is_too_large(value):
        return f"an integer of {value.bit_length()} bits, beyond the largest float"
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (str, complex)) and len(repr(value)) < 40:
        return repr(value)
    return type(value).__name__


def _way_out(value: object) -> str:
    if _is_too_large(value):
        return "Pass its logarithm."
    if jit.is_tracer(value):
        return "Return it from the jitted function, and call insp.metrics outside."
    if isinstance(value, Mapping):
        return "Pass its entries as keywords: insp.metrics(**entries)."
    if isinstance(value, (jax.Array, np.ndarray)) and value.ndim:
        return "Reduce it first, for instance by .mean()."
    return "Pass a number, or an array of shape ()."


def scalars_of(value: object) -> dict[str, float]:
    """The metrics in a loss function's result: the loss, and the scalars of a dict `aux`."""
    loss, aux = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    out = {"loss": float(cast(Any, loss))}
    if isinstance(aux, Mapping):
        out.update({str(k): float(v) for k, v in aux.items() if _is_scalar(v)})
    return out


def effect_of(
    source: str,
    clean: Result,
    perturbed: Result,
    before: Mapping[str, float] | None = None,
    after: Mapping[str, float] | None = None,
    *,
    differences: Differences | None = None,
    direct: Iterable[str] = (),
    alone: tuple[protocol.EffectAlone, ...] = (),
    root: str = "",
    counts: bool = False,
) -> protocol.Effect:
    """The effect of the perturbations.

    Args:
        source: the pass, in words.
        before: the metrics of the clean pass if it has a loss; without a loss, the results of the
            passes are the model's outputs.
        direct: the sites whose own output is perturbed; they are not downstream.
        root: the site whose output is the model's output; `""` if it is not called.
        counts: whether only some positions count, which `differences` knows.
    """
    if differences is not None and root not in differences.sites:
        root = ""
    relative: float | None = None
    kl: float | None = None
    top1: float | None = None
    if before is not None and differences is not None:
        relative = differences.sites.get(root)
        kl, top1 = differences.kl, differences.top1_changed
    elif before is None and differences is not None and differences.result is not None:
        relative = differences.result
    elif before is None and not counts:
        relative = relative_change(clean.value, perturbed.value)
    moved = [] if differences is None else _moved(differences, perturbed)
    apart = {"", root, *direct}
    downstream = [(site, change) for site, change in moved if site not in apart and change != 0]
    return protocol.Effect(
        source=source,
        clean=dict(before or {}),
        perturbed=dict(after or {}),
        output_change=protocol.finite(relative),
        kl=protocol.finite(kl),
        top1_changed=protocol.finite(top1),
        sites=tuple(
            protocol.SiteEffect(site=site, change=protocol.finite(change))
            for site, change in downstream[: protocol.MOST_EFFECTS]
        ),
        moved={site: protocol.finite(change) for site, change in moved[: protocol.MOST_MOVED]},
        alone=alone,
    )


def alone_of(number: int, effect: protocol.Effect) -> protocol.EffectAlone:
    """The figures of one perturbation's effect by itself."""
    losses = [metrics.get("loss") for metrics in (effect.clean, effect.perturbed)]
    known = [loss for loss in losses if loss is not None]
    return protocol.EffectAlone(
        perturbation=number,
        loss_change=protocol.finite(known[1] - known[0]) if len(known) == 2 else None,
        output_change=effect.output_change,
        kl=effect.kl,
        top1_changed=effect.top1_changed,
    )


def _moved(differences: Differences, perturbed: Result) -> list[tuple[str, float]]:
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
