"""See inside any Flax NNX model, live, without changing a line of it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_inspector.errors import InspectorError as InspectorError
    from nnx_inspector.errors import InspectorWarning as InspectorWarning
    from nnx_inspector.findings.findings import diagnose as diagnose
    from nnx_inspector.hooks.intercept import intercept_methods as intercept_methods
    from nnx_inspector.inspector.inspector import Inspector as Inspector
    from nnx_inspector.inspector.script.watch import watch as watch
    from nnx_inspector.lenses.attribution import attribute as attribute
    from nnx_inspector.lenses.examples import top_examples as top_examples
    from nnx_inspector.lenses.lens import lens as lens
    from nnx_inspector.lenses.logits import logit_attribution as logit_attribution
    from nnx_inspector.perturbations.activations import Apply as Apply
    from nnx_inspector.perturbations.activations import Cast as Cast
    from nnx_inspector.perturbations.activations import Clamp as Clamp
    from nnx_inspector.perturbations.activations import Mask as Mask
    from nnx_inspector.perturbations.activations import Mean as Mean
    from nnx_inspector.perturbations.activations import Noise as Noise
    from nnx_inspector.perturbations.activations import Patch as Patch
    from nnx_inspector.perturbations.activations import Scale as Scale
    from nnx_inspector.perturbations.activations import Shift as Shift
    from nnx_inspector.perturbations.activations import Zero as Zero
    from nnx_inspector.perturbations.gradients import ClipGradient as ClipGradient
    from nnx_inspector.perturbations.gradients import ReverseGradient as ReverseGradient
    from nnx_inspector.perturbations.gradients import ScaleGradient as ScaleGradient
    from nnx_inspector.perturbations.gradients import StopGradient as StopGradient
    from nnx_inspector.perturbations.parameters import ParameterNoise as ParameterNoise
    from nnx_inspector.perturbations.parameters import PruneMask as PruneMask
    from nnx_inspector.perturbations.perturb import perturb as perturb
    from nnx_inspector.perturbations.perturbed import perturbed as perturbed
    from nnx_inspector.perturbations.sweep import sweep as sweep
    from nnx_inspector.profiling.profile import profile as profile
    from nnx_inspector.profiling.scopes import named_scopes as named_scopes
    from nnx_inspector.program.analysis.trace import trace as trace
    from nnx_inspector.recordings.compare import compare as compare
    from nnx_inspector.recordings.load import load as load
    from nnx_inspector.recordings.recording import Recording as Recording
    from nnx_inspector.records.capture import capture as capture
    from nnx_inspector.records.capture import value_and_grad as value_and_grad
    from nnx_inspector.records.first_nan import first_nan as first_nan
    from nnx_inspector.records.propagation.measure import propagation as propagation
    from nnx_inspector.records.weights import compare_weights as compare_weights
    from nnx_inspector.screen.run import open as open

_OWN = __loader__.get_data(__file__).decode().splitlines()  # works in a zip archive too
_LINES = [line.split() for line in _OWN if line.startswith("    from nnx_inspector.")]
_HOMES = {name: module for _, module, _, name, _, _ in _LINES}
"""Public name -> module, as imported above; imported on first use, for a recording needs no jax."""

__all__ = sorted(_HOMES.keys() - {"open"})  # `import *` must not take the built-in away  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *globals()]
