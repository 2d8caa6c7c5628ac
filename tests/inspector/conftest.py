"""An inspector without a screen, which is closed when its test ends."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import nnx_inspector as nni


@pytest.fixture
def inspect() -> Iterator[Callable[..., nni.Inspector]]:
    made: list[nni.Inspector] = []

    def make(*args: Any, **kwargs: Any) -> nni.Inspector:
        made.append(nni.Inspector(*args, display=False, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()
