"""Runs a call as it stands, line by line, and harvests its marks as they run.

This is for calls that cannot be traced because their code reads the values of arrays, and for the
calls within a user's own program, which are traced already. Values stay the caller's own, arrays or
tracers. Each mark, and each jitted function, scan or cond that holds marks, is passed to this
module when it runs, and is harvested as it would be from a jaxpr. Invariant: the measurements are
those of a traced call, in the same order, and the call's results do not change. In an eager call,
an inner transform compiles once per program: a loop over tokens compiles one token.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors

from nnx_inspector._compat import interpreter, jaxprs, jit, sources
from nnx_inspector._compat.sharding import on_this_mesh
from nnx_inspector.hooks.layers import opened
from nnx_inspector.program.analysis.identity import handed_on
from nnx_inspector.program.changes import says_nothing
from nnx_inspector.program.harvest import run_item
from nnx_inspector.program.host.supply import Received, draw
from nnx_inspector.program.marks import mark
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.survey import Item, Survey, item_of

PROGRAMS = 64
"""How many programs of inner transforms are cached."""

MEMO = 16
"""How many values' summaries are cached: a call's output is often its enclosing call's too."""

SinksOf = Callable[[Survey], list[Any]]
"""A function of a survey that returns the wanted sinks, such as `harvest.sinks_for`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Atom:
    """An operand or result of an equation: its shape and dtype."""

    aval: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """A primitive that ran, in the form of a jaxpr's equation. Its operands have no origin."""

    primitive: Any
    params: dict[str, Any]
    invars: list[Atom]
    outvars: list[Atom] = dataclasses.field(default_factory=lambda: list[Atom]())
    source: str = ""
    """`file:line` of the user's code."""


