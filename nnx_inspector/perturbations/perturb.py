"""`perturb`: perturbs the modules called in a region.

The numbers of a perturbation enter a program where it is launched, so that other numbers compile
nothing. Invariant: outside its region a program is as it was, even if it was compiled inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import ShapedArray

from nnx_inspector._compat import jaxprs, jit
from nnx_inspector._compat.interpreter import interpret, opaque_primitive
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.dispatch import add_hooks
from nnx_inspector.hooks.hook import (
    PERTURBATION,
    TAP_OUTPUT,
    Context,
    Hook,
    open_hooks,
    replace_hooks,
)
from nnx_inspector.hooks.intercept import open_hook
from nnx_inspector.hooks.operations import kernels
from nnx_inspector.hooks.pytrees import with_arguments, with_leaves
from nnx_inspector.hooks.scope import Scope, scope_of
from nnx_inspector.hooks.sites import Only, Selection, module_sites
from nnx_inspector.perturbations.base import PartBase, Perturbation
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.perturbed import (
    Action,
    Rows,
    arrays_of,
    chosen_layer,
    perturb_at_marks,
)
from nnx_inspector.perturbations.places import (
    apply_with_sharding,
    data_of,
    misfit_error,
    no_array_error,
    require_perturbation,
)
from nnx_inspector.program.instrument import evaluate
from nnx_inspector.program.launched import LaunchedMarks
from nnx_inspector.program.marks import (
    INPUT,
    OUTPUT,
    launch_input,
    mark,
    mark_arguments,
    mark_tree,
)
from nnx_inspector.program.members import ensemble_of, member_scope
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.structure import is_observable, is_whole
from nnx_inspector.program.survey import Mark, call_numbers, survey
from nnx_inspector.resources import open_all
from nnx_inspector.typing import Function, Kwargs, Owner, Params, Primitive, PyTree, Treedef, Value


class _PerturbedShapes:
    """The shapes of the arrays that the programs of one hook perturb; they keep it alive."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()

    def fit(self, one: Perturbation) -> bool:
        """Whether all of them have the part that a perturbation chooses."""
        return not isinstance(one, PartBase) or not any(map(one.misfit, tuple(self.shapes)))


_shapes: weakref.WeakValueDictionary[Any, _PerturbedShapes] = weakref.WeakValueDictionary()
"""By the name of the numbers."""
_numbers: dict[Any, list[np.ndarray]] = {}
"""The numbers of each open region by their name."""


@dataclasses.dataclass(frozen=True)
class _HostNumber:
    """One of some numbers while a program runs that was compiled ahead of time: zeros once the
    region has ended.
    """

    token: Value
    number: int
    kind: jax.ShapeDtypeStruct

    def __call__(self) -> np.ndarray:
        found = _numbers.get(self.token)
        if found is None or found[self.number].shape != self.kind.shape:
            return np.zeros(self.kind.shape, self.kind.dtype)
        return found[self.number]


@dataclasses.dataclass(frozen=True)
class _RegionNumbers:
    """A perturbation whose numbers enter a program where it is launched. Equal ones share compiled
    programs.

    Attributes:
        token: the name of the numbers.
        fixed: for a region within a trace, the numbers themselves: the program runs after the
            region.
        seen: the shapes of what its programs perturb; empty within a trace.
    """

    token: Value
    treedef: Treedef
    avals: tuple[jax.ShapeDtypeStruct, ...]
    fixed: tuple[bytes, ...] | None
    seen: _PerturbedShapes = dataclasses.field(compare=False)

    def read(self) -> tuple[Any, Perturbation]:
        """Whether it is on, and the perturbation, with the numbers that a program reads."""
        found = self._fixed()
        if found is None and jit.is_tracing():
            found = [self._program_input(i, kind) for i, kind in enumerate(self.avals)]
        on, *leaves = _numbers[self.token] if found is None else found
        return on, jax.tree.unflatten(self.treedef, leaves)

    def _program_input(self, number: int, kind: Any) -> jax.Array:
        # the program keeps what it has seen alive as long as it may run
        place = self.token, number, self
        otherwise = _HostNumber(self.token, number, kind)
        kind = ShapedArray(kind.shape, kind.dtype)
        return launch_input.bind(place=place, kind=kind, otherwise=otherwise)

    def check(self, one: Perturbation, site: str, x: Value) -> None:
        """Raise if the perturbation does not fit an array, by the numbers that it has now."""
        found = self._fixed() or _numbers.get(self.token)
        known = one if found is None else jax.tree.unflatten(self.treedef, found[1:])
        why = misfit_error(known, site, x)
        if why is not None:
            raise why
        self.seen.shapes.add(tuple(x.shape))

    def _fixed(self) -> Sequence[Value] | None:
        if self.fixed is None:
            return None
        pairs = zip(self.fixed, self.avals, strict=True)
        return [np.frombuffer(data, a.dtype).reshape(a.shape) for data, a in pairs]


