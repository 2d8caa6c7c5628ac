"""The operation of a program that makes its first NaN, found by running the program once more.

A program that examines every value says where NaNs and infinities are. From a result that has one,
the search goes back along the operands that have one too, so a NaN that a `where` leaves out does
not count. It enters loops, iteration by iteration. Invariant: an operation that is named made a NaN
(or an infinity) from operands without one. Runs the program twice for each loop that it enters, and
changes nothing. If the values are gone, `candidates` reads from the program what may have done it:
all that lies between the values that were finite and the one that was not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat import eqn_params, jaxprs, sources
from nnx_inspector._compat.configuration import internal_config, unchecked_jit
from nnx_inspector.program.analysis.equations import Body, bodies_of, is_call, kind_of
from nnx_inspector.program.analysis.operation import OF_NEGATIVES, Loops, Operand, Operation
from nnx_inspector.program.marks import BEGIN, INPUT, OUTPUT, mark
from nnx_inspector.stats.summarize import is_number
from nnx_inspector.typing import Array, Bool, Equation, Jaxpr, OpenJaxpr, Value, Var

NAN, INFINITE = 0, 1
_NAN_MAKERS = {*OF_NEGATIVES, "div", "rem", "integer_pow", "exp", "exp2", "expm1", "acos", "asin",
            "atanh", "atan2", "square", "cbrt", "erf_inv", "cosh", "sinh", "cumprod", "reduce_prod",
            "triangular_solve", "cholesky", "eigh", "svd"}  # fmt: skip
"""Primitives that make a NaN or an infinity from finite values, or whose derivative may be one."""
_MOVEMENTS = frozenset({"broadcast_in_dim", "concatenate", "convert_element_type", "copy",
                         "reshape", "squeeze", "transpose"})  # fmt: skip
_BOUNDED = frozenset("exp exp2 logistic tanh erf eq ne lt le gt ge is_finite".split())  # noqa: SIM905
_MAX_ITERATIONS = 100_000


def first_nan(
    jaxpr: OpenJaxpr, consts: Sequence[object], values: Sequence[object]
) -> Operation | None:
    """The operation that makes the NaN of a program's results, or of its marked values.

    Args:
        jaxpr: the program.
        consts: its constants.
        values: its inputs: arrays.

    Returns:
        None if no result has a NaN, or if the NaN is in the inputs already.
    """
    with unchecked_jit():
        return _Search(jaxpr, consts, (), None).run(values)


def candidates(
    jaxpr: Jaxpr, site: str, *, backward: bool, finite: Collection[str] = ()
) -> list[Operation]:
    """The operations that may have made a NaN or an infinity from finite values, each line once.

    Args:
        jaxpr: the program, with the marks of its calls.
        site: the site whose output or gradient had it.
        backward: whether to list those between the site's output and the outputs of other calls,
            where a derivative made a NaN of the site's gradient; else those that the site's output
            is computed by.
        finite: the sites whose outputs were finite: what they were computed by is left out.
    """
    search = _Search(*jaxprs.open_jaxpr(jaxpr), (), None)
    found = (
        search.operations_after(site) if backward else search.operations_before((), site, finite)[0]
    )
    return list({(one.name, one.source): one for one in found}.values())


# ---------------------------------------------------------------------- programs


@dataclasses.dataclass(frozen=True)
class _Step:
    """An equation outside of all calls: the numbers of its operands and results."""

    equation: Equation
    operands: tuple[int, ...]
    results: tuple[int, ...]
    source: tuple[str, str]
    backward: bool


class _Search:
    """A program whose inner calls are written out, in numbered values."""

    def __init__(self, jaxpr: OpenJaxpr, consts: Sequence[Value], loops: Loops, site: str | None):
        self.loops, self._outer, self.has_site = loops, site, False
        self._known: dict[int, Value] = {}
        self._count = 0
        self._steps: list[_Step] = []
        self.inputs = [self._new() for _ in jaxpr.invars]
        self.outputs = self._inline(jaxpr, consts, self.inputs, ("", ""), False)
        self._step_of_result = {n: i for i, step in enumerate(self._steps) for n in step.results}
        self._flags = jax.jit(self._find_flags)

    def _new(self) -> int:
        self._count += 1
        return self._count - 1

    def _inline(
        self,
        jaxpr: OpenJaxpr,
        consts: Sequence[object],
        inputs: Sequence[int],
        source: tuple[str, str],
        backward: bool,
    ) -> list[int]:
        at: dict[Var, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            at[variable] = self._new()
            self._known[at[variable]] = value

        def number(atom: Value) -> int:
            if jaxprs.is_literal(atom):
                new = self._new()
                self._known[new] = atom.val
                return new
            return at[atom]

        for equation in jaxpr.eqns:
            operands = [number(v) for v in equation.invars]
            here = sources.source_and_function(equation)
            here = here if here[0] else source
            behind = backward or sources.is_backward(equation)
            bodies = bodies_of(equation)
            inner = bodies[0] if len(bodies) == 1 else None
            whole = is_call(equation) or kind_of(equation) in ("jit", "remat", "inline")
            if whole and inner is not None and inner.operands is not None:
                body, closed = jaxprs.open_jaxpr(inner.jaxpr)
                given = [operands[i] for i in inner.operands]
                results = self._inline(body, closed, given, here, behind)
                at.update(zip(equation.outvars, results, strict=True))
                continue
            results = [self._new() for _ in equation.outvars]
            self._steps.append(_Step(equation, tuple(operands), tuple(results), here, behind))
            at.update(zip(equation.outvars, results, strict=True))
        return [number(v) for v in jaxpr.outvars]

    def _evaluate(self, values: Sequence[object], last: int) -> dict[int, Value]:
        """All values before the step `last`."""
        env = {**self._known, **dict(zip(self.inputs, values, strict=True))}
        for step in self._steps[:last]:
            read = [env[n] for n in step.operands]
            env.update(zip(step.results, jaxprs.bind(step.equation, read), strict=True))
        return env

    def _find_flags(self, values: Sequence[object]) -> tuple[Bool[Array, "values 2"], list[Value]]:
        """bool[values, 2]: which values have a NaN, and which an infinity; and the outputs."""
        env = self._evaluate(values, len(self._steps))
        with internal_config():
            found = jnp.stack([_nan_and_inf(env[n]) for n in range(self._count)])
        return found, [env[n] for n in self.outputs]

    # -------------------------------------------------------------------- searching

    def flags(self, values: Sequence[object]) -> tuple[np.ndarray, list[Value]]:
        """As `_find_flags`, compiled."""
        found, out = self._flags(list(values))
        return np.asarray(found), out

    def run(self, values: Sequence[object], found: np.ndarray | None = None) -> Operation | None:
        found = self.flags(values)[0] if found is None else found
        starts = [n for step in self._steps if step.equation.primitive is mark
                  for n in step.results if found[n, NAN]]  # fmt: skip
        starts += [n for n in self.outputs if found[n, NAN]]
        made = [self._origin_step(n, found, NAN) for n in starts]
        first = min((i for i in made if i is not None), default=None)
        return None if first is None else self._describe(first, found, values, NAN)

    def _origin_step(self, number: int, found: np.ndarray, what: int) -> int | None:
        """The step where the NaN (or infinity) of a value arose; None for an input or constant."""
        while (at := self._step_of_result.get(number)) is not None:
            step = self._steps[at]
            before = [n for n in self._sources(step, number) if found[n, what]]
            if not before:
                return at
            number = before[0]
        return None

    def _sources(self, step: _Step, number: int) -> Sequence[int]:
        """The operands from which a result may have its values."""
        if step.equation.primitive is mark:
            return [step.operands[step.results.index(number)]]
        return step.operands

    def _describe(
        self, at: int, found: np.ndarray, values: Sequence[object], what: int
    ) -> Operation | None:
        step = self._steps[at]
        program = jax.jit(lambda values: [self._evaluate(values, at)[n] for n in numbers])
        length, numbers = self._length(step.equation), list(step.operands)
        if length:
            numbers[1] = self._index(numbers[1])
        operands = program(list(values))
        if what == NAN and (within := self._enter(at, operands)) is not None:
            return within
        infinite = [n for n in step.operands if found[n, INFINITE]]
        origins = [self._origin_step(n, found, INFINITE) for n in infinite if what == NAN]
        after = next((i for i in origins if i is not None), None)
        return dataclasses.replace(
            self._operation(at),
            makes="NaN" if what == NAN else "Inf",
            operands=tuple(Operand.of(x) for x in operands if _has_numbers(x)),
            after=None if after is None else self._describe(after, found, values, INFINITE),
        )

    def _operation(self, at: int) -> Operation:
        """The operation of a step whose values are unknown."""
        step = self._steps[at]
        result: Value = step.equation.outvars[0].aval
        return Operation(
            name=step.equation.primitive.name,
            makes="NaN",
            operands=(),
            site=self._site(at),
            source=step.source[0],
            function=step.source[1],
            loops=self.loops,
            backward=step.backward,
            result=str(getattr(result, "dtype", "")),
            length=self._length(step.equation),
        )

    def operations_after(self, site: str, *, every: bool = False) -> list[Operation]:
        """The operations behind a site's output, see `candidates`; all operations if `every`."""
        found: list[Operation] = []
        after: set[int] = set()  # what depends on the site's output, until a call returns it
        for at, step in enumerate(self._steps):
            params = step.equation.params
            if step.equation.primitive is mark:
                own = params["part"] == OUTPUT and params["site"] == site
                self.has_site |= own
                on = [own or (params["part"] != OUTPUT and n in after) for n in step.operands]
                after.update(n for n, one in zip(step.results, on, strict=True) if one)
                continue
            follows = every or not after.isdisjoint(step.operands)
            for body in jaxprs.sub_jaxprs(step.equation):
                inner = _Search(*jaxprs.open_jaxpr(body), (), self._site(at))
                within = inner.operations_after(site, every=follows)
                if inner.has_site and not follows:  # and the next iteration follows
                    follows, within = True, inner.operations_after(site, every=True)
                found += within
            after.update(step.results if follows else ())
            if follows and self._may_make_nan[at]:
                found.append(self._operation(at))
        return found

    def operations_before(
        self, wanted: Collection[int], site: str, finite: Collection[str]
    ) -> tuple[list[Operation], set[int]]:
        """The operations that some values and the outputs of a site are computed by, back to the
        outputs of finite sites; and the numbers of the inputs that they are computed from.
        """
        needed, found = set(wanted), list[Operation]()
        for at, step in reversed(list(enumerate(self._steps))):
            params = step.equation.params
            if step.equation.primitive is mark:
                ends = params["part"] == OUTPUT and params["site"] in finite
                if params["part"] == OUTPUT and params["site"] == site:
                    needed.update(step.operands)
                elif not ends:
                    results = [n for n in step.results if n in needed]
                    needed.update(n for one in results for n in self._sources(step, one))
                continue
            bodies = bodies_of(step.equation)
            for body in bodies:
                within, reached = self._body_before(body, at, needed, site, finite)
                found += reversed(within)
                places = range(len(step.operands)) if reached else ()
                if body.operands is not None:
                    places = [body.operands[i] for i in reached]
                needed.update(step.operands[i] for i in places)
            if not bodies and not needed.isdisjoint(step.results):
                needed.update(step.operands)
                found += [self._operation(at)] if self._may_make_nan[at] else []
        return found[::-1], {i for i, n in enumerate(self.inputs) if n in needed}

    def _body_before(
        self, body: Body, at: int, needed: set[int], site: str, finite: Collection[str]
    ) -> tuple[list[Operation], set[int]]:
        """`operations_before` for a body; an iteration of a loop needs the one before it."""
        inner = _Search(*jaxprs.open_jaxpr(body.jaxpr), (), self._site(at))
        results = self._steps[at].results
        if body.results is None:
            wanted = set() if needed.isdisjoint(results) else set(inner.outputs)
        else:
            pairs = zip(inner.outputs, body.results, strict=True)
            wanted = {n for n, i in pairs if i is not None and results[i] in needed}
        while True:
            found, reached = inner.operations_before(wanted, site, finite)
            carried = [i - body.consts for i in reached if 0 <= i - body.consts < body.carry]
            more = set() if body.tests else {inner.outputs[i] for i in carried}
            if more <= wanted:
                return found, reached
            wanted |= more

    @functools.cached_property
    def _may_make_nan(self) -> list[bool]:
        """Whether each step may make a NaN or an infinity from finite values, or of a mask."""
        out: list[bool] = []
        infinite = {n for n, x in self._known.items() if _has_numbers(x) and np.isinf(x).any()}
        for step in self._steps:
            name, params = step.equation.primitive.name, step.equation.params
            masked = not infinite.isdisjoint(step.operands)
            infinite.update(step.results if masked and name not in _BOUNDED else ())
            half = name == "convert_element_type" and params["new_dtype"] == np.float16
            sums = masked and name in ("add", "sub", "mul")
            out.append(name in _NAN_MAKERS or half or sums or bool(self._length(step.equation)))
        return out

    def _length(self, equation: Equation) -> int:
        """The length of the axis of a gather that gives NaN for an index outside it; else 0."""
        params = equation.params
        if equation.primitive.name != "gather" or "FILL" not in str(params["mode"]):
            return 0
        axes, fill = params["dimension_numbers"].start_index_map, params["fill_value"]
        taken: Value = equation.invars[0].aval
        floats = jnp.issubdtype(taken.dtype, jnp.inexact)
        if len(axes) != 1 or not floats or not (fill is None or fill != fill):
            return 0
        return taken.shape[axes[0]]

    def _index(self, number: int) -> int:
        """The value from which a gather's indices were made, as the user's code gave it."""
        while (at := self._step_of_result.get(number)) is not None:
            step = self._steps[at]
            name = step.equation.primitive.name
            if name in _MOVEMENTS and len(step.operands) == 1:
                number = step.operands[0]
            elif name == "select_n" and (given := self._unwrapped(step)) is not None:
                number = given
            else:
                break
        return number

    def _unwrapped(self, step: _Step) -> int | None:
        """The index of `where(index < 0, index + length, index)`."""
        _, given, added = step.operands
        at = self._step_of_result.get(added)
        adds = at is not None and self._steps[at].equation.primitive.name == "add"
        return given if adds and at is not None and given in self._steps[at].operands else None

    def _site(self, at: int) -> str | None:
        calls = [self._outer]
        for step in self._steps[:at]:
            part, site = (step.equation.params.get(name) for name in ("part", "site"))
            if step.equation.primitive is not mark:
                continue
            if part == BEGIN or (part == INPUT and calls[-1] != site):
                calls.append(site)
            elif part == OUTPUT and site in calls[1:]:
                del calls[calls.index(site, 1) :]
        return None if self._steps[at].backward else calls[-1]

    def _enter(self, at: int, operands: list[Value]) -> Operation | None:
        """The operation inside a loop or a branch; None if the equation cannot be entered."""
        equation, site = self._steps[at].equation, self._site(at)
        kind = kind_of(equation)
        if kind == "cond":
            bodies = bodies_of(equation)
            chosen = int(np.clip(int(operands[0]), 0, len(bodies) - 1))
            body, consts = jaxprs.open_jaxpr(bodies[chosen].jaxpr)
            return _Search(body, consts, self.loops, site).run(operands[1:])
        if kind in ("scan", "while"):
            return self._enter_loop(kind, equation, operands, site)
        return None

    def _enter_loop(
        self, kind: str, equation: Equation, operands: list[Value], site: str | None
    ) -> Operation | None:
        *_, body = bodies_of(equation)
        search = _Search(*jaxprs.open_jaxpr(body.jaxpr), self.loops, site)
        for iteration, consts, carry, elements in _iterations(kind, equation, operands):
            search.loops = (*self.loops, (kind, iteration))
            values = [*consts, *carry, *elements]
            found, out = search.flags(values)
            if found[:, NAN].any() and (one := search.run(values, found)) is not None:
                return one
            carry[:] = out[: len(carry)]
        return None


