"""Set up once for all tests: the CPU, and hypothesis without deadlines (compiling takes time)."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# many tests compile the same small programs: compile each once a session
_cache = tempfile.TemporaryDirectory(prefix="nnx-inspector-xla-", ignore_cleanup_errors=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _cache.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

from hypothesis import HealthCheck, settings  # noqa: E402 - jax reads the above when imported

settings.register_profile(
    "nnx_inspector",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("nnx_inspector")
