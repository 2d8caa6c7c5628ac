"""The message to the browser that tells a module as NNX sees it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxAttribute:
    """A static attribute of a node: part of the graphdef, hence of a compiled program's key."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxNode:
    """One node of the graphdef, under one of its paths.

    `module` is the site key where it is a module, else None. `reference` is the number that all
    paths to one object have, 0 where there is one path only. `first` is None, or the path above
    where the same object stood already: what is inside is not told again. `also` are its paths
    elsewhere in the model.
    """

    path: str
    name: str
    type: str
    depth: int
    module: str | None
    reference: int
    first: str | None
    also: tuple[str, ...]
    attributes: tuple[NnxAttribute, ...]
    attributes_total: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxChange:
    """How a Variable's value moved: `distance` is the norm of the difference, `relative` that over
    the norm of the value before; None where that says nothing (a PRNG key, a norm of 0, another
    shape). `before` and `after` are the values of a scalar, else "".
    """

    same: bool
    distance: float | None
    relative: float | None
    before: str
    after: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxVariable:
    """One leaf of the state: a Variable, or an array that is none (`type` is "").

    `path`, `module`, `reference`, `first` and `also` are as of an `NnxNode`; `module` is the
    innermost one around it. `value` is that of a scalar, else "". `committed` is None for what is
    no array on a device. `change` is between two looks at the model, `passed` what the last pass
    of the inspector changed in its own copy; None where there is nothing to compare.
    """

    path: str
    module: str
    type: str
    shape: str
    dtype: str
    bytes: int
    sharding: str
    held: Literal["array", "traced", "deleted", "shape", "reference", "other"]
    committed: bool | None
    metadata: str
    value: str
    reference: int
    first: str | None
    also: tuple[str, ...]
    change: NnxChange | None
    passed: NnxChange | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxKind:
    """All Variables of one type in a module, a shared one once."""

    type: str
    variables: int
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxMode:
    """A mode of a module. `value` is the one in force where that is True or False, else None;
    `flag` says that it takes these only, `switched` that it is not the model's own.
    """

    module: str
    type: str
    name: str
    own: str
    in_force: str
    value: bool | None
    flag: bool
    switched: bool
    documentation: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nnx:
    """The module at a site as NNX sees it, in answer to the ShowNnx with this id. Buffer: none.

    `nodes` come parents first; `variables` in the order of their paths. `since` is the step of the
    look that `change` compares with, None where there was none; `passed` is the pass of
    `NnxVariable.passed`, "run", "step" or "". `uncompared` says why Variables have no `change`.
    """

    type: ClassVar[str] = "nnx"
    version: int
    id: int
    site: str
    nodes: tuple[NnxNode, ...]
    nodes_total: int
    variables: tuple[NnxVariable, ...]
    variables_total: int
    kinds: tuple[NnxKind, ...]
    modes: tuple[NnxMode, ...]
    modes_total: int
    step: int
    since: int | None
    passed: str
    uncompared: str