def _iterations(
    kind: str, equation: Equation, operands: list[Value]
) -> Iterator[tuple[int, list[Value], list[Value], list[Value]]]:
    """A loop's iterations: number, constants, carry (renewed by the caller), elements."""
    *tests, body = bodies_of(equation)
    if kind == "scan":
        consts, carry, xs = eqn_params.scan_parts(equation.params, operands)
        order = range(body.times or 0)
        for i in reversed(order) if body.backwards else order:
            yield i, consts, carry, [x[i] for x in xs]
        return
    (test,) = tests
    goes_on = jax.jit(jaxprs.jaxpr_as_fun(*jaxprs.open_jaxpr(test.jaxpr)))
    first = test.consts + body.consts
    consts, carry = operands[test.consts : first], operands[first:]
    for i in range(_MAX_ITERATIONS):
        if not bool(goes_on(*operands[: test.consts], *carry)[0]):
            return
        yield i, consts, carry, []


def _has_numbers(x: Value) -> bool:
    return hasattr(x, "dtype") and is_number(x.dtype)


def _nan_and_inf(x: Value) -> jax.Array:
    if not _has_numbers(x) or not jnp.issubdtype(x.dtype, jnp.inexact) or not jnp.size(x):
        return jnp.zeros(2, bool)
    x = x if x.dtype.itemsize >= 2 else x.astype(jnp.float32)
    return jnp.stack([jnp.isnan(x).any(), jnp.isinf(x).any()])
