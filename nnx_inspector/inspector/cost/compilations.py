"""What jax compiles while an inspector exists: which function, for how long, and why.

jax compares the arguments of a call that it must trace with those of the calls before; what it says
of a function waits here, by thread, for the event that its program is compiled. Invariants: nothing
here raises into the user's call, only the last `MOST` are kept, and a reason that is not known is
not guessed. Compiles nothing.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import nnx_inspector
from nnx_inspector._compat import jit
from nnx_inspector.findings.finding import Finding
from nnx_inspector.screen import protocol

MOST_COMPILATIONS: Final = 1000
"""The most compilations that are kept."""
MOST_PENDING: Final = 256
"""The most traced functions of one thread that wait for their compilation: most are parts of others
and are not compiled by themselves."""
RECENT, OFTEN = 12, 10
"""A function that was compiled in so many of the recent steps is compiled in every step: a last
batch of another size, or the first batch of each length, is compiled less often."""
LONGEST_VALUE: Final = 60
"""The most characters of one value in a reason."""
MOST_DIFFERENCES: Final = 3
"""The most differences in a reason."""

_PACKAGE_FOLDER: Final = os.path.dirname(nnx_inspector.__file__) + os.sep
_OPERATION: Final = "an operation of jax or flax, called outside a jitted function"
_REASONS: Final = {
    "new": "first call",
    "redefined": "another function of this line was called before: define it once, not in the loop",
    "again": "it was compiled before: its program was dropped, or it is defined anew in each step",
    "context": "first call with such arguments in this context, as while a step is measured",
    "": "a static value, or something else that jax does not name, differs from all calls before",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """One program that jax has compiled.

    Attributes:
        function: the name of the jitted function, or of an operation outside one.
        defined: the `file:line` of its definition; "" if it is not the user's.
        called: the `file:line` that called it; "" if that is not known.
        seconds: how long XLA took, without the trace.
        step: the step of the loop that ran then; None outside a loop.
        inspector: whether the inspector compiled it for itself, beside the user's own programs.
        why: the reason, a clause.
    """

    function: str
    defined: str
    called: str
    seconds: float
    step: int | None
    inspector: bool
    why: str

    def __str__(self) -> str:
        where = f" ({self.defined})" if self.defined else ""
        step = "" if self.step is None else f" at step {self.step}"
        return f"{self.function}{where}{step}, {self.seconds:.2g} s: {self.why}"


class Compilations:
    """The compilations since it was made, in any thread.

    Args:
        step: gives the step of the loop that runs now; None if none does.

    Attributes:
        count: how many there were, of all kinds.
    """

    def __init__(self, step: Callable[[], int | None]) -> None:
        self._step = step
        self._lock = threading.Lock()
        self._traced: dict[int, list[jit.CacheMiss]] = {}
        self._known: set[str] = set()
        self._lines: dict[tuple[str, str], int] = {}
        self._found: deque[Compilation] = deque(maxlen=MOST_COMPILATIONS)
        self.count = 0
        self._undo = jit.compilation_events(self._on_event), jit.cache_misses(self._on_miss)

    def all(self) -> list[Compilation]:
        """The last of them, oldest first."""
        with self._lock:
            return list(self._found)

    def close(self) -> None:
        """Listen no more."""
        for undo in self._undo:
            undo()

    def _on_miss(self, miss: jit.CacheMiss) -> None:
        with self._lock:
            if miss.kind == "new" and miss.defined:
                line = (miss.function, miss.defined)
                before = self._lines.get(line)
                self._lines[line] = miss.identity
                if before is not None:  # an address is used again: the same one says nothing
                    kind = "again" if before == miss.identity else "redefined"
                    miss = dataclasses.replace(miss, kind=kind)
            waiting = self._traced.setdefault(threading.get_ident(), [])
            waiting.append(miss)
            del waiting[:-MOST_PENDING]

    def _on_event(self, kind: str, seconds: float, function: str) -> None:
        if kind != "compile":
            return
        thread, step = threading.current_thread(), self._step()
        with self._lock:
            waiting = self._traced.get(threading.get_ident(), [])
            at = next((i for i, one in enumerate(waiting) if one.function == function), None)
            miss = None if at is None else waiting[at]
            del waiting[len(waiting) if at is None else at :]  # those after it are its parts
            if not waiting:
                self._traced.pop(threading.get_ident(), None)
            why = self._why(function, miss)
            defined, called = (miss.defined, miss.called) if miss else ("", "")
            ours = thread.name.startswith("nnx_inspector") or defined.startswith(_PACKAGE_FOLDER)
            self._known.update([function] if miss else [])
            self.count += 1
            self._found.append(
                Compilation(
                    function=function,
                    defined="" if ours else defined,
                    called="" if ours else called,
                    seconds=seconds,
                    step=step,
                    inspector=ours,
                    why="for the inspector" if ours else why,
                )
            )

    def _why(self, function: str, miss: jit.CacheMiss | None) -> str:
        if miss is None and function in self._known:
            return (
                "its arguments have the shapes, dtypes and structure of a call before: they lie on "
                "other devices, or its program was dropped"
            )
        if miss is None:
            return _OPERATION
        if miss.kind in ("types", "structure") and miss.changes:
            return differences_in_words(miss.changes)
        return _REASONS.get(miss.kind, _REASONS[""])


def compilations_message(found: Sequence[Compilation], *, request: int) -> protocol.Compilations:
    """The message that lists the compilations of the user's functions, newest first."""
    rows = [one for one in reversed(found) if one.defined]
    operations = [one.seconds for one in found if not one.defined and not one.inspector]
    inspector = [one.seconds for one in found if one.inspector]
    return protocol.Compilations(
        id=request,
        site="",
        rows=tuple(
            protocol.CompilationRow(
                function=one.function,
                defined=one.defined,
                called=one.called,
                seconds=one.seconds,
                step=one.step,
                why=one.why,
            )
            for one in rows[: protocol.MOST_COMPILED]
        ),
        more=max(0, len(rows) - protocol.MOST_COMPILED),
        operations=len(operations),
        operation_seconds=sum(operations),
        inspector=len(inspector),
        inspector_seconds=sum(inspector),
    )


