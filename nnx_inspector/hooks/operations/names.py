"""The operations within one call of a module: their names, and how each is passed on.

While a selection with an `@` is open, a call runs under a rule that receives each of its own
primitives, including those in functions that it jits, scans or rematerialises. A selected operation
becomes a call of its own for the hooks. Its name is, in this order, that of `checkpoint_name`, of
the function that computes it (`softmax`, `relu`, a function jitted by the user), or of the
primitive. A `jax.named_scope` precedes the name (`scores.mul`), and so does the function around a
primitive (`softmax.exp`). `attention` names patterns alone: anything else of this name becomes
`attention_`. If several operations have one name, the first keeps it and the next ones are numbered
in the order of the program: `mul`, `mul[1]`. The gates of NNX's recurrent cells have their usual
names: `cell@f` is an LSTM's forget gate. Invariant: an operation belongs to the innermost
module call around it, and one that is not selected runs unchanged. Without such a selection nothing
here runs. Does not know the hooks.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnx_inspector._compat import eqn_params, interpreter, jaxprs
from nnx_inspector._compat.redirect import copy_of, redirect
from nnx_inspector.hooks.operations import kernels
from nnx_inspector.hooks.operations.attention import FIXED, PATTERN, Trail, Trails, pattern_in
from nnx_inspector.typing import Function, Jaxpr, Params, Primitive, PyTree, Value

VisitOperation = Callable[[str, str, Function], Function | None]
"""`(name, primitive, operation)` -> what runs instead, or None if it is not selected."""

_INNER_CALL = "nnx_inspector_call"
"""The scope of an inner call, by which the enclosing call knows that an equation is not its own."""

_FUNCTION_SUFFIX = "()"
"""Ends the scope, or the name, that stands for a function of jax's and not for the user's own."""

_ENTERED = jaxprs.JITS | jaxprs.REMAT | {"scan", "while", "cond", "closed_call", "core_call"}
"""The primitives whose functions `program.rewrite` can enter."""

_MOVEMENT_NAMES = """
    broadcast_in_dim convert_element_type copy copy_p optimization_barrier reshape squeeze
    stop_gradient
