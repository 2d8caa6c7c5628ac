"""The one exception type of our own. Bad arguments raise the built-in ones."""


class InspectorError(Exception):
    """What was asked for cannot be done; the text says what, where, and one way out."""
