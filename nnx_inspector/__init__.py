"""See inside any Flax NNX model, live, without changing a line of it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_inspector.capturing import capture as capture
    from nnx_inspector.capturing import value_and_grad as value_and_grad
    from nnx_inspector.errors import InspectorError as InspectorError
    from nnx_inspector.errors import InspectorWarning as InspectorWarning
    from nnx_inspector.findings import diagnose as diagnose
    from nnx_inspector.gradient_kinds import ClipGradient as ClipGradient
    from nnx_inspector.gradient_kinds import ReverseGradient as ReverseGradient
    from nnx_inspector.gradient_kinds import ScaleGradient as ScaleGradient
    from nnx_inspector.gradient_kinds import StopGradient as StopGradient
    from nnx_inspector.inspector import Inspector as Inspector
    from nnx_inspector.interception import intercept_methods as intercept_methods
    from nnx_inspector.kinds import Apply as Apply
    from nnx_inspector.kinds import Cast as Cast
    from nnx_inspector.kinds import Clamp as Clamp
    from nnx_inspector.kinds import Mask as Mask
    from nnx_inspector.kinds import Mean as Mean
    from nnx_inspector.kinds import Noise as Noise
    from nnx_inspector.kinds import Patch as Patch
    from nnx_inspector.kinds import Scale as Scale
    from nnx_inspector.kinds import Shift as Shift
    from nnx_inspector.kinds import Zero as Zero
    from nnx_inspector.loading import load as load
    from nnx_inspector.parameter_kinds import ParameterNoise as ParameterNoise
    from nnx_inspector.parameter_kinds import PruneMask as PruneMask
    from nnx_inspector.perturbation import perturb as perturb
    from nnx_inspector.perturbing import perturbed as perturbed
    from nnx_inspector.recorder import watch as watch
    from nnx_inspector.recording import Recording as Recording
    from nnx_inspector.runs import compare as compare
    from nnx_inspector.sweeping import sweep as sweep
    from nnx_inspector.tracing import trace as trace

_WHERE = {
    "Apply": "kinds",
    "capture": "capturing",
    "Cast": "kinds",
    "Clamp": "kinds",
    "ClipGradient": "gradient_kinds",
    "compare": "runs",
    "diagnose": "findings",
    "Inspector": "inspector",
    "InspectorError": "errors",
    "InspectorWarning": "errors",
    "intercept_methods": "interception",
    "load": "loading",
    "Mask": "kinds",
    "Mean": "kinds",
    "Noise": "kinds",
    "ParameterNoise": "parameter_kinds",
    "Patch": "kinds",
    "perturb": "perturbation",
    "perturbed": "perturbing",
    "PruneMask": "parameter_kinds",
    "Recording": "recording",
    "ReverseGradient": "gradient_kinds",
    "Scale": "kinds",
    "ScaleGradient": "gradient_kinds",
    "Shift": "kinds",
    "StopGradient": "gradient_kinds",
    "sweep": "sweeping",
    "trace": "tracing",
    "value_and_grad": "capturing",
    "watch": "recorder",
    "Zero": "kinds",
}
"""Public name -> module. Imported on first use: opening a file must not start jax."""

__all__ = [
    "Apply",
    "Cast",
    "Clamp",
    "ClipGradient",
    "Inspector",
    "InspectorError",
    "InspectorWarning",
    "Mask",
    "Mean",
    "Noise",
    "ParameterNoise",
    "Patch",
    "PruneMask",
    "Recording",
    "ReverseGradient",
    "Scale",
    "ScaleGradient",
    "Shift",
    "StopGradient",
    "Zero",
    "capture",
    "compare",
    "diagnose",
    "intercept_methods",
    "load",
    "perturb",
    "perturbed",
    "sweep",
    "trace",
    "value_and_grad",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *globals()]
