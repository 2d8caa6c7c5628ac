"""The user's scalars, on their way into the recording.

Invariant: a metric on the device never holds up the training loop. Does not know the widget.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

import jax
import numpy as np
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.launching.programs import is_pending
from nnx_inspector.errors import warn
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.typing import Value


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
        self._waiting: deque[tuple[int, str, Value]] = deque()
        self._warned: set[str] = set()
        self._nonfinite: set[str] = set()
        self.on_nonfinite: Callable[[], object] = lambda: None
        self.latest: dict[str, float] = {}
        self.step = -1
        self.errors = 0
        self._steps: dict[str, int] = {}

    def next_step(self, values: Mapping[str, object], least: int) -> int:
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
                f"{_advice(value)}"
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
            if step > wait_until and isinstance(value, jax.Array) and is_pending(value):
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
            if not math.isfinite(number) and name not in self._nonfinite:
                self._nonfinite.add(name)
                self.on_nonfinite()


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


def _in_words(value: Value) -> str:
    if jit.is_tracer(value):
        return "a traced value"
    if _is_too_large(value):
        return f"an integer of {value.bit_length()} bits, beyond the largest float"
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (str, complex)) and len(repr(value)) < 40:
        return repr(value)
    return type(value).__name__


def _advice(value: object) -> str:
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
    out = {"loss": float(cast(Value, loss))}
    if isinstance(aux, Mapping):
        out.update({str(k): float(v) for k, v in aux.items() if _is_scalar(v)})
    return out
