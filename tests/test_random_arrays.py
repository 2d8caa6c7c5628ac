"""The random arrays of the tests are those of jax, bit for bit."""

import jax
import numpy as np
import pytest
from random_arrays import DRAW_NAMES


@pytest.mark.parametrize("name", DRAW_NAMES)
def test_the_numbers_are_those_of_jax(name):
    draw, key = getattr(jax.random, name), jax.random.key(3)
    bounds = (-2, 2) if name == "truncated_normal" else ()
    for shape in ((1,), (5, 13)):
        found, expected = (f(key, *bounds, shape) for f in (draw, draw.__wrapped__))
        assert (found.dtype, found.weak_type) == (expected.dtype, expected.weak_type)
        assert found.committed == expected.committed
        np.testing.assert_array_equal(found, expected, strict=True)
    np.testing.assert_array_equal(jax.jit(lambda: draw(key, *bounds, shape))(), expected)
