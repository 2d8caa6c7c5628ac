"""The names of the axes of a module's arrays, as far as they can be known.

Invariant: an axis has a name only if the module's type, the transforms around it or the sizes imply
one; other axes are "axis 0", "axis 1" ... The names of one array are distinct. Reads no array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx

from nnx_inspector.arrays import own_attribute
from nnx_inspector.typing import DTypeLike, Value

CONVOLUTIONS = (nnx.Conv, nnx.ConvTranspose)
FEATURES_LAST = (
    nnx.Linear, nnx.LinearGeneral, nnx.Embed, nnx.MultiHeadAttention, nnx.LayerNorm, nnx.RMSNorm,
    nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm,
)  # fmt: skip
SPACES = {1: ("position",), 2: ("height", "width"), 3: ("depth", "height", "width")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallContext:
    """The surroundings of a call.

    Attributes:
        module: the called module, None without one (for a Linen submodule).
        loops: how many scans are around the call; each adds an axis in front.
        members: whether the next axis is that of the members of an ensemble.
        mapped: how many vmaps are around it; their axes come next.
        stacked: whether the module holds the parameters of several layers or members.
        batch: the length of the batch in the arguments of the whole pass, None if unknown.
        positions: the length of the pass's only sequence, if it has no batch; None otherwise.
        spatial: whether the model has convolutions.
        attends: whether the last axis holds weights that add up to 1.
    """

    module: Value = None
    loops: int = 0
    members: bool = False
    mapped: int = 0
    stacked: bool = False
    batch: int | None = None
    positions: int | None = None
    spatial: bool = False
    attends: bool = False


def names_of_value(shape: Sequence[int], dtype: DTypeLike, context: CallContext) -> tuple[str, ...]:
    """The axes of an array that a call returns or receives, or of its gradient.

    Example:
        >>> names_of_value((8, 4, 4, 2), jnp.float32, CallContext(batch=8, spatial=True))
        ('batch', 'height', 'width', 'channel')
    """
    front = ["layer" if context.stacked else "iteration"] * context.loops
    apart = context.loops > 0 or context.members
    front += ["member"] * context.members
    front += ["batch" if apart or not context.stacked else "member"] * context.mapped
    return _distinct([*front, *_axes_of_one_call(tuple(shape[len(front) :]), dtype, context)])


def _axes_of_one_call(shape: tuple[int, ...], dtype: DTypeLike, context: CallContext) -> list[str]:
    rank, floating = len(shape), jnp.issubdtype(dtype, jnp.inexact)
    is_batch = bool(rank) and shape[0] == context.batch
    is_text = bool(rank) and shape[0] == context.positions
    first = ["batch" if is_batch else "position" if is_text else ""]
    if rank > 3 and context.attends:
        return [*first, *[""] * (rank - 4), "head", "query", "key"]
    if rank > 1 and context.attends:
        return [*["batch" if is_batch else "head"] * (rank - 2), "query", "key"]
    if isinstance(context.module, CONVOLUTIONS):
        space = len(context.module.kernel_size)
        if floating and rank > space and space in SPACES:
            lead = ["batch"] if rank == space + 2 else [""] * (rank - space - 1)
            return [*lead, *SPACES[space], "channel"]
    heads = own_attribute(context.module, "out_features")
    if isinstance(heads, tuple) and len(heads) == 2 and shape[-2:] == heads and rank >= 3:
        middle = ["position"] if rank == 4 else [""] * (rank - 3)
        return [*first, *middle, "head", "feature"]
    if context.spatial and floating and rank == 4 and is_batch:
        return ["batch", "height", "width", "channel"]
    if rank == 2 and is_batch and not floating:
        return ["batch", "position"]
    known = isinstance(context.module, FEATURES_LAST)
    if floating and rank == 2 and is_text:
        return ["position", "feature"]
    if floating and rank in (2, 3) and (is_batch or known):
        return [*first, *(["position"] if rank == 3 else []), "feature"]
    if floating and rank and known:
        return [*first * (rank > 1), *[""] * (rank - 2), "feature"]
    return [*first, *[""] * (rank - 1)] if rank else []


def names_of_parameter(
    shape: Sequence[int], name: str, module: object, *, stacked: bool = False
) -> tuple[str, ...]:
    """The axes of a Variable of one of NNX's modules; `stacked`: the module may hold layers."""
    known: list[str] = []
    if isinstance(module, CONVOLUTIONS) and name == "kernel":
        space = SPACES.get(len(module.kernel_size), ())
        known = [*(f"kernel {axis}" for axis in space), "in channel", "out channel"]
    elif isinstance(module, nnx.Linear) and name == "kernel":
        known = ["in feature", "out feature"]
    elif isinstance(module, nnx.Embed) and name == "embedding":
        known = ["token", "feature"]
    elif isinstance(module, (*CONVOLUTIONS, nnx.Linear)) and name == "bias":
        known = ["out channel" if isinstance(module, CONVOLUTIONS) else "out feature"]
    elif isinstance(module, FEATURES_LAST) and name in ("scale", "bias", "mean", "var"):
        known = ["feature"]
    more = len(shape) - len(known)
    if known and more == 1 and stacked:
        known = ["layer", *known]
    return _distinct(known if len(known) == len(shape) else [""] * len(shape))


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Distinct names: an axis without a name gets its number, a repeated name gets a count."""
    out: list[str] = []
    for number, name in enumerate(names):
        same = sum(1 for other in names[:number] if other == name)
        out.append(f"axis {number}" if not name else f"{name} {same + 1}" if same else name)
    return tuple(out)
