"""The pass over the data of `top_examples`: batches go in, and what every unit keeps is merged.

There is one program for each form of batch, which later passes over data use too. If a pass takes
less time than its start, several batches go through it together, one after the other. Invariant:
the result is that of batch after batch. At most two programs wait on the device. Names no data and
shows nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from nnx_inspector._compat import jit
from nnx_inspector._compat.sharding import auto_sharded, keeping_sharding
from nnx_inspector.arrays import is_array
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.cache_key import cache_key
from nnx_inspector.hooks.pytrees import dict_orders
from nnx_inspector.lenses.extremes import NO_EXAMPLE, Extremes
from nnx_inspector.lenses.traced_pass import TracedPass, require_whole, trace_pass
from nnx_inspector.perturbations.effects import value_and_positions
from nnx_inspector.perturbations.perturbed import check_layers, without_layers
from nnx_inspector.program.analysis.cost import peak_bytes
from nnx_inspector.program.editing.position_masks import Where
from nnx_inspector.program.function import Arguments, ModuleFunction, function_name
from nnx_inspector.program.instrument import evaluate
from nnx_inspector.program.marks import OUTPUT
from nnx_inspector.program.plan import Keep, Plan
from nnx_inspector.program.stage import StagedCall
from nnx_inspector.stats.summarize import type_text
from nnx_inspector.typing import Kwargs, Params, PyTree, Value

MakeCall = Callable[[tuple[Any, ...]], tuple[ModuleFunction, tuple[Any, ...], Params]]
"""The call of a model with a batch's arguments."""


MOST_BATCHES, MOST_BYTES = 16, 4 << 20
"""The most batches that go through one program, and the most bytes that they touch."""

MOST_PROGRAMS = 16
"""The most programs that are kept for later passes over data."""
_program_cache: dict[Any, tuple[Value, Value]] = {}
"""By all that it depends on: a tracing and its compiled program, those used last at the end."""


@dataclasses.dataclass(frozen=True)
class _Program:
    """The compiled pass for batches of one form.

    Attributes:
        model_arrays: the arrays of the model.
        run: `(model_arrays, batches, found, numbers, salt) -> found`, for `many` batches.
    """

    model_arrays: list[Value]
    run: Callable[..., Extremes]
    many: int


