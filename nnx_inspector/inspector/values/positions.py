"""The figures of a site at each position of an example: the colours of a strip of text.

Invariants: the positions lie along the axis named for them, or a chosen axis, that is as long as
the tokens; another site has no figures, and an error says why. Few numbers leave the device: some
figures per position. Compiles no program for a pass itself.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat.sharding import auto_sharded, take_index
from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.values.array_cache import SiteArray
from nnx_inspector.inspector.values.array_reader import ArrayReader, ReadablePass
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.screen import protocol

POSITION_AXES = ("position", "query")
"""The names of the axes that a strip may follow; the first that an array has is used."""


_STACK_AXES = ("layer", "iteration", "member")


@dataclasses.dataclass(frozen=True)
class PositionStats:
    """The figures of one example.

    Attributes:
        figures: name -> a value for each position; see `POSITION_STATS`.
        units: the number of units at each position.
        along: the number of the axis of positions in what one layer returns; None if it is unknown,
            and then there are no figures.
        axes: the name of each axis that could be it; "" for the others.
    """

    figures: dict[str, np.ndarray]
    units: int
    along: int | None
    axes: tuple[str, ...]

    def why_not(self, site: str) -> str:
        """Why there are no figures, in words; "" if there are."""
        if self.along is not None:
            return ""
        able = " or ".join(f"{i} ({name})" for i, name in enumerate(self.axes) if name)
        return f"It is not known which axis of {site!r} has the tokens. Choose it: axis {able}."


@dataclasses.dataclass(frozen=True)
class _PositionAxis:
    """Where the positions of the examples are in an array.

    Attributes:
        along, axes: as in `Positions`.
        examples: the number of the axis of the examples, -1 for none.
    """

    array: SiteArray
    along: int | None
    axes: tuple[str, ...]
    examples: int = -1

    def index(self, example: int, rows: tuple[int, ...]) -> tuple[tuple[int | slice, ...], int]:
        """The index of one example of one layer, and the axis of positions in what is left."""
        assert self.along is not None
        index: list[int | slice] = [slice(None)] * len(self.axes)
        if self.examples >= 0:
            index[self.examples] = example
        axis = self.along - (0 <= self.examples < self.along)
        layers, inner = iter(rows), iter(index)
        whole = [
            next(layers if name.startswith(_STACK_AXES) else inner) for name in self.array.axes
        ]
        return tuple(whole), axis


def is_unaligned(apart: tuple[str, ...], site: str) -> bool:
    """Whether a site, or a layer of it, has no words; for `apart` see `protocol.Inputs`."""
    return "*" in apart or without_layers(site)[0] in apart


def position_stats(
    of: ReadablePass,
    reader: ArrayReader,
    site: str,
    inputs: protocol.Inputs,
    *,
    example: int,
    unit: int,
    axis: int | None = None,
) -> PositionStats:
    """The figures of a site at each position of an example.

    Args:
        site: the site's key, `"layers[3]"` for one layer of a stack.
        axis: the axis of the positions in what the site (or its layer) returns; None to find it.

    Raises:
        InspectorError: the site has no array with an axis of these positions.
        IndexError: there is no such example or unit.
    """
    if not 0 <= example < inputs.batch:
        raise IndexError(f"The batch has {inputs.batch} examples: there is no example {example}.")
    whole, rows = without_layers(site)
    if is_unaligned(inputs.apart, site):
        raise InspectorError(
            f"The positions of {site!r} may be those of another argument than {inputs.tokens!r}, "
            f"which is as long. Choose the argument with tokens=, or give them unlike lengths."
        )
    found_axis = _find_axis(reader.read(of, whole, "output").arrays, inputs, rows, site, axis)
    if found_axis.along is None:
        return PositionStats({}, 0, None, found_axis.axes)
    array, gradient = found_axis.array, None
    if of.call.loss_fn is not None:
        arrays = reader.read(of, whole, "gradient").arrays
        same = [one for one in arrays if (one.call, one.name) == (array.call, array.name)]
        gradient = same[0].value if same and same[0].value.shape == array.value.shape else None
    index, left = found_axis.index(example, rows)
    units = take_index(array.value, index).size // inputs.positions
    if not 0 <= unit < units:
        raise IndexError(f"{site!r} has {units} units at each position: there is no unit {unit}.")
    found = _position_statistics(array.value, gradient, index=index, axis=left, unit=unit)
    figures = {k: np.asarray(found[k], np.float64) for k in protocol.POSITION_STATS if k in found}
    return PositionStats(figures, units, found_axis.along, found_axis.axes)


def _find_axis(
    arrays: tuple[SiteArray, ...],
    inputs: protocol.Inputs,
    rows: tuple[int, ...],
    site: str,
    chosen: int | None,
) -> _PositionAxis:
    """The first array of real numbers with an axis of the positions, of one layer."""
    where = "axis" if chosen is None else f"axis {chosen}"
    why = f"no array with an {where} of the {inputs.positions} positions of the tokens"
    undecided = None
    for array in arrays:
        lengths = dict(zip(array.axes, array.value.shape, strict=True))
        inner = {name: n for name, n in lengths.items() if not name.startswith(_STACK_AXES)}
        able = tuple(name if n == inputs.positions else "" for name, n in inner.items())
        if not jnp.issubdtype(array.value.dtype, jnp.floating) or not any(able):
            continue
        along = next((able.index(name) for name in POSITION_AXES if name in able), None)
        if chosen is not None:
            if not -len(able) <= chosen < len(able) or not able[chosen]:
                continue
            along = chosen % len(able)
        stack = [name for name in lengths if name not in inner]
        if len(stack) != len(rows):
            why = f"an axis of {stack[0]}s: choose one, {site + '[0]' * len(stack)!r}"
            continue
        others = {i: _example_axis(inner, i, inputs.batch) for i, name in enumerate(able) if name}
        axes = tuple(name if others.get(i) is not None else "" for i, name in enumerate(able))
        if along is None and any(axes):
            undecided = undecided or _PositionAxis(array, None, axes)
            continue
        examples = None if along is None else others[along]
        if examples is None or (chosen is None and inputs.batch > 1 and "batch" not in inner):
            why = f"no axis of the {inputs.batch} examples"
            continue
        return _PositionAxis(array, along, axes, examples)
    if undecided is not None and chosen is None:
        return undecided
    raise InspectorError(f"{site!r} has {why}.")


def _example_axis(lengths: dict[str, int], along: int, count: int) -> int | None:
    """The axis of the examples: the one of this name, or the only one of this length besides
    `along`.

    -1 if no axis is needed, None if it is not known.
    """
    others = {i: name for i, name in enumerate(lengths) if i != along}
    named = [i for i, name in others.items() if name == "batch"]
    able = named or [i for i, name in others.items() if count > 1 and lengths[name] == count]
    if not able and count == 1:
        return -1
    return able[0] if len(able) == 1 and lengths[others[able[0]]] == count else None


def _position_statistics(
    x: object, g: object, *, index: tuple[object, ...], axis: int, unit: int
) -> dict[str, np.ndarray]:
    def rows(of: jax.Array) -> jax.Array:
        one = jnp.moveaxis(of[index].astype(jnp.promote_types(of.dtype, jnp.float32)), axis, 0)
        return one.reshape(one.shape[0], -1)

    def figures(x: jax.Array, g: jax.Array | None) -> dict[str, jax.Array]:
        value = rows(x)
        found = {"norm": jnp.linalg.norm(value, axis=1), "unit": value[:, unit]}
        if g is not None:
            slope = rows(g)
            found["gradient"] = jnp.linalg.norm(slope, axis=1)
            found["gradient_times_activation"] = (slope * value).sum(1)
        return found

    return jax.device_get(auto_sharded(figures, x, g))
