"""Reads the arrays of one site: makes a pass that keeps them, or reads the site's Variables.

Invariant: arrays of the same model, arguments, modes and perturbations are not computed again. The
model does not change, and only the arrays that were read are kept alive. Sends nothing.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat.sharding import with_auto_sharding
from nnx_inspector.arrays import is_array
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.globs import escaped_glob
from nnx_inspector.hooks.operations.attention import is_pattern
from nnx_inspector.hooks.sites import Path, Selection, parse_key, site_key, split_operation
from nnx_inspector.hooks.variables import contents_at
from nnx_inspector.inspector.passes.call import Call
from nnx_inspector.inspector.passes.owned_passes import OwnedPasses
from nnx_inspector.inspector.passes.pass_request import PassRequest
from nnx_inspector.inspector.values.array_cache import (
    ArrayCache,
    ArraySet,
    SiteArray,
    Sources,
    is_shown,
)
from nnx_inspector.inspector.values.axes import (
    CONVOLUTIONS,
    CallContext,
    names_of_parameter,
    names_of_value,
)
from nnx_inspector.inspector.values.value_passes import CallArrays, ValuePasses
from nnx_inspector.perturbations.places import Setting
from nnx_inspector.program.analysis.calls import TracedCall
from nnx_inspector.program.analysis.trace import Trace, trace_of
from nnx_inspector.program.function import Arguments
from nnx_inspector.records.donated import require_not_deleted, require_one_process
from nnx_inspector.screen import protocol
from nnx_inspector.typing import AnyArray, PyTree, Value, Variable

Part = Literal["output", "input", "gradient", "parameter", "attention"]
SUM_TOLERANCE = 0.02
"""How far from 1 the sum of attention weights may be; bfloat16 is that inexact."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadablePass:
    """The pass whose values can be read at this moment.

    Attributes:
        stacked: site's key -> how many layers its module holds.
        attends: site's key -> how many attentions its call computes.
        request: identifies the arguments: another request has other arguments.
        source: the name of the pass, in words.
        sequence: the number of tokens, if the batch is known to be one sequence; otherwise None.
    """

    call: Call
    setting: Setting
    modules: Mapping[str, nnx.Module]
    stacked: Mapping[str, int]
    attends: Mapping[str, int]
    passes: OwnedPasses
    request: PassRequest
    source: str
    sequence: int | None = None

    def parts(self, site: str) -> tuple[Part, ...]:
        of_loss: tuple[Part, ...] = ("gradient",) if self.call.loss_fn is not None else ()
        has = contents_at(self.modules, module_key(site))
        of_module: tuple[Part, ...] = ("parameter",) if has else ()
        patterns: tuple[Part, ...] = ("attention",) if self.attends.get(site) else ()
        return ("output", "input", *of_loss, *of_module, *patterns)


