"""The exception and the warning of our own. Bad arguments raise the built-in exceptions."""

import contextlib
import os
import sys
import warnings

_OURS = (os.path.dirname(__file__) + os.sep, contextlib.__file__)


class InspectorError(Exception):
    """What was asked for cannot be done; the text says what, where, and one way out."""


class InspectorWarning(UserWarning):
    """Something could not be seen, or not be attributed to a site; the text says what and why."""


def reply_text(error: Exception) -> str:
    """What an error says, in the reply to who asked; never "", which would say that all is well."""
    return f"{error.args[0] if error.args else error}" or type(error).__name__


def warn(text: str) -> None:
    """An InspectorWarning at the line of the user's that is furthest in."""
    frame, level = sys._getframe(1), 2  # warnings has skip_file_prefixes from Python 3.12 on
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, InspectorWarning, stacklevel=level)
