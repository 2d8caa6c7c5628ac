"""The requests of the browser to an inspector: each one gets exactly one reply.

Invariant: no message from a browser raises into the thread that received it; an error becomes the
reply. Slow requests are answered by one thread, in their order. Knows no model: it turns messages
into the calls that a user would make.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from nnx_inspector.background import Worker, weakly
from nnx_inspector.errors import reply_text
from nnx_inspector.inspector.core import Answer, Core
from nnx_inspector.inspector.handles import Handles
from nnx_inspector.inspector.nnx.page import Pages
from nnx_inspector.inspector.panels import look
from nnx_inspector.inspector.passes.sweeps import Sweeps
from nnx_inspector.inspector.targets import Targets
from nnx_inspector.inspector.values.opening import Opening
from nnx_inspector.inspector.values.reading import read_values
from nnx_inspector.perturbations.values import Mask
from nnx_inspector.screen import protocol
from nnx_inspector.screen.assets import asset
from nnx_inspector.screen.flow import flow_of
from nnx_inspector.screen.python_text import made, masked, text_of


class Commands:
    """Carries out the browser's requests, on any thread, and replies."""

    def __init__(
        self, core: Core, *, targets: Targets, sweeps: Sweeps, pages: Pages, opening: Opening
    ):
        self._core, self._targets, self._sweeps = core, targets, sweeps
        self._pages, self._opening = pages, opening
        self._worker = Worker("nnx_inspector.answers", lambda error: None)
        self.wait = self._worker.wait
        core.asked = self.answer
        core.closing.callback(self._worker.close)
        core.closing.callback(weakly(pages.forget))
        core.closing.callback(opening.shelf.clear)

    def answer(self, message: Any) -> None:
        """Carry out a request and reply, at once or in the thread."""
        if isinstance(message, protocol.Hello):
            self._core.view.welcome()
        elif type(message) not in _LATER:
            self._answer(message)
        elif not self._worker.do(lambda: self._answer(message)):
            self._core.view.screen.reply(message.id, "This inspector was closed.")

    def _answer(self, message: Any) -> None:
        handles, view = self._core.handles, self._core.view
        try:
            one = _perturbation(message, handles)
            text = text_of(message, handles.all(), one)
            found = _REQUESTS[type(message)](self, message, one)
            if found is not None:
                view.screen.send(*found)
        except Exception as error:  # noqa: BLE001 - it is the reply
            view.screen.reply(message.id, reply_text(error))
            return
        if text:
            view.python = text
            view.state_changed()
        view.screen.reply(message.id)

    # ------------------------------------------------------------ perturbations

    def _perturb(self, message: protocol.Perturb, one: Any) -> None:
        self._targets.perturb(message.site, one)

    def _set_mask(self, message: protocol.SetMask, one: Any) -> None:
        if message.perturbation is None:
            self._targets.perturb(message.site, one)
        else:
            self._core.handles.get(message.perturbation).perturbation = one

    def _adjust(self, message: protocol.Adjust, one: Any) -> None:
        handle = self._core.handles.get(message.perturbation)
        if one is not None:
            handle.perturbation = one
        handle.enabled = message.enabled

    def _switch_all(self, message: protocol.SwitchAll, _: Any) -> None:
        self._core.handles.switch_all(message.enabled)

    def _remove(self, message: protocol.Remove, _: Any) -> None:
        self._core.handles.get(message.perturbation).remove()

    def _start_sweep(self, message: protocol.StartSweep, one: Any) -> None:
        self._sweeps.start(self._sweeps.wanted(message.sites, one))

    def _stop_sweep(self, _: protocol.StopSweep, __: Any) -> None:
        self._sweeps.stop()

    def _switch_mode(self, message: protocol.SwitchMode, _: Any) -> None:
        self._pages.switch(message.module, message.name, message.value)

    # ----------------------------------------------------------------- looking

    def _select(self, message: protocol.Select, _: Any) -> None:
        self._core.select(message.site)

    def _show_pass(self, message: protocol.ShowPass, _: Any) -> None:
        self._core.view.show_pass(message.number, message.site)

    def _show_flow(self, message: protocol.ShowFlow, _: Any) -> Answer | None:
        layout = self._core.view.layout
        if layout is None:
            return None
        return flow_of(self._core.trace, layout, message.site, number=message.id), None

    def _layout_library(self, _: protocol.GetLayoutLibrary, __: Any) -> Answer:
        return protocol.LayoutLibrary(version=protocol.VERSION), asset("layout.js").encode()

    def _show_nnx(self, message: protocol.ShowNnx, _: Any) -> Answer:
        return self._pages.page(message.site, message.id), None

    def _look(self, message: protocol.Look, _: Any) -> Answer:
        return look(self._core, message)

    def _compare(self, message: protocol.Compare, _: Any) -> Answer | None:
        found = self._core.view.compared(message)
        return None if found is None else (found, None)

    def _read_values(self, message: protocol.ShowValues | protocol.ReadValues, _: Any) -> Answer:
        return read_values(self._core, self._opening, message)


_REQUESTS: Final[Mapping[type, Callable[[Commands, Any, Any], Answer | None]]] = {
    protocol.Select: Commands._select,
    protocol.Perturb: Commands._perturb,
    protocol.SetMask: Commands._set_mask,
    protocol.Adjust: Commands._adjust,
    protocol.SwitchAll: Commands._switch_all,
    protocol.Remove: Commands._remove,
    protocol.StartSweep: Commands._start_sweep,
    protocol.StopSweep: Commands._stop_sweep,
    protocol.SwitchMode: Commands._switch_mode,
    protocol.ShowPass: Commands._show_pass,
    protocol.ShowFlow: Commands._show_flow,
    protocol.GetLayoutLibrary: Commands._layout_library,
    protocol.ShowNnx: Commands._show_nnx,
    protocol.Look: Commands._look,
    protocol.Compare: Commands._compare,
    protocol.ShowValues: Commands._read_values,
    protocol.ReadValues: Commands._read_values,
}
"""Request -> its handler, which takes the message and the perturbation that the message makes, and
returns the message to send before the reply."""
_LATER: Final = (protocol.Look, protocol.Compare, protocol.ShowValues, protocol.ReadValues)
"""The requests that may be slow."""


def _perturbation(message: Any, handles: Handles) -> Any:
    """The perturbation that a message adds, sets or sweeps with, or None."""
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
