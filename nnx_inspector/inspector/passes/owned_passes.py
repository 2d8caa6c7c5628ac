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
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import jax
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import Configuration, unchecked_jit
from nnx_inspector.errors import add_note
from nnx_inspector.findings.facts import facts_of_modules, facts_of_stage
from nnx_inspector.hooks.hook import without_watching
from nnx_inspector.hooks.sites import Selection, module_sites
from nnx_inspector.inspector.passes.call import Call, CallParts, CallStructure, without_arrays
from nnx_inspector.perturbations.apply_setting import (
    are_random,
    check_parts,
    marking_hooks_for,
    parameter_rules,
    setting_at_marks,
    take_positions,
)
from nnx_inspector.perturbations.effects import Differences, differences
from nnx_inspector.perturbations.perturbed_parameters import (
    perturbed_parameters,
    with_own_parameters,
)
from nnx_inspector.perturbations.places import CLEAN, Place, Setting, rows_of
from nnx_inspector.program.analysis.dataflow import inputs_received
from nnx_inspector.program.analysis.trace import staged_for_trace
from nnx_inspector.program.eager import why_untraceable
from nnx_inspector.program.function import Arguments
from nnx_inspector.program.marks import INPUT, OUTPUT
from nnx_inspector.program.plan import Keep, Plan
from nnx_inspector.program.stage import CachedTrace, StagedCall, stage_call
from nnx_inspector.recordings.facts import Facts
from nnx_inspector.records.backward import backward_pass, require_scalar
from nnx_inspector.records.capture import record_of
from nnx_inspector.records.parameters import floats_of, measure_parameters
from nnx_inspector.records.record import Record
from nnx_inspector.stats.samples.parameter_stats import EXAMPLES_VARY, IDS_PREFIX
from nnx_inspector.stats.samples.sample_parameters import examples_vary, id_stats, sample_parameter
from nnx_inspector.stats.samples.sample_units import sample_units
from nnx_inspector.typing import Function, GraphDef, PyTree, Value


@dataclasses.dataclass(frozen=True)
class UnitPass:
    """A forward pass that measures the units of some sites' outputs, and nothing else."""

    sites: tuple[str, ...]
    axis: int = -1


T = TypeVar("T")
Kind = Literal["pass", "compare"] | UnitPass


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of one owned pass.

    Attributes:
        value: the function's own result.
        record: the record, whose `values` are samples of units; see `sample_units`.
        states: parameter (or running statistic) -> its state from `sample_parameter`.
    """

    value: Value
    record: Record
    states: dict[str, Value] = dataclasses.field(default_factory=lambda: dict[str, Value]())


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Returned:
    """A traced program's result without its arrays; jit keeps it with the trace."""

    arguments: Arguments
    nodes: GraphDef  # the graphdef of the NNX objects in it


class Program:
    """A compiled function of arrays. If it cannot be traced, because a model's code reads values,
    it runs eagerly.

    Attributes:
        function: the function itself.
        compiled: the function under jit.
        ran_eagerly: whether the last call ran eagerly.
        ready: whether it is compiled, as far as that is known.
        lock: the thread that compiles it holds this lock.
    """

    def __init__(self, function: Function, *, ready: bool = False):
        self.function, self.compiled = function, jax.jit(function)
        self.ran_eagerly, self.ready = False, ready
        self.lock = threading.Lock()

    def __call__(self, *args: object) -> PyTree:
        if not self.ran_eagerly:
            try:
                return self.compiled(*args)
            except Exception as error:
                if not why_untraceable(error):
                    raise
        out = self.function(*args)
        self.ran_eagerly = True
        return out


Inputs = tuple[PyTree, ...]
"""The leaves of the model, the arguments' arrays, the rows' numbers, and the places' data."""


def program_inputs(parts: CallParts, setting: Setting, keys: Sequence[str]) -> Inputs:
    numbers = rows_of(keys, setting.rows)
    return parts.leaves, parts.arrays, numbers, setting.data


