"""Moments of parts, combined, against NumPy on the whole."""

from __future__ import annotations

import numpy as np
import pytest

from nnx_inspector.stats.moments import MAXIMUM, MINIMUM, SCALE, SHIFT, SUM1, SUM2, merge_moments


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    d = (x - x[0]) / 1024
    return np.array([x.min(), x.max(), x[0]]), np.array([1024.0, d.sum(), (d * d).sum()])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_parts_are_the_whole(scale: float) -> None:
    rng = np.random.default_rng(0)
    parts = [1e4 + i + scale * rng.normal(size=10 + i) for i in range(9)]
    each = [moments(x) for x in parts]
    n = np.array([float(len(x)) for x in parts])
    points, sums = merge_moments(np.stack([p for p, _ in each]), np.stack([s for _, s in each]), n)
    whole, many = np.concatenate(parts), n.sum()
    assert (points[MINIMUM], points[MAXIMUM]) == (whole.min(), whole.max())
    mean = sums[SUM1] / many
    assert points[SHIFT] + sums[SCALE] * mean == pytest.approx(whole.mean(), rel=1e-12)
    variance = sums[SUM2] / many - mean**2
    assert sums[SCALE] * np.sqrt(variance) == pytest.approx(whole.std(), rel=1e-9)


def test_none_and_unknown() -> None:
    assert not merge_moments(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))[0].any()
    known, unknown = np.ones(3), np.full(3, np.nan)
    points, sums = merge_moments(np.stack([known, unknown]), np.ones((2, 3)), np.ones(2))
    assert np.isnan(points).all()
    assert np.isnan(sums).all()
