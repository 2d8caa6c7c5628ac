"""Values in words: `float32[8,10], train=True, mask=None`, for traces, errors and frames.

Arrays appear as dtype and shape, plain Python values as they are, other values as their type's
name. Invariant: never looks at an array's numbers, so it works on tracers and abstract values.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import jax

from nnx_inspector.arrays import is_array, own_attribute
from nnx_inspector.program.structure import describe, is_whole

_LONGEST = 8
"""How many parts of a container are written out; the others are only counted."""

_LONGEST_TEXT = 40


def in_words(args: Any, kwargs: Mapping[str, Any]) -> str:
    """Arguments as written in a call: `"float32[8,10], train=True"`."""
    parts = [*map(value_in_words, args), *(f"{k}={value_in_words(v)}" for k, v in kwargs.items())]
    return ", ".join(parts) or "nothing"


def value_in_words(value: object) -> str:
    """One value, any pytree: `"(float32[4,2], {mask: bool[4]})"`."""
    if is_array(value):
        return describe(value)
    if isinstance(value, str | bytes):
        text = repr(value)
        return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 4]}...{text[-1]}"
    if isinstance(value, enum.Enum):
        return str(value)
    if value is None or isinstance(value, bool | int | float | complex):
        return repr(value)
    if is_whole(value):
        return type(value).__name__
    name = own_attribute(value, "__name__")
    if callable(value) and isinstance(name, str):
        return name
    return _container(value)


def _container(value: object) -> str:
    if isinstance(value, dict):
        return "{" + _join([f"{k}: {value_in_words(v)}" for k, v in value.items()]) + "}"
    if isinstance(value, tuple) and (names := own_attribute(value, "_fields")) is not None:
        named = zip(names, value, strict=True)
        return f"{type(value).__name__}({_join([f'{k}={value_in_words(v)}' for k, v in named])})"
    if isinstance(value, list):
        return f"[{_join([value_in_words(v) for v in value])}]"
    if isinstance(value, tuple):
        inside = _join([value_in_words(v) for v in value])
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    leaves = jax.tree.leaves(value, is_leaf=is_whole)
    if len(leaves) == 1 and leaves[0] is value:
        return type(value).__name__  # not a pytree: its fields are private
    return f"{type(value).__name__}({_join([value_in_words(leaf) for leaf in leaves])})"


def _join(parts: list[str]) -> str:
    more = len(parts) - _LONGEST
    return ", ".join(parts if more <= 0 else [*parts[:_LONGEST], f"... {more} more"])
