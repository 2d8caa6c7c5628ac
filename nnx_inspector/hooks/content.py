"""A key for everything a program was traced with besides its input arrays: settings, code, text.

`nnx.jit` accepts attributes that cannot be hashed (a mutable config, a list, a dict), and so do the
programs of this package. Invariant: every value has a hashable key, two keys are equal only if both
values lead to the same traced program, and a value that is changed in place has another key.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat import jit
from nnx_inspector.arrays import own_attribute

_MOST_OBJECTS = 10_000
"""The most objects whose attributes are examined; further objects are compared by identity."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Itself:
    """Compares and hashes one object by identity, despite its own `__eq__`; keeps it alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(value: Any) -> Any:
    """The key of a value: its content if the type is known to have one, else its identity.

    Values that Python considers equal have different keys: 1, 1.0 and True; 0.0 and -0.0.

    Example:
        >>> key_of([1, {"a": 2}]) == key_of([1, {"a": 2}])
        True
        >>> key_of([1]) == key_of([True])
        False
    """
    return _Keys().of(value)


class _Keys:
    def __init__(self) -> None:
        self._around: list[int] = []
        self._left = _MOST_OBJECTS

    def of(self, x: Any) -> Any:
        kind = type(x)
        if x is None or kind in (bool, int, str, bytes):
            return kind, x
        if isinstance(x, (float, complex)) and not isinstance(x, np.generic):
            return kind, repr(x)
        if isinstance(x, (np.ndarray, np.generic)) and x.dtype != np.dtype(object):
            return kind, str(x.dtype), x.shape, _digest(x)
        if isinstance(x, jax.Array):
            return _of_device(x)
        if id(x) in self._around:
            return "again", len(self._around) - self._around.index(id(x))
        self._around.append(id(x))
        try:
            return self._of_parts(x)
        finally:
            self._around.pop()

    def _of_parts(self, x: Any) -> Any:
        kind = type(x)
        if isinstance(x, np.ndarray):
            return kind, x.shape, *map(self.of, x.ravel().tolist())
        if isinstance(x, (tuple, list)):
            return kind, *map(self.of, x)
        if isinstance(x, dict):  # in order: traced code may iterate over it
            return kind, *((self.of(k), self.of(v)) for k, v in x.items())
        if isinstance(x, (set, frozenset)):
            return kind, frozenset(map(self.of, x))
        if isinstance(x, functools.partial):
            return kind, self.of(x.func), self.of(x.args), self.of(x.keywords)
        if isinstance(x, types.MethodType):
            return kind, x.__func__, _Itself(x.__self__)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            names = dict.fromkeys([f.name for f in dataclasses.fields(x)])
            names |= dict.fromkeys(own_attribute(x, "__dict__", {}))
            return kind, *((name, self.of(own_attribute(x, name))) for name in names)
        if isinstance(x, types.SimpleNamespace):
            return kind, self.of(dict(vars(x)))
        return self._of_object(x)

    def _of_object(self, x: Any) -> Any:
        kind = type(x)
        if kind.__hash__ is not object.__hash__ and kind.__hash__ is not None:
            try:
                hash(x)
            except TypeError:  # for example, a frozen dataclass that holds a list
                pass
            else:
                return kind, x
        if isinstance(x, Mapping):
            return kind, *((self.of(k), self.of(v)) for k, v in x.items())
        attributes = own_attribute(x, "__dict__")
        if type(attributes) is not dict or self._left <= 0:
            return kind, _Itself(x)
        self._left -= 1
        if kind.__hash__ is not object.__hash__:  # the class has an __eq__: compare by content
            return kind, self.of(dict(attributes))
        return kind, _Itself(x), self.of(dict(attributes)) if _may_change(x) else ()


def _may_change(x: Any) -> bool:
    """Whether an object may be a setting that changes; code and objects of libraries are not."""
    fixed = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
    library = type(x).__module__.partition(".")[0] in ("jax", "jaxlib", "flax", "numpy", "builtins")
    return not isinstance(x, fixed) and not library


def _digest(x: Any) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=16).digest()


def _of_device(x: jax.Array) -> Any:
    if jit.is_tracer(x) or x.is_deleted() or not x.is_fully_addressable:
        return jax.Array, _Itself(x)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    values = np.asarray(jax.random.key_data(x) if is_key else x)
    return jax.Array, str(x.dtype), x.shape, _digest(values)
