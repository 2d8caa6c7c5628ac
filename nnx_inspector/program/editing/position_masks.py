"""Which positions of a call count: a mask, as programs know it.

Where the outermost call begins, the user's function makes the mask of its arguments, and a mark
holds it. Each mark inside says that it has one, and holds no tracer of it: a function that is
jitted by itself has one program for many calls. `instrument` puts the mask beside the marked
values. Invariant: a value that the mask does not fit is measured whole, and its mark says so.
Measures nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.hook import TAP_OUTPUT, Context, Hook, replace_hooks
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.program.marks import OUTPUT, POSITIONS, mark_arguments, position_mask
from nnx_inspector.program.structure import describe
from nnx_inspector.program.survey import Mark
from nnx_inspector.stats.summarize import mask_shape, type_text
from nnx_inspector.typing import Aval, Function, Kwargs, Owner, Params, PyTree, Value

_WHERE_EXAMPLE = "where=lambda tokens, *_: tokens != 0"
MOST_MASKS = 16
"""The masks of the last calls outside every program that are kept for programs within them."""


MOST_CHARACTERS = 80
"""The most characters of a lambda that are shown."""


@dataclasses.dataclass(frozen=True)
class Where:
    """Which positions count: a function of a call's arguments, or one mask for all calls.

    Equal ones share programs, so a mask is kept by its bytes.
    """

    function: Function | None = None
    shape: tuple[int, ...] = ()
    bits: bytes = b""

    def __str__(self) -> str:
        if self.function is None:
            return f"bool[{','.join(map(str, self.shape))}]"
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    @property
    def words(self) -> str:
        """The end of the sentence "counts only positions where ..."."""
        if self.function is None:
            return f"a mask {self} is True"
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return (_body_of(self.function) or "a lambda") if name == "<lambda>" else f"{name}(...)"

    def mask(self, args: tuple[Value, ...], kwargs: Kwargs, context: Context) -> Value:
        """The mask of a call, bool; None if all of its positions count.

        Raises:
            InspectorError: the function raises, or returns no mask.
        """
        if self.function is None:
            return np.frombuffer(self.bits, np.bool_).reshape(self.shape)
        called = f"{context.type_name or 'the model'}.{context.method_name}"
        try:
            with replace_hooks(()):
                found = self.function(*args, **kwargs)
        except Exception as error:
            raise InspectorError(
                f"where= was given the arguments of {called} and raised "
                f"{type(error).__name__}: {error}. It gets what the outermost call gets, without "
                f"the model: {_WHERE_EXAMPLE}."
            ) from error
        if found is None:
            return None
        return _require_mask(found, f"where= returned, for the arguments of {called},")


def _body_of(function: Any) -> str:
    """What a lambda returns, as its source has it; "" if that is not to be had on one line."""
    code = function.__code__
    known = [place for place in code.co_positions() if all(place)]  # others belong to no expression
    lines = {line for start, end, *_ in known for line in (start, end)}
    # Python 3.13 keeps the text of `python -c` as "<string>", and all that eval has made names that
    if len(lines) != 1 or code.co_filename == "<string>":
        return ""
    source = linecache.getline(code.co_filename, *lines).encode()
    columns = [(start or 0, end) for *_, start, end in known]
    text = source[min(start for start, _ in columns) : max(end or 0 for _, end in columns)].decode()
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


def where_of(given: Value) -> Where | None:
    """What the user gave as `where=`.

    Raises:
        TypeError: it is neither a function nor a mask of booleans.
        ValueError: no position counts.
    """
    if given is None or isinstance(given, Where):
        return given
    if callable(given):
        return Where(given)
    if jit.is_tracer(given):
        raise TypeError(
            f"where= got a traced array, {describe(given)}, which would be another in each call. "
            f"Pass a function of the call's arguments: {_WHERE_EXAMPLE}."
        )
    try:
        mask = np.asarray(_require_mask(given, "where= got"))
    except InspectorError as error:
        raise TypeError(str(error)) from None
    if not mask.any():
        raise ValueError(f"where= is all False: no position of {describe(mask)} counts.")
    return Where(shape=mask.shape, bits=mask.tobytes())


def _require_mask(found: object, what: str) -> Value:
    if isinstance(found, bool | list | tuple):
        found = np.asarray(found)
    dtype = getattr(found, "dtype", None)
    if dtype != np.bool_:
        said = type(found).__name__ if dtype is None else describe(found)
        raise InspectorError(
            f"{what} {said}. It takes a function of the call's arguments that returns True for "
            f"each position that counts, {_WHERE_EXAMPLE}, or such an array of booleans."
        )
    return found


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.shapes: dict[Owner, tuple[int, ...] | None] = {}  # of the calls under way, by owner
        self.last: dict[
            Owner, Value
        ] = {}  # the mask of an owner's last call, outside every program


_here = _ThreadState()


@contextlib.contextmanager
def mask_call(
    mask: Value, owner: object, args: object, kwargs: object, context: Context
) -> Iterator[tuple[PyTree, PyTree]]:
    """The outermost call, with this mask: its arguments, by which its program holds the mask."""
    if mask is not None:
        how: Params = {"owner": owner, "site": context.site or "", "part": POSITIONS}
        args, kwargs = mark_arguments(args, kwargs, context, mask=mask, **how)
        if not jit.is_tracer(mask):
            _here.last.pop(owner, None)
            _here.last[owner] = mask
            while len(_here.last) > MOST_MASKS:
                del _here.last[next(iter(_here.last))]
    _here.shapes[owner] = None if mask is None else tuple(mask.shape)
    try:
        yield args, kwargs
    finally:
        del _here.shapes[owner]


def mask_params(owner: object) -> Params:
    """The parameter of a mark that says how the mask of the call under way is; {} if all of its
    positions count.
    """
    shape = _here.shapes.get(owner)
    return {} if shape is None else {"where": shape}


def mask_beside(owner: Owner, x: jax.Array) -> jax.Array | None:
    """The mask of the call under way, beside a value in it as the module sees it; None if it does
    not fit. Of a value that vmaps map, it is that of the example.
    """
    shape = _here.shapes.get(owner) or ()
    for skipped in range(len(shape)):  # the first axes may be those of vmaps around
        own = shape[skipped:]
        form = mask_shape(own, x)
        if form is not None:
            kind = ShapedArray(own, jnp.dtype(jnp.bool_))
            return position_mask.bind(x, owner=owner, kind=kind, mapped=0).reshape(form)
    return None


@dataclasses.dataclass(frozen=True)
class MaskCalls:
    """The hook that begins the mask of an owner's outermost call."""

    owner: Owner
    where: Where

    def __call__(
        self, next_fun: Function, args: tuple[Value, ...], kwargs: Kwargs, context: Context
    ) -> PyTree:
        if self.owner in _here.shapes or context.kind != "method":
            return next_fun(*args, **kwargs)
        try:
            mask = self.where.mask(args, kwargs, context)
        except InspectorError:
            if not context.path:
                raise
            mask = None  # the function is for calls of the model, and not of its parts
        with mask_call(mask, self.owner, args, kwargs, context) as (args, kwargs):
            return next_fun(*args, **kwargs)


