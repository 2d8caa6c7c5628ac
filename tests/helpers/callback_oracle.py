"""Each module's outputs and their gradients, reported by callbacks from within the program.

An oracle that uses no nnx_inspector: it replaces the `__call__` of the classes, and each module
carries its path as a static attribute, which NNX's transforms preserve.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

SITE_ATTRIBUTE = "reported_as_this_site"
UNREPORTED = (nnx.List, nnx.Dict, nnx.bridge.ToNNX)
"""Classes that take no attribute; calls inside a bridge are not reported."""
Reports = dict[str, dict[int, list[np.ndarray]]]
"""For each site, and each leaf of its output, the values that passed."""


def _is_number(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray)) and not jnp.issubdtype(
        x.dtype, jax.dtypes.extended
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _report_gradient(callback: Any, x: Any) -> Any:
    return x


def _forward(callback: Any, x: Any) -> Any:
    return x, None


def _backward(callback: Any, _: Any, cotangent: Any) -> Any:
    jax.debug.callback(callback, cotangent)
    return (cotangent,)


_report_gradient.defvjp(_forward, _backward)


@contextlib.contextmanager
def reported_outputs(model: nnx.Module, *, gradients: bool) -> Iterator[Reports]:
    """A context in which each module of `model` reports its outputs, or their gradients."""
    found: Reports = defaultdict(lambda: defaultdict(list))
    inside: list[tuple[int, str]] = []
    before: dict[type, Any] = {}
    for path, module in nnx.iter_modules(model, graph=True):
        if not isinstance(module, UNREPORTED):
            setattr(module, SITE_ATTRIBUTE, "/".join(map(str, path)))
            if callable(module):
                before.setdefault(type(module), type(module).__dict__.get("__call__"))

    def report(site: str, at: list[int], x: Any) -> None:
        for i in at:
            found[site][i].append(np.asarray(x))

    def report_tree(site: str, tree: Any) -> Any:
        found[site]  # the call counts, whatever it returns
        leaves, treedef = jax.tree.flatten(
            tree, is_leaf=lambda x: isinstance(x, (nnx.Pytree, nnx.Variable))
        )
        places: dict[int, list[int]] = {}  # an array that occurs several times is one value
        for i, leaf in enumerate(leaves):
            if _is_number(leaf):
                places.setdefault(id(leaf), []).append(i)
        for at in places.values():
            leaf, callback = leaves[at[0]], functools.partial(report, site, at)
            if not gradients:
                jax.debug.callback(callback, leaf)
            elif jnp.issubdtype(leaf.dtype, jnp.inexact) and isinstance(leaf, jax.Array):
                reporting = _report_gradient(callback, leaf)
                for i in at:
                    leaves[i] = reporting
        return jax.tree.unflatten(treedef, leaves) if gradients else tree

    def replacement(cls: type) -> Any:
        original = cls.__call__

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            site = getattr(self, SITE_ATTRIBUTE, None)
            bound = original.__get__(self, type(self))
            if site is None or (id(self), site) in inside:  # another model, or a base class
                return bound(*args, **kwargs)
            inside.append((id(self), site))
            try:
                out = bound(*args, **kwargs)
            finally:
                inside.pop()
            return report_tree(site, out)

        return __call__

    replaced = {cls: replacement(cls) for cls in before}
    try:
        for cls, call in replaced.items():
            cls.__call__ = call
        yield found
        jax.effects_barrier()
    finally:
        for cls, own in before.items():
            if own is None:
                del cls.__call__
            else:
                cls.__call__ = own
