"""Passes over a model in programs of our own: the model does not change, and every site has a row.

A forward pass, or a forward and backward pass of a loss, is traced and compiled once for each
structure of model and arguments, each set of modes (switched on the program's own copy of the
model) and each sequence of places; the perturbations at the places and in the rows are arguments.
Invariant: switching or tuning runs the same program, and the clean pass is that program with
everything off. The model, its RNG streams, statistics and optimizer stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import unchecked
from nnx_inspector.findings.facts import facts_of_call, facts_of_modules
from nnx_inspector.hooks.layers import unwatched
from nnx_inspector.hooks.sites import Selection
from nnx_inspector.inspector.nnx.switches import viewed
from nnx_inspector.inspector.passes.call import Call, Form, Parts, blank
from nnx_inspector.perturbations.apply import (
    Reach,
    are_random,
    at_marks,
    layers_for,
    parameters_under,
)
from nnx_inspector.perturbations.effects import Differences, differences
from nnx_inspector.perturbations.region import rows_of
from nnx_inspector.perturbations.slots import CLEAN, Place, Setting
from nnx_inspector.perturbations.substitute import with_own_parameters
from nnx_inspector.program.eager import why_untraceable
from nnx_inspector.program.function import Arguments
from nnx_inspector.program.harvest import Keep, Plan
from nnx_inspector.program.mark_layers import marking_layers
from nnx_inspector.program.marks import OUTPUT
from nnx_inspector.program.stage import LayersOf, Staged, staged
from nnx_inspector.recordings.facts import Facts
from nnx_inspector.records.backward import backward_pass, require_scalar
from nnx_inspector.records.capture import record_of
from nnx_inspector.records.parameters import floats_of
from nnx_inspector.records.record import Record
from nnx_inspector.stats.gauges import VARIED
from nnx_inspector.stats.measure_gauges import gauge, sampled, varied


@dataclasses.dataclass(frozen=True)
class OfUnits:
    """A forward pass that measures the units of some sites' outputs, and nothing else."""

    sites: tuple[str, ...]


Kind = Literal["pass", "compare"] | OfUnits


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of one owned pass.

    Attributes:
        value: the function's own result.
        record: the record, whose `values` are gauges; see `measure_gauges`.
        states: parameter (or running statistic) -> its state from `measure_gauges.sampled`.
    """

    value: Any
    record: Record
    states: dict[str, Any] = dataclasses.field(default_factory=lambda: dict[str, Any]())


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Returned:
    """A traced program's result without its arrays; jit keeps it with the trace."""

    arguments: Arguments


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A program and its inputs; `key` is None if the inputs cannot be described."""

    program: Any
    inputs: tuple[Any, ...]
    key: Any
    avals: tuple[Any, ...]


class Program:
    """A compiled function of arrays. If it cannot be traced, because a model's code reads values,
    it runs eagerly.

    Attributes:
        function: the function itself.
        compiled: the function under jit.
        ran_eagerly: whether the last call ran eagerly.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function, self.compiled = function, jax.jit(function)
        self.ran_eagerly = False

    def __call__(self, *args: Any) -> Any:
        if not self.ran_eagerly:
            try:
                return self.compiled(*args)
            except Exception as error:
                if not why_untraceable(error):
                    raise
        out = self.function(*args)
        self.ran_eagerly = True
        return out


Code = tuple[Sequence[Place], Sequence[Place]]
"""A setting's places for values, and its places for parameters."""
Inputs = tuple[Any, ...]
"""The inputs of a program: leaves of the model, arrays of the arguments, numbers of the rows, data
of the places and data of the parameters.
"""


def inputs_of(parts: Parts, setting: Setting, keys: Sequence[str]) -> Inputs:
    """The inputs of a program for a call and a setting."""
    numbers = rows_of(keys, setting.rows)
    return parts.leaves, parts.arrays, numbers, setting.data, setting.parameter_data


@contextlib.contextmanager
def entered(
    form: Form, code: Code, keys: Sequence[str], layers: LayersOf, inputs: Inputs
) -> Generator[tuple[Staged, list[Any], Plan, dict[int, Any]]]:
    """Stage a call within a program, with the perturbations of a setting.

    Args:
        form: the call's form.
        code: the setting's code.
        keys: the sites that have a row.
        layers: the layers that mark values.
        inputs: the program's inputs, as from `inputs_of`.

    Returns:
        The stage, its inputs, a plan with the perturbations, and the perturbed parameters by the
        numbers of their inputs.
    """
    leaves, arrays, numbers, data, of_parameters = inputs
    places, parameters = code
    call = form.call(leaves, arrays)
    function, args, kwargs = call.function()
    roots = {(): call.model}
    with staged(function, args, kwargs, layers, roots=roots, may_run=True) as stage:
        replaced = parameters_under(stage, parameters, of_parameters)
        perturb = at_marks(stage, keys, numbers, places, data)
        plan = Plan(perturb=perturb, numbered=are_random(places))
        yield stage, [replaced.get(i, x) for i, x in enumerate(stage.inputs)], plan, replaced


