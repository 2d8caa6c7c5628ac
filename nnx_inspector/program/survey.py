"""Finds the marks in a traced function, through every equation that can be entered.

Invariant: a mark that cannot be taken out is listed with a reason, never guessed. Runs nothing;
`instrument` edits the program.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from nnx_inspector._compat import eqn_params, jaxprs
from nnx_inspector.program.analysis.equations import CUSTOM, bodies_of, kind_of
from nnx_inspector.program.analysis.identity import Values
from nnx_inspector.program.changes import ChangedVariable, is_unmeasurable
from nnx_inspector.program.marks import (
    BEGIN,
    CHOICE,
    GRADIENT,
    INPUT,
    OUTPUT,
    POSITIONS,
    launch_input,
    mark,
    marked_count,
    mask_vmaps,
    position_mask,
)
from nnx_inspector.program.members import Members
from nnx_inspector.program.structure import Structure
from nnx_inspector.stats.summarize import type_text
from nnx_inspector.typing import Aval, Equation, Function, OpenJaxpr, Owner, PyTree, Value

UNATTRIBUTED = "unattributed"
"""The part of a mark on a call that only looks like the model's; its site is the type's name."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """One mark in a jaxpr: the site, the part of the call, and the arrays it holds.

    `variable` describes the Variable of a mark of a change. `mapped` holds for each array the axes
    that vmaps added, the innermost vmap first. In a call of an ensemble's members, `members` is
    their number, and `member_axes` holds for each array the axis of the members, None if they share
    it; `avals` and `mapped` then belong to one member. `of` is the number of the call, and says
    of which array a gradient is; an `inner` gradient is differentiated again by the program.
    `begun` is what is known of a call that begins, whose `moved` operands the program is
    differentiated by. `reached` says what perturbs the values, and `choice` measures a softmax.
    `counted` says for each array whether only the positions of a mask count, which has the shape
    `where`; () without one.
    """

    site: str
    part: str
    structure: Structure
    avals: tuple[Aval, ...]
    variable: ChangedVariable | None = None
    mapped: tuple[tuple[int, ...], ...] = ()
    members: int = 0
    member_axes: tuple[int | None, ...] = ()
    of: Any = None
    inner: bool = False
    begun: Any = None
    moved: tuple[int, ...] = ()
    reached: frozenset[Value] = frozenset()
    choice: Function | None = None
    where: tuple[int, ...] = ()
    counted: tuple[bool, ...] = ()

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return tuple(jnp.issubdtype(a.dtype, jnp.inexact) for a in self.avals)

    def rows(self, around: Enclosing) -> tuple[int, ...]:
        """The lengths of the row axes, outermost first: scans (negative in reverse), members."""
        members = (self.members,) if self.members else ()
        return (*(item.length for item in around if item.kind == "scan"), *members)


@dataclasses.dataclass(frozen=True)
class Item:
    """One equation that holds marks: the mark itself, or an equation with jaxprs inside.

    Attributes:
        kind: "mark", "choice", "launch_input", "position_mask" or "positions" (see
            `position_masks`), or the kind of the equation, see `equations.kind_of`.
        children: the surveys of its jaxprs; that of a while loop's condition has no items.
        length: the number of iterations of a scan, negative for a reversed one; of a given value,
            how many scans it depends on.
        call: the number of the call that a value is given to.
        again: it is the second pass of a remat: perturbed like the first, and not measured again.
    """

    kind: str
    mark: Mark | None = None
    children: tuple[Survey, ...] = ()
    length: int = 1
    again: bool = False
    call: Value = None


@dataclasses.dataclass(frozen=True)
class Survey:
    """A jaxpr and its equations that hold marks, by their number.

    Attributes:
        unseen: the sites whose marks cannot be taken out, each with the reason.
        unattributed: by type of module, how many calls look like the model's but are not.
    """

    jaxpr: OpenJaxpr
    consts: tuple[Value, ...]
    items: Mapping[int, Item]
    unseen: Mapping[str, str]
    unattributed: Mapping[str, int]

    def walk(self, *results: Value, around: Enclosing = ()) -> Iterator[tuple[PyTree, ...]]:
        """Each mark in the order of the program, loop bodies once: `(mark, around, *results)`.

        Args:
            results: trees nested as by `map_marks`, each with an entry for every mark. An empty
                part of a tree gives None for its marks, for instance where `evaluate` saw nothing.
            around: the equations that enclose this survey, outermost first.
        """
        for number, item in enumerate(self.items.values()):
            here = [result[number] if result else None for result in results]
            if item.mark is not None:
                yield item.mark, around, *here
            for i, child in enumerate(item.children):
                inner = [result[i] if result else None for result in here]
                yield from child.walk(*inner, around=(*around, item))

    def map_marks(
        self, make: Callable[[Mark, Enclosing], PyTree], around: Enclosing = ()
    ) -> list[Value]:
        """`make(mark, around)` for each mark, nested like the survey."""
        return [
            [child.map_marks(make, (*around, item)) for child in item.children]
            if item.mark is None
            else make(item.mark, around)
            for item in self.items.values()
        ]

    def only(self, keeps: Callable[[Mark], bool]) -> Survey:
        """The survey without the marks that are not kept."""
        items: dict[int, Item] = {}
        for number, item in self.items.items():
            children = tuple(child.only(keeps) for child in item.children)
            holds = not children or any(c.items for c in children)
            if holds if item.mark is None else keeps(item.mark):
                items[number] = dataclasses.replace(item, children=children)
        return dataclasses.replace(self, items=items)

    @property
    def takes_rows(self) -> bool:
        """Whether a value is given to some iterations of a scan only."""
        items = self.items.values()
        of_given = any(item.kind == "launch_input" and item.length for item in items)
        return of_given or any(child.takes_rows for item in items for child in item.children)

    @property
    def begins(self) -> bool:
        """Whether a pass begins inside."""
        return any(one.part == BEGIN for one in self.marks)

    @property
    def marks(self) -> list[Mark]:
        return [mark for mark, _ in self.walk()]


Enclosing = tuple[Item, ...]
"""The enclosing equations of a mark, outermost first."""


def why_divided(mark: Mark, around: Enclosing) -> str:
    """Why the arrays of a mark are not whole in its program, as a clause; "" if they are."""
    if not any(item.kind == "shard_map" for item in around):
        return ""
    parts = ", ".join(type_text(aval.dtype, aval.shape) for aval in mark.avals)
    return (
        f"it is called within jax.shard_map, where each device has only a part of the array "
        f"({parts})"
    )


def survey(jaxpr: object, owner: object, *, loops: bool = False, finished: bool = False) -> Survey:
    """Find an owner's marks in a jaxpr, in order, through every equation that can be entered.

    Marks and launch inputs of other owners count as ordinary equations; None stands for all owners.
    `loops` says that it is the body of a loop; `finished`, that nothing differentiates the program
    or maps it any more: then a call with a rule of its own for that can be entered.
    """
    bare, consts = jaxprs.open_jaxpr(jaxpr)
    items: dict[int, Item] = {}
    unseen: dict[str, str] = {}
    unattributed: dict[str, int] = {}
    values = Values(bare)
    for number, equation in enumerate(bare.eqns):
        item = item_of(equation, owner, unseen, unattributed, loops=loops, finished=finished)
        if item is not None and not is_unmeasurable(equation, values.same):
            items[number] = item
    return Survey(bare, tuple(consts), items, unseen, unattributed)


_holds_marks: weakref.WeakKeyDictionary[object, dict[Owner, bool]] = weakref.WeakKeyDictionary()


def calls_with_inputs(found: Survey) -> Iterator[int]:
    """The numbers of the calls that values are given to, in order."""
    for item in found.items.values():
        if item.kind == "launch_input":
            yield item.call
        for child in item.children:
            yield from calls_with_inputs(child)


def holds_marks(jaxpr: object, owner: object = None) -> bool:
    """Whether a jaxpr, or one inside it, holds marks or launch inputs of an owner, or of any; also
    where they cannot be taken out.
    """
    known = _holds_marks.setdefault(jaxpr, {})
    if owner not in known:
        known[owner] = any(_is_owned(one, owner) for one in jaxprs.open_jaxpr(jaxpr)[0].eqns)
    return known[owner]


def _is_owned(equation: Equation, owner: object) -> bool:
    if equation.primitive is mark or equation.primitive is launch_input:
        params = equation.params
        mine = params["owner"] if equation.primitive is mark else params["place"][0]
        return owner is None or mine == owner
    return any(holds_marks(inner, owner) for inner in jaxprs.sub_jaxprs(equation))


def item_of(
    equation: Equation,
    owner: object,
    unseen: dict[str, str],
    unattributed: dict[str, int],
    *,
    loops: bool = False,
    finished: bool = False,
) -> Item | None:
    """The survey's entry for one equation, or None. Adds to `unseen` and `unattributed`."""
    params, name = equation.params, equation.primitive.name
    if equation.primitive is launch_input:
        if not finished or (owner is not None and params["place"][0] != owner):
            return None
        return Item("launch_input", length=len(params.get("rows", ())), call=params.get("call"))
    if equation.primitive is position_mask:
        return Item("position_mask") if owner is None or params["owner"] == owner else None
    if equation.primitive is mark:
        others = owner is not None and params["owner"] != owner
        if others or (params["part"] == BEGIN and not (finished and "begun" in params)):
            return None
        if params["part"] == POSITIONS:
            return Item("positions")
        if params["part"] == UNATTRIBUTED:
            unattributed[params["site"]] = unattributed.get(params["site"], 0) + 1
            return None
        avals = tuple(v.aval for v in equation.invars[: marked_count(params, equation.invars)])
        where, axes = params.get("where", ()), params.get("mapped", ((),) * len(avals))
        counted = tuple(
            mask_vmaps(where, x, n) is not None for x, n in zip(avals, axes, strict=False)
        )
        marked = Mark(
            params["site"],
            params["part"],
            params["structure"],
            avals,
            params.get("variable"),
            axes[: len(avals)],
            of=params.get("of", params.get("call")),
            inner=params.get("inner", False),
            begun=params.get("begun"),
            moved=params.get("moved", ()),
            reached=params.get("reached", frozenset()),
            choice=params.get("choice"),
            where=where,
            counted=counted if "where" in params else (),
        )
        if marked.part == CHOICE:
            return Item("choice", marked)
        # the layers of a loop have rows already, and only one axis of rows has sites
        members = None if loops else members_of(equation)
        return Item("mark", marked if members is None else _per_member(marked, members))
    kind, bodies = kind_of(equation), bodies_of(equation)
    if finished and not kind and name in CUSTOM:
        kind = "custom"
    children: list[Survey] = []
    for body in bodies:
        within = loops or kind in ("scan", "while")
        child = survey(body.jaxpr, owner, loops=within, finished=finished)
        unseen.update(child.unseen)
        for name_of_type, count in child.unattributed.items():
            unattributed[name_of_type] = unattributed.get(name_of_type, 0) + count
        if body.tests or not kind:
            for marked in child.marks:
                where = "in the condition of a while loop"
                if not body.tests:
                    where = f"inside a {name} equation, which cannot be entered"
                unseen.setdefault(marked.site, f"it is called {where}")
            child = dataclasses.replace(child, items={})
        children.append(child)
    if not any(child.items for child in children):
        return None
    length = bodies[0].times or 0 if kind == "scan" else 1
    return Item(
        kind,
        None,
        tuple(children),
        -length if bodies[0].backwards else length,
        again=eqn_params.is_recomputation(equation),
    )


