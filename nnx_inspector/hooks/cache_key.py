"""A key for everything a program was traced with besides its input arrays: settings, code, text.

`nnx.jit` accepts attributes that cannot be hashed (a mutable config, a list, a dict), and so do the
programs of this package. Invariant: every value has a hashable key, two keys are equal only if both
values lead to the same traced program, and a value that changes in place gets another key.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Hashable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat import jit
from nnx_inspector.arrays import own_attribute
from nnx_inspector.typing import Value

_PLAIN = frozenset((bool, int, str, bytes, type(None)))
_MAX_OBJECTS = 10_000
"""The most objects whose attributes are examined; further objects are compared by identity."""


@dataclasses.dataclass(frozen=True, eq=False)
class IdentityKey:
    """Compares and hashes one object by identity, despite its own `__eq__`; keeps it alive."""

    value: Value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _CachedHash:
    """A key that caches its hash, because the key of a wide model is long."""

    __slots__ = ("_hash", "_key")

    def __init__(self, key: Hashable):
        self._key, self._hash = key, hash(key)

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, _CachedHash):
            return self is other
        return self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


def cache_key(value: object) -> Hashable:
    """The key of a value: its content if its type is known, else its identity.

    Values that Python considers equal have different keys: 1, 1.0 and True; 0.0 and -0.0.

    Example:
        >>> cache_key([1, {"a": 2}]) == cache_key([1, {"a": 2}])
        True
        >>> cache_key([1]) == cache_key([True])
        False
    """
    found = _KeyBuilder()
    found.add(value)
    return _CachedHash(tuple(found.flat))


class _KeyBuilder:
    """The key as one flat list, each value after its type: nested tuples slow the collector."""

    def __init__(self) -> None:
        self.flat: list[Hashable] = []
        self._around: list[int] = []
        self._left = _MAX_OBJECTS

    def add(self, x: Value) -> None:
        kind = type(x)
        if kind in _PLAIN:
            self.flat += kind, x
        elif kind is tuple:  # by itself it cannot contain itself
            self._add_all(kind, x)
        elif isinstance(x, (float, complex)) and not isinstance(x, np.generic):
            self.flat += kind, repr(x)
        elif isinstance(x, (np.ndarray, np.generic)) and x.dtype != np.dtype(object):
            self.flat += kind, str(x.dtype), x.shape, _digest(x)
        elif isinstance(x, jax.Array):
            self.flat += _device_array_key(x)
        elif id(x) in self._around:
            self.flat += "again", len(self._around) - self._around.index(id(x))
        else:
            self._around.append(id(x))
            try:
                self._add_parts(x)
            finally:
                self._around.pop()

    def _add_all(self, kind: object, found: Iterable[object]) -> None:
        found = tuple(found)
        self.flat += kind, len(found)
        for one in found:
            if type(one) in _PLAIN:
                self.flat += type(one), one
            else:
                self.add(one)

    def _add_parts(self, x: object) -> None:
        kind = type(x)
        if isinstance(x, np.ndarray):
            self.flat.append(x.shape)
            self._add_all(kind, x.ravel().tolist())
        elif isinstance(x, (tuple, list)):
            self._add_all(kind, x)
        elif isinstance(x, dict):  # in order: traced code may iterate over it
            self._add_all(kind, x.items())
        elif isinstance(x, (set, frozenset)):
            outer, self.flat = self.flat, []
            found: list[Hashable] = []
            for one in x:
                self.add(one)
                found.append(tuple(self.flat))
                self.flat.clear()
            self.flat = [*outer, kind, frozenset(found)]
        elif isinstance(x, functools.partial):
            self._add_all(kind, (x.func, x.args, x.keywords))
        elif isinstance(x, types.MethodType):
            self.flat += kind, x.__func__, IdentityKey(x.__self__)
        elif (names := _field_names(kind)) is not None:
            if others := own_attribute(x, "__dict__", {}):
                names = tuple(dict.fromkeys((*names, *others)))
            self.flat.append(names)
            self._add_all(kind, [own_attribute(x, name) for name in names])
        elif isinstance(x, types.SimpleNamespace):
            self.flat.append(kind)
            self.add(dict(vars(x)))
        else:
            self._add_object(x)

    def _add_object(self, x: object) -> None:
        kind = type(x)
        if kind.__hash__ is not object.__hash__ and kind.__hash__ is not None:
            try:
                hash(x)
            except TypeError:  # for example, a frozen dataclass that holds a list
                pass
            else:
                self.flat += kind, x
                return
        if isinstance(x, Mapping):
            self._add_all(kind, x.items())
            return
        attributes = own_attribute(x, "__dict__")
        if type(attributes) is not dict or self._left <= 0:
            self.flat += kind, IdentityKey(x)
            return
        self._left -= 1
        if kind.__hash__ is not object.__hash__:  # the class has an __eq__: compare by content
            self.flat.append(kind)
            self.add(dict(attributes))
        else:
            self.flat += kind, IdentityKey(x)
            self.add(dict(attributes) if _may_change(x) else ())


@functools.lru_cache(maxsize=1000)  # a graphdef has many objects of few classes
def _field_names(kind: type) -> tuple[str, ...] | None:
    """The names of a dataclass's fields; None for another class."""
    is_one = dataclasses.is_dataclass(kind)
    return tuple(f.name for f in dataclasses.fields(kind)) if is_one else None


def _may_change(x: object) -> bool:
    """Whether an object may be a setting that changes, unlike code and objects of libraries."""
    fixed = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
    library = type(x).__module__.partition(".")[0] in ("jax", "jaxlib", "flax", "numpy", "builtins")
    return not isinstance(x, fixed) and not library


def _digest(x: object) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=16).digest()


def _device_array_key(x: jax.Array) -> tuple[Hashable, ...]:
    if jit.is_tracer(x) or x.is_deleted() or not x.is_fully_addressable:
        return jax.Array, IdentityKey(x)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    values = np.asarray(jax.random.key_data(x) if is_key else x)
    return jax.Array, str(x.dtype), x.shape, _digest(values)
