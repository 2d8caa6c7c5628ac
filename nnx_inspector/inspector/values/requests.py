"""The browser's requests for values: the list of a site's arrays, and a window of one array.

Measures nothing itself, sends nothing, and starts no thread.
"""

from __future__ import annotations

import jax

from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.sites import module_sites, parse_key, site_key, split_operation
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.values.array_reader import (
    Part,
    ReadablePass,
    array_messages,
    attention_counts,
    values_of_call,
)
from nnx_inspector.inspector.values.device_tiles import DEVICE_TILES
from nnx_inspector.inspector.values.positions import PositionStats, position_stats
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.screen import protocol
from nnx_inspector.screen.requests import Answer
from nnx_inspector.screen.values.message import values_message
from nnx_inspector.typing import PyTree

PARAMETER_SOURCE = "The model's own Variables, as they were when this was read."


def read_values(core: Core, request: protocol.ShowValues | protocol.ReadValues) -> Answer:
    if isinstance(request, protocol.ShowValues):
        return _arrays_message(request, core), None
    return values_message(
        request, core.array_reader.cache.get(request.array, request.norm_over), DEVICE_TILES
    )


def _arrays_message(request: protocol.ShowValues, core: Core) -> protocol.Arrays:
    of = readable_pass(core)
    arrays = core.array_reader.read(of, request.site, request.part, clean=request.clean)
    return protocol.Arrays(
        request=request.id,
        site=request.site,
        part=request.part,
        clean=request.clean,
        parts=of.parts(request.site),
        arrays=array_messages(arrays.arrays),
        perturbed=of.setting.active and request.part != "parameter",
        source=of.source if request.part != "parameter" else PARAMETER_SOURCE,
        notes=arrays.notes,
    )


def positions_of(
    core: Core, site: str, example: int, unit: int, axis: int | None = None
) -> PositionStats:
    """The figures of a site at each position of an example; see `positions.position_stats`.

    Raises:
        InspectorError: the words of the batch are not known, or as in `position_stats`.
    """
    inputs = core.view.last_message("inputs")
    if inputs is None or not inputs.tokens:
        why = inputs and inputs.problem
        how = "Make the inspector with decode=, such as nni.Inspector(..., decode=str)."
        raise InspectorError(f"The tokens of this pass are not known. {why or how}")
    of = readable_pass(core), core.array_reader, site, inputs
    return position_stats(*of, example=example, unit=unit, axis=axis)


def values_at(core: Core, site: str, part: Part, *, call: int | None, clean: bool) -> PyTree:
    """See `Inspector.values`."""
    whole, layers = without_layers(site)
    called, operation = split_operation(whole)
    by_module = operation and called not in core.view.keys  # a method that has no row
    known = called if operation else site
    core.require_site(site_key(parse_key(whole)[0]) if by_module else known, layers=False)
    if layers and part == "parameter":
        raise InspectorError(
            f"The parameters of all layers of {whole!r} are one array each. Read them as "
            f"values({whole!r}, part='parameter')."
        )
    found = values_of_call(
        core.array_reader.read(readable_pass(core), whole, part, clean=clean), whole, call
    )
    return jax.tree.map(lambda x: x[layers], found) if layers else found


def positions_message(core: Core, request: protocol.ShowPositions) -> Answer:
    site = core.require_site(request.site)
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
        source=found.why_not(site) or readable_pass(core).source,
    )
    answer = message, protocol.buffer_of(*found.figures.values())
    core.position_answers[request.site] = answer
    return answer


def readable_pass(core: Core) -> ReadablePass:
    shown, request, switches = core.shown, core.request, core.modes.switches()
    setting = core.handles.setting()
    if shown is not None and not core.looping and shown.request is request:
        switches, setting = shown.switches, shown.setting
    inputs = core.view.last_message("inputs")
    of = f"{request.name}, with the parameters that the model had when this was read"
    return ReadablePass(
        call=request.call(core.model, switches),
        setting=setting,
        modules={site.key: site.module for site in module_sites(core.model)},
        stacked={call.site: call.stacked for call in core.trace.calls},
        attends=attention_counts(core.trace.calls),
        passes=core.programs,
        request=request,
        source=f"{of}; a loop is running." if core.looping else f"{of}.",
        sequence=inputs.positions if inputs is not None and inputs.batch == 1 else None,
    )
