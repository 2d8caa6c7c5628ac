"""`perturb`: perturbs the modules that are called in a region, and the rows that programs read.

For an Inspector a site's perturbation is one row of two numbers, (mode, strength), for `apply`: a
program with a place for a row can be switched and tuned without being compiled again. Invariant: a
row of zeros leaves the value bitwise as it is. Several on one site: strengths multiply, Zero wins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import ours
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.intercept import open_layer
from nnx_inspector.hooks.layers import PERTURBATION, Context, Layer
from nnx_inspector.hooks.pytrees import rebuilt, with_arguments
from nnx_inspector.hooks.scope import scope_of
from nnx_inspector.hooks.sites import Only, Selection
from nnx_inspector.perturbations.base import Perturbation, Refusal
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.slots import data_of
from nnx_inspector.perturbations.values import Scale, Zero
from nnx_inspector.program import host as board
from nnx_inspector.program.marks import OUTPUT, describe, is_observable, is_whole

OFF, ZERO, SCALE = range(3)
ROW = 2
"""Numbers in a row: mode and strength."""

_ARRAYS = re.compile(r"[\w<>]+\[[\d,]*\]")

Live = Zero | Scale
"""Where it is on outputs, what every program has room for at every site: a row."""


Known = Perturbation | ParameterPerturbation
"""Any kind, with numbers that are known on the host."""


def require_known(value: Any) -> Known:
    """`value` itself, or an error that says what a perturbation is."""
    if isinstance(value, type) and issubclass(value, Known):
        one = value.clicked(None, OUTPUT).python(short=True) if value.form.does else ""
        raise TypeError(f"Pass an instance: {one or f'nni.{value.__name__}(...)'}.")
    if not isinstance(value, Known):
        raise TypeError(
            f"A perturbation is nni.Zero(), nni.Scale(factor) or another of the kinds, "
            f"got {type(value).__name__}."
        )
    if any(map(jit.is_tracer, jax.tree.leaves(value))):
        raise InspectorError(
            f"{type(value).__name__} got a traced value, and its numbers are read from the host. "
            f"Use it outside of jit (other numbers compile nothing), or pass the perturbation as "
            f"an argument: nni.perturbed(f)(perturbations, ...)."
        )
    return value


def is_live(value: Any) -> TypeGuard[Live]:
    """Whether it is a row: every program has room for it at every site."""
    if isinstance(value, Scale):
        return value.at == OUTPUT and isinstance(value.factor, float)
    return isinstance(value, Zero) and value.at == OUTPUT


def row_of(perturbation: Live) -> tuple[float, float]:
    """(mode, strength)."""
    if isinstance(perturbation, Zero):
        return (ZERO, 0.0)
    return (SCALE, float(perturbation.factor))


def rows_of(keys: Sequence[str], rows: Mapping[str, tuple[float, float]]) -> np.ndarray:
    """The rows of some sites, float32[sites, ROW], as programs read them; OFF where none is."""
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
def apply(x: Any, row: Any) -> Any:
    """`x` perturbed by a row, float32[2]. Keeps shape and dtype; `row` may be traced.

    A scaled integer is rounded towards zero, as by a cast.
    """
    if not is_observable(x):
        return x
    mode, strength = row[0], row[1]
    if jnp.issubdtype(x.dtype, jnp.inexact):
        scaled = x * strength.astype(x.dtype)
    else:
        scaled = (x * strength).astype(x.dtype)
    # The outer choice is between two arrays: XLA then makes the result once, where it would repeat
    # a choice between an array and a number in every kernel that reads it, and compile each anew.
    return jnp.where(mode == OFF, x, jnp.where(mode == ZERO, jnp.zeros_like(x), scaled))


def check_applies(perturbation: Live, site: str, output: str) -> None:
    """Raise a TypeError where a perturbation has no meaning for a site's output.

    Args:
        perturbation: what is to be done.
        site: the site's key, for the text.
        output: what it returns, in words (`"(float32[8], {mask: bool[4]})"`).
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
    """The hook of `perturb`: equal hooks share compiled programs, the numbers are on the board."""

    token: Any
    treedef: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    fixed: tuple[bytes, ...] | None = None
    """In a region within a trace the numbers themselves: the program runs when it is over."""

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
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


def refusal(one: Any, site: str, x: Any, why: Refusal) -> Refusal:
    """The error for what `why_not` says of an array of a site, or of a parameter."""
    return type(why)(f"{type(one).__name__} at {site or '(root)'!r}, {describe(x)}: {why}.")


def nothing_to_perturb(site: str, part: str) -> TypeError:
    """The error for a module that returns (or receives) no array."""
    verb = "returns" if part == OUTPUT else "receives"
    return TypeError(f"{site or '(root)'!r} {verb} no array, so there is nothing to perturb.")


def _each(one: Perturbation, on: Any, leaves: list[Any], site: str, call: int) -> list[Any]:
    """The leaves of what a module returns or receives, its arrays perturbed."""
    if not any(map(is_observable, leaves)):
        raise nothing_to_perturb(site, one.at)
    new, number = list(leaves), 0
    for index, leaf in enumerate(leaves):
        if is_observable(leaf):
            x = jnp.asarray(leaf)
            why = one.why_not(jax.ShapeDtypeStruct(x.shape, x.dtype))
            if why is not None:
                raise refusal(one, site, x, why)
            changed = one.apply_at(x, f"{site}/{call}/{number}")
            # off only where a program outlives its region: a board that is gone reads zeros
            new[index] = jnp.where(on, changed, x) if jit.is_tracer(on) else changed
            number += 1
    return new


_open: threading.local = threading.local()


@contextlib.contextmanager
def perturb(
    only: Only, perturbation: Perturbation, *, model: nnx.Module | None = None
) -> Iterator[None]:
    """Perturb what the selected modules return (or receive), in every call of this thread.

    Holds for functions that were jitted before. Numbers and arrays are read when the program runs:
    a second `perturb` of the same sites and kind with other ones compiles nothing. Entered inside
    of a traced function its numbers are part of that program.

    Args:
        only: which sites; see `intercept_methods`.
        perturbation: any kind for values or gradients, `Scale(0.5)`, `Mask(units)`,
            `StopGradient()`. Under vmap it acts on each example.
        model: paths are relative to it; without it to the outermost module that is called.

    Raises:
        TypeError: not a perturbation; or one that has no meaning for a site's values.
        ValueError: `only` matches no site, or an array does not fit.
        InspectorError: a traced value: what is data for a traced function is an argument of
            `nni.perturbed`.

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
        board.retire(token)  # waits: what was started inside reads its strength


def _data_of(perturbation: Any) -> tuple[list[np.ndarray], Any]:
    """What goes on the board (that it is on, and its numbers and arrays), and the rest."""
    require_known(perturbation)
    if isinstance(perturbation, ParameterPerturbation):
        name = type(perturbation).__name__
        raise TypeError(f"{name} acts on parameters: nni.perturbed(f)({{path: {name}(...)}}, ...).")
    return [np.ones((), np.bool_), *data_of(perturbation)], jax.tree.structure(perturbation)
