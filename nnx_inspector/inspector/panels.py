"""What is read on demand: parameters, units and code of a site, compilations, another run.

Each answer names its request. Invariant: the model does not change. Draws nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector.arrays import require_examples
from nnx_inspector.errors import InspectorError, reply_text
from nnx_inspector.hooks.operations.attention import is_pattern
from nnx_inspector.hooks.sites import CALL, ModuleSite, parse_key, site_key
from nnx_inspector.hooks.variables import contents_at
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.cost.compilations import compilations_message
from nnx_inspector.inspector.passes.batch import arguments_of
from nnx_inspector.inspector.values.array_reader import batch_of, has_convolutions, module_key
from nnx_inspector.inspector.values.axes import CallContext, names_of_value
from nnx_inspector.inspector.values.requests import positions_of
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.program.analysis.stacks import layers_with_rows, stacks_of
from nnx_inspector.program.analysis.trace import Trace
from nnx_inspector.program.marks import OUTPUT
from nnx_inspector.program.stage import array_names
from nnx_inspector.program.survey import why_divided
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.records.donated import require_one_process, retry_if_donated
from nnx_inspector.records.record import Record, layers_of
from nnx_inspector.records.weights import frame_of, weight_differences
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comparison import StepPair, recording_of, weights_message
from nnx_inspector.screen.frames import casts_message
from nnx_inspector.screen.requests import Answer
from nnx_inspector.screen.source import documentation_of, excerpts_of
from nnx_inspector.stats.samples.unit_stats import OFF_AT
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.stats.summary import Summary
from nnx_inspector.stats.units import MAX_UNITS, Units
from nnx_inspector.typing import PyTree, Value

if TYPE_CHECKING:
    import pandas as pd


def answer_look(core: Core, request: protocol.Look) -> Answer:
    """The answer to a request.

    Raises:
        ValueError: there is no such site.
        InspectorError: it has no such figures, or the model's arrays were donated to a step.
    """
    core.require_site(request.site)
    if request.what == "casts":
        return casts_message(core.recording, core.view.keys, request)
    if request.what == "compilations":
        found = core.meter.compilations.all()
        return compilations_message(found, request=request.id), None
    if request.what == "units":
        head, axis = without_layers(request.site)[0], request.axis
        record = _record_of_units(core, head, axis=axis)
        return _units_message(core, record, request.site, number=request.id, axis=axis)
    return _code_message(request, core.trace), None


# ----------------------------------------------------------------- parameters


def parameters_at(trace: Trace, site: str) -> dict[str, Summary]:
    """The parameters of a site's module and of the modules in it, by their paths, its own first.

    Raises:
        InspectorError: their arrays were donated to a training step; see `donated`.
    """
    modules = {one.key: one.module for one in trace.modules}  # also the Linen ones in a ToNNX
    module = module_key(without_layers(site)[0])

    def read() -> dict[str, Summary]:
        arrays = sorted(_parameter_arrays(modules, module), key=lambda one: one[0])
        found = [(key, x) for _, key, x in arrays]
        require_one_process(found, "The parameters")
        measured = jax.device_get([summarize(x) for _, x in found])
        return {key: one for (key, _), one in zip(found, measured, strict=True)}

    roots = {(): modules[""]} if "" in modules else {(key,): m for key, m in modules.items()}
    return retry_if_donated(read, "The parameters", roots)


def _parameter_arrays(modules: Mapping[str, nnx.Module], site: str) -> list[tuple[int, str, Value]]:
    """Each array, with the length of its path below the site and its whole path."""
    found: list[tuple[int, str, Value]] = []
    for inner, variable, value in contents_at(modules, site) or ():
        if isinstance(variable, nnx.Param):
            leaves = jax.tree.leaves(value[...] if isinstance(value, jax.Ref) else value)
            key = "/".join(filter(None, (site, site_key(inner))))
            for name, x in zip(array_names(variable), leaves, strict=True):
                found.append((len(inner), key + name, x))
    return found


def _module_at(trace: Trace, site: str) -> ModuleSite | None:
    key = module_key(without_layers(site)[0])
    return next((one for one in trace.modules if one.key == key), None)


# ----------------------------------------------------------------------- units


def units_at(core: Core, site: str, *, axis: int = -1) -> PyTree:
    """The Units of a site's output (a pytree of them for a pytree), in the last requested pass.

    `axis` is the axis of the units in the output as the module returns it.

    Raises:
        KeyError: the pass does not show the site.
        InspectorError: no output has such an axis, or the model's arrays were donated to a step.
    """
    return _units_in(core, _record_of_units(core, without_layers(site)[0], axis=axis), site, axis)


def _record_of_units(core: Core, *sites: str, axis: int = -1) -> Record:
    setting = core.handles.setting()
    core.require_one_process("The units")
    require_examples(core.call().parts.arrays, "units")
    return retry_if_donated(
        lambda: core.programs.units(core.call(), setting, *sites, axis=axis),
        "The units",
        core.model,
    )


def _units_in(core: Core, record: Record, site: str, axis: int = -1) -> PyTree:
    entry = record[site]
    behind = _activation_of(core, site)
    units = jax.tree.map(
        lambda one: dataclasses.replace(one, behind=behind), entry.units, is_leaf=_is_units
    )
    if not _units_leaves(units):
        if why := _why_divided(core, without_layers(site)[0]):
            raise InspectorError(
                f"{site or '(root)'!r} has no figures of units: {why}. Read the units of a module "
                f"around the shard_map."
            )
        what = "an axis" if axis == -1 else f"an axis {axis}"
        raise InspectorError(
            f"{site or '(root)'!r} returns {entry.forms()}: no array of numbers with {what} of at "
            f"most {MAX_UNITS:,} entries, so it has no figures of units."
        )
    return units


def _why_divided(core: Core, site: str) -> str:
    """Why all calls of a site return only parts of arrays; "" if one does not, or if it is not
    known.
    """
    known = core.programs.tracing(core.call())
    walk = [] if known is None else known.survey.walk()
    why = [why_divided(mark, at) for mark, at in walk if mark.site == site and mark.part == OUTPUT]
    return why[0] if why and all(why) else ""


def _activation_of(core: Core, site: str) -> str:
    """The activation function that the site's output goes into, as the facts of the last requested
    pass have it; "" if it is not known, or goes elsewhere too.
    """
    core.record_facts()
    known = core.recording.facts
    head = without_layers(site)[0]
    return next((one.activation for one in known.sites if one.site == head), "") if known else ""


def _is_units(x: object) -> bool:
    return isinstance(x, Units)


def _units_leaves(units: object) -> list[Units]:
    return [x for x in jax.tree.leaves(units, is_leaf=_is_units) if isinstance(x, Units)]


def units_messages(core: Core, sites: Sequence[str]) -> dict[str, Answer | str]:
    """Site -> the message that shows its units, or why there is none. All come from one pass."""
    heads = dict.fromkeys(without_layers(site)[0] for site in sites)
    try:
        record = _record_of_units(core, *heads)
    except Exception as error:  # noqa: BLE001 - it is the answer
        return dict.fromkeys(sites, reply_text(error))
    found: dict[str, Answer | str] = {}
    for site in sites:
        try:
            found[site] = _units_message(core, record, site, number=0)
        except (InspectorError, KeyError) as error:
            found[site] = reply_text(error)
    return found


def _axes_of(core: Core, site: str, output: str) -> tuple[str, ...]:
    """The axes of a site's output, such as "f32[64,10]", in words; () if it is not one array."""
    one = re.fullmatch(r"(\w+)\[([\d,]+)\]", output)
    if one is None:
        return ()
    found = _module_at(core.trace, site)
    context = CallContext(
        module=found and found.module,
        batch=batch_of(core.call()),
        spatial=has_convolutions(site.module for site in core.trace.modules),
        attends=is_pattern(site),
    )
    shape = [int(n) for n in one[2].split(",")]
    names = names_of_value(shape, jnp.dtype(one[1]), context)
    return tuple(f"{name} ({n})" for name, n in zip(names, shape, strict=True))


