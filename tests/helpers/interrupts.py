"""Raises an interrupt at the n-th line of the package that runs in this thread."""

import contextlib
import dis
import functools
import pathlib
import sys

import nnx_inspector

PACKAGE = str(pathlib.Path(nnx_inspector.__file__).parent)


@functools.cache
def leaves_a_with(code):
    """The offsets at which a `with` statement calls `__exit__`: its own line is named again there,
    and Python handles no signal before the call.
    """
    found, several = set(), list(dis.get_instructions(code))
    for i in range(len(several) - 2):
        if all(x.opname == "LOAD_CONST" and x.argval is None for x in several[i : i + 3]):
            found.add(several[i].offset)
            if several[i - 1].opname == "SWAP":  # below what is returned from inside
                found.add(several[i - 1].offset)
    return found


class Interrupt:
    """Inside, the line number `at` of the package is not run: an interrupt is raised there.

    Attributes:
        lines: how many lines of the package have been run.
        where: the line that was not.
    """

    def __init__(self, at=-1, error=KeyboardInterrupt):
        self._at, self._error = at, error
        self.lines, self.where = 0, None
        self.last = {}  # (file, line) -> when it was run last

    def __enter__(self):
        sys.settrace(self._called)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _called(self, frame, event, _):
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame, event, _):
        if event == "line" and frame.f_lasti not in leaves_a_with(frame.f_code):
            if self.lines == self._at:
                sys.settrace(None)
                code = frame.f_code
                self.where = (
                    f"{code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {code.co_qualname}"
                )
                self.lines += 1
                raise self._error
            self.last[frame.f_code.co_filename, frame.f_lineno] = self.lines
            self.lines += 1
        return self._line


@contextlib.contextmanager
def uninterrupted():
    """Inside, nothing is counted or raised: for what the test itself asks of the package."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)
