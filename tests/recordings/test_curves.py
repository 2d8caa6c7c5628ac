"""Metrics: values that are not finite are kept, and the number of points is bounded."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

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
