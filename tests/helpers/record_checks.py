"""A Summary of a record against NumPy in float64, and the arrays that a record covers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def assert_summary(summary, values, rtol=2e-5, atol=1e-6):
    """Check the figures of a Summary of `values` against NumPy in float64."""
    v = np.asarray(values).astype(np.float64)
    assert summary.size == v.size
    counts = [int(is_one(v).sum()) for is_one in (np.isnan, np.isposinf, np.isneginf)]
    assert [summary.nan, summary.posinf, summary.neginf] == counts
    norm = np.sqrt((v**2).sum())
    expected = {"mean": v.mean(), "std": v.std(), "min": v.min(), "max": v.max(), "norm": norm}
    for name, number in expected.items():
        np.testing.assert_allclose(getattr(summary, name), number, rtol, atol, err_msg=name)


def assert_rows(summary, rows, **tolerance):
    """Check that row i of a summary is the summary of the i-th values."""
    assert summary.rows == (len(rows),)
    for i, values in enumerate(rows):
        assert_summary(summary.row(i), values, **tolerance)


def summaries(tree):
    is_leaf = lambda x: hasattr(x, "histogram")  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=is_leaf) if is_leaf(x)]


def arrays_in(tree):
    """The arrays that a summary covers: every array of a pytree except PRNG keys."""
    return [
        np.asarray(x)
        for x in jax.tree.leaves(tree)
        if isinstance(x, (jax.Array, np.ndarray))
        and not (isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
    ]
