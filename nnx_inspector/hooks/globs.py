"""Globs over the keys of sites, and how a key escapes the characters that have a meaning there.

Invariant: matching takes time that grows with the product of both lengths, whatever the glob: it
may come from a browser. Does not know what a site is.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Sequence


@functools.lru_cache(maxsize=4096, typed=True)
def escape(segment: str | int) -> str:
    """One segment of a path, with `/ : [ @ ( )` and backslashes escaped by a backslash."""
    return re.sub(r"([\\/:\[@()])", r"\\\1", str(segment))


def split_escaped(text: str, separator: str) -> list[str]:
    """Split at each separator that is not escaped by a backslash; the parts stay escaped."""
    if not isinstance(text, str):
        raise TypeError(f"A site's key is a text such as 'blocks/0/attn', got {text!r}.")
    if "\\" not in text:
        return text.split(separator)
    parts = list[list[str]]([[]])
    for piece in re.findall(r"\\.|.", text, re.DOTALL):  # an escaped character is one piece
        if piece == separator:
            parts.append([])
        else:
            parts[-1].append(piece)
    return list(map("".join, parts))


def escaped_glob(key: str) -> str:
    """The glob that matches a key alone."""
    return re.sub(r"([*?])", r"\\\1", key)


def glob_matches(pattern: str, path: Sequence[str | int]) -> bool:
    """Whether a glob matches a path: `*` matches within a segment, `**` any number of segments.

    The time grows with the product of both lengths, whatever the glob.
    """
    wanted = split_escaped(pattern, "/") if pattern else []
    segments = [escape(s) for s in path]
    at = i = 0
    after, start = -1, 0  # what follows the last `**`, and where in the path that was tried
    while i < len(segments):
        if wanted[at : at + 1] == ["**"]:
            at, after, start = at + 1, at + 1, i
        elif at < len(wanted) and segment_matches(wanted[at], segments[i]):
            at, i = at + 1, i + 1
        elif after < 0:
            return False
        else:  # the last `**` takes one more segment; an earlier one need not take more
            start += 1
            at, i = after, start
    return all(part == "**" for part in wanted[at:])


def segment_matches(glob: str, segment: str) -> bool:
    return fnmatch.fnmatchcase(segment, _to_fnmatch(glob))


@functools.lru_cache(maxsize=256)
def _to_fnmatch(glob: str) -> str:
    """A glob for one segment in the terms of `fnmatch`, where `[` begins a set of characters."""

    def literally(found: re.Match[str]) -> str:
        escaped = found[0][-1] if found[0] in (r"\*", r"\?") else found[0]
        return "".join(f"[{c}]" if c in "*?[" else c for c in escaped)

    return re.sub(r"\\.|\[", literally, glob, flags=re.DOTALL)
