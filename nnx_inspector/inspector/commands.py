"""What the browser's requests to an inspector do.

Slow requests are answered by a thread in their order, and those for values, which may wait for a
compilation, by another. Knows no model: it turns messages into the calls that a user would make.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from nnx_inspector.background import weak_method
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.handles import Handles
from nnx_inspector.inspector.nnx.page import Pages
from nnx_inspector.inspector.panels import answer_look
from nnx_inspector.inspector.passes.operations import select_operations
from nnx_inspector.inspector.passes.rerun import Reruns
from nnx_inspector.inspector.passes.sweeps import Sweeps
from nnx_inspector.inspector.studies.studies import Studies
from nnx_inspector.inspector.targets import Targets
from nnx_inspector.inspector.values.requests import positions_message, read_values
from nnx_inspector.perturbations.activations import Mask
from nnx_inspector.perturbations.places import AnyPerturbation
from nnx_inspector.screen import protocol
from nnx_inspector.screen.export.assets import asset
from nnx_inspector.screen.flow import flow_of
from nnx_inspector.screen.python_text import mask_of_bits, perturbation_of_click, text_of
from nnx_inspector.screen.requests import Answer, RequestHandler
from nnx_inspector.typing import Value


class Commands(RequestHandler):
    """Carries out the requests to an inspector of a model."""

    refusal: ClassVar[str] = "this can be asked of a run that nni.open shows."
    threads: ClassVar[Mapping[type, str]] = {
        protocol.ShowOperations: "looks",
        protocol.ChooseBatch: "looks",
        protocol.Look: "looks",
        protocol.Compare: "looks",
        protocol.ShowValues: "values",
        protocol.ReadValues: "values",
        protocol.ShowPositions: "values",
    }

    def __init__(
        self,
        core: Core,
        targets: Targets,
        sweeps: Sweeps,
        studies: Studies,
        pages: Pages,
        rerun: Reruns,
    ):
        self._core, self._targets, self._sweeps, self._studies = core, targets, sweeps, studies
        self._pages, self._rerun = pages, rerun
        super().__init__(core.view)
        for worker in self.workers:
            core.closing.callback(worker.close)
        core.closing.callback(weak_method(pages.forget))
        core.closing.callback(core.array_reader.cache.clear)

    def interpret(self, message: object) -> tuple[AnyPerturbation | None, str]:
        """See `RequestHandler`."""
        handles = self._core.handles
        one = perturbation_of(message, handles)
        return one, text_of(message, handles.all(), one)

    def _perturb(self, message: protocol.Perturb, one: AnyPerturbation) -> None:
        self._targets.perturb(message.site, one)

    def _set_mask(self, message: protocol.SetMask, one: AnyPerturbation) -> None:
        if message.perturbation is None:
            self._targets.perturb(message.site, one)
        else:
            self._core.handles.get(message.perturbation).perturbation = one

    def _adjust(self, message: protocol.Adjust, one: AnyPerturbation | None) -> None:
        handles = self._core.handles
        handle = handles.get(message.perturbation)
        handles.change(handle, enabled=message.enabled, perturbation=one)

    def _show_flow(self, message: protocol.ShowFlow, _: object) -> Answer | None:
        layout = self._core.view.layout
        if layout is None:
            return None
        return flow_of(self._core.trace, layout, message.site, number=message.id), None

    def _show_operations(self, message: protocol.ShowOperations, _: object) -> None:
        self._rerun.show_sites(select_operations(self._core, message.site, shown=message.shown))

    def _layout_library(self, _: protocol.GetLayoutLibrary, __: object) -> Answer:
        return protocol.LayoutLibrary(), asset("layout.js").encode()

    def compare(self, message: protocol.Compare, _: object) -> Answer | None:
        """See `RequestHandler`; a saved page answers with the same."""
        answer = super().compare(message, _)
        if answer is not None:
            self._core.comparisons[f"{message.number} {message.pinned}"] = answer
        return answer

    def _read_values(self, message: protocol.ShowValues | protocol.ReadValues, _: object) -> Answer:
        answer = read_values(self._core, message)
        self._core.page_values.keep(message, answer)
        return answer


Commands.table = {
    protocol.Select: lambda c, m, _: c._core.select(m.site),
    protocol.ChooseExample: lambda c, m, _: c._core.view.set_first_example(m.example),
    protocol.ChooseBatch: lambda c, m, _: c._rerun.rerun_last(m.which),
    protocol.Perturb: Commands._perturb,
    protocol.SetMask: Commands._set_mask,
    protocol.Adjust: Commands._adjust,
    protocol.SwitchAll: lambda c, m, _: c._core.handles.switch_all(m.enabled),
    protocol.Remove: lambda c, m, _: c._core.handles.get(m.perturbation).remove(),
    protocol.StartSweep: lambda c, m, one: c._sweeps.queue(c._sweeps.request(m.sites, one)),
    protocol.StopSweep: lambda c, _, __: c._sweeps.stop(),
    protocol.Study: lambda c, m, _: c._studies.start(m),
    protocol.StopStudy: lambda c, _, __: c._studies.stop(),
    protocol.SwitchMode: lambda c, m, _: c._pages.switch(m.module, m.name, m.value),
    protocol.ShowPass: lambda c, m, _: c._core.view.show_pass(m.number, m.site),
    protocol.ShowFlow: Commands._show_flow,
    protocol.ShowOperations: Commands._show_operations,
    protocol.GetLayoutLibrary: Commands._layout_library,
    protocol.ShowNnx: lambda c, m, _: (c._pages.page(m.site, m.id), None),
    protocol.Look: lambda c, m, _: answer_look(c._core, m),
    protocol.Compare: Commands.compare,
    protocol.ShowValues: Commands._read_values,
    protocol.ReadValues: Commands._read_values,
    protocol.ShowPositions: lambda c, m, _: positions_message(c._core, m),
}


def perturbation_of(message: object, handles: Handles) -> Value:
    """The perturbation that a message adds, sets or sweeps with, or None."""
    match message:
        case protocol.Perturb():
            one = perturbation_of_click(message.kind, message.strength, message.at)
            return one.only([*message.units], axis=message.axis) if message.units else one
        case protocol.StartSweep():
            return (
                perturbation_of_click(message.kind, message.strength, message.at)
                if message.kind
                else None
            )
        case protocol.SetMask():
            number = message.perturbation
            mask = mask_of_bits(message.mask, message.units, message.columns)
            old = None if number is None else handles.get(number).perturbation
            if isinstance(old, Mask):
                return dataclasses.replace(old, mask=mask)
            return Mask(mask, axis=message.axis)
        case protocol.Adjust() if message.strength is not None:
            return handles.get(message.perturbation).perturbation.tuned(message.strength)
        case _:
            return None
