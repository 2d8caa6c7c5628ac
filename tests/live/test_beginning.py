"""What a pass sends about its beginning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.live.beginning import sampled_if, samples_of
from nnx_inspector.stats.gauges import STATE_HEAD


@pytest.mark.parametrize("jitted", [False, True])
def test_a_batch_of_passes_begins_once(jitted):
    """One pass with all of its examples, for the first of its models."""
    kernels = jax.random.normal(jax.random.key(0), (3, 4, 2))
    same, other = jnp.ones((3, 5, 4)), jnp.arange(3.0)
    begin = jax.vmap(sampled_if, in_axes=(None, [0], [0, 0]), out_axes=None)
    begin = jax.jit(begin) if jitted else begin
    told = begin(jnp.array(True), [kernels], [same, other])
    first = samples_of([kernels[0]], [same.reshape(15, 4), other])
    np.testing.assert_array_equal(told, first)
    assert told[1, len(STATE_HEAD)] == 1, "the second argument differs"
    alike = begin(jnp.array(True), [kernels], [same, jnp.ones(3)])
    assert alike[1, len(STATE_HEAD)] == 0
    assert not begin(jnp.array(False), [kernels], [same, other]).any()