def is_masked(equation: Equation) -> bool:
    """Whether only some positions of all arrays of a mark count."""
    params, arrays = equation.params, [v.aval for v in equation.invars]
    arrays = arrays[: marked_count(params, arrays)]
    pairs = zip(arrays, params.get("mapped", ((),) * len(arrays)), strict=False)
    each = [mask_vmaps(params["where"], x, n) is not None for x, n in pairs if "where" in params]
    return bool(each) and all(each)


def members_of(equation: Equation) -> Members | None:
    """The members of an ensemble that a mark distinguishes, if any."""
    members = equation.params.get("members")
    shared = members is not None and None in members.levels
    return None if shared and equation.params["part"] == OUTPUT else members


def _per_member(marked: Mark, members: Members) -> Mark:
    """A mark on the values of all members as a mark on the value of each."""
    avals, mapped, axes = list[Value](marked.avals), list(marked.mapped), list[int | None]()
    for i, level in enumerate(members.levels):
        if level is None:
            axes.append(None)
            continue
        inner, (axis, *outer) = mapped[i][:level], mapped[i][level:]
        rest = list(inner)
        for position in outer:  # of the axes that vmaps further out have added
            rest.append(position - (position > axis))
            axis += position <= axis
        shape = list(avals[i].shape)
        del shape[axis]
        avals[i] = jax.ShapeDtypeStruct(tuple(shape), avals[i].dtype)
        mapped[i] = tuple(rest)
        axes.append(axis)
    return dataclasses.replace(
        marked,
        avals=tuple(avals),
        mapped=tuple(mapped),
        members=members.count,
        member_axes=tuple(axes),
    )


