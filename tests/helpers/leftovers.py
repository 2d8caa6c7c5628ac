"""Detects what hooks might leave behind in classes, registries, objects and arrays."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax._src import api, config, pjit

from nnx_inspector.hooks import dispatch, wrapping

TOLERANCE = 1e-6
"""The tolerance of jitted results, compared with those without hooks."""


def classes() -> list[type]:
    """Every class of NNX objects, and the classes of jax that hooks might change."""
    found: dict[type, None] = dict.fromkeys(
        (nnx.Pytree, nnx.Variable, jax.stages.Compiled, jax.stages.Lowered, jax.stages.Traced)
    )
    stack = [nnx.Pytree, nnx.Variable]
    while stack:
        for sub in type.__subclasses__(stack.pop()):
            if sub not in found:
                found[sub] = None
                stack.append(sub)
    return list(found)


def patched_in_jax() -> list[Any]:
    """What the package replaces in jax while it listens to launches: private parts of jax."""
    hook = api._post_hook_state.get_local()
    # jax leaves None where a thread has once opened `jax.debug_nans(False)`, as flax does too
    hook = None if hook is config.config_ext.unset else hook
    return [pjit._get_fastpath_data, pjit._infer_params, pjit._run_python_pjit, hook]


def code_of(value: Any) -> list[Any]:
    """The code of a function and of all functions that it wraps."""
    found = []
    while value is not None:
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(value, types.FunctionType):
            found += [value, value.__code__, value.__defaults__, value.__kwdefaults__]
        value = getattr(value, "__wrapped__", None)
    return found


def hookable_state() -> dict[Any, dict[str, tuple[Any, ...]]]:
    """The state of a process that hooks might change: the objects of each class, registry entry
    and file of Flax.
    """
    found: dict[Any, dict[str, tuple[Any, ...]]] = {}
    for cls in classes():
        found[cls] = {
            name: (value, *code_of(value))
            for name, value in vars(cls).items()
            if not name.startswith(("_abc", "__abstractmethods__"))
            and (name != "__annotations__" or value)  # Python makes an empty one when asked for it
        }
    for registry in ("GRAPH_REGISTRY", "PYTREE_REGISTRY"):
        for cls, impl in getattr(nnx.graphlib, registry).items():
            found[registry, cls] = {"": (impl,)}
    for module in [m for m in sys.modules if m.startswith("flax.nnx")]:
        found[module] = {
            name: (value, *code_of(value))
            for name, value in vars(sys.modules[module]).items()
            if name != "__warningregistry__"
        }
    return found


def changed_entries(before: dict[Any, Any], after: dict[Any, Any]) -> list[Any]:
    """The entries that are other objects now. Classes defined in between do not count."""

    def same(a: tuple[Any, ...] | None, b: tuple[Any, ...] | None) -> bool:
        return a is not None and b is not None and [*map(id, a)] == [*map(id, b)]

    return [
        (owner, name)
        for owner, names in before.items()
        for name in {**names, **after.get(owner, {})}
        if not same(names.get(name), after.get(owner, {}).get(name))
    ]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check on leaving that classes, their functions' code and NNX's registries are unchanged."""
    before = hookable_state()
    yield
    found = changed_entries(before, hookable_state())
    assert not found, found


def objects(model: Any) -> dict[Any, tuple[Any, dict[str, Any]]]:
    """Every NNX object of a model except Variables, by path, with its attributes."""
    every: list[Any] = list(nnx.iter_graph(model))
    return {p: (node, dict(vars(node))) for p, node in every if isinstance(node, nnx.Pytree)}


def object_changes(
    before: dict[Any, Any], after: dict[Any, Any], *, exactly: bool
) -> dict[Any, Any]:
    """The differences of each object: its attributes, their types, new attributes.

    A transform of NNX takes objects apart and rebuilds them: unless compared exactly, the order
    of attributes may differ, and static attributes may be equal values.
    """
    found = {}
    for path, (node, attributes) in after.items():
        old, old_attributes = before.get(path, (None, {}))
        found[path] = (
            type(node),
            node is old,
            [
                (name, type(value), is_same(name, value, old_attributes.get(name), exactly))
                for name, value in (list if exactly else sorted)(attributes.items())
            ],
        )
    return found


def is_same(name: str, value: Any, old: Any, exactly: bool) -> bool:
    if exactly or isinstance(value, (nnx.Pytree, nnx.Variable)):
        return value is old
    if name == "_pytree__state":
        return type(value) is type(old)  # the trace in which the object was made
    found, structure = jax.tree.flatten(value, is_leaf=is_node)
    expected, old_structure = jax.tree.flatten(old, is_leaf=is_node)
    return structure == old_structure and all(
        # arrays are part of the state, which is compared by value
        a is b if is_node(a) else isinstance(a, jax.Array) or a == b
        for a, b in zip(found, expected, strict=True)
    )


def is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def arrays_of(tree: Any) -> list[np.ndarray]:
    """The arrays of a pytree (for a model, its whole state), with PRNG keys as their bits."""

    def plain(x: Any) -> np.ndarray:
        is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return [plain(x) for x in jax.tree.leaves(tree)]


def assert_close(found: Any, expected: Any, *, exactly: bool, tolerance: float = TOLERANCE) -> None:
    found, expected = arrays_of(found), arrays_of(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if exactly or a.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b)
        else:
            scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Check after every test of the files that import it that classes, their functions' code and
    NNX's registries are unchanged, and that no hook is installed.
    """
    with nothing_left():
        yield
    # a reader would only be there for this test
    assert not wrapping._undo
    assert not dispatch._thread.frames
