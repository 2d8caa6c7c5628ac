"""Messages to the browser for the comparison of two passes or of the weights of two models."""

from __future__ import annotations

from typing import Literal

from nnx_inspector.screen.protocol.headers import Struct, ToBrowser


class Other(ToBrowser, type="other"):
    """The pass of another run that `insp.compare` offers; a ShowPass of OTHER sends it. Buffer:
    none. `name` is that run's name, "" if there is no other run. `step` is None if the pass belongs
    to no step. `number` counts the passes offered, so that the browser pins each one once.
    """

    name: str
    step: int | None
    number: int


class ComparedRow(Struct):
    """The distance between one site's quantity in two passes; see `nni.compare`, whose `b` is the
    pass on screen. None: unknown. `constant`: both are constant and differ, so the quantile
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
    shapes: str


class Compared(ToBrowser, type="compared"):
    """Two passes, site by site, in answer to the Compare with this id. Buffer: none.

    `number` is the pass on screen and `pinned` the pass that it is compared with, by their numbers
    in the recording (or OTHER). `rows` are the first MOST_RANKED of `total`, largest difference
    first.
    """

    id: int
    number: int
    pinned: int
    rows: tuple[ComparedRow, ...]
    total: int


class WeightRow(Struct):
    """How far one array of weights is from the other side's; see `nni.compare_weights`, whose `b`
    is the model on screen. None: unknown. `change` holds the heights of the histogram of the
    difference, SPARK bytes in hexadecimal; "" if there is none.
    """

    parameter: str
    array: str
    where: Literal["both", "here", "pinned"]
    distance: float | None
    relative_change: float | None
    total_variation: float | None
    change: str


class Weights(ToBrowser, type="weights"):
    """The weights of the model against those of `name`, when they were compared. Buffer: none.

    `name` is "" if there is no comparison. `rows` are the first MOST_RANKED of `total`, largest
    relative change first.
    """

    name: str
    rows: tuple[WeightRow, ...]
    total: int
