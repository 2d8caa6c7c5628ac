"""Traces, compilations and calls of jitted functions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Protocol

import jax
import jax.core as jcore
import jax.extend.core as jex
import jax.stages
import numpy as np
from flax.nnx import graphlib
from flax.nnx.transforms import compilation
from jax._src import core
from jax._src.interpreters import ad, batching, partial_eval

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.redirect import copy_of, redirect


def swap_executables(
    made: Callable[[Any], None],
    called: Callable[[Any], None],
    undone: Callable[[Callable[[], None]], object],
) -> None:
    """Call `made` and `called` when an ahead-of-time compiled executable is made or called;
    `undone` gets what undoes that.
    """
    cls = jax.stages.Compiled
    for method, listener in ((cls.__init__, made), (cls.__call__, called)):
        original = copy_of(method)

        def target(
            self: Any, *args: Any, _original: Any = original, _listener: Any = listener, **kw: Any
        ) -> Any:
            _listener(self)
            return _original(self, *args, **kw)

        redirect(method, target, original, undone)


def trace_state() -> Any:
    """An opaque value; two are equal exactly if the same jax trace was current."""
    return jex.get_opaque_trace_state(convention="nnx")


def trace_is_over(state: Any) -> bool:
    """Whether the trace of a `trace_state()` is gone: no later state will equal it."""
    return state._trace_ref() is None


def outermost_trace() -> Any:
    """The trace of all that is being traced, or None."""
    return next(iter(_traces_here()), None)


def outermost_program() -> Any:
    """The trace of the whole program that is being traced (`jit`, not an eager `grad`), or None."""
    kind = partial_eval.DynamicJaxprTrace
    return next((one for one in _traces_here() if isinstance(one, kind)), None)


def _traces_here() -> list[Any]:
    """The traces that are under way, outermost first."""
    trace, found = core.trace_ctx.trace, list[Any]()
    while trace is not None and not isinstance(trace, core.EvalTrace):
        found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found[::-1]


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a value is outside the transforms that it has entered.

    Attributes:
        value: an object that is the same for the same value.
        program: identifies the trace of the program that it belongs to; None for an array.
        given: whether that program takes it from outside and has not computed it.
    """

    value: Any
    program: Hashable
    given: bool


def origin_of(x: Any) -> Origin:
    """What an array or a tracer is outside `vmap`, `grad` and the like, up to the next program."""
    while is_tracer(x):
        if isinstance(x, partial_eval.DynamicJaxprTracer):
            return Origin(x.val, _without_hold(x._trace), x.parent is None)
        inner = getattr(x, "primal", None)
        inner = getattr(x, "val", None) if inner is None else inner
        if inner is None:
            return Origin(x, _without_hold(x._trace), given=False)
        x = inner
    return Origin(x, None, given=False)


def _without_hold(trace: Any) -> Hashable:
    found = weakref.ref(trace)
    hash(found)  # kept from now on: it cannot be computed once the trace is gone
    return found


def vmaps_here() -> list[Any]:
    """The identity of each `vmap` that is being traced here, innermost first.

    Those around a jitted or scanned function, or around `interpreter.interpreted`, are not here.
    """
    trace, found = core.trace_ctx.trace, list[Any]()
    while isinstance(trace, (batching.BatchTrace, ad.JVPTrace, ad.LinearizeTrace)):
        if isinstance(trace, batching.BatchTrace):
            found.append(trace)
        trace = trace.parent_trace
    return found


def vmaps_of(x: Any) -> list[tuple[Any, int]]:
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


def is_tracer(x: Any) -> bool:
    return isinstance(x, jcore.Tracer)


def in_forward_mode(x: Any) -> bool:
    """Whether a value is differentiated here in forward mode (`jax.jvp`), innermost."""
    return isinstance(x, ad.JVPTracer)