"""
_MOVEMENTS = jaxprs.PLACEMENTS.union(_MOVEMENT_NAMES.split())
"""Primitives that only hand a value on: they are not sites."""

_CALLS = jaxprs.JITS | jaxprs.REMAT | {"closed_call", "core_call"}
"""Those whose function has the operands and the results of the primitive."""

_CUSTOM_DERIVATIVES = frozenset(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"])


class _ThreadState(threading.local):
    names: OperationNames | None = None


_thread = _ThreadState()


class OperationNames:
    """The names of the operations of one call, numbered as they pass.

    Args:
        visit: receives each operation.
        gates: the name of each gate, by the name of the operation that computes it.
        closed: makes a context in which no hook is open.
    """

    def __init__(
        self,
        visit: VisitOperation,
        gates: Mapping[str, str],
        closed: Callable[[], AbstractContextManager[None]],
    ):
        self._visit, self._gates, self._closed = visit, gates, closed
        self._counts: dict[str, int] = {}
        self._is_result = False
        self.trails = Trails()
        # by the id of the Variable; first the weights of the enclosing call, then of this one
        self.weights: Mapping[int, Value] = {}
        self.argument_trails: list[Trail | None] = []
        self.result_trail: Trail | None = None

    @contextlib.contextmanager
    def name_operations(self) -> Iterator[None]:
        """Within the context each operation is named and passed on."""
        with hide_operations():
            _thread.names = self
            with interpreter.interpret_operations(
                self._make_rule(len(jaxprs.current_named_scopes()), ())
            ):
                yield

    def _make_rule(self, known: int, enclosing: tuple[str, ...]) -> Function:
        """The rule for what is below the first `known` scopes; `enclosing` are those around."""

        def rule(
            primitive: Primitive,
            values: Sequence[Value],
            params: Params,
            bind: Function,
        ) -> Value:
            scopes = (*enclosing, *jaxprs.current_named_scopes()[known:])
            is_result, self._is_result = self._is_result, False
            if _INNER_CALL in scopes or primitive.name.startswith("nnx_inspector"):
                return bind()
            one = primitive.name, params
            results: list[Trail | None] = []  # what is known of them
            if primitive.name in _ENTERED:
                given = _body_trails(*one, [self.trails.of(v) for v in values])
                enter = functools.partial(self._enter_jaxpr, scopes, one, given, results)
                entered = jaxprs.map_jaxprs(params, enter)
                if entered is not params:
                    bind = functools.partial(_bind_entered, bind, values, entered)
            if one[0] in _CUSTOM_DERIVATIVES and any(map(self.trails.of, values)):
                with self._closed():
                    body = params["body"]()
                results = self.trails.within(body, values)
            if params.get("name") == kernels.FUNCTION and one[0] in _CUSTOM_DERIVATIVES:
                self._visit_kernel(params["body"](), values)
            found = pattern_in(*one, values, self.trails)
            if found is not None:
                run = self._visit(self._add_number(PATTERN), PATTERN, lambda x: x)
                values = values if run is None else found.replaced(values, run)
            # what computes a function's result is known by the function's name
            known_already = is_result or not values or one[0] in _MOVEMENTS
            name = None if known_already else _operation_name(*one, scopes)
            name = f"{name}_" if name == PATTERN else name
            run = (
                None
                if name is None
                else self._visit(self._add_number(name), one[0], _as_operation(bind))
            )
            out = bind(values) if run is None else run(*values)
            several = out if isinstance(out, (list, tuple)) else [out]
            if one[0] in _CALLS or one[0] in _CUSTOM_DERIVATIVES:
                for value, trail in zip(several, results, strict=False):
                    self.trails.put(value, trail)
            else:
                self.trails.follow(*one, values, several)
            if run is None or not (primitive.multiple_results or one[0] in _CUSTOM_DERIVATIVES):
                return out
            return list(several)

        return rule

    def _visit_kernel(self, body: object, values: Sequence[object]) -> None:
        pattern = kernels.kernel_pattern(body, values)
        if pattern is not None:
            run = self._visit(self._add_number(PATTERN), kernels.KERNEL, lambda x: x)
            if run is not None:
                run(pattern())

    def _add_number(self, name: str) -> str:
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        name = f"{name}[{number}]" if number else name
        return self._gates.get(name, name)

    def _enter_jaxpr(
        self,
        scopes: tuple[str, ...],
        of: tuple[str, Params],
        given: list[Trail | None],
        known: list[Trail | None],
        jaxpr: Jaxpr,
    ) -> Jaxpr:
        """The jaxpr with its selected operations passed on; the same if there are none."""
        bare, consts = jaxprs.open_jaxpr(jaxpr)
        function = _function_name(*of)
        enclosing = scopes if function is None else (*scopes, function + _FUNCTION_SUFFIX)
        results = set() if function is None else {v for v in bare.outvars if not _is_literal(v)}
        selected = False

        def visit(*how: Value) -> Function | None:
            nonlocal selected
            found = outer(*how)
            selected = selected or found is not None
            return found

        def run(*values: Value) -> list[Value]:
            env = dict(zip((*bare.constvars, *bare.invars), (*consts, *values), strict=True))
            read = lambda v: v.val if _is_literal(v) else env[v]  # noqa: E731
            for value, trail in zip(values, given, strict=False):
                self.trails.put(value, trail)
            with interpreter.interpret_operations(
                self._make_rule(len(jaxprs.current_named_scopes()), enclosing)
            ):
                for equation in bare.eqns:
                    self._is_result = any(v in results for v in equation.outvars)
                    out = jaxprs.bind(equation, [read(v) for v in equation.invars])
                    env.update(zip(equation.outvars, out, strict=True))
            out = [read(v) for v in bare.outvars]
            known[:] = map(self.trails.of, out)
            return out

        outer, self._visit = self._visit, visit
        try:
            new = jaxprs.retrace(jaxpr, run)
        finally:
            self._visit = outer
        return new if selected else jaxpr


_is_literal = jaxprs.is_literal


def _bind_entered(bind: Function, given: object, entered: object, values: object = None) -> Value:
    return bind(given if values is None else values, entered)


def _body_trails(primitive: str, params: Params, known: list[Trail | None]) -> list[Trail | None]:
    """The trails of the inputs of a primitive's function, from those of its operands."""
    if primitive == "scan":
        consts, carry, rows = eqn_params.scan_parts(params, known)
        return [*consts, *(None for _ in carry), *(t if t is FIXED else None for t in rows)]
    if primitive == "while":
        return known[params["cond_nconsts"] :][: params["body_nconsts"]]
    return known[1:] if primitive == "cond" else known


