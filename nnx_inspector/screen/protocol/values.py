"""Messages to the browser with the arrays of a site."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from nnx_inspector.screen.protocol.terms import Component, ValuePart


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldArray:
    """One array that can be read: `number` names it in `ReadValues`, `call` counts the calls of
    the site, `name` tells it from the others of its call ("" where it is alone).
    """

    number: int
    call: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays:
    """What `ShowValues` opened: the arrays of a part of a site. `parts` are those there are of the
    site; `perturbed` says that something is perturbed in this pass; `source` says in words which
    pass and which parameters these are, `notes` what else a person should know.
    """

    type: ClassVar[str] = "arrays"
    version: int
    request: int
    site: str
    part: ValuePart
    clean: bool
    parts: tuple[str, ...]
    arrays: tuple[HeldArray, ...]
    perturbed: bool
    source: str
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    """What `ReadValues` asked for: a window of an array in blocks. Buffer: for each of `planes` an
    array [tiles, rows, columns] of `encoding`, each padded to a multiple of 8 bytes.

    With blocks of one element the plane is "value" (for exact values of complex numbers "real" and
    "imag"). Otherwise "mean", "low" and "high" of the finite values of each block (NaN where there
    are none) and, where any value is not finite, "nan", "posinf" and "neginf": how many of each
    block are. `starts` and `ends` are of tiles, rows and columns, in elements; `block` likewise.
    """

    type: ClassVar[str] = "values"
    version: int
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
