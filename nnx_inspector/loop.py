"""A watched training loop: which steps are sampled, and what happens between two steps.

Invariant: a step that is not sampled runs exactly the program that runs without us, unless a
perturbation is on; changes from the screen are taken over between steps only; leaving the loop by
any way (break, exception, interrupt) leaves no hook open. Does not measure anything itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable
from typing import Any, Protocol, TypeVar

from nnx_inspector.dispatch import installed
from nnx_inspector.watching import Session

T = TypeVar("T")


class Owner(Protocol):
    """What a loop asks of its inspector."""

    def loop_begins(self, total: int | None) -> int: ...
    def step_begins(self, session: Session) -> bool: ...
    def step_ends(
        self, session: Session, step: int, *, sampled: bool, hooked: bool, seconds: float
    ) -> None: ...
    def loop_ends(self, session: Session) -> None: ...


def watched(
    owner: Owner, session: Session, batches: Iterable[T], every: int
) -> Generator[T, Any, None]:
    """The batches, one by one, with the session open around the caller's work on some of them."""
    total = len(batches) if hasattr(batches, "__len__") else None  # type: ignore[arg-type]
    step = owner.loop_begins(total)
    untaken = False
    try:
        session.refresh()
        with installed():
            for batch in batches:
                perturbed = owner.step_begins(session)
                sampled = step % every == 0
                if sampled and untaken:
                    session.take()  # of perturbed steps in between, which are not recorded
                hooked = sampled or perturbed
                began = time.perf_counter()
                with session.open() if hooked else contextlib.nullcontext():
                    yield batch
                seconds = time.perf_counter() - began
                untaken = hooked and not sampled
                owner.step_ends(session, step, sampled=sampled, hooked=hooked, seconds=seconds)
                step += 1
    finally:
        owner.loop_ends(session)