@dataclasses.dataclass
class ExampleSearch:
    """The pass over the data.

    Attributes:
        found, before: what is kept so far, on the device, and what was kept a pass ago.
        count: the number of examples so far.
        starts: the number of the first example of each batch.
        where: which positions of a batch count.
        where_mismatch: why a form of batch is searched at all places nevertheless; "" if it is not.
        places, shape: the number of the axes of places, and their lengths.
        waiting, numbers: the arrays and the example numbers of batches that will go through
            `program` together.
        forms: by the shapes of batches that are only arrays, their program.
    """

    make_call: MakeCall
    site: str
    k: int
    axis: int
    seed: int
    where: Where | None = None
    found: Extremes | None = None
    before: Extremes | None = None
    count: int = 0
    starts: list[int] = dataclasses.field(default_factory=list[int])
    where_mismatch: str = ""
    places: int = 0
    shape: tuple[int, ...] = ()
    size: int = 0
    padded: int = 0
    waiting: list[list[Value]] = dataclasses.field(default_factory=list[list[Value]])
    numbers: list[Value] = dataclasses.field(default_factory=list[Value])
    program: _Program | None = None
    programs: dict[Any, _Program] = dataclasses.field(default_factory=dict[Any, _Program])
    forms: dict[Any, _Program] = dataclasses.field(default_factory=dict[Any, _Program])

    def take(self, args: tuple[object, ...]) -> None:
        """Merge the examples of a batch, now or with the next ones."""
        count = _size_of(args)
        if not count:  # a filter may leave nothing of a batch
            return
        self.size = self.size or count
        if count < self.size:
            args = _padded_batch(args, count, self.size)
            self.padded += 1
        arrays, tree = jax.tree.flatten(args)
        form = tree, tuple(jax.typeof(x) if is_array(x) else None for x in arrays)
        program = self.forms.get(form)
        if program is None:
            program, taken = self._program_of(args, max(count, self.size))
            if len(taken) == len(arrays) and all(map(operator.is_, taken, arrays)):
                self.forms[form] = program
            arrays = taken
        if program is not self.program:
            self.merge()
            self.program = program
        numbers = np.arange(self.count, self.count + max(count, self.size), dtype=np.int32)
        numbers[count:] = NO_EXAMPLE
        if program.many > 1:  # the next batch may come in the same memory
            arrays = [x.copy() if isinstance(x, np.ndarray) else x for x in arrays]
        self.waiting.append(arrays)
        self.numbers.append(numbers)
        self.starts.append(self.count)
        self.count += count
        if len(self.waiting) == program.many:
            self.merge()

    def merge(self) -> None:
        """Merge the examples of the batches that are waiting."""
        if self.program is None or not self.waiting:
            return
        missing = self.program.many - len(self.waiting)
        batches = self.waiting + self.waiting[:1] * missing
        numbers = np.stack(self.numbers + [np.full_like(self.numbers[0], NO_EXAMPLE)] * missing)
        self.waiting, self.numbers = [], []
        now, before = self.found, self.before
        salt = np.uint32(self.seed * 0x27D4EB2F % 2**32)
        self.found = self.program.run(self.program.model_arrays, batches, now, numbers, salt)
        self.before = now
        jax.block_until_ready(before)  # at most two on the device: one waits for the other

    def notes(self) -> tuple[str, ...]:
        """What happened to batches of other shapes, and to positions."""
        found: list[str] = []
        if self.padded:
            batches = f"{self.padded} batches were" if self.padded > 1 else "1 batch was"
            found.append(f"{batches} smaller than the first, and filled up to {self.size} examples")
        if len(self.programs) > 1:
            found.append(f"{len(self.programs)} programs ran, one for each form of batch")
        return (*found, self.where_mismatch) if self.where_mismatch else tuple(found)

    def _program_of(self, args: Value, size: int) -> tuple[_Program, list[Value]]:
        """The program for a batch, and the arrays of the batch that it takes."""
        function, args, kwargs = self.make_call(args)
        arguments = Arguments.of((function.owner, tuple(args), kwargs))
        arrays = arguments.take(arguments.arrays)
        dynamic = {*arguments.arrays, *arguments.nodes}
        others = tuple(repr(x) for i, x in enumerate(arguments.leaves) if i not in dynamic)
        shapes, order = tuple(map(jax.typeof, arrays)), dict_orders(arguments.numbered)
        key = (shapes, arguments.treedef, order, others)
        if key not in self.programs:
            code = _code_key(function, arguments.take(arguments.nodes))
            self.programs[key] = self._program((key, code), function, args, kwargs, size)
        return self.programs[key], list(arrays)

    def _program(
        self,
        key: Value,
        function: ModuleFunction,
        args: tuple[Value, ...],
        kwargs: Kwargs,
        size: int,
    ) -> _Program:
        whole, rows = without_layers(self.site)
        _require_fits(function, args, kwargs)
        key = (key, self.site, self.k, self.axis, size, self.where)
        tracing, known = _program_cache.pop(key, (None, None))
        how: Params = {"only": whole, "known": tracing, "where": self.where}
        with trace_pass(function, args, kwargs, what="top_examples", **how) as traced:
            pass
        stage = traced.stage
        survey = stage.survey.only(lambda mark: mark.site == whole and mark.part == OUTPUT)
        require_whole(survey)
        call = _site_array(traced, whole, rows, size)
        ndim, axes = len(call.shape), self.axis
        if not -ndim <= axes < ndim or axes % ndim == 0:
            words = type_text(call.dtype, call.shape)
            raise ValueError(f"{self.site!r} returns {words}, which has no axis {axes} of units.")
        units, places = call.shape[axes], ndim - 2
        self.shape = tuple(n for i, n in enumerate(call.shape) if i not in (0, axes % ndim))
        if self.found is None:
            dtype = jnp.promote_types(call.dtype, jnp.float32)
            empty = Extremes.empty(self.k, units, places, dtype)
            self.found, self.places = jax.device_put(empty), places
        elif (len(self.found.nan), self.places) != (units, places):
            raise ValueError(
                f"{self.site!r} returns {type_text(call.dtype, call.shape)} for a batch, which has "
                f"other units than the batches before: {len(self.found.nan)} of them. Choose their "
                f"axis with axis=."
            )
        plan = Plan(summarise=False, keep=Keep(values=value_and_positions, counts=True))
        (mark,) = survey.marks
        if mark.where and not mark.counted[call.array]:
            mask, value = type_text(np.dtype(bool), mark.where), type_text(call.dtype, call.shape)
            self.where_mismatch = (
                f"where= gave {mask}, which does not fit what {self.site!r} returns, {value}, so "
                f"all its places count"
            )

        def values(model_arrays: Value, arrays: Sequence[Value]) -> PyTree:
            _, seen = evaluate(survey, [*model_arrays, *arrays], plan=plan)
            (kept,) = [each.kept for _, _, each in survey.walk(seen) if each is not None]
            x, where = kept[call.array].value
            x, where = (x[rows], where if where is None else where[rows]) if rows else (x, where)
            return x, None if where is None else jnp.broadcast_to(where, x.shape)

        def merged(found: Extremes, of: Value, numbers: Value, salt: Value) -> Extremes:
            each = lambda x: jnp.moveaxis(x.reshape(-1, *call.shape[1:]), axes % ndim, -1)  # noqa: E731
            x, where = jax.tree.map(each, of)
            return found.merged(x, numbers.reshape(-1), salt, where)

        @jax.jit
        def run(
            model_arrays: object, batches: Value, found: object, numbers: object, salt: object
        ) -> PyTree:
            if len(batches) == 1:
                of = values(model_arrays, batches[0])
            else:
                together = [jnp.stack(each) for each in zip(*batches, strict=True)]
                of = lax.map(lambda arrays: values(model_arrays, arrays), together)
            return auto_sharded(merged, found, of, numbers, salt)

        model_arrays = stage.inputs[: len(stage.inputs) - len(stage.arrays)]
        _program_cache[key] = stage.tracing, known or run
        for old in [*_program_cache][:-MOST_PROGRAMS]:
            _program_cache.pop(old, None)
        return _Program(model_arrays, known or run, _batches_per_run(stage))