@contextlib.contextmanager
def stage_with_setting(
    structure: CallStructure,
    places: Sequence[Place],
    keys: Sequence[str],
    selection: Selection,
    known: CachedTrace | None,
    received: Sequence[str],
    inputs: Inputs,
) -> Generator[tuple[StagedCall, list[Value], Plan, dict[int, Value]]]:
    """Stage a call within a program, with the perturbations of a setting.

    Args:
        places: where the perturbations of the setting act.
        keys: the sites that have a row.
        selection: the sites whose outputs are marked.
        known: the tracing of the call, if there is one.
        received: the sites whose inputs are marked, besides those that a place acts on.

    Returns:
        The stage, its inputs, a plan with the perturbations, and the perturbed parameters by the
        numbers of their inputs.
    """
    leaves, arrays, numbers, data = inputs
    call = structure.call(leaves, arrays)
    received = (*received, *(s for place in places if place.at == INPUT for s in place.sites))
    hooks, roots = marking_hooks_for(selection, received, structure.entry.where), {(): call.model}
    known = known and known.with_inputs_of(received)
    with stage_call(*call.function(), hooks, roots=roots, may_run=True, known=known) as stage:
        replaced = perturbed_parameters(stage, parameter_rules(places, data))
        perturb = setting_at_marks(stage, keys, numbers, places, data)
        numbered, positions = are_random(places), take_positions(places)
        plan = Plan(perturb=perturb, numbered=numbered, positions=positions)
        yield stage, [replaced.get(i, x) for i, x in enumerate(stage.inputs)], plan, replaced


@contextlib.contextmanager
def pass_environment(configuration: Configuration) -> Generator[None]:
    """The settings under which one of our own passes is traced and runs, in any thread."""
    with configuration.applied(), unchecked_jit(), without_watching():
        yield


MOST_STRUCTURES = 8
"""The most structures whose programs are kept: each new lambda as a loss makes one."""


@dataclasses.dataclass(eq=False)
class _Programs:
    """What was traced and compiled for one structure, each by all else that it depends on."""

    programs: dict[Hashable, Program] = dataclasses.field(default_factory=lambda: {})
    tracings: dict[Hashable, CachedTrace] = dataclasses.field(default_factory=lambda: {})
    facts: Facts | None = None
    eager: bool = False


@dataclasses.dataclass(eq=False)
class _ModelPrograms:
    """What was traced and compiled of one model, by the structure of the call, the last used last.

    A program keeps the loss function of its call, and what that closes over. So only those of the
    MOST_STRUCTURES used last are kept.
    """

    model: weakref.ref[nnx.Module] | None
    by_structure: dict[Hashable, _Programs] = dataclasses.field(default_factory=lambda: {})
    same: dict[Hashable, Hashable] = dataclasses.field(default_factory=lambda: {})
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)

    def of_key(self, key: object) -> _Programs:
        with self.lock:
            found = self.by_structure[key] = self.by_structure.pop(key, None) or _Programs()
            while len(self.by_structure) > MOST_STRUCTURES:
                gone = next(iter(self.by_structure))
                del self.by_structure[gone]
                self.same = {after: known for after, known in self.same.items() if known != gone}
            return found


_BY_MODEL = weakref.WeakValueDictionary[tuple[int, Selection], _ModelPrograms]()
"""By the model's identity, as long as an inspector has it."""


def _programs_for(model: nnx.Module | None, selection: Selection) -> _ModelPrograms:
    if model is None:
        return _ModelPrograms(None)
    found = _BY_MODEL.get((id(model), selection))
    if found is None or found.model is None or found.model() is not model:
        found = _BY_MODEL[id(model), selection] = _ModelPrograms(weakref.ref(model))
    return found