def compilation_events(listener: Callable[[str, float], None]) -> Callable[[], None]:
    """Call `listener(kind, seconds)` for each trace and compilation; returns an undo function."""
    import jax.monitoring
    from jax._src import monitoring

    def on_event(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            listener("compile", seconds)
        elif event == "/jax/core/compile/jaxpr_trace_duration":
            listener("trace", seconds)

    listener_of: Any = on_event
    jax.monitoring.register_event_duration_secs_listener(listener_of)

    def undo() -> None:
        monitoring.unregister_event_duration_listener(listener_of)

    return undo


def is_tracing() -> bool:
    """Whether values computed here and now may be traced into a program."""
    return not core.trace_state_clean()


def inside_while_loop() -> bool:
    """Whether the current code is being traced as the body of a while loop.

    A host callback there runs twice, or breaks the user's program, if the loop is differentiated.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "while_loop" and code.co_filename.endswith("control_flow/loops.py"):
            return True
        frame = frame.f_back
    return False


Change = Callable[[Any], tuple[Any, Sequence[Any], int] | None]


@dataclasses.dataclass(frozen=True)
class JitCall:
    """A call of a jitted function without its arrays, which suffices to compile it again."""

    function: Any
    options: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nnx: Any

    def same(self, other: JitCall) -> bool:
        """Whether another call would be compiled to the same program."""
        return self.function is other.function and _alike(
            (self.args, self.kwargs), (other.args, other.kwargs)
        )

    def jitted(self) -> Callable[..., Any]:
        """The jitted function, which shares its programs with the one that was called."""
        from jax._src import pjit

        return pjit._cpp_pjit(self.function, self.options)

    def compile(self, change: Change = lambda _: None) -> None:
        """Trace and compile it in this thread's contexts; jax caches the program.

        Args:
            change: returns, for the program, the one to be compiled instead, values for its
                additional inputs, and the number of its additional outputs; or None.
        """
        from jax._src import pjit

        jitted = types.SimpleNamespace(_fun=self.function, _jit_info=self.options)
        with contextlib.ExitStack() as stack:
            if self.nnx is not None:
                stack.enter_context(graphlib.update_context(self.nnx))
            traced: Any = pjit.jit_trace(jitted, *self.args, **self.kwargs)
            changed = change(traced.jaxpr)
            if changed is None:
                traced.lower().compile()
                return
            program, inputs, outputs = changed
            every = [*map(pjit.convert_to_metaty, inputs), *traced._meta_tys_flat]
            _compile(every, _changed(traced._params, program, len(inputs), outputs))


_ON_A_GPU: Final = {"xla_gpu_graph_min_graph_size": 2**30}
"""Kernels are started one by one. XLA would record them in a CUDA graph, and renew its nodes before
each run, because the arrays have moved: 16 microseconds for a kernel, where a start takes 3 and
most kernels of a summary run for 5."""


def _changed(params: dict[str, Any], program: Any, inputs: int, outputs: int) -> dict[str, Any]:
    """The parameters of a jit for another program, with more inputs and outputs."""
    options = dict(params["compiler_options_kvs"])
    if jax.default_backend() == "gpu":
        options = {**_ON_A_GPU, **options}
    changed = jaxprs.with_inputs(params, program, inputs, outputs=outputs)
    return {**changed, "compiler_options_kvs": tuple(options.items())}


def _compile(types: Sequence[Any], params: dict[str, Any]) -> None:
    """Lower and compile what a jit with these parameters runs; jax caches it."""
    from jax._src import pjit
    from jax._src.interpreters import mlir

    how: dict[str, Any] = {"lowering_platforms": None, "pgle_profiler": None}
    lowering = mlir.LoweringParameters()
    pjit._resolve_and_lower(types, **params, **how, lowering_parameters=lowering).compile()


def _alike(a: Any, b: Any) -> bool:
    a, b = jax.tree.flatten(a), jax.tree.flatten(b)
    return a[1] == b[1] and all(
        type(x) is type(y) and x == y for x, y in zip(a[0], b[0], strict=True)
    )


class JitListener(Protocol):
    """A function called for each jitted call; it must not raise.

    `program` is the same object for calls that differ only in their arrays and in `variant`. Calls
    equal in both share a compilation. `made()` returns the call.
    """

    def __call__(self, program: Any, variant: Hashable, made: Callable[[], JitCall], /) -> None: ...


@dataclasses.dataclass(frozen=True, eq=False)
class JitStart:
    """A jitted call that is about to run; `program` and `made` are those of a `JitListener`."""

    program: Any
    function: Any
    made: Callable[[], JitCall]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    _params: Any
    _arrays: Sequence[Any]
    _own: Callable[[], Any]

    def run(self, program: Any, inputs: Sequence[Any], outputs: int = 0) -> tuple[Any, list[Any]]:
        """The results of another program, which takes `inputs` before the arrays of this one, and
        its additional outputs, which follow the results.
        """
        from jax._src import config, pjit

        arrays = [*inputs, *self._arrays]
        params = _changed(self._params.params, program, len(inputs), outputs)
        core.check_eval_args(arrays)
        # `bind` would look at each array once more
        started = pjit.jit_p.bind if config.debug_key_reuse.value else pjit.jit_p.impl
        found = list(started(*arrays, **params))
        count = len(found) - outputs
        return jax.tree.unflatten(self._params.out_tree, found[:count]), found[count:]

    def directly(self, program: Any, inputs: Sequence[Any]) -> Directly:
        """As `run`; in jax's fast path the program gets the same `inputs` again."""
        from jax._src import pjit

        params = _changed(self._params.params, program, len(inputs), 0)
        leaves, compiled, profiler, constants = pjit._pjit_call_impl_python(
            *inputs, *self._arrays, **params
        )
        tree = self._params.out_tree
        before = [*constants, *inputs]  # jax passes a program's constants before its arguments
        out = jax.tree.unflatten(tree, leaves)
        return Directly((out, leaves, tree, self._arrays, program, compiled, profiler, before))

    def own(self) -> Directly:
        """What jax makes of the call in the contexts that are open here, for its fast path. The
        results are `like_mine`.
        """
        _, leaves, _, *rest = self._own()
        tree = self._params.out_tree
        return Directly((jax.tree.unflatten(tree, leaves), leaves, tree, *rest))

    def like_mine(self, out: Any) -> Any:
        """The results of the same function traced elsewhere, with the graphdefs of this program.

        Modules come out of a program with the tags of the layers that were open in its trace.
        """
        return jax.tree.unflatten(self._params.out_tree, jax.tree.leaves(out))

    def compiler(self, inputs: Sequence[Any]) -> Callable[[Any], None]:
        """What compiles a program for `run`, in a thread's contexts. It traces nothing, and keeps
        no array.
        """
        from jax._src import pjit

        types = list(map(pjit.convert_to_metaty, [*inputs, *self._arrays]))
        before, count = self._params.params, len(inputs)
        return lambda program: _compile(types, _changed(before, program, count, 0))


@dataclasses.dataclass(frozen=True, eq=False)
class Directly:
    """The result of a jitted call, with all that jax needs to run it in its fast path next time."""

    result: tuple[Any, ...]


class JitChooser(Protocol):
    """A function called for each jitted call that is about to run; it must not raise.

    If it returns a function, what that returns is the result of the call, or `Directly`.
    """

    def __call__(self, call: JitStart, /) -> Callable[[], Any] | None: ...


class _Call(threading.local):
    """The call that a thread is about to run: its parameters, and how it was made."""

    params: Any = None
    made: Callable[[], JitCall] | None = None
    infer: Callable[[], tuple[Any, Any]] | None = None


_call = _Call()


def swap_jit_misses(
    listener: JitListener,
    choose: JitChooser = lambda *_: None,
    prepare: Callable[[], None] = lambda: None,
    undone: Callable[[Callable[[], None]], object] = lambda undo: None,
) -> Callable[[], None]:
    """Call `listener` for each jitted call that jax does not handle in its fast path, `prepare`
    before it is traced, and `choose` before it runs.

    Any thread's calls are heard, except those within a trace. Returns an undo function, which
    `undone` gets before anything is changed.
    """
    from jax._src import pjit

    infer_before, run_before = pjit._infer_params, pjit._run_python_pjit

    def infer_params(fun: Any, options: Any, args: Any, kwargs: Any) -> Any:
        if core.trace_state_clean():
            prepare()
        params, arrays = infer_before(fun, options, args, kwargs)
        if core.trace_state_clean():
            placed = tuple(
                x.sharding if isinstance(x, jax.Array) and x.committed else None for x in arrays
            )
            made = functools.partial(_jit_call, fun, options, args, kwargs)
            listener(params.params["jaxpr"], (options, placed), made)
            _call.params, _call.made = params, made
            _call.infer = functools.partial(infer_before, fun, options, args, kwargs)
        return params, arrays

    def run_chosen(params: Any, arrays: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        of, made, infer = _call.params, _call.made, _call.infer
        _call.params = _call.made = _call.infer = None
        program, instead = params.params["jaxpr"], None
        # jax may have found the same parameters for a call that was only lowered
        if of is params and made is not None and infer is not None and core.trace_state_clean():
            own = lambda: run_before(*infer(), fun, args, kwargs)  # noqa: E731
            instead = choose(JitStart(program, fun, made, args, kwargs, params, arrays, own))
        if instead is None:
            return run_before(params, arrays, fun, args, kwargs)
        found = instead()
        if isinstance(found, Directly):
            return found.result
        # without an executable, jax comes here again the next time
        return found, None, None, arrays, program, None, None, []

    module: Any = pjit

    def undo() -> None:
        module._infer_params, module._run_python_pjit = infer_before, run_before

    undone(undo)
    module._infer_params, module._run_python_pjit = infer_params, run_chosen
    return undo


def _jit_call(fun: Any, options: Any, args: Any, kwargs: Any) -> JitCall:
    static = {*options.static_argnums}
    named = {*options.static_argnames}
    return JitCall(
        fun,
        options,
        tuple(x if i in static else _abstract(x) for i, x in enumerate(args)),
        {k: x if k in named else _abstract(x) for k, x in kwargs.items()},
        fun.ctxtag if isinstance(fun, compilation.JitFn) else None,
    )


def trace_context() -> Hashable:
    """Everything besides its arguments that a trace depends on: settings, mesh, open layers."""
    from jax._src import config

    return config.trace_context()


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """An array as jit's cache sees it: shape, dtype, weak type and committed sharding."""
    aval: Any = jax.typeof(x)
    where = x.sharding if isinstance(x, jax.Array) and x.committed else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where, weak_type=aval.weak_type)


def _abstract(tree: Any) -> Any:
    def one(x: Any) -> Any:
        return abstract(x) if isinstance(x, jax.Array | np.ndarray) else x

    return jax.tree.map(one, tree)


def local_settings() -> tuple[tuple[Any, Any], ...]:
    """The jax settings made in this thread by context managers, each with its value."""
    from jax._src import config

    found: list[tuple[Any, Any]] = []
    for state in (*config.config_states.values(), *_unnamed_settings()):
        if isinstance(state, config.config_ext.Config):
            value = state.get_local()
            if value is not config.config_ext.unset:
                found.append((state, value))
    return tuple(found)


def _unnamed_settings() -> list[Any]:
    """Settings without a flag, such as meshes; jax 0.12 keeps some of them in its mesh module."""
    from jax._src import config, mesh

    names = ("mesh_context_manager", "abstract_mesh_context_manager", "device_context",
             "compute_on_context_manager", "xla_metadata_context_manager")  # fmt: skip
    every = [getattr(module, name, None) for module in (config, mesh) for name in names]
    return list({id(state): state for state in every if state is not None}.values())


@contextlib.contextmanager
def with_local_settings(local: tuple[tuple[Any, Any], ...]) -> Iterator[None]:
    """A context with the settings that `local_settings` found, for any thread."""
    from jax._src import config

    unset = config.config_ext.unset
    with contextlib.ExitStack() as stack:
        for state, value in local:
            before = state.swap_local(value)
            hook = getattr(state, "_update_thread_local_hook", None)
            if hook is not None:
                hook(value)
                stack.callback(hook, None if before is unset else before)
            stack.callback(state.set_local, before)
        yield
