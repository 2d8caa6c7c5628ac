"""The rows of the tree: every site of a model with its facts from a trace.

Every module has a row, and so does every site that only a call reveals: a Linen submodule, a sown
value, a method other than `__call__`. Invariant: the row of a module that was not called or cannot
be seen says so. Draws nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from nnx_inspector.files import short_name
from nnx_inspector.hooks.operations.attention import PATTERN
from nnx_inspector.hooks.sites import CALL, methods, parse_key, site_key, split_operation
from nnx_inspector.hooks.variables import contents, shared_contents
from nnx_inspector.program.analysis.calls import TracedCall
from nnx_inspector.program.analysis.stacks import layers_with_rows, stacks_of
from nnx_inspector.program.analysis.trace import Trace
from nnx_inspector.recordings.tree_rows import Site, layer_key, leaf_key, leaf_of, with_states

VMAPPED = (
    "its layers or members run side by side, in a loop or a program of their own, and are measured "
    "as a whole"
)


def add_layer_rows(
    sites: Sequence[Site], stacks: Mapping[str, int], unseen: Mapping[str, str]
) -> tuple[Site, ...]:
    """These rows, followed by those of single layers.

    `sites` are the rows of whole sites, parents first; `unseen` maps a layer's key to why it cannot
    be seen.
    """
    shown = layers_with_rows(stacks)
    rows = [dataclasses.replace(s, note=_note(s, stacks, shown)) for s in sites]
    first: dict[int, int] = {}  # the row of a stacked site -> the row of its first layer
    for index, site in enumerate(sites):
        whole = leaf_of(site.key)[0]
        count = shown.get(whole, 0)
        if not count:
            continue
        above = _stack_around(sites, index, stacks)
        first[index] = len(rows)
        for layer in range(count):
            parent = index if above is None else first[above] + layer
            rows.append(
                dataclasses.replace(
                    site,
                    key=layer_key(site.key, layer),
                    name=f"[{layer}]" if above is None else _name_below(sites, index, above),
                    parent=parent,
                    depth=rows[parent].depth + 1,
                    parameters=site.parameters // stacks[whole],
                    flops=None if site.flops is None else site.flops / stacks[whole],
                    stacked=0,
                    aliases=tuple(layer_key(alias, layer) for alias in site.aliases),
                    unseen=unseen.get(layer_key(whole, layer), site.unseen),
                    layer=layer,
                )
            )
    return tuple(rows)


def _note(site: Site, stacks: Mapping[str, int], shown: Mapping[str, int]) -> str:
    whole, _ = leaf_of(site.key)
    count, most = stacks.get(whole, 0), shown.get(whole, 0)
    if count > most:
        if most:
            return f"Only the first {most} of {count} layers have rows of their own."
        return f"None of its {count} layers has a row of its own: too many modules are stacked."
    return f"It is stacked: {VMAPPED}." if site.stacked > 1 and not count else ""


def _stack_around(sites: Sequence[Site], index: int, stacks: Mapping[str, int]) -> int | None:
    """The row of the nearest enclosing module with the same number of layers."""
    count, at = stacks[leaf_of(sites[index].key)[0]], sites[index].parent
    while at >= 0 and stacks.get(sites[at].key) != count:
        at = sites[at].parent
    return at if at >= 0 else None


def _name_below(sites: Sequence[Site], index: int, above: int) -> str:
    names: list[str] = []
    while index != above:
        names.append(sites[index].name)
        index = sites[index].parent
    return "/".join(reversed(names))


NAMED_VALUE = "named value"
"""The kind of an operation that a function computes, or that the user has named."""
_Segments = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _RowSite:
    """The site of a row.

    Attributes:
        segments: its path in the tree; a method other than `__call__` is below its module.
        kind: the name of the module's class, or of the Variable's for a sown value.
        aliases: its other keys.
        callable: whether it can be called at all.
    """

    key: str
    segments: _Segments
    kind: str
    parameters: int
    aliases: tuple[str, ...] = ()
    callable: bool = True


def rows_of(
    trace: Trace, *, unseen: Mapping[str, str], states: Mapping[str, str] | None = None
) -> tuple[Site, ...]:
    """The rows of a model, parents first; layers of stacked modules follow after all others, and
    then the arrays of optimizers.

    Args:
        trace: the calls of the model.
        unseen: the sites that a running program cannot show, with the reason.
        states: the dtype and shape of each array of an optimizer, by its key.
    """
    calls: dict[str, list[TracedCall]] = {}
    for call in trace.calls:
        calls.setdefault(call.site, []).append(call)
    places = _in_call_order(trace, _row_sites(trace))
    known: dict[_Segments, int] = {}
    why = {**trace.unseen, **unseen}
    rows: list[Site] = []
    for place in places:
        of, known[place.segments] = calls.get(place.key, []), len(rows)
        rows.append(_row(place, of, known, why, rows))
        rows += _array_rows(rows[-1], len(rows) - 1, of)
    return with_states(add_layer_rows(rows, stacks_of(trace), unseen), states or {}, unseen)


def _row_sites(trace: Trace) -> list[_RowSite]:
    with shared_contents(tuple(site.module for site in trace.modules)):
        found = {
            site.key: _RowSite(
                site.key,
                parse_key(site.key)[0],
                type(site.module).__name__,
                contents(site.module).parameter_sizes()[0],
                tuple(site_key(alias) for alias in site.aliases),
                CALL in methods(type(site.module)),
            )
            for site in trace.modules
        }
    for call in trace.calls:
        if call.site not in found:
            path, method = parse_key(call.site)
            segments = path if method == CALL else (*path, *_segments_below(site_key((), method)))
            kind = (
                NAMED_VALUE if call.type == "name" and split_operation(call.site)[1] else call.type
            )
            found[call.site] = _RowSite(call.site, segments, kind, call.parameters)
    return list(found.values())


def _segments_below(method: str) -> _Segments:
    """The rows of a method or an operation below its module's: `@softmax.exp` is in `@softmax`."""
    called, operation = split_operation(method)
    within = [part for part in operation.split(".") if part]
    return (called + ".".join(within[:1]), *(f".{part}" for part in within[1:]))