class OwnedPasses:
    """The compiled passes over one model's structure.

    Args:
        model: the model; all its inspectors with this selection share their programs.

    Attributes:
        on_wait: called with a name and what a caller waits for, in words; "" when that is ready.
    """

    def __init__(
        self, keys: tuple[str, ...], selection: Selection, model: nnx.Module | None = None
    ):
        self.keys = keys
        self.selection = selection
        self._cache = _programs_for(model, selection)
        self.on_wait: Callable[[str, str], object] = lambda who, what: None

    def add_keys(self, keys: Iterable[str]) -> None:
        """Give more sites a row."""
        self.keys = tuple(dict.fromkeys((*self.keys, *keys)))

    def run(self, call: Call, setting: Setting = CLEAN) -> Result:
        """Make a pass with a setting, and record it; first compile its program, or wait for it."""
        (out, held), record, states, returned = self._run("pass", call, setting)
        record, states = jax.device_get((record, states))
        nodes = nnx.merge(returned.nodes, held)
        return Result(returned.arguments.rebuild(nodes, out), record, states)

    def tracing(
        self, call: Call, read: Callable[[StagedCall], object] = lambda stage: None
    ) -> CachedTrace | None:
        """The tracing of a call, made once; None for an eager call. `read` gets a new one."""
        shapes = _avals((call.parts.leaves, call.parts.arrays))
        with self._cache.lock, pass_environment(call.configuration):
            if shapes is None or self._is_eager(call):
                return None
            key, of = (jit.trace_context(), *jax.tree.leaves(shapes)), self._programs_of(call)
            if key not in of.tracings:
                try:
                    with self._stage(call.in_modes, runs=False) as stage:
                        found = stage.tracing
                        if found is not None:
                            read(stage)
                except Exception as error:
                    if not why_untraceable(error):
                        raise
                    found = None
                if found is None:
                    of.eager = True
                else:
                    of.tracings[key] = found
                self._alias_key(call)
            return of.tracings.get(key)

    def _stage(
        self, call: Call, known: CachedTrace | None = None, *, runs: bool = True
    ) -> contextlib.AbstractContextManager[StagedCall]:
        function, args, kwargs = call.function()
        return staged_for_trace(
            function,
            args,
            kwargs,
            selection=self.selection,
            roots={(): call.model},
            known=known,
            runs=runs,
            where=call.entry.where,
        )

    def read(self, call: Call, read: Callable[[StagedCall], T]) -> T:
        """The result of `read` on a call staged with all marks; an eager call runs for it."""
        found: list[T] = []
        known = self.tracing(call, lambda stage: found.append(read(stage)))
        if found:  # it need not be staged again
            return found[0]
        shown = call.copied() if known is None and call.switches else call.in_modes
        with pass_environment(call.configuration), self._stage(shown, known) as stage:
            return read(stage)

    def facts(self, call: Call) -> Facts:
        """The facts of the model and of a pass over it, read once for each structure."""
        return self.facts_reader(call)()

    def facts_reader(self, call: Call) -> Callable[[], Facts]:
        """What returns, at any time, the facts of the model as it is now, and of a pass over it."""
        known, parts, configuration = self.tracing(call), call.parts, call.configuration
        of, structure = self._programs_of(call), parts.structure
        of_stage = functools.partial(facts_of_stage, is_loss=structure.loss_fn is not None)
        if known is None and of.facts is None:
            # no need to run an eager call: there is no program to read from
            of.facts = facts_of_modules(call.model) if of.eager else self.read(call, of_stage)
        shapes = _avals((parts.leaves, parts.arrays))

        def read() -> Facts:
            with self._cache.lock, pass_environment(configuration):
                if of.facts is None:
                    with self._stage(structure.call(*shapes), known) as stage:
                        of.facts = of_stage(stage)
                return of.facts

        return read

    def compare(self, call: Call, setting: Setting) -> Differences:
        """The change of each site's output under a setting, from two passes in one program."""
        return jax.device_get(self._run("compare", call, setting))

    def units(self, call: Call, setting: Setting, *sites: str, axis: int = -1) -> Record:
        """The record of a forward pass with figures for each unit of these sites."""
        return jax.device_get(self._run(UnitPass(sites, axis), call, setting))

    def missing_program(
        self, kind: Kind, call: Call, setting: Setting
    ) -> Callable[[Callable[[], bool]], None] | None:
        """A function that compiles a missing program of this kind on any thread, or None."""
        configuration = call.configuration
        with pass_environment(configuration):
            program, _, avals = self._prepare(kind, call, setting)
        if program.ready or self._is_eager(call):
            return None  # an eager call is not compiled ahead

        def compile_it(is_over: Callable[[], bool]) -> None:
            with program.lock, pass_environment(configuration):
                if not program.ready:
                    lowered = program.compiled.lower(*avals)
                    if not is_over():
                        lowered.compile()
                        program.ready = True

        return compile_it

    def _run(self, kind: Kind, call: Call, setting: Setting) -> PyTree:
        try:
            with pass_environment(call.configuration):
                known = self.tracing(call)
                if known is not None:
                    check_parts(known.survey, setting)
                program, inputs, _ = self._prepare(kind, call, setting)
                if self._is_eager(call):
                    return program.function(*inputs)
                if program.ready:
                    return program(*inputs)
                what = "units" if isinstance(kind, UnitPass) else kind
                self.on_wait("run", f"compiling the {'effect' if what == 'compare' else what}")
                try:
                    with program.lock:
                        out = program(*inputs)
                        program.ready = not program.ran_eagerly
                finally:
                    self.on_wait("run", "")
                self._alias_key(call)
                if program.ran_eagerly:
                    self._programs_of(call).eager = True
                return out
        except Exception as error:
            if call.switches:
                add_note(error, f"with the modes {call.switches.in_words()}.")
            raise

    def _key_of(self, call: Call) -> Hashable:
        return self._cache.same.get(call.parts.key, call.parts.key)

    def _programs_of(self, call: Call) -> _Programs:
        return self._cache.of_key(self._key_of(call))

    def _is_eager(self, call: Call) -> bool:
        return self._programs_of(call).eager

    def _alias_key(self, call: Call) -> None:
        """Let a call's key stay valid: tracing may change it, by counting calls, say."""
        known, after = self._key_of(call), dataclasses.replace(call).parts.key
        if after != known:
            self._cache.same[after] = known

    def _prepare(self, kind: Kind, call: Call, setting: Setting) -> tuple[Program, Inputs, PyTree]:
        known, parts = self.tracing(call), call.parts
        inputs = program_inputs(parts, setting, self.keys)
        avals = _avals(inputs)
        with self._cache.lock:
            programs, code = self._programs_of(call).programs, (kind, self.keys, setting.places)
            key = (*code, jit.trace_context(), *jax.tree.leaves(avals))
            if key not in programs:
                function = self._function(kind, parts.structure, setting, known)
                programs[key] = Program(function, ready=avals is None)
            return programs[key], inputs, avals

    def _function(
        self, kind: Kind, structure: CallStructure, setting: Setting, known: CachedTrace | None
    ) -> Function:
        what = structure, setting.places, self.keys, self.selection, known, ()

        def program(*given: object) -> PyTree:
            with stage_with_setting(*what, given) as (stage, inputs, plan, replaced):
                if kind == "compare":
                    return differences(stage, inputs, plan, root=structure.entry.site)
                if isinstance(kind, UnitPass):
                    keep = Keep(units=kind.axis, parts=(OUTPUT,), sites=kind.sites)
                    plan = dataclasses.replace(plan, summarise=False, keep=keep)
                    seen = stage.evaluate(inputs, plan=plan)[1]
                    return record_of(stage, seen)
                keep = Keep(values=sample_units, parts=(OUTPUT,), counts=True)
                plan = dataclasses.replace(plan, keep=keep)
                held, grads = floats_of(stage), dict[int, Value]()
                if structure.loss_fn is None:
                    (out, seen), cotangents = stage.evaluate(inputs, plan=plan), None
                else:
                    out, seen, cotangents, grads = _run_with_gradients(stage, inputs, plan, held)
                value = stage.finish(with_own_parameters(stage, out, replaced), update=False)
                own = measure_parameters(stage, grads, inputs=inputs)
                record = record_of(stage, seen, cotangents, parameters=own)
                states = {path: sample_parameter(inputs[i]) for path, (i, _) in held.items()}
                # every array must vary: labels may vary while the model's inputs do not
                states[EXAMPLES_VARY] = examples_vary(stage.arrays, each=True)
                if structure.entry.where is None:  # else it is known what padding is
                    states |= _embedded_ids(stage, inputs, held)
            returned = Arguments.of(value).without_numpy()
            nodes, held_by_nodes = nnx.split(returned.take(returned.nodes), graph=True)
            empty = dataclasses.replace(returned, leaves=without_arrays(returned))
            out = returned.take(returned.arrays), held_by_nodes
            return out, record, states, _Returned(empty, nodes)

        return program


