"""`perturb`: perturbs the modules called in a region. Also defines the rows that programs read.

For an Inspector, a site's `Zero` or `Scale` is one row of two numbers, (mode, strength), read by
`apply`: it is switched and tuned without compiling again. Invariant: a row of zeros leaves the
value bitwise as it is. If a site has several, their factors multiply, and Zero wins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
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
from nnx_inspector._compat.native import APPLY, call, in_the_width, lower_for_a_cpu, serves_here
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.inside import kernels
from nnx_inspector.hooks.intercept import open_layer
from nnx_inspector.hooks.layers import PERTURBATION, Context, Layer
from nnx_inspector.hooks.pytrees import rebuilt, with_arguments
from nnx_inspector.hooks.scope import scope_of
from nnx_inspector.hooks.sites import Only, Selection
from nnx_inspector.perturbations.base import Perturbation, Refusal
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.slots import data_of
from nnx_inspector.perturbations.values import Scale, Zero
from nnx_inspector.program.host import boards as board
from nnx_inspector.program.marks import OUTPUT, describe, is_observable, is_whole

OFF, ZERO, SCALE = range(3)
ROW = 2
"""The number of entries of a row: mode and strength."""

_ARRAYS = re.compile(r"[\w<>]+\[[\d,]*\]")

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


def check_applies(perturbation: Live, site: str, output: str) -> None:
    """Raise a TypeError if a perturbation has no meaning for a site's output.

    Args:
        output: the description of its output (`"(float32[8], {mask: bool[4]})"`).
    """
    arrays = _ARRAYS.findall(output)
    if not arrays:
        raise nothing_to_perturb(site, OUTPUT)
    if isinstance(perturbation, Scale):
        for text in arrays:
            if not text.startswith(("float", "bfloat", "complex")):
                raise TypeError(
                    f"Scale needs floating-point values, but {site or '(root)'!r} returns {text}. "
                    f"Zero works on every dtype."
                )


@dataclasses.dataclass(frozen=True)
class _Perturb:
    """The hook of `perturb`. Equal hooks share compiled programs; the numbers are on the board."""

    token: Any
    treedef: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    fixed: tuple[bytes, ...] | None = None
    """For a region within a trace, the numbers themselves: the program runs after the region."""

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        if context.type_name == kernels.KERNEL:
            raise ValueError(kernels.NO_PATTERN.format(site=context.site))
        on, *leaves = self._numbers()
        one: Perturbation = jax.tree.unflatten(self.treedef, leaves)
        site, call = context.site or type(context.module).__name__, context.call
        if one.at == OUTPUT:
            out = next_fun(*args, **kwargs)
            arrays = jax.tree.leaves(out, is_leaf=is_whole)
            return rebuilt(out, _each(one, on, arrays, site, call), is_whole)
        arrays = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
        new = _each(one, on, arrays, site, call)
        args, kwargs = with_arguments(args, kwargs, new, is_whole)
        return next_fun(*args, **kwargs)

    def _numbers(self) -> Sequence[Any]:
        if self.fixed is None:
            return board.read(self.token, self.avals)
        pairs = zip(self.fixed, self.avals, strict=True)
        return [np.frombuffer(data, a.dtype).reshape(a.shape) for data, a in pairs]


def refusal(one: Any, site: str, x: Any) -> Refusal | None:
    """The error to raise if a perturbation does not fit an array of a site, or a parameter."""
    why = one.why_not(jax.ShapeDtypeStruct(x.shape, x.dtype))
    if why is None:
        return None
    return type(why)(f"{one.kind_name} at {site or '(root)'!r}, {describe(x)}: {why}.")


def misfit(why: Refusal | None) -> str:
    """A refusal as a clause; "" if there is none."""
    return str(why or "").removesuffix(".")


def nothing_to_perturb(site: str, part: str) -> TypeError:
    """The error for a module that returns or receives no array."""
    verb = "returns" if part == OUTPUT else "receives"
    return TypeError(f"{site or '(root)'!r} {verb} no array, so there is nothing to perturb.")


def _each(one: Perturbation, on: Any, leaves: list[Any], site: str, call: int) -> list[Any]:
    """The leaves of what a module returns or receives, with the arrays perturbed."""
    if not any(map(is_observable, leaves)):
        raise nothing_to_perturb(site, one.at)
    new, number = list(leaves), 0
    for index, leaf in enumerate(leaves):
        if is_observable(leaf):
            x = jnp.asarray(leaf)
            why = refusal(one, site, x)
            if why is not None:
                raise why
            changed = one.apply_at(x, f"{site}/{call}/{number}")
            # off only if a program outlives its region: a retired board reads as zeros
            new[index] = jnp.where(on, changed, x) if jit.is_tracer(on) else changed
            number += 1
    return new


_open: threading.local = threading.local()


@contextlib.contextmanager
def perturb(
    only: Only, perturbation: Perturbation, *, model: nnx.Module | None = None
) -> Iterator[None]:
    """Perturb what the selected modules return or receive, in every call of this thread.

    Functions jitted before the region are perturbed too. Numbers and arrays are read when a program
    runs: another `perturb` of the same sites and kind, with other numbers, compiles nothing. Within
    a traced function, the numbers become part of its program.

    Args:
        only: which sites; see `intercept_methods`.
        perturbation: any kind for values or gradients, such as `Scale(0.5)`, `Mask(units)` or
            `StopGradient()`. Under vmap it acts on each example.
        model: the module that paths are relative to; by default the outermost module called.

    Raises:
        TypeError: not a perturbation, or one that has no meaning for a site's values.
        ValueError: `only` matches no site, or an array does not fit.
        InspectorError: the perturbation holds a traced value; pass it as an argument of
            `nni.perturbed` instead.

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
    selection = Selection(only)
    scope = None if model is None else scope_of(model)
    avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves)
    if jit.is_tracing():
        fixed = tuple(leaf.tobytes() for leaf in leaves)
        hook = _Perturb("perturb", treedef, avals, fixed)
        with open_layer(Layer(hook, PERTURBATION, selection, scope), model):
            yield
        return
    base = (selection, scope, treedef, avals, threading.get_ident())
    depths: dict[Any, int] = _open.__dict__.setdefault("depths", {})
    depth = depths.get(base, 0)
    token = ("perturb", *base, depth)
    depths[base] = depth + 1
    try:
        board.publish(token, leaves)
        hook = _Perturb(token, treedef, avals)
        with open_layer(Layer(hook, PERTURBATION, selection, scope), model):
            yield
    finally:
        depths[base] = depth
        board.retire(token)  # waits for programs started in the region, which read the board


def _data_of(perturbation: Any) -> tuple[list[np.ndarray], Any]:
    """What goes on the board (True, then the numbers and arrays), and the tree structure."""
    require_known(perturbation)
    if isinstance(perturbation, ParameterPerturbation):
        name = type(perturbation).__name__
        raise TypeError(
            f"{name} acts on parameters. Use nni.perturbed(f)({{path: {name}(...)}}, ...)."
        )
    return [np.ones((), np.bool_), *data_of(perturbation)], jax.tree.structure(perturbation)
