"""Values, and their summaries, that the tests of a recording share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from nnx_inspector.summarize import summarize
from nnx_inspector.summary import Summary

Values = npt.NDArray[Any]


def summary_of(x: Values) -> Summary:
    return summarize(jnp.asarray(x)).merged()


def normal(seed: int, n: int = 1000, scale: float = 1.0) -> Values:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def fields(s: Summary) -> list[bytes]:
    return [np.asarray(a).tobytes() + str(a.dtype).encode() for a in (s.bins, s.points, s.sums)]


VALUES = {
    "normal": normal(0),
    "scaled": normal(1, scale=1e-20),
    "zeros": np.zeros(7, np.float32),
    "signed zeros": np.array([0.0, -0.0, 1.0], np.float32),
    "one": np.array([-3.5], np.float32),
    "nothing": np.zeros(0, np.float32),
    "nan": np.full(5, np.nan, np.float32),
    "mixed": np.array([np.nan, 1, np.inf, -np.inf, -2, 0], np.float32),
    "subnormal": np.array([1e-40, -1e-40, 0.0, 1.0], np.float32),
    "extreme": np.array([-3.4e38, 3.4e38, 1e-38], np.float32),
    "integers": np.array([-(2**31), 2**31 - 1, 0], np.int32),
    "unsigned": np.array([2**32 - 1, 3], np.uint32),
    "bool": np.array([True, False, True]),
}