def without_jaxprs(found: Survey) -> Survey:
    """A survey that keeps no program alive."""
    items = {
        number: dataclasses.replace(item, children=tuple(map(without_jaxprs, item.children)))
        for number, item in found.items.items()
    }
    return dataclasses.replace(found, jaxpr=None, consts=(), items=items)


def without_calls(
    found: Survey,
    of: Iterator[int | None],
    others: Set[int],
    left: Set[Hashable],
    *,
    again: bool = False,
) -> Survey:
    """A survey without the marks of some calls, and what these calls are given.

    Args:
        of: the number of the place where its call begins, for each mark that a walk finds but those
            of a second pass of a remat.
        others: those of the calls.
        left: the numbers by which marks know the calls.
    """
    items: dict[int, Item] = {}
    for number, item in found.items.items():
        if item.mark is not None:
            counts = item.mark.part == GRADIENT or not again
            if (next(of) in others) if counts else (_call_of(item.mark) in left):
                continue
        elif item.kind == "launch_input" and item.call in left:
            continue
        inner = {"again": again or item.again}
        children = tuple(without_calls(one, of, others, left, **inner) for one in item.children)
        if item.mark is not None or not children or any(one.items for one in children):
            items[number] = dataclasses.replace(item, children=children)
    return dataclasses.replace(found, items=items)


