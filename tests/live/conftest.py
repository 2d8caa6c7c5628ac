"""What the tests of watched loops share."""

from collections.abc import Iterator

import pytest
from leftovers import nothing_left


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Whatever the test did, jax, flax and the classes are as they were before it."""
    with nothing_left():
        yield
