"""Runs code as it stands and passes each primitive to a rule, without tracers of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import core
from jax._src import linear_util as lu

from nnx_inspector._compat.jaxprs import is_literal, open_jaxpr
from nnx_inspector._compat.jit import is_tracer
from nnx_inspector.typing import Function, Params, PyTree, Value

Bind = Callable[..., PyTree]


@contextlib.contextmanager
def interpret(rule: Callable[[Any, Sequence[Value], Params, Bind], Any]) -> Iterator[None]:
    """Within the context, `rule(primitive, values, params, bind)` gives the results of each
    primitive; `bind()` gives its usual results.

    Values remain those of the trace around the context: arrays that Python may read, if nothing is
    traced. For a function that jax traces (jit, scan) the rule gets one primitive with the
    function's jaxpr, not the primitives inside. NNX objects made outside the context may still be
    changed.
    """
    outer = core.trace_ctx.trace
    with core.set_current_trace(_InterpreterTrace(outer, rule)):
        yield


class _Thread(threading.local):
    apart = ""


_thread = _Thread()


def opaque_primitive() -> str:
    """The name of the primitive whose function the rule cannot enter and that runs here, or ""."""
    return _thread.apart


@contextlib.contextmanager
def _within_opaque(primitive: Any) -> Iterator[None]:
    before, _thread.apart = _thread.apart, primitive.name
    try:
        yield
    finally:
        _thread.apart = before


@lu.transformation2
def _run_within_opaque(function: Function, primitive: object, /, *values: object) -> PyTree:
    with _within_opaque(primitive):
        return function(*values)


class _InterpreterTrace(core.Trace):
    """A trace without tracers of its own: its values are those of the enclosing trace."""

    def __init__(self, outer: Any, rule: Any):
        super().__init__()
        self._outer, self._rule = outer, rule
        # A trace that was unknown to flax would make each change of a Variable an error ("Cannot
        # mutate from a different trace level"), and unknown to jit, it would make each call a cache
        # miss.
        self._weakref = outer._weakref  # NNX and jit's cache keys identify a trace by it
        self.requires_low = outer.requires_low

    def process_primitive(self, primitive: object, tracers: object, params: Params, /) -> PyTree:
        def bind(values: object = tracers, how: object = params) -> PyTree:
            return self._outer.process_primitive(primitive, values, how)

        with core.set_current_trace(self._outer):
            return self._rule(primitive, tracers, params, bind)

    def stage_value(self, val: object) -> PyTree:
        return self._outer.stage_value(val)

    def process_call(
        self, call_primitive: object, f: object, tracers: object, params: Params, /
    ) -> PyTree:
        return self._outer.process_call(call_primitive, f, tracers, params)

    def process_custom_jvp_call(
        self,
        primitive: object,
        fun: Any,
        jvp: object,
        tracers: Sequence[Value],
        /,
        **params: Value,
    ) -> PyTree:
        # Under a derivative the rule of a custom_jvp replaces the function, so what runs in it
        # cannot be shown. On plain arrays no rule is asked, and the function runs like any other
        # code.
        if any(map(is_tracer, tracers)):
            with core.set_current_trace(self._outer), _within_opaque(primitive):
                return self._outer.process_custom_jvp_call(primitive, fun, jvp, tracers, **params)
        with core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(
        self,
        primitive: object,
        fun: Any,
        fwd: object,
        bwd: object,
        tracers: Sequence[Value],
        /,
        **params: Value,
    ) -> PyTree:
        if any(map(is_tracer, tracers)):
            # these two may run after this call
            fwd, bwd = (_run_within_opaque(rule, primitive) for rule in (fwd, bwd))
            with core.set_current_trace(self._outer), _within_opaque(primitive):
                return self._outer.process_custom_vjp_call(
                    primitive, fun, fwd, bwd, tracers, **params
                )
        with core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_shard_map(
        self, primitive: object, fun: Any, tracers: Sequence[Value], /, **params: Value
    ) -> PyTree:
        def bind() -> PyTree:
            with core.set_current_trace(self._outer), _within_opaque(primitive):
                return self._outer.process_shard_map(primitive, fun, tracers, **params)

        results: list[Value] = []

        def stage(*xs: object) -> list[Value]:
            trace = core.trace_ctx.trace
            results.append(trace.process_shard_map(primitive, fun, xs, **params))
            return list(results[0])

        with core.set_current_trace(self._outer):
            # jax runs a shard_map on arrays device by device, in a way of its own that no trace
            # sees. Staged into a jaxpr it is one equation, as within a jit. Without it, an eager
            # call on a mesh would show nothing inside. It can go when jax compiles an eager
            # shard_map.
            jaxpr = jax.make_jaxpr(stage)(*tracers)
            inner, consts = open_jaxpr(jaxpr)
            if len(inner.eqns) != 1:
                return bind()
            env = dict(zip((*inner.constvars, *inner.invars), (*consts, *tracers), strict=True))
            (one,) = inner.eqns
            values = [v.val if is_literal(v) else env[v] for v in one.invars]
            out = self._rule(one.primitive, values, one.params, lambda: None)
            if out is None:  # nothing in it is the rule's
                return bind()
            env.update(zip(one.outvars, out, strict=True))
            given = [v.val if is_literal(v) else env[v] for v in inner.outvars]
            return results[0].update(given) if hasattr(results[0], "update") else given

    def __getattr__(self, name: str) -> PyTree:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._outer, name)  # methods of some traces only


class _OperationsTrace(_InterpreterTrace):
    """As above, but a function with its own derivative is one primitive; `body()` traces it."""

    def process_custom_jvp_call(
        self,
        primitive: object,
        fun: object,
        jvp: object,
        tracers: Sequence[Value],
        /,
        **params: Value,
    ) -> PyTree:
        process = self._outer.process_custom_jvp_call
        return self._derived(primitive, (fun, jvp), process, tracers, params)

    def process_custom_vjp_call(
        self,
        primitive: object,
        fun: object,
        fwd: object,
        bwd: object,
        tracers: Sequence[Value],
        /,
        **params: Value,
    ) -> PyTree:
        process = self._outer.process_custom_vjp_call
        return self._derived(primitive, (fun, fwd, bwd), process, tracers, params)

    def _derived(
        self,
        primitive: object,
        functions: Any,
        process: Any,
        tracers: Sequence[Value],
        params: Params,
    ) -> PyTree:
        ran, fun = False, functions[0]

        def bind(values: object = tracers) -> PyTree:
            nonlocal ran
            ran = True
            return process(primitive, *functions, values, **params)

        def body() -> PyTree:
            jaxpr = jax.make_jaxpr(fun.call_wrapped)(*tracers)
            # A function that jax calls may run once: it stores the structure of its results, and
            # raises if there is one already. The trace here is an additional run.
            for store in fun.stores:
                if store is not None:
                    store.reset()
            return jaxpr

        with core.set_current_trace(self._outer):
            how = {"name": fun.debug_info.func_name, "body": body}
            out = self._rule(primitive, tracers, how, bind)
            if not ran:  # jax asks for the structure of the results, which a run stores
                jax.make_jaxpr(fun.call_wrapped)(*tracers)
            return out

    def process_shard_map(
        self, primitive: object, fun: object, tracers: object, /, **params: Value
    ) -> PyTree:
        with core.set_current_trace(self._outer):
            return self._outer.process_shard_map(primitive, fun, tracers, **params)


@contextlib.contextmanager
def interpret_operations(
    rule: Callable[[Any, Sequence[Value], Params, Bind], Any],
) -> Iterator[None]:
    """As `interpret`, for operations; `bind(values, params)` runs one with other operands."""
    with core.set_current_trace(_OperationsTrace(core.trace_ctx.trace, rule)):
        yield


@contextlib.contextmanager
def bypass_operations() -> Iterator[None]:
    """Within the context an enclosing `interpret_operations` gets no primitive of this trace."""
    trace = core.trace_ctx.trace
    with core.set_current_trace(trace._outer if isinstance(trace, _OperationsTrace) else trace):
        yield


def is_concrete(x: object) -> bool:
    """Whether Python may read a value: it is an array, or a tracer of an eager derivative."""
    return not is_tracer(x) or core.is_concrete(x)