@dataclasses.dataclass(frozen=True)
class _Perturb:
    """The hook of `perturb` at a site, in all its calls."""

    numbers: _RegionNumbers

    def __call__(
        self, next_fun: Function, args: tuple[Value, ...], kwargs: Kwargs, context: Context
    ) -> PyTree:
        if context.type_name == kernels.KERNEL:
            raise ValueError(kernels.NO_PATTERN.format(site=context.site))
        on, one = self.numbers.read()
        site, call = context.site or type(context.module).__name__, context.call
        if one.at == OUTPUT:
            out = next_fun(*args, **kwargs)
            arrays = jax.tree.leaves(out, is_leaf=is_whole)
            return with_leaves(out, self._perturb_leaves(one, on, arrays, site, call), is_whole)
        arrays = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
        new = self._perturb_leaves(one, on, arrays, site, call)
        args, kwargs = with_arguments(args, kwargs, new, is_whole)
        return next_fun(*args, **kwargs)

    def _perturb_leaves(
        self, one: Perturbation, on: Value, leaves: list[Value], site: str, call: int
    ) -> list[Value]:
        """The leaves of what a module returns or receives, with the arrays perturbed."""
        if not any(map(is_observable, leaves)):
            raise no_array_error(site, one.at)
        new, number = list(leaves), 0
        for index, leaf in enumerate(leaves):
            if is_observable(leaf):
                x = jnp.asarray(leaf)
                self.numbers.check(one, site, x)
                act = functools.partial(_apply_named, name=f"{site}/{call}/{number}")
                changed = apply_with_sharding(act, x, one)
                # off only if a program outlives its region: then nobody gives it numbers
                new[index] = jnp.where(on, changed, x) if jit.is_tracer(on) else changed
                number += 1
        return new


def _apply_named(x: jax.Array, one: Perturbation, *, name: str) -> jax.Array:
    return one.apply_at(x, name)


# ----------------------------------------------------------------- one layer of a stack


@dataclasses.dataclass(frozen=True)
class _MarkSite:
    """The hook that marks a site one of whose layers is perturbed."""

    owner: Owner
    at: str

    def __call__(
        self, next_fun: Function, args: tuple[Value, ...], kwargs: Kwargs, context: Context
    ) -> PyTree:
        site = context.site or type(context.module).__name__
        if context.type_name == kernels.KERNEL:
            raise ValueError(kernels.NO_PATTERN.format(site=site))
        if opaque_primitive():
            why = f"it is called inside a {opaque_primitive()} equation, which cannot be entered"
            raise ValueError(f"{site!r} cannot be perturbed here: {why}.")
        how = {"owner": self.owner, "site": site, "part": self.at}
        if self.at == INPUT:
            self._require(site, (args, kwargs))
            args, kwargs = mark_arguments(args, kwargs, context, **how)
        with member_scope(context.module):
            out = next_fun(*args, **kwargs)
            if self.at == INPUT:
                return out
            self._require(site, out)
            return mark_tree(out, **how)

    def _require(self, site: str, tree: PyTree) -> None:
        if not any(map(is_observable, jax.tree.leaves(tree, is_leaf=is_whole))):
            raise no_array_error(site, self.at)


