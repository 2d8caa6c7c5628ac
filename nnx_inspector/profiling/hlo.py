"""The compiled program of XLA as text: its computations, and their instructions.

Invariant: a line that is not understood is left out; nothing is guessed of it. Decides nothing.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Final

_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION: Final = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY: Final = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CALLED: Final = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES: Final = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_OP_NAME: Final = re.compile(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"')
_DONATED: Final = re.compile(r"input_output_alias=\{(.*?)\}, \w+=")
_INDEX: Final = re.compile(r"\bindex=(\d+)")
_BITS: Final = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
        shape: its result, as XLA writes it.
        operands: the names of its operands, in the same computation.
        called: the computations that it runs, in the order of the text.
        op_name: the name that jax gave it; "" if XLA has made it.
        index: which part of a tuple a `get-tuple-element` takes, or which parameter it is.
        root: whether it is the computation's result.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    called: tuple[str, ...] = ()
    op_name: str = ""
    index: int = 0
    root: bool = False

    @property
    def elements(self) -> int:
        """The number of values in its result."""
        return sum(math.prod(dims) for _, dims in arrays_of(self.shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each array of its result."""
        return tuple(_bytes(kind, dims) for kind, dims in arrays_of(self.shape))


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program; its instructions are in the order of the text, operands first.

    Attributes:
        scheduled: whether they run in that order.
        in_place: the numbers of the results that have the memory of a donated argument.
    """

    name: str
    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    scheduled: bool = False
    in_place: frozenset[int] = frozenset()


def arrays_of(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """The dtype and dimensions of each array in the text of a shape."""
    bare = re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", shape)  # without layouts
    return [
        (kind, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for kind, dims in _ARRAY.findall(bare)
    ]


def _bytes(kind: str, dims: tuple[int, ...]) -> int:
    digits = re.match(r"[a-z]+(\d+)", kind)
    bits = _BITS.get(kind, int(digits[1]) if digits else 0)
    return math.prod(dims) * bits // 8


def parse(text: str) -> Module:
    """Read the text of a compiled program (`jax.stages.Compiled.as_text()`)."""
    name = re.match(r"HloModule ([\w.\-]+)", text)
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, here, inside = "", "", list[Instruction]()
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            here, inside = head[2], []
            entry = here if head[1] else entry
        elif line.startswith("}") and here:
            computations[here], here = tuple(inside), ""
        elif here and (one := _instruction(line)):
            inside.append(one)
    head = text.partition("\n")[0]
    donated = _DONATED.search(head)
    return Module(
        name[1] if name else "",
        entry,
        computations,
        scheduled="is_scheduled=true" in head,
        in_place=frozenset(map(int, re.findall(r"\{(\d*)\}:", donated[1])))
        if donated
        else frozenset(),
    )


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    root, name, rest = found.groups()
    end = _end_of_group(rest, 0) if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if end <= 0 or opening <= 0:
        return None
    closing = _end_of_group(rest, opening)
    opcode, inner, more = rest[:opening], rest[opening + 1 : closing - 1], rest[closing:]
    called = tuple(_CALLED.findall(more))
    for several in _BRANCHES.findall(more):
        called += tuple(one.strip().lstrip("%") for one in several.split(","))
    op_name = _OP_NAME.search(more)
    index = _INDEX.search(more)
    return Instruction(
        name=name,
        opcode=opcode,
        shape=shape,
        operands=() if opcode in ("parameter", "constant", "iota") else _names(inner),
        called=called,
        op_name=op_name[1].replace('\\"', '"').replace("\\\\", "\\") if op_name else "",
        index=int(inner) if opcode == "parameter" else int(index[1]) if index else 0,
        root=bool(root),
    )


def _end_of_group(text: str, start: int) -> int:
    """The position behind the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if not depth:
            return position + 1
    return len(text)


def _names(operands: str) -> tuple[str, ...]:
    """The names in a list of operands, each perhaps after its shape."""
    bare = re.sub(r"/\*.*?\*/|\{[^{}]*\}|\[[^\]]*\]", "", operands)
    bare = re.sub(r"\([^()]*\)", "", bare)  # the shape of a tuple
    words = [one.split() for one in bare.split(",")]
    return tuple(word[-1].lstrip("%") for word in words if word)
