"""Source text around the calls of a module, and the docstring of its type.

The text is read with `linecache`, which also knows the cells of a notebook. Invariant: everything
is plain text of bounded length, and unreadable files are left out. Runs none of the user's code.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Iterable, Sequence

from nnx_inspector.files import short_name
from nnx_inspector.screen import protocol

CONTEXT_LINES = 5
"""Lines shown before and after the line of the call."""
MOST_EXCERPTS = 4
LONGEST_LINE = 300
LONGEST_TEXT = 4000
"""The most characters of a docstring."""
_BASES = ("Module", "Pytree", "Object")


def excerpts_of(sources: Iterable[str]) -> tuple[protocol.Excerpt, ...]:
    """The lines around the first few of some places `file:line`, each once."""
    found = [excerpt_of(source) for source in dict.fromkeys(sources)]
    return tuple(one for one in found if one is not None)[:MOST_EXCERPTS]


def excerpt_of(source: str) -> protocol.Excerpt | None:
    """The lines around one place, or None if the file cannot be read."""
    file, _, number = source.rpartition(":")
    if not file or not number.isdigit():
        return None
    linecache.checkcache(file)  # the user may have edited it; the lines of a cell stay
    lines, line = linecache.getlines(file), int(number)
    if not 0 < line <= len(lines):
        return None
    first = max(1, line - CONTEXT_LINES)
    shown = [_cut(text.rstrip("\n")) for text in lines[first - 1 : line + CONTEXT_LINES]]
    while shown and not shown[-1].strip() and first + len(shown) - 1 > line:
        shown.pop()
    return protocol.Excerpt(
        file=short_name(file),
        function=_function_around("".join(lines), line),
        first=first,
        line=line,
        text="\n".join(shown),
    )


def documentation_of(cls: type) -> str:
    """The docstring of a type, its own or inherited, but not that of flax's base classes."""
    text = ""
    for owner in cls.__mro__:
        if owner.__module__.startswith("flax.") and owner.__name__ in _BASES:
            break
        if isinstance(vars(owner).get("__doc__"), str):
            text = inspect.cleandoc(vars(owner)["__doc__"])
            break
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT].rstrip() + " …"


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + " …"


@functools.lru_cache(maxsize=64)
def _function_around(text: str, line: int) -> str:
    """The innermost function or class around a line, `"Block.__call__"`; "" if none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # such as a cell with magics
        return ""
    names: list[str] = []
    body: Sequence[ast.AST] = tree.body
    while (inside := next((node for node in body if _contains_line(node, line)), None)) is not None:
        if isinstance(inside, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(inside.name)
        body = list(ast.iter_child_nodes(inside))
    return ".".join(names)


def _contains_line(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last