def _code_key(function: ModuleFunction, nodes: tuple[object, ...]) -> PyTree:
    """A key of everything that a trace depends on besides the arguments of the batch."""
    graphdef, state = nnx.split(nodes, graph=True)
    leaves, treedef = jax.tree.flatten(state)
    forms = tuple(jit.abstract(x) if is_array(x) else None for x in leaves)
    called = function.method if function.owner is not None else function.call
    return cache_key((called, graphdef)), treedef, forms, jit.trace_context()


def _batches_per_run(stage: StagedCall) -> int:
    """How many batches go through one program: many if a pass is shorter than its start."""
    jaxpr = stage.survey.jaxpr
    touched = peak_bytes(jaxpr) + sum(x.nbytes for x in stage.inputs)
    return 1 if jaxpr.effects else max(1, min(MOST_BATCHES, MOST_BYTES // max(1, touched)))


@dataclasses.dataclass(frozen=True)
class _SiteArray:
    """The array that is examined: its number among those of the site, and its form."""

    array: int
    shape: tuple[int, ...]
    dtype: Value


def _site_array(traced: TracedPass, site: str, rows: tuple[int, ...], size: int) -> _SiteArray:
    """The array of the only call of a site, without the axes of scans."""
    calls = traced.calls.get(site)
    if calls is None:
        why = traced.stage.survey.unseen.get(site, "the call does not reach it")
        raise ValueError(f"{site!r} has no examples: {why}.")
    if calls.count > 1:
        raise InspectorError(
            f"{site!r} is called {calls.count} times for each batch, and which call is meant is "
            f"not known. Choose a site inside or around it that is called once."
        )
    if rows:
        check_layers(site, rows, calls.rows)
    if len(rows) != len(calls.rows):
        raise ValueError(
            f"{site!r} is a stack of {' x '.join(map(str, calls.rows))} layers. Choose one: "
            f"{site + '[0]' * len(calls.rows)!r}."
        )
    real = [
        (i, x)
        for i, x in enumerate(calls.returned)
        if not jnp.issubdtype(x.dtype, jnp.complexfloating)
    ]
    if not real:
        found = ", ".join(type_text(x.dtype, x.shape) for x in calls.returned) or "no array"
        raise TypeError(f"{site!r} returns {found}. Only real numbers have an order.")
    number, x = real[0]
    while x.shape[:1] == (1,) and x.shape[1:2] == (size,):  # the axis of a vmap over one
        x = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    if len(x.shape) < 2 or x.shape[0] != size:
        raise ValueError(
            f"{site!r} returns {type_text(x.dtype, x.shape)} for a batch of {size} examples. Its "
            f"first axis must be that of the examples, and another that of the units."
        )
    return _SiteArray(number, tuple(x.shape), x.dtype)


def _size_of(args: tuple[object, ...]) -> int:
    for x in jax.tree.leaves(args):
        if is_array(x) and len(x.shape):
            return x.shape[0]
    raise TypeError(
        "A batch is an array, or a tuple of the model's arguments, whose first axis is that of the "
        "examples. Pass inputs= a function of a batch that returns one."
    )


def _padded_batch(args: tuple[object, ...], count: int, size: int) -> tuple[Value, ...]:
    """A smaller batch, filled up with copies of its first example."""

    def filled(x: Value) -> PyTree:
        if not is_array(x) or not len(x.shape) or x.shape[0] != count:
            return x
        if isinstance(x, np.ndarray):
            return np.concatenate([x, np.repeat(x[:1], size - count, 0)])
        return keeping_sharding(
            lambda x: jnp.concatenate([x, jnp.repeat(x[:1], size - count, 0)]), x
        )

    return jax.tree.map(filled, args)


def _require_fits(function: ModuleFunction, args: tuple[Any, ...], kwargs: Kwargs) -> None:
    """Raise an error that says how to choose a batch's arguments, if the model cannot take them."""
    try:
        inspect.signature(function.call).bind(*args, **kwargs)
    except ValueError:  # no signature
        return
    except TypeError as error:
        raise TypeError(
            f"A batch of {len(args)} arguments does not fit {function_name(function.call)} "
            f"({error}). Pass inputs= a function of a batch that returns what the model receives, "
            f"such as lambda batch: batch[0]."
        ) from error
