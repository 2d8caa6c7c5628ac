"""Measures of an effect: how far a perturbed result is from the clean one.

`relative_change` is written once, for NumPy in float64 on the host and for jax in a traced program.
Invariant: an undefined measure is None (NaN in a program), a result that is not finite stays so,
and neither ever becomes 0. Knows no model, pass or record.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.jaxprs import open_jaxpr, sub_jaxprs
from nnx_inspector.arrays import is_array, shape_of
from nnx_inspector.program.marks import CHANGE, OUTPUT, mark
from nnx_inspector.program.plan import Keep, Plan
from nnx_inspector.program.stage import StagedCall
from nnx_inspector.typing import AnyArray, Array, Bool, Float, Jaxpr, Params, PyTree, Value

ROOT = ""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Differences:
    """A perturbed pass compared with the clean one.

    Attributes:
        sites: for each site whose values can be kept, `|perturbed - clean| / |clean|` over all
            floating-point arrays that its calls return.
        kl: if the model returns one array of logits, the mean KL(clean || perturbed) in nats;
            otherwise NaN.
        top1_changed: for logits, the fraction of predictions that changed; otherwise NaN.
        result: `|perturbed - clean| / |clean|` of what the call itself returns, where the positions
            of what the model returns count; None if all positions count, or if that is not marked.

    All of them are those of the positions that count.
    """

    sites: Params
    kl: Value
    top1_changed: Value
    result: Value = None


def value_and_positions(x: Value, where: Value) -> tuple[Value, Value]:
    """What `Keep(values=)` keeps of an array: itself, and which of its positions count; None for
    all.
    """
    return x, where


def differences(
    stage: StagedCall, inputs: list[Array], plan: Plan, *, root: str = ROOT
) -> Differences:
    """Evaluate a stage twice, clean and perturbed, and compare the two.

    `inputs` are the perturbed pass's; the clean pass has the stage's own. The site `root` (or `""`,
    if it is not called) returns the model's result.
    """
    keep = Keep(values=value_and_positions, parts=(OUTPUT,), counts=True)
    nothing = Plan(summarise=False, keep=keep)
    of_clean, seen = stage.evaluate(stage.inputs, plan=nothing)
    clean = _values(stage, seen)
    how = {"summarise": False, "keep": keep}
    of_moved, seen = stage.evaluate(inputs, plan=dataclasses.replace(plan, **how))
    moved = _values(stage, seen)
    pairs: dict[str, list[tuple[Value, Value, Value]]] = {}
    for site in clean:
        # an eager call may have taken another path, with other calls
        if [x.shape for x, _ in clean[site]] == [x.shape for x, _ in moved.get(site, [])]:
            both = zip(clean[site], moved[site], strict=True)
            pairs[site] = [(x, y, where) for (x, where), (y, _) in both]
    root = root if root in pairs else ROOT
    output = [clean for clean, *_ in pairs.get(root, [])]
    of_logits = (False, None) if stage.eager else (None, stage.survey.jaxpr)
    result = None
    if root in pairs and any(mark.counted for mark in stage.survey.marks):
        both = (out[: stage.outputs] for out in (of_clean, of_moved))
        wheres = masks_by_key(pairs[root])
        result = [(x, y, wheres.get(mask_key(x))) for x, y in zip(*both, strict=True)]
    return _measure(pairs, result, None if logits_of(output, *of_logits) is None else root)


def mask_key(x: Value) -> Value:
    """What a mask of positions depends on."""
    return tuple(x.shape), jnp.issubdtype(x.dtype, jnp.inexact)


def masks_by_key(found: Iterable[tuple[Any, ...]]) -> dict[Any, Any]:
    """Form -> which positions count, from arrays that each have theirs as the last entry: so a
    function of the model counts those of the model in what has the form of the model's output.
    """
    return {mask_key(x): where for x, *_, where in found if where is not None}


@internal_config()
def relative_change_where(found: Iterable[tuple[Value, Value, Value]]) -> jax.Array:
    """`relative_change` in a program, of clean and perturbed arrays, each pair with the
    positions that count; None for all.
    """
    pairs = [
        (x, y) if where is None else (jnp.where(where, x, 0), jnp.where(where, y, 0))
        for x, y, where in found
    ]
    return relative_change_in_trace([x for x, _ in pairs], [y for _, y in pairs])


@functools.partial(jax.jit, static_argnums=2)
def _measure(
    pairs: dict[str, list[tuple[Value, Value, Value]]],
    result: list[tuple[Value, Value, Value]] | None,
    logits: str | None,
) -> Differences:
    kl = top1 = jnp.float32(jnp.nan)
    if logits is not None:
        clean, moved, where = pairs[logits][0]
        kl = kl_divergence(clean, moved, where=where)
        top1 = top1_changed(clean, moved, where=where)
    sites = {site: relative_change_where(of) for site, of in pairs.items()}
    return Differences(sites, kl, top1, None if result is None else relative_change_where(result))


def _values(stage: StagedCall, seen: list[Value]) -> dict[str, list[tuple[Value, Value]]]:
    """The arrays that each site's calls returned, except in loops of unknown length, and which of
    their positions count.
    """
    found: dict[str, list[tuple[Value, Value]]] = {}
    for at, _, one in stage.survey.walk(seen):
        if one is not None and one.kept:
            found.setdefault(at.site, []).extend(kept.value for kept in one.kept)
    return found


Logits = bool | Callable[[Any], Any] | None
"""Which part of an output is logits: True for its one array, a function of the output, False for
none. None: its one array, if that is floating-point and of rank 2 or more, and the loss takes a
maximum over its last axis, as a softmax and an accuracy do."""


@internal_config()
def relative_change(clean: PyTree, perturbed: PyTree) -> float | None:
    """`|perturbed - clean| / |clean|` of two results of one call, on the host in float64.

    The norms are Euclidean, over all floating-point (and complex) arrays of a pytree together;
    other leaves are ignored. A place with the same infinity in both, as a mask has, counts for
    nothing.

    Returns:
        None if there are no such arrays, or if the clean ones are all zero or not finite; NaN or
        Inf if the perturbed arrays contain one.

    Raises:
        ValueError: the two results differ in structure or shapes.

    Example:
        >>> import numpy as np
        >>> from nnx_inspector.perturbations.effects import relative_change
        >>> relative_change(np.array([3.0, 4.0]), np.array([3.0, 9.0]))
        1.0
    """
    pairs = _pairs(np, clean, perturbed)
    if not pairs:
        return None
    with np.errstate(all="ignore"):
        number = float(_relative(np, pairs))
    arrays = [x for x, _ in pairs]
    unusable = not all(np.isfinite(x).all() for x in arrays) or not any(map(np.any, arrays))
    return None if np.isnan(number) and unusable else number


# -------------------------------------------------------------- in a program


@internal_config()
def relative_change_in_trace(clean: PyTree, perturbed: PyTree) -> jax.Array:
    """`relative_change` as a scalar of at least float32; NaN stands for None."""
    pairs = _pairs(jnp, clean, perturbed)
    return _relative(jnp, pairs) if pairs else jnp.float32(jnp.nan)


@internal_config()
def kl_divergence(
    clean: Float[Array, "*batch classes"],
    perturbed: Float[Array, "*batch classes"],
    *,
    where: Bool[Array, "*batch 1"] | None = None,
) -> Float[Array, ""]:
    """The mean KL(clean || perturbed) of logits, in nats, of the positions that count: the sum of
    q - p - p log(q/p), whose terms are at least 0.

    So a small divergence is not a difference of large numbers. A class with p = 0 contributes its
    q. NaN if a class of a row has an undefined probability; -Inf, which rules a class out, is
    allowed.
    """
    log_p, log_q = _log_softmax(_widen(jnp, clean)), _log_softmax(_widen(jnp, perturbed))
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    t = jnp.where(p > 0, log_q - jnp.where(p > 0, log_p, 0), 0)
    small = (p > 0) & (jnp.abs(t) < 0.03)
    near = jnp.where(small, t, 0)
    series = p * near**2 * (1 / 2 + near * (1 / 6 + near * (1 / 24 + near / 120)))
    far = jnp.where(p > 0, q - p - p * jnp.where(small, 0, t), q)
    series = jnp.where(small, series, jnp.maximum(far, 0))
    # NaN, not the mean of the rest, if any class of a row has an undefined probability
    return _mean(jnp.where(jnp.isnan(log_p + q), jnp.nan, series).sum(-1), where)


def _log_softmax(x: Array) -> Array:
    top = jnp.max(x, axis=-1, keepdims=True)
    shifted = x - jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))
    return shifted - jnp.where(jnp.isneginf(top), jnp.nan, total)


@internal_config()
def top1_changed(
    clean: Float[Array, "*batch classes"],
    perturbed: Float[Array, "*batch classes"],
    *,
    where: Bool[Array, "*batch 1"] | None = None,
) -> Float[Array, ""]:
    """The fraction, 0 to 1, of the positions that count whose most likely class changed; NaN if
    logits contain NaN.
    """
    clean, perturbed = _widen(jnp, clean), _widen(jnp, perturbed)
    changed = jnp.argmax(clean, axis=-1) != jnp.argmax(perturbed, axis=-1)
    unknown = jnp.isnan(jnp.max(clean, axis=-1)) | jnp.isnan(jnp.max(perturbed, axis=-1))
    return _mean(jnp.where(unknown, jnp.nan, changed.astype(clean.dtype)), where)


def _mean(x: Array, where: Array | None) -> Array:
    """The mean of the rows that count; NaN of none. Beside logits a mask has one class."""
    if not x.size:
        return jnp.asarray(jnp.nan, x.dtype)
    return jnp.mean(x) if where is None else jnp.mean(x, where=where[..., 0])


# -------------------------------------------------------------------- logits


def logits_of(output: object, logits: Logits = None, program: Jaxpr | None = None) -> PyTree:
    """The part of an output that is logits, `[..., classes]`, or None; see `Logits`.

    `program` is the marked jaxpr of the call, in which a loss must choose among the classes; None
    drops this condition.

    Raises:
        TypeError: `logits` does not name a floating-point array with two classes or more.
    """
    if logits is False:
        return None
    arrays = [x for x in jax.tree.leaves(output) if is_array(x)]
    if logits is None:
        fits = len(arrays) == 1 and _could_be_logits(arrays[0]) and arrays[0].ndim >= 2
        fits = fits and (program is None or _takes_maximum(program, arrays[0].shape[-1]))
        return arrays[0] if fits else None
    if logits is True and len(arrays) != 1:
        raise TypeError(
            f"logits=True is for an output of one array, and this one has {len(arrays)}. Pass a "
            f"function of the output: logits=lambda output: output[0]."
        )
    found = arrays[0] if logits is True else logits(output)
    if not is_array(found) or not _could_be_logits(found):
        what = f"{found.dtype}{list(found.shape)}" if is_array(found) else type(found).__name__
        raise TypeError(
            f"Logits must be a floating-point array [..., classes] of two classes or more, got "
            f"{what}. Pass logits=False for an output that has none."
        )
    return found


def _takes_maximum(jaxpr: Jaxpr, classes: int) -> bool:
    """Whether a program takes a maximum over a last axis of this length after its last call."""
    after = False
    for equation in _equations(jaxpr):
        if equation.primitive is mark and equation.params["part"] != CHANGE:
            after = False
        elif equation.primitive.name in ("reduce_max", "argmax"):
            shape, axes = equation.invars[0].aval.shape, equation.params["axes"]
            after = after or (shape[-1:] == (classes,) and axes == (len(shape) - 1,))
    return after


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in open_jaxpr(jaxpr)[0].eqns:
        yield equation
        for inner in sub_jaxprs(equation):
            yield from _equations(inner)


def _could_be_logits(x: AnyArray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and len(x.shape) >= 1 and x.shape[-1] >= 2


# ------------------------------------------------------- the relative change
# `xp` is NumPy or jax.numpy


def _pairs(xp: object, clean: object, perturbed: object) -> list[tuple[Value, Value]]:
    flat, treedef = jax.tree.flatten(clean)
    others, treedef_of_others = jax.tree.flatten(perturbed)
    if treedef != treedef_of_others:
        raise ValueError(
            f"The clean and perturbed outputs differ in structure: {treedef}, {treedef_of_others}."
        )
    pairs: list[tuple[Value, Value]] = []
    for a, b in zip(flat, others, strict=True):
        if is_array(a) and jnp.issubdtype(a.dtype, jnp.inexact):
            if a.shape != (shape := shape_of(b)):
                raise ValueError(
                    f"The clean and perturbed outputs differ in shape: arrays of shape "
                    f"{list(a.shape)} and {list(shape or ())}."
                )
            pairs.append((_widen(xp, a), _widen(xp, b)))
    return pairs


def _widen(xp: object, x: Value) -> Value:
    """The array as float64 on the host, at least float32 in a program: bfloat16 sums are poor."""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    if xp is np:
        return np.asarray(x).astype(np.complex128 if is_complex else np.float64)
    return x if is_complex or x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def _relative(xp: types.ModuleType, pairs: Sequence[tuple[Value, Value]]) -> Value:
    """Scaled by the largest elements: squares and differences may overflow otherwise. A place with
    the same infinity in both, as a mask has, is left out.
    """
    same = [(a == b) & xp.isinf(a) for a, b in pairs]
    pairs = [
        (xp.where(out, 0, a), xp.where(out, 0, b)) for out, (a, b) in zip(same, pairs, strict=True)
    ]
    clean, perturbed = [a for a, _ in pairs], [b for _, b in pairs]
    of_clean, of_perturbed = _largest(xp, clean), _largest(xp, perturbed)
    scale = xp.maximum(of_clean, xp.where(xp.isfinite(of_perturbed), of_perturbed, 0))
    scale = xp.where(scale > 0, scale, 1)
    differences = [b / scale - a / scale for a, b in pairs]
    of_difference = _largest(xp, differences)
    safe_clean = xp.where(of_clean > 0, of_clean, 1)
    safe_difference = xp.where(of_difference > 0, of_difference, 1)
    ratio = _root_of_squares(xp, differences, safe_difference)
    ratio = ratio / xp.maximum(_root_of_squares(xp, clean, safe_clean), 1)  # scaled maximum: 1
    ratio = ratio * safe_difference * (scale / safe_clean)
    ratio = xp.where(xp.isfinite(of_perturbed), ratio, of_perturbed)  # keep a NaN or Inf
    return xp.where((of_clean > 0) & xp.isfinite(of_clean), ratio, xp.nan)


def _largest(xp: types.ModuleType, arrays: Sequence[AnyArray]) -> Value:
    """The largest magnitude; NaN if there is a NaN, otherwise Inf if there is an Inf."""
    return xp.max(xp.stack([xp.max(xp.abs(x), initial=0.0) for x in arrays]))


def _root_of_squares(xp: types.ModuleType, arrays: Sequence[AnyArray], scale: AnyArray) -> Value:
    return xp.sqrt(xp.sum(xp.stack([xp.sum(xp.abs(x / scale) ** 2) for x in arrays])))
