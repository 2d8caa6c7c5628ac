"""Who holds the memory of a compiled program where it needs most.

How much that is says XLA. Who holds it is read from the order of its instructions: a result is
there from the instruction that computes it to the last one that reads it. Invariant: a result that
has another one's memory counts nothing. Memory that XLA loses between buffers is nobody's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from nnx_inspector._compat.launching.executables import Executable, last_started_jaxpr
from nnx_inspector.errors import add_note
from nnx_inspector.profiling import hlo
from nnx_inspector.profiling.owners import OUTSIDE, Parts
from nnx_inspector.profiling.program_cost import ModulePath, cost_of_program, largest_array
from nnx_inspector.profiling.result import size_text

EXHAUSTED: Final = "RESOURCE_EXHAUSTED"
MOST_NAMED: Final = 3
"""How many modules a note names."""


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """The most memory that a program needs at once.

    Attributes:
        bytes: all of it, with the arguments; NaN if it is not known.
        arguments: the size of the program's arguments.
        by_module: what the operations of each module have computed that is there at that moment;
            empty if it is not known.
        notes: what is not known, and why.
    """

    bytes: float = math.nan
    arguments: float = math.nan
    by_module: Mapping[ModulePath, float] = dataclasses.field(default_factory=lambda: {})
    notes: tuple[str, ...] = ()


def peak_of(executable: Executable, module: hlo.Module, parts: Mapping[str, Parts]) -> PeakMemory:
    """Read the size of a program's memory, and who holds it.

    Args:
        module: the program's text.
        parts: by operation, to whom it belongs.
    """
    plan: Any = executable.memory()
    if plan is None:
        return PeakMemory(notes=("peak memory: XLA says nothing of it on this platform.",))
    arguments = plan.argument_size_in_bytes
    total = arguments + plan.output_size_in_bytes + plan.temp_size_in_bytes
    total = max(total - plan.alias_size_in_bytes, plan.peak_memory_in_bytes)
    if not module.scheduled:
        why = "peak memory: who holds it is not known, because the program's text has no order."
        return PeakMemory(total, arguments, notes=(why,))
    found: dict[ModulePath, float] = {}
    for operation, count in live_at_peak(module).items():
        for (path, _), part in parts.get(operation, {OUTSIDE: 1.0}).items():
            found[path] = found.get(path, 0.0) + count * part
    return PeakMemory(total, arguments, found)


_Buffer = tuple[str, int]
"""One array of an instruction's result: the instruction, and its number in the result."""
_BufferSet = frozenset[_Buffer]
_VIEWS: Final = frozenset(
    """
    bitcast reshape optimization-barrier copy-done async-done dynamic-update-slice
    """.split()  # noqa: SIM905
)
"""Instructions whose result has the memory of their first operand."""


def live_at_peak(module: hlo.Module) -> dict[str, int]:
    """By operation, the bytes of its results that are there at the moment when most are.

    Arguments and constants count nothing, nor does what is written over a donated argument.
    """
    return _LivenessAnalysis(module).peak(module.entry)


