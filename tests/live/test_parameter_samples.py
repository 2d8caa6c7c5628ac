"""What a pass sends about its beginning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.program.editing.functions import Partial, samples_at_beginning
from nnx_inspector.stats.samples.parameter_stats import STATE_HEAD
from nnx_inspector.stats.samples.sample_parameters import sample_parameters


@pytest.mark.parametrize("jitted", [False, True])
def test_a_batch_of_passes_begins_once(jitted):
    """One pass with all of its examples, for the first of its models."""
    kernels = jax.random.normal(jax.random.key(0), (3, 4, 2))
    same, other = jnp.ones((3, 5, 4)), jnp.arange(3.0)
    begin = Partial(samples_at_beginning, 1, ((0,), (0,), (0,)))
    begin = jax.jit(begin.__call__) if jitted else begin
    found = begin(kernels, same, other)
    first = sample_parameters([kernels[0]], [same.reshape(15, 4), other])
    np.testing.assert_array_equal(found, first)
    assert found[1, len(STATE_HEAD)] == 1, "the second argument differs"
    alike = begin(kernels, same, jnp.ones(3))
    assert alike[1, len(STATE_HEAD)] == 0
