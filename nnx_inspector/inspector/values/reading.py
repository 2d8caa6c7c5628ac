"""The browser's requests for values: the list of a site's arrays, and a window of one array.

Invariant: a message holds at most MOST_BLOCKS blocks, whatever the request. Measures nothing
itself, sends nothing, and starts no thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.sites import module_sites
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.values.blocks import Window, exact_values, reduce_blocks
from nnx_inspector.inspector.values.opening import Look, Opening, attentions
from nnx_inspector.inspector.values.positions import Positions, figures_of
from nnx_inspector.screen import protocol
from nnx_inspector.screen.requests import Answer
from nnx_inspector.stats.arithmetic import points_dtype

MOST_BLOCKS = 1 << 17
"""The most blocks in one message; three planes of float32 are 1.5 MB."""


def read_values(
    core: Core, opening: Opening, request: protocol.ShowValues | protocol.ReadValues
) -> Answer:
    if isinstance(request, protocol.ShowValues):
        return _arrays(request, opening, look_of(core)), None
    return _values(request, opening.shelf.get(request.array, request.norm_over))


def _arrays(request: protocol.ShowValues, opening: Opening, look: Look) -> protocol.Arrays:
    opened = opening.open(look, request.site, request.part, clean=request.clean)
    arrays = tuple(
        protocol.HeldArray(
            number=held.number,
            call=held.call,
            name=held.name,
            shape=tuple(held.value.shape),
            dtype=str(held.value.dtype),
            axes=held.axes,
            bytes=held.value.nbytes,
        )
        for held in opened.arrays
    )
    return protocol.Arrays(
        request=request.id,
        site=request.site,
        part=request.part,
        clean=request.clean,
        parts=look.parts(request.site),
        arrays=arrays,
        perturbed=look.setting.active and request.part != "parameter",
        source=_source(look, request.part),
        notes=opened.notes,
    )


def positions_of(
    core: Core, site: str, example: int, unit: int, axis: int | None = None
) -> Positions:
    """The figures of a site at each position of an example; see `positions.figures_of`.

    Raises:
        InspectorError: the words of the batch are not known, or as in `figures_of`.
    """
    inputs = core.view.kept("inputs")
    if inputs is None or not inputs.tokens:
        why = inputs and inputs.problem
        how = "Make the inspector with decode=, such as nni.Inspector(..., decode=str)."
        raise InspectorError(f"The tokens of this pass are not known. {why or how}")
    how: Any = {"example": example, "unit": unit, "axis": axis}
    return figures_of(look_of(core), core.opening, site, inputs, **how)


def positions_message(core: Core, request: protocol.ShowPositions) -> Answer:
    site = core.known(request.site)
    found = positions_of(core, site, request.example, request.unit, request.axis)
    message = protocol.Positions(
        id=request.id,
        site=request.site,
        example=request.example,
        unit=request.unit,
        units=found.units,
        axis=request.axis,
        along=found.along,
        axes=found.axes,
        positions=len(found.figures.get("norm", ())),
        figures=tuple(found.figures),
        source=found.why_not(site) or look_of(core).source,
    )
    answer = message, protocol.buffer_of(*found.figures.values())
    core.positions[request.site] = answer
    return answer


def _values(request: protocol.ReadValues, array: jax.Array) -> tuple[protocol.Values, bytes]:
    window = _window(request)
    if request.exact:
        return _exact(request, array, window)
    most = _bounded(request.most)
    found = reduce_blocks(array, window, most, request.component)
    encoding = "float32" if points_dtype(array.dtype) == np.float32 else "float64"
    if found.exact:
        planes = {"value": found.mean}
    else:
        planes = {"mean": found.mean, "low": found.low, "high": found.high}
        counts = {"nan": found.nan, "posinf": found.posinf, "neginf": found.neginf}
        planes |= {name: of for name, of in counts.items() if of is not None}
    message = _message(
        request,
        starts=found.starts,
        ends=found.ends,
        block=found.block,
        counts=found.mean.shape,
        planes=tuple(planes),
        encoding=encoding,
    )
    return message, _buffer(list(planes.values()), encoding)


def look_of(core: Core) -> Look:
    shown, trial, switches = core.shown, core.trial, core.modes.switches()
    setting = core.handles.setting()
    if shown is not None and not core.looping and shown.trial is trial:
        switches, setting = shown.switches, shown.setting
    inputs = core.view.kept("inputs")
    of = f"{trial.name}, with the parameters that the model had when this was read"
    return Look(
        call=trial.call(core.model, switches),
        setting=setting,
        modules={site.key: site.module for site in module_sites(core.model)},
        stacked={call.site: call.stacked for call in core.trace.calls},
        attends=attentions(core.trace.calls),
        passes=core.programs,
        trial=trial,
        source=f"{of}; a loop is running." if core.looping else f"{of}.",
        sequence=inputs.positions if inputs is not None and inputs.batch == 1 else None,
    )


def _source(look: Look, part: str) -> str:
    if part == "parameter":
        return "The model's own Variables, as they were when this was read."
    return look.source


def _window(request: protocol.ReadValues) -> Window:
    of_three = (request.axes, request.starts, request.ends, request.most)
    if any(len(each) != 3 for each in of_three):
        raise ValueError("axes, starts, ends and most need three numbers: tiles, rows, columns.")
    axes: Any = tuple(None if axis == -1 else axis for axis in request.axes)
    spans: Any = tuple(zip(request.starts, request.ends, strict=True))
    return Window(axes=axes, spans=spans, index=request.index)


def _bounded(most: tuple[int, ...]) -> tuple[int, int, int]:
    """The requested numbers of blocks, limited to MOST_BLOCKS in all."""
    tiles, rows, columns = (min(max(1, n), MOST_BLOCKS) for n in most)
    columns = min(columns, 4096)
    rows = min(rows, max(1, MOST_BLOCKS // columns))
    return max(1, min(tiles, MOST_BLOCKS // (rows * columns))), rows, columns


def _exact(
    request: protocol.ReadValues, array: jax.Array, window: Window
) -> tuple[protocol.Values, bytes]:
    found = exact_values(array, window)
    starts, ends = zip(*window.within(array.shape).spans, strict=True)
    planes, encoding = {"value": found}, found.dtype.name
    if found.dtype == np.complex128:
        planes, encoding = {"real": np.real(found), "imag": np.imag(found)}, "float64"
    message = _message(
        request,
        starts=starts,
        ends=ends,
        block=(1, 1, 1),
        counts=found.shape,
        planes=tuple(planes),
        encoding=encoding,
    )
    return message, _buffer(list(planes.values()), encoding)


def _message(request: protocol.ReadValues, **fields: Any) -> protocol.Values:
    return protocol.Values(
        request=request.id,
        array=request.array,
        index=request.index,
        axes=request.axes,
        norm_over=request.norm_over,
        component=request.component,
        exact=request.exact,
        **fields,
    )


def _buffer(planes: Sequence[np.ndarray], encoding: str) -> bytes:
    """The buffer of a `Values`."""
    dtypes = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "uint64": "<u8"}
    parts = [np.ascontiguousarray(p, dtypes[encoding]).tobytes() for p in planes]
    return b"".join(part + bytes(-len(part) % 8) for part in parts)
