"""The exception and the warning of our own. Bad arguments raise the built-in exceptions."""


class InspectorError(Exception):
    """What was asked for cannot be done; the text says what, where, and one way out."""


class InspectorWarning(UserWarning):
    """Something could not be seen, or not be attributed to a site; the text says what and why."""
