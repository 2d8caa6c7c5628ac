"""`perturb`: perturbs the modules called in a region. Also defines the rows that programs read.

For an Inspector, a site's `Zero` or `Scale` is one row of two numbers, (mode, strength), read by
`apply`: it is switched and tuned without compiling again. Invariant: a row of zeros leaves the
value bitwise as it is. If a site has several, their factors multiply, and Zero wins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.interpreter import kept_apart
from nnx_inspector._compat.native import APPLY, call, in_the_width, lower_for_a_cpu, serves_here
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.dispatch import hooked
from nnx_inspector.hooks.inside import kernels
from nnx_inspector.hooks.intercept import open_layer
from nnx_inspector.hooks.layers import (
    PERTURBATION,
    TAP_OUTPUT,
    Context,
    Layer,
    open_layers,
    opened,
)
from nnx_inspector.hooks.pytrees import rebuilt, with_arguments
from nnx_inspector.hooks.scope import Scope, scope_of
from nnx_inspector.hooks.sites import Only, Selection, module_sites
from nnx_inspector.perturbations.base import OfPart, Perturbation, is_random
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.perturbed import Act, Rows, arrays_of, at_marks, chosen_layer
from nnx_inspector.perturbations.slots import data_of, nothing_to_perturb, placed_alike, refusal
from nnx_inspector.perturbations.values import Scale, Zero
from nnx_inspector.program.eager import EagerPass
from nnx_inspector.program.host import boards as board
from nnx_inspector.program.marks import INPUT, OUTPUT, mark_arguments, mark_tree
from nnx_inspector.program.members import ensemble_of, within
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.structure import is_observable, is_whole
from nnx_inspector.program.survey import Marked

OFF, ZERO, SCALE = range(3)
ROW = 2
"""The number of entries of a row: mode and strength."""

Live = Zero | Scale
"""The kinds that fit a row; on outputs, every program has a row for every site."""


Known = Perturbation | ParameterPerturbation
"""Any kind, its numbers known on the host."""


def require_known(value: Any) -> Known:
    """Return `value`; raise if it is not a perturbation with known numbers."""
    if isinstance(value, type) and issubclass(value, Known):
        one = value.clicked(None, OUTPUT).python(short=True) if value.form.does else ""
        raise TypeError(f"Pass an instance: {one or f'nni.{value.__name__}(...)'}.")
    if not isinstance(value, Known):
        raise TypeError(
            f"A perturbation must be nni.Zero(), nni.Scale(factor) or another kind, "
            f"got {type(value).__name__}."
        )
    if any(map(jit.is_tracer, jax.tree.leaves(value))):
        raise InspectorError(
            f"{type(value).__name__} got a traced value, but its numbers are read on the host. "
            f"Use it outside jit (other numbers compile nothing), or pass the perturbation as an "
            f"argument: nni.perturbed(f)(perturbations, ...)."
        )
    return value


def is_live(value: Any) -> TypeGuard[Live]:
    """Whether a value is a perturbation that fits a row."""
    if isinstance(value, Scale):
        return value.at == OUTPUT and isinstance(value.factor, float)
    return isinstance(value, Zero) and value.at == OUTPUT


def row_of(perturbation: Live) -> tuple[float, float]:
    if isinstance(perturbation, Zero):
        return (ZERO, 0.0)
    return (SCALE, float(perturbation.factor))


def rows_of(keys: Sequence[str], rows: Mapping[str, tuple[float, float]]) -> np.ndarray:
    """The rows of some sites as programs read them, float32[sites, ROW]; OFF for sites without."""
    found = np.zeros((len(keys), ROW), np.float32)
    for index, key in enumerate(keys):
        found[index] = rows.get(key, (OFF, 0.0))
    return found


def combine(perturbations: Iterable[Live]) -> tuple[float, float]:
    """One row for several perturbations of one site: Zero wins, factors multiply."""
    mode, strength = float(OFF), 1.0
    for one in perturbations:
        kind, factor = row_of(one)
        if kind == ZERO or mode == ZERO:
            mode, strength = float(ZERO), 0.0
        else:
            mode, strength = float(SCALE), strength * factor
    return (mode, strength) if mode != OFF else (float(OFF), 0.0)


@ours()
def apply(x: Any, rows: Any, index: int) -> Any:
    """`x` perturbed by one of some rows, float32[..., 2]; keeps shape and dtype.

    A scaled integer is rounded towards zero, like a cast. The rows may be traced.
    """
    if not is_observable(x):
        return x
    x = jnp.asarray(x)
    if x.dtype == np.float32 and serves_here():
        return _apply.bind(x, jnp.asarray(rows), index=index)
    return _applied(x, rows, index=index)


def _applied(x: jax.Array, rows: jax.Array, *, index: int) -> jax.Array:
    mode, strength = rows[index]
    if jnp.issubdtype(x.dtype, jnp.inexact):
        scaled = x * strength.astype(x.dtype)
    else:
        # jax promotes no integers of four bits or fewer
        scaled = (x.astype(strength.dtype) * strength).astype(x.dtype)
    # The outer choice is between two arrays, so XLA computes the result once. A choice between an
    # array and a number would be repeated, and compiled, in every kernel that reads it.
    return jnp.where(mode == OFF, x, jnp.where(mode == ZERO, jnp.zeros_like(x), scaled))


# On a CPU it is a function in C, which changes the array where it lies, or leaves it alone.
_apply = Primitive("nnx_inspector_apply")
_apply.def_impl(jax.jit(_applied, static_argnames="index"))
_apply.def_abstract_eval(lambda x, rows, *, index: x)
mlir.register_lowering(_apply, mlir.lower_fun(in_the_width(_applied), multiple_results=False))
lower_for_a_cpu(
    _apply, _applied, lambda x, rows, **how: call(APPLY, [x], x, rows, in_place=True, **how)[0]
)


def _apply_jvp(primals: Any, tangents: Any, *, index: int) -> Any:
    out, (x, rows) = _apply.bind(*primals, index=index), tangents
    if type(rows) is not ad.Zero:  # differentiated by a strength
        every = tuple(map(ad.instantiate_zeros, tangents))
        return jax.jvp(functools.partial(_applied, index=index), primals, every)
    return out, x if type(x) is ad.Zero else _apply.bind(x, primals[1], index=index)


def _apply_transpose(ct: Any, x: Any, rows: Any, *, index: int) -> Any:
    return ct if type(ct) is ad.Zero else _apply.bind(ct, rows, index=index), None


def _apply_batch(args: Any, dims: Any, *, index: int) -> Any:
    if dims[1] is None:
        return _apply.bind(*args, index=index), dims[0]
    return jax.vmap(functools.partial(_applied, index=index), in_axes=dims)(*args), 0


ad.primitive_jvps[_apply] = _apply_jvp
ad.primitive_transposes[_apply] = _apply_transpose
batching.primitive_batchers[_apply] = _apply_batch


class _Met:
    """The shapes of the arrays that the programs of one hook perturb; they keep it alive."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()

    def fit(self, one: Perturbation) -> bool:
        """Whether all of them have the part that a perturbation chooses."""
        return not isinstance(one, OfPart) or not any(map(one.misfit, tuple(self.shapes)))


