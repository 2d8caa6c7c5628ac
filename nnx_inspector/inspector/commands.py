"""What the browser may ask of an inspector: each command gets exactly one reply.

Invariant: nothing that a browser sends raises into the thread that received it; what goes wrong
is the reply. Knows no model: it turns messages into the calls that a person would make.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from nnx_inspector.background import Worker
from nnx_inspector.errors import reply_text
from nnx_inspector.inspector.handles import Handle, Handles
from nnx_inspector.perturbations.values import Mask
from nnx_inspector.program.analysis.trace import Trace
from nnx_inspector.screen import protocol
from nnx_inspector.screen.assets import asset
from nnx_inspector.screen.flow import flow_of
from nnx_inspector.screen.presenter import Presenter
from nnx_inspector.screen.python_text import made, masked, text_of

Request = protocol.Look | protocol.Compare | protocol.ShowValues | protocol.ReadValues
"""What takes long to answer: a pass, or a program of its own."""


class Commanded(Protocol):
    """What a command may call."""

    @property
    def selected(self) -> str: ...
    @selected.setter
    def selected(self, site: str) -> None: ...
    @property
    def trace(self) -> Trace: ...
    def perturb(self, only: Any, perturbation: Any) -> Handle: ...
    def switch_all(self, enabled: bool) -> None: ...
    def ask(self, request: Request) -> None: ...
    def start_sweep(self, only: Any, perturbation: Any) -> None: ...
    def stop_sweep(self) -> None: ...
    def _show_nnx(self, site: str, number: int) -> None: ...
    def _switch_mode(self, module: str, name: str, value: bool | None) -> None: ...


def answer(message: Any, inspector: Commanded, handles: Handles, view: Presenter) -> None:
    """Do what a message asks, on any thread, and reply."""
    if isinstance(message, protocol.Hello):
        view.welcome()
        return
    if isinstance(message, Request):
        inspector.ask(message)  # which replies when it has been answered
        return
    try:
        one = _perturbation(message, handles)
        text = text_of(message, handles.all(), one)
        _do(message, one, inspector, handles, view)
    except Exception as error:  # noqa: BLE001 - it is the reply
        view.screen.reply(message.id, reply_text(error))
        return
    if text:
        view.python = text
        view.state_changed()
    view.screen.reply(message.id)


def _perturbation(message: Any, handles: Handles) -> Any:
    """What a message adds, sets or sweeps with, or None."""
    if isinstance(message, (protocol.Perturb, protocol.StartSweep)):
        return made(message.kind, message.strength, message.at)
    if isinstance(message, protocol.SetMask):
        mask = masked(message.mask, message.units)
        if message.perturbation is None:
            return Mask(mask)
        old = handles.get(message.perturbation).perturbation
        return dataclasses.replace(old, mask=mask) if isinstance(old, Mask) else Mask(mask)
    if isinstance(message, protocol.Adjust) and message.strength is not None:
        return handles.get(message.perturbation).perturbation.tuned(message.strength)
    return None


def _do(message: Any, one: Any, inspector: Commanded, handles: Handles, view: Presenter) -> None:
    if isinstance(message, protocol.Select):
        inspector.selected = message.site
    elif isinstance(message, protocol.Perturb):
        inspector.perturb(message.site, one)
    elif isinstance(message, protocol.SetMask):
        if message.perturbation is None:
            inspector.perturb(message.site, one)
        else:
            handles.get(message.perturbation).perturbation = one
    elif isinstance(message, protocol.Adjust):
        handle = handles.get(message.perturbation)
        if one is not None:
            handle.perturbation = one
        handle.enabled = message.enabled
    elif isinstance(message, protocol.SwitchAll):
        inspector.switch_all(message.enabled)
    elif isinstance(message, protocol.Remove):
        handles.get(message.perturbation).remove()
    elif isinstance(message, protocol.ShowFlow):
        if view.layout is not None:
            flow = flow_of(inspector.trace, view.layout, message.site, number=message.id)
            view.screen.send(flow)
    elif isinstance(message, protocol.GetLayoutLibrary):
        library = protocol.LayoutLibrary(version=protocol.VERSION)
        view.screen.send(library, asset("layout.js").encode())
    elif isinstance(message, protocol.ShowPass):
        view.show_pass(message.number, message.site)
    elif isinstance(message, protocol.StartSweep):
        inspector.start_sweep(message.sites, one)
    elif isinstance(message, protocol.StopSweep):
        inspector.stop_sweep()
    elif isinstance(message, protocol.ShowNnx):
        inspector._show_nnx(message.site, message.id)
    elif isinstance(message, protocol.SwitchMode):
        inspector._switch_mode(message.module, message.name, message.value)


Answer = tuple[Any, bytes | None]
"""A message and its buffer."""


class Answering:
    """The queue of requests: it answers them in their order, in a thread.

    Args:
        make: makes the answer to a request; None where there is none to send.
        send: one message over the stream.
        reply: to a request, with the text of what is wrong.
    """

    def __init__(
        self,
        make: Callable[[Request], Answer | None],
        send: Callable[[Any, bytes | None], None],
        reply: Callable[[int, str], None],
    ):
        self._make, self._send, self._reply = make, send, reply
        self._worker = Worker("nnx_inspector.answers", lambda error: None)
        self.close = self._worker.close
        self.wait = self._worker.wait

    def ask(self, request: Request) -> None:
        """Answer a request later, and reply."""
        if not self._worker.do(lambda: self._answer(request)):
            self._reply(request.id, "This inspector was closed.")

    def _answer(self, request: Request) -> None:
        try:
            found = self._make(request)
            if found is not None:
                self._send(*found)
        except Exception as error:  # noqa: BLE001 - it is the reply
            self._reply(request.id, reply_text(error))
            return
        self._reply(request.id, "")
