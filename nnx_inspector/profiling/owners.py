"""Which module, and which part of a step, each operation of a compiled program belongs to.

jax's names say which module an operation comes from, and whether it is of the backward pass. What
has neither and is computed from the backward pass is the update; its module is the one whose
gradient it reads. Invariant: the parts of an operation sum to 1. What XLA has made without a name
belongs to the operation that it reads, or that reads it. Runs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from nnx_inspector.profiling import hlo
from nnx_inspector.profiling.scopes import path_in

Phase = Literal["forward", "backward", "update"]
PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "update")
Owner = tuple[str | None, Phase]
"""A module's path, None outside the model, and the part of the step."""
Parts = Mapping[Owner, float]
"""The parts of one operation by their owners; they sum to 1."""

OUTSIDE: Final[Owner] = (None, "forward")
WAITING_OPCODES: Final = frozenset({"while", "call", "conditional", "async-done", "async-start"})
"""Operations that may only wait for others."""
_NO_OPS: Final = frozenset(["parameter", "constant", "tuple", "get-tuple-element", "bitcast"])
_CHEAP: Final = _NO_OPS | {"broadcast", "reshape", "iota", "copy"}
"""What costs next to nothing within a fusion."""
_COSTLY: Final = frozenset(
    """
    exponential exponential-minus-one log log-plus-one tanh logistic power divide sqrt rsqrt cbrt
    sine cosine tan erf atan2
    """.split()  # noqa: SIM905
)
_WITH_BODIES: Final = frozenset(["fusion", "call", "while", "conditional", "async-start"])


@dataclasses.dataclass(frozen=True)
class _Provenance:
    """What a value is computed from.

    Attributes:
        after_backward: whether the backward pass is before it.
        sources: the modules whose gradients it is computed from, as far as its own array goes.
        parts: of a tuple, the same for each of its arrays.
    """

    after_backward: bool = False
    sources: frozenset[str | None] = frozenset()
    parts: tuple[_Provenance, ...] = ()


_NO_PROVENANCE: Final = _Provenance()


def phase_in(op_name: str) -> Phase | None:
    """The part of a step that a name tells: None if it says nothing of derivatives."""
    op_name = op_name.partition(";")[0]
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name or path_in(op_name) is not None else None


def owners_of(module: hlo.Module) -> dict[str, Parts]:
    """By the name of each instruction of a program, to whom its time belongs."""
    analysis = _OwnerAnalysis(module)
    analysis.visit(module.entry, ())
    return analysis.parts


def has_derivative(module: hlo.Module) -> bool:
    """Whether any instruction of a program belongs to a module, or to a derivative."""
    every = (one.op_name for those in module.computations.values() for one in those)
    return any(phase_in(name) is not None for name in every)


