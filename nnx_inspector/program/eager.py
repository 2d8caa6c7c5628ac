"""Runs a call as it stands, line by line, and reads its marks as they run.

This is for calls that cannot be traced because their code reads the values of arrays. Values stay
the caller's own, arrays or tracers of an eager derivative. Each mark, and each jitted function,
scan or cond that holds marks, comes here when it runs, as a program of one equation, and is edited
as a traced call is (`instrument`). Invariant: the measurements are those of a traced call, in the
same order, and the call's results do not change. A part that is jitted compiles once for all its
calls: a loop over tokens compiles one token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import linecache
import operator
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import errors

from nnx_inspector._compat import interpreter, jaxprs, jit, sources
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.sharding import to_current_mesh
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.hook import replace_hooks
from nnx_inspector.program.analysis.identity import forwarded_operands
from nnx_inspector.program.changes import is_unmeasurable
from nnx_inspector.program.editing.context import WHERE
from nnx_inspector.program.editing.position_masks import last_mask
from nnx_inspector.program.instrument import InstrumentedProgram, instrument
from nnx_inspector.program.launched import LaunchedMarks
from nnx_inspector.program.marks import GRADIENT, equation_program, mark
from nnx_inspector.program.plan import Observation, Plan
from nnx_inspector.program.survey import Item, Mark, Survey, call_numbers, holds_marks, survey
from nnx_inspector.resources import open_all
from nnx_inspector.typing import Aval, Owner, Params, Primitive, PyTree, Value

PROGRAMS = 64
"""How many programs of inner transforms are cached."""


@dataclasses.dataclass(frozen=True, eq=False)
class EagerAtom:
    """An operand or result of an equation: its shape and dtype."""

    aval: Aval


@dataclasses.dataclass(frozen=True, eq=False)
class EagerEquation:
    """A primitive that ran, in the form of a jaxpr's equation. Its operands have no origin."""

    primitive: Primitive
    params: Params
    invars: list[EagerAtom]
    outvars: list[EagerAtom] = dataclasses.field(default_factory=lambda: list[EagerAtom]())
    source: str = ""
    """`file:line` of the user's code."""


