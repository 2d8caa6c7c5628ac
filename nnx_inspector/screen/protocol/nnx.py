"""The message to the browser that describes a module as NNX sees it."""

from __future__ import annotations

from typing import Literal

from nnx_inspector.screen.protocol.headers import Struct, ToBrowser


class NnxAttribute(Struct):
    """A static attribute of a node. It is part of the graphdef, hence of a program's cache key."""

    name: str
    text: str


class NnxNode(Struct):
    """One node of the graphdef, under one of its paths.

    `module` is the site key of a module, None for other nodes. `reference` is a number shared by
    all paths to one object, 0 if there is only one path. `first` is the path of an earlier node
    with the same object, whose content is not repeated, or None. `also` lists its paths elsewhere
    in the model.
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


class NnxChange(Struct):
    """The change of a Variable's value. `distance` is the norm of the difference, `relative` its
    ratio to the norm of the value before; None if undefined (a PRNG key, a norm of 0, another
    shape). `before` and `after` are the values of a scalar, else "".
    """

    same: bool
    distance: float | None
    relative: float | None
    before: str
    after: str


class NnxVariable(Struct):
    """One leaf of the state: a Variable, or a plain array (`type` is "").

    `path`, `reference`, `first` and `also` are as in `NnxNode`; `module` is the innermost module
    around the leaf. `value` is the value of a scalar, else "". `committed` is None if no array on a
    device is held. `change` is the change between two looks at the model, `passed` the change that
    the inspector's last pass made in its own copy; None if there is nothing to compare.
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


class NnxKind(Struct):
    """The Variables of one type in a module; a shared Variable counts once."""

    type: str
    variables: int
    elements: int
    bytes: int


class NnxMode(Struct):
    """A mode of a module. `value` is the value in force if that is True or False, else None;
    `flag`: it can only be True or False; `switched`: the value is not the model's own.
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


class Nnx(ToBrowser, type="nnx"):
    """The module at a site as NNX sees it, in answer to the ShowNnx with this id. Buffer: none.

    `nodes` have parents first; `variables` are in the order of their paths. `since` is the step of
    the look that `change` compares with, None without one; `passed` is the kind of pass behind
    `NnxVariable.passed`: "run", "step" or "". `uncompared` says why Variables have no `change`.
    """

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
