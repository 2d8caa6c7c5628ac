"""A record: what one pass saw, site by site. A mapping, and a JAX pytree of plain arrays.

Each call of a site is kept apart; `.output`, `.input` and `.gradient` merge them when they are
read. Invariant: what was not measured is None (or absent from the mapping), never a zero.
Does not measure anything and knows no model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nnx_inspector import _private
from nnx_inspector.changes import ChangedVariable
from nnx_inspector.errors import InspectorError
from nnx_inspector.sites import closest, split_escaped
from nnx_inspector.summary import Summary, merge
from nnx_inspector.taps import Structure

if TYPE_CHECKING:
    import pandas as pd


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a site: the summaries of each array that went in and came out.

    Summaries have leading row axes where the call sat inside a scan, one row an iteration.

    Attributes:
        outputs: one summary for each array of the output.
        inputs: likewise of the arguments, or None where inputs were not measured.
        gradients: for each array of the output the summary of its cotangent; None where it has
            none (an integer, a while loop, a pass without gradients).
        ran: how often the call took place; 0 in a branch that was not taken. Rows as above.
        structure: of the output.
        input_structure: of `(args, kwargs)`, or None.
        changed: for each array of a Variable that the call changed the summary of the new value
            less the old.
        variables: what they are, by name, type, dtype and shape.
        loops: how many row axes the pass itself has, one for each scan around the call. Those
            before them are the user's (a scan over steps, a vmap over models).
    """

    outputs: list[Summary]
    inputs: list[Summary] | None
    gradients: list[Summary | None]
    ran: Any
    structure: Structure = dataclasses.field(metadata={"static": True})
    input_structure: Structure | None = dataclasses.field(metadata={"static": True})
    changed: list[Summary] = dataclasses.field(default_factory=lambda: list[Summary]())
    variables: tuple[ChangedVariable, ...] = dataclasses.field(
        default=(), metadata={"static": True}
    )
    loops: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def leading(self) -> tuple[int, ...]:
        """The shape of the row axes that are the user's."""
        shape = np.shape(self.ran)
        return tuple(shape[: len(shape) - self.loops])

    @property
    def took_place(self) -> bool:
        """Whether the call took place at all."""
        return int(np.sum(_concrete(self.ran))) > 0

    @property
    def output(self) -> Any:
        """A Summary, or for a pytree a pytree of them (None for what is no array)."""
        return self.structure.unflatten(self.outputs)

    @property
    def input(self) -> Any:
        """The summaries of `(args, kwargs)`; of a call with one array alone, its Summary."""
        if self.inputs is None or self.input_structure is None:
            return None
        if len(self.inputs) == 1:
            return self.inputs[0]
        return self.input_structure.unflatten(self.inputs)

    @property
    def gradient(self) -> Any:
        """The summaries of the output's cotangent, or None where there is none."""
        measured = [_measured(g) for g in self.gradients]
        if all(g is None for g in measured):
            return None
        return self.structure.unflatten(measured)

    @property
    def changes(self) -> dict[str, Summary]:
        """By how much the call changed its module's Variables: name -> Summary of new less old.

        Names are relative to the module, children's Variables included (`"norm/mean"`,
        `"dropout/rngs/count"`). A PRNG key, and a Variable that is new or has another shape, have
        no difference; `trace` lists those too.
        """
        return {v.name: s for v, s in zip(self.variables, self.changed, strict=True)}


