"""Passes over a model in programs of our own: nothing of the model changes, every site has a row.

A forward pass, or a forward and backward pass of a loss, is traced and compiled once for each
structure of model and arguments and for each set of modes, which are switched on the program's own
copy of the model; the perturbation of every site is an argument of it. Invariant: switching or
tuning a perturbation runs the same program, and the clean pass is that program with rows of zeros.
The model, its RNG streams, statistics and optimizer stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector.capturing import marking_layers, record_of
from nnx_inspector.harvest import Plan, evaluate, sinks_for
from nnx_inspector.perturbation import ROW, apply
from nnx_inspector.record import Record
from nnx_inspector.sites import Selection
from nnx_inspector.staging import Arguments, Function, Staged, as_function, staged
from nnx_inspector.survey import Marked
from nnx_inspector.switching import Switches, exactly
from nnx_inspector.taps import OUTPUT
from nnx_inspector.trees import orders
from nnx_inspector.watching import unwatched

Rows = Mapping[str, tuple[float, float]]
NONE = Switches()


@dataclasses.dataclass(frozen=True)
class Result:
    """What one owned pass gave: the function's own result, and the record."""

    value: Any
    record: Record


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Returned:
    """What a traced program returned, without its arrays: jit keeps it with the trace it is of."""

    arguments: Arguments


class OwnedPasses:
    """The compiled passes over one model's structure.

    Args:
        keys: the sites that have a row, in order.
        selection: which sites are measured.
    """

    def __init__(self, keys: tuple[str, ...], selection: Selection):
        self._keys = keys
        self._selection = selection
        self._programs: dict[Any, Any] = {}

    def extend(self, keys: Iterable[str]) -> None:
        """Give more sites a row."""
        self._keys = tuple(dict.fromkeys((*self._keys, *keys)))

    def forward(
        self,
        model: nnx.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: Rows,
        switches: Switches = NONE,
    ) -> Result:
        """`model(*args, **kwargs)` and its record, with `rows` and `switches` in force."""
        return self._run("forward", None, model, args, kwargs, rows, switches)

    def backward(
        self,
        loss_fn: Callable[..., Any],
        model: nnx.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: Rows,
        switches: Switches = NONE,
    ) -> Result:
        """`loss_fn(model, *args, **kwargs)`, and a record with the gradients of all activations.

        `loss_fn` returns the loss, or `(loss, aux)`.
        """
        return self._run("backward", loss_fn, model, args, kwargs, rows, switches)

    def _run(
        self,
        kind: str,
        loss_fn: Callable[..., Any] | None,
        model: nnx.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: Rows,
        switches: Switches,
    ) -> Result:
        arguments = Arguments.of((model, args, kwargs))
        graphdef, state = nnx.split(arguments.take(arguments.nodes), graph=True)
        arrays = arguments.take(arguments.arrays)
        blank = dataclasses.replace(arguments, leaves=_blank(arguments))
        call = (graphdef, blank.treedef, orders(blank.numbered), exactly(blank.leaves))
        key = (kind, loss_fn, *call, switches, self._keys)
        if key not in self._programs:
            self._programs[key] = self._compile(kind, loss_fn, graphdef, blank, switches)
        program = self._programs[key]
        numbers = np.zeros((len(self._keys), ROW), np.float32)
        for index, site in enumerate(self._keys):
            if site in rows:
                numbers[index] = rows[site]
        try:
            with unwatched():
                out, record, returned = program(state, arrays, numbers)
        except Exception as error:
            if switches:
                error.add_note(f"nnx_inspector: with the modes {switches.in_words()}.")
            raise
        return Result(returned.arguments.rebuild((), out), jax.device_get(record))

    def _compile(
        self,
        kind: str,
        loss_fn: Callable[..., Any] | None,
        graphdef: Any,
        arguments: Arguments,
        switches: Switches,
    ) -> Any:
        keys = self._keys

        def program(state: Any, arrays: Any, numbers: Any) -> Any:
            model, args, kwargs = arguments.rebuild(nnx.merge(graphdef, state), arrays)
            switches.apply(model)
            function = as_function(model, "run") if loss_fn is None else Function(loss_fn)
            positional = args if loss_fn is None else (model, *args)
            layers = marking_layers(self._selection, inputs=False)
            roots = {(): model}
            with staged(function, positional, kwargs, layers, roots=roots) as stage:
                plan = Plan(perturb=self._perturb(keys, numbers))
                if kind == "backward":
                    out, seen, cotangents = _backward(stage, plan)
                else:
                    (out, seen), cotangents = evaluate(stage.survey, stage.inputs, plan=plan), None
                value = stage.finish(out, update=False)
                record = record_of(stage, seen, cotangents)
            returned = Arguments.of(value)
            structure = _Returned(dataclasses.replace(returned, leaves=_blank(returned)))
            return returned.take(returned.arrays), record, structure

        return jax.jit(program)

    def _perturb(self, keys: tuple[str, ...], numbers: Any) -> Callable[..., list[Any]]:
        index = {key: i for i, key in enumerate(keys)}

        def perturb(marked: Marked, values: list[Any], rows: Any) -> list[Any]:
            if marked.part != OUTPUT or marked.site not in index:
                return values
            return [apply(value, numbers[index[marked.site]]) for value in values]

        return perturb


def _backward(stage: Staged, plan: Plan) -> Any:
    def loss_of(sinks: Any) -> Any:
        out, seen = evaluate(stage.survey, stage.inputs, plan=plan, sinks=sinks)
        if not stage.outputs or jnp.shape(out[0]) != ():
            shape = f"an array of shape {jnp.shape(out[0])}" if stage.outputs else "no array"
            raise TypeError(
                f"The loss function must return a scalar, or (scalar, aux); it returned {shape} "
                f"first."
            )
        if not jnp.issubdtype(out[0].dtype, jnp.floating):
            raise TypeError(f"The loss must be a floating-point scalar, got {out[0].dtype}.")
        return out[0], (out, seen)

    (_, (out, seen)), cotangents = jax.value_and_grad(loss_of, has_aux=True)(
        sinks_for(stage.survey)
    )
    return out, seen, cotangents


def _blank(arguments: Arguments) -> tuple[Any, ...]:
    # a compiled program must not keep the first call's model and arrays alive
    dynamic = {*arguments.nodes, *arguments.arrays}
    return tuple(None if i in dynamic else leaf for i, leaf in enumerate(arguments.leaves))
