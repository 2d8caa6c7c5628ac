"""Set up once for all tests: the CPU, and hypothesis without deadlines (compiling takes time)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "nnx_inspector",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("nnx_inspector")