@dataclasses.dataclass
class _Branch:
    """What begins with some segments: the places there and below, and the first call of one."""

    reached: int
    position: int = 0
    places: list[_RowSite] = dataclasses.field(default_factory=lambda: [])
    below: list[_Branch] = dataclasses.field(default_factory=lambda: [])

    @property
    def order(self) -> tuple[bool, int, int]:
        """Its place among siblings, primitives last: rotary angles alone have twenty."""
        names = [split_operation(place.key)[1].split("[")[0] for place in self.places]
        kinds = [f"@{place.kind}" for place in self.places if place.kind != PATTERN]
        return names == kinds != [], self.reached, self.position


def _in_call_order(trace: Trace, places: Sequence[_RowSite]) -> list[_RowSite]:
    """The places with parents before children, and siblings in the order of their calls, primitives
    last.

    The order of attributes is meaningless, because an NNX transform sorts those it updates by name.
    """
    first: dict[str, int] = {}
    for number, call in enumerate(trace.calls):
        first.setdefault(call.site, number)
    never = len(trace.calls)
    branches: dict[_Segments, _Branch] = {(): _Branch(never)}
    for position, place in enumerate(places):
        path, new = place.segments, list[_Segments]()
        while path not in branches:
            new.append(path)
            path = path[:-1]
        for longer in reversed(new):
            branch = branches[longer] = _Branch(never)
            branches[longer[:-1]].below.append(branch)
        branch = branches[place.segments]
        branch.reached = min(branch.reached, first.get(place.key, never))
        branch.position = position
        branch.places.append(place)
    for path, branch in reversed(branches.items()):  # those below a branch are made after it
        above = branches[path[:-1]]
        above.reached = min(above.reached, branch.reached)
    found: list[_RowSite] = []
    open_ = [branches[()]]  # not by recursion: a model may be as deep as Python's stack
    while open_:
        branch = open_.pop()
        found += branch.places
        open_ += sorted(branch.below, key=lambda b: b.order)[::-1]
    return found


def _row(
    place: _RowSite,
    calls: Sequence[TracedCall],
    known: Mapping[_Segments, int],
    unseen: Mapping[str, str],
    before: Sequence[Site],
) -> Site:
    parent, start = _parent(place.segments, known)
    first = calls[0] if calls else None
    reason = unseen.get(place.key, "")
    if not reason and first is None and place.callable:
        reason = "it is not called by the example"
    flops = [c.flops for c in calls]
    name = "/".join(place.segments[start:])
    if split_operation(place.key)[1]:  # `@mix.mul` is one name if `@mix` has no row
        name = name.replace("/.", ".")
    return Site(
        key=place.key,
        name=name or place.kind,
        kind=place.kind,
        parent=parent,
        depth=0 if parent < 0 else before[parent].depth + 1,
        inputs=first.inputs if first else "",
        output=first.output if first else "",
        parameters=place.parameters,
        flops=None if not calls or None in flops else float(sum(f for f in flops if f is not None)),
        calls=len(calls),
        stacked=first.stacked if first else 0,
        aliases=place.aliases,
        source=_short_source(first.source) if first else "",
        perturbable=first is not None and "[" in first.output,
        unseen=reason,
        array=next((call.arrays[0][0] for call in calls if call.arrays), ""),
        counted=bool(calls) and all(call.counted for call in calls),
    )


def _array_rows(row: Site, at: int, calls: Sequence[TracedCall]) -> list[Site]:
    """The rows below a site's, of all arrays that its calls return but the main one."""
    types: dict[str, str] = {}
    for call in calls:
        for name, text in call.arrays[1:]:
            types.setdefault(name, text)
    return [
        dataclasses.replace(
            row,
            key=leaf_key(row.key, name),
            name=f"({name})",
            kind="array",
            parent=at,
            depth=row.depth + 1,
            output=text,
            parameters=0,
            flops=None,
            stacked=0,
            aliases=tuple(leaf_key(alias, name) for alias in row.aliases),
            perturbable=False,
            array=name,
            single=True,
            counted=False,
        )
        for name, text in types.items()
    ]


def _parent(segments: _Segments, known: Mapping[_Segments, int]) -> tuple[int, int]:
    """The row of the nearest site above and the length of its path; (-1, 0) for the root."""
    for end in range(len(segments) - 1, -1, -1):
        if segments[:end] in known:
            return known[segments[:end]], end
    return -1, 0


def _short_source(source: str) -> str:
    file, _, line = source.rpartition(":")
    short = short_name(file)
    return (
        f"{short}, line {line}" if short == "notebook cell" else f"{short}:{line}" if file else ""
    )
