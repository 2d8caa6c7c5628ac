"""The only file that touches private parts of flax and jax, one function for each.

Invariant: nothing outside this file imports from `flax.nnx.graphlib`, `jax._src` or reads the
parameters of a jaxpr's equation. `tests/test_private.py` fails clearly when a version moves one.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.core as jcore
import jax.extend.core as jex
from flax.nnx import graphlib
from flax.typing import HashableMapping

NODES = "_pytree__nodes"
"""The attribute of every NNX object that lists which attributes are data."""


class TaggedNodes(HashableMapping):
    """Stands in for an object's `_pytree__nodes` inside a graphdef and carries a tag there.

    While `strict`, the tag takes part in equality, so a graphdef that carries one never shares a
    jit cache entry with the graphdef of a twin. Otherwise it equals the plain mapping: a graphdef
    that the user kept is then like any other, and so is a model merged from it.
    """

    strict = False

    def __init__(self, mapping: Any, tag: Any):
        super().__init__(mapping)
        self.tag = tag

    def __hash__(self) -> int:
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        if TaggedNodes.strict and not (isinstance(other, TaggedNodes) and self.tag == other.tag):
            return False
        return super().__eq__(other)

    def plain(self) -> HashableMapping:
        return HashableMapping(dict(self), copy=False)


def swap_graph_node(
    cls: type,
    tag_of: Callable[[Any], Any],
    arrived: Callable[[Any, Any], None],
) -> Callable[[], None]:
    """Let graph traversals carry a tag for each object of `cls`; returns the undo.

    `tag_of(node)` gives the tag to put into a graphdef (None for none); `arrived(node, tag)` is
    called when an object is filled from a graphdef that carries one. Only flax's graph traversal
    (split, merge, the transforms) is affected: `jax.tree` functions over the model are not, and
    the objects themselves stay as they are.
    """
    original = graphlib.GRAPH_REGISTRY.get(cls)
    if not isinstance(original, graphlib.GraphNodeImpl):
        return lambda: None

    def flatten(node: Any) -> Any:
        values, metadata = original.flatten(node)
        tag = tag_of(node)
        if tag is None:
            return values, metadata
        return [
            (key, _tagged(value, tag) if key == NODES else value) for key, value in values
        ], metadata

    def init(node: Any, attributes: Any) -> None:
        attributes = list(attributes)
        tag = None
        for i, (key, value) in enumerate(attributes):
            if key == NODES and isinstance(value, TaggedNodes):
                tag, attributes[i] = value.tag, (key, value.plain())
        original.init(node, attributes)
        if tag is not None:
            arrived(node, tag)

    swapped = dataclasses.replace(original, flatten=flatten, init=init)
    graphlib.GRAPH_REGISTRY[cls] = swapped

    def undo() -> None:
        if graphlib.GRAPH_REGISTRY.get(cls) is swapped:
            graphlib.GRAPH_REGISTRY[cls] = original

    return undo


def _tagged(value: Any, tag: Any) -> Any:
    if isinstance(value, graphlib.StaticElem):
        return graphlib.StaticElem(TaggedNodes(dict(value.value), tag))
    if isinstance(value, HashableMapping):  # nnx.Object: attributes are not wrapped
        return TaggedNodes(dict(value), tag)
    return value


def trace_state() -> Any:
    """An opaque value that is equal exactly while the same jax trace is current."""
    return jex.get_opaque_trace_state(convention="nnx")


def is_tracer(x: Any) -> bool:
    return isinstance(x, jcore.Tracer)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, consts) of a Jaxpr or a ClosedJaxpr: jax 0.12 merged the two."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def sub_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters, in order."""

    def is_jaxpr(value: Any) -> bool:
        return hasattr(value, "eqns") and hasattr(value, "invars")

    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(item) or is_jaxpr(getattr(item, "jaxpr", None)):
                yield item


def is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def bind(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Do what an equation does, under its own name stack, source line and context."""
    from jax._src import source_info_util

    params = equation.primitive.get_bind_params(equation.params)
    stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    traceback = equation.source_info.traceback
    with source_info_util.user_context(traceback, name_stack=stack), equation.ctx.manager:
        out = equation.primitive.bind(*values, **params)
    return list(out) if equation.primitive.multiple_results else [out]


def scan_parts(equation: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """(consts, carry, xs) among the operands of a scan: jax 0.10 counts, jax 0.12 holds a tree."""
    params = equation.params
    if "num_consts" in params:
        consts, carry = params["num_consts"], params["num_carry"]
        return (
            list(values[:consts]),
            list(values[consts : consts + carry]),
            list(values[consts + carry :]),
        )
    parts = params["ft_in"].update(list(values)).unpack()
    consts, carry, xs = (list(part) for part in parts)
    return consts, carry, xs


def frame_is_internal(filename: str) -> bool:
    """Whether a source file belongs to jax, flax or us, rather than to the user."""
    return not _is_user_file(filename)


def _is_user_file(filename: str) -> bool:
    from jax._src import source_info_util

    own = __file__.rpartition("_private")[0]
    flax = graphlib.__file__.rpartition("graphlib")[0]
    return source_info_util.is_user_filename(filename) and not filename.startswith((own, flax))


def compilation_events(listener: Callable[[str, float], None]) -> Callable[[], None]:
    """Call `listener(kind, seconds)` for each trace and compilation; returns the undo."""
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
    from jax._src import core

    return not core.trace_state_clean()


def inside_while_loop() -> bool:
    """Whether the code that runs now is being traced as the body of a while loop.

    A host callback there runs twice, or breaks the user's program, once it is differentiated.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "while_loop" and code.co_filename.endswith("control_flow/loops.py"):
            return True
        frame = frame.f_back
    return False