class EagerPass:
    """One run of a call as it stands, and what its marks saw.

    Args:
        plan: what to do at the marks.
        with_gradient: of which marks the gradients are measured; None if nothing differentiates
            the run.
        calls: filled with the number of each mark, see `survey.call_numbers`.

    Attributes:
        seed: a zero with respect to which the run is differentiated, or None. Every measured value
            depends on it, and so has a cotangent.
        seen: what was seen for each item of the survey, as `evaluate` returns it.
    """

    def __init__(
        self,
        owner: Owner,
        plan: Plan,
        *,
        with_gradient: Callable[[Mark], bool] | None = None,
        calls: dict[int, int] | None = None,
    ):
        self._owner, self._plan, self._with_gradient = owner, plan, with_gradient
        self.seed: Value = None
        self._equations: list[EagerEquation] = []
        self._items: dict[int, Item] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._calls: dict[int, int] = {} if calls is None else calls
        self._calls.clear()
        self._programs: dict[_EquationKey, _EquationProgram] = {}
        self._unseen: dict[str, str] = {}
        self._unattributed: dict[str, int] = {}
        # for each program that has run: the run's own mark by the id of the program's
        self._runs: list[tuple[_EquationProgram, dict[int, Mark]]] = []
        self._gradients: dict[tuple[int, int], Observation] = {}
        self.seen: list[PyTree] = []

    @property
    def survey(self) -> Survey:
        """The run as the survey of a program without outputs."""
        program: Any = types.SimpleNamespace(
            eqns=self._equations, invars=[], outvars=[], constvars=[], effects=()
        )
        return Survey(program, (), self._items, self._unseen, self._unattributed)

    def run(self, call: Callable[[], PyTree]) -> PyTree:
        with interpreter.interpret(self._bind):
            return call()

    @contextlib.contextmanager
    def read_gradients(self) -> Iterator[None]:
        """Inside, the gradients that a backward pass computes are read."""
        with open_all(
            LaunchedMarks(GRADIENT, dataclasses.replace(self._plan, perturb=None), seen=self._read)
        ):
            yield

    def gradients(self) -> list[Value]:
        """Of the gradient of each array, what was seen, or None if it has none; nested like the
        survey.
        """
        return self.survey.map_marks(
            lambda marked, _: [
                self._gradients.get((id(marked), leaf)) for leaf in range(len(marked.avals))
            ]
        )

    def _read(self, found: Survey, seen: list[PyTree]) -> None:
        for marked, _, here in found.walk(seen):
            number, leaf = marked.of
            ticket = int(np.max(here.ticket, initial=0))
            _, run = self._runs[ticket - 1] if ticket else (None, {})
            if number in run:
                self._gradients[id(run[number]), leaf] = here

    def _bind(
        self,
        primitive: Primitive,
        values: Sequence[object],
        params: Params,
        bind: Callable[[], PyTree],
    ) -> PyTree:
        if primitive is mark:
            if params["owner"] != self._owner:
                return bind()
        elif not any(holds_marks(j, self._owner) for j in jaxprs.jaxprs_in(params)):
            return bind()
        known = {id(x): EagerAtom(jax.typeof(x)) for x in values}
        atoms = [known[id(x)] for x in values]
        source = "" if primitive is mark else sources.source_of_caller()[0]
        equation: Any = EagerEquation(primitive, params, atoms, source=source)
        # jax caches traces by the open hooks: it would trace what measures again for each session
        with replace_hooks(()):
            program = self._program(primitive, params, [atom.aval for atom in atoms])
            self._unseen.update(program.found.unseen)
            for name, count in program.found.unattributed.items():
                self._unattributed[name] = self._unattributed.get(name, 0) + count
            if not program.found.items or is_unmeasurable(equation, operator.is_):
                if primitive is not mark:
                    return bind()
                self._equations.append(equation)
                return list(values)
            numbers = call_numbers(program.found.marks, self._numbers)
            self._calls.update(numbers)
            out, (seen,) = program.run(values, self._ticket())
        (item,) = program.found.items.values()
        mine: dict[int, Mark] = {}
        self._items[len(self._equations)] = _with_new_marks(item, mine)
        self._runs.append((program, mine))
        self._calls.update({id(mine[of]): number for of, number in numbers.items()})
        self._equations.append(equation)
        self.seen.append(to_current_mesh(seen))
        if primitive is mark:
            return out
        equation.outvars.extend(EagerAtom(jax.typeof(x)) for x in out)
        return [
            x if number is None else values[number]
            for x, number in zip(out, program.handed_on, strict=True)
        ]

    def _ticket(self) -> PyTree:
        """The seed of this run, whose value says which one it is."""
        if self.seed is None:
            return None
        with internal_config():
            return self.seed + (len(self._runs) + 1)

    def _program(self, primitive: Primitive, params: Params, avals: list[Aval]) -> _EquationProgram:
        code = _EquationKey(
            primitive, tuple(sorted(params.items())), tuple(avals), jit.trace_context()
        )
        if self._plan.perturb is None and self._with_gradient is None:
            return _cached_program(code, self._owner, self._plan)
        if self._plan.numbered and self._plan.perturb is not None:
            # a new program each time: call numbers are part of it
            return _EquationProgram(code, self._owner, self._plan, self._with_gradient)
        if code not in self._programs:
            self._programs[code] = _EquationProgram(
                code, self._owner, self._plan, self._with_gradient
            )
        return self._programs[code]