_met: weakref.WeakValueDictionary[Any, _Met] = weakref.WeakValueDictionary()
"""By the name of a board."""


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """A perturbation whose numbers are on a board. Equal ones share compiled programs.

    Attributes:
        fixed: for a region within a trace, the numbers themselves: the program runs after the
            region.
        met: what its programs perturb; empty within a trace.
    """

    token: Any
    treedef: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    fixed: tuple[bytes, ...] | None
    met: _Met = dataclasses.field(compare=False)

    def read(self) -> tuple[Any, Perturbation]:
        """Whether it is on, and the perturbation, with the numbers that a program reads."""
        found = self._fixed()
        on, *leaves = board.read(self.token, self.avals, keep=self.met) if found is None else found
        return on, jax.tree.unflatten(self.treedef, leaves)

    def check(self, one: Perturbation, site: str, x: Any) -> None:
        """Raise if the perturbation does not fit an array, by the numbers that it has now."""
        found = self._fixed() or board.published(self.token)
        known = one if found is None else jax.tree.unflatten(self.treedef, found[1:])
        why = refusal(known, site, x)
        if why is not None:
            raise why
        self.met.shapes.add(tuple(x.shape))

    def _fixed(self) -> Sequence[Any] | None:
        if self.fixed is None:
            return None
        pairs = zip(self.fixed, self.avals, strict=True)
        return [np.frombuffer(data, a.dtype).reshape(a.shape) for data, a in pairs]


