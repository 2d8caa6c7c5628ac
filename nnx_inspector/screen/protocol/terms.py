"""What the messages count in: versions, axes, bounds and words."""

from __future__ import annotations

from typing import Final, Literal

from nnx_inspector.recordings.history import HISTORY_BINS as HISTORY_BINS
from nnx_inspector.recordings.history import HISTORY_QUANTILES as HISTORY_QUANTILES
from nnx_inspector.stats.summary import STATISTICS as STATISTICS

VERSION: Final = 5

QUANTITIES: Final = ("output", "gradient")
"""What is measured at a site; the second axis of `Frame`'s table."""

SPARK: Final = 32
"""Heights in a sparkline: bytes, the highest is 255."""

MOST_SITES: Final = 100
"""Sites that are named of one perturbation; `reach` counts them all."""
MOST_EFFECTS: Final = 12
"""Downstream sites in an `Effect`."""
MOST_FINDINGS: Final = 30
"""In a `Findings`; `more` counts the others."""

MOST_NODES: Final = 200
"""Nodes of a graphdef in an `Nnx`; `nodes_total` counts them all, and so for what follows."""
MOST_VARIABLES: Final = 300
MOST_MODES: Final = 60
MOST_ATTRIBUTES: Final = 24
"""Static attributes that are told of one node."""
MOST_ALIASES: Final = 4
"""Other paths that are told of one node or Variable."""
LONGEST_ERROR: Final = 400
"""Characters of what is wrong with a message."""
LONGEST_TEXT: Final = 160
"""Characters of one text of a user's model in an `Nnx`."""

MOST_UNITS: Final = 16_384
"""Units of a mask that can be edited on screen, and of a `UnitFigures`."""
MOST_ROWS: Final = 300
"""Rows in a `Sweep` or a `Compared`, ranked; `measured` and `total` count them all."""
OTHER: Final = -1
"""In place of a pass's number: the pass of another run that an `Other` told of."""

UNIT_FIGURES: Final = ("mean", "std", "norm", "min", "max", "zero_fraction", "nonfinite")
"""What is known of each unit; the first axis of the buffer of `UnitFigures`."""

Part = Literal["output", "input"]
"""Where at a site a perturbation of a value or of its gradient acts."""


ValuePart = Literal["output", "input", "gradient", "parameter"]
"""Which arrays of a site."""
Component = Literal["value", "real", "imag", "abs"]
"""What of complex numbers is shown; "value" is their magnitude."""
