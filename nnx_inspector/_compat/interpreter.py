"""Runs code eagerly and passes each primitive to a rule, without tracers.

One function for each private part of flax or jax that it uses; `tests/_compat` fails clearly if a
new version moves one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax._src import core

from nnx_inspector._compat.jit import is_tracer

Bind = Callable[[], Any]


@contextlib.contextmanager
def interpreted(rule: Callable[[Any, Sequence[Any], dict[str, Any], Bind], Any]) -> Iterator[None]:
    """Within the context, `rule(primitive, values, params, bind)` gives the results of each
    primitive; `bind()` gives its usual results.

    Values remain ordinary arrays, so Python may read them. For a function that jax traces (jit,
    scan) the rule gets one primitive with the function's jaxpr, not the primitives inside. NNX
    objects made outside the context may still be changed.
    """
    outer = core.trace_ctx.trace
    with core.set_current_trace(_Interpreted(outer, rule)):
        yield


class _Interpreted(core.Trace):
    """A trace without tracers of its own: its values are those of the enclosing trace."""

    def __init__(self, outer: Any, rule: Any):
        super().__init__()
        self._outer, self._rule = outer, rule
        self._weakref = outer._weakref  # NNX and jit's cache keys identify a trace by it
        self.requires_low = outer.requires_low

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        def bind() -> Any:
            return self._outer.process_primitive(primitive, tracers, params)

        with core.set_current_trace(self._outer):
            return self._rule(primitive, tracers, params, bind)

    def stage_value(self, val: Any) -> Any:
        return self._outer.stage_value(val)

    def process_call(self, call_primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        return self._outer.process_call(call_primitive, f, tracers, params)

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any
    ) -> Any:
        if any(map(is_tracer, tracers)):
            return self._outer.process_custom_jvp_call(primitive, fun, jvp, tracers, **params)
        with core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        if any(map(is_tracer, tracers)):
            return self._outer.process_custom_vjp_call(primitive, fun, fwd, bwd, tracers, **params)
        with core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._outer, name)  # methods of some traces only: `process_shard_map`


def is_concrete(x: Any) -> bool:
    """Whether Python may read a value: it is an array, or a tracer of an eager derivative."""
    return not is_tracer(x) or core.is_concrete(x)
