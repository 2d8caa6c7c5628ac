"""The curves of metrics as the browser gets them: gaps are kept and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen.frames import curves_of

NAN, INF = float("nan"), float("inf")


def sent(**metrics: list[float]) -> tuple[Any, dict[str, np.ndarray]]:
    """The message for these values, and the points of each metric."""
    recording = Recording()
    for name, values in metrics.items():
        for step, value in enumerate(values):
            recording.add_metrics(step, {name: value})
    message, buffer = curves_of(recording, points=600)
    ends = np.cumsum(message.points)[:-1]
    rows = np.frombuffer(buffer, "<f8").reshape(-1, 2)
    return message, dict(zip(message.names, np.split(rows, ends), strict=True))


def test_what_is_not_finite_is_counted() -> None:
    message, points = sent(loss=[1.0, NAN, INF, -INF, 2.0], accuracy=[0.5, 0.25])
    assert (message.recorded, message.not_finite) == ((5, 2), (3, 0))
    np.testing.assert_array_equal(points["loss"][:, 1], [1.0, NAN, NAN, NAN, 2.0])
    np.testing.assert_array_equal(points["accuracy"], [[0, 0.5], [1, 0.25]])


@pytest.mark.parametrize("one", [0, 1, 4321, 8998, 8999])
@pytest.mark.parametrize("most", [NAN, 1.0])
def test_one_value_unlike_the_others_of_a_long_curve_is_kept(one: int, most: float) -> None:
    values = [most] * 9000
    values[one] = 2.0 if np.isnan(most) else INF
    message, points = sent(loss=values)
    assert message.not_finite == (8999 if np.isnan(most) else 1,)
    steps, shown = points["loss"].T
    assert np.isfinite(shown[steps == one]).tolist() == [np.isnan(most)]
    assert steps[0] == 0
    assert steps[-1] == 8999
    assert (np.diff(steps) > 0).all()


def test_a_long_curve_is_bounded_and_evenly_spaced() -> None:
    finite = [float(step) for step in range(9000)]
    _, points = sent(loss=finite, mixed=[NAN if step % 2 else 1.0 for step in range(9000)])
    np.testing.assert_array_equal(points["loss"][:, 0], [*range(0, 9000, 15), 8999])
    np.testing.assert_array_equal(*points["loss"].T)
    assert len(points["mixed"]) <= 2 * 600 + 1
