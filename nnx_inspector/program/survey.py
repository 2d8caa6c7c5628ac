"""Finds the marks in a traced function, through every equation that can be entered.

Invariant: what cannot be taken out is listed with a reason, never guessed. Runs nothing; what is
done at the marks is for `harvest`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from nnx_inspector._compat import jaxprs
from nnx_inspector.program.changes import is_number, pair_of
from nnx_inspector.program.identity import Values
from nnx_inspector.program.marks import CHANGE, INPUT, OUTPUT, Structure, mark

UNATTRIBUTED = "unattributed"
"""Marks a call that looks like the model's and is none; its site is the name of the type."""


@dataclasses.dataclass(frozen=True)
class Marked:
    """One mark in a jaxpr: which site, which part of the call, and what it holds.

    `variable` is what a mark of a change says of the Variable; `mapped` names for each array the
    axes that vmap gave it, the innermost vmap first.
    """

    site: str
    part: str
    structure: Structure
    avals: tuple[Any, ...]
    variable: Any = None
    mapped: tuple[tuple[int, ...], ...] = ()

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return tuple(jnp.issubdtype(a.dtype, jnp.inexact) for a in self.avals)


@dataclasses.dataclass(frozen=True)
class Item:
    """One equation that holds marks: the mark itself, or an equation with jaxprs inside.

    `kind` is "mark", "scan", "while", "cond", "jit", "remat", "shard_map" or "inline". `again` says
    that it is the second pass of a remat: perturbed like the first, and not measured again.
    """

    kind: str
    mark: Marked | None = None
    children: tuple[Survey, ...] = ()
    length: int = 1
    again: bool = False


@dataclasses.dataclass(frozen=True)
class Survey:
    """A jaxpr and its equations that hold marks, by their number.

    Attributes:
        unseen: sites whose marks cannot be taken out, each with the reason.
        unattributed: how many calls, by the type of module, look like the model's and are not.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    items: Mapping[int, Item]
    unseen: Mapping[str, str]
    unattributed: Mapping[str, int]


_INLINE = {"closed_call", "core_call", "custom_lin"}


def survey(jaxpr: Any, owner: Any) -> Survey:
    """Find an owner's marks in a jaxpr, in order, through every equation that can be entered.

    Marks of others, around or inside us, are equations like any other.
    """
    bare, consts = jaxprs.open_jaxpr(jaxpr)
    items: dict[int, Item] = {}
    unseen: dict[str, str] = {}
    unattributed: dict[str, int] = {}
    values = Values(bare)
    for number, equation in enumerate(bare.eqns):
        item = item_of(equation, owner, unseen, unattributed)
        if item is not None and not _says_nothing(item, equation, values):
            items[number] = item
    return Survey(bare, tuple(consts), items, unseen, unattributed)


def item_of(
    equation: Any, owner: Any, unseen: dict[str, str], unattributed: dict[str, int]
) -> Item | None:
    """What one equation is to a survey; None where it holds no mark that can be taken out. Adds to
    `unseen` and `unattributed`.
    """
    params, name = equation.params, equation.primitive.name
    if equation.primitive is mark:
        if params["owner"] != owner:
            return None
        if params["part"] == UNATTRIBUTED:
            unattributed[params["site"]] = unattributed.get(params["site"], 0) + 1
            return None
        avals = tuple(v.aval for v in equation.invars)
        marked = Marked(
            params["site"],
            params["part"],
            params["structure"],
            avals,
            params.get("variable"),
            params.get("mapped", ((),) * len(avals)),
        )
        return Item("mark", marked)
    inner = [survey(j, owner) for j in jaxprs.sub_jaxprs(equation)]
    for child in inner:
        for name_of_type, count in child.unattributed.items():
            unattributed[name_of_type] = unattributed.get(name_of_type, 0) + count
    if not any(child.items or child.unseen for child in inner):
        return None
    for child in inner:
        unseen.update(child.unseen)
    if name == "scan":
        return Item("scan", None, (inner[0],), params["length"])
    if name == "while":
        test, body = (survey(params[name], owner) for name in ("cond_jaxpr", "body_jaxpr"))
        _lose(test, "it is called in the condition of a while loop", unseen)
        return Item("while", None, (test, body)) if body.items else None
    if name == "cond":
        return Item("cond", None, tuple(survey(branch, owner) for branch in params["branches"]))
    if name in ("jit", "pjit"):
        return Item("jit", None, (inner[0],))
    if name in jaxprs.REMAT:
        again = jaxprs.is_recomputation(equation)
        return Item("remat", None, (inner[0],), again=again)
    if name == "shard_map":
        return Item("shard_map", None, (inner[0],))
    if name in _INLINE:
        return Item("inline", None, (inner[0],))
    for child in inner:
        _lose(child, f"it is called inside a {name} equation, which cannot be entered", unseen)
    return None


def _says_nothing(item: Item, equation: Any, values: Values) -> bool:
    """Whether an item marks a change that is none, or is no number."""
    if item.mark is None or item.mark.part != CHANGE:
        return False
    pair = pair_of(equation)
    return not pair or not is_number(pair[0].aval) or values.same(*pair)


def _lose(child: Survey, reason: str, unseen: dict[str, str]) -> None:
    for marked in marks(child):
        unseen.setdefault(marked.site, reason)


def marks(found: Survey) -> list[Marked]:
    """Every mark of a survey in the order of the program, loop bodies once."""
    out: list[Marked] = []
    for item in found.items.values():
        if item.mark is not None:
            out.append(item.mark)
        for child in item.children:
            out.extend(marks(child))
    return out


def call_numbers(found: Sequence[Marked]) -> dict[int, int]:
    """For the id of each mark of a value how many of its site and part are before it: random
    numbers depend on it.
    """
    numbers: dict[tuple[str, str], int] = {}
    calls: dict[int, int] = {}
    for one in found:
        if one.part in (OUTPUT, INPUT):
            calls[id(one)] = numbers.get((one.site, one.part), 0)
            numbers[one.site, one.part] = calls[id(one)] + 1
    return calls
