"""A record of one pass, site by site: a mapping, and a JAX pytree of plain arrays.

The calls of a site are kept separately; `.output`, `.input` and `.gradient` merge them when read.
Invariant: a quantity that was not measured is None (or absent from the mapping), never zero.
Does not measure anything and does not know the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from nnx_inspector._compat.jit import is_tracer
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.globs import split_escaped
from nnx_inspector.hooks.sites import closest_keys, split_operation
from nnx_inspector.program.editing.packed import (
    PackedArray,
    can_pack,
    pack,
    unpack,
    without_packing,
)
from nnx_inspector.recordings.tree_rows import Summaries, layer_key, merged_summary
from nnx_inspector.records.call import Call, concrete, named_summaries
from nnx_inspector.stats.summary import STATISTICS, Summary, merge, row_index
from nnx_inspector.stats.units import Units, merge_units
from nnx_inspector.typing import PyTree, Value

if TYPE_CHECKING:
    import pandas as pd

_MAX_PRINTED = 12
"""How many sites a record prints."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter array of a model in one pass.

    Attributes:
        value: the Summary of its value before the step.
        gradient: the Summary of the loss's gradient, or None if the parameter was not
            differentiated.
        update: the Summary of what the optimizer would add, or None without an optimizer.
    """

    value: Summary
    gradient: Summary | None = None
    update: Summary | None = None

    @property
    def update_ratio(self) -> float | None:
        """The norm of the update divided by the norm of the value; about 1e-3 is usual.

        None without an optimizer, and for a parameter that is all zeros.
        """
        if self.update is None or not self.value.norm:
            return None
        return float(self.update.norm / self.value.norm)

    def recorded(self) -> dict[str, Summary | None]:
        """What a recording keeps of it, by quantity."""
        gradient = None if self.gradient is None else self.gradient.merged()
        return {"parameter": self.value.merged(), "parameter_gradient": gradient}

    def summaries(self) -> dict[str, Summary]:
        """The measured summaries, by name."""
        named = {
            "parameter": self.value,
            "parameter gradient": self.gradient,
            "update": self.update,
        }
        return {name: summary for name, summary in named.items() if summary is not None}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One site of a record. `.calls[i]` is a single call; the other attributes merge all calls."""

    key: str
    calls: tuple[Call, ...]

    def _merged(
        self, part: str, kind: type = Summary, add: Callable[..., object] = merge
    ) -> PyTree:
        values = [getattr(call, part) for call in self.calls if call.took_place]
        values = [v for v in values if v is not None]
        if not values:
            return None
        is_leaf = lambda x: x is None or isinstance(x, kind)  # noqa: E731
        trees = [jax.tree.flatten(v, is_leaf=is_leaf) for v in values]
        if any(tree[1] != trees[0][1] for tree in trees):
            many = f"{part.removesuffix('s')}s"
            raise InspectorError(
                f"The calls of {self.key!r} have {many} of different structures "
                f"({self.forms(part)}), which cannot be merged. Read each call: "
                f"record[{self.key!r}].calls[0].{part}."
            )
        merged = [
            add([s for s in column if s is not None])
            if any(s is not None for s in column)
            else None
            for column in zip(*(tree[0] for tree in trees), strict=True)
        ]
        return jax.tree.unflatten(trees[0][1], merged)

    def forms(self, part: str = "output") -> str:
        """The different structures of a part in its calls, in words."""
        of_input = part.startswith("input")
        structures = [c.input_structure if of_input else c.structure for c in self.calls]
        return " and ".join(dict.fromkeys(map(str, structures)))

    def named(self, part: str) -> list[tuple[str, Summary]]:
        """The summaries of a part, each with its path within the call's pytree.

        Those of all calls are merged by their paths: the pytrees of two calls may differ.
        """
        found: dict[tuple[str, str], list[Summary]] = {}  # a key and numbers do not add up
        for call in self.calls:
            if call.took_place:
                for path, summary in named_summaries(getattr(call, part)):
                    found.setdefault((path, summary.opaque), []).append(summary)
        return [(path, merge(summaries)) for (path, _), summaries in found.items()]

    @property
    def output(self) -> PyTree:
        """The Summary of the outputs of all calls (for a pytree, a pytree of them)."""
        return self._merged("output")

    @property
    def input(self) -> PyTree:
        """The Summary of what the method received, or None if inputs were not measured."""
        return self._merged("input")

    @property
    def gradient(self) -> PyTree:
        """The Summary of the gradient of the output, or None if there is none."""
        return self._merged("gradient")

    @property
    def changes(self) -> dict[str, Summary]:
        """How a call changed its module's Variables, merged over the calls that changed them.

        The total change over all calls is the sum of `calls[i].changes`.
        """
        found: dict[str, list[Summary]] = {}
        for call in self.calls:
            if call.took_place:
                for name, summary in call.changes.items():
                    found.setdefault(name, []).append(summary)
        return {name: merge(summaries) for name, summaries in found.items()}

    @property
    def values(self) -> PyTree:
        """The values kept of the output of the only call; see `Call.values`.

        Raises:
            InspectorError: the site was called several times, or no values were kept.
        """
        return self._of_only_call("values")

    @property
    def input_values(self) -> PyTree:
        """The values kept of the arguments of the only call; see `values`."""
        return self._of_only_call("input_values")

    @property
    def counted(self) -> bool | None:
        """Whether only the positions count that `where=` says: False if any array of the output
        does not have them as its first axes, and is measured whole. None without `where=`.
        """
        found = [fits for call in self.calls if call.took_place for fits in call.counted]
        return all(found) if found else None

    def _of_only_call(self, part: str) -> PyTree:
        calls = [call for call in self.calls if call.took_place]
        if len(calls) > 1:
            raise InspectorError(
                f"{self.key!r} was called {len(calls)} times, and the values of several calls "
                f"cannot be merged. Read each call: record[{self.key!r}].calls[0].{part}."
            )
        found = getattr(calls[0], part) if calls else None
        if found is None:
            raise InspectorError(
                f"No {part} of {self.key!r} were kept. Pass values=True, or a function of an "
                f"array, to keep them; inside a while loop or jax.shard_map none can be kept."
            )
        return found

    @property
    def units(self) -> PyTree:
        """The Units of the outputs of all calls (for a pytree, a pytree of them), or None."""
        return self._merged("units", Units, functools.partial(self._merged_units, "units"))

    @property
    def input_units(self) -> PyTree:
        """The Units of what the method received, or None."""
        part = "input_units"
        return self._merged(part, Units, functools.partial(self._merged_units, part))

    def _merged_units(self, part: str, found: Sequence[Units]) -> Units:
        kinds = dict.fromkeys(f"{len(one)} of {one.points.dtype}" for one in found)
        if len(kinds) > 1:
            raise InspectorError(
                f"The calls of {self.key!r} have different units ({' and '.join(kinds)}), which "
                f"cannot be merged. Read each call: record[{self.key!r}].calls[0].{part}."
            )
        return merge_units([one.merged() for one in found])  # the calls' rows may differ

    @property
    def rows(self) -> int:
        """The number of rows (iterations of a scan, layers of a stack) of its calls, 0 for none.

        The rows that the user's own scan or vmap adds are not counted: see `Record.rows`.
        """
        return max((np.shape(c.ran)[len(c.leading)] for c in self.calls if c.loops), default=0)

    def row(self, index: int) -> Entry:
        """The entry of one layer of a stacked module (one iteration of a scan).

        Calls outside the scan have no layers and are left out.
        """
        if not -self.rows <= index < self.rows:
            raise IndexError(f"{self.key!r} has {self.rows} rows, but no row {index}.")
        calls = [c for c in self.calls if c.loops and np.shape(c.ran)[len(c.leading)] == self.rows]
        return Entry(layer_key(self.key, index), tuple(_call_row(c, index) for c in calls))


