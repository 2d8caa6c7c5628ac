"""What is being traced, where a value comes from, and the settings of a thread."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

import jax
import jax.core as jcore
import jax.extend.core as jex
import jax.monitoring
from jax._src import config, core, mesh, monitoring
from jax._src.interpreters import ad, batching, partial_eval

from nnx_inspector._compat.sources import source_of_caller
from nnx_inspector.typing import Aval, OpenJaxpr, Value


def trace_state() -> Any:
    """An opaque value; two are equal exactly if the same jax trace was current."""
    # The `nnx` convention compares traces by identity, as flax does for its Variables. The default
    # one, of `jax.extend`, would take two traces of the same kind for one.
    return jex.get_opaque_trace_state(convention="nnx")


def trace_is_over(state: Any) -> bool:
    """Whether the trace of a `trace_state()` is gone: no later state will equal it."""
    # jax gives no way to ask. Without it, notes about a trace would be kept for good, or be taken
    # for those of a later trace at the same address. It can go when jax lets a trace state be
    # asked.
    return state._trace_ref() is None


def outermost_program() -> Any:
    """The trace of the whole program that is being traced (`jit`, not an eager `grad`), or None."""
    # jax knows the innermost trace only, and each trace its parent: a `grad` within a jit is above
    # the jit's. Which program a value ends up in decides whose call it is. Without it, the model of
    # an eager `grad` would be taken for one within a program. It can go when jax names the program
    # of a trace.
    trace, found = core.trace_ctx.trace, None
    while trace is not None:
        found = trace if isinstance(trace, partial_eval.DynamicJaxprTrace) else found
        trace = getattr(trace, "parent_trace", None)
    return found


def is_current_tracer(x: object) -> bool:
    """Whether a tracer belongs to what is being traced: it may be used, and has not leaked."""
    trace = core.trace_ctx.trace
    while hasattr(trace, "_outer"):  # `interpreter` traces nothing itself
        trace = trace._outer
    # jax checks this only when a leaked tracer is used, by an error that names no site. Without it,
    # a value kept from an earlier trace would raise in the user's step.
    return getattr(x, "_trace", None) is trace


@dataclasses.dataclass(frozen=True)
class OuterValue:
    """What a value is outside the transforms that it has entered.

    Attributes:
        value: an object that is the same for the same value.
        program: identifies the trace of the program that it belongs to; None for an array.
        given: whether that program takes it from outside and has not computed it.
    """

    value: Value
    program: Hashable
    given: bool


def outer_value(x: Value) -> OuterValue:
    """What an array or a tracer is outside `vmap`, `grad` and the like, up to the next program."""
    while is_tracer(x):
        # Each transformation wraps a value in a tracer of its own: a BatchTracer has it as `val`, a
        # JVPTracer as `primal`. Flax copies a model's Variables into a transform, and these wrapped
        # values are all that connects the copies with the parameters outside. Without it, a module
        # that was merged within `nnx.vmap` or `nnx.grad` could not be told from a teacher of equal
        # shapes. It can go when jax can say what a tracer stands for.
        if isinstance(x, partial_eval.DynamicJaxprTracer):
            return OuterValue(x.val, _weak_key(x._trace), x.parent is None)
        inner = getattr(x, "primal", None)
        inner = getattr(x, "val", None) if inner is None else inner
        if inner is None:
            return OuterValue(x, _weak_key(x._trace), given=False)
        x = inner
    return OuterValue(x, None, given=False)


def _weak_key(trace: object) -> Hashable:
    found = weakref.ref(trace)
    hash(found)  # kept from now on: it cannot be computed once the trace is gone
    return found


def input_names(jaxpr: OpenJaxpr) -> tuple[str, tuple[str, ...]]:
    """The function that a bare jaxpr was traced from, with its line, and what it calls each input:
    `"state['a'].value"`, or "" if jax does not know; no names if it knows none.
    """
    names = tuple(jaxpr.debug_info.arg_names or ())
    return jaxpr.debug_info.func_src_info, names if len(names) == len(jaxpr.invars) else ()


def result_names(jaxpr: OpenJaxpr) -> tuple[str, ...]:
    """What a bare jaxpr calls each output: `"result[0]['a']"`; none if jax knows none."""
    names: tuple[str, ...] = tuple(jaxpr.debug_info.result_paths or ())
    return names if len(names) == len(jaxpr.outvars) else ()


def current_vmaps() -> list[Value]:
    """The identity of each `vmap` that is being traced here, innermost first.

    Those around a jitted or scanned function, or around `interpreter.interpreted`, are not here.
    """
    # jax has no list of the `vmap`s around a line. What is measured under one has an axis less than
    # what the user sees, and the members of an ensemble are told apart by it. It can go when jax
    # lists the axes that are mapped, also those without a name.
    trace, found = core.trace_ctx.trace, list[Value]()
    while isinstance(trace, (batching.BatchTrace, ad.JVPTrace, ad.LinearizeTrace)):
        if isinstance(trace, batching.BatchTrace):
            found.append(trace)
        trace = trace.parent_trace
    return found


def vmaps_of(x: object) -> list[tuple[Any, int]]:
    """Each `vmap` that maps a value and is being traced: its identity and size, innermost first."""
    found: list[tuple[Any, int]] = []
    while is_tracer(x):
        if isinstance(x, batching.BatchTracer):
            if x.batch_dim is not None:
                found.append((x._trace, x._trace.axis_data.size))
            x = x.val
        else:
            x = getattr(x, "primal", None)
    return found


def is_tracer(x: object) -> bool:
    return isinstance(x, jcore.Tracer)


def in_forward_mode(x: object) -> bool:
    """Whether a value is differentiated here in forward mode (`jax.jvp`), innermost."""
    return isinstance(x, ad.JVPTracer)


def compilation_events(listener: Callable[[str, float, str], None]) -> Callable[[], None]:
    """Call `listener(kind, seconds, function)` for each trace and compilation, in its thread, with
    the function's name; returns an undo function.
    """

    def on_event(event: str, seconds: float, fun_name: str = "", **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            # The events are those of jax.monitoring, which is public; their names are not. A test
            # makes both happen and fails if a name changes. Without them, `insp.compilations` would
            # be empty.
            listener("compile", seconds, fun_name.removeprefix("jit(").removesuffix(")"))
        elif event == "/jax/core/compile/jaxpr_trace_duration":
            listener("trace", seconds, fun_name)

    listener_of: Any = on_event
    jax.monitoring.register_event_duration_secs_listener(listener_of)

    def undo() -> None:
        monitoring.unregister_event_duration_listener(listener_of)

    return undo


@dataclasses.dataclass(frozen=True)
class CacheMiss:
    """Why jax traces a function of the user although it may have traced it before.

    Attributes:
        function: its name.
        defined: the `file:line` where it is defined, or "".
        called: the `file:line` of the user's code that called it, or "".
        kind: "new", a function never seen; "types", "structure" (with static values) or "context"
            if that differs from all calls before.
        identity: the `id` of a function never seen; else 0.
        changes: what differs from the most similar call before, one text each.
    """

    function: str
    defined: str
    called: str
    kind: str
    identity: int
    changes: tuple[str, ...]


_misses_lock = threading.Lock()
_miss_listeners: list[Callable[[CacheMiss], None]] = []
_EXPLAINS: Final = "jax_explain_cache_misses"
_LOGGERS: Final = ("interpreters.partial_eval", "compiler", "compilation_cache")
_DISK_CACHE_MESSAGES: Final = (
    "PERSISTENT COMPILATION CACHE MISS",
    "Not writing persistent",
    "Writing %s to persistent",
)


def cache_misses(listener: Callable[[CacheMiss], None]) -> Callable[[], None]:
    """Call `listener` for each trace of a function of the user, in its thread, before it is traced;
    returns an undo function.

    jax compares the arguments of such a call with those of all calls before, and says what differs,
    but only in its log, and only under a setting. So the setting is on while anybody listens, and
    a filter takes these messages out of the log. Nothing else tells which argument differs: the
    keys of jax's caches are within C++. The setting is in no key of a cache, so nothing is compiled
    because of it. What breaks without it: `insp.compilations` cannot say why. It can go when jax
    hands the comparison to a listener.

    jax takes a call in another context (a setting, our hooks) for the most similar one, whatever
    its arguments are; `_rank_by_arguments` makes it the least similar. Otherwise a step whose batch
    has a new shape would be explained by our hooks, if it ever ran without them.
    """
    with _misses_lock:
        _miss_listeners.append(listener)
        if len(_miss_listeners) == 1 and not getattr(jax.config, _EXPLAINS):
            for name in _LOGGERS:
                logging.getLogger(f"jax._src.{name}").addFilter(_filter_record)
            partial_eval.diff_tracing_cache_keys = _rank_by_arguments
            jax.config.update(_EXPLAINS, True)

    def undo() -> None:
        with _misses_lock:
            _miss_listeners.remove(listener)
            if not _miss_listeners and _filter_record in _logger().filters:
                jax.config.update(_EXPLAINS, False)
                partial_eval.diff_tracing_cache_keys = _difference_of_keys
                for name in _LOGGERS:
                    logging.getLogger(f"jax._src.{name}").removeFilter(_filter_record)

    return undo


_difference_of_keys: Callable[[Any, Any], tuple[Value, ...]] = partial_eval.diff_tracing_cache_keys


def _rank_by_arguments(new: Value, old: Value) -> tuple[Value, ...]:
    rank, *rest = _difference_of_keys(new, old)
    return (rank + 10 * (new[0] != old[0]), *rest)


def _logger() -> logging.Logger:
    return logging.getLogger(f"jax._src.{_LOGGERS[0]}")


def _filter_record(record: logging.LogRecord) -> bool:
    """Whether a message is none of those that jax logs only under the setting."""
    if str(record.msg).startswith("TRACING CACHE MISS"):
        miss = _parse_miss(record.getMessage())
        for listener in tuple(_miss_listeners):
            listener(miss)
        return False
    return not str(record.msg).startswith(_DISK_CACHE_MESSAGES)


def _parse_miss(text: str) -> CacheMiss:
    """What jax says of a miss; a form of its text that is not known has no kind.

    jax also says of a new function that it has "seen another function defined on the same line".
    It compares the lines that call, so it says this of two functions that are called on one line.
    """
    form = r"^(?:  for |    )(?P<name>\S+)(?: id=(?P<id>\d+))?(?: defined at (?P<at>.+?))?$"
    found = re.search(form, text, re.MULTILINE)
    name, at, identity = (found["name"], found["at"], found["id"]) if found else ("", "", 0)
    kinds = {
        "never seen function": "new",
        "different input types": "types",
        "different input pytree": "structure",
        "Tracing context doesn't match": "context",
    }
    kind = next((kind for said, kind in kinds.items() if said in text), "")
    changes = re.split(r"^  \* ", text, flags=re.MULTILINE)[1:]
    called, _ = source_of_caller()
    return CacheMiss(
        function=name.rpartition(".")[2],
        defined=at or "",
        called=called,
        kind=kind,
        identity=int(identity or 0),
        changes=tuple(map(str.strip, changes)),
    )


def is_tracing() -> bool:
    """Whether values computed here and now may be traced into a program."""
    # jax has no public name for this. Without it, our own passes would begin within the user's
    # trace, and become part of their program.
    return not core.trace_state_clean()


def trace_context() -> Hashable:
    """Everything besides its arguments that a trace depends on: settings, mesh, open hooks."""
    # The tuple that jax itself has in each cache key. A list of settings of our own would miss
    # those that a later version of jax adds, and a program would then be used under settings that
    # it was not made for. It can go when jax makes the tuple public.
    return config.trace_context()


def abstract(x: object) -> jax.ShapeDtypeStruct:
    """An array as jit's cache sees it: shape, dtype, weak type and committed sharding."""
    aval: Aval = jax.typeof(x)
    where = x.sharding if isinstance(x, jax.Array) and x.committed else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where, weak_type=aval.weak_type)


