"""What may be done to the value that a module returns, with its strength as data.

Every kind is one row of two numbers, (mode, strength), for `apply`: a program with a place for a
row can be switched and tuned without being compiled again. Invariant: a row of zeros leaves the
value bitwise as it is. Several on one site compose: their strengths multiply, Zero wins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector import _private, board
from nnx_inspector.errors import InspectorError
from nnx_inspector.interception import open_layer
from nnx_inspector.layers import PERTURBATION, Context, Layer
from nnx_inspector.scope import scope_of
from nnx_inspector.sites import Only, Selection
from nnx_inspector.taps import describe, is_observable, is_whole
from nnx_inspector.trees import mapped

OFF, ZERO, SCALE = range(3)
ROW = 2
"""Numbers in a row: mode and strength."""


@dataclasses.dataclass(frozen=True)
class Zero:
    """Replaces the value by zeros of its shape and dtype ("zero ablation").

    Example:
        >>> import nnx_inspector as nni
        >>> nni.Zero()
        Zero()
    """

    def row(self) -> tuple[float, float]:
        """(mode, strength)."""
        return (ZERO, 0.0)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Multiplies the value by `factor`.

    Args:
        factor: a finite number; 1.0 leaves the value as it is, 0.0 zeroes what is finite (NaN
            and Inf times 0 are NaN; `Zero` removes them).

    Example:
        >>> import nnx_inspector as nni
        >>> nni.Scale(0.5)
        Scale(factor=0.5)
    """

    factor: float

    def __post_init__(self) -> None:
        if _private.is_tracer(self.factor):
            raise InspectorError(
                "Scale got a traced value: this version takes strengths as Python numbers only. "
                "Enter nni.perturb outside of jit; changing the number compiles nothing."
            )
        try:
            factor = float(self.factor)
        except (TypeError, ValueError) as error:
            raise TypeError(f"Scale takes a number, got {self.factor!r}.") from error
        if not np.isfinite(factor) or abs(factor) > float(np.finfo(np.float32).max):
            raise ValueError(f"Scale takes a finite float32 number, got {factor}.")
        object.__setattr__(self, "factor", factor)

    def row(self) -> tuple[float, float]:
        """(mode, strength)."""
        return (SCALE, self.factor)


Perturbation = Zero | Scale
KINDS = {"Zero": Zero, "Scale": Scale}


def require_perturbation(value: Any) -> Perturbation:
    """`value` itself, or a TypeError that names the kinds there are."""
    if isinstance(value, (Zero, Scale)):
        return value
    if isinstance(value, type) and value in (Zero, Scale):
        raise TypeError(
            f"Pass an instance: nni.{value.__name__}({'0.5' if value is Scale else ''})."
        )
    raise TypeError(
        f"A perturbation is nni.Zero() or nni.Scale(factor), got {type(value).__name__}."
    )


def combine(perturbations: Iterable[Perturbation]) -> tuple[float, float]:
    """One row for several perturbations of one site: Zero wins, factors multiply."""
    mode, strength = float(OFF), 1.0
    for one in perturbations:
        kind, factor = one.row()
        if kind == ZERO or mode == ZERO:
            mode, strength = float(ZERO), 0.0
        else:
            mode, strength = float(SCALE), strength * factor
    return (mode, strength) if mode != OFF else (float(OFF), 0.0)


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
    return jnp.where(mode == ZERO, jnp.zeros_like(x), jnp.where(mode == SCALE, scaled, x))


def apply_tree(tree: Any, row: Any) -> Any:
    """Every array of a module's output perturbed."""
    return mapped(lambda x: apply(x, row), tree, is_whole)


def check_applies(perturbation: Perturbation, site: str, leaves: Iterable[str]) -> None:
    """Raise a TypeError where a perturbation has no meaning for a site's output.

    Args:
        perturbation: what is to be done.
        site: the site's key, for the text.
        leaves: the output's arrays in words (`"int32[8]"`).
    """
    arrays = [text for text in leaves if "[" in text]
    if not arrays:
        raise TypeError(f"{site or '(root)'!r} returns no array, so there is nothing to perturb.")
    if isinstance(perturbation, Scale):
        for text in arrays:
            if not text.startswith(("float", "bfloat", "complex")):
                raise TypeError(
                    f"Scale needs floating-point values, but {site or '(root)'!r} returns {text}. "
                    f"Zero works on every dtype."
                )


@dataclasses.dataclass(frozen=True)
class _Perturb:
    """The hook of `perturb`: equal hooks share compiled programs, the strength is on the board."""

    token: Any
    kind: str

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        out = next_fun(*args, **kwargs)
        leaves = [describe(x) for x in jax.tree.leaves(out, is_leaf=is_whole)]
        site = context.site or type(context.module).__name__
        check_applies(Zero() if self.kind == "Zero" else Scale(1.0), site, leaves)
        return apply_tree(out, board.read(self.token, (ROW,)))


_open: threading.local = threading.local()


@contextlib.contextmanager
def perturb(
    only: Only, perturbation: Perturbation, *, model: nnx.Module | None = None
) -> Iterator[None]:
    """Perturb what the selected modules return, in every call of this thread.

    Holds for functions that were jitted before. The strength is read when the program runs: a
    second `perturb` of the same sites and kind with another strength compiles nothing.

    Args:
        only: which sites; see `intercept_methods`.
        perturbation: `Zero()` or `Scale(factor)`.
        model: paths are relative to it; without it to the outermost module that is called.

    Raises:
        TypeError: not a perturbation; or one that has no meaning for a site's output.
        ValueError: `only` matches no site.

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
    require_perturbation(perturbation)
    selection = Selection(only)
    scope = None if model is None else scope_of(model)
    kind = type(perturbation).__name__
    base = (selection, scope, kind, threading.get_ident())
    depths: dict[Any, int] = _open.__dict__.setdefault("depths", {})
    depth = depths.get(base, 0)
    token = ("perturb", *base, depth)
    depths[base] = depth + 1
    try:
        board.publish(token, perturbation.row())
        with open_layer(Layer(_Perturb(token, kind), PERTURBATION, selection, scope), model):
            yield
    finally:
        depths[base] = depth
        board.retire(token)  # waits: what was started inside reads its strength
