"""One pass of an inspector: a call of the model, which can be taken apart into code and arrays.

Invariant: calls whose parts have equal keys have the same code, and the structure of a call holds
none of its arrays. Compiles and measures nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence

import jax
from flax import nnx

from nnx_inspector._compat.configuration import Configuration
from nnx_inspector.errors import add_note
from nnx_inspector.hooks.cache_key import cache_key
from nnx_inspector.hooks.hook import without_watching
from nnx_inspector.hooks.pytrees import dict_orders
from nnx_inspector.inspector.nnx.switches import Switches, abstract_view
from nnx_inspector.inspector.passes.entry import Entry
from nnx_inspector.program.function import Arguments, ModuleFunction
from nnx_inspector.program.stage import StateStructure
from nnx_inspector.typing import Args, GraphDef, Kwargs, PyTree, Value

NO_SWITCHES = Switches()
DEFAULT_ENTRY = Entry()


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of the model through its entry, by default `model(*args, **kwargs)`.

    With a loss function it is a forward and backward pass of `loss_fn(model, *args, **kwargs)`,
    which returns the loss or `(loss, aux)`. It keeps the jax settings of the thread that requested
    it.
    """

    model: nnx.Module
    args: tuple[Value, ...]
    kwargs: Kwargs
    loss_fn: Callable[..., PyTree] | None = None
    switches: Switches = NO_SWITCHES
    configuration: Configuration = dataclasses.field(default_factory=Configuration.current)
    entry: Entry = DEFAULT_ENTRY

    def has_model_of(self, other: Call) -> bool:
        """Whether two calls with the same arguments have the same model and modes."""
        return self.model is other.model and self.switches == other.switches

    @functools.cached_property
    def parts(self) -> CallParts:
        """The parts of the call, taken once for several passes of one moment."""
        arguments = Arguments.of((self.model, self.args, self.kwargs))
        graphdef, state = nnx.split(arguments.take(arguments.nodes), graph=True)
        held, leaves = StateStructure.of(state)
        empty = dataclasses.replace(arguments, leaves=without_arrays(arguments))
        code = cache_key((self.loss_fn, self.entry, graphdef, empty.leaves, held.others))
        structure = CallStructure(graphdef, held, empty, self.loss_fn, self.switches, self.entry)
        key = (code, empty.treedef, dict_orders(empty.numbered), held.treedef, self.switches)
        return CallParts(structure, key, leaves, arguments.take(arguments.arrays))

    @property
    def arrays(self) -> tuple[list[Value], Args]:
        """The arrays of the model, then those of the arguments."""
        return self.parts.leaves, self.parts.arrays

    @functools.cached_property
    def in_modes(self) -> Call:
        """The call of the model in its modes: itself, or with shapes in place of the arrays."""
        if not self.switches:
            return self
        own = Arguments.of((self.model, self.args, self.kwargs))
        nodes, _ = abstract_view(own.take(own.nodes), self.switches, lambda model: None)
        model, args, kwargs = own.rebuild(nodes, own.take(own.arrays))
        return dataclasses.replace(self, model=model, args=args, kwargs=kwargs)

    def copied(self) -> Call:
        """The same call on a copy of the model (and of other modules among the arguments), in its
        modes.

        Raises:
            RuntimeError: an array of the model was donated to a running program.
        """
        leaves = [x.copy() if isinstance(x, jax.Array) else x for x in self.parts.leaves]
        copy = self.parts.structure.call(leaves, self.parts.arrays)
        return dataclasses.replace(copy, switches=NO_SWITCHES, configuration=self.configuration)

    def raise_jax_error(self, found: str) -> None:
        """Call a copy as the user would without an inspector, so that jax raises its own error.

        Args:
            found: the known cause, added to the error as a note.
        """
        copy = self.copied()
        (function, args, kwargs), of_a_loss = copy.function(), copy.loss_fn is not None

        def loss(*args: object, **kwargs: object) -> PyTree:
            value = function.call(*args, **kwargs)
            return value[0] if isinstance(value, tuple) else value

        try:
            with self.configuration.applied(), without_watching():
                (nnx.value_and_grad(loss) if of_a_loss else function.call)(*args, **kwargs)
        except FloatingPointError as error:
            add_note(error, found)
            raise

    def function(self) -> tuple[ModuleFunction, Args, Kwargs]:
        if self.loss_fn is None:
            return self.entry.call(self.model, self.args, self.kwargs)
        return ModuleFunction(self.loss_fn), (self.model, *self.args), self.kwargs


@dataclasses.dataclass(frozen=True)
class CallStructure:
    """A call without its arrays."""

    graphdef: GraphDef
    state: StateStructure
    arguments: Arguments
    loss_fn: Callable[..., PyTree] | None
    switches: Switches
    entry: Entry

    def call(self, leaves: Sequence[Value], arrays: Sequence[Value]) -> Call:
        """The call on a copy of the model with these leaves, in its modes."""
        nodes = nnx.merge(self.graphdef, self.state.with_arrays(leaves))
        model, args, kwargs = self.arguments.rebuild(nodes, arrays)
        self.switches.apply(model)
        return Call(model, args, kwargs, self.loss_fn, self.switches, entry=self.entry)


@dataclasses.dataclass(frozen=True)
class CallParts:
    """A call taken apart into its code, a hashable key of the code, and its arrays."""

    structure: CallStructure
    key: tuple[Hashable, ...]
    leaves: list[Value]
    arrays: tuple[Value, ...]


def without_arrays(arguments: Arguments) -> Args:
    """The leaves without models and arrays, which a compiled program must not keep alive."""
    dynamic = {*arguments.nodes, *arguments.arrays}
    return tuple(None if i in dynamic else leaf for i, leaf in enumerate(arguments.leaves))
