"""Marks in a user's function, and a small editor of programs that returns the sum at each of them.

`mark(name, x)` is the identity; its gradient is marked too, as "d name". Of a name that begins with
"raw" the value itself is returned. `knob(name)` is 1 until
the program is edited: then it is an input. The editor knows every primitive that holds jaxprs.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from nnx_inspector._compat import eqn_params, jaxprs
from nnx_inspector._compat.launching.presence import with_one_condition

MARK, LINK, KNOB = Primitive("test_mark"), Primitive("test_link"), Primitive("test_knob")
eager: list[tuple[str, float]] = []
"""What was marked on concrete arrays, outside every program."""


def mark(name: str, x: Any) -> Any:
    return MARK.bind(x, name=name, masked=False)


def knob(name: str) -> Any:
    return KNOB.bind(name=name)


def _now(x: Any, *mask: Any, name: str, masked: bool) -> Any:
    eager.append((name, float(_sum(())(x, *mask)[0])))
    return x


def _jvp(primals: Any, tangents: Any, *, name: str, masked: bool) -> Any:
    (x, *mask), t = primals, tangents[0]
    out = MARK.bind(x, *mask, name=name, masked=masked)
    if not isinstance(t, ad.Zero) and not name.startswith("d "):
        t = LINK.bind(t, *mask, name=name, masked=masked)
    return out, t


def _transpose(ct: Any, x: Any, *mask: Any, name: str, masked: bool) -> Any:
    if isinstance(ct, ad.Zero):
        return [ct, *(None for _ in mask)]
    out = MARK.bind(ct, *mask, name=f"d {name}", masked=masked)
    return [out, *(None for _ in mask)]


def _batch(primitive: Primitive) -> Any:
    def batch(args: Any, dims: Any, *, name: str, masked: bool) -> Any:
        if masked:  # every axis of one is one of both, and the newest is the first
            size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
            args = [batching.bdim_at_front(a, d, size) for a, d in zip(args, dims, strict=True)]
            dims = [0]
        return primitive.bind(*args, name=name, masked=masked), dims[0]

    return batch


MARK.def_impl(_now)
LINK.def_impl(lambda x, *_, **how: x)
for _one in (MARK, LINK):
    _one.def_abstract_eval(lambda x, *_, **how: x)
    mlir.register_lowering(_one, lambda ctx, x, *_, **how: [x])
    batching.primitive_batchers[_one] = _batch(_one)
ad.primitive_jvps[MARK] = _jvp
ad.primitive_transposes[MARK] = lambda ct, *xs, **how: [ct, *(None for _ in xs[1:])]
ad.primitive_jvps[LINK] = lambda xs, ts, **how: (
    LINK.bind(*xs, **how),
    ts[0] if isinstance(ts[0], ad.Zero) else LINK.bind(ts[0], *xs[1:], **how),
)
ad.primitive_transposes[LINK] = _transpose

KNOB.def_impl(lambda *, name: jnp.float32(1))
KNOB.def_abstract_eval(lambda *, name: ShapedArray((), np.dtype("float32")))
mlir.register_lowering(KNOB, mlir.lower_fun(lambda *, name: jnp.float32(1), multiple_results=False))
ad.primitive_jvps[KNOB] = lambda xs, ts, **how: ((y := KNOB.bind(**how)), jaxprs.zero_tangent(y))
batching.primitive_batchers[KNOB] = lambda xs, dims, **how: (KNOB.bind(**how), None)


@dataclasses.dataclass(frozen=True, eq=False)
class Edited:
    """A program whose last outputs are the sums at the marks, in this order."""

    program: Any
    knobs: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def inputs(self) -> int:
        return len(self.knobs)

    @property
    def outputs(self) -> int:
        return len(self.names)


def holds(jaxpr: Any) -> bool:
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    return any(
        e.primitive in (MARK, LINK, KNOB) or any(map(holds, jaxprs.sub_jaxprs(e)))
        for e in bare.eqns
    )


def edited(program: Any, wanted: Callable[[str], bool] = lambda name: True) -> Edited:
    body = _edited(program, _How(wanted))
    return Edited(body.jaxpr, tuple(body.knobs), tuple(body.names))


def with_presence(jaxpr: Any, present: Any) -> Any:
    """The marks in a jaxpr count where its first input, this variable, is true."""
    return _edited(jaxpr, _How(present=present)).jaxpr


@dataclasses.dataclass(frozen=True)
class _How:
    wanted: Callable[[str], bool] = lambda name: True
    present: Any = None  # the variable that says which examples are there
    again: bool = False
    axes: tuple[str, ...] = ()


@dataclasses.dataclass
class _Body:
    jaxpr: Any
    knobs: dict[str, Any]  # name -> variable; the first inputs
    names: list[str]
    sums: list[Any]  # variables; the last outputs


def _type(dtype: Any) -> Any:
    return ShapedArray((), np.dtype(dtype))


def _inserted(f: Callable[..., Any], atoms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Equations that compute `f` of some atoms, and what they return."""
    closed = jax.make_jaxpr(lambda *xs: list(f(*xs)))(
        *[jaxprs.aval_argument(a.aval) for a in atoms]
    )
    bare, consts = jaxprs.open_jaxpr(closed)
    assert not consts
    names = dict(zip(bare.invars, atoms, strict=True))
    read = lambda x: x if jaxprs.is_literal(x) else names.get(x, x)  # noqa: E731
    return (
        [e.replace(invars=[*map(read, e.invars)]) for e in bare.eqns],
        [*map(read, bare.outvars)],
    )


