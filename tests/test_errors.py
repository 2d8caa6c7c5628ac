"""The text of an error for the screen: what it says, and what this package noted on it."""

from __future__ import annotations

from nnx_inspector.errors import add_note, reply_text


def test_a_reply_has_our_notes_and_no_others() -> None:
    error = ValueError("It does not fit.")
    error.add_note("For simplicity, JAX has removed its internal frames.")
    add_note(error, "to pass it as one batch, write [data].")
    assert reply_text(error) == "It does not fit.\nTo pass it as one batch, write [data]."
    assert reply_text(KeyError("no 'such' site")) == "no 'such' site"
    assert reply_text(KeyboardInterrupt()) == "KeyboardInterrupt"
