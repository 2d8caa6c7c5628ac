"""What one call of a site did, as a pytree of plain arrays.

Invariant: what was not measured is None, never a zero. Does not measure anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from nnx_inspector._compat import jit
from nnx_inspector.errors import InspectorError
from nnx_inspector.program.changes import ChangedVariable
from nnx_inspector.program.harvest import Kept
from nnx_inspector.program.marks import Structure
from nnx_inspector.stats.summary import Summary


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
        kept: for each array of the output what was kept of it besides, where that was asked for.
        input_kept: likewise of the arguments.
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
    kept: list[Kept] = dataclasses.field(default_factory=lambda: list[Kept]())
    input_kept: list[Kept] = dataclasses.field(default_factory=lambda: list[Kept]())

    @property
    def leading(self) -> tuple[int, ...]:
        """The shape of the row axes that are the user's."""
        shape = np.shape(self.ran)
        return tuple(shape[: len(shape) - self.loops])

    @property
    def took_place(self) -> bool:
        """Whether the call took place at all."""
        return int(np.sum(concrete(self.ran))) > 0

    @property
    def output(self) -> Any:
        """A Summary, or for a pytree a pytree of them (None for what is no array).

        Of a PRNG key or a token it says dtype and shape (`Summary.opaque`), and has no figures.
        """
        return self.structure.summaries(self.outputs)

    @property
    def input(self) -> Any:
        """The summaries of `(args, kwargs)`; of a call with one array alone, its Summary."""
        if self.inputs is None or self.input_structure is None:
            return None
        whole = self.input_structure.summaries(self.inputs)
        alone = self.inputs or [summary for _, summary in named_summaries(whole)]
        return alone[0] if len(alone) == 1 else whole

    @property
    def gradient(self) -> Any:
        """The summaries of the output's cotangent, or None where there is none."""
        return _tree(self.structure, [_measured(g) for g in self.gradients])

    @property
    def values(self) -> Any:
        """The output itself (a pytree of arrays), or what a reduction made of each of its arrays.

        None where `values=` did not ask for it, within a while loop, which runs a number of times
        that only the data knows, and within `jax.shard_map`. Arrays have a leading axis for each
        scan around the call (one row an iteration), and then one for each vmap.
        """
        return _tree(self.structure, [k.value for k in self.kept])

    @property
    def input_values(self) -> Any:
        """As `values`, of `(args, kwargs)`; of a call with one array alone, that array."""
        return _lone_or_tree(self.input_structure, [k.value for k in self.input_kept])

    @property
    def units(self) -> Any:
        """The figures for each unit of the output (for a pytree a pytree of them), or None."""
        return _tree(self.structure, [k.units for k in self.kept])

    @property
    def input_units(self) -> Any:
        """As `units`, of `(args, kwargs)`; of a call with one array alone, its Units."""
        return _lone_or_tree(self.input_structure, [k.units for k in self.input_kept])

    @property
    def changes(self) -> dict[str, Summary]:
        """By how much the call changed its module's Variables: name -> Summary of new less old.

        Names are relative to the module, children's Variables included (`"norm/mean"`,
        `"dropout/rngs/count"`). A PRNG key, and a Variable that is new or has another shape, have
        no difference; `trace` lists those too.
        """
        return {v.name: s for v, s in zip(self.variables, self.changed, strict=True)}


def _tree(structure: Structure, values: list[Any]) -> Any:
    return None if all(v is None for v in values) else structure.unflatten(values)


def _lone_or_tree(structure: Structure | None, values: list[Any]) -> Any:
    if structure is None or not values:
        return None
    return values[0] if len(values) == 1 else _tree(structure, values)


def concrete(x: Any) -> np.ndarray:
    if jit.is_tracer(x):
        raise InspectorError(
            "A record inside jit cannot be read: its figures are not known yet. Return the record "
            "from the jitted function and read it outside."
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        raise InspectorError(
            "A record out of jax.eval_shape has shapes and no figures. Call the function itself."
        )
    return np.asarray(jax.device_get(x))  # explicit: jax may forbid implicit transfers


def _measured(gradient: Summary | None) -> Summary | None:
    # no cotangent ever reached the tap: its sink is still zero, and says so by its size
    if gradient is None or not concrete(gradient.bins).any():
        return None
    return gradient


def named_summaries(tree: Any) -> list[tuple[str, Summary]]:
    """The summaries in an entry's output (or input, gradient), each with its path as text."""
    is_leaf = lambda x: isinstance(x, Summary)  # noqa: E731
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat if is_leaf(leaf)]
