"""`profile`: the cost of a training step by module, from runs of the user's own function.

The step runs on copies of its arguments, so that donation and updates change nothing of the user's.
It is compiled with the names of modules, run, and run again under jax's profiler. Invariant: the
times of the rows add up to that of the run. An error of the step is raised as it is, with a note.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.flax_graphs import graph_nodes
from nnx_inspector._compat.launching.executables import Executable, executables, without_disk_cache
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.scope import scope_of
from nnx_inspector.hooks.sites import iter_modules, require_module, site_key
from nnx_inspector.profiling import hlo, traces
from nnx_inspector.profiling.memory import PeakMemory, note_memory, peak_of
from nnx_inspector.profiling.owners import PHASES, Owner, Parts, has_derivative, owners_of
from nnx_inspector.profiling.program_cost import ModulePath, ProgramCost, cost_of_program
from nnx_inspector.profiling.result import IDLE, OUTSIDE, ModuleCost, Profile
from nnx_inspector.profiling.scopes import open_named_scopes
from nnx_inspector.program.function import Arguments
from nnx_inspector.typing import Args, Array, Function, Jaxpr, Kwargs, PyTree, Value

DEFAULT_RUNS: Final = 3


def profile(
    model: nnx.Module,
    step: Callable[..., Any],
    /,
    *args: object,
    runs: int = DEFAULT_RUNS,
    folder: str | os.PathLike[str] | None = None,
    **kwargs: object,
) -> Profile:
    """Measure where the time and the memory of a training step go, by module.

    The step is compiled once more, with the names of modules in its program. Then it runs `runs`
    times as it is, and as often under `jax.profiler`. Each run gets copies of the arguments: the
    model, the optimizer and donated arrays stay as they are. What the step takes from around it,
    and not as an argument, is changed as by your own calls. Padding takes the time and memory of
    tokens, so all positions are measured.

    Args:
        model: the model that the step calls, itself or through its state.
        step: your step, jitted or not: with `nnx.jit`, `jax.jit`, donated arguments, or a state
            that it returns.
        args: its arguments, such as `model, optimizer, batch`.
        runs: how many runs are traced; the fastest is shown, which others have disturbed least.
        folder: where the trace stays, for XProf and Perfetto. By default it is deleted.
        kwargs: its keyword arguments.

    Raises:
        TypeError: `model` is not an `nnx.Module`, or `step` cannot be called.
        ValueError: `runs` is less than 1.
        InspectorError: the step calls none of the model's modules, another trace is running, or
            the trace has no operations.
        Exception: any exception of the step. One that says that memory is exhausted gets a note
            with the modules that need most.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.relu)
        >>> step = nnx.jit(nnx.grad(lambda model, x: (model(x) ** 2).mean()))
        >>> found = nni.profile(model, step, model, jnp.ones((128, 64)))
        >>> frame = found.to_frame()
        >>> columns = ["forward_ms", "backward_ms", "update_ms"]
        >>> bool(abs(frame[columns].to_numpy().sum() - found.step_ms) < 1e-6)
        True
    """
    require_module(model, "profile")
    if not callable(step):
        raise TypeError(f"profile takes a function as the step, got {type(step).__name__}.")
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}.")
    copied_step = _CopiedStep(model, step, args, kwargs)
    kept = None if folder is None else os.fspath(folder)
    with copied_step.noting_errors("compiled and run for the first time"):
        copied_step.run()
    untraced = [copied_step.run() for _ in range(runs)]
    with copied_step.noting_errors("traced"):
        data = traces.record_trace(copied_step.run_annotated, times=runs, folder=kept)
    every = traces.runs_in(data)
    run = min(every, key=lambda run: run.end - run.start)  # least disturbed by others
    programs = _programs_in(run)
    if not any(one.named for one in programs.values()):
        raise InspectorError(
            f"The step calls no module of the {type(model).__name__}, so nothing can be divided "
            f"between them. Pass the model that it calls as the first argument of profile, and the "
            f"step's own arguments after it. A function that was compiled ahead of time, or a tree "
            f"of another structure, has no names of modules: pass the jitted function itself."
        )
    times, idle = _time_by_owner(run, programs)
    return _profile_of(
        model,
        times,
        idle,
        programs,
        step_ms=(run.end - run.start) / 1e6,
        untraced_ms=1e3 * min(untraced),
        runs=len(every),
        folder=kept,
    )


class _CopiedStep:
    """A step and its arguments, which are copied for each run."""

    def __init__(self, model: nnx.Module, step: Function, args: Args, kwargs: Kwargs):
        self._model, self._step = model, step
        self._arguments = Arguments.of((args, kwargs))
        self._own = self._arguments.take(self._arguments.nodes)
        self._graphdef, self._state = nnx.split(self._own, graph=True)

    def run(self) -> float:
        """Run the step on copies; returns its seconds."""
        with self._call_on_copies() as call:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin

    def run_annotated(self) -> None:
        """Run the step on copies, within an event of the trace."""
        with self._call_on_copies() as call, jax.profiler.TraceAnnotation(traces.RUN_EVENT):
            call()

    @contextlib.contextmanager
    def _call_on_copies(self) -> Iterator[Callable[[], None]]:
        nodes = nnx.merge(self._graphdef, jax.tree.map(_copy, self._state))
        arrays = [_copy(x) for x in self._arguments.take(self._arguments.arrays)]
        args, kwargs = self._arguments.rebuild(nodes, arrays)
        jax.block_until_ready((arrays, nnx.state(nodes)))
        scope = scope_of(self._model, candidates=True)
        scope.copy_paths(_nodes_of(self._own), _nodes_of(nodes))

        def call() -> None:
            out = self._step(*args, **kwargs)
            jax.block_until_ready((_arrays(out), _arrays(nnx.state(nodes))))

        with open_named_scopes(scope), without_disk_cache():
            yield call

    @contextlib.contextmanager
    def noting_errors(self, when: str) -> Iterator[None]:
        """Say of an error when it was raised, and of exhausted memory who needs most."""
        try:
            yield
        except InspectorError:
            raise
        except Exception as error:
            note_memory(error, when)
            raise


def _copy(x: object) -> Value:
    if isinstance(x, jax.Ref):
        x = x[...]
    return x.copy() if isinstance(x, jax.Array) else x


def _arrays(tree: PyTree) -> list[Array]:
    every = jax.tree.leaves(tree)
    return [x for x in every if isinstance(x, jax.Array) and not x.is_deleted()]


def _nodes_of(nodes: object) -> list[Value]:
    return [node for _, node, again in graph_nodes(nodes) if not again]


# ---------------------------------------------------------------- whose time it is


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """A compiled program that ran in a step.

    Attributes:
        parts: by operation, to whom it belongs; empty if its text is not known.
        cost: what it computes and keeps; None if its jaxpr is not known.
        named: whether it has a module's operations.
        has_derivatives: whether it has a module's operations, or those of a derivative.
        times: how often it ran.
    """

    parts: Mapping[str, Parts]
    cost: ProgramCost | None
    executable: Executable | None
    module: hlo.Module | None
    named: bool
    has_derivatives: bool
    times: int


def _programs_in(run: traces.Run) -> dict[traces.ProgramKey, _Program]:
    """The programs of a run: each the one with its number or, without a number that is known, the
    one of its name whose operations the trace has.
    """
    counts: dict[traces.ProgramKey, dict[str, int]] = {}
    for event in run.events:
        key, operation = event.key
        of = counts.setdefault(key, {})
        of[operation] = of.get(operation, 0) + 1
    found: dict[traces.ProgramKey, _Program] = {}
    for key, seen in counts.items():
        named = [(jaxpr, one) for jaxpr, one in executables.items() if one.name == key.name]
        same = [(jaxpr, one) for jaxpr, one in named if one.number == key.number]
        best: tuple[int, Jaxpr, Executable, hlo.Module] | None = None
        for jaxpr, executable in same or named:
            module = hlo.parse(executable.text())
            names = {one.name for those in module.computations.values() for one in those}
            fits = len(names & seen.keys())
            if best is None or fits >= best[0]:  # of several that fit, the newest
                best = fits, jaxpr, executable, module
        unknown = _Program({}, None, None, None, False, False, times=min(seen.values()))
        found[key] = _analyse_program(seen, *best[1:]) if best else unknown
    return found


def _analyse_program(
    seen: Mapping[str, int], jaxpr: Jaxpr, executable: Executable, module: hlo.Module
) -> _Program:
    parts = owners_of(module)
    outermost = [one.name for one in module.computations[module.entry] if one.name in seen]
    return _Program(
        parts,
        cost_of_program(jaxpr),
        executable,
        module,
        named=any(path is not None for of in parts.values() for path, _ in of),
        has_derivatives=has_derivative(module),
        times=min((seen[name] for name in outermost), default=1),
    )


def _time_by_owner(
    run: traces.Run, programs: Mapping[traces.ProgramKey, _Program]
) -> tuple[dict[Owner, float], float]:
    """The milliseconds of each owner in a run, and those in which nothing ran.

    A program without a module or a derivative that starts after the backward pass has begun is an
    update, as of an optimizer outside jit.
    """
    backward = [
        event.start
        for event in run.events
        for _, phase in programs[event.key[0]].parts.get(event.key[1], ())
        if phase == "backward"
    ]
    begun = min(backward, default=math.inf)
    late = {name for name, one in programs.items() if not (one.named or one.has_derivatives)}
    late -= {event.key[0] for event in run.events if event.start < begun}
    divided, idle = traces.time_shares(run.events, run.start, run.end)
    found: dict[Owner, float] = {}
    for (name, operation), time_ns in divided.items():
        otherwise = (None, "update") if name in late else (None, "forward")
        parts = {otherwise: 1.0}
        if name not in late:
            parts = programs[name].parts.get(operation, parts)
        for owner, part in parts.items():
            found[owner] = found.get(owner, 0.0) + time_ns * part / 1e6
    return found, idle / 1e6


# ------------------------------------------------------------------- the result


def _profile_of(
    model: nnx.Module,
    times: Mapping[Owner, float],
    idle: float,
    programs: Mapping[traces.ProgramKey, _Program],
    **of_the_run: Any,
) -> Profile:
    flops, kept, notes = _costs_by_module(programs)
    dtype = _main_dtype(programs)
    own_ms = {site: _forward_and_backward(times, site) for site, _ in times}
    rates = {site: _rate(flops.get(site), own) for site, own in own_ms.items()}
    # other work on the machine, or products of a friendlier shape, make the large product the
    # slower one: then the fastest module says what is possible. Shorter times say too little
    short = MIN_SHARE * math.fsum(times.values())
    long = [rate for site, rate in rates.items() if own_ms[site] >= short]
    fastest = [rate for rate in long if not math.isnan(rate)]
    possible = max([matmul_rate(dtype), *fastest]) if dtype else math.nan
    largest = max(
        (one for one in programs.values() if one.executable is not None),
        key=lambda one: sum(len(of) for of in one.parts.values()),
        default=None,
    )
    peak = PeakMemory()
    if largest is not None and largest.executable is not None and largest.module is not None:
        peak = peak_of(largest.executable, largest.module, largest.parts)
    notes += peak.notes
    types = {site_key(path): type(module).__name__ for path, module in iter_modules(model)}
    known_paths = {path for path, _ in times} | flops.keys() | kept.keys() | peak.by_module.keys()
    within = {"", *(above for path in known_paths if path for above in _ancestors(path))}
    sites = [site for site in types if site in known_paths | within]
    sites += sorted(path for path in known_paths if path is not None and path not in types)
    rows: list[ModuleCost] = []
    for site in (*sites, None):
        own = {phase: times.get((site, phase), 0.0) for phase in PHASES}
        mine = flops.get(site, 0.0)
        share = rates.get(site, math.nan) / possible
        rows.append(
            ModuleCost(
                site=OUTSIDE if site is None else site,
                type=types.get(site or "", "") if site is not None else "",
                forward_ms=own["forward"],
                backward_ms=own["backward"],
                update_ms=own["update"],
                total_ms=_inclusive_time(times, site),
                kept_bytes=kept.get(site, 0.0),
                peak_bytes=peak.by_module.get(site, 0.0 if peak.by_module else math.nan),
                flops=math.nan if mine is None else mine,
                flops_of_possible=share if share <= 1 else math.nan,
            )
        )
    rows.append(ModuleCost(site=IDLE, forward_ms=idle, total_ms=idle))
    return Profile(
        rows=tuple(rows),
        peak_bytes=peak.bytes,
        argument_bytes=peak.arguments,
        possible_flops=possible,
        dtype=dtype,
        device=jax.devices()[0].device_kind,
        notes=tuple(notes),
        **of_the_run,
    )


def _costs_by_module(
    programs: Mapping[traces.ProgramKey, _Program],
) -> tuple[dict[ModulePath, float | None], dict[ModulePath, float], tuple[str, ...]]:
    """The FLOPs of each module, and the bytes that it keeps; and what is not known of them."""
    flops: dict[ModulePath, float | None] = {}
    kept: dict[ModulePath, float] = {}
    notes: list[str] = []
    for (name, _), one in programs.items():
        cost = one.cost
        if cost is None:
            if one.has_derivatives:
                notes.append(f"What {name!r} computes and keeps is not known: it was not noted.")
            continue
        for of, count in cost.flops.items():
            known = flops.get(of, 0.0)
            flops[of] = None if known is None or count is None else known + count * one.times
        for of, size in cost.kept.items():
            kept[of] = kept.get(of, 0.0) + size
        if cost.backward and not cost.forward:
            notes.append(
                f"kept: {name!r} has the backward pass alone, so what it keeps for that is not "
                f"known. Put the loss and its gradient into one jitted function."
            )
            kept = dict.fromkeys((*kept, *cost.flops), math.nan)
    return flops, kept, tuple(notes)


def _main_dtype(programs: Mapping[traces.ProgramKey, _Program]) -> str:
    """The dtype of the operands of most matrix products, by their FLOPs; "" without any."""
    found: dict[str, float] = {}
    for one in programs.values():
        for dtype, flops in one.cost.products.items() if one.cost else ():
            found[dtype] = found.get(dtype, 0.0) + flops * one.times
    return max(found, key=lambda dtype: found[dtype], default="")


MIN_SECONDS, MAX_ROWS = 0.01, 8192
"""A product of matrices is large enough if it takes so many seconds, or has so many rows."""
MIN_SHARE = 0.01
"""Of the time of a step: a module that takes less says nothing of what the device can do."""


@functools.lru_cache
def matmul_rate(dtype: str) -> float:
    """The floating-point operations per second of a large matrix product on the default device.

    It is measured: a data sheet says nothing of this machine's clock, its cores, or the precision
    that jax uses.
    """
    rows, most = 512, 0.0
    product = jax.jit(jnp.matmul)
    with internal_config():
        while True:
            x = jnp.ones((rows, rows), dtype)
            product(x, x).block_until_ready()
            seconds: list[float] = []
            for _ in range(5):
                begin = time.perf_counter()
                product(x, x).block_until_ready()
                seconds.append(time.perf_counter() - begin)
            most = max(most, 2 * rows**3 / min(seconds))
            if min(seconds) >= MIN_SECONDS or rows >= MAX_ROWS:
                return most
            rows *= 2


def _forward_and_backward(times: Mapping[Owner, float], site: str | None) -> float:
    return times.get((site, "forward"), 0.0) + times.get((site, "backward"), 0.0)


def _rate(flops: float | None, own_ms: float) -> float:
    """Floating-point operations per second; NaN if they or their time are not known."""
    return flops / own_ms * 1e3 if flops and own_ms else math.nan


def _ancestors(path: str) -> list[str]:
    """The paths of the modules around one, without the model's."""
    segments = path.split("/")
    return ["/".join(segments[:n]) for n in range(1, len(segments))]


def _inclusive_time(times: Mapping[Owner, float], site: str | None) -> float:
    """The time of a module and all modules in it."""
    inside = f"{site}/" if site else ""
    return math.fsum(
        time
        for (path, _), time in times.items()
        if path == site or (site is not None and path is not None and path.startswith(inside))
    )
