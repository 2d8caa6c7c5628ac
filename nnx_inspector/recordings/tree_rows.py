"""The rows of a model's tree, with layers and arrays: `"blocks[3]"` is a layer of `"blocks"`.

Outputs of unlike kind stay apart. Of a call that returns several arrays one, the main array, has
the site's own key, so that whoever reads `"cell"` reads one array, whatever the module returns; see
`program.structure` for which. Each other one has a key with its name in the tree: `"cell(0.1)"`,
`"head(logits)"`, and with a layer `"blocks/attn[3](1)"`. Such a key is a site like any other: in a
pass, a file and a comparison, and as a row on screen. Paths escape the parentheses, so that no
module has such a key. Arrays that a method receives are named in the same way, by parameter. Calls
of unlike structure are merged by name.

Invariant: the figures of a scan's iterations are assigned to layers only if they correspond one to
one; otherwise only the whole stack has figures, and a reason is given. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from nnx_inspector.stats.summary import Summary, merge

MOST_LAYERS: Final = 256
"""The most layers of one stack that have sites of their own, counted from the first."""
MOST_LAYER_ROWS: Final = 2048
"""The most layers with sites of their own in all stacked sites of a model."""

LAYERS_UNKNOWN: Final = (
    "in the watched program no scan runs over its layers within a call of the model, so "
    "only the whole stack is measured; insp.run and insp.step measure each layer"
)

_LEAF: Final = re.compile(r"((?:[^\\(]|\\.)*)\(((?:[^\\()]|\\.)+)\)", re.DOTALL)
_LAYER: Final = re.compile(r"((?:[^\\@]|\\.)*?)\[(\d+)\](@.*)?", re.DOTALL)
_RESERVED, _ESCAPED = r"([\\/:\[@()])", r"\\\1"
_OPERATION: Final = re.compile(r"((?:[^\\@]|\\.)*)(@.*)?", re.DOTALL)

PARAMETER_QUANTITIES: Final = ("parameter", "parameter_gradient")
"""The quantities of a pass that are measured of parameters, under their paths."""
STATE: Final[Literal["state"]] = "state"
"""The quantity that is measured of an optimizer's arrays; their keys begin with `OPTIMIZER`."""
OPTIMIZER: Final = "optimizer"
QUANTITIES_NOT_OF_SITES: Final = (*PARAMETER_QUANTITIES, STATE)
"""The quantities that are not of sites."""

Summaries = dict[str, dict[str, Summary]]
"""Site -> quantity -> summary."""


def leaf_key(site: str, leaf: str) -> str:
    """The key of one of several arrays; of the main one, whose name is "", the site's own."""
    return f"{site}({re.sub(_RESERVED, _ESCAPED, leaf)})" if leaf else site


def leaf_of(key: str) -> tuple[str, str]:
    """The site, or the layer, and the name of the array in a key; "" for the main one.

    Example:
        >>> leaf_of("cell(0.1)"), leaf_of("cell")
        (('cell', '0.1'), ('cell', ''))
    """
    found = _LEAF.fullmatch(key) if key.endswith(")") else None
    return (key, "") if found is None else (found[1], re.sub(r"\\(.)", r"\1", found[2]))


def site_of_parameter(path: str, sites: Container[str]) -> str | None:
    """The site that holds a parameter itself: the nearest one above it, or of one layer of a stack,
    the same layer of that; None if there is none.

    Example:
        >>> site_of_parameter("blocks/0/up/kernel", ["", "blocks/0/up"])
        'blocks/0/up'
        >>> site_of_parameter("up/w[3]", ["up[3]"])
        'up[3]'
    """
    layer = layer_of(path)
    if layer is None:
        return next((site for site, _ in _parents(path) if site in sites), None)
    above = (layer_key(site, layer[1]) for site, _ in _parents(layer[0]))
    return next((site for site in above if site in sites), None)


def name_below(path: str, site: str) -> str:
    """The name of a parameter below the site that holds it.

    Example:
        >>> name_below("blocks/0/up/kernel", "blocks/0/up"), name_below("up/w[3]", "up[3]")
        ('kernel', 'w')
    """
    path, site = ((layer_of(key) or (key,))[0] for key in (path, site))
    return re.sub(r"\\(.)", r"\1", path[len(site) :].removeprefix("/"))


@functools.lru_cache(maxsize=16)  # the passes of a recording have the same names
def row_numbers(names: tuple[str, ...]) -> Mapping[str, int]:
    """Name -> its number among some."""
    return {name: number for number, name in enumerate(names)}


def layer_key(site: str, layer: int) -> str:
    """The key of one layer of a stacked site: `"blocks[3]"`, `"blocks[3]@softmax"`."""
    site, leaf = leaf_of(site)
    found = _OPERATION.fullmatch(site)
    key = f"{site}[{layer}]" if found is None else f"{found[1]}[{layer}]{found[2] or ''}"
    return leaf_key(key, leaf)


