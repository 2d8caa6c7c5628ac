"""The data that a compiled program moves between devices, read from its HLO."""

from __future__ import annotations

import math
import re
from collections import Counter

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?(%?[\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)")
_ARRAY = re.compile(r"\b([a-z]+\d+[a-z0-9]*|pred)\[([\d,]*)\]")


def _arrays(text: str) -> list[tuple[str, int]]:
    """(dtype, elements) of each array type in a piece of HLO."""
    sizes = [(t, [int(n) for n in shape.split(",") if n]) for t, shape in _ARRAY.findall(text)]
    return [(t, math.prod(shape)) for t, shape in sizes]


def collectives(hlo: str) -> Counter[str]:
    """How often each array goes through a collective: "all-reduce u32[4096]" -> times.

    The larger of operand and result counts. The parts of a combined collective count separately.
    """
    made: dict[str, list[tuple[str, int]]] = {}
    found: Counter[str] = Counter()
    for line in hlo.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, result, kind, operands = match.groups()
        made[name] = _arrays(result)
        if kind.removesuffix("-start") not in KINDS:
            continue
        names = re.findall(r"%?[\w.-]+", operands.partition(")")[0])
        given = [array for n in names for array in made.get(n, [])]
        results = made[name]
        if len(results) != len(given):  # an asynchronous start returns its operands too
            results = results[len(given) :] or results
        for i, array in enumerate(given or results):
            larger = max(array, results[i] if i < len(results) else array, key=lambda a: a[1])
            found[f"{kind.removesuffix('-start')} {larger[0]}[{larger[1]}]"] += 1
    return found


def elements(collective: str) -> int:
    return int(collective.partition("[")[2].rstrip("]"))
