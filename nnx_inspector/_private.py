"""The only file that touches private parts of flax and jax, one function for each.

Invariant: nothing outside this file imports from `flax.nnx.graphlib`, `jax._src` or reads the
parameters of a jaxpr's equation. `tests/test_private.py` fails clearly when a version moves one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import math
import os
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.core as jcore
import jax.extend.core as jex
import jax.stages
import numpy as np
from flax.nnx import extract, graphlib, pytreelib
from flax.nnx.transforms import compilation
from flax.typing import HashableMapping
from jax._src import core
from jax.interpreters import ad

from nnx_inspector.redirection import copy_of, redirect

REMAT = frozenset(["remat2", "remat", "checkpoint"])
"""The names that jax gives its remat primitive."""

NODES = "_pytree__nodes"
"""The attribute of every NNX object that lists which attributes are data."""


class TaggedNodes(HashableMapping):
    """Stands in for an object's `_pytree__nodes` inside a graphdef or treedef; carries a tag there.

    While `strict`, the tag takes part in equality wherever a cache looks up a key, so a program
    that was traced for one model is never run for its twin. A comparison that code writes out
    (`treedef == other`, as jax does with what a loop's body returns) sees the plain mapping, as
    does everything once no region is open.
    """

    strict = False

    def __init__(self, mapping: Any, tag: Any):
        super().__init__(mapping)
        self.tag = tag

    def __hash__(self) -> int:
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        tag = other.tag if isinstance(other, TaggedNodes) else ()
        if TaggedNodes.strict and self.tag != tag and not _compared_in_code(sys._getframe(1)):
            return False
        return super().__eq__(other)

    def __reduce__(self) -> Any:
        return HashableMapping, (dict(self),)  # what is pickled needs none of us to be read

    def plain(self) -> HashableMapping:
        return HashableMapping(dict(self), copy=False)


def swap_graph_node(
    cls: type,
    tag_of: Callable[[Any], Any],
    arrived: Callable[[Any, Any], None],
) -> Callable[[], None]:
    """Let graph traversals carry a tag for each object of `cls`; returns the undo.

    `tag_of(node)` gives the tag to put into a graphdef (None for none; an empty one equals none);
    `arrived(node, tag)` is called when an object is filled from a graphdef. Only flax's graph
    traversal (split, merge, the transforms) is affected: `jax.tree` functions over the model are
    not, and the objects themselves stay as they are.
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


_JAX = os.path.dirname(sys.modules["jax"].__file__ or "") + os.sep
_TREE_UTIL = os.path.join(_JAX, "_src", "tree_util.py")
_TREE = os.path.join(_JAX, "_src", "tree.py")
_COMPARE = dis.opmap["COMPARE_OP"]


def _compared_in_code(frame: types.FrameType | None) -> bool:
    """Whether an equality is asked for by a comparison in Python code, not by a cache's lookup.

    Caches compare inside a call (of a jitted function, of a cached one); tree functions that walk
    two trees at once (`jax.tree.map`) compare what they are given, and cache nothing.
    """
    while frame is not None and frame.f_code.co_name in ("__eq__", "__ne__"):
        frame = frame.f_back
    if frame is None:
        return False
    code = frame.f_code
    if code.co_filename == _TREE_UTIL or "flatten_up_to" in code.co_names:
        return True
    return code.co_code[frame.f_lasti] == _COMPARE


def _moves_a_stand_in(frame: types.FrameType | None) -> bool:
    """Whether flax copies what a transform made of a module to a new object that replaces it.

    Everything else that takes a module apart and fills another within one trace makes a clone.
    """
    while frame is not None and frame.f_code.co_filename in (_TREE_UTIL, _TREE):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename != extract.__file__:
        return False
    return frame.f_code.co_name in ("wrapper", "snapshot")  # treemap_copy_args, snapshot


def swap_pytree_nodes(
    tag_of: Callable[[Any], Any], arrived: Callable[[Any, Any, bool], None]
) -> Callable[[], None]:
    """Let treedefs carry a tag for each module; returns the undo.

    This is how modules travel in tree mode (`graph=False`), and where one is an argument of
    `jax.jit` itself. `tag_of(module)` gives the tag (None for none, an empty one equals none);
    `arrived(module, tag, moved)` is called when one is filled again.
    """
    cls = pytreelib.Pytree
    flattens = (cls._pytree__flatten, cls._pytree__flatten_with_paths)
    unflatten = cls._pytree__unflatten.__func__  # type: ignore[attr-defined]

    def flattening(original: Any) -> Callable[..., Any]:
        def flatten(node: Any) -> Any:
            children, (node_keys, static_keys, static) = original(node)
            tag = tag_of(node) if NODES in static_keys else None
            if tag is not None:
                at = static_keys.index(NODES)
                stand_in = TaggedNodes(dict(static[at]), tag)
                static = (*static[:at], stand_in, *static[at + 1 :])
            return children, (node_keys, static_keys, static)

        return flatten

    original_unflatten = copy_of(unflatten)

    def unflattened(cls: Any, aux: Any, children: Any) -> Any:
        node_keys, static_keys, static = aux
        tags = [value.tag for value in static if isinstance(value, TaggedNodes)]
        if tags:
            static = tuple(v.plain() if isinstance(v, TaggedNodes) else v for v in static)
        node = original_unflatten(cls, (node_keys, static_keys, static), children)
        moved = bool(tags) and _moves_a_stand_in(sys._getframe(2))
        arrived(node, tags[0] if tags else None, moved)
        return node

    redirections = [redirect(unflatten, unflattened, original_unflatten)]
    for function in flattens:
        original = copy_of(function)
        redirections.append(redirect(function, flattening(original), original))

    def undo() -> None:
        for one in redirections:
            one.undo()

    return undo


def swap_executables(
    made: Callable[[Any], None], called: Callable[[Any], None]
) -> Callable[[], None]:
    """Tell when an ahead-of-time compiled executable is made and when one is called."""
    cls = jax.stages.Compiled
    redirections = []
    for method, listener in ((cls.__init__, made), (cls.__call__, called)):
        original = copy_of(method)

        def target(
            self: Any, *args: Any, _original: Any = original, _listener: Any = listener, **kw: Any
        ) -> Any:
            _listener(self)
            return _original(self, *args, **kw)

        redirections.append(redirect(method, target, original))

    def undo() -> None:
        for one in redirections:
            one.undo()

    return undo


def trace_state() -> Any:
    """An opaque value that is equal exactly while the same jax trace is current."""
    return jex.get_opaque_trace_state(convention="nnx")


def trace_is_over(state: Any) -> bool:
    """Whether the trace of a `trace_state()` is gone, so that no other will be equal to it."""
    return state._trace_ref() is None


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


def writes(jaxpr: Any) -> set[str]:
    """Which kinds of state equations of a jaxpr write to, those inside included.

    "ref": a `jax.Ref`. "hijax": a Variable that is one value for jax (flax 0.12.8 traces it and
    then loses what was written; later ones raise).
    """
    found: set[str] = set()
    for equation in open_jaxpr(jaxpr)[0].eqns:
        name = equation.primitive.name
        if name in ("swap", "addupdate"):
            found.add("ref")
        elif name == "set_variable":
            found.add("hijax")
        for inner in sub_jaxprs(equation):
            found |= writes(inner)
    return found


def is_recomputation(equation: Any) -> bool:
    """Whether an equation is the second pass of a remat, within a backward pass."""
    return bool(equation.params.get("differentiated")) and equation.primitive.name in REMAT


def needed_inputs(jaxpr: Any, outputs: int, each_its_own: Any = None) -> list[bool] | None:
    """For each input of a jaxpr whether any of its first outputs depends on it; None where jax
    cannot say. Of the primitive `each_its_own` an output depends on the input in its place alone.
    """
    from jax.interpreters import partial_eval

    bare, _ = open_jaxpr(jaxpr)
    if each_its_own is not None:
        equations: list[Any] = []
        for one in bare.eqns:
            if one.primitive is not each_its_own or len(one.invars) != len(one.outvars):
                equations.append(one)
                continue
            for i, o in zip(one.invars, one.outvars, strict=True):
                equations.append(one.replace(invars=[i], outvars=[o]))
        bare = bare.replace(eqns=equations)
    wanted = [i < outputs for i in range(len(bare.outvars))]
    _, used = partial_eval.dce_jaxpr(bare, wanted)
    return list(used)


def devices_of(equation: Any) -> int:
    """On how many devices (along the axes it makes manual) a shard_map runs its function."""
    mesh, axes = equation.params["mesh"], equation.params["newly_manual_axes"]
    return math.prod(mesh.shape[axis] for axis in axes)


def jit_shardings(equation: Any) -> tuple[list[Any], list[Any]]:
    """What a jit says of where its operands and results lie, of each a Sharding or None."""

    def given(shardings: Any) -> list[Any]:
        return [s if isinstance(s, jax.sharding.Sharding) else None for s in shardings]

    return given(equation.params["in_shardings"]), given(equation.params["out_shardings"])


def shard_map_parts(equation: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The axes that a shard_map makes manual, in the mesh's order, and what to pass to
    `jax.shard_map` to make another of the same kind.
    """
    params = equation.params
    mesh, manual = params["mesh"], params["newly_manual_axes"]
    axes = tuple(axis for axis in mesh.axis_names if axis in manual)
    return axes, {
        "mesh": mesh,
        "axis_names": set(axes),
        "check_vma": params["check_vma"],
        "in_specs": list(params["in_specs"]),
        "out_specs": list(params["out_specs"]),
    }


def varying_axes(x: Any) -> frozenset[str]:
    """The manual axes on whose devices an array (or one of a ShapeDtypeStruct) differs; none where
    a shard_map does not check.
    """
    kind = getattr(x, "aval", x).manual_axis_type
    return frozenset() if kind is None else kind.varying


def is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def bind(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Do what an equation does, under its own name stack, source line and context."""
    from jax._src import api_util, source_info_util

    params = equation.primitive.get_bind_params(equation.params)
    stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    traceback = equation.source_info.traceback
    with source_info_util.user_context(traceback, name_stack=stack), equation.ctx.manager:
        try:
            out = equation.primitive.bind(*values, **params)
        except api_util.InternalFloatingPointError as error:  # which jax's own jit would handle
            _bind_apart(equation, values)
            raise FloatingPointError(
                f"invalid value ({error.ty}) encountered in {equation.primitive}"
            ) from None
    return list(out) if equation.primitive.multiple_results else [out]


def _bind_apart(equation: Any, values: Sequence[Any]) -> None:
    """Do the equations of a jitted one by one, as jax does to find which of them makes a NaN."""
    for jaxpr in sub_jaxprs(equation) if equation.primitive.name in ("jit", "pjit") else ():
        inner, consts = open_jaxpr(jaxpr)
        env = dict(zip((*inner.constvars, *inner.invars), (*consts, *values), strict=True))
        for each in inner.eqns:
            read = [v.val if is_literal(v) else env[v] for v in each.invars]
            env.update(zip(each.outvars, bind(each, read), strict=True))


def context_of(equation: Any) -> contextlib.AbstractContextManager[None]:
    """What held where an equation was traced: the mesh, where to compute, and the like."""
    return equation.ctx.manager


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


def goes_backwards(equation: Any) -> bool:
    """Whether a scan begins with the last of what it scans over."""
    return bool(equation.params.get("reverse", False))


def source_of_caller() -> tuple[str, bool]:
    """`file:line` of the nearest user code on the stack (`""` for none), and whether jax's tracing
    of an inner function (jit, scan, remat) lies between.

    Where it does, the trace may be kept and used again for another line.
    """
    frame, inner = sys._getframe(1), False
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}", inner
        inner = inner or _traces_a_function(frame.f_code)
        frame = frame.f_back
    return "", inner


def source_of_equation(equation: Any) -> str:
    """`file:line` of the nearest user code that made an equation, within the function that was
    traced into its jaxpr; `""` for none.
    """
    from jax._src import source_info_util

    traceback = equation.source_info.traceback
    codes, instructions = traceback.raw_frames() if traceback else ((), ())
    for code, instruction in zip(codes, instructions, strict=True):
        if _traces_a_function(code):
            return ""
        if is_user_file(code.co_filename):
            frame = source_info_util.raw_frame_to_frame(code, instruction)
            return f"{code.co_filename}:{frame.start_line}"
    return ""


def _traces_a_function(code: types.CodeType) -> bool:
    return code.co_name.startswith("trace_to_jaxpr") and code.co_filename.startswith(_JAX)


@functools.cache
def is_user_file(filename: str) -> bool:
    from jax._src import source_info_util

    own = __file__.rpartition("_private")[0]
    flax = os.path.dirname(sys.modules["flax"].__file__ or "") + os.sep
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


Bind = Callable[[], Any]


@contextlib.contextmanager
def interpreted(rule: Callable[[Any, Sequence[Any], dict[str, Any], Bind], Any]) -> Iterator[None]:
    """Let `rule(primitive, values, params, bind)` give the results of each primitive that the code
    within runs; `bind()` does what happens otherwise.

    Values remain ordinary arrays, so Python may read them. A primitive inside a function that jax
    traces (jit, scan) belongs to that function's jaxpr, and the rule sees the whole function.
    Objects of NNX that were made outside may be changed, as without this.
    """
    outer = core.trace_ctx.trace
    with core.set_current_trace(_Interpreted(outer, rule)):
        yield


class _Interpreted(core.Trace):
    """Has no tracers of its own: the values are those of the trace around it."""

    def __init__(self, outer: Any, rule: Any):
        super().__init__()
        self._outer, self._rule = outer, rule
        self._weakref = outer._weakref  # by which NNX, and a jit cache key, know the trace
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
        return getattr(self._outer, name)  # what only some traces have: `process_shard_map`


def is_concrete(x: Any) -> bool:
    """Whether Python may read a value: an array, or a tracer of an eager derivative."""
    return not is_tracer(x) or core.is_concrete(x)


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


def linen_applies() -> int:
    """How many `apply` and `init` of Linen modules are under way in this thread, one in another."""
    from flax.linen import module

    return len(module._context.capture_stack)


def linen_dry_run(module: Any) -> bool:
    """Whether a Linen module is run without variables, only to check what its setup does."""
    from flax.linen.module import TestScope

    return isinstance(module.scope, TestScope)


@contextlib.contextmanager
def outermost_linen_interceptor(interceptor: Callable[..., Any]) -> Iterator[None]:
    """`linen.intercept_methods`, around the interceptors that are open instead of inside them."""
    from flax.linen import module

    stack = module._global_interceptor_stack._storage
    stack.insert(0, interceptor)
    try:
        yield
    finally:
        stack.remove(interceptor)


def swap_linen_jit_key(more: Callable[[Any], Any]) -> Callable[[], None]:
    """Let `more(module)` be a part of what `linen.jit` compiles a program for; returns the undo.

    Where it is None nothing changes.
    """
    from flax.linen import transforms

    cls = transforms._HashableProxy
    original = vars(cls)["from_module"]

    def from_module(cls: type, module: Any) -> Any:
        proxy, key = original.__func__(cls, module), more(module)
        return proxy if key is None else cls(proxy.module_ref, hash((proxy.hash_key, key)))

    cls.from_module = classmethod(from_module)  # type: ignore[assignment]

    def undo() -> None:
        cls.from_module = original

    return undo


def effect(name: str) -> Any:
    """An effect for primitives of our own that talk to the host.

    A transform neither drops nor repeats an equation that has it: rematerialisation saves what it
    returned, and `jax.effects_barrier` waits for the program. Allowed in every kind of control
    flow and rule of differentiation.
    """
    from jax._src import effects

    class Named(effects.Effect):
        def __str__(self) -> str:
            return name

    for allowed in (
        effects.lowerable_effects,
        effects.control_flow_allowed_effects,
        effects.remat_allowed_effects,
        effects.custom_derivatives_allowed_effects,
    ):
        allowed.add_type(Named)
    return Named()


def no_tangent(x: Any) -> Any:
    """The tangent of a value that nothing differentiates."""
    zero: Any = ad.Zero
    return zero.from_primal_value(x)


@dataclasses.dataclass(frozen=True)
class JitCall:
    """A call of a jitted function, without its arrays: enough to compile it once more."""

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

    def compile(self) -> None:
        """Trace and compile it under what is open in this thread; jax keeps the program, so that a
        call under the same finds it.
        """
        from jax._src import pjit

        jitted = types.SimpleNamespace(_fun=self.function, _jit_info=self.options)
        with contextlib.ExitStack() as stack:
            if self.nnx is not None:
                stack.enter_context(graphlib.update_context(self.nnx))
            pjit.jit_trace(jitted, *self.args, **self.kwargs).lower().compile()


def _alike(a: Any, b: Any) -> bool:
    a, b = jax.tree.flatten(a), jax.tree.flatten(b)
    return a[1] == b[1] and all(
        type(x) is type(y) and x == y for x, y in zip(a[0], b[0], strict=True)
    )


class JitListener(Protocol):
    """Told of a jitted call; it must not raise.

    `program` stands for what jax traced: the same object for calls that differ in their arrays and
    in `variant` alone. Calls that are alike in both are compiled once. `made` gives the call.
    """

    def __call__(self, program: Any, variant: Hashable, made: Callable[[], JitCall], /) -> None: ...


def swap_jit_misses(listener: JitListener) -> Callable[[], None]:
    """Tell of each call of a jitted function, in whatever thread, that jax does not hand to a
    compiled program without a look at it in Python; not of one within a trace.
    """
    from jax._src import core, pjit

    original = pjit._infer_params

    def infer_params(fun: Any, options: Any, args: Any, kwargs: Any) -> Any:
        params, arrays = original(fun, options, args, kwargs)
        if core.trace_state_clean():
            placed = tuple(
                x.sharding if isinstance(x, jax.Array) and x.committed else None for x in arrays
            )
            made = functools.partial(_jit_call, fun, options, args, kwargs)
            listener(params.params["jaxpr"], (options, placed), made)
        return params, arrays

    module: Any = pjit
    module._infer_params = infer_params

    def undo() -> None:
        module._infer_params = original

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


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """What jit tells an array from others by, without the array."""
    aval: Any = jax.typeof(x)
    where = x.sharding if isinstance(x, jax.Array) and x.committed else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where, weak_type=aval.weak_type)


