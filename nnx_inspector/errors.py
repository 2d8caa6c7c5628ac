"""This package's exception and warning. Bad arguments raise the built-in exceptions."""

import contextlib
import inspect
import itertools
import os
import sys
import types
import warnings

_NOTE = "nnx_inspector: "
_OWN_FILES = (os.path.dirname(__file__) + os.sep, contextlib.__file__)


class InspectorError(Exception):
    """A request that cannot be met; the text says what, where, and one way out."""


class InspectorWarning(UserWarning):
    """Something could not be seen or attributed to a site; the text says what and why."""


def reply_text(error: BaseException) -> str:
    """The text of an error for a reply to a request, with the notes that this package added to it;
    never "", which would mean success.
    """
    text = f"{error.args[0] if error.args else error}" or type(error).__name__
    return "\n".join([text, *(note[:1].upper() + note[1:] for note in notes_of(error))])


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error of the user's code, marked as ours."""
    error.add_note(f"{_NOTE}{text}")


def notes_of(error: BaseException) -> list[str]:
    """The texts of the notes that this package has added to an error."""
    notes = getattr(error, "__notes__", ())
    return [note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE)]


def is_from_signal_handler(error: BaseException | None) -> bool:
    """Whether a signal's handler has raised an error, so that it is meant for the user's code.

    Python runs handlers between any two lines. It calls them with a signal's number and a frame.
    """
    at = None if error is None else error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        known = at.tb_frame.f_locals
        names = code.co_varnames[: code.co_argcount + bool(code.co_flags & inspect.CO_VARARGS)]
        if code.co_kwonlyargcount and code.co_flags & inspect.CO_VARARGS:
            names = (*names[:-1], code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given = [known.get(name) for name in names]
        if code.co_flags & inspect.CO_VARARGS and isinstance(given[-1], tuple):
            given = [*given[:-1], *given[-1]]
        for number, frame in itertools.pairwise(given):
            if isinstance(number, int) and isinstance(frame, types.FrameType):
                return True
        at = at.tb_next
    return False


def error_text(error: BaseException) -> str:
    """`"ValueError: the text"`; for a callback, the error without jax's traceback."""
    _, traceback, after = str(error).rpartition("Traceback (most recent call last):\n")
    if not traceback:
        return f"{type(error).__name__}: {error}"
    return "\n".join(itertools.dropwhile(lambda line: line.startswith("  "), after.splitlines()))


def printable(text: str) -> str:
    """The text, with half of a surrogate pair escaped: a name may hold it, and print refuses it."""
    return text.encode("utf-8", "backslashreplace").decode()


def warn(text: str) -> None:
    """Issue an InspectorWarning at the innermost line of the user's code."""
    frame, level = sys._getframe(1), 2  # warnings has skip_file_prefixes from Python 3.12 on
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, InspectorWarning, stacklevel=level)


def warn_or_note(error: BaseException, text: str) -> None:
    """Warn while an error leaves the user's code. If a filter raises the warning, it becomes a note
    of that error instead of taking its place.
    """
    try:
        warn(text)
    except InspectorWarning:
        add_note(error, text)
