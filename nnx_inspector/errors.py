"""The exception and the warning of our own. Bad arguments raise the built-in exceptions."""


class InspectorError(Exception):
    """What was asked for cannot be done; the text says what, where, and one way out."""


class InspectorWarning(UserWarning):
    """Something could not be seen, or not be attributed to a site; the text says what and why."""


def reply_text(error: Exception) -> str:
    """What an error says, in the reply to who asked; never "", which would say that all is well."""
    return f"{error.args[0] if error.args else error}" or type(error).__name__
