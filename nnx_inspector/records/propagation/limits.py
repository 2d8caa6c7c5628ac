"""What a healthy signal is, by depth and by width, each limit with its source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

HEALTHY: Final = 10.0
"""Glorot and Bengio 2010, "Understanding the difficulty of training deep feedforward neural
networks", figures 6 and 7: with their initialisation activations and gradients of all layers stay
within an order of magnitude. He et al. 2015, "Delving deep into rectifiers", keep them constant."""
TOO_DEEP: Final = math.exp(3.0)
"""Schoenholz et al. 2017, "Deep information propagation": networks train down to about six depth
scales, over which a second moment changes by a factor of e**6, a deviation by e**3."""
FLAT: Final = 0.15
"""Yang and Hu 2021, "Tensor programs IV": in muP the size of activations does not depend on the
width, a slope of 0; in the standard parametrisation it grows like the root of the width (0.5) or
faster after a few steps. A few seeds and widths give slopes to about this error."""


def hidden(sites: Sequence[str]) -> int:
    """How many of the sites are judged by depth: all but the head."""
    return len(sites) - 1 if len(sites) > 2 else len(sites)


def in_words(factor: float) -> str:
    """What a change by this factor over all layers is called.

    Example:
        >>> [in_words(x) for x in (1.3, 0.07, 1e-9, 15.0, float("inf"))]
        ['steady', 'falls', 'vanishes', 'grows', 'explodes']
    """
    if math.isnan(factor):
        return "unknown"
    if factor > HEALTHY:
        return "explodes" if factor > TOO_DEEP else "grows"
    if factor < 1 / HEALTHY:
        return "vanishes" if factor < 1 / TOO_DEEP else "falls"
    return "steady"