class ArrayReader:
    """Reads arrays, on any thread, one at a time."""

    def __init__(self) -> None:
        self.cache = ArrayCache()
        self._passes = ValuePasses()
        self._attending: dict[Hashable, OwnedPasses] = {}
        self._lock = threading.Lock()

    def read(self, of: ReadablePass, site: str, part: Part, *, clean: bool = False) -> ArraySet:
        """Read the arrays of a part of a site.

        Args:
            part: the part; "gradient" needs a pass of a loss. "attention" are the outputs of the
                sites `"...@attention"` within the call.
            clean: whether to leave the perturbations out.

        Raises:
            InspectorError: there are none (the text says why), or the model could not be read.
        """
        with self._lock:
            found = self._read(of, site, part, clean)
            self.cache.put(found)
            return found

    def _read(self, of: ReadablePass, site: str, part: Part, clean: bool) -> ArraySet:
        if part == "gradient" and of.call.loss_fn is None:
            raise InspectorError(
                f"There is no gradient of {site!r} in a forward pass. Show a step with a loss: "
                f"insp.step(loss_fn, batch)."
            )
        if part == "parameter":
            return self._parameters(of, site)
        if part == "attention":
            return self._attention_patterns(of, site, clean)
        setting = of.setting.clean() if clean else of.setting
        parts = of.call.parts
        require_one_process(of.call.arrays, "The values")
        require_not_deleted([*parts.leaves, *parts.arrays], "The values", of.call.model)
        what = (site, part, of.request, of.call.switches, _setting_key(setting), of.passes.keys)
        found = self.cache.find(what, parts.leaves)  # the request stands for the arguments
        if found is not None:
            return found
        sources = Sources(what, parts.leaves)
        try:
            calls = self._passes.run(of.call, setting, site=site, part=part, passes=of.passes)
        except (RuntimeError, ValueError):
            require_not_deleted(
                parts.leaves, "The values", of.call.model
            )  # explains arrays donated meanwhile
            raise
        arrays: list[SiteArray] = []
        for number, call in enumerate(calls):
            if call.took_place:
                arrays += self._arrays_of_call(of, site, part, number, call)
        if not arrays:
            raise InspectorError(_why_no_arrays(site, part, calls))
        notes = skipped_notes((n, call.ran) for n, call in enumerate(calls) if call.took_place)
        return ArraySet(sources, tuple(arrays), _trees_of_calls(calls, part), notes)

    def _attention_patterns(self, of: ReadablePass, site: str, clean: bool) -> ArraySet:
        if not of.attends.get(site):
            those = ", ".join(repr(key) for key, n in of.attends.items() if n) or "none"
            raise InspectorError(f"{site!r} computes no attention itself. Sites that do: {those}.")
        # a method of the module that the call calls has sites of its own: `attn:attend@attention`
        glob = "/".join([*filter(None, [escaped_glob(module_key(site))]), "**:*@attention"])
        keys = of.passes.keys
        selection = Selection((*of.passes.selection.terms, glob, f"{glob}[*"))
        passes = self._attending.setdefault((selection, keys), OwnedPasses(keys, selection))
        calls = passes.read(of.call, trace_of).calls
        found = [c.site for c in calls if is_pattern(c.site) and _calling_module(calls, c) == site]
        of = dataclasses.replace(of, passes=passes)
        names = [key.removeprefix(site) for key in dict.fromkeys(found)] or ["@attention"]
        sets = [self._read(of, site + name, "output", clean) for name in names]
        if names == ["@attention"]:
            return sets[0]
        arrays = [
            dataclasses.replace(array, name=name)
            for name, one in zip(names, sets, strict=True)
            for array in one.arrays
        ]
        tree = ({name: one.tree for name, one in zip(names, sets, strict=True)},)
        return ArraySet(Sources((site, "attention"), []), tuple(arrays), tree)

    def _arrays_of_call(
        self, of: ReadablePass, site: str, part: Part, number: int, call: CallArrays
    ) -> list[SiteArray]:
        module = of.modules.get(module_key(site))
        names = call.structure.names or ("",) * len(call.values)
        out: list[SiteArray] = []
        batch, called = batch_of(of.call), split_operation(site)[0]
        alone = batch not in (None, 1) and batch == of.sequence  # one sequence, without a batch
        for name, value, mapped in zip(names, call.values, call.mapped, strict=True):
            if value is None:
                continue
            context = CallContext(
                module=module,
                loops=call.loops - call.members,
                members=call.members,
                mapped=mapped,
                stacked=any(of.stacked.get(key) for key in (called, module_key(site))),
                batch=None if alone else batch,
                positions=batch if alone else None,
                spatial=has_convolutions(of.modules.values()),
                attends=is_pattern(site)
                or (part == "output" and _sums_to_one(value, call.loops + mapped, module)),
            )
            axes = names_of_value(value.shape, value.dtype, context)
            out.append(SiteArray(self.cache.next_number(), number, name, value, axes))
        return out

    # ------------------------------------------------------------- parameters

    def _parameters(self, of: ReadablePass, site: str) -> ArraySet:
        contents = contents_at(of.modules, module_key(site))
        if contents is None:
            raise InspectorError(f"{site!r} is not a module of the model, so it has no parameters.")
        named = dict(_arrays_of(contents))
        require_one_process(named, "The values")
        require_not_deleted(list(named.values()), "The values", of.call.model)
        if not named:
            raise InspectorError(f"{site!r} has no parameters and no other Variables.")
        found = self.cache.find((site, "parameter"), list(named.values()))
        if found is not None:
            return found
        stacked = any(of.stacked.values())
        arrays: list[SiteArray] = []
        for name, raw in named.items():
            value = jnp.asarray(raw)
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                value = jax.random.key_data(value)
            if is_shown(value):
                *path, last = name.split("/")
                owner = of.modules.get("/".join([*filter(None, [site]), *path]))
                axes = names_of_parameter(value.shape, last, owner, stacked=stacked)
                arrays.append(SiteArray(self.cache.next_number(), 0, name, value, axes))
        sources = Sources((site, "parameter"), list(named.values()))
        return ArraySet(sources, tuple(arrays), ({h.name: h.value for h in arrays},))


def attention_counts(calls: Sequence[TracedCall]) -> dict[str, int]:
    """How many attentions the call of each site computes, those with a site of their own too."""
    found = {call.site: call.attends for call in calls}
    for call in calls:
        site = _calling_module(calls, call) if is_pattern(call.site) else None
        if site is not None:
            found[site] += 1
    return found


def takes_ids(trace: Trace, example: PassRequest) -> bool:
    """Whether a model looks up ids: it holds an embedding, or the example has rows of ids."""
    modules = any(isinstance(site.module, nnx.Embed) for site in trace.modules)
    arrays = [x for x in jax.tree.leaves((example.args, example.kwargs)) if is_array(x)]
    return modules or any(x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer) for x in arrays)


def array_messages(arrays: Iterable[SiteArray]) -> tuple[protocol.HeldArray, ...]:
    """The names, shapes and axes of arrays, as the screen gets them."""
    return tuple(
        protocol.HeldArray(
            number=array.number,
            call=array.call,
            name=array.name,
            shape=tuple(array.value.shape),
            dtype=str(array.value.dtype),
            axes=array.axes,
            bytes=array.value.nbytes,
        )
        for array in arrays
    )


