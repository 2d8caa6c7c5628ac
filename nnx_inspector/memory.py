"""How much memory a traced program needs for its values, and how much there is.

Invariant: runs and compiles nothing. What a program needs is an estimate from above: every value
counts from where it is made to its last use, though XLA fuses many of them away.
"""

from __future__ import annotations

import math
import os
import pathlib
from typing import Any

from nnx_inspector import _private
from nnx_inspector.arrays import is_array

_MEMINFO = pathlib.Path("/proc/meminfo")
_GROUP = pathlib.Path("/sys/fs/cgroup")
_UNKNOWN = 4 << 30


def peak_bytes(jaxpr: Any) -> int:
    """The most bytes of values that are alive at once, without the program's own inputs."""
    bare, _ = _private.open_jaxpr(jaxpr)
    last: dict[Any, int] = {}
    for number, equation in enumerate(bare.eqns):
        last.update((v, number) for v in equation.invars if not _private.is_literal(v))
    last.update((v, len(bare.eqns)) for v in bare.outvars if not _private.is_literal(v))
    alive: dict[Any, int] = {}
    total = most = 0
    for number, equation in enumerate(bare.eqns):
        for v in equation.outvars:
            alive[v] = _bytes(v.aval)
            total += alive[v]
        inside = max((peak_bytes(inner) for inner in _private.sub_jaxprs(equation)), default=0)
        most = max(most, total + inside)
        for v in {*equation.outvars, *(v for v in equation.invars if not _private.is_literal(v))}:
            if last.get(v, number) == number:
                total -= alive.pop(v, 0)
    return most


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize if is_array(aval) else 0


def available_bytes(device: Any) -> int:
    """The bytes that a program may still take on a device; on a CPU those of the machine, or of
    the container that this runs in.
    """
    figures = device.memory_stats() if device.platform != "cpu" else None
    if figures and "bytes_limit" in figures:
        return max(0, figures["bytes_limit"] - figures.get("bytes_in_use", 0))
    found = [n for n in (_of_machine(), _of_container()) if n is not None]
    return min(found) if found else _UNKNOWN


def _of_machine() -> int | None:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None


def _of_container() -> int | None:
    limit, current = (_GROUP / name for name in ("memory.max", "memory.current"))
    if not limit.exists() or not current.exists():
        return None
    text = limit.read_text().strip()
    return max(0, int(text) - int(current.read_text())) if text.isdigit() else None