def compilations_table(found: Sequence[Compilation]) -> list[list[str]]:
    """A table of the user's functions: how often each was compiled, how long, and why at last."""
    of: dict[tuple[str, str], list[Compilation]] = {}
    for one in found:
        if one.defined:
            of.setdefault((one.function, one.defined), []).append(one)
    rows = [["function", "defined", "compiled", "seconds", "the last time because"]]
    for (function, defined), those in of.items():
        where, seconds = os.path.basename(defined), sum(one.seconds for one in those)
        rows.append([function, where, f"{len(those)}", f"{seconds:.2g}", those[-1].why])
    return rows


def differences_in_words(changes: Sequence[str]) -> str:
    """The differences of a call's arguments, as a clause.

    Example:
        >>> differences_in_words(["at x, now f32[5,3] and before f32[2,3]"])
        'x is f32[5,3], before f32[2,3]'
    """
    said = [_difference_in_words(one) for one in changes[:MOST_DIFFERENCES]]
    more = [f"{len(changes) - MOST_DIFFERENCES} more"] if len(changes) > MOST_DIFFERENCES else []
    return "; ".join([*said, *more])


def _difference_in_words(change: str) -> str:
    form = r"at (?:input path )?(?P<at>.*?), now (?P<now>.*) and before (?P<before>.*?)(?:, so .*)?"
    found = re.fullmatch(form, " ".join(change.split()))
    if found is None:
        return _shorten(change)
    now, before = _shorten_pair(*(_value(found[part]) for part in ("now", "before")))
    return f"{_argument(found['at'])} is {now}, before {before}"


def _argument(path: str) -> str:
    """The argument at a path of jax, `[0][2]['w']` or `[1]['n']`."""
    if path in ("[0]", "[1]"):
        return "the list of positional arguments" if path == "[0]" else "the keyword arguments"
    path = path.removesuffix("._graphdef")
    if by_name := re.match(r"\[1\]\['(\w+)'\]", path):
        return f"{by_name[1]}{path[by_name.end() :]}"
    return re.sub(r"^\[0\]\[(\d+)\]", r"argument \1 (from 0)", path)


def _value(text: str) -> str:
    """A value, without the class that holds it; of a container its class and size."""
    text = re.sub(r"^<class '[^']*'> with pytree metadata ", "", text)
    text = re.sub(r"^<class '(?:[\w.<>]+\.)?(\w+)'> with (\d+) child(?:ren)?", r"a \1 of \2", text)
    static = re.fullmatch(r"Static\(val=(.*)\)", text)
    return static[1] if static else text


def _shorten_pair(now: str, before: str) -> tuple[str, str]:
    """Two texts, or where they first differ if they are long, as the structures of modules are."""
    if max(len(now), len(before)) <= LONGEST_VALUE:
        return now, before
    pairs = enumerate(zip(now, before, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(now), len(before)))
    start = max(now.rfind(" ", 0, start), 0)  # from the beginning of the word
    dots = "\N{HORIZONTAL ELLIPSIS}" * (start > 0)
    return dots + _shorten(now[start:].strip()), dots + _shorten(before[start:].strip())


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "\N{HORIZONTAL ELLIPSIS}"


def recompilation_finding(found: Sequence[Compilation], step: int) -> Finding | None:
    """The finding that a loop compiles a function of the user in every step, or None.

    Args:
        found: the compilations, oldest first.
        step: the number of the step that the loop makes next.
    """
    recent: dict[str, list[Compilation]] = {}
    for one in found:
        if one.defined and one.step is not None and step - RECENT <= one.step < step:
            recent.setdefault(one.function, []).append(one)
    for function, these in recent.items():
        steps = {one.step for one in these if one.step is not None}
        if len(steps) >= OFTEN:
            seconds = sum(one.seconds for one in these)
            return Finding(
                rule="recompilation",
                site="",
                step=min(steps),
                severity="warning",
                evidence={"steps": len(steps), "of": RECENT, "seconds": seconds},
                what=(
                    f"In {len(steps)} of the {RECENT} steps up to step {step - 1}, {function!r} "
                    f"was compiled again, which took {seconds:.2g} s; the last time because "
                    f"{these[-1].why}"
                ),
                advice=(
                    "pass arrays of one shape and dtype (pad the batch), make a value that changes "
                    "an array and not a static argument, and define the function once"
                ),
            )
    return None