class _LivenessAnalysis:
    def __init__(self, module: hlo.Module):
        self._module = module

    def peak(self, name: str) -> dict[str, int]:
        inside = self._module.computations.get(name, ())
        buffers: dict[str, list[_BufferSet]] = {}
        made: dict[_Buffer, tuple[int, int]] = {}  # when, and how large
        used: dict[_Buffer, int] = {}
        for now, one in enumerate(inside):
            for operand in one.operands:
                used.update((b, now) for buffer_set in buffers.get(operand, ()) for b in buffer_set)
            buffers[one.name] = self._buffers_of(one, buffers)
            for number, count in enumerate(one.sizes):
                if (one.name, number) in buffers[one.name][number]:
                    made[one.name, number] = now, count
            if one.root:  # results stay; one that takes a donated argument's place is no more
                for number, buffer_set in enumerate(buffers[one.name]):
                    used.update((b, len(inside)) for b in buffer_set)
                    if name == self._module.entry and number in self._module.in_place:
                        made |= {b: (made[b][0], 0) for b in buffer_set if b in made}
        last = {b: max(used.get(b, when), when) for b, (when, _) in made.items()}
        best: dict[str, int] = {}
        most = 0
        for now, one in enumerate(inside):
            there = [(b, n) for b, (when, n) in made.items() if when <= now <= last[b] and n]
            within = self._inner_peak(one)
            total = sum(n for _, n in there) + sum(within.values())
            if total > most:
                most, best = total, dict(within)
                for (operation, _), n in there:
                    best[operation] = best.get(operation, 0) + n
        return best

    def _inner_peak(self, one: hlo.Instruction) -> dict[str, int]:
        """What a loop, a branch or a call needs inside at most."""
        if one.opcode not in ("while", "conditional", "call"):
            return {}
        peaks = [self.peak(called) for called in one.called]
        return max(peaks, key=lambda peak: sum(peak.values()), default={})

    def _buffers_of(
        self, one: hlo.Instruction, buffers: Mapping[str, list[_BufferSet]]
    ) -> list[_BufferSet]:
        """Where each array of a result is."""
        given = [buffers.get(operand, [frozenset()]) for operand in one.operands]
        nothing: list[_BufferSet] = [frozenset()] * max(1, len(one.sizes))
        if one.opcode in ("parameter", "constant"):
            return nothing
        if one.opcode == "tuple":
            return [buffer_set for of in given for buffer_set in of]
        if one.opcode == "get-tuple-element" and given:
            return given[0][one.index : one.index + 1] or nothing
        if one.opcode == "while" and given:
            return given[0] if len(given[0]) == len(nothing) else nothing
        if one.opcode in _VIEWS and given:
            return given[0][:1] if len(nothing) == 1 else given[0]
        own: list[_BufferSet] = [frozenset([(one.name, n)]) for n in range(len(nothing))]
        if one.opcode == "fusion":
            for number, operand in self._in_place_operands(one).items():
                own[number] = given[operand][0]
        return own

    def _in_place_operands(self, fusion: hlo.Instruction) -> dict[int, int]:
        """By number of the result, the operand whose memory a fusion writes into: that of which it
        changes a slice, as a loop does with what it stacks.
        """
        of = {one.name: one for c in fusion.called for one in self._module.computations.get(c, ())}
        root = next((one for one in of.values() if one.root), None)
        if root is None:
            return {}
        found: dict[int, int] = {}
        for number, name in enumerate(root.operands if root.opcode == "tuple" else (root.name,)):
            one = of.get(name)
            while one is not None and one.opcode in ("dynamic-update-slice", "bitcast", "copy"):
                into = of.get(one.operands[0])
                if into is not None and into.opcode == "parameter":
                    found[number] = into.index
                one = into
        return {n: i for n, i in found.items() if i < len(fusion.operands)}


def note_memory(error: BaseException, when: str) -> None:
    """Say in a note of an error when it was raised; if memory is exhausted, who needs most."""
    text = f"raised while the step was {when} by profile."
    if EXHAUSTED in f"{error}":
        text += f" {memory_in_words(last_started_jaxpr())}"
    add_note(error, text.strip())


def memory_in_words(program: object) -> str:
    """Which modules of a traced program need most memory, in sentences; "" if nothing is known."""
    if program is None:
        return ""
    kept = cost_of_program(program).kept
    total = sum(kept.values())
    most = sorted(kept, key=lambda of: kept[of], reverse=True)[:MOST_NAMED]
    said = [f"{_module_in_words(of)} {size_text(kept[of])}" for of in most if kept[of]]
    found: list[str] = []
    if said:
        found.append(f"For the backward pass {size_text(total)} are kept: {', '.join(said)}.")
    if (one := largest_array(program)) is not None:
        found.append(
            f"The largest array is {one.shape} ({size_text(one.size)}), of "
            f"{_module_in_words(one.of)} ({one.primitive})."
        )
    return " ".join(found)


def _module_in_words(of: ModulePath) -> str:
    return "operations outside modules" if of is None else repr(of) if of else "the model itself"