def _sum(axes: tuple[str, ...]) -> Callable[..., Any]:
    def measured(x: Any, *mask: Any) -> Any:
        if mask:
            x = jnp.where(mask[0].reshape(mask[0].shape + (1,) * (x.ndim - mask[0].ndim)), x, 0)
        total = jnp.sum(x).astype(jnp.float32)
        if axes:
            missing = tuple(a for a in axes if a not in jaxprs.varying_axes(total))
            total = jax.lax.pcast(total, missing, to="varying") if missing else total
            total = total[None]
        return [total]

    return measured


def _edited(jaxpr: Any, how: _How) -> _Body:
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    instead: dict[Any, Any] = {}
    new = _Body(None, {} if how.present is None else {"present": how.present}, [], [])
    equations: list[Any] = []
    for e in bare.eqns:
        operands = [x if jaxprs.is_literal(x) else instead.get(x, x) for x in e.invars]
        if e.primitive in (MARK, LINK):
            equations += _at_mark(new, e, operands, instead, how)
        elif e.primitive is KNOB and how.present is None:
            name = e.params["name"]
            instead[e.outvars[0]] = _knob(new, name, e.outvars[0].aval)
        elif any(map(holds, jaxprs.sub_jaxprs(e))):
            equations += _inside(new, e, operands, how)
        else:
            equations.append(e.replace(invars=operands))
    outputs = [x if jaxprs.is_literal(x) else instead.get(x, x) for x in bare.outvars]
    new.jaxpr = jaxprs.edit_jaxpr(
        jaxpr,
        inputs=[*new.knobs.values()],
        equations=equations,
        outputs=[*outputs, *new.sums],
    )
    return new


def _knob(new: _Body, name: str, aval: Any) -> Any:
    return new.knobs.setdefault(name, jaxprs.new_var(aval))


def _at_mark(new: _Body, e: Any, operands: Any, instead: Any, how: _How) -> list[Any]:
    x, *mask = operands
    if how.present is not None:
        present, before = how.present, list[Any]()
        if mask:
            with jaxprs.context_of(e):
                before, (present,) = _inserted(
                    lambda a, b: [jnp.logical_and(a, b)], [*mask, present]
                )
        return [*before, e.replace(invars=[x, present], params={**e.params, "masked": True})]
    name = e.params["name"]
    if e.primitive is MARK and not how.wanted(name):
        return [e.replace(invars=operands)]  # for somebody else
    instead[e.outvars[0]] = x
    again = how.again and not name.startswith("d ")
    if e.primitive is LINK or again:
        return []
    with jaxprs.context_of(e):
        measured = (lambda x: [x + 0]) if name.startswith("raw") else _sum(how.axes)
        added, (total,) = _inserted(measured, [x, *mask])
    new.names.append(name)
    new.sums.append(total)
    return added