def _embedded_ids(
    stage: StagedCall, inputs: Sequence[Value], held: Collection[str]
) -> dict[str, Value]:
    """What embeddings receive as it is given, by `IDS_PREFIX` and the path of their parameter."""
    every = [] if stage.eager else module_sites(stage.roots[()])
    sites = [site.key for site in every if isinstance(site.module, nnx.Embed)]
    if not sites:
        return {}
    out: dict[str, Value] = {}
    for number, of in inputs_received(stage.survey.jaxpr, stage.owner, sites).items():
        x = inputs[number]
        for site in (site for site, same in of.items() if same):
            path = f"{site}/embedding" if site else "embedding"
            if path in held and x.ndim > 1 and x.shape[-1] > 1 and x.size:
                out[IDS_PREFIX + path] = id_stats(x)
    return out


def _run_with_gradients(
    stage: StagedCall, inputs: list[Value], plan: Plan, held: Mapping[str, tuple[int, bool]]
) -> tuple[list[Value], list[Value], PyTree, dict[int, Value]]:
    """The outputs, the seen values, the activations' gradients, and the parameters' by input
    number.

    There are no gradients if the loss cannot be differentiated (a parameter in a while loop) or its
    code reads values of a derivative.
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


def _avals(inputs: object) -> PyTree:
    """The same tree with jit's key for each array; None if it holds anything else."""
    if any(isinstance(x, jax.Ref) for x in jax.tree.leaves(inputs)):
        return None
    try:
        return jax.tree.map(jit.abstract, inputs)
    except TypeError:
        return None
