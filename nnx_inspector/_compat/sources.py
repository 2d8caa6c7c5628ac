"""The line of the user's code that made a call or an equation.

One function for each private part of flax or jax that it uses; `tests/_compat` fails clearly if a
new version moves one.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

_JAX = os.path.dirname(sys.modules["jax"].__file__ or "") + os.sep


def source_of_caller() -> tuple[str, bool]:
    """`file:line` of the nearest user code on the stack (`""` for none), and whether jax is tracing
    an inner function (jit, scan, remat) in between.

    If it is, jax may cache that trace and use it again for another line.
    """
    frame, inner = sys._getframe(1), False
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}", inner
        inner = inner or _traces_a_function(frame.f_code)
        frame = frame.f_back
    return "", inner


def source_of_equation(equation: Any) -> str:
    """`file:line` of the nearest user code that made an equation, within the function traced into
    its jaxpr; `""` for none.
    """
    return place_of_equation(equation)[0]


def place_of_equation(equation: Any) -> tuple[str, str]:
    """As `source_of_equation`, and the name of the function that has the line; "" of a lambda."""
    from jax._src import source_info_util

    traceback = equation.source_info.traceback
    codes, instructions = traceback.raw_frames() if traceback else ((), ())
    for code, instruction in zip(codes, instructions, strict=True):
        if _traces_a_function(code):
            return "", ""
        if is_user_file(code.co_filename):
            frame = source_info_util.raw_frame_to_frame(code, instruction)
            name = "" if code.co_name.startswith("<") else code.co_name
            return f"{code.co_filename}:{frame.start_line}", name
    return "", ""


def is_backward(equation: Any) -> bool:
    """Whether an equation is the transpose of another one."""
    return "transpose(" in str(equation.source_info.name_stack)


def _traces_a_function(code: types.CodeType) -> bool:
    return code.co_name.startswith("trace_to_jaxpr") and code.co_filename.startswith(_JAX)


@functools.cache
def is_user_file(filename: str) -> bool:
    from jax._src import source_info_util

    own = os.path.dirname(os.path.dirname(__file__)) + os.sep
    flax = os.path.dirname(sys.modules["flax"].__file__ or "") + os.sep
    return source_info_util.is_user_filename(filename) and not filename.startswith((own, flax))
