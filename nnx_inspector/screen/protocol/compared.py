"""Messages to the browser for two passes that are compared, of one run or of two."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
    """The pass of another run that `insp.compare` put beside this one: a ShowPass of OTHER sends
    it. Buffer: none. `name` is what that run is called, "" where there is none (any more); `step`
    is None where it is of no step. `number` counts what was put there, so that it is pinned once.
    """

    type: ClassVar[str] = "other"
    version: int
    name: str
    step: int | None
    number: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """How far one site's quantity in two passes is apart; see `nni.compare`, whose `b` is the pass
    on screen. None: not known. `constant`: both are constant and differ, so that the quantile
    distance has no unit. `nan` and `nan_pinned` count NaNs.
    """

    site: str
    quantity: str
    where: Literal["both", "here", "pinned"]
    total_variation: float | None
    quantile_distance: float | None
    constant: bool
    mean_difference: float | None
    std_difference: float | None
    rms_difference: float | None
    nan: int | None
    nan_pinned: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """Two passes, site by site, in answer to the Compare with this id. Buffer: none.

    `number` is the pass on screen and `pinned` the one that it is compared with, by their numbers
    in the recording (or OTHER). `rows` are the first MOST_ROWS of `total`, the farthest apart
    first.
    """

    type: ClassVar[str] = "compared"
    version: int
    id: int
    number: int
    pinned: int
    rows: tuple[ComparedRow, ...]
    total: int
