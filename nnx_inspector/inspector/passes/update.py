"""A model's new state: the arrays of another model, or of a state, with an equal structure.

Invariant: neither the old model nor the new one changes, and no array is copied; an error names the
first Variable that does not fit. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.sites import Path, closest_keys, iter_modules, site_key
from nnx_inspector.program.structure import describe
from nnx_inspector.records.donated import donated_text, is_deleted
from nnx_inspector.typing import PyTree, Value

_Flat = dict[Path, PyTree]


def updated_model(model: nnx.Module, new: tuple[object, ...]) -> nnx.Module:
    """The model with a new state: the given module itself, or a new module with the given states.

    Args:
        model: the model; it gives the structure, and the Variables that the states leave out.
        new: one module of an equal structure, or states (`nnx.State`, or nested dicts of arrays)
            that together have at least all Variables whose arrays are deleted. Their keys may be
            texts where the model's are numbers, as in a restored checkpoint.

    Raises:
        TypeError: `new` is something else.
        ValueError: the structure differs; the text names the place.
        InspectorError: a required array is deleted.
    """
    if len(new) == 1 and isinstance(new[0], nnx.Module):
        _require_same(model, new[0])
        return new[0]
    graphdef, state = nnx.split(model, graph=True)
    own = _flat(state)
    # a checkpoint may have texts for the numbers of a list
    known = {tuple(map(str, path)): path for path in own}
    given = {known.get(tuple(map(str, path)), path): one for path, one in _flat_states(new).items()}
    for path in given:
        if path not in own:
            near = ", ".join(map(repr, closest_keys(site_key(path), [site_key(p) for p in own])))
            raise ValueError(
                f"The model has no Variable {site_key(path)!r}; the closest are {near}. Pass the "
                f"state of this model alone; for nnx.split((model, optimizer)) that is state[0]."
            )
    merged = {path: _with_arrays(path, one, given.get(path, one)) for path, one in own.items()}
    _require_undeleted(merged)
    return nnx.merge(graphdef, nnx.from_flat_state(merged.items()))


def _flat(state: PyTree) -> _Flat:
    return dict(cast(Iterable[tuple[Path, PyTree]], nnx.to_flat_state(state)))


def _flat_states(states: Iterable[object]) -> _Flat:
    found: _Flat = {}
    for state in states:
        if isinstance(state, nnx.GraphDef):
            continue  # of (graphdef, state): it has no arrays
        if not isinstance(state, (nnx.State, Mapping)):
            raise TypeError(
                f"update takes a model, or its state from nnx.state(model) or nnx.split(model), "
                f"got {type(state).__name__}."
            )
        found |= _flat(state if isinstance(state, nnx.State) else nnx.State(dict(state)))
    if not found:
        raise TypeError("update takes a model, or its state: insp.update(nnx.state(model)).")
    return found


def _with_arrays(path: Path, variable: object, new: object) -> PyTree:
    """The Variable `variable` with the arrays of `new`."""
    arrays, treedef = jax.tree.leaves(new), jax.tree.structure(variable)
    old = jax.tree.leaves(variable)
    if list(map(_shape_and_dtype, old)) != list(map(_shape_and_dtype, arrays)):
        raise ValueError(
            f"The structure differs: {site_key(path)!r} is {_describe_all(old)} in the inspected "
            f"model and {_describe_all(arrays)} in the one given. Make a new inspector of that "
            f"model: nni.Inspector(model, x)."
        )
    return jax.tree.unflatten(treedef, arrays)


def _shape_and_dtype(x: Value) -> tuple[object, ...]:
    return jnp.shape(x), jnp.result_type(x)


def _describe_all(arrays: list[Value]) -> str:
    return ", ".join(map(describe, arrays)) or "no array"


def _require_undeleted(flat: _Flat) -> None:
    leaves = {path: jax.tree.leaves(one) for path, one in flat.items()}
    gone = [site_key(path) for path, arrays in leaves.items() if any(map(is_deleted, arrays))]
    if gone:
        raise InspectorError(donated_text("The state", gone))


def _require_same(model: nnx.Module, other: nnx.Module) -> None:
    mine, others = (
        {path: type(module) for path, module in iter_modules(m)} for m in (model, other)
    )
    for path in sorted({*mine, *others}, key=len):  # outermost first
        a, b = (t[path].__name__ if path in t else "missing" for t in (mine, others))
        if mine.get(path) is not others.get(path):
            raise ValueError(
                f"The structure differs: the module {site_key(path) or '(root)'!r} is {a} in the "
                f"inspected model and {b} in the one given. Make a new inspector of that model: "
                f"nni.Inspector(model, x)."
            )
    own, given = (_flat(nnx.state(m, graph=True)) for m in (model, other))
    for path in dict.fromkeys((*own, *given)):
        _with_arrays(path, own.get(path), given.get(path))
    _require_undeleted(given)