def _concrete(x: Any) -> np.ndarray:
    if _private.is_tracer(x):
        raise InspectorError(
            "A record inside jit cannot be read: its figures are not known yet. Return the record "
            "from the jitted function and read it outside."
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        raise InspectorError(
            "A record out of jax.eval_shape has shapes and no figures. Call the function itself."
        )
    return np.asarray(x)


def _measured(gradient: Summary | None) -> Summary | None:
    # no cotangent ever reached the tap: its sink is still zero, and says so by its size
    if gradient is None or not _concrete(gradient.bins).any():
        return None
    return gradient


@dataclasses.dataclass(frozen=True)
class Entry:
    """One site of a record. `.calls[i]` is each call apart; the rest is merged over them."""

    key: str
    calls: tuple[Call, ...]

    def _merged(self, part: str) -> Any:
        values = [getattr(call, part) for call in self.calls if call.took_place]
        values = [v for v in values if v is not None]
        if not values:
            return None
        is_leaf = lambda x: x is None or isinstance(x, Summary)  # noqa: E731
        trees = [jax.tree.flatten(v, is_leaf=is_leaf) for v in values]
        if any(tree[1] != trees[0][1] for tree in trees):
            shapes = " and ".join(dict.fromkeys(str(c.structure) for c in self.calls))
            raise InspectorError(
                f"The calls of {self.key!r} have {part}s of unlike structure ({shapes}), which "
                f"do not add up. Read them apart: record[{self.key!r}].calls[0].{part}."
            )
        merged = [
            merge([s for s in column if s is not None])
            if any(s is not None for s in column)
            else None
            for column in zip(*(tree[0] for tree in trees), strict=True)
        ]
        return jax.tree.unflatten(trees[0][1], merged)

    @property
    def output(self) -> Any:
        """The Summary of the outputs of all calls (a pytree of them for a pytree)."""
        return self._merged("output")

    @property
    def input(self) -> Any:
        """The Summary of what the method received, or None where inputs were not measured."""
        return self._merged("input")

    @property
    def gradient(self) -> Any:
        """The Summary of the gradient of the output, or None where there is none."""
        return self._merged("gradient")

    @property
    def changes(self) -> dict[str, Summary]:
        """By how much a call changed its module's Variables, merged over the calls that did.

        For what all calls together changed, add up `calls[i].changes`.
        """
        found: dict[str, list[Summary]] = {}
        for call in self.calls:
            if call.took_place:
                for name, summary in call.changes.items():
                    found.setdefault(name, []).append(summary)
        return {name: merge(summaries) for name, summaries in found.items()}

    @property
    def rows(self) -> int:
        """How many rows (iterations of a scan, layers of a stack) its calls have; 0: none.

        Not those that the user's own scan or vmap adds to the record: see `Record.rows`.
        """
        return max((np.shape(c.ran)[len(c.leading)] for c in self.calls if c.loops), default=0)

    def row(self, index: int) -> Entry:
        """The entry of one layer of a stacked module (one iteration of a scan).

        Of calls outside of the scan nothing is known by layer: they are left out.
        """
        if not -self.rows <= index < self.rows:
            raise IndexError(f"{self.key!r} has {self.rows} rows, there is no row {index}.")
        calls = [c for c in self.calls if c.loops and np.shape(c.ran)[len(c.leading)] == self.rows]
        return Entry(f"{self.key}[{index}]", tuple(_row_of(c, index) for c in calls))


def _row_of(call: Call, index: int) -> Call:
    at = (*[slice(None)] * len(call.leading), index)
    return dataclasses.replace(jax.tree.map(lambda x: x[at], call), loops=call.loops - 1)


class Record(Mapping[str, Entry]):
    """One pass: site key -> entry. A pytree; `jax.device_get(record)` brings it to the host.

    Out of a scan over steps or a vmap comes one record with `rows`, of which `row(i)` is one pass.

    Attributes:
        unseen: sites that could not be read, each with the reason.
    """

    def __init__(self, calls: Mapping[str, Sequence[Call]], unseen: Mapping[str, str]):
        self._calls = {key: tuple(value) for key, value in calls.items()}
        self.unseen = dict(unseen)

    def __getitem__(self, key: str) -> Entry:
        if key in self._calls:
            return Entry(key, self._calls[key])
        head, *index = split_escaped(key, "[")
        if index and head in self._calls and index[0].rstrip("]").lstrip("-").isdigit():
            return Entry(head, self._calls[head]).row(int(index[0].rstrip("]")))
        if key in self.unseen:
            raise KeyError(f"{key!r} could not be read: {self.unseen[key]}.")
        near = ", ".join(repr(k) for k in closest(key, list(self._calls)))
        raise KeyError(f"{key!r} is not in this record. The closest sites are {near or 'none'}.")

    @property
    def rows(self) -> tuple[int, ...]:
        """The leading axes of a stacked record: the steps of a scan, the members of a vmap.

        `()` for the record of one pass. A stacked record reads as all of its passes together.
        """
        shapes = {call.leading for calls in self._calls.values() for call in calls}
        return shapes.pop() if len(shapes) == 1 else ()

    def row(self, index: int | tuple[int, ...]) -> Record:
        """The record of one pass of a stacked record, or with fewer indices than axes of several.

        Raises:
            IndexError: There is no such row.
        """
        indices = index if isinstance(index, tuple) else (index,)
        rows = self.rows
        if len(indices) > len(rows) or any(
            not -n <= i < n for i, n in zip(indices, rows, strict=False)
        ):
            raise IndexError(f"row {index} of a record with rows {rows}")
        return jax.tree.map(lambda x: x[indices], self)

    def __contains__(self, key: object) -> bool:
        return key in self._calls

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        sites = ", ".join(repr(k) for k in list(self._calls)[:4])
        more = f", ... {len(self) - 4} more" if len(self) > 4 else ""
        unseen = f"; unseen: {sorted(self.unseen)}" if self.unseen else ""
        return f"Record({len(self)} sites: {sites}{more}{unseen})"

    def to_frame(self) -> pd.DataFrame:
        """A tidy pandas frame, one row a site, quantity and array.

        Columns: `site, quantity, array, calls, size, mean, std, min, max, norm, zeros, nan,
        posinf, neginf`; `quantity` is `output`, `input`, `gradient` or `change`; `array` is the
        leaf's path within a pytree output, `""` for a lone array, of a change the Variable's name.
        """
        import pandas as pd

        rows = []
        for key in self:
            entry = self[key]
            measured = ("output", "input", "gradient")
            parts = {q: named_summaries(getattr(entry, q)) for q in measured}
            parts["change"] = list(entry.changes.items())
            for quantity, found in parts.items():
                for path, summary in found:
                    rows.append(
                        {
                            "site": key,
                            "quantity": quantity,
                            "array": path,
                            "calls": int(sum(np.sum(_concrete(c.ran)) for c in entry.calls)),
                            **figures(summary),
                        }
                    )
        columns = ["site", "quantity", "array", "calls", *figures(None)]
        return pd.DataFrame(rows, columns=columns)


def named_summaries(tree: Any) -> list[tuple[str, Summary]]:
    """The summaries in an entry's output (or input, gradient), each with its path as text."""
    is_leaf = lambda x: isinstance(x, Summary)  # noqa: E731
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat if is_leaf(leaf)]