def local_settings() -> tuple[tuple[Any, Any], ...]:
    """The jax settings made in this thread by context managers, each with its value."""
    found: list[tuple[Any, Any]] = []
    for state in (*config.config_states.values(), *_unnamed_settings()):
        # A context manager such as `jax.default_matmul_precision` sets a value for one thread, and
        # jax has no way to take these values along to another thread. Without it, what a thread of
        # ours compiles ahead would have other settings than the user's call, which would then
        # compile it once more, in the middle of training. It can go when jax's contexts can be
        # copied, as those of contextvars.
        if isinstance(state, config.config_ext.Config):
            value = state.get_local()
            if value is not config.config_ext.unset:
                found.append((state, value))
    return tuple(found)


def _unnamed_settings() -> list[Value]:
    """Settings without a flag, such as meshes; jax 0.12 keeps some of them in its mesh module."""
    names = ("mesh_context_manager", "abstract_mesh_context_manager", "device_context",
             "compute_on_context_manager", "xla_metadata_context_manager")  # fmt: skip
    every = [getattr(module, name, None) for module in (config, mesh) for name in names]
    return list({id(state): state for state in every if state is not None}.values())


@contextlib.contextmanager
def with_local_settings(local: tuple[tuple[Any, Any], ...]) -> Iterator[None]:
    """A context with the settings that `local_settings` found, for any thread."""
    unset = config.config_ext.unset
    with contextlib.ExitStack() as stack:
        for state, value in local:
            # Some settings tell C++ code of their value by a hook, which `swap_local` does not
            # call.
            before = state.swap_local(value)
            hook = getattr(state, "_update_thread_local_hook", None)
            if hook is not None:
                hook(value)
                stack.callback(hook, None if before is unset else before)
            stack.callback(state.set_local, before)
        yield
