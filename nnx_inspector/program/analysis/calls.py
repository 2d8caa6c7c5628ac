"""The hooks that mark a program's calls for `trace`, and the history of the pass.

Invariant: the parameters of a mark depend only on the call, so jax may reuse traces of functions.
The history serves for a pass that raises, which leaves no program to read. Changes no arguments
and no results; only adds notes to exceptions.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from nnx_inspector._compat import eqn_params, jaxprs, sources
from nnx_inspector.errors import add_note
from nnx_inspector.hooks import linen
from nnx_inspector.hooks.hook import Context
from nnx_inspector.hooks.operations.attention import FIXED, Trails, pattern_in
from nnx_inspector.hooks.operations.kernels import is_known_kernel
from nnx_inspector.hooks.variables import byte_count, contents, parameter_arrays, shared_contents
from nnx_inspector.program.analysis.cost import equation_flops, is_arithmetic
from nnx_inspector.program.analysis.describe import in_words, value_in_words
from nnx_inspector.program.analysis.equations import Body, bodies_of, kind_of
from nnx_inspector.program.analysis.identity import Values
from nnx_inspector.program.changes import ChangedVariable, mark_changes, pair_of
from nnx_inspector.program.eager import EagerEquation as RanEquation
from nnx_inspector.program.editing.position_masks import mask_params
from nnx_inspector.program.marks import (
    BEGIN,
    CHANGE,
    INPUT,
    OUTPUT,
    POSITIONS,
    mark,
    mark_arguments,
    mark_tree,
)
from nnx_inspector.program.members import member_scope
from nnx_inspector.program.structure import Structure, is_whole
from nnx_inspector.program.survey import is_masked, members_of
from nnx_inspector.typing import Equation, Function, Jaxpr, Kwargs, Owner, PyTree, Value


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """One call of one site in the traced program.

    Attributes:
        site: the site's key.
        type: the name of the module's class.
        depth: the number of calls that enclose it.
        parent: the number of the call that encloses it, or None.
        inputs: its arguments as written in a call: `"float32[8,10], train=True"`. Arrays as dtype
            and shape, without the batch axis of a `vmap`; Python values as they are.
        output: its result in the same form; `""` for a call that did not return.
        shape, dtype: of the output, if it is one array, with the batch axes of a `vmap` around the
            call; otherwise None.
        parameters: the number of elements of its parameters (`nnx.Param`), children included.
        parameter_bytes: the bytes of its parameters.
        output_bytes: the bytes of the arrays (the activation) that the call returns once, batch
            axes of a `vmap` included.
        flops: the operations over all its `times`, children included, and for a `cond` those of
            the costliest branch; None if their number cannot be known (a while loop, foreign code).
        times: how often it runs: the product of the lengths of the scans around it (and the number
            of devices of a `shard_map`); None if that cannot be known (a while loop).
        conditional: whether it is in a branch of a `cond`, which may not be taken.
        stacked: the number of layers that the module holds, if each call sees one; otherwise 0.
        members: the number of members of an ensemble that a `vmap` around the call runs, if they
            are measured one by one; otherwise 0.
        source: `file:line` of the user's code that makes the call. If flax makes it (a layer of an
            `nnx.Sequential`), the line of the user's code that called flax.
        changed: the Variables that hold another value after the call, including its children's;
            None (not known) in a trace that ended in an exception.
        error: what the call raised, in words; `""` for none, and for the calls that enclose it.
        attends: how many attentions the call computes itself, each a site `"...@attention"`.
        arrays: name and type of each array of the output, the main one first; empty if it returns
            only one.
        counted: whether only those positions of all its arrays count that `where=` says.
    """

    site: str
    type: str
    depth: int
    parent: int | None
    inputs: str
    output: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    parameters: int = 0
    parameter_bytes: int = 0
    output_bytes: int = 0
    flops: float | None = None
    times: int | None = None
    conditional: bool = False
    stacked: int = 0
    members: int = 0
    source: str = ""
    changed: tuple[ChangedVariable, ...] | None = None
    error: str = ""
    attends: int = 0
    arrays: tuple[tuple[str, str], ...] = ()
    counted: bool = False

    def with_output(
        self, text: str, arrays: Sequence[Value], structure: Structure | None = None
    ) -> TracedCall:
        """The call with its output, given in words and as arrays (or abstract arrays)."""
        lone = arrays[0] if len(arrays) == 1 else None
        named = [] if structure is None else structure.named_arrays()
        return dataclasses.replace(
            self,
            output=text,
            shape=None if lone is None else tuple(lone.shape),
            dtype=None if lone is None else str(lone.dtype),
            output_bytes=byte_count(arrays),
            arrays=tuple(named),
        )


@dataclasses.dataclass(frozen=True)
class CallSite:
    """What is known about a call when it begins; a parameter of its marks.

    Attributes:
        type: the name of the module's class.
        source: `file:line`, or `""` if the enclosing equation has the right line.
        first: the shape of the module's first parameter, as the call sees it.
    """

    key: str
    path: str
    type: str
    source: str
    first: tuple[int, ...] | None


class ParameterSizes:
    """A model's modules by path, and the size of their parameters, computed once for each."""

    def __init__(self, modules: Mapping[str, nnx.Module]):
        self._modules = modules
        self._known: dict[str, tuple[Any, ...]] = {}

    def begin(self, call: CallSite, inputs: str, depth: int, parent: int | None) -> TracedCall:
        """A call of one of the modules, as it begins."""
        if call.path not in self._known:
            module = self._modules.get(call.path)
            found = contents(() if module is None else module)
            self._known[call.path] = (
                *found.parameter_sizes(),
                _first_shape(parameter_arrays(found)),
            )
        size, held, whole = self._known[call.path]
        return TracedCall(
            site=call.key,
            type=call.type,
            depth=depth,
            parent=parent,
            inputs=inputs,
            parameters=size,
            parameter_bytes=held,
            stacked=_stacked(whole, call.first),
            source=call.source,
        )