@dataclasses.dataclass(frozen=True)
class _Perturb:
    """The hook of `perturb` at a site, in all its calls."""

    numbers: _Numbers

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        if context.type_name == kernels.KERNEL:
            raise ValueError(kernels.NO_PATTERN.format(site=context.site))
        on, one = self.numbers.read()
        site, call = context.site or type(context.module).__name__, context.call
        if one.at == OUTPUT:
            out = next_fun(*args, **kwargs)
            arrays = jax.tree.leaves(out, is_leaf=is_whole)
            return rebuilt(out, self._each(one, on, arrays, site, call), is_whole)
        arrays = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
        new = self._each(one, on, arrays, site, call)
        args, kwargs = with_arguments(args, kwargs, new, is_whole)
        return next_fun(*args, **kwargs)

    def _each(
        self, one: Perturbation, on: Any, leaves: list[Any], site: str, call: int
    ) -> list[Any]:
        """The leaves of what a module returns or receives, with the arrays perturbed."""
        if not any(map(is_observable, leaves)):
            raise nothing_to_perturb(site, one.at)
        new, number = list(leaves), 0
        for index, leaf in enumerate(leaves):
            if is_observable(leaf):
                x = jnp.asarray(leaf)
                self.numbers.check(one, site, x)
                act = functools.partial(_acted, name=f"{site}/{call}/{number}")
                changed = placed_alike(act, x, one)
                # off only if a program outlives its region: a retired board reads as zeros
                new[index] = jnp.where(on, changed, x) if jit.is_tracer(on) else changed
                number += 1
        return new


def _acted(x: jax.Array, one: Perturbation, *, name: str) -> jax.Array:
    return one.apply_at(x, name)


# ----------------------------------------------------------------- one layer of a stack


@dataclasses.dataclass(frozen=True)
class _Mark:
    """The hook that marks a site one of whose layers is perturbed."""

    owner: Any
    at: str

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        site = context.site or type(context.module).__name__
        if context.type_name == kernels.KERNEL:
            raise ValueError(kernels.NO_PATTERN.format(site=site))
        if kept_apart():
            why = f"it is called inside a {kept_apart()} equation, which cannot be entered"
            raise ValueError(f"{site!r} cannot be perturbed here: {why}.")
        how = {"owner": self.owner, "site": site, "part": self.at}
        if self.at == INPUT:
            self._require(site, (args, kwargs))
            args, kwargs = mark_arguments(args, kwargs, context, **how)
        with within(context.module):
            out = next_fun(*args, **kwargs)
            if self.at == INPUT:
                return out
            self._require(site, out)
            return mark_tree(out, **how)

    def _require(self, site: str, tree: Any) -> None:
        if not any(map(is_observable, jax.tree.leaves(tree, is_leaf=is_whole))):
            raise nothing_to_perturb(site, self.at)


@dataclasses.dataclass(frozen=True)
class _InLayer:
    """The hook of the outermost call, which perturbs one layer at the marks while the call runs.

    Only the loop over a stack knows which layer runs, so it has to be within the call.
    """

    numbers: _Numbers
    rows: tuple[int, ...]
    selection: Selection

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        self._require_stack(context.module)
        with opened(()):  # see `EagerPass`
            on, one = self.numbers.read()
            ensemble = ensemble_of(context.module)
        calls: dict[int, int] = {}
        act = at_marks(calls, lambda _: [Act(one, self.rows, on)], self._check)

        def perturb(mark: Marked, values: list[Any], around: Rows) -> list[Any]:
            if ensemble is not None and not around:
                around = ((ensemble.number, ensemble.count),)
            if not around:
                raise self._outside(mark.site)
            return act(mark, values, around)

        plan = Plan(
            summarise=False,
            perturb=perturb,
            numbered=is_random(one),
            apart=ensemble is not None,
        )
        one_pass = EagerPass(self.numbers.token, plan, calls=calls)
        inside = tuple(layer for layer in open_layers() if layer.wrap != self)
        with opened(inside):
            out = one_pass.run(lambda: next_fun(*args, **kwargs))
        for site, why in one_pass.survey.unseen.items():
            raise ValueError(f"{site!r} cannot be perturbed here: {why}.")
        return out

    def _check(self, one: Perturbation, mark: Marked) -> None:
        for x in arrays_of(mark):
            self.numbers.check(one, mark.site, x)

    @property
    def _chosen(self) -> str:
        return "".join(f"[{i}]" for i in self.rows)

    def _require_stack(self, module: Any) -> None:
        """Raise if a list of modules is selected, which is never called itself."""
        sites = module_sites(module) if isinstance(module, nnx.Module) else ()
        for site in sites:
            if isinstance(site.module, nnx.List) and self.selection.matches_key(site.key):
                raise ValueError(
                    f"{self._chosen} chooses a layer of a stacked module, and {site.key!r} is a "
                    f"list of modules. Name one of them by its path: '{site.key}/0'."
                )

    def _outside(self, site: str) -> InspectorError:
        return InspectorError(
            f"{site!r} is called here without a loop over layers around it, so {self._chosen} "
            f"chooses none of its calls. If it is a module of a list, name it by its path. If the "
            f"loop is in your own function and not in the model's call, use nni.perturbed(f)"
            f"({{key: perturbation}}, ...), or insp.perturb."
        )