def _units_message(core: Core, record: Record, site: str, *, number: int, axis: int = -1) -> Answer:
    one = _units_leaves(_units_in(core, record, site, axis))[0]
    figures = np.stack([_unit_figure(one, name) for name in protocol.UNIT_STATS])
    shown = figures[:, : protocol.MOST_UNITS]
    message = protocol.UnitStats(
        id=number,
        site=site,
        each=int(np.max(one.size, initial=0)),
        source=core.request.name.lower(),
        units=shown.shape[1],
        more=figures.shape[1] - shown.shape[1],
        why="",
        axis=axis,
        axes=_axes_of(core, site, record[site].forms()),
        behind=one.behind if one.behind in OFF_AT else "",
    )
    return message, protocol.buffer_of(shown)


def _unit_figure(units: Units, name: str) -> np.ndarray:
    if name == "nonfinite":
        return (units.nan + units.posinf + units.neginf).astype(np.float64)
    return getattr(units, name).astype(np.float64)


def words_at(core: Core, site: str, example: int, *, unit: int, axis: int | None) -> pd.DataFrame:
    """See `Inspector.words`."""
    import pandas as pd

    found = positions_of(core, core.require_site(site), example, unit, axis)
    if why := found.why_not(site):
        raise InspectorError(why)
    words = core.inputs.words(arguments_of(core), example)
    return pd.DataFrame({"position": range(len(words)), "word": words, **found.figures})


