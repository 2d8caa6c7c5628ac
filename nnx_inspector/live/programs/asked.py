"""The values of one site in one pass, which somebody asks of a loop that is running.

The program that measures also keeps them: a variant of its own, which exists only once they were
asked for. A thread compiles it while the loop goes on; then the next pass is measured with it.
Invariant: values that are too large are refused before anything runs.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from nnx_inspector.errors import InspectorError, reply_text
from nnx_inspector.program.plan import Keep, Kept


@dataclasses.dataclass(frozen=True)
class KeepOne(Keep):
    """Keeps what `values` makes of each array, and of one site the arrays too.

    Attributes:
        site: the site.
        example: the entry of the first axis to keep; None for the whole.
    """

    site: str = ""
    example: int | None = None

    def of(self, x: jax.Array, *, site: str, mapped: int = 0) -> Kept:
        kept = super().of(x, site=site, mapped=mapped)
        if not self.values or site != self.site:
            return kept
        return dataclasses.replace(kept, value=(kept.value, self._part(x)))

    def _part(self, x: jax.Array) -> jax.Array:
        if self.example is None:
            return x
        if not x.ndim or self.example >= x.shape[0]:
            raise InspectorError(
                f"{self.site!r} returns {_named(x)}, which has no example {self.example}."
            )
        return x[self.example : self.example + 1]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KeptCall:
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
    values: tuple[Any, ...]
    mapped: tuple[int, ...]
    loops: int
    members: bool
    ran: Any


class Asked:
    """A request for the values of one site.

    Args:
        most: the most bytes that the values may have.
        since: how many passes had begun by then.
        ready: called once a program is compiled that keeps them.

    Attributes:
        is_sought: whether no program was seen yet that calls the site.
        is_ready: whether the next measured passes have the values.
        problem: why there will be none; "" if there may be.
    """

    def __init__(
        self,
        site: str,
        example: int | None,
        *,
        most: int,
        since: int,
        ready: Callable[[], object],
    ):
        self.site, self.example, self.most, self.since = site, example, most, since
        self.is_sought, self.is_ready, self.problem = True, False, ""
        self._ready, self._lock = ready, threading.Lock()

    def kept_beside(self, keep: Keep) -> KeepOne:
        own = {field.name: getattr(keep, field.name) for field in dataclasses.fields(keep)}
        return KeepOne(**own, site=self.site, example=self.example)

    def take_up(self) -> bool:
        """Whether this is the first program that calls the site."""
        with self._lock:
            first, self.is_sought = self.is_sought, False
            return first

    def be_ready(self) -> None:
        self.is_ready = True
        self._ready()

    def fail(self, error: Exception) -> None:
        self.problem = reply_text(error)

    def require_room(self, arrays: Sequence[Any]) -> None:
        """Raise an error if arrays of these shapes are too large, or if there are none."""
        if not arrays:
            raise InspectorError(
                f"The values of {self.site!r} cannot leave the loop or branch around it: a while "
                f"loop runs as often as the data demands, and within jax.shard_map each device has "
                f"only a part. Or it returns no array of numbers."
            )
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        if size > self.most:
            alone = (
                ""
                if self.example is not None
                else (f" Ask for one example: run.values({self.site!r}, example=0).")
            )
            raise InspectorError(
                f"{self.site!r} returns {', '.join(map(_named, arrays))}, {size / 2**20:,.1f} MiB; "
                f"a run sends at most {self.most // 2**20} MiB.{alone}"
            )


def _named(x: Any) -> str:
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