@dataclasses.dataclass(frozen=True)
class _PerturbLayer:
    """The hook of the outermost call, which perturbs one layer at the marks while the call runs.

    Only the loop over a stack knows which layer runs, so it has to be within the call.
    """

    numbers: _RegionNumbers
    rows: tuple[int, ...]
    selection: Selection

    def __call__(
        self, next_fun: Function, args: tuple[Value, ...], kwargs: Kwargs, context: Context
    ) -> PyTree:
        self._require_stack(context.module)
        with replace_hooks(()):
            on, one = self.numbers.read()
            ensemble = ensemble_of(context.module)
        calls: dict[int, int] = {}
        act = perturb_at_marks(calls, lambda _: [Action(one, self.rows, on)], self._check)

        def perturb(mark: Mark, values: list[Value], around: Rows) -> list[Value]:
            if ensemble is not None and not around:
                around = ((ensemble.number, ensemble.count),)
            if not around:
                raise self._no_loop_error(mark.site)
            return act(mark, values, around)

        plan, counts = Plan(summarise=False, perturb=perturb), dict[tuple[str, str], int]()

        def entered(
            primitive: Primitive, values: Sequence[Value], params: Params, bind: Any
        ) -> Value:
            """Run an equation of the call, with the marks that it holds perturbed."""
            if primitive is not mark and not any(True for _ in jaxprs.jaxprs_in(params)):
                return bind()
            operands = (jaxprs.aval_argument(jax.typeof(x)) for x in values)
            program = jax.make_jaxpr(lambda *xs: primitive.bind(*xs, **params))(*operands)
            found = survey(program, self.numbers.token)
            for site, why in found.unseen.items():
                raise ValueError(f"{site!r} cannot be perturbed here: {why}.")
            if not found.items:
                return bind()
            calls.update(call_numbers(found.marks, counts))
            with replace_hooks(()):
                return evaluate(found, values, plan=plan)[0]

        inside = tuple(hook for hook in open_hooks() if hook.wrap != self)
        with replace_hooks(inside), interpret(entered):
            return next_fun(*args, **kwargs)

    def _check(self, one: Perturbation, mark: Mark) -> None:
        for x in arrays_of(mark):
            self.numbers.check(one, mark.site, x)

    @property
    def _layer_text(self) -> str:
        return "".join(f"[{i}]" for i in self.rows)

    def _require_stack(self, module: object) -> None:
        """Raise if a list of modules is selected, which is never called itself."""
        sites = module_sites(module) if isinstance(module, nnx.Module) else ()
        for site in sites:
            if isinstance(site.module, nnx.List) and self.selection.matches_key(site.key):
                raise ValueError(
                    f"{self._layer_text} chooses a layer of a stacked module, and {site.key!r} is "
                    f"a list of modules. Name one of them by its path: '{site.key}/0'."
                )

    def _no_loop_error(self, site: str) -> InspectorError:
        return InspectorError(
            f"{site!r} is called here without a loop over layers around it, so {self._layer_text} "
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
            `StopGradient()`. Under vmap it acts on each example. All positions of a value change;
            `Mean(where=mask)` takes the mean of some.
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
    leaves, treedef = _data_and_treedef(perturbation)
    bare, rows = chosen_layer(only)
    selection = Selection(bare)
    scope = None if model is None else scope_of(model)
    avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves)
    if jit.is_tracing():
        fixed = tuple(leaf.tobytes() for leaf in leaves)
        numbers = _RegionNumbers("perturb", treedef, avals, fixed, _PerturbedShapes())
        with _open_region(numbers, perturbation.at, rows, selection, scope, model):
            yield
        return
    base = (selection, rows, scope, treedef, avals, threading.get_ident())
    depths: dict[Any, int] = _open.__dict__.setdefault("depths", {})
    depth = depths.get(base, 0)
    token, seen = _token_for(perturbation, ("perturb", *base, depth))
    depths[base] = depth + 1
    _numbers[token] = leaves
    block = LaunchedMarks(
        token, Plan(summarise=False), given=lambda place: _numbers[token][place[1]]
    )
    try:
        numbers = _RegionNumbers(token, treedef, avals, None, seen)
        with open_all(block), _open_region(numbers, perturbation.at, rows, selection, scope, model):
            yield
    finally:
        if depth:
            depths[base] = depth
        else:  # or the perturbation would be kept, and what its function closes over
            depths.pop(base, None)
        _numbers.pop(token, None)


def _token_for(one: Perturbation, name: tuple[object, ...]) -> tuple[Any, _PerturbedShapes]:
    """A name for numbers whose programs perturb only arrays that have the part chosen, and the
    shapes of these arrays.

    A program cannot raise. If the part is beyond an array of the programs of one name, the numbers
    get another one, so what is called in the region is traced again, and checked.
    """
    for number in itertools.count():
        seen = _shapes.setdefault((*name, number), _PerturbedShapes())
        if seen.fit(one):
            return (*name, number), seen
    raise AssertionError


@contextlib.contextmanager
def _open_region(
    numbers: _RegionNumbers,
    at: str,
    rows: tuple[int, ...],
    selection: Selection,
    scope: Scope | None,
    model: nnx.Module | None,
) -> Iterator[None]:
    """Open the hooks of a region."""
    if not rows:
        with open_hook(Hook(_Perturb(numbers), PERTURBATION, selection, scope), model):
            yield
        return
    outermost = Hook(_PerturbLayer(numbers, rows, selection), TAP_OUTPUT, Selection("**:*"), scope)
    mark = Hook(_MarkSite(numbers.token, at), PERTURBATION, selection, scope)
    with add_hooks(outermost), open_hook(mark, model):
        yield


def _data_and_treedef(perturbation: object) -> tuple[list[np.ndarray], Any]:
    """What programs get (True, then the numbers and arrays), and the tree structure."""
    require_perturbation(perturbation)
    if isinstance(perturbation, ParameterPerturbation):
        name = type(perturbation).__name__
        raise TypeError(
            f"{name} acts on parameters. Use nni.perturbed(f)({{path: {name}(...)}}, ...)."
        )
    return [np.ones((), np.bool_), *data_of(perturbation)], jax.tree.structure(perturbation)