def _stacked(whole: tuple[int, ...] | None, inside: tuple[int, ...] | None) -> int:
    """The number of layers in a module: its first parameter's shape is compared with a call's."""
    if whole is None or inside is None or len(whole) != len(inside) + 1:
        return 0
    for axis, size in enumerate(whole):
        if whole[:axis] + whole[axis + 1 :] == inside:
            return size
    return 0


@dataclasses.dataclass(frozen=True)
class _Position:
    """The part of the program that an equation is in."""

    times: int | None = 1
    conditional: bool = False
    source: str = ""
    again: bool = False  # in the second pass of a remat, whose calls were seen in the first
    known: bool = True  # whether all operations are there, not only those that hold marks
    loops: bool = False  # in a scan or a while loop


class _Walk:
    def __init__(self, modules: ParameterSizes, owner: Owner, weights: Sequence[Any]):
        self.trails = Trails()
        for weight in weights:
            self.trails.put(weight, FIXED)
        self.modules = modules
        self.owner = owner
        self.calls: list[TracedCall] = []
        self.open: list[int] = []
        self.flops: list[float | None] = [0.0]  # of the program, then of each open call or branch
        self.forwarded: dict[int, Any] = {}

    def enter(self, jaxpr: Jaxpr, where: _Position) -> None:
        bare, _ = jaxprs.open_jaxpr(jaxpr)
        values, outside = Values(bare, self.forwarded), len(self.open)
        for equation in bare.eqns:
            if equation.primitive is mark:
                # of an eager pass there is no program to follow: its marks have no results
                for given, received in zip(equation.invars, equation.outvars, strict=False):
                    self.trails.put(received, self.trails.of(given))
                own = equation.params["owner"] == self.owner and not where.again
                if own and equation.params["part"] != POSITIONS:
                    self._mark(equation, values, where)
                continue
            bodies = () if is_arithmetic(equation) else bodies_of(equation)
            if bodies:
                self._control(equation, bodies, where)
            else:
                self._add(_total_flops(equation_flops(equation), where.times))
                if where.known and not where.again:
                    self._attend(equation)
        while len(self.open) > outside:  # a call that does not return within this jaxpr
            self._close()

    def _follow(self, equation: Equation, body: Body, within: _Position, *, known: bool) -> None:
        inside, _ = jaxprs.open_jaxpr(body.jaxpr)
        if not known or within.again or body.operands is None or body.results is None:
            return self.enter(body.jaxpr, within)
        for var, number, part in zip(inside.invars, body.operands, body.taken, strict=True):
            trail = self.trails.of(equation.invars[number])
            self.trails.put(var, trail if part is None or trail is FIXED else None)
        self.enter(body.jaxpr, within)
        for atom, number, part in zip(inside.outvars, body.results, body.given, strict=True):
            if number is not None and part is None:
                self.trails.put(equation.outvars[number], self.trails.of(atom))

    def _attend(self, equation: Equation) -> None:
        name, params, values = equation.primitive.name, equation.params, equation.invars
        found = is_known_kernel(equation) or pattern_in(name, params, values, self.trails)
        if self.open and found:
            self._replace(attends=self.calls[self.open[-1]].attends + 1)
        self.trails.follow(name, params, values, equation.outvars)

    def _add(self, flops: float | None) -> None:
        total = self.flops[-1]
        self.flops[-1] = None if total is None or flops is None else total + flops

    def _mark(self, equation: Equation, values: Values, where: _Position) -> None:
        params, part = equation.params, equation.params["part"]
        begun = params.get("call")  # not of one that could not be attributed
        if begun and not begun.source:  # such as an operation in a function that jax has inlined
            where = dataclasses.replace(where, source=_source_of(equation) or where.source)
        innermost = self.calls[self.open[-1]].site if self.open else None
        if part == BEGIN or (part == INPUT and innermost != params["site"]):
            self._begin(params["call"], where)
        if part == INPUT:
            self._replace(inputs=params["text"])
        elif part == CHANGE:
            self._return_to(params["call"], where)
            pair = pair_of(equation)
            if not (pair and values.same(*pair)):
                changed = self.calls[self.open[-1]].changed or ()
                self._replace(changed=(*changed, params["variable"]))
        elif part == OUTPUT:
            self._return_to(params["call"], where)
            call = self.calls[self.open[-1]]
            arrays = [v.aval for v in equation.invars]
            members = None if where.loops else members_of(equation)
            how = {"members": 0 if members is None else members.count}
            call = dataclasses.replace(call, counted=is_masked(equation), **how)
            self.calls[self.open[-1]] = call.with_output(
                params["text"], arrays, params["structure"]
            )
            self._close()

    def _replace(self, **fields: object) -> None:
        self.calls[self.open[-1]] = dataclasses.replace(self.calls[self.open[-1]], **fields)

    def _return_to(self, call: CallSite, where: _Position) -> None:
        """Make a call the innermost open one, even if marks between were dropped by a transform."""
        if not any(self.calls[n].site == call.key for n in reversed(self.open)):
            self._begin(call, where)
        while self.calls[self.open[-1]].site != call.key:
            self._close()

    def _begin(self, call: CallSite, where: _Position) -> None:
        parent = self.open[-1] if self.open else None
        begun = self.modules.begin(call, "(not seen)", len(self.open), parent)
        self.open.append(len(self.calls))
        self.flops.append(0.0 if where.known else None)
        self.calls.append(
            dataclasses.replace(
                begun,
                times=where.times,
                conditional=where.conditional,
                source=begun.source or where.source,
                changed=(),
            )
        )

    def _close(self) -> None:
        number, flops = self.open.pop(), self.flops.pop()
        self.calls[number] = dataclasses.replace(self.calls[number], flops=flops)
        self._add(flops)

    def _control(self, equation: Equation, bodies: Sequence[Body], where: _Position) -> None:
        source = _source_of(equation) or where.source
        again = where.again or eqn_params.is_recomputation(equation)
        branches: list[float | None] = []
        for body in bodies:
            times = where.times
            if times is not None:
                times = None if body.times is None else times * body.times
            conditional = where.conditional or body.conditional
            loops = where.loops or kind_of(equation) in ("scan", "while")
            inside = _Position(
                times, conditional=conditional, source=source, again=again, loops=loops
            )
            if not body.conditional:
                self._follow(equation, body, inside, known=where.known)
                continue
            self.flops.append(0.0)
            self._follow(equation, body, inside, known=where.known)
            branches.append(self.flops.pop())
        known = [flops for flops in branches if flops is not None]
        if branches:
            self._add(max(known) if len(known) == len(branches) else None)