# --------------------------------------------------------------------- in a program


def mask_hooks(owner: object, where: Where | None, scope: Scope) -> list[Hook]:
    """The hooks, around all others, by which an owner's marks know which positions count."""
    return [] if where is None else [Hook(MaskCalls(owner, where), TAP_OUTPUT, None, scope)]


@position_mask.def_impl
@internal_config()
def _run_position_mask(_: object, *, kind: Aval, mapped: int, owner: object) -> jax.Array:
    found = last_mask(owner, kind.shape, mapped)
    return jnp.ones(kind.shape, jnp.bool_) if found is None else jnp.asarray(found)


def misfit_of(marks: Sequence[Mark]) -> str:
    """Why no value of a call is measured by its mask, as a warning; "" if one is, or without one.

    Args:
        marks: those of the call, of `survey`.
    """
    found = [one for one in marks if one.counted and one.part == OUTPUT]
    if not found or any(fits for one in found for fits in one.counted):
        return ""
    one = next((one for one in found if one.avals), found[0])
    values = ", ".join(type_text(x.dtype, x.shape) for x in one.avals)
    return (
        f"where= gave bool[{','.join(map(str, one.where))}], which fits none of the values: it "
        f"must be as long as their first axes, and {one.site or 'the model'!r} returns {values}. "
        f"All positions are measured."
    )


def last_mask(owner: object, shape: tuple[int, ...], mapped: int) -> Value:
    """The mask of an owner's last call outside every program, for a program within it; None if
    there is none of this shape.
    """
    last = _here.last.get(owner)
    if last is None or tuple(last.shape) not in (shape, shape[mapped:]):
        return None
    return jnp.broadcast_to(last, shape)