class EagerPass:
    """One run of a call as it stands, and what its marks saw.

    Args:
        plan: what to do at the marks.
        seed: a zero with respect to which the run is differentiated, or None. Every measured value
            depends on it, and so has a cotangent.
        sinks_of: gives the sinks whose gradients are wanted; only their shapes count.
        calls: filled with the number of each mark, see `survey.call_numbers`.

    Attributes:
        seed: as above; it may be set until the run.
        seen: what was seen for each item of the survey, as `evaluate` returns it.
        sinks: for each item, the numbers of its sinks.
        received: what the sinks receive, by their numbers.
    """

    def __init__(
        self,
        owner: Any,
        plan: Plan,
        *,
        seed: Any = None,
        sinks_of: SinksOf | None = None,
        calls: dict[int, int] | None = None,
    ):
        self._owner, self._plan = owner, plan
        self.seed, self._sinks_of = seed, sinks_of
        self._equations: list[Equation] = []
        self._items: dict[int, Item] = {}
        self._memo: dict[int, Any] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._calls: dict[int, int] = {} if calls is None else calls
        self._calls.clear()
        self._programs: dict[_Code, _Program] = {}
        self._used: set[_Program] = set()
        self._unseen: dict[str, str] = {}
        self._unattributed: dict[str, int] = {}
        self._drawn: list[Any] = []
        self.seen: list[Any] = []
        self.sinks: list[Any] = []
        self.received = Received()

    @property
    def survey(self) -> Survey:
        """The run as the survey of a program without outputs."""
        program = types.SimpleNamespace(
            eqns=self._equations, invars=[], outvars=[], constvars=[], effects=()
        )
        return Survey(program, (), self._items, self._unseen, self._unattributed)

    def cotangents(self) -> list[Any]:
        """What the sinks received, nested like the survey, once it has been differentiated."""
        found = self.received.take()
        drawn = [found.get(i, jnp.zeros(x.shape, x.dtype)) for i, x in enumerate(self._drawn)]
        return jax.tree.map(lambda number: drawn[number], self.sinks)

    def run(self, call: Callable[[], Any]) -> Any:
        with interpreter.interpreted(self._bind):
            return call()

    def _bind(
        self, primitive: Any, values: Sequence[Any], params: dict[str, Any], bind: Callable[[], Any]
    ) -> Any:
        if primitive is mark:
            if params["owner"] != self._owner:
                return bind()
        elif not any(_holds_marks(j, self._owner) for j in jaxprs.sub_jaxprs(_of(params))):
            return bind()
        known = {id(x): Atom(jax.typeof(x)) for x in values}
        atoms = [known[id(x)] for x in values]
        source = "" if primitive is mark else sources.source_of_caller()[0]
        equation = Equation(primitive, params, atoms, source=source)
        if primitive is mark:
            item = item_of(equation, self._owner, self._unseen, self._unattributed)
            if item is None or says_nothing(equation, operator.is_):
                self._equations.append(equation)
                return list(values)
            return self._take(item, equation, list(values), None)
        program = self._program(_Code(primitive, tuple(sorted(params.items()))))
        self._unseen.update(program.unseen)
        for name, count in program.unattributed.items():
            self._unattributed[name] = self._unattributed.get(name, 0) + count
        if program.item is None:
            return bind()
        item = program.item if program not in self._used else _fresh(program.item)
        self._used.add(program)
        out = self._take(item, equation, list(values), program)
        equation.outvars.extend(Atom(jax.typeof(x)) for x in out)
        return [
            x if number is None else values[number]
            for x, number in zip(out, program.handed_on(equation), strict=True)
        ]

    def _take(
        self, item: Item, equation: Equation, values: list[Any], program: _Program | None
    ) -> list[Any]:
        self._count(item)
        if len(self._memo) > MEMO:
            self._memo.clear()  # it keeps arrays alive
        # jax caches traces by the open layers: it would trace what measures again for each session
        with opened(()):
            sinks = self._sinks(item)
            if program is None or not all(map(interpreter.is_concrete, values)):
                out, seen = run_item(item, equation, values, self._plan, sinks, self._memo)
            else:
                out, seen = program.run(values, sinks)
        self._items[len(self._equations)] = item
        self._equations.append(equation)
        self.seen.append(on_this_mesh(seen))
        return out

    def _program(self, code: _Code) -> _Program:
        if self._plan.perturb is None:
            return _program(code, self._owner, self._plan)
        if self._plan.numbered:  # a new program each time: call numbers are part of it
            return _Program(code, self._owner, self._plan)
        if code not in self._programs:
            self._programs[code] = _Program(code, self._owner, self._plan)
        return self._programs[code]

    def _count(self, item: Item) -> None:
        for one in _alone(item).marks:
            key = (one.site, one.part)
            self._calls[id(one)] = self._numbers.get(key, 0)
            self._numbers[key] = self._calls[id(one)] + 1

    def _sinks(self, item: Item) -> Any:
        """Draw the sinks of an item."""
        sinks_of = self._sinks_of
        if sinks_of is None or self.seed is None:
            self.sinks.append([])
            return None
        (wanted,) = jax.eval_shape(lambda: sinks_of(_alone(item)))
        first = len(self._drawn)
        shapes, structure = jax.tree.flatten(wanted)
        self._drawn += shapes
        self.sinks.append(structure.unflatten(range(first, len(self._drawn))))
        drawn = [
            draw(self.seed, shape, number=first + i, received=self.received)
            for i, shape in enumerate(shapes)
        ]
        return on_this_mesh(structure.unflatten(drawn)) if drawn else None


def _of(params: dict[str, Any]) -> Any:
    return types.SimpleNamespace(params=params)


def _alone(item: Item) -> Survey:
    return Survey(types.SimpleNamespace(eqns=[]), (), {0: item}, {}, {})


def _fresh(item: Item) -> Item:
    """A copy of the item with new marks: each run of a program makes new calls."""
    children = tuple(
        dataclasses.replace(c, items={n: _fresh(i) for n, i in c.items.items()})
        for c in item.children
    )
    own = None if item.mark is None else dataclasses.replace(item.mark)
    return dataclasses.replace(item, mark=own, children=children)


# --------------------------------------------------------------- inner programs

_marked: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