_open: threading.local = threading.local()


@contextlib.contextmanager
def perturb(
    only: Only, perturbation: Perturbation, *, model: nnx.Module | None = None
) -> Iterator[None]:
    """Perturb what the selected modules return or receive, in every call of this thread.

    Functions jitted before the region are perturbed too. Numbers and arrays are read when a program
    runs: another `perturb` of the same sites and kind, with other numbers, compiles nothing. Within
    a traced function, the numbers become part of its program.

    It reaches every call that this thread makes inside, and no other: with `model=` those of that
    model, otherwise those of any model that has such a site. A submodule that two models share is
    perturbed in both, unless `model=` names one. Tasks of asyncio are one thread: what another task
    calls while this one waits inside is perturbed too.

    Args:
        only: which sites; see `intercept_methods`. `"layers[3]"` chooses one layer of a stacked
            module, if the loop over the layers is within the call of the model.
        perturbation: any kind for values or gradients, such as `Scale(0.5)`, `Mask(units)` or
            `StopGradient()`. Under vmap it acts on each example.
        model: the module that paths are relative to; by default the outermost module called.

    Raises:
        TypeError: not a perturbation, or one that has no meaning for a site's values.
        ValueError: `only` matches no site, an array does not fit, or a site has no such unit,
            example or layer.
        InspectorError: the perturbation holds a traced value, which is an argument of
            `nni.perturbed` instead; or a layer is chosen where none can be told apart.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        >>> with nni.perturb("", nni.Zero()):
        ...     y = model(jnp.ones((1, 2)))
        >>> float(abs(y).sum())
        0.0
    """
    leaves, treedef = _data_of(perturbation)
    bare, rows = chosen_layer(only)
    selection = Selection(bare)
    scope = None if model is None else scope_of(model)
    avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves)
    if jit.is_tracing():
        fixed = tuple(leaf.tobytes() for leaf in leaves)
        numbers = _Numbers("perturb", treedef, avals, fixed, _Met())
        with _opened(numbers, perturbation.at, rows, selection, scope, model):
            yield
        return
    base = (selection, rows, scope, treedef, avals, threading.get_ident())
    depths: dict[Any, int] = _open.__dict__.setdefault("depths", {})
    depth = depths.get(base, 0)
    token, met = _board_for(perturbation, ("perturb", *base, depth))
    depths[base] = depth + 1
    try:
        board.publish(token, leaves)
        numbers = _Numbers(token, treedef, avals, None, met)
        with _opened(numbers, perturbation.at, rows, selection, scope, model):
            yield
    finally:
        if depth:
            depths[base] = depth
        else:  # or the perturbation would be kept, and what its function closes over
            depths.pop(base, None)
        board.retire(token)  # waits for programs started in the region, which read the board


def _board_for(one: Perturbation, name: tuple[Any, ...]) -> tuple[Any, _Met]:
    """A board whose programs perturb only arrays that have the part chosen, and what they met.

    A program cannot raise. If the part is beyond an array of the programs of one board, those of
    another read it, so what is called in the region is traced again, and checked.
    """
    for number in itertools.count():
        met = _met.setdefault((*name, number), _Met())
        if met.fit(one):
            return (*name, number), met
    raise AssertionError


@contextlib.contextmanager
def _opened(
    numbers: _Numbers,
    at: str,
    rows: tuple[int, ...],
    selection: Selection,
    scope: Scope | None,
    model: nnx.Module | None,
) -> Iterator[None]:
    """Open the layers of a region."""
    if not rows:
        with open_layer(Layer(_Perturb(numbers), PERTURBATION, selection, scope), model):
            yield
        return
    outermost = Layer(_InLayer(numbers, rows, selection), TAP_OUTPUT, Selection("**:*"), scope)
    mark = Layer(_Mark(numbers.token, at), PERTURBATION, selection, scope)
    with hooked(outermost), open_layer(mark, model):
        yield


def _data_of(perturbation: Any) -> tuple[list[np.ndarray], Any]:
    """What goes on the board (True, then the numbers and arrays), and the tree structure."""
    require_known(perturbation)
    if isinstance(perturbation, ParameterPerturbation):
        name = type(perturbation).__name__
        raise TypeError(
            f"{name} acts on parameters. Use nni.perturbed(f)({{path: {name}(...)}}, ...)."
        )
    return [np.ones((), np.bool_), *data_of(perturbation)], jax.tree.structure(perturbation)
