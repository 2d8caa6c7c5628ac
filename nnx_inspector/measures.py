"""Small measurements beside the passes: metrics, the cost of inspection, the effect of perturbing.

Invariant: a figure that is not known yet is None, and a metric on the device never holds the
training loop up. Knows no widget.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import numpy as np

from nnx_inspector import _private, protocol
from nnx_inspector.comparing import Differences
from nnx_inspector.owned import Result
from nnx_inspector.recording import Recording


class Metrics:
    """The user's scalars on their way into the recording.

    Args:
        recording: where they go.
        notice: `(level, text)`, told about what is no scalar.
    """

    def __init__(self, recording: Recording, notice: Callable[[str, str], None]):
        self._recording = recording
        self._notice = notice
        self._waiting: deque[tuple[int, str, Any]] = deque()
        self.latest: dict[str, float] = {}
        self.errors = 0

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Take over the metrics of a step; arrays on the device are fetched by `settle`."""
        for name, value in values.items():
            if _is_scalar(value):
                self._waiting.append((step, name, value))
            else:
                self.errors += 1
                what = (
                    f"shape {np.shape(value)}" if hasattr(value, "shape") else type(value).__name__
                )
                self._notice(
                    "warning",
                    f"The metric {name!r} is no real scalar ({what}) and was left out. Reduce it "
                    f"first, for instance by .mean().",
                )

    def settle(self, *, wait: bool = False) -> None:
        """Write what is ready, in order; with `wait` all of it."""
        while self._waiting:
            step, name, value = self._waiting[0]
            if not wait and isinstance(value, jax.Array) and not cast(Any, value).is_ready():
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


def _is_scalar(value: Any) -> bool:
    if _private.is_tracer(value) or np.ndim(value) != 0:
        return False
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, (int, float))
    return jax.numpy.issubdtype(dtype, np.number) and not jax.numpy.issubdtype(
        dtype, np.complexfloating
    )


class Meter:
    """What inspection costs: recent seconds a step with and without, compilations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plain: deque[float] = deque(maxlen=64)
        self._inspected: deque[float] = deque(maxlen=64)
        self._compiled_at_last_step = 0
        self.compilations = 0
        self.steps = 0
        self._undo = _private.compilation_events(self._on_event)

    def _on_event(self, kind: str, _seconds: float) -> None:
        if kind == "compile":
            with self._lock:
                self.compilations += 1

    def count_compilations(self) -> None:
        """What compiles from here on belongs to a pass of our own, not to a step's time."""
        self._compiled_at_last_step = -1

    def step(self, seconds: float, *, inspected: bool) -> None:
        """One step of a watched loop; a step in which something was compiled is not typical."""
        self.steps += 1
        typical = self.compilations == self._compiled_at_last_step
        self._compiled_at_last_step = self.compilations
        if typical:
            (self._inspected if inspected else self._plain).append(seconds)

    @property
    def plain_seconds(self) -> float | None:
        """Median seconds of recent steps that were not inspected."""
        return statistics.median(self._plain) if self._plain else None

    @property
    def inspected_seconds(self) -> float | None:
        """Median seconds of recent steps that were inspected."""
        return statistics.median(self._inspected) if self._inspected else None

    @property
    def rate(self) -> float | None:
        """Steps a second, by the most recent steps."""
        recent = self._plain or self._inspected
        return 1 / max(1e-9, statistics.fmean(recent)) if recent else None

    def close(self) -> None:
        """Stop counting."""
        self._undo()


def scalars_of(value: Any) -> dict[str, float]:
    """The metrics in what a loss function returns: the loss, and the scalars of a dict aux."""
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
    differences: Differences | None = None,
) -> protocol.Effect:
    """What perturbing changes: the metrics, and without any the relative norm of the output's
    change, `|perturbed - clean| / |clean|` over all floating-point arrays of the output.
    """
    change = _relative_change(clean.value, perturbed.value) if before is None else None
    return protocol.Effect(
        source=source,
        clean=dict(before or {}),
        perturbed=dict(after or {}),
        output_change=change,
        kl=None,
        top1_changed=None,
        sites=(),
    )


def _relative_change(clean: Any, perturbed: Any) -> float | None:
    pairs = zip(jax.tree.leaves(clean), jax.tree.leaves(perturbed), strict=True)
    squares, total = 0.0, 0.0
    for a, b in pairs:
        if hasattr(a, "dtype") and jax.numpy.issubdtype(a.dtype, np.inexact):
            wide = (
                np.complex128 if jax.numpy.issubdtype(a.dtype, np.complexfloating) else np.float64
            )
            x, y = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
            squares += float(np.sum(np.abs(y - x) ** 2))
            total += float(np.sum(np.abs(x) ** 2))
    if total == 0.0 or not np.isfinite(squares) or not np.isfinite(total):
        return None
    return float(np.sqrt(squares / total))