def _with_new_marks(item: Item, mine: dict[int, Mark]) -> Item:
    """A copy of the item with new marks, which go into `mine` by the ids of the old ones: each run
    of a program makes new calls.
    """
    children = tuple(
        dataclasses.replace(c, items={n: _with_new_marks(i, mine) for n, i in c.items.items()})
        for c in item.children
    )
    own = None if item.mark is None else dataclasses.replace(item.mark)
    if own is not None:
        mine[id(item.mark)] = own
    return dataclasses.replace(item, mark=own, children=children)


# --------------------------------------------------------------- inner programs


@dataclasses.dataclass(frozen=True)
class _EquationKey:
    """An equation without its operands, and the settings that it was bound under."""

    primitive: Primitive
    params: tuple[tuple[str, Value], ...]
    avals: tuple[Aval, ...]
    context: Hashable


class _EquationProgram:
    """A program of one equation, edited under a plan, and compiled once."""

    def __init__(
        self,
        code: _EquationKey,
        owner: Owner,
        plan: Plan,
        with_gradient: Callable[[Mark], bool] | None = None,
    ):
        self.found = survey(equation_program(code.primitive, code.params, code.avals), owner)
        self._alone = code.primitive is mark
        self._plan, self._with_gradient = plan, with_gradient
        self._compiled = jax.jit(self._run)

    @functools.cached_property
    def handed_on(self) -> list[int | None]:
        """See `identity.forwarded_operands`; the result holds for every run of the program."""
        (equation,) = self.found.jaxpr.eqns
        return forwarded_operands(equation)

    @functools.cached_property
    def _new(self) -> InstrumentedProgram:
        return instrument(self.found, self._plan, seeds=self._with_gradient, tickets=True)

    def run(self, values: Sequence[object], seed: object) -> tuple[list[Value], list[Value]]:
        """Its results, and what its marks see."""
        new = self._new
        given = [
            value if key[0] != WHERE or (x := last_mask(*key[1:])) is None else x
            for key, value in zip(new.keys, new.given, strict=True)
        ]
        given[: new.seeds] = [seed] * new.seeds
        if self._alone or any(map(jit.is_tracer, (*values, *given))):
            return self._run(values, given)
        return self._compiled(values, given)

    def _run(
        self, values: Sequence[object], given: Sequence[object]
    ) -> tuple[list[Value], list[Value]]:
        return self._new.run(values, given=given, apart=jit.outermost_program() is None)


@functools.lru_cache(maxsize=PROGRAMS)
def _cached_program(code: _EquationKey, owner: object, plan: Plan) -> _EquationProgram:
    return _EquationProgram(code, owner, plan)


# ---------------------------------------------------------- why it is not traced

_TRACING_ERRORS = (
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
        if isinstance(one, _TRACING_ERRORS) or any(map(_names_a_tracer, one.args)):
            return f"{_line_of(error)} ({type(one).__name__})"
    return ""


@contextlib.contextmanager
def require_trace(said: Callable[[str], str]) -> Iterator[None]:
    """A context in which code that cannot be traced raises an InspectorError.

    Args:
        said: its text, by what in the code cannot be traced.
    """
    try:
        yield
    except InspectorError:  # it says what is wrong, such as with where=
        raise
    except Exception as error:
        why = why_untraceable(error)
        if not why:
            raise
        raise InspectorError(said(why)) from error


def _names_a_tracer(argument: str) -> bool:
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
_MOST_REASONS = 1000


def remember_reason(form: int | None, why: str) -> None:
    """Remember why calls of a form run eagerly, so they are not traced in vain each time."""
    if form is not None:
        if len(_reasons) >= _MOST_REASONS:
            _reasons.clear()
        _reasons[form] = why


def known_reason(form: int | None) -> str:
    """Why calls of a form run eagerly; `""` if not known."""
    return "" if form is None else _reasons.get(form, "")


def can_run(values: Sequence[object]) -> bool:
    """Whether code that reads values can run with these arguments."""
    return not any(isinstance(x, jax.ShapeDtypeStruct) for x in values) and all(
        map(interpreter.is_concrete, values)
    )
