"""What a benchmark ran on: the processor or accelerator, and the versions. No name, no path."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re

import jax

VERSIONS = ("jax", "flax", "numpy", "torch", "torchlens")


def processor() -> str:
    """The number of cores and their kind."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{os.cpu_count()} cores of {named[1] if named else model}"


def device() -> str:
    """What jax computes on by default."""
    first = jax.devices()[0]
    return processor() if first.platform == "cpu" else first.device_kind


def machine() -> str:
    """The device, the processor beside it, and the versions."""
    versions = []
    for name in VERSIONS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    kinds = " and ".join(dict.fromkeys([device(), processor()]))
    return f"{kinds}, Python {platform.python_version()}, {', '.join(versions)}"
