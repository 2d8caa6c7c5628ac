"""Runs tests again in a process with four devices."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

FLAG = "--xla_force_host_platform_device_count=4"
UNOPTIMIZED = "--xla_backend_optimization_level=0"
"""Machine code is made in two thirds of the time. What devices exchange is decided before that, and
is what the tests with several devices are about."""


def on_four_devices(path: str, *names: str, beside: Sequence[pathlib.Path] = ()) -> None:
    """Run the tests of a file, and of those beside it, whose names contain one of these, each with
    all of its cases.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAG} {UNOPTIMIZED}"
    every = ["-m", "long or not long"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *every]
    found = subprocess.run(
        [*command, path, *map(str, beside), "-k", " or ".join(names)],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