def _call_row(call: Call, index: int) -> Call:
    at = (*[slice(None)] * len(call.leading), index)
    return dataclasses.replace(jax.tree.map(lambda x: x[at], call), loops=call.loops - 1)


class Record(Mapping[str, Entry]):
    """One pass: site key -> entry. A pytree; `jax.device_get(record)` brings it to the host.

    A scan over steps or a vmap returns one record with `rows`, and `row(i)` is one pass of it.

    Attributes:
        unseen: the sites that could not be read, each with the reason.
        eager: why the pass ran line by line instead of being traced; `""` if it was traced.
    """

    def __init__(
        self,
        calls: Mapping[str, Sequence[Call]],
        unseen: Mapping[str, str],
        parameters: Mapping[str, Parameter] | None = None,
        choices: Mapping[str, Sequence[Value]] | None = None,
        *,
        eager: str = "",
    ):
        self.unseen = dict(unseen)
        self.eager = eager
        self._keys = tuple(calls)
        rows = {site: [PackedArray(x) for x in found] for site, found in (choices or {}).items()}
        tree = (tuple(map(tuple, calls.values())), dict(parameters or {}), rows)
        # It leaves its program as one array, because each costs the host time.
        if not eager and can_pack(tree):
            self._layout, self._children = pack(tree)
        else:
            self._layout, self._children = None, without_packing(tree)

    @property
    def _contents(
        self,
    ) -> tuple[dict[str, tuple[Call, ...]], dict[str, Parameter], dict[str, list[Value]]]:
        known = self.__dict__.get("_known")
        if known is None:
            tree = self._children
            if self._layout is not None:
                tree = unpack(self._layout, self._children)
            calls, *others = tree
            known = dict(zip(self._keys, calls, strict=True)), *others
            if not any(map(is_tracer, jax.tree.leaves(self._children))):
                self._known = known  # tracers belong to the trace in which they were cut out
        return known

    @property
    def _calls(self) -> dict[str, tuple[Call, ...]]:
        return self._contents[0]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The model's parameters by path (`"blocks/0/attn/kernel"`), if asked for."""
        return self._contents[1]

    @property
    def choices(self) -> dict[str, list[Value]]:
        """The softmaxes that choose, by site (`"attn@attention"`): for each call of it a row for
        each head of the attention; see `stats.choices.rows`.
        """
        return self._contents[2]

    def __getitem__(self, key: str) -> Entry:
        if key in self._calls:
            return Entry(key, self._calls[key])
        called, operation = split_operation(key)
        head, *index = split_escaped(called, "[")
        whole = head + operation
        if index and whole in self._calls and index[0].rstrip("]").lstrip("-").isdigit():
            return Entry(whole, self._calls[whole]).row(int(index[0].rstrip("]")))
        if key in self.unseen:
            raise KeyError(f"{key!r} could not be read: {self.unseen[key]}.")
        near = ", ".join(repr(k) for k in closest_keys(key, list(self._calls)))
        raise KeyError(f"{key!r} is not in this record. The closest sites are {near or 'none'}.")

    @property
    def rows(self) -> tuple[int, ...]:
        """The leading axes of a stacked record: the steps of a scan, the members of a vmap.

        `()` for the record of one pass. The figures of a stacked record cover all of its passes.
        """
        shapes = {call.leading for calls in self._calls.values() for call in calls}
        return shapes.pop() if len(shapes) == 1 else ()

    def row(self, index: int | tuple[int, ...]) -> Record:
        """The record of one pass of a stacked record; of several, given fewer indices than axes.

        Raises:
            IndexError: there is no such row.
        """
        indices = row_index(index, self.rows, "a record")
        return jax.tree.map(lambda x: x[indices], self)

    def __contains__(self, key: object) -> bool:
        return key in self._calls

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        sites = ", ".join(repr(k) for k in list(self._calls)[:_MAX_PRINTED])
        more = f", ... {len(self) - _MAX_PRINTED} more" if len(self) > _MAX_PRINTED else ""
        unseen = f"; unseen: {sorted(self.unseen)}" if self.unseen else ""
        eager = "; ran eagerly" if self.eager else ""
        return f"Record({len(self)} sites: {sites}{more}{unseen}{eager})"

    def to_frame(self) -> pd.DataFrame:
        """A tidy pandas frame, one row for each site, quantity and array.

        Columns: `site, quantity, array, calls, size, mean, std, min, max, norm, zeros, nan,
        posinf, neginf`. `quantity` is `output`, `input`, `gradient` or `change`. `array` is the
        leaf's path within a pytree, `""` for a single array, and a Variable's name for a change.
        Parameters follow, if there are any: `site` is the module, `array` the name within it, and
        `quantity` is `parameter`, `parameter gradient` or `update`.
        """
        import pandas as pd

        rows = []
        for key in self:
            entry = self[key]
            measured = ("output", "input", "gradient")
            parts = {q: entry.named(q) for q in measured}
            parts["change"] = list(entry.changes.items())
            for quantity, found in parts.items():
                for path, summary in found:
                    rows.append(
                        {
                            "site": key,
                            "quantity": quantity,
                            "array": path,
                            "calls": int(sum(np.sum(concrete(c.ran)) for c in entry.calls)),
                            **statistics_of(summary),
                        }
                    )
        for key, parameter in self.parameters.items():
            *path, name = split_escaped(key, "/")
            for quantity, summary in parameter.summaries().items():
                row = {"site": "/".join(path), "quantity": quantity, "array": name, "calls": 1}
                rows.append({**row, **statistics_of(summary)})
        columns = ["site", "quantity", "array", "calls", *statistics_of(None)]
        return pd.DataFrame(rows, columns=columns)

    def merged(self) -> dict[str, dict[str, Summary]]:
        """The measured output, gradient and input of each site, over all of its calls.

        Of a call that returns several arrays, each has a key of its own; see
        `recordings.tree_rows`.
        """
        out: dict[str, dict[str, Summary]] = {}
        for site in self:
            found: dict[str, dict[str, list[Summary]]] = {}
            for call in self._calls[site]:
                for key, quantity, summary in call.parts(site) if call.took_place else ():
                    found.setdefault(key, {}).setdefault(quantity, []).append(summary)
            for key, of in found.items():
                out[key] = {quantity: merge(summaries) for quantity, summaries in of.items()}
        return out