def _inside(new: _Body, e: Any, operands: list[Any], how: _How) -> list[Any]:
    name, p = e.primitive.name, e.params
    if how.present is not None:
        how = dataclasses.replace(how, present=jaxprs.new_var(how.present.aval))
    if name in jaxprs.JITS:
        wider = lambda b, i, o: eqn_params.jit_with(p, b, i, outputs=o)  # noqa: E731
        return _with(new, e, operands, _edited(p["jaxpr"], how), wider)
    if name in jaxprs.REMAT:
        how = dataclasses.replace(how, again=how.again or eqn_params.is_recomputation(e))
        wider = lambda b, i, o: eqn_params.remat_with(p, b, inputs=i)  # noqa: E731
        return _with(new, e, operands, _edited(p["jaxpr"], how), wider)
    if name == "scan":
        stacked = lambda v: jaxprs.stacked_aval(v.aval, p["length"])  # noqa: E731
        wider = lambda b, i, o: eqn_params.scan_with(p, b, consts=i, outputs=o)  # noqa: E731
        return _with(new, e, operands, _edited(p["jaxpr"], how), wider, stacked)
    if name == "cond":
        return _cond(new, e, operands, how)
    if name == "while":
        return _while(new, e, operands, how)
    if name == "shard_map":
        return _shard_map(new, e, operands, how)
    if how.present is not None:  # it has a derivative that is still asked for
        return [e.replace(invars=operands)]
    (jaxpr,) = jaxprs.sub_jaxprs(e)
    body = _edited(jaxpr, how)
    primitive, params = jaxprs.closed_call(body.jaxpr)
    return _with(new, e.replace(primitive=primitive), operands, body, lambda b, i, o: params)


def _given(new: _Body, body: _Body) -> list[Any]:
    return [_knob(new, name, v.aval) for name, v in body.knobs.items()]


def _with(
    new: _Body,
    e: Any,
    operands: list[Any],
    body: _Body,
    params: Callable[[Any, int, int], Any],
    aval: Callable[[Any], Any] = lambda v: v.aval,
) -> list[Any]:
    sums = [jaxprs.new_var(aval(v)) for v in body.sums]
    new.names += body.names
    new.sums += sums
    return [
        e.replace(
            invars=[*_given(new, body), *operands],
            outvars=[*e.outvars, *sums],
            params=params(body.jaxpr, len(body.knobs), len(sums)),
        )
    ]


def _cond(new: _Body, e: Any, operands: list[Any], how: _How) -> list[Any]:
    bodies = [_edited(b, how) for b in e.params["branches"]]
    known = {name: v.aval for b in bodies for name, v in b.knobs.items()}
    names = [name for b in bodies for name in b.names]
    branches, start = [], 0
    for body in bodies:
        bare, _ = jaxprs.open_jaxpr(body.jaxpr)
        inputs = [body.knobs.get(name) or jaxprs.new_var(aval) for name, aval in known.items()]
        own = bare.outvars[: len(bare.outvars) - len(body.sums)]
        with jaxprs.context_of(e):
            zeros, sums = _inserted(lambda: [jnp.zeros(()) for _ in names], [])
        sums[start : start + len(body.sums)] = body.sums
        start += len(body.sums)
        changed = bare.replace(
            invars=[*inputs, *bare.invars[len(body.knobs) :]],
            eqns=[*bare.eqns, *zeros],
            outvars=[*own, *sums],
        )
        branches.append(changed if bare is body.jaxpr else body.jaxpr.replace(jaxpr=changed))
    sums = [jaxprs.new_var(_type(np.float32)) for _ in names]
    new.names += names
    new.sums += sums
    given = [_knob(new, name, aval) for name, aval in known.items()]
    return [
        e.replace(
            invars=[operands[0], *given, *operands[1:]],
            outvars=[*e.outvars, *sums],
            params={**e.params, "branches": tuple(branches)},
        )
    ]


