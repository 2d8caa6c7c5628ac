"""Constants of the messages: versions, axes, bounds and words."""

from __future__ import annotations

from typing import Final, Literal

from nnx_inspector.recordings.history import HISTORY_BINS as HISTORY_BINS
from nnx_inspector.recordings.history import HISTORY_QUANTILES as HISTORY_QUANTILES
from nnx_inspector.recordings.tree_rows import PARAMETER_QUANTITIES as PARAMETER_QUANTITIES
from nnx_inspector.stats import table
from nnx_inspector.stats.summary import STATISTICS as STATISTICS

VERSION: Final = 7

QUANTITIES: Final = ("output", "gradient")
"""The measured quantities of a site; the second axis of `Frame`'s table."""

ROW_STATS: Final = ("update_ratio", "update_lost", "parameter_norm", "parameter_gradient_norm")
"""The figures of a row's own parameters: the largest ratio of an update's norm to the parameter's,
the largest share of an update that the parameter's dtype rounds to nothing, and the norm of all of
them, and of their gradients."""
MOST_PARAMETERS: Final = 16
"""The most parameters of one site in a `Frame`; `more` counts the others."""

SPARK: Final = 32
"""The number of heights in a sparkline. A height is a byte; the highest is 255."""

MOST_SITES: Final = 100
"""The most sites that one `Perturbation` names; `reach` counts them all."""
MOST_EFFECTS: Final = 12
"""The most downstream sites in an `Effect`."""
MOST_MOVED: Final = 500
"""The most sites of which an `Effect` says how far they moved."""
MOST_FINDINGS: Final = 30
"""The most findings in a `Findings`; `more` counts the others."""

MOST_NODES: Final = 200
"""The most nodes in an `Nnx`; `nodes_total` counts them all. The next two are alike."""
MOST_VARIABLES: Final = 300
MOST_MODES: Final = 60
MOST_ATTRIBUTES: Final = 24
"""The most static attributes of one node."""
MOST_ALIASES: Final = 4
"""The most other paths of one node or Variable."""
LONGEST_ERROR: Final = 400
"""The most characters of a `ProtocolError`."""
LONGEST_INPUT: Final = 65_536
"""The most characters of one text from the browser, as of a name in a recording."""
LARGEST_INTEGER: Final = 2**53
"""The largest integer that JavaScript has exactly."""
LONGEST_TEXT: Final = 160
"""The most characters of one text of a user's model in an `Nnx`."""

MOST_UNITS: Final = 16_384
"""The most units of a mask that can be edited on screen, and of a `UnitStats`."""
MOST_COMPILED: Final = 100
"""The most functions that a `Compilations` lists."""
MOST_RANKED: Final = 300
"""The most ranked rows in a `Sweep` or a `Compared`; `measured` and `total` count them all."""
OTHER: Final = -1
"""Stands for a pass's number: the pass of another run that an `Other` announced."""
CLEAN: Final = -2
"""Pass n without its perturbations has the number CLEAN - n; its frame comes before that of n."""

UNIT_STATS: Final = ("mean", "std", "norm", "min", "max", "zero_fraction", "nonfinite", "dead")
"""The figures of each unit, "dead" as 1 or 0; the first axis of the buffer of `UnitStats`."""

CASTS: Final = tuple(table.CASTS)
"""The dtypes of a `Casts`."""
CAST_STATS: Final = ("to_zero", "subnormal", "overflow", "scaled_to_zero", "scaled_subnormal")
"""Shares of the finite values, in each dtype: those that would be rounded to 0, lose precision
because they are too small, or be too large; and the first two with the array scaled to the dtype's
largest number."""
MOST_CASTS: Final = 2000
"""The most rows of a `Casts`; `total` counts them all."""

MOST_CHOICES: Final = 64
"""The most rows of a `Choices`; `more` counts the others."""

POSITION_STATS: Final = ("norm", "unit", "gradient", "gradient_times_activation")
"""The figures of a site at one position: the norm over its units, the value of one unit, the norm
of the gradient, and the gradient times the value, added up over the units."""

Part = Literal["output", "input"]
"""The end of a site where a perturbation of a value or of its gradient acts."""


ValuePart = Literal["output", "input", "gradient", "parameter", "attention"]
"""The arrays of a site that can be read."""
Component = Literal["value", "real", "imag", "abs"]
"""The part of complex numbers that is shown; "value" is their magnitude."""