def _as_operation(bind: Function) -> Function:
    """An operation as a function of its operands; several results are a tuple."""

    def run(*values: object) -> PyTree:
        out = bind(values)
        several = isinstance(out, (list, tuple))
        return (out[0] if len(out) == 1 else tuple(out)) if several else out

    return run


def _function_name(primitive: str, params: Params) -> str | None:
    """The name of the function that a primitive calls; None if it has none of its own."""
    if primitive in _CUSTOM_DERIVATIVES or (
        primitive in jaxprs.JITS and not eqn_params.is_inlined(params)
    ):
        return re.sub(r"\W", "", str(params.get("name", ""))) or None
    return None


def _operation_name(primitive: str, params: Params, scopes: Sequence[str]) -> str | None:
    """The name of an operation, without its number; None if it only groups others."""
    scopes = [scope for scope in scopes if "->" not in scope]  # not those of jnp.einsum
    users = [scope for scope in scopes if not scope.endswith(_FUNCTION_SUFFIX)]
    if primitive == "name" and not params["name"].endswith(_FUNCTION_SUFFIX):
        return _without_escapes(params["name"])
    function = params["name"] if primitive == "name" else _function_name(primitive, params)
    if function is not None:
        return ".".join(map(_without_escapes, [*users[-1:], function]))
    if primitive in jaxprs.JITS:
        return None
    return ".".join(map(_without_escapes, [*scopes[-1:], primitive]))


def _without_escapes(name: str) -> str:
    """A name that needs no escape in a site's key."""
    return re.sub(r"[^\w.\-]", "_", name.removesuffix(_FUNCTION_SUFFIX))


@contextlib.contextmanager
def hide_operations() -> Iterator[None]:
    """Within the context, operations do not belong to the enclosing call."""
    outer, _thread.names = _thread.names, None
    try:
        with interpreter.bypass_operations(), jax.named_scope(_INNER_CALL):
            yield
    finally:
        _thread.names = outer


_LSTM = {"logistic": "i", "logistic[1]": "f", "tanh": "g", "logistic[2]": "o"}
_GRU = {"logistic": "r", "logistic[1]": "z", "tanh": "n"}
_CELLS = {nnx.LSTMCell: _LSTM, nnx.OptimizedLSTMCell: _LSTM, nnx.GRUCell: _GRU}


def gate_names(module: object, method: str) -> Mapping[str, str]:
    """Name of an operation -> name of the gate that it computes, in a call of one of NNX's cells
    with the usual functions: the order of its operations is known.
    """
    names = _CELLS.get(type(module), {})
    functions = [getattr(module, name) for name in ("gate_fn", "activation_fn") if names]
    usual = [getattr(f, "__name__", "") for f in functions] == ["sigmoid", "tanh"]
    return names if usual and method == "__call__" else {}


# ------------------------------------------------------------- functions of jax.nn

_lock = threading.Lock()
_open_namings: tuple[object, ...] = ()
_undo: list[Callable[[], None]] = []


# Some functions of `jax.nn` are jitted (`relu`, `gelu`), so a call of them is an equation with
# their name. Others (`softmax`, `log_softmax`) are plain Python: in a jaxpr they are `exp`, `div`
# and other primitives without a name. While an operation may be selected, each of them is
# redirected to a function that puts its result under `checkpoint_name`. Without that there is no
# "@softmax". It can go when jax jits these functions, or puts them under a named scope.
class FunctionNaming:
    """While it is open, the functions of `jax.nn` that jax does not jit (`softmax`) leave their
    names behind.
    """

    def open(self) -> None:
        global _open_namings
        with _lock:
            if not _open_namings:
                _restore_functions()  # what an interrupt has left
            _open_namings = (*_open_namings, self)
            if len(_open_namings) == 1:
                for name, function in vars(jax.nn).items():
                    if isinstance(function, types.FunctionType):
                        original = copy_of(function)
                        target = functools.partial(_call_named, original, name + _FUNCTION_SUFFIX)
                        redirect(function, target, original, _undo.append)

    def close(self) -> None:
        global _open_namings
        with _lock:
            _open_namings = tuple(one for one in _open_namings if one is not self)
            if not _open_namings:
                _restore_functions()


def _restore_functions() -> None:
    while _undo:
        _undo[-1]()
        _undo.pop()


def _call_named(function: Function, name: str, /, *args: object, **kwargs: object) -> PyTree:
    if _thread.names is None:
        return function(*args, **kwargs)
    with jax.named_scope(name):
        out = function(*args, **kwargs)
    return checkpoint_name(out, name)