def _call_of(mark: Mark) -> Hashable:
    return mark.of[0] if isinstance(mark.of, tuple) else mark.of


def scan_depths(found: Survey, depth: int = 0) -> dict[Hashable, int]:
    """By the number of each call that begins a pass, how many scans are around it."""
    depths: dict[Hashable, int] = {}
    for item in found.items.values():
        if item.mark is not None and item.mark.part == BEGIN:
            depths[item.mark.of] = depth
        for child in item.children:
            depths |= scan_depths(child, depth + (item.kind == "scan"))
    return depths


def row_stride(item: Item, depths: Mapping[Hashable, int], depth: int, most_rows: int) -> int:
    """Each so many iterations of a scan are kept, of one whose iterations are passes: a row of a
    summary has 16 KiB, and a scan over training steps has thousands.
    """
    length = abs(item.length)
    if not 0 < most_rows < length:
        return 1
    (child,) = item.children
    within = not depths or child.begins
    within = within or any(
        one.part == GRADIENT and depths.get(one.of[0][0], 0) > depth for one in child.marks
    )
    return -(-length // most_rows) if within else 1


def call_numbers(
    found: Sequence[Mark], numbers: dict[tuple[str, str], int] | None = None
) -> dict[int, int]:
    """By the id of each mark, how many of its site and part precede it: random numbers use this.

    `numbers` counts those that came before.
    """
    numbers = {} if numbers is None else numbers
    calls: dict[int, int] = {}
    for one in found:
        if one.part in (OUTPUT, INPUT):
            calls[id(one)] = numbers.get((one.site, one.part), 0)
            numbers[one.site, one.part] = calls[id(one)] + 1
    return calls