def layer_of(key: str) -> tuple[str, int] | None:
    """The stacked site and the layer's number in a layer's key; None for another site's key.

    Example:
        >>> layer_of("blocks/attn[3]"), layer_of("blocks")
        (('blocks/attn', 3), None)
    """
    site, leaf = leaf_of(key)
    found = _LAYER.fullmatch(site)
    if found is None:
        return None
    return leaf_key(found[1] + (found[3] or ""), leaf), int(found[2])


@dataclasses.dataclass(frozen=True)
class Stack:
    """The layers of one site, over which its outermost scan runs.

    Attributes:
        layers: how many of them, counted from the first, have sites of their own.
        length: the number of them all.
    """

    layers: int
    length: int

    def has_rows_in(self, shape: Sequence[int]) -> bool:
        """Whether something with these rows has one for each layer."""
        return tuple(shape[:1]) == (self.length,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """One row of the tree. `parent` is the index of another row, -1 for the root.

    `layer` is the number of a single layer of a stacked module, -1 for a whole site. `note` says
    what the row leaves out; "" if nothing. `array` is the name of the array whose statistics the
    row shows, if the call returns several; "" if it returns one. The others have rows of their own
    (`single`). What follows is of the last `insp.profile`, None if it is not known: the time of the
    module with those in it, what it keeps for the backward pass, and the share of the FLOPs that
    are possible. `counted` is whether its figures are only of those positions that `where=` says.
    """

    key: str
    name: str
    kind: str
    parent: int
    depth: int
    inputs: str
    output: str
    parameters: int
    flops: float | None
    calls: int
    stacked: int
    aliases: tuple[str, ...]
    source: str
    perturbable: bool
    unseen: str
    layer: int = -1
    note: str = ""
    array: str = ""
    single: bool = False
    step_ms: float | None = None
    kept_bytes: float | None = None
    of_possible: float | None = None
    counted: bool = False


MODULES: Final = "modules"
"""The title of the table of a recording that holds the rows."""


def columns_of_rows(rows: Sequence[Site]) -> dict[str, np.ndarray]:
    """The rows as a table: text, int64, float64 (NaN: unknown); aliases are JSON."""
    found: dict[str, np.ndarray] = {}
    for field in dataclasses.fields(Site):
        values = [getattr(row, field.name) for row in rows]
        if field.type == "float | None":
            found[field.name] = np.array([np.nan if x is None else x for x in values], np.float64)
        elif field.name == "aliases":
            found[field.name] = np.array([json.dumps(x) if x else "" for x in values], object)
        else:
            number = field.type in ("int", "bool")
            found[field.name] = np.array(values, np.int64 if number else object)
    return found


def rows_of_columns(columns: Mapping[str, np.ndarray]) -> tuple[Site, ...]:
    """The rows of which `columns_of_rows` made a table, which may come from anybody.

    Raises:
        ValueError, TypeError, OverflowError, RecursionError: these are not the columns of rows, or
            a parent does not precede its row.
    """
    every = dataclasses.fields(Site)
    needed = {field.name for field in every if field.default is dataclasses.MISSING}
    if missing := needed - columns.keys():
        raise ValueError(f"The table of modules lacks {', '.join(sorted(missing))}.")
    fields = {field.name: str(field.type) for field in every if field.name in columns}
    read = {"int": int, "bool": bool, "str": str, "float | None": _known, "tuple[str, ...]": _texts}
    lists = {name: [read[kind](x) for x in columns[name].tolist()] for name, kind in fields.items()}
    rows = tuple(
        Site(**dict(zip(lists, one, strict=True))) for one in zip(*lists.values(), strict=True)
    )
    for at, row in enumerate(rows):
        above = rows[row.parent].depth if 0 <= row.parent < at else -1
        if not -1 <= row.parent < at or row.depth != above + 1:
            raise ValueError(f"The row {row.key!r} of the table of modules has no parent above it.")
    return rows


def with_recorded(
    rows: Sequence[Site], keys: Iterable[str], types: Mapping[str, str]
) -> tuple[Site, ...]:
    """These rows, and one for each other key below the nearest row above it; the root is the first.

    Args:
        rows: the rows that are known, parents first; there may be none.
        keys: the sites that were recorded.
        types: the types of modules, by site.
    """
    found = list(rows) or [_plain_row("", types.get("", ""), "", -1, 0)]
    known = {row.key: at for at, row in enumerate(found)}
    # modules before their layers, and both before the arrays that they return
    rank = {
        key: (leaf_of(key)[1] != "", layer_of(key) is not None, len(_parents(key)))
        for key in keys
        if key not in known
    }
    for key in sorted(rank, key=lambda key: rank[key]):
        above, name = next((up, name) for up, name in _parents(key) if up in known)
        kind = "array" if leaf_of(key)[1] else types.get(key, "")
        known[key] = len(found)
        found.append(_plain_row(key, kind, name, known[above], found[known[above]].depth + 1))
    return tuple(found)


def with_states(
    rows: Sequence[Site], states: Mapping[str, str], unseen: Mapping[str, str] | None = None
) -> tuple[Site, ...]:
    """These rows, and one for each array of optimizers, by its key and type, below a row for each
    kind of state; `unseen` says why one cannot be read.
    """
    if not states:
        return tuple(rows)
    groups = {key.split("/", 2)[1]: None for key in states if key.count("/") > 1}
    kinds = {OPTIMIZER: OPTIMIZER} | dict.fromkeys((f"{OPTIMIZER}/{g}" for g in groups), STATE)
    keys = {**kinds, **dict.fromkeys(states, STATE)}
    known = {row.key for row in rows}
    found: list[Site] = []
    for row in with_recorded(rows, keys, keys):
        if row.key in keys and row.key not in known:
            why = (unseen or {}).get(row.key, "")
            row = dataclasses.replace(row, output=states.get(row.key, ""), single=True, unseen=why)
        found.append(row)
    return tuple(found)


def _plain_row(key: str, kind: str, name: str, parent: int, depth: int) -> Site:
    layer, leaf = layer_of(key), leaf_of(key)[1]
    nothing: Any = {"inputs": "", "output": "", "flops": None, "aliases": (), "source": ""}
    return Site(
        key=key,
        name=name or kind or "model",
        kind=kind,
        parent=parent,
        depth=depth,
        parameters=0,
        calls=1,
        stacked=0,
        perturbable=False,
        unseen="",
        layer=-1 if layer is None else layer[1],
        array=leaf,
        single=bool(leaf),
        **nothing,
    )


_SEGMENT: Final = re.compile(r"[/:@]?((?:[^\\/:@]|\\.)+)", re.DOTALL)


def _parents(key: str) -> list[tuple[str, str]]:
    """The keys that may be above this one, the nearest first, each with its name below that one."""
    whole, leaf = leaf_of(key)
    if leaf:
        return [(whole, f"({leaf})"), *((up, f"{n}({leaf})") for up, n in _parents(whole))]
    layer = layer_of(whole)
    path = whole if layer is None else layer[0]
    names = [(path[: one.start()], path[one.start() :]) for one in _SEGMENT.finditer(path)][::-1]
    plain = [(up, re.sub(r"\\(.)", r"\1", name.removeprefix("/"))) for up, name in names]
    if layer is None:
        return plain
    below = [(layer_key(up, layer[1]), name) for up, name in plain if up]
    return [*below, (path, f"[{layer[1]}]"), *((up, f"{name}[{layer[1]}]") for up, name in plain)]


def _known(number: float) -> float | None:
    return None if np.isnan(number) else float(number)


def _texts(aliases: Any) -> tuple[str, ...]:
    return tuple(map(str, json.loads(aliases))) if aliases else ()


def layers_of_stacks(
    measured: Mapping[tuple[str, str], Sequence[Summary]], stacks: Mapping[str, Stack]
) -> tuple[Summaries, set[str]]:
    """The summaries of single layers, and the sites whose layers cannot be told apart.

    Args:
        measured: (site, quantity) -> the summaries of calls, with a row for each iteration.
    """
    parts: dict[tuple[str, str], list[Summary]] = {}
    unknown: set[str] = set()
    for (site, quantity), found in measured.items():
        whole, of_parameter = leaf_of(site)[0], quantity in PARAMETER_QUANTITIES
        stack = stacks.get((site_of_parameter(site, stacks) or "") if of_parameter else whole)
        if stack is None:
            continue
        apart = [summary for summary in found if stack.has_rows_in(summary.rows)]
        if len(apart) < len(found) and not of_parameter:
            unknown.add(whole)
            continue
        for layer in range(stack.layers):
            rows = (summary.row(layer) for summary in apart)
            # a layer that no cotangent reached has an empty row
            graded = quantity in ("gradient", "parameter_gradient")
            reached = [row for row in rows if not graded or np.any(row.bins)]
            parts.setdefault((layer_key(site, layer), quantity), []).extend(reached)
    out: Summaries = {}
    for (key, quantity), summaries in sorted(parts.items(), key=lambda item: _rank(item[0][0])):
        site, _ = layer_of(key) or ("", 0)
        if leaf_of(site)[0] not in unknown and summaries:
            out.setdefault(key, {})[quantity] = merged_summary(summaries)
    return out, unknown


def merged_summary(summaries: Sequence[Summary]) -> Summary:
    """One summary of all. A single summary is returned as it is, with its rows unmerged."""
    return summaries[0] if len(summaries) == 1 else merge(summaries)


def _rank(key: str) -> tuple[str, int]:
    return layer_of(key) or (key, -1)
