"""What the browser may ask of an inspector: each command gets exactly one reply.

Invariant: nothing that a browser sends raises into the thread that received it; what goes wrong
is the reply. Knows no model: it turns messages into the calls that a person would make.
"""

from __future__ import annotations

from typing import Any, Protocol

from nnx_inspector import protocol
from nnx_inspector.handles import Handle, Handles
from nnx_inspector.offers import made, tuned
from nnx_inspector.presenter import Presenter


class Commanded(Protocol):
    """What a command may call."""

    @property
    def selected(self) -> str: ...
    @selected.setter
    def selected(self, site: str) -> None: ...
    def perturb(self, only: Any, perturbation: Any) -> Handle: ...


def answer(message: Any, inspector: Commanded, handles: Handles, view: Presenter) -> None:
    """Do what a message asks, on any thread, and reply."""
    if isinstance(message, protocol.Hello):
        view.welcome()
        return
    try:
        _do(message, inspector, handles)
    except Exception as error:  # noqa: BLE001 - it is the reply
        view.screen.reply(message.id, f"{error.args[0] if error.args else error}")
        return
    view.screen.reply(message.id)


def _do(message: Any, inspector: Commanded, handles: Handles) -> None:
    if isinstance(message, protocol.Select):
        inspector.selected = message.site
    elif isinstance(message, protocol.Perturb):
        kind = made(message.kind, message.strength, message.at)
        inspector.perturb(message.site, kind)
    elif isinstance(message, protocol.Adjust):
        handle = handles.get(message.perturbation)
        if message.strength is not None:
            handle.perturbation = tuned(handle.perturbation, message.strength)
        handle.enabled = message.enabled
    elif isinstance(message, protocol.SwitchAll):
        for handle in handles.all():
            handle.enabled = message.enabled
    elif isinstance(message, protocol.Remove):
        handles.get(message.perturbation).remove()
