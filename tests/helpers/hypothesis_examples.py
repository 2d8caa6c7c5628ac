"""How many examples hypothesis makes: a handful in the run that everybody waits for."""

import os
from typing import Any

from hypothesis import settings

LONG = "NNX_INSPECTOR_TESTS_LONG"
"""The variable that `conftest.py` sets in a run of the long tests."""


def examples(count: int, *, of: int, **more: Any) -> settings:
    """The same few in each run, and in a run of the long tests as many others as `of`."""
    if LONG in os.environ:
        return settings(max_examples=of, derandomize=False, print_blob=True, **more)
    return settings(max_examples=count, **more)
