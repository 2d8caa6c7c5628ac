"""The line of the user's code that made a call or an equation."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import sys
import threading
import types
from collections.abc import Iterator

from jax._src import source_info_util

from nnx_inspector.typing import Equation

_JAX = os.path.dirname(sys.modules["jax"].__file__ or "") + os.sep


def source_of_caller() -> tuple[str, bool]:
    """`file:line` of the nearest user code on the stack (`""` for none), and whether jax is tracing
    an inner function (jit, scan, remat) in between.

    If it is, jax may cache that trace and use it again for another line.
    """
    return _source_above(sys._getframe(1))


class _Caller(threading.local):
    frame: types.FrameType | None = None
    source: tuple[str, bool] = "", False


_caller = _Caller()


@contextlib.contextmanager
def caller_scope() -> Iterator[tuple[str, bool]]:
    """`source_of_caller()`. Inside the context, nobody searches the stack beyond this point."""
    frame, outer = sys._getframe(2), (_caller.frame, _caller.source)
    _caller.frame, _caller.source = frame, _source_above(frame)
    try:
        yield _caller.source
    finally:
        _caller.frame, _caller.source = outer


def _source_above(frame: types.FrameType | None) -> tuple[str, bool]:
    inner = False
    while frame is not None and frame is not _caller.frame:
        code = frame.f_code
        if is_user_file(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno}", inner
        inner = inner or _traces_a_function(code.co_filename, code.co_name)
        frame = frame.f_back
    source, outer = _caller.source if frame else ("", False)
    return source, inner or outer


def source_of_equation(equation: Equation) -> str:
    """`file:line` of the nearest user code that made an equation within its function, or ""."""
    return source_and_function(equation)[0]


def source_and_function(equation: Equation) -> tuple[str, str]:
    """As `source_of_equation`, and the name of the function around that line; "" for a lambda."""
    # jax keeps the stack of each equation as code objects and instruction numbers. Its own function
    # for the line looks each frame up in Python, and the stack of a deep model is long.
    traceback = equation.source_info.traceback
    codes, instructions = traceback.raw_frames() if traceback else ((), ())
    files, names = (map(operator.attrgetter(f"co_{part}"), codes) for part in ("filename", "name"))
    ends = map(_is_user_or_traces, files, names)  # all in C: the stack of a deep model is long
    number = next(itertools.compress(itertools.count(), ends), None)
    if number is None or not is_user_file(codes[number].co_filename):
        return "", ""
    code = codes[number]
    frame = source_info_util.raw_frame_to_frame(code, instructions[number])
    name = "" if code.co_name.startswith("<") else code.co_name
    return f"{code.co_filename}:{frame.start_line}", name


def is_backward(equation: Equation) -> bool:
    """Whether an equation is the transpose of another one."""
    # A jaxpr does not say which of its equations are the backward pass. jax writes it into the name
    # stack for profiles. It can go when an equation says which transformation made it.
    return "transpose(" in name_stack_of(equation)


def name_stack_of(equation: Equation) -> str:
    """The `jax.named_scope`s and derivatives around an equation within its jaxpr, joined by `/`."""
    return str(equation.source_info.name_stack)


def named_scopes_of(equation: Equation) -> tuple[str, ...]:
    """The names of the `jax.named_scope`s around an equation in its function, outermost first."""
    stack = equation.source_info.name_stack.stack
    return tuple(one.name for one in stack if isinstance(one, source_info_util.Scope))


@functools.cache
def _traces_a_function(filename: str, name: str) -> bool:
    return name.startswith("trace_to_jaxpr") and filename.startswith(_JAX)


@functools.cache
def _is_user_or_traces(filename: str, name: str) -> bool:
    return is_user_file(filename) or _traces_a_function(filename, name)


@functools.cache
def is_user_file(filename: str) -> bool:
    own = os.path.dirname(os.path.dirname(__file__)) + os.sep
    flax = os.path.dirname(sys.modules["flax"].__file__ or "") + os.sep
    return source_info_util.is_user_filename(filename) and not filename.startswith((own, flax))
