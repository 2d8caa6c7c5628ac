"""What a watched program says of a pass, and the sessions that hear of it.

A program holds these objects and may outlive the session, so they hold only names and numbers and
find the session by its number.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Set
from typing import TYPE_CHECKING, Protocol

from nnx_inspector.live.inbox import Inbox
from nnx_inspector.perturbations.places import Place, Setting
from nnx_inspector.program.function import WatchedCall

if TYPE_CHECKING:
    import jax

GRADIENT = "gradient"

ReachedSite = tuple[str, Place | None, str, "jax.ShapeDtypeStruct | None"]
Reached = Set[ReachedSite]
"""The sites that a program calls, each with the place that acts there, None for a row; why it does
not fit what the site has there ("" if it does, as far as the program knows); and the shape and
dtype of that, None for a row or a parameter."""


class OpenSession(Protocol):
    """What a session is to the programs that are compiled with its hook."""

    inbox: Inbox
    setting: Setting
    errors: list[str]
    notes: list[str]
    ran: dict[int, Reached]
    unseen: dict[str, str]


open_sessions: weakref.WeakValueDictionary[int, OpenSession] = weakref.WeakValueDictionary()
"""The open sessions by their number."""


@dataclasses.dataclass(frozen=True, eq=False)
class PassStart:
    """A call of the outermost module, where a pass begins. A program holds it: it has no arrays.

    Attributes:
        session: the number of the session.
        site: the module that is called.
        paths: the paths of the parameters of which a measured pass takes samples.
        parameters: those of them that a step may be differentiated by.
        weights: those of them that are measured as a whole; none if the user wants none.
        call: the call in shapes; None if it cannot be described.
        type_name: the class of that module.
        reached: the perturbed parameters; see `Reached`.
        apart: the sites that the call calls and nothing can be seen of, each with the reason.
    """

    session: int
    site: str
    paths: tuple[str, ...]
    parameters: frozenset[str]
    weights: frozenset[str]
    call: WatchedCall | None
    type_name: str
    reached: set[ReachedSite] = dataclasses.field(default_factory=lambda: set[ReachedSite]())
    unseen: dict[str, str] = dataclasses.field(default_factory=lambda: dict[str, str]())

    @property
    def of_any_call(self) -> PassStart:
        """What stands for all calls with these parameters."""
        return _of_any_call(self.session, self.site, self.paths, self.parameters, self.weights)


@functools.lru_cache(maxsize=64)
def _of_any_call(
    session: int,
    site: str,
    paths: tuple[str, ...],
    parameters: frozenset[str],
    weights: frozenset[str],
) -> PassStart:
    return PassStart(session, site, paths, parameters, weights, None, "")