# ------------------------------------------------------------------------ code


def _code_message(request: protocol.Look, trace: Trace) -> protocol.Code:
    head, _ = without_layers(request.site)
    found, calls = _module_at(trace, head), [c for c in trace.calls if c.site == head]
    kind = type(found.module).__name__ if found else next((c.type for c in calls), "")
    excerpts = excerpts_of(c.source for c in calls)
    why = "" if excerpts else "The line that calls it is not known."
    return protocol.Code(
        id=request.id,
        site=request.site,
        kind=kind,
        documentation=documentation_of(type(found.module)) if found else "",
        excerpts=excerpts,
        sown=sown_at(trace, head),
        why=why if calls else "The example does not call it.",
    )


def sown_at(trace: Trace, site: str) -> tuple[str, ...]:
    """The sites of the values that a module passes to `sow` or `perturb`, in the pass's order."""
    modules = {one.key for one in trace.modules}
    path = parse_key(site)[0]
    found: dict[str, None] = {}
    for call in trace.calls:
        segments, method = parse_key(call.site)
        apart = call.site not in modules and method in (CALL, "sow", "perturb")
        if apart and segments[:-1] == path and segments and call.inputs == "nothing":
            found[call.site] = None
    return tuple(found)


# ----------------------------------------------------------------- another run


def compare_with(
    core: Core, other: Recording | Record | nnx.Pytree | PyTree, at: StepPair, name: str
) -> pd.DataFrame | None:
    """Offer another run or other weights for comparison on screen; see `Inspector.compare`."""
    if other is None:
        core.view.set_other_pass(None, "", step=None)
        core.view.publish(weights_message("", []))
        return None
    if isinstance(other, (nnx.Pytree, Mapping)) and not isinstance(other, Record):
        require_one_process((other, nnx.state(core.model)), "The weights")
        rows = weight_differences(other, core.model)
        core.view.publish(weights_message(name or "the other weights", rows))
        return frame_of(rows)
    if isinstance(other, Record):
        record = jax.device_get(other)
        layers = layers_of(record, layers_with_rows(stacks_of(core.trace)))
        other = recording_of({**record.merged(), **layers})
        at = None, at[1] if isinstance(at, tuple) else at
    return core.view.compare_with(core.recording, other, at=at, name=name)
