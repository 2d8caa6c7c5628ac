"""What one call of a site did, as a pytree of plain arrays.

Invariant: a quantity that was not measured is None, never zero. Does not measure anything.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from nnx_inspector._compat import jit
from nnx_inspector.errors import InspectorError
from nnx_inspector.program.changes import ChangedVariable
from nnx_inspector.program.plan import KeptArray
from nnx_inspector.program.structure import Structure
from nnx_inspector.recordings.tree_rows import leaf_key
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import PyTree, Value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a site: a summary of each array that it received and returned.

    Inside a scan the summaries have leading row axes, with one row for each iteration.

    Attributes:
        outputs: a summary of each array of the output.
        inputs: a summary of each array of the arguments, or None if inputs were not measured.
        gradients: a summary of the cotangent of each array of the output; None if it has no
            cotangent (an integer, a while loop, a pass without gradients).
        ran: how often the call took place; 0 in a branch that was not taken. Has the row axes.
        structure: the structure of the output.
        input_structure: the structure of `(args, kwargs)`, or None.
        changed: for each array of a Variable that the call changed, a summary of the new value
            minus the old.
        variables: the name, type, dtype and shape of each array in `changed`.
        loops: how many row axes the pass itself has, one for each scan around the call. The row
            axes before them are the user's (a scan over steps, a vmap over models).
        kept: the values and units kept of each array of the output, if requested.
        input_kept: the values and units kept of each array of the arguments.
        counted: for each array of the output whether only the positions count that `where=` says;
            () without it.
    """

    outputs: list[Summary]
    inputs: list[Summary] | None
    gradients: list[Summary | None]
    ran: Value
    structure: Structure = dataclasses.field(metadata={"static": True})
    input_structure: Structure | None = dataclasses.field(metadata={"static": True})
    changed: list[Summary] = dataclasses.field(default_factory=lambda: list[Summary]())
    variables: tuple[ChangedVariable, ...] = dataclasses.field(
        default=(), metadata={"static": True}
    )
    loops: int = dataclasses.field(default=0, metadata={"static": True})
    kept: list[KeptArray] = dataclasses.field(default_factory=lambda: list[KeptArray]())
    input_kept: list[KeptArray] = dataclasses.field(default_factory=lambda: list[KeptArray]())
    counted: tuple[bool, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def leading(self) -> tuple[int, ...]:
        """The shape of the user's row axes."""
        shape = np.shape(self.ran)
        return tuple(shape[: len(shape) - self.loops])

    @property
    def took_place(self) -> bool:
        """Whether the call took place at all."""
        return int(np.sum(concrete(self.ran))) > 0

    @property
    def output(self) -> PyTree:
        """The Summary of the output; for a pytree, a pytree of them (None for a non-array leaf).

        The summary of a PRNG key or a token is `opaque`: a dtype and a shape, without statistics.
        """
        return self.structure.summaries(self.outputs)

    @property
    def input(self) -> PyTree:
        """The summaries of `(args, kwargs)`, or a single Summary if they hold one array."""
        if self.inputs is None or self.input_structure is None:
            return None
        whole = self.input_structure.summaries(self.inputs)
        alone = self.inputs or [summary for _, summary in named_summaries(whole)]
        return alone[0] if len(alone) == 1 else whole

    @property
    def gradient(self) -> PyTree:
        """The summaries of the output's cotangent, or None if it has no cotangent."""
        return _tree_or_none(self.structure, [_measured_gradient(g) for g in self.gradients])

    def parts(self, site: str) -> list[tuple[str, str, Summary]]:
        """The key and quantity of each array that was measured, by quantity, main array first."""
        taken = self.input_structure
        found = [
            ("output", self.structure, self.outputs),
            ("gradient", self.structure, [_measured_gradient(g) for g in self.gradients]),
            *([("input", taken, self.inputs or [])] if taken is not None else []),
        ]
        return [
            (leaf_key(site, name), quantity, summary)
            for quantity, structure, summaries in found
            for name, summary in sorted(
                zip(structure.parts, summaries, strict=False), key=lambda part: part[0] != ""
            )
            if summary is not None
        ]

    @property
    def values(self) -> PyTree:
        """The output itself (a pytree of arrays), or what the reduction made of each array.

        None if `values=` did not ask for it, inside a while loop (whose number of iterations
        depends on the data), and inside `jax.shard_map`. Arrays have a leading axis for each scan
        around the call (one row for each iteration), then one for each vmap.
        """
        return _tree_or_none(self.structure, [k.value for k in self.kept])

    @property
    def input_values(self) -> PyTree:
        """The `values` of `(args, kwargs)`, or a single array if they hold one array."""
        return _lone_or_tree(self.input_structure, [k.value for k in self.input_kept])

    @property
    def units(self) -> PyTree:
        """The Units of the output (for a pytree, a pytree of them), or None."""
        return _tree_or_none(self.structure, [k.units for k in self.kept])

    @property
    def input_units(self) -> PyTree:
        """The `units` of `(args, kwargs)`, or a single Units if they hold one array."""
        return _lone_or_tree(self.input_structure, [k.units for k in self.input_kept])

    @property
    def changes(self) -> dict[str, Summary]:
        """How the call changed its module's Variables: name -> Summary of new value minus old.

        Names are relative to the module and include its children's Variables (`"norm/mean"`,
        `"dropout/rngs/count"`). A PRNG key, a new Variable and one whose shape changed have no
        difference and are left out; `trace` lists them too.
        """
        return {v.name: s for v, s in zip(self.variables, self.changed, strict=True)}


def _tree_or_none(structure: Structure, values: list[Value]) -> PyTree:
    return None if all(v is None for v in values) else structure.unflatten(values)


def _lone_or_tree(structure: Structure | None, values: list[Value]) -> PyTree:
    if structure is None or not values:
        return None
    return values[0] if len(values) == 1 else _tree_or_none(structure, values)


def concrete(x: np.ndarray) -> np.ndarray:
    if jit.is_tracer(x):
        raise InspectorError(
            "A record inside jit cannot be read: its values are not computed yet. Return the "
            "record from the jitted function and read it outside."
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        raise InspectorError(
            "A record from jax.eval_shape has shapes but no values. Call the function itself."
        )
    return np.asarray(jax.device_get(x))  # explicit: jax may forbid implicit transfers


def _measured_gradient(gradient: Summary | None) -> Summary | None:
    # in a branch that was not taken all counts are zeros, the size included
    if gradient is None or not concrete(gradient.bins).any():
        return None
    return gradient


def named_summaries(tree: PyTree) -> list[tuple[str, Summary]]:
    """The summaries in a pytree such as an entry's output, each with its path as text."""
    is_leaf = lambda x: isinstance(x, Summary)  # noqa: E731
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat if is_leaf(leaf)]