class OwnedPasses:
    """The compiled passes over one model's structure.

    Args:
        keys: the sites that have a row, in order.
        selection: the sites to measure.
    """

    def __init__(self, keys: tuple[str, ...], selection: Selection):
        self._keys = keys
        self._selection = selection
        self._programs: dict[Any, Any] = {}
        self._facts: dict[Any, Facts] = {}
        self._same: dict[Any, Any] = {}
        self._lock = threading.Lock()
        self._compiled: set[Any] = set()
        self._compiling: dict[Any, threading.Lock] = {}
        self._eager: set[Any] = set()

    @property
    def keys(self) -> tuple[str, ...]:
        """The sites that have a row."""
        return self._keys

    def extend(self, keys: Iterable[str]) -> None:
        """Give more sites a row."""
        self._keys = tuple(dict.fromkeys((*self._keys, *keys)))

    def run(self, call: Call, setting: Setting = CLEAN) -> Result:
        """Make a pass with a setting in force, and record it. A missing program is compiled first,
        or the call waits for the thread that compiles it.
        """
        out, record, states, returned = self._run("pass", call, setting)
        record, states = jax.device_get((record, states))
        return Result(returned.arguments.rebuild((), out), record, states)

    def facts(self, call: Call) -> Facts:
        """The facts of the model and of a pass over it, traced once for each structure."""
        with self._lock:
            key = self._key_of(call)
            known = self._facts.get(key)
        if known is None:
            with call.configuration.held(), unwatched():
                known = self._facts_of(call)
            with self._lock:
                self._facts[key] = known
            self._has_traced(call)
        return known

    def _facts_of(self, call: Call) -> Facts:
        if not self._is_eager(call):
            try:
                return _facts(call, self._selection)
            except Exception as error:
                if not why_untraceable(error):
                    raise
        return facts_of_modules(call.model)  # the other facts need a program

    def compare(self, call: Call, setting: Setting) -> Differences:
        """The change of each site's output under a setting, from two passes in one program."""
        return jax.device_get(self._run("compare", call, setting))

    def units(self, call: Call, setting: Setting, *sites: str) -> Record:
        """The record of a forward pass with figures for each unit of the last axis of these sites'
        outputs, and nothing else. Compiled once for the same sites.
        """
        return jax.device_get(self._run(OfUnits(sites), call, setting))

    def missing(
        self, kind: Kind, call: Call, setting: Setting
    ) -> Callable[[Callable[[], bool]], None] | None:
        """A function that compiles the program for `run` ("pass") or `compare` on any thread; None
        if it is compiled. The function does not read the model, and keeps no array alive.
        """
        with call.configuration.held():
            prepared = self._prepared(kind, call, setting)
        if prepared.key is None or prepared.key in self._compiled:
            return None
        if self._is_eager(call):
            return None  # an eager call is not compiled ahead
        configuration = call.configuration
        program, avals, key, lock = (
            prepared.program.compiled,
            prepared.avals,
            prepared.key,
            self._lock_of(prepared.key),
        )

        def compile_it(is_over: Callable[[], bool]) -> None:
            with lock, configuration.held(), unchecked(), unwatched():
                if key not in self._compiled:
                    lowered = program.lower(*avals)
                    if not is_over():
                        lowered.compile()
                        self._compiled.add(key)

        return compile_it

    def _run(self, kind: Kind, call: Call, setting: Setting) -> Any:
        try:
            with call.configuration.held(), unchecked(), unwatched():
                prepared = self._prepared(kind, call, setting)
                program = prepared.program
                if self._is_eager(call):
                    return program.function(*prepared.inputs)
                if prepared.key is None or prepared.key in self._compiled:
                    return program(*prepared.inputs)
                with self._lock_of(prepared.key):
                    out = program(*prepared.inputs)
                    if program.ran_eagerly:
                        with self._lock:
                            self._eager.add(self._key_of(call))
                    else:
                        self._compiled.add(prepared.key)
                self._has_traced(call)
                return out
        except Exception as error:
            if call.switches:
                error.add_note(f"nnx_inspector: with the modes {call.switches.in_words()}.")
            raise

    def _key_of(self, call: Call) -> Any:
        return self._same.get(call.parts.key, call.parts.key)

    def _is_eager(self, call: Call) -> bool:
        with self._lock:
            return self._key_of(call) in self._eager

    def _has_traced(self, call: Call) -> None:
        """Give the call's key after tracing the same meaning as its key before. Tracing runs the
        model's Python, which may change the key (by counting calls, say) at every pass.
        """
        after = dataclasses.replace(call).parts.key
        with self._lock:
            known = self._key_of(call)
            if after != known:
                self._same[after] = known

    def _lock_of(self, key: Any) -> threading.Lock:
        with self._lock:
            return self._compiling.setdefault(key, threading.Lock())

    def _prepared(self, kind: Kind, call: Call, setting: Setting) -> _Prepared:
        parts = call.parts
        with self._lock:
            key = (kind, self._key_of(call), self._keys, setting.code)
            if key not in self._programs:
                self._programs[key] = self._program(kind, parts.form, setting)
            program = self._programs[key]
        inputs = inputs_of(parts, setting, self._keys)
        avals = _avals(inputs)
        flat = None if avals is None else (key, call.configuration, *jax.tree.leaves(avals))
        return _Prepared(program, inputs, flat, avals or ())

    def _program(self, kind: Kind, form: Form, setting: Setting) -> Any:
        keys, code = self._keys, setting.code
        layers = layers_for(self._selection, setting.places)

        def program(*given: Any) -> Any:
            with entered(form, code, keys, layers, given) as (stage, inputs, plan, replaced):
                if kind == "compare":
                    return differences(stage, inputs, plan, root=form.entry.site)
                if isinstance(kind, OfUnits):
                    keep = Keep(units=-1, parts=(OUTPUT,), sites=kind.sites)
                    plan = dataclasses.replace(plan, summarise=False, keep=keep)
                    seen = stage.evaluate(inputs, plan=plan)[1]
                    return record_of(stage, seen)
                plan = dataclasses.replace(plan, keep=Keep(values=gauge, parts=(OUTPUT,)))
                held, grads = floats_of(stage), dict[int, Any]()
                if form.loss_fn is None:
                    (out, seen), cotangents = stage.evaluate(inputs, plan=plan), None
                else:
                    out, seen, cotangents, grads = _graded(stage, inputs, plan, held)
                value = stage.finish(with_own_parameters(stage, out, replaced), update=False)
                record = record_of(stage, seen, cotangents)
                states = {path: sampled(inputs[i], grads.get(i)) for path, (i, _) in held.items()}
                # every array must vary: labels may vary while the model's inputs do not
                states[VARIED] = varied(stage.arrays, each=True)
            returned = Arguments.of(value).without_numpy()
            structure = _Returned(dataclasses.replace(returned, leaves=blank(returned)))
            return returned.take(returned.arrays), record, states, structure

        return Program(program)


