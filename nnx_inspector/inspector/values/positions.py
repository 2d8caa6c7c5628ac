"""The figures of a site at each position of an example: the colours of a strip of text.

Invariants: the positions are those of the axis that is named for them and has the length of the
tokens; another site has no figures, and an error says why. Few numbers leave the device: some
figures of each position. Makes no program of a pass itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.values.opening import Look, Opening
from nnx_inspector.inspector.values.shelf import Held
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.screen import protocol

NAMES = ("position", "query")
"""The names of the axes that a strip follows, the first one that an array has."""


@dataclasses.dataclass(frozen=True)
class Positions:
    """The figures of one example.

    Attributes:
        figures: name -> a value for each position; see `POSITION_FIGURES`.
        units: the number of units at each position.
    """

    figures: dict[str, np.ndarray]
    units: int


def figures_of(
    look: Look, opening: Opening, site: str, inputs: protocol.Inputs, *, example: int, unit: int
) -> Positions:
    """The figures of a site at each position of an example.

    Args:
        site: the site's key, `"layers[3]"` for one layer of a stack.

    Raises:
        InspectorError: the site has no array with an axis of these positions.
        IndexError: there is no such example or unit.
    """
    if not 0 <= example < inputs.batch:
        raise IndexError(f"The batch has {inputs.batch} examples: there is no example {example}.")
    whole, rows = without_layers(site)
    held = _with_positions(opening.open(look, whole, "output").arrays, inputs, rows, site)
    gradient = None
    if look.call.loss_fn is not None:
        arrays = opening.open(look, whole, "gradient").arrays
        same = [one for one in arrays if (one.call, one.name) == (held.call, held.name)]
        gradient = same[0].value if same and same[0].value.shape == held.value.shape else None
    index, axis = _place(held.axes, example, rows)
    units = held.value[index].size // inputs.positions
    if not 0 <= unit < units:
        raise IndexError(f"{site!r} has {units} units at each position: there is no unit {unit}.")
    found = _figures(held.value, gradient, index=index, axis=axis, unit=unit)
    figures = {k: np.asarray(found[k], np.float64) for k in protocol.POSITION_FIGURES if k in found}
    return Positions(figures, units)


def _with_positions(
    arrays: tuple[Held, ...], inputs: protocol.Inputs, rows: tuple[int, ...], site: str
) -> Held:
    """The first array of real numbers with an axis of the positions, of one layer."""
    why = f"no array with an axis of the {inputs.positions} positions of the tokens"
    for held in arrays:
        lengths = dict(zip(held.axes, held.value.shape, strict=True))
        along = next((name for name in NAMES if name in lengths), "")
        real = jnp.issubdtype(held.value.dtype, jnp.floating)
        if not real or lengths.get(along) != inputs.positions:
            continue
        if lengths.get("batch", 1) != inputs.batch:
            why = f"no axis of the {inputs.batch} examples"
            continue
        stack = [name for name in held.axes if name.startswith(_STACKS)]
        if len(stack) == len(rows):
            return held
        why = f"an axis of {stack[0]}s: choose one, {site + '[0]' * len(stack)!r}"
    raise InspectorError(f"{site!r} has {why}.")


_STACKS = ("layer", "iteration", "member")


def _place(
    axes: tuple[str, ...], example: int, rows: tuple[int, ...]
) -> tuple[tuple[Any, ...], int]:
    """What chooses one example of one layer, and the axis of positions in what is left."""
    layers, index = iter(rows), list[Any]()
    along = next(name for name in NAMES if name in axes)
    for name in axes:
        if name.startswith(_STACKS):
            index.append(next(layers))
        else:
            index.append(example if name == "batch" else slice(None))
    before = index[: axes.index(along)]
    return tuple(index), sum(isinstance(one, slice) for one in before)


def _figures(x: Any, g: Any, *, index: tuple[Any, ...], axis: int, unit: int) -> dict[str, Any]:
    def rows(of: jax.Array) -> jax.Array:
        one = jnp.moveaxis(of[index].astype(jnp.promote_types(of.dtype, jnp.float32)), axis, 0)
        return one.reshape(one.shape[0], -1)

    value = rows(x)
    found = {"norm": jnp.linalg.norm(value, axis=1), "unit": value[:, unit]}
    if g is not None:
        slope = rows(g)
        found["gradient"] = jnp.linalg.norm(slope, axis=1)
        found["gradient_times_activation"] = (slope * value).sum(1)
    return jax.device_get(found)
