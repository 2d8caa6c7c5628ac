"""The programs that a block of code launches, edited by one plan.

Each program that holds an owner's marks returns what they see as well, and gets the values of its
launch inputs. A mark on arrays outside every program is a program of its own. An edited program is
kept as long as the one that it was made of, so that equal plans compile it once. Does not decide
what is measured, and keeps nothing that was seen.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable

import jax

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.launching import launch
from nnx_inspector.program.editing.slots import read_slots
from nnx_inspector.program.instrument import InstrumentedProgram, instrument, mark_presence
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.survey import Survey, holds_marks, survey, without_jaxprs
from nnx_inspector.typing import Jaxpr, Owner, PyTree, Value

OnObservation = Callable[[Survey, list[PyTree]], None]
"""Gets the survey of a program that was launched, and what its marks saw."""


@dataclasses.dataclass(frozen=True, eq=False)
class LaunchedProgram:
    """A program that was edited under a plan; see `launch.EditedProgram`.

    Attributes:
        found: the survey of the program as it was.
        new: what was made of it.
    """

    program: Jaxpr
    found: Survey
    new: InstrumentedProgram
    is_compiled: bool = False

    @property
    def inputs(self) -> int:
        return len(self.new.keys)

    @property
    def outputs(self) -> int:
        return len(self.new.jaxpr.outvars) - self.new.outputs


@dataclasses.dataclass(frozen=True, eq=False)
class _Launch:
    """See `launch.Launch`."""

    edited: LaunchedProgram
    given: Callable[[tuple[Value, ...]], Value]
    seen: OnObservation

    def inputs(self) -> list[Value]:
        pairs = zip(self.edited.new.keys, self.edited.new.given, strict=True)
        values = [self.given(key[1]) if key[0] == "launch_input" else value for key, value in pairs]
        with internal_config():
            return jax.device_put(values)

    def take(self, arrays: list[Value], /) -> None:
        self.seen(self.edited.found, read_slots(self.edited.new.seen, arrays))


class LaunchedMarks(launch.LaunchInterception):
    """While it is open, an owner's marks and launch inputs act in the programs of this thread.

    Args:
        owner: the owner of the marks, and the first part of the place of each given.
        plan: what is measured at the marks; nothing may be perturbed.
        given: the value for a place.
        seen: gets what the marks of a program saw.
    """

    def __init__(
        self,
        owner: Owner,
        plan: Plan,
        *,
        given: Callable[[tuple[Value, ...]], Value] = lambda place: None,
        seen: OnObservation = lambda *_: None,
    ):
        super().__init__(self)
        self._owner, self._plan = owner, plan
        self._given, self._seen = given, seen

    def prepare(self) -> None:
        """See `launch.Chooser`."""

    def choose(
        self, program: object, arrays: object, /, *, alone: object = None, call: object = None
    ) -> _Launch | None:
        found = _edited_program(program, self._owner, self._plan)
        return None if found is None else _Launch(found, self._given, self._seen)

    def holds(self, jaxpr: object, /) -> bool:
        return holds_marks(jaxpr, self._owner)

    with_presence = staticmethod(mark_presence)

    def escaped(self, name: str, /) -> None:
        """See `launch.Chooser`; what a given is there, `marks.launch_input` says."""

    def failed(self, error: Exception, /) -> None:
        """The user's own program has run, without what this block wants of it."""
        raise error


_edited_programs: weakref.WeakKeyDictionary[
    object, dict[tuple[Owner, Plan], LaunchedProgram | None]
] = weakref.WeakKeyDictionary()
"""Program -> what was made of it for each owner and plan; None if it holds nothing of theirs."""


def _edited_program(program: object, owner: object, plan: Plan) -> LaunchedProgram | None:
    mine = _edited_programs.setdefault(program, {})
    if (owner, plan) not in mine:
        found = survey(program, owner, finished=True)
        made = None
        if found.items:
            new = instrument(found, plan)
            edited = jaxprs.closed_like(program, new.jaxpr)
            kept = without_jaxprs(found)  # or the program, which is the key, would live for good
            made = LaunchedProgram(edited, kept, dataclasses.replace(new, found=kept))
        mine[owner, plan] = made
    return mine[owner, plan]
