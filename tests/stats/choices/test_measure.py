"""The figures of each head, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import causal, heads_in_numpy, padded

from nnx_inspector.stats.choices.measure import Heads
from nnx_inspector.stats.choices.rows import (
    CHOICE_STATS,
    HEAD_STATS,
    LENGTH,
    MOST_EXAMPLES,
    MOST_QUERIES,
    merge_rows,
)

B, H, Q = 3, 2, 7


def measured(logits: Any, allowed: Any = True, **how: Any) -> dict[str, np.ndarray]:
    logits = jnp.asarray(logits)
    masked = jnp.where(jnp.asarray(allowed), logits, -1e9)
    heads = Heads(logits.shape, (0, 1, 2, 3), logits.shape, **how)
    found = np.asarray(jax.jit(heads)(jax.nn.softmax(masked), masked))
    assert found.shape == (logits.shape[1], LENGTH)
    return dict(zip(CHOICE_STATS, merge_rows([found]).T, strict=True))


def check(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], **how: Any) -> None:
    for name in HEAD_STATS:
        np.testing.assert_allclose(
            found[name], expected[name], err_msg=name, **{"rtol": 2e-5, "atol": 2e-6, **how}
        )


@pytest.mark.parametrize("scale", [0.0, 1.0, 40.0, 1e3])
@pytest.mark.parametrize(
    "allowed", [True, causal(Q), padded([7, 1, 4], Q), causal(Q) & padded([7, 1, 4], Q)]
)
def test_figures_are_those_of_numpy(scale: float, allowed: Any):
    logits = scale * jax.random.normal(jax.random.key(0), (B, H, Q, Q))
    check(measured(logits, allowed), heads_in_numpy(logits, allowed))


def test_queries_and_keys_may_differ_in_number():
    logits = jax.random.normal(jax.random.key(0), (B, H, Q, Q + 2))
    check(measured(logits), heads_in_numpy(logits))


def test_a_key_is_not_masked_because_its_probability_is_too_small_for_a_number():
    logits = jnp.array([0.0, -200.0, -1000.0])[None, None, None]
    assert measured(logits)["keys"] == 3
    assert measured(logits, [True, True, False])["keys"] == 2


def test_a_query_with_one_key_is_not_looked_at():
    logits = jnp.full((2, 1, 1, 1), 5.0)
    found = measured(logits)
    assert np.isnan([found[name] for name in CHOICE_STATS]).all()


def test_of_many_examples_and_queries_evenly_spaced_ones_are_looked_at():
    logits = jax.random.normal(jax.random.key(0), (3 * MOST_EXAMPLES, 1, 2 * MOST_QUERIES, 5))
    logits = logits.at[1, 0, 0, 0].set(99.0)  # looked at by the greatest logit only
    expected = heads_in_numpy(logits[::3, :, 1::2])
    found = measured(logits)
    assert found["logit"] == 99
    check({**found, "logit": expected["logit"]}, expected)


def test_base_two():
    logits = jax.random.normal(jax.random.key(0), (B, H, Q, Q))
    heads = Heads(logits.shape, (0, 1, 2, 3), logits.shape, float(np.log(2)))
    rows = merge_rows([heads(jax.nn.softmax(logits), logits / np.log(2))])
    check(dict(zip(CHOICE_STATS, rows.T, strict=True)), heads_in_numpy(logits))


def test_nothing_is_known_of_nan_and_calls_without_queries_do_not_count():
    logits = jnp.ones((1, 1, 2, 2)).at[0, 0, 0, 0].set(jnp.nan)
    assert measured(logits)["keys"] == 2  # of the other query
    assert np.isnan(measured(jnp.full((1, 1, 2, 2), jnp.nan))["logit"]).all()


def test_calls_are_merged_by_the_queries_that_each_looked_at():
    both = jax.random.normal(jax.random.key(0), (6, H, Q, Q))
    parts = both[:2], both[2:]
    rows = [Heads(x.shape, (0, 1, 2, 3), x.shape)(jax.nn.softmax(x), x)[None] for x in parts]
    check(dict(zip(CHOICE_STATS, merge_rows(rows).T, strict=True)), heads_in_numpy(both))