def _abstract(tree: Any) -> Any:
    def one(x: Any) -> Any:
        return abstract(x) if isinstance(x, jax.Array | np.ndarray) else x

    return jax.tree.map(one, tree)


def local_settings() -> tuple[tuple[Any, Any], ...]:
    """The settings of jax that this thread has by context managers (`with jax.enable_x64():`, a
    mesh, a default device), each with its value.
    """
    from jax._src import config

    found: list[tuple[Any, Any]] = []
    for state in (*config.config_states.values(), *_unnamed_settings()):
        if isinstance(state, config.config_ext.Config):
            value = state.get_local()
            if value is not config.config_ext.unset:
                found.append((state, value))
    return tuple(found)


def _unnamed_settings() -> list[Any]:
    """Meshes and the like, which have no flag: jax 0.12 keeps some of them beside meshes."""
    from jax._src import config, mesh

    names = ("mesh_context_manager", "abstract_mesh_context_manager", "device_context",
             "compute_on_context_manager", "xla_metadata_context_manager")  # fmt: skip
    every = [getattr(module, name, None) for module in (config, mesh) for name in names]
    return list({id(state): state for state in every if state is not None}.values())


@contextlib.contextmanager
def with_local_settings(local: tuple[tuple[Any, Any], ...]) -> Iterator[None]:
    """Hold what `local_settings` found, in whatever thread."""
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