def reach_of(call: Call, selection: Selection) -> Reach:
    """The parts of a call that can be perturbed, from shapes alone; an eager call has to run."""
    if call.switches:
        try:
            model, _ = viewed(call.model, call.switches, lambda copy: None)
            return _reach(dataclasses.replace(call, model=model), selection)
        except Exception as error:
            if not why_untraceable(error):
                raise
        call = call.parts.form.call(call.parts.leaves, call.parts.arrays)
    return _reach(call, selection)


def _reach(call: Call, selection: Selection) -> Reach:
    function, args, kwargs = call.function()
    layers, roots = marking_layers(selection, inputs=True), {(): call.model}
    with staged(function, args, kwargs, layers, roots=roots, may_run=True) as stage:
        if stage.eager:
            stage.evaluate(stage.inputs, plan=Plan(summarise=False))
        return Reach(stage)


def _facts(call: Call, selection: Selection) -> Facts:
    model = call.model
    if call.switches:
        model, _ = viewed(model, call.switches, lambda copy: None)
        call = dataclasses.replace(call, model=model)
    function, args, kwargs = call.function()
    is_loss = call.loss_fn is not None
    return facts_of_call(function, args, kwargs, model, selection, is_loss=is_loss)


def _graded(
    stage: Staged, inputs: list[Any], plan: Plan, held: Mapping[str, tuple[int, bool]]
) -> tuple[list[Any], list[Any], Any, dict[int, Any]]:
    """The outputs, the seen values, the cotangents that the sinks received, and the gradients of
    the parameters by the numbers of their inputs. Without gradients if the loss cannot be
    differentiated (a parameter in a while loop, say) or its code reads values of a derivative.
    """
    numbers = [i for i, is_parameter in held.values() if is_parameter]
    try:
        return backward_pass(stage, inputs, plan, numbers)
    except (NotImplementedError, TypeError, ValueError) as error:
        why = why_untraceable(error) if stage.eager else ""
        if not why:  # an error of the loss itself is raised again here
            return backward_pass(stage, inputs, plan, ())
    stage.eager += f"; there are no gradients, because in a derivative {why}"
    out, seen = stage.evaluate(inputs, plan=plan)
    require_scalar(stage, out)
    return out, seen, None, {}


def _avals(inputs: Any) -> Any:
    """The same tree with jit's key for each array; None if it holds something else."""
    try:
        return jax.tree.map(_aval, inputs)
    except TypeError:  # a reference, say; its program is compiled when it is called
        return None


def _aval(x: Any) -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.Ref):
        raise TypeError("A reference has no aval of its own.")
    return jit.abstract(x)
