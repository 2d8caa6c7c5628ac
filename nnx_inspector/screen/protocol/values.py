"""Messages to the browser with the arrays of a site."""

from __future__ import annotations

from typing import Literal

from nnx_inspector.screen.protocol.constants import Component, ValuePart
from nnx_inspector.screen.protocol.headers import Struct, ToBrowser


class HeldArray(Struct):
    """One array that can be read. `number` names it in `ReadValues`, `call` counts the calls of the
    site, and `name` distinguishes the arrays of one call ("" for a single array).
    """

    number: int
    call: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    bytes: int


class Arrays(ToBrowser, type="arrays"):
    """The arrays of a part of a site, which `ShowValues` opened. `parts` are the parts that the
    site has; `perturbed`: a perturbation is on in this pass; `source` names the pass and the
    parameters in words; `notes` are further notes for the user.
    """

    request: int
    site: str
    part: ValuePart
    clean: bool
    parts: tuple[str, ...]
    arrays: tuple[HeldArray, ...]
    perturbed: bool
    source: str
    notes: tuple[str, ...]


class Values(ToBrowser, type="values"):
    """A window of an array in blocks, in answer to `ReadValues`. Buffer: for each of `planes` an
    array [tiles, rows, columns] of `encoding`, each padded to a multiple of 8 bytes.

    Blocks of one element have the plane "value" (for exact complex values "real" and "imag").
    Others have "mean", "low" and "high" of their finite values (NaN if there are none) and, if any
    value is not finite, "nan", "posinf" and "neginf", which count such values in each block.
    `starts`, `ends` and `block` are for tiles, rows and columns, in elements.
    """

    request: int
    array: int
    index: tuple[int, ...]
    axes: tuple[int, ...]
    norm_over: int
    component: Component
    exact: bool
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    block: tuple[int, ...]
    counts: tuple[int, ...]
    planes: tuple[str, ...]
    encoding: Literal["float32", "float64", "int64", "uint64"]
