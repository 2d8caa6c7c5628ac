"""What can be added by a click."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """A kind that the screen may add: no message, but a row of OFFERS.

    `does` ends the sentence "This will ...". `strength` is what it is added with at first (None:
    it has none); `low` and `high` are the slider's range; `least` is the least it may be.
    """

    kind: str
    group: Literal["value", "gradient"]
    does: str
    strength_name: str = ""
    strength: float | None = None
    low: float = 0.0
    high: float = 0.0
    least: float | None = None


OFFERS: Final = (
    Offer(kind="Zero", group="value", does="replace it by zeros"),
    Offer(kind="Mean", group="value", does="replace it by its mean over the batch"),
    Offer(
        kind="Scale", group="value", does="multiply it by the factor",
        strength_name="factor", strength=1.0, low=0.0, high=2.0,
    ),
    Offer(
        kind="Shift", group="value", does="add the strength to every number",
        strength_name="strength", strength=1.0, low=-2.0, high=2.0,
    ),
    Offer(
        kind="Noise", group="value", does="add Gaussian noise of this std",
        strength_name="std", strength=0.1, low=0.0, high=1.0, least=0.0,
    ),
    Offer(
        kind="Clamp", group="value", does="cut it off at ± the limit",
        strength_name="limit", strength=1.0, low=0.0, high=4.0, least=0.0,
    ),
    Offer(kind="Cast", group="value", does="round it to bfloat16 and back"),
    Offer(
        kind="ScaleGradient", group="gradient", does="multiply its gradient by the factor",
        strength_name="factor", strength=1.0, low=0.0, high=2.0,
    ),
    Offer(kind="StopGradient", group="gradient", does="let no gradient back through it"),
    Offer(
        kind="ReverseGradient", group="gradient", does="multiply its gradient by −factor",
        strength_name="factor", strength=1.0, low=0.0, high=2.0,
    ),
    Offer(
        kind="ClipGradient", group="gradient", does="limit its gradient to this norm",
        strength_name="norm", strength=1.0, low=0.0, high=10.0, least=0.0,
    ),
)  # fmt: skip
"""What can be added by a click, in the order of the menu. Python can do more."""