class _OwnerAnalysis:
    def __init__(self, module: hlo.Module):
        self.module = module
        self.parts: dict[str, Parts] = {}
        self._visited: dict[str, _Provenance] = {}
        self._weights: dict[str, dict[Owner, float]] = {}
        self._sizes: dict[str, int] = {}

    def visit(self, name: str, given: Sequence[_Provenance]) -> _Provenance:
        """Follow the values of a computation; returns what its result is computed from."""
        if name in self._visited or name not in self.module.computations:
            return self._visited.get(name, _merged(given))
        self._visited[name] = _NO_PROVENANCE
        flows: dict[str, _Provenance] = {}
        owners: dict[str, Owner | None] = {}
        inside = self.module.computations[name]
        result = _NO_PROVENANCE
        self._sizes.update((one.name, one.elements) for one in inside)
        for one in inside:
            operands = [flows.get(operand, _NO_PROVENANCE) for operand in one.operands]
            flows[one.name], owners[one.name] = self._visit_instruction(
                one, operands, given, owners
            )
            if one.root:
                result = flows[one.name]
        self._assign_unnamed(inside, owners)
        weights: dict[Owner, float] = {}
        for one in inside:
            parts = self._parts_of(one, owners[one.name] or OUTSIDE)
            self.parts[one.name] = parts
            weight = self._weight(one)
            for owner, part in parts.items() if weight else ():
                weights[owner] = weights.get(owner, 0.0) + weight * part
        self._weights[name] = weights
        self._visited[name] = result
        return result

    def _visit_instruction(
        self,
        one: hlo.Instruction,
        operands: Sequence[_Provenance],
        given: Sequence[_Provenance],
        owners: Mapping[str, Owner | None],
    ) -> tuple[_Provenance, Owner | None]:
        """What an instruction's result is computed from, and to whom it belongs; None if that is
        not known yet.
        """
        if one.opcode == "parameter":
            return (given[one.index] if one.index < len(given) else _NO_PROVENANCE), None
        if one.opcode == "tuple":
            return dataclasses.replace(_merged(operands), parts=tuple(operands)), None
        if one.opcode == "get-tuple-element" and operands:
            parts = operands[0].parts
            return (parts[one.index] if one.index < len(parts) else operands[0]), None
        inner = None
        if one.opcode in _WITH_BODIES:
            for called in one.called:
                inner = self.visit(called, operands)
        path, phase = path_in(one.op_name), phase_in(one.op_name)
        flow = _merged(operands, one)
        if phase == "backward":
            sources = frozenset({path}) if path is not None else flow.sources
            return _Provenance(True, sources, inner.parts if inner else ()), (path, phase)
        if phase == "forward":
            return _Provenance(False, frozenset(), inner.parts if inner else ()), (path, phase)
        if inner is not None and inner.after_backward:
            flow = dataclasses.replace(inner, after_backward=True)
        if not one.op_name:
            known = (owners.get(operand) for operand in one.operands)
            return flow, next((owner for owner in known if owner is not None), None)
        if not flow.after_backward:
            return flow, OUTSIDE
        (source, *others) = flow.sources or {None}
        return flow, (None if others else source, "update")

    def _assign_unnamed(
        self, inside: Sequence[hlo.Instruction], owners: dict[str, Owner | None]
    ) -> None:
        """Give what XLA has made at the beginning to the first that reads it, and to the update
        what it alone reads, such as a moment that decays.
        """
        readers: dict[str, list[Owner | None]] = {}
        for one in reversed(inside):
            reading = readers.get(one.name, [])
            if owners[one.name] is None and reading and one.opcode not in _NO_OPS:
                owners[one.name] = reading[-1]
            elif owners[one.name] == OUTSIDE and phase_in(one.op_name) is None and reading:
                phases = {"" if owner is None else owner[1] for owner in reading}
                sites = {owner[0] for owner in reading if owner is not None}
                if phases == {"update"}:
                    owners[one.name] = (sites.pop() if len(sites) == 1 else None, "update")
            for operand in one.operands:
                readers.setdefault(operand, []).append(owners[one.name])

    def _parts_of(self, one: hlo.Instruction, owner: Owner) -> Parts:
        """To whom an instruction belongs; a fusion belongs to its parts, by their arithmetic."""
        inner = [self._weights.get(c, {}) for c in one.called if one.opcode in ("fusion", "call")]
        total = sum(sum(weights.values()) for weights in inner)
        if not total:
            return {owner: 1.0}
        found: dict[Owner, float] = {}
        for weights in inner:
            for (path, phase), weight in weights.items():
                of: Owner = path, phase
                if phase == "forward" and owner[1] != "forward":  # XLA computes it once more
                    of = owner if path is None else (path, "backward")
                found[of] = found.get(of, 0.0) + weight / total
        return found

    def _weight(self, one: hlo.Instruction) -> float:
        """The arithmetic of one instruction within a fusion, roughly."""
        if one.opcode in _CHEAP:
            return 0.0
        sizes = [one.elements, *(self._sizes.get(operand, 0) for operand in one.operands)]
        if one.opcode in ("dot", "convolution"):
            return 2 * math.sqrt(math.prod(map(float, sizes[:3])))
        if one.opcode.startswith("reduce"):
            return float(max(sizes))
        return sizes[0] * (8.0 if one.opcode in _COSTLY else 1.0)


def _merged(flows: Iterable[_Provenance], one: hlo.Instruction | None = None) -> _Provenance:
    """What a value is computed from that is computed from these.

    A number that scales all gradients, such as that of a clipped norm, joins no sources.
    """
    flows = list(flows)
    after_backward = any(flow.after_backward for flow in flows)
    found = [flow.sources for flow in flows if flow.sources]
    if one is not None and len(found) > 1 and one.elements > 1:
        fewest = min(map(len, found))
        found = [sources for sources in found if len(sources) == fewest]
    return _Provenance(after_backward, frozenset().union(*found) if found else frozenset())