def merged_summaries(record: Record) -> dict[str, dict[str, Summary]]:
    """For each site its output, gradient and input as one summary each, what is measured.

    A pytree's arrays are merged into one: the site's figure on screen.
    """
    out: dict[str, dict[str, Summary]] = {}
    for key in record:
        for quantity in ("output", "gradient", "input"):
            parts = [
                s
                for c in record._calls[key]
                if c.took_place
                for _, s in named_summaries(getattr(c, quantity))
            ]
            if parts:
                out.setdefault(key, {})[quantity] = merge(parts)
    return out


def figures(summary: Summary | None) -> dict[str, Any]:
    """The figures of a summary by name, in the order of the protocol's statistics."""
    from nnx_inspector.protocol import STATISTICS

    return {name: None if summary is None else getattr(summary, name) for name in STATISTICS}


def _flatten(record: Record) -> tuple[Any, Any]:
    keys = tuple(record._calls)
    return (
        tuple(record._calls[key] for key in keys),
        (keys, tuple(sorted(record.unseen.items()))),
    )


def _flatten_with_keys(record: Record) -> tuple[Any, Any]:
    children, aux = _flatten(record)
    names = [jax.tree_util.DictKey(key) for key in aux[0]]
    return tuple(zip(names, children, strict=True)), aux


def _unflatten(aux: Any, children: Any) -> Record:
    keys, unseen = aux
    return Record(dict(zip(keys, children, strict=True)), dict(unseen))


jax.tree_util.register_pytree_with_keys(Record, _flatten_with_keys, _unflatten, _flatten)