def _total_flops(flops: float | None, times: int | None) -> float | None:
    if not flops:  # zero times any number is zero; None stays None
        return flops
    return None if times is None else flops * times


def _source_of(equation: Equation) -> str:
    return (
        equation.source
        if isinstance(equation, RanEquation)
        else sources.source_of_equation(equation)
    )


def calls_of(
    jaxpr: Jaxpr,
    owner: object,
    modules: ParameterSizes,
    source: str,
    *,
    known: bool = True,
    weights: Container[int] = (),
) -> tuple[TracedCall, ...]:
    """The calls that a marked jaxpr holds, in the order in which they begin.

    Args:
        jaxpr: the jaxpr, with an owner's marks.
        source: `file:line` for calls that no user code of the traced function makes.
        known: whether the jaxpr has every operation. An eager pass has only those that hold marks,
            so its FLOPs are not known.
        weights: the numbers of the jaxpr's inputs that belong to the model, such as parameters.
    """
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    fixed = [v for number, v in enumerate(bare.invars) if number in weights]
    walk = _Walk(modules, owner, fixed)
    walk.enter(jaxpr, _Position(source=source, known=known))
    return tuple(walk.calls)


class CallHistory:
    """The calls of one pass as their Python code ran, as far as known without the program.

    Attributes:
        calls: the calls, in the order in which they began.
    """

    def __init__(self, modules: ParameterSizes):
        self.calls: list[TracedCall] = []
        self._modules = modules
        self._open: list[int] = []
        self._error: BaseException | None = None

    def restart(self) -> None:
        """Forget the calls, because the pass begins again."""
        self.calls, self._open, self._error = [], [], None

    def begin(self, call: CallSite) -> None:
        parent = self._open[-1] if self._open else None
        self.calls.append(self._modules.begin(call, "", len(self._open), parent))
        self._open.append(len(self.calls) - 1)  # last: the above may exceed the stack

    def receive(self, text: str) -> None:
        """Record what the innermost call receives, in words."""
        self._replace(inputs=text)

    def end(self, output: object, text: str) -> None:
        """Record that the innermost call returns."""
        leaves = jax.tree.leaves(output, is_leaf=is_whole)
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        self.calls[self._open[-1]] = self.calls[self._open[-1]].with_output(text, arrays)
        self._open.pop()

    def fail(self, error: Exception) -> bool:
        """Record that the innermost call raises; returns whether no inner call raised `error`."""
        first = error is not self._error
        if first:
            self._replace(error=error_in_words(error))
        self._error = error
        self._open.pop()
        return first

    def _replace(self, **fields: object) -> None:
        number = self._open[-1]
        self.calls[number] = dataclasses.replace(self.calls[number], **fields)

    def close(self) -> None:
        """Release the model and the exception: jit caches keep hooks, which keep this object."""
        self._modules, self._error = ParameterSizes({}), None


