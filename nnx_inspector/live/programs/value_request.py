"""The values of one site in one pass, which somebody asks of a loop that is running.

The program that measures also keeps them: a variant of its own, which exists only once they were
asked for. A thread compiles it while the loop goes on; then the next pass is made with it. Which
passes are measured and recorded stays as it is. Invariant: values that are too large are refused
before anything runs, and they are those of one whole pass.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Final

import jax
import numpy as np

from nnx_inspector.errors import InspectorError, reply_text
from nnx_inspector.live.inbox import WatchedPass
from nnx_inspector.program.plan import Keep, KeptArray
from nnx_inspector.stats.summarize import type_text
from nnx_inspector.typing import Value

MOST_MISSES: Final = 8
"""How many passes, and programs, may go by without the site."""


@dataclasses.dataclass(frozen=True)
class KeepSite(Keep):
    """Keeps what `values` makes of each array, and of one site the arrays too.

    Attributes:
        site: the site.
        example: the entry of the first axis to keep; None for the whole.
    """

    site: str = ""
    example: int | None = None

    def of(
        self, x: jax.Array, where: jax.Array | None = None, *, site: str, mapped: int = 0
    ) -> KeptArray:
        kept = super().of(x, where, site=site, mapped=mapped)
        if not self.values or site != self.site:
            return kept
        return dataclasses.replace(kept, value=(kept.value, self._part(x)))

    def _part(self, x: jax.Array) -> jax.Array:
        if self.example is None:
            return x
        if not x.ndim or self.example >= x.shape[0]:
            what = type_text(x.dtype, x.shape)
            raise InspectorError(
                f"{self.site!r} returns {what}, which has no example {self.example}."
            )
        return x[self.example : self.example + 1]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CallValues:
    """What one call of the site has returned.

    Attributes:
        names: the name of each array, "" for a single one.
        values: the arrays, on the host. The first axes are those of `loops` scans, then that of the
            members of an ensemble, then those of vmaps.
        mapped: for each array, how many vmaps gave it an axis.
        members: whether there is an axis of members.
        ran: how often the call took place, for each iteration and member.
    """

    names: tuple[str, ...]
    values: tuple[Value, ...]
    mapped: tuple[int, ...]
    loops: int
    members: bool
    ran: np.ndarray


class ValueRequest:
    """A request for the values of one site.

    Args:
        most: the most bytes that the values may have.

    Attributes:
        is_sought: whether no program was seen yet that calls the site.
        is_ready: whether a program is compiled that keeps them.
        found: the pass that has them, as far as it was made.
        since: the first pass of the programs that were looked at while it is so; None if there is
            none yet.
        problem: why there will be none; "" if there may be.
    """

    def __init__(self, site: str, example: int | None, *, most: int):
        self.site, self.example, self.most = site, example, most
        self.is_sought, self.is_ready, self.problem = True, False, ""
        self.since: int | None = None
        self.found: WatchedPass | None = None
        self._looked = 0
        self._lock = threading.Lock()

    def with_site(self, keep: Keep) -> KeepSite:
        own = {field.name: getattr(keep, field.name) for field in dataclasses.fields(keep)}
        return KeepSite(**own, site=self.site, example=self.example)

    def claim(self) -> bool:
        """Whether this is the first program that calls the site."""
        with self._lock:
            first, self.is_sought = self.is_sought, False
            return first

    @property
    def is_searching(self) -> bool:
        """Whether it is to see each program that is started."""
        return not self.problem and self.found is None and (self.is_sought or self.is_ready)

    def keeps(self, begins: bool, begun: int) -> bool:
        """Whether a program is to keep the values, one that begins a pass or not, after so many."""
        if self.found is None:
            return self.is_ready
        return not begins and begun == self.found.number + 1  # the rest of the same pass

    def take(self, one: WatchedPass) -> None:
        """Something of a pass that may have the values, if it began when that was known."""
        if self.since is None or one.number < self.since:
            return
        if self.found is None:
            self.found = one
        elif self.found.number == one.number:
            every = (*self.found.messages, *one.messages)
            self.found = dataclasses.replace(self.found, messages=every)

    def count_program(self, begun: int) -> None:
        """A program is about to be started, after so many passes."""
        self.since = begun if self.since is None else self.since
        self._looked += 1

    def is_missed(self, number: int) -> bool:
        """Whether the site was not called, if no pass up to this one has its values."""
        enough = self.since is not None and number >= self.since + MOST_MISSES
        return enough and self._looked >= MOST_MISSES

    def set_ready(self) -> None:
        self.since, self._looked, self.is_ready = None, 0, True

    def fail(self, error: Exception) -> None:
        self.problem = reply_text(error)

    def require_room(self, arrays: Sequence[Value]) -> None:
        """Raise an error if arrays of these shapes are too large, or if there are none."""
        if not arrays:
            raise InspectorError(
                f"The values of {self.site!r} cannot leave the loop or branch around it: a while "
                f"loop runs as often as the data demands, and within jax.shard_map each device has "
                f"only a part. Or it returns no array of numbers."
            )
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        if size > self.most:
            returned = ", ".join(type_text(x.dtype, x.shape) for x in arrays)
            alone = f" Ask for one example: run.values({self.site!r}, example=0)."
            raise InspectorError(
                f"{self.site!r} returns {returned}, {size / 2**20:,.1f} MiB; a run sends at most "
                f"{self.most // 2**20} MiB.{alone * (self.example is None)}"
            )