def _holds_marks(jaxpr: Any, owner: Any) -> bool:
    """Whether a jaxpr, or one nested in it, holds marks of this owner."""
    known = _marked.setdefault(jaxpr, {})
    if owner not in known:
        known[owner] = any(
            (equation.primitive is mark and equation.params["owner"] == owner)
            or any(_holds_marks(inner, owner) for inner in jaxprs.sub_jaxprs(equation))
            for equation in jaxprs.open_jaxpr(jaxpr)[0].eqns
        )
    return known[owner]


@dataclasses.dataclass(frozen=True)
class _Code:
    """A primitive and its parameters: an inner program, whatever its arguments."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]


class _Program:
    """An inner transform with its marks harvested, compiled once for each shape."""

    def __init__(self, code: _Code, owner: Any, plan: Plan):
        equation = Equation(code.primitive, dict(code.params), [])
        self.unseen: dict[str, str] = {}
        self.unattributed: dict[str, int] = {}
        self.item = item = item_of(equation, owner, self.unseen, self.unattributed)
        self._handed_on: list[int | None] | None = None

        def program(values: list[Any], sinks: Any) -> Any:
            assert item is not None
            return run_item(item, equation, values, plan, sinks, {})

        self.run = jax.jit(program)

    def handed_on(self, equation: Equation) -> list[int | None]:
        """See `identity.handed_on`; the result holds for every call of the program."""
        if self._handed_on is None:
            self._handed_on = handed_on(equation)
        return self._handed_on


@functools.lru_cache(maxsize=PROGRAMS)
def _program(code: _Code, owner: Any, plan: Plan) -> _Program:
    return _Program(code, owner, plan)


# ---------------------------------------------------------- why it is not traced

_UNKNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.UnexpectedTracerError,
    errors.TraceContextError,
)


def why_untraceable(error: BaseException) -> str:
    """What in a call's code cannot be traced, in words, if that is why it raised; otherwise `""`.

    An exception that does not concern tracing, nor is caused by one that does, is the user's.
    """
    for one in _chain(error):
        if isinstance(one, _UNKNOWN) or any(map(_names_a_tracer, one.args)):
            return f"{_line_of(error)} ({type(one).__name__})"
    return ""


def _names_a_tracer(argument: Any) -> bool:
    """Whether an exception's argument is a tracer (as in a KeyError), or a text that names one.

    The exception itself is not converted to text: a user's `__str__` may raise.
    """
    if isinstance(argument, str):
        # Python names the types of operands that fit no better with values
        mistake = argument.startswith("unsupported operand")
        return not mistake and ("Tracer" in argument or "Traced<" in argument)
    return jit.is_tracer(argument)


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _line_of(error: BaseException) -> str:
    """The user's line that raised, with its file, number and text."""
    place, traceback = "its code reads the values of arrays", error.__traceback__
    while traceback is not None:
        code, line = traceback.tb_frame.f_code, traceback.tb_lineno
        if sources.is_user_file(code.co_filename):
            text = linecache.getline(code.co_filename, line).strip()
            name = code.co_filename.replace("\\", "/").rpartition("/")[2]
            place = f"{name}:{line}" + f" reads the value of an array: `{text}`" * bool(text)
        traceback = traceback.tb_next
    return place


# ------------------------------------------------------ what is known to run eagerly

_reasons: dict[int, str] = {}
_MOST = 1000


def remember(form: int | None, why: str) -> None:
    """Remember why calls of a form run eagerly, so they are not traced in vain each time."""
    if form is not None:
        if len(_reasons) >= _MOST:
            _reasons.clear()
        _reasons[form] = why


def remembered(form: int | None) -> str:
    """Why calls of a form run eagerly; `""` if not known."""
    return "" if form is None else _reasons.get(form, "")


def can_run(values: Sequence[Any]) -> bool:
    """Whether code that reads values can run with these arguments."""
    return not any(isinstance(x, jax.ShapeDtypeStruct) for x in values) and all(
        map(interpreter.is_concrete, values)
    )
