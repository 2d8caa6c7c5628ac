"""Metrics: values that are not finite are kept, and the number of points is bounded."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from interrupts import Interrupt

from nnx_inspector.recordings.curves import Curves, Tally
from nnx_inspector.recordings.recording import Recording


def test_metrics_keep_what_is_not_finite_and_are_bounded() -> None:
    recording = Recording(max_steps=20)
    recording.append(0, {}, metrics={"loss": 1.5})
    recording.add_metrics(1, {"loss": float("nan"), "val/acc": jnp.float32(0.5)})  # type: ignore[dict-item]
    recording.add_metrics(1, {"loss": float("-inf")})
    curves = recording.curves()
    np.testing.assert_array_equal(curves["loss"], [[0, 1.5], [1, np.nan], [1, -np.inf]])
    np.testing.assert_array_equal(curves["val/acc"], [[1, 0.5]])
    frame = recording.metrics_frame()
    assert list(frame.columns) == ["step", "name", "value"]
    assert frame["step"].tolist() == [0, 1, 1, 1]
    np.testing.assert_array_equal(frame["value"], [1.5, np.nan, -np.inf, 0.5])
    for i in range(2, 3000):
        recording.add_metrics(i, {"loss": i if i < 1000 else np.nan})
    loss = recording.curves()["loss"]
    assert len(loss) <= 200
    assert len(loss) + 1 + recording.thinned_points == 3 + 1 + 2998
    np.testing.assert_array_equal(loss[[0, 1, -1]], [[0, 1.5], [1, np.nan], [2999, np.nan]])
    assert 1000 in loss[:, 0]  # where the curve left the finite numbers
    assert "metric points thinned out" in repr(recording)


@pytest.mark.parametrize("most", [2, 100])
def test_an_interrupt_at_any_line_leaves_whole_points_and_exact_counts(most: int) -> None:
    values = [1.0, np.nan, 2.0, np.inf, 3.0, np.nan]
    interrupted = -1
    done = False
    while not done:
        interrupted += 1
        curves = Curves(most, 2**20)
        try:
            with Interrupt(interrupted):
                for i, value in enumerate(values):
                    curves.add(i, {"loss": value, "other": 0.5})
            done = True
        except KeyboardInterrupt:
            pass
        tally = curves.tallies().get("loss", Tally())
        came = np.array(values[: tally.points])
        assert tally[1:3] == (np.isnan(came).sum(), np.isinf(came).sum())
        assert tally.first == (1 if tally.points > 1 else 0)
        kept = curves.arrays().get("loss", np.empty((0, 2)))
        assert len(kept) == tally.points - curves.dropped().get("loss", Tally()).points
        np.testing.assert_array_equal(kept[:, 1], came[kept[:, 0].astype(int)])
        curves.add(9, {"loss": 4.0})
        assert curves.tallies()["loss"].points == tally.points + 1
    assert interrupted > 20 * len(values)