def error_in_words(error: BaseException) -> str:
    """`"ValueError: the text"`, as Python's traceback prints it."""
    return traceback.format_exception_only(error)[0].strip()


@dataclasses.dataclass(frozen=True)
class MarkCalls:
    """Marks where a call begins, the Variables that it changes, and what it returns."""

    owner: Owner
    history: CallHistory = dataclasses.field(compare=False, repr=False)

    def __call__(
        self, next_fun: Function, args: tuple[Value, ...], kwargs: Kwargs, context: Context
    ) -> PyTree:
        module, site, kind = context.module, context.site or "", context.type_name
        part = shared_contents(module if context.kind == "method" else None)
        with sources.caller_scope() as (source, inner), part as before, member_scope(module):
            is_linen = context.kind == "linen"
            arrays = linen.parameter_arrays(module) if is_linen else parameter_arrays(before)
            call = CallSite(site, _path(context), kind, source, _first_shape(arrays))
            self.history.begin(call)
            # an inner function's trace may be reused elsewhere: there its equation has the line
            call = dataclasses.replace(call, source="" if inner else source)
            params = {"owner": self.owner, "site": site, "call": call}
            counts = mask_params(self.owner)
            try:
                args, kwargs = mark_arguments(args, kwargs, context, part=BEGIN, **params)
                out = next_fun(*args, **kwargs)
            except Exception as error:
                if self.history.fail(error):
                    add_note(
                        error,
                        f"raised in the call of {site or '(root)'!r} ({kind}) with "
                        f"inputs {in_words(args, kwargs)}.",
                    )
                raise
            if context.kind == "method":
                out = mark_changes(out, before, module, **params)
            text = value_in_words(out)
            self.history.end(out, text)
            return mark_tree(out, part=OUTPUT, text=text, **params, **counts)


@dataclasses.dataclass(frozen=True)
class MarkInputs:
    """Marks what a method receives, after interceptors."""

    owner: Owner
    history: CallHistory = dataclasses.field(compare=False, repr=False)

    def __call__(
        self, next_fun: Function, args: tuple[Value, ...], kwargs: Kwargs, context: Context
    ) -> PyTree:
        site, text = context.site or "", in_words(args, kwargs)
        self.history.receive(text)
        call = CallSite(site, _path(context), context.type_name, "", None)
        params = {"owner": self.owner, "site": site, "part": INPUT, "text": text, "call": call}
        args, kwargs = mark_arguments(args, kwargs, context, **params, **mask_params(self.owner))
        return next_fun(*args, **kwargs)


def _path(context: Context) -> str:
    """The path whose parameters a call has; an operation has none."""
    return (context.site if context.kind == "operation" else context.path) or ""


def _first_shape(arrays: Iterator[Value]) -> tuple[int, ...] | None:
    return next((tuple(x.shape) for x in arrays), None)
