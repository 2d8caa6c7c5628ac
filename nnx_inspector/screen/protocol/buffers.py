"""The binary part of messages: arrays one after another, little-endian throughout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def frame_buffer(
    table: np.ndarray, histograms: Sequence[np.ndarray], sparklines: np.ndarray
) -> bytes:
    parts = [np.ascontiguousarray(table, "<f8").tobytes()]
    parts += [np.ascontiguousarray(h, "<f8").tobytes() for h in histograms]
    parts.append(np.ascontiguousarray(sparklines, "u1").tobytes())
    return b"".join(parts)


def history_buffer(
    steps: np.ndarray, quantiles: np.ndarray, edges: np.ndarray, fractions: np.ndarray
) -> bytes:
    arrays = (steps, quantiles, edges, fractions)
    return b"".join(np.ascontiguousarray(a, "<f8").tobytes() for a in arrays)


def curves_buffer(curves: Sequence[np.ndarray]) -> bytes:
    """The buffer of a `Curves`: one float64 [points, 2] for each name."""
    return b"".join(np.ascontiguousarray(c, "<f8").tobytes() for c in curves)


def parameters_buffer(table: np.ndarray, histograms: Sequence[np.ndarray]) -> bytes:
    """The buffer of a `Parameters`: float64 [parameters, statistic], then each histogram."""
    return b"".join(np.ascontiguousarray(a, "<f8").tobytes() for a in (table, *histograms))


def units_buffer(figures: np.ndarray) -> bytes:
    """The buffer of a `UnitFigures`: float64 [UNIT_FIGURES, units]."""
    return np.ascontiguousarray(figures, "<f8").tobytes()


def passes_buffer(rows: Sequence[Sequence[float]]) -> bytes:
    """The buffer of a `Passes`: number, step, perturbed, kind and setting of each."""
    return np.array(rows, "<f8").reshape(-1, 5).tobytes()


def values_buffer(planes: Sequence[np.ndarray], encoding: str) -> bytes:
    dtypes = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "uint64": "<u8"}
    parts = [np.ascontiguousarray(p, dtypes[encoding]).tobytes() for p in planes]
    return b"".join(part + bytes(-len(part) % 8) for part in parts)