def skipped_notes(calls: Iterable[tuple[int, np.ndarray]]) -> tuple[str, ...]:
    """A sentence for each call that some iterations left out. A call is given by its number and by
    how often it took place in each iteration.
    """
    return tuple(
        f"Call {number} did not take place in some iterations, which show zeros."
        for number, ran in calls
        if not np.all(ran)
    )


def values_of_call(arrays: ArraySet, site: str, call: int | None) -> PyTree:
    """The values of one call of a site; `call` may be None if there is only one call.

    Raises:
        InspectorError: there are several calls, or this one did not take place.
        IndexError: there is no such call.
    """
    count = len(arrays.tree)
    if call is None and count != 1:
        raise InspectorError(f"{site!r} was called {count} times. Choose one of them: call=0.")
    number = 0 if call is None else call
    if not -count <= number < count:
        raise IndexError(f"{site!r} was called {count} times: there is no call {number}.")
    if arrays.tree[number] is None:
        raise InspectorError(f"Call {number} of {site!r} has no such values in this pass.")
    return arrays.tree[number]


def _arrays_of(contents: Sequence[tuple[Path, Variable, Value]]) -> list[tuple[str, AnyArray]]:
    """The arrays of the Variables of a site and the modules in it, by name."""
    found: list[tuple[str, AnyArray]] = []
    for path, _, raw in contents:
        for inner, leaf in jax.tree_util.tree_flatten_with_path(raw)[0]:
            leaf = leaf[...] if isinstance(leaf, jax.Ref) else leaf
            if isinstance(leaf, (jax.Array, np.ndarray)):
                found.append((site_key(path) + jax.tree_util.keystr(inner), leaf))
    return found


def _setting_key(setting: Setting) -> Hashable:
    data = jax.tree.leaves(setting.data)
    rows = tuple(sorted(setting.rows.items()))
    return setting.places, rows, tuple(np.asarray(x).tobytes() for x in data)


def _calling_module(calls: Sequence[TracedCall], call: TracedCall) -> str | None:
    """The site of the call of a module around an operation."""
    while call.parent is not None and split_operation(call.site)[1]:
        call = calls[call.parent]
    return None if split_operation(call.site)[1] else call.site


def module_key(site: str) -> str:
    return site_key(parse_key(site)[0])


# ------------------------------------------------------------------ in words


def _why_no_arrays(site: str, part: Part, calls: list[CallArrays]) -> str:
    if not calls:
        return (
            f"{site!r} is not called in this pass, or is inside something that cannot be entered."
            + f" nni.trace(..., only={split_operation(site)[0] + '@*'!r}) lists what is."
            * ("@" in site)
        )
    if not any(call.took_place for call in calls):
        return f"{site!r} is in a branch that this pass did not take."
    if not any(call.structure.arrays for call in calls):
        return f"{site!r} has no arrays of numbers in its {part}."
    if part == "gradient" and all(_is_discrete(call) for call in calls):
        return f"{site!r} returns no floating-point array, so it has no gradient."
    return (
        f"The values of {site!r} cannot leave the loop around it: a while loop runs as often as "
        f"the data demands, and within jax.shard_map each device has only a part."
    )


def _is_discrete(call: CallArrays) -> bool:
    texts = [call.structure.leaves[i] for i in call.structure.arrays]
    return not any(text.startswith(("float", "bfloat", "complex")) for text in texts)


def _trees_of_calls(calls: list[CallArrays], part: Part) -> tuple[Value, ...]:
    out: list[Value] = []
    for call in calls:
        present = [v for v in call.values if v is not None]
        if not call.took_place or not present:
            out.append(None)
        elif part == "input" and len(call.values) == 1:
            out.append(call.values[0])
        else:
            out.append(call.tree())
    return tuple(out)


# ------------------------------------------------------------- what is known


def batch_of(call: Call) -> int | None:
    """The length of the first axis of the pass's first array."""
    taken = Arguments.of((call.args, call.kwargs))
    shapes = [np.shape(x) for x in taken.take(taken.arrays)]
    return next((shape[0] for shape in shapes if shape), None)


def has_convolutions(modules: Iterable[object]) -> bool:
    return any(isinstance(module, CONVOLUTIONS) for module in modules)


def _sums_to_one(value: jax.Array, front: int, module: object) -> bool:
    """Whether an array holds weights that add up to 1 along its last axis.

    Of rank 3 it could be the probabilities of classes, unless it has as many keys as queries.
    """
    rank = value.ndim - front
    attends = rank == 4 or (rank == 3 and value.shape[-2] == value.shape[-1])
    if not attends or not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    if isinstance(module, CONVOLUTIONS) or value.shape[-1] < 2 or not value.size:
        return False
    least, off = jax.device_get(_check_first_rows(value))
    return bool(least >= 0 and off <= SUM_TOLERANCE)


@jax.jit
@with_auto_sharding
def _check_first_rows(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = value[(0,) * (value.ndim - 2)][:64].astype(jnp.float32)
    return rows.min(), jnp.abs(rows.sum(axis=-1) - 1).max()