def layers_of(record: Record, stacks: Mapping[str, int]) -> Summaries:
    """The output, gradient and input of the first layers of stacked sites, if they were measured.
    They add up to the summaries of the sites, and no value is counted in two layers.

    `stacks` maps a site to how many of its layers to return.
    """
    out: Summaries = {}
    for site, most in stacks.items():
        calls = record[site].calls if site in record else ()
        lengths = {np.shape(c.ran)[0] if c.loops and not c.leading else 0 for c in calls}
        length = lengths.pop() if len(lengths) == 1 else 0  # else some calls belong to no layer
        parts = [
            (np.asarray(call.ran), *part)
            for call in (calls if length else ())
            for part in call.parts(site)
        ]
        for layer in range(min(most, length)):
            found: dict[tuple[str, str], list[Summary]] = {}
            for ran, key, quantity, summary in parts:
                row = summary.row(layer)
                # a layer that no cotangent reached has an empty row
                if np.any(ran[layer]) and (quantity != "gradient" or np.any(row.bins)):
                    found.setdefault((layer_key(key, layer), quantity), []).append(row)
            for (key, quantity), rows in found.items():
                out.setdefault(key, {})[quantity] = merged_summary(rows)
    return out


def statistics_of(summary: Summary | None) -> dict[str, float | None]:
    """The statistics of a summary by name, in the order of `STATISTICS`."""
    return {name: None if summary is None else getattr(summary, name) for name in STATISTICS}


def _flatten(record: Record) -> tuple[tuple[PyTree, ...], tuple[object, ...]]:
    unseen = tuple(sorted(record.unseen.items()))
    aux = (record._keys, unseen, record.eager, record._layout)
    return tuple(record._children), aux


def _flatten_with_keys(record: Record) -> tuple[tuple[PyTree, ...], tuple[object, ...]]:
    children, aux = _flatten(record)
    first = "words" if record._layout is not None else "calls"
    rest = [jax.tree_util.SequenceKey(i) for i in range(len(children) - 1)]
    names = [jax.tree_util.GetAttrKey(first), *rest]
    return tuple(zip(names, children, strict=True)), aux


def _unflatten(aux: PyTree, children: object) -> Record:
    made = Record.__new__(Record)  # unchecked: jax also fills trees with other objects
    made._keys, unseen, made.eager, made._layout = aux
    made.unseen, made._children = dict(unseen), children
    return made


jax.tree_util.register_pytree_with_keys(Record, _flatten_with_keys, _unflatten, _flatten)
