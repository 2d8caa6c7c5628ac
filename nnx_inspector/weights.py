"""The parameters that a module holds at this moment, measured on demand.

Invariant: a number is that of the value which the Variable holds when it is asked; the model is
not changed, and a parameter that several modules share is measured once. Runs no pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from nnx_inspector import protocol
from nnx_inspector.donated import undisturbed
from nnx_inspector.sites import Path, site_key
from nnx_inspector.staging import array_names
from nnx_inspector.summarize import summarize
from nnx_inspector.summary import Summary
from nnx_inspector.taps import describe
from nnx_inspector.variables import variables_by_path


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter: its path, dtype and shape in words, and its figures on the host."""

    path: str
    array: str
    summary: Summary


def weights_of(
    module: nnx.Module, path: Path, *, most: int | None = None
) -> tuple[list[Weight], int]:
    """The parameters of a module and of what is in it, its own first.

    Args:
        module: of the model.
        path: the module's, with which theirs begin.
        most: measure so many at most.

    Returns:
        The parameters, and how many were left out.

    Raises:
        InspectorError: a training step has taken their arrays; see `donated`.
    """

    def read() -> tuple[list[Weight], int]:
        arrays = sorted(_arrays(module, path), key=lambda one: one[0])
        found = [(key, x) for _, key, x in arrays[:most]]
        measured = jax.device_get([summarize(x) for _, x in found])
        pairs = zip(found, measured, strict=True)
        rows = [Weight(key, describe(x), summary) for (key, x), summary in pairs]
        return rows, len(arrays) - len(rows)

    return undisturbed(read, "The parameters")


def _arrays(module: nnx.Module, path: Path) -> Sequence[tuple[int, str, Any]]:
    """Each array with the length of its path within the module, and its whole path."""
    found: list[tuple[int, str, Any]] = []
    for inner, variable in variables_by_path({(): module}):
        if isinstance(variable, nnx.Param):
            value: Any = variable.get_raw_value()
            leaves = jax.tree.leaves(value[...] if isinstance(value, jax.Ref) else value)
            for name, x in zip(array_names(variable), leaves, strict=True):
                found.append((len(inner), site_key((*path, *inner)) + name, x))
    return found


def parameters_message(
    rows: Sequence[Weight], *, more: int, request: int, site: str
) -> tuple[protocol.Parameters, bytes]:
    """The message of some parameters, and its buffer."""
    import numpy as np

    bins = [row.summary.nonzero_bins() for row in rows]
    table = [[getattr(row.summary, name) for name in protocol.STATISTICS] for row in rows]
    message = protocol.Parameters(
        version=protocol.VERSION,
        id=request,
        site=site,
        parameters=tuple(
            protocol.Parameter(path=row.path, array=row.array, bins=len(one))
            for row, one in zip(rows, bins, strict=True)
        ),
        more=more,
        why="" if rows else "This module has no parameters.",
    )
    shape = (len(rows), len(protocol.STATISTICS))
    return message, protocol.parameters_buffer(np.array(table, np.float64).reshape(shape), bins)
