"""Set up once for all tests: the CPU, and hypothesis without deadlines (compiling takes time)."""

import os
import tempfile
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# many tests compile the same small programs: compile each once a session
_cache = tempfile.TemporaryDirectory(prefix="nnx-inspector-xla-", ignore_cleanup_errors=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _cache.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import pytest  # noqa: E402 - jax reads the above when imported
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile(
    "nnx_inspector",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("nnx_inspector")


@pytest.fixture
def after_tabulate() -> Iterator[None]:
    """Takes off the classes what `nnx.tabulate` leaves on them for good.

    Without us too it leaves inherited methods on `nnx.Linear` and others; every later
    `nnx.capture(method_outputs=...)` of the process then recurses without end.
    """
    from leftovers import classes

    before = {cls: dict(vars(cls)) for cls in classes()}
    yield
    for cls, attributes in before.items():
        for name in set(vars(cls)) - set(attributes):
            if callable(getattr(cls, name)) and name != "__abstractmethods__":
                delattr(cls, name)
