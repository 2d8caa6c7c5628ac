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
    from nnx_inspector.inspector import Inspector as Inspector
    from nnx_inspector.interception import intercept_methods as intercept_methods
    from nnx_inspector.perturbation import Scale as Scale
    from nnx_inspector.perturbation import Zero as Zero
    from nnx_inspector.perturbation import perturb as perturb
    from nnx_inspector.recording import Recording as Recording
    from nnx_inspector.tracing import trace as trace

_WHERE = {
    "capture": "capturing",
    "value_and_grad": "capturing",
    "diagnose": "findings",
    "Inspector": "inspector",
    "InspectorError": "errors",
    "InspectorWarning": "errors",
    "intercept_methods": "interception",
    "perturb": "perturbation",
    "Recording": "recording",
    "Scale": "perturbation",
    "trace": "tracing",
    "Zero": "perturbation",
}
"""Public name -> module. Imported on first use: opening a file must not start jax."""

__all__ = [
    "Inspector",
    "InspectorError",
    "InspectorWarning",
    "Recording",
    "Scale",
    "Zero",
    "capture",
    "diagnose",
    "intercept_methods",
    "perturb",
    "trace",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *globals()]
