"""`trace`: the calls of a forward pass, with shapes, parameters, FLOPs and dataflow, run nowhere.

The pass is traced abstractly with every call marked; the tree of calls, the operations between a
call's marks and the path of values from one module to the next are read from the jaxpr.
Invariant: nothing is computed, no array is allocated, and the model is not changed.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from nnx_inspector import _private
from nnx_inspector.capturing import MarkOutput, MarkUnattributed
from nnx_inspector.dispatch import TAP_INPUT, TAP_OUTPUT, Context, Layer
from nnx_inspector.flops import equation_flops
from nnx_inspector.harvest import INPUT, OUTPUT
from nnx_inspector.scope import Scope
from nnx_inspector.sites import CALL, ModuleSite, Only, Selection, module_sites, parse_key
from nnx_inspector.staging import as_function, staged
from nnx_inspector.taps import Structure, mark, mark_tree

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """One call of one site, as it stands in the traced program.

    Attributes:
        site: the site's key.
        type: the name of the module's class.
        depth: how many calls it is nested in.
        parent: the number of the call it is nested in, or None.
        inputs: dtypes and shapes that go in, in words; without the batch axis of a `vmap`.
        output: likewise of what comes out.
        shape, dtype: of the output where it is one array, else None.
        parameters: the number of elements of the module's `nnx.Param`s, children included.
        flops: operations of the call, children included; None inside a while loop.
        times: how often it takes place: the product of the scans around it; None in a while loop.
        stacked: how many layers the module holds, of which each call sees one; 0 for a plain one.
        source: `file:line` of the code that makes the call.
    """

    site: str
    type: str
    depth: int
    parent: int | None
    inputs: str
    output: str
    shape: tuple[int, ...] | None
    dtype: str | None
    parameters: int
    flops: float | None
    times: int | None
    stacked: int
    source: str


@dataclasses.dataclass(frozen=True)
class Edge:
    """A value that one module returns and another receives (perhaps changed on the way)."""

    producer: str
    consumer: str
    shape: str

    def __iter__(self) -> Any:
        return iter((self.producer, self.consumer, self.shape))


@dataclasses.dataclass(frozen=True)
class Trace:
    """What `trace` found. Shows itself as a tree.

    Attributes:
        calls: in the order in which they begin.
        edges: the dataflow between modules that are called by the same module.
        modules: every module of the model, called or not.
        unseen: sites that could not be seen, with the reason.
    """

    calls: tuple[TracedCall, ...]
    edges: tuple[Edge, ...]
    modules: tuple[ModuleSite, ...]
    unseen: dict[str, str]

    def to_frame(self) -> pd.DataFrame:
        """A tidy pandas frame, a row per call."""
        import pandas as pd

        columns = [f.name for f in dataclasses.fields(TracedCall)]
        return pd.DataFrame([dataclasses.asdict(c) for c in self.calls], columns=columns)

    def __repr__(self) -> str:
        rows = [("site", "type", "inputs", "output", "params", "flops")]
        for call in self.calls:
            segments, method = parse_key(call.site)
            last = (segments[-1] if segments else "(root)") + f":{method}" * (method != CALL)
            name = "  " * call.depth + last
            times = (
                "" if call.times == 1 else " (while)" if call.times is None else f" x{call.times}"
            )
            flops = "?" if call.flops is None else _short(call.flops)
            params = _short(call.parameters) if call.parameters else ""
            rows.append((name + times, call.type, call.inputs, call.output, params, flops))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += [f"{key} not seen: {why}" for key, why in self.unseen.items()]
        return "\n".join(lines)


def _short(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / limit * (10 if unit == 'k' else 1):.3g}{unit}"
    return f"{number:.0f}"


@dataclasses.dataclass(frozen=True)
class _MarkEntry:
    """Marks what a method receives and where in the user's code it is called, for one owner."""

    owner: Any

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        args, kwargs = mark_tree(
            (args, kwargs),
            owner=self.owner,
            site=context.site,
            part=INPUT,
            source=_caller(),
            parameter=_first_parameter(context.module),
        )
        return next_fun(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class NameFailingSite:
    """Adds a note to an exception that says in which call it was raised; the innermost only."""

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        try:
            return next_fun(*args, **kwargs)
        except Exception as error:
            prefix = "nnx_inspector: raised in the call of"
            if not any(n.startswith(prefix) for n in getattr(error, "__notes__", ())):
                error.add_note(
                    f"{prefix} {context.site or '(root)'!r} ({type(context.module).__name__}) with "
                    f"inputs {in_words(args, kwargs)}."
                )
            raise


def in_words(args: Any, kwargs: Any) -> str:
    """Arguments as dtypes and shapes: `"float32[8,10], train=bool"`."""
    from nnx_inspector.taps import describe, is_node

    def words(value: Any) -> str:
        leaves = jax.tree.leaves(value, is_leaf=is_node)
        text = ", ".join(describe(leaf) for leaf in leaves)
        return text if len(leaves) == 1 else f"({text})"

    return ", ".join([*(words(a) for a in args), *(f"{k}={words(v)}" for k, v in kwargs.items())])


def _first_parameter(module: nnx.Module) -> tuple[int, ...] | None:
    leaves = jax.tree.leaves(nnx.state(module, nnx.Param))
    return tuple(leaves[0].shape) if leaves and hasattr(leaves[0], "shape") else None


def _stacked(module: nnx.Module | None, inside: tuple[int, ...] | None) -> int:
    """How many layers a module holds, seen by what a call finds of its first parameter."""
    whole = None if module is None else _first_parameter(module)
    if whole is None or inside is None or len(whole) != len(inside) + 1:
        return 0
    for axis, size in enumerate(whole):
        if whole[:axis] + whole[axis + 1 :] == inside:
            return size
    return 0


def _caller() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        if not _private.frame_is_internal(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def trace(f: Any, /, *args: Any, only: Only = None, **kwargs: Any) -> Trace:
    """The calls that `f(*args, **kwargs)` makes, without running it.

    Args:
        f: a module, a bound method of one, or a function whose arguments hold modules.
        args: its arguments. Arrays may be `jax.ShapeDtypeStruct`s, and a model may have been
            built under `nnx.eval_shape`: nothing is computed.
        only: which sites; see `intercept_methods`. By default `__call__` of every module.
        kwargs: its keyword arguments.

    Raises:
        TypeError: no module among the arguments.
        Whatever the forward pass raises, unchanged, with a note that names the failing site.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nni.trace(model, jnp.ones((4, 2))).calls[0].output
        'float32[4,3]'
    """
    function = as_function(f, "trace")
    selection = Selection(only)

    def layers(scope: Scope, owner: Any) -> Sequence[Layer]:
        return [
            Layer(NameFailingSite(), TAP_OUTPUT, selection, scope),
            Layer(MarkOutput(owner), TAP_OUTPUT, selection, scope, MarkUnattributed(owner)),
            Layer(_MarkEntry(owner), TAP_INPUT, selection, scope),
        ]

    with staged(function, args, kwargs, layers) as stage:
        modules = [s for prefix, root in stage.roots.items() for s in module_sites(root, prefix)]
        by_key = {site.key: site.module for site in modules}
        walk = _Walk(by_key, stage.owner)
        walk.enter(stage.survey.jaxpr, [frozenset()] * len(stage.inputs), 1)
        unseen = dict(stage.survey.unseen)
        for name, count in stage.survey.unattributed.items():
            unseen[f"({name})"] = f"{count} calls of modules of this type are unattributed"
        calls = tuple(call.freeze() for call in walk.calls)
        return Trace(calls, tuple(dict.fromkeys(walk.edges)), tuple(modules), unseen)


def parameter_count(module: nnx.Module) -> int:
    """Elements of the module's `nnx.Param`s, children included, a shared one counted once."""
    leaves = jax.tree.leaves(nnx.state(module, nnx.Param))
    return sum(math.prod(leaf.shape) for leaf in leaves if hasattr(leaf, "shape"))


@dataclasses.dataclass
class _Open:
    """A call while its jaxpr is being walked."""

    site: str
    module: nnx.Module | None
    depth: int
    parent: int | None
    inputs: Structure
    times: int | None
    source: str
    parameter: tuple[int, ...] | None = None
    flops: float | None = 0.0
    output: Structure | None = None
    arrays: tuple[Any, ...] = ()

    def freeze(self) -> TracedCall:
        lone = len(self.arrays) == 1
        return TracedCall(
            site=self.site,
            type="" if self.module is None else type(self.module).__name__,
            depth=self.depth,
            parent=self.parent,
            inputs=str(self.inputs),
            output="" if self.output is None else str(self.output),
            shape=tuple(self.arrays[0].shape) if lone else None,
            dtype=str(self.arrays[0].dtype) if lone else None,
            parameters=0 if self.module is None else parameter_count(self.module),
            flops=self.flops,
            times=self.times,
            stacked=_stacked(self.module, self.parameter),
            source=self.source,
        )


_Sources = frozenset[str]


class _Walk:
    """Walks a jaxpr once: opens and closes calls at marks, adds up operations, follows values."""

    def __init__(self, modules: dict[str, nnx.Module], owner: Any):
        self.modules = modules
        self.owner = owner
        self.calls: list[_Open] = []
        self.open: list[int] = []
        self.edges: list[Edge] = []

    def enter(self, jaxpr: Any, sources: Sequence[_Sources], times: int | None) -> list[_Sources]:
        """Walk one jaxpr. `sources[i]` are the sites whose outputs its i-th input stems from."""
        bare, _ = _private.open_jaxpr(jaxpr)
        known: dict[Any, _Sources] = dict(zip(bare.invars, sources, strict=True))
        read = lambda v: frozenset() if _private.is_literal(v) else known.get(v, frozenset())  # noqa: E731
        for equation in bare.eqns:
            stems = [read(v) for v in equation.invars]
            if equation.primitive is mark and equation.params["owner"] == self.owner:
                out = self._mark(equation, stems, times)
            else:
                inner = list(_private.sub_jaxprs(equation))
                if inner:
                    out = self._control(equation, inner, stems, times)
                else:
                    self._count(equation_flops(equation), times)
                    out = [frozenset().union(*stems)] * len(equation.outvars)
            known.update(zip(equation.outvars, out, strict=True))
        return [read(v) for v in bare.outvars]

    def _mark(self, equation: Any, stems: list[_Sources], times: int | None) -> list[_Sources]:
        params = equation.params
        site, structure = params["site"], params["structure"]
        if params["part"] == OUTPUT:
            while self.open:
                call = self.calls[self.open.pop()]
                if call.site == site:
                    call.output = structure
                    call.arrays = tuple(v.aval for v in equation.invars)
                    break
            return [frozenset({site})] * len(stems)
        for stem, variable in zip(stems, equation.invars, strict=True):
            shape = f"{variable.aval.dtype}[{','.join(map(str, variable.aval.shape))}]"
            self.edges += [Edge(producer, site, shape) for producer in sorted(stem)]
        self.calls.append(
            _Open(
                site=site,
                module=self.modules.get(site.rpartition(":")[0] if ":" in site else site),
                depth=len(self.open),
                parent=self.open[-1] if self.open else None,
                inputs=structure,
                times=times,
                source=params.get("source", ""),
                parameter=params.get("parameter"),
            )
        )
        self.open.append(len(self.calls) - 1)
        return [frozenset()] * len(stems)  # inside, they are the module's own input

    def _count(self, flops: float, times: int | None) -> None:
        for number in self.open:
            call = self.calls[number]
            if call.flops is not None:
                call.flops = None if times is None else call.flops + flops * times

    def _control(
        self, equation: Any, inner: list[Any], stems: list[_Sources], times: int | None
    ) -> list[_Sources]:
        name = equation.primitive.name
        if name == "scan":
            length = equation.params["length"]
            within = None if times is None else times * length
            consts, carry, _ = _private.scan_parts(equation, stems)
            out = self._loop(inner[0], stems, len(consts), len(carry), within)
            return out
        if name == "while":
            test = equation.params["cond_nconsts"]
            body = equation.params["body_nconsts"]
            rest = stems[test:]
            return self._loop(equation.params["body_jaxpr"], rest, body, len(rest) - body, None)
        if name == "cond":
            branches = [self.enter(branch, stems[1:], times) for branch in inner]
            return [frozenset().union(*column) for column in zip(*branches, strict=True)]
        bare, _ = _private.open_jaxpr(inner[0])
        if len(bare.invars) == len(stems):
            out = self.enter(inner[0], stems, times)
            if len(out) == len(equation.outvars):
                return out
        return [frozenset().union(*stems)] * len(equation.outvars)

    def _loop(
        self, body: Any, stems: list[_Sources], consts: int, carry: int, times: int | None
    ) -> list[_Sources]:
        # what one iteration hands to the next is known after the first: a dry walk, then the real
        dry = _Walk(self.modules, self.owner)
        dry.open = list(self.open)
        dry.calls = [dataclasses.replace(call) for call in self.calls]
        first = dry.enter(body, stems, times)
        around = [s | f for s, f in zip(stems[consts : consts + carry], first[:carry], strict=True)]
        out = self.enter(body, [*stems[:consts], *around, *stems[consts + carry :]], times)
        return [a | b for a, b in zip(out[:carry], around, strict=True)] + list(out[carry:])
