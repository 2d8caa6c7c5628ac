"""The calls that the equations of a program belong to, by the named scopes around them.

While a program is traced, each call of a module opens a scope, and one of a selected site another
one with its key. Invariant: an equation of a call that is not selected belongs to no site.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

CALL_SCOPE = "nnx_inspector_module"
"""The scope around the call (`__call__`) of any module."""


@functools.lru_cache(maxsize=256)
def _owner_prefix(owner: object) -> str:
    return f"nnx_inspector-{zlib.crc32(repr(owner).encode()):08x}:"


def scope_name(owner: object, site: str) -> str:
    """The name of the scope of a site's call, for an owner of marks."""
    return _owner_prefix(owner) + site


def site_in(owner: object, scopes: Sequence[str]) -> str | None:
    """The site of an owner that the innermost call belongs to; None if it is not selected."""
    start = _owner_prefix(owner)
    for name in reversed(scopes):
        if name.startswith(start):
            return name[len(start) :]
        if name == CALL_SCOPE:
            return None
    return None