def _while(new: _Body, e: Any, operands: list[Any], how: _How) -> list[Any]:
    body = _edited(e.params["body_jaxpr"], how)
    bare, _ = jaxprs.open_jaxpr(body.jaxpr)
    before = [jaxprs.new_var(v.aval) for v in body.sums]
    with jaxprs.context_of(e):
        adding, totals = [], []
        for a, b in zip(before, body.sums, strict=True):
            equations, (total,) = _inserted(lambda a, b: [a + b], [a, b])
            adding += equations
            totals.append(total)
        zeros, start = _inserted(lambda: [jnp.zeros(()) for _ in before], [])
    own = bare.outvars[: len(bare.outvars) - len(body.sums)]
    changed = bare.replace(
        invars=[*bare.invars, *before], eqns=[*bare.eqns, *adding], outvars=[*own, *totals]
    )
    changed = changed if bare is body.jaxpr else body.jaxpr.replace(jaxpr=changed)
    params = eqn_params.while_with(e.params, changed, consts=len(body.knobs), carry=len(before))
    tests = e.params["cond_nconsts"]
    sums = [jaxprs.new_var(v.aval) for v in body.sums]
    new.names += body.names
    new.sums += sums
    invars = [*operands[:tests], *_given(new, body), *operands[tests:], *start]
    with jaxprs.context_of(e):
        params, invars = with_one_condition(params, invars, more=len(before))
    return [*zeros, e.replace(invars=invars, outvars=[*e.outvars, *sums], params=params)]


def _shard_map(new: _Body, e: Any, operands: list[Any], how: _How) -> list[Any]:
    axes = eqn_params.manual_axes(e)
    with eqn_params.inside_shard_map(e.params):
        body = _edited(e.params["jaxpr"], dataclasses.replace(how, axes=axes))
    with jaxprs.context_of(e):
        params, after = eqn_params.shard_map_with(
            e.params, body.jaxpr, inputs=len(body.knobs), outputs=len(body.sums), axes=axes
        )
        rows = [*map(jaxprs.new_var, after)]
        adding, sums = _inserted(lambda *xs: [x.sum() for x in xs], rows)
    given = [_knob(new, n, jax.typeof(np.float32(0))) for n in body.knobs]
    new.names += body.names
    new.sums += sums
    one = e.replace(invars=[*given, *operands], outvars=[*e.outvars, *rows], params=params)
    return [one, *adding]


# -------------------------------------------------------------------- choosing


@dataclasses.dataclass(frozen=True)
class Launched:
    edited: Edited
    of: Watch

    def inputs(self) -> list[Any]:
        return [jax.device_put(np.float32(self.of.knobs.get(n, 1))) for n in self.edited.knobs]

    def take(self, arrays: list[Any], /) -> None:
        assert len(arrays) == self.edited.outputs
        self.of.threads.add(threading.get_ident())
        self.of.seen.extend(zip(self.edited.names, arrays, strict=True))


class Watch:
    """A chooser that takes every program with marks.

    Attributes:
        wanted: which marks it takes; the others stay.
        seen: the name and the sum of each mark, in the order of launches.
    """

    def __init__(self, wanted: Callable[[str], bool] = lambda name: True, **knobs: float):
        self.wanted, self.knobs = wanted, knobs
        self.on = True
        self.seen: list[tuple[str, Any]] = []
        self.names: list[str] = []
        self.errors: list[Exception] = []
        self.threads: set[int] = set()
        self.launched = 0
        self.edits: weakref.WeakKeyDictionary[Any, Edited | None] = weakref.WeakKeyDictionary()

    def prepare(self) -> None: ...

    def choose(
        self, program: Any, arrays: Any, /, *, alone: Any = None, call: Any = None
    ) -> Launched | None:
        if not self.on:
            return None
        if program not in self.edits:
            made = edited(program, self.wanted) if holds(program) else None
            self.edits[program] = made if made and (made.names or made.knobs) else None
        found = self.edits[program]
        self.launched += found is not None
        return None if found is None else Launched(found, self)

    def holds(self, jaxpr: Any, /) -> bool:
        return holds(jaxpr)

    def with_presence(self, jaxpr: Any, present: Any, /) -> Any:
        return with_presence(jaxpr, present)

    def escaped(self, name: str, /) -> None:
        self.names.append(name)

    def failed(self, error: Exception, /) -> None:
        self.errors.append(error)

    def sums(self) -> list[tuple[str, Any]]:
        """What was seen since the last call: the name and the sum of each mark."""
        found, self.seen = self.seen, []
        return [(name, np.asarray(x).tolist()) for name, x in found]
