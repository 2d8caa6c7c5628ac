"""What the parts of one inspector share: its model, what is switched, its recording and its screen.

Every part takes the core. The core knows none of them by name, and nothing of the Inspector.
Invariant: each pass, whether of run, step, watch or push, reaches the recording through
`record_pass`, under the lock. Threads and widgets hold the core weakly; when nobody else holds it,
they are closed. Runs no pass itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from nnx_inspector.background import weakly
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.sites import Selection, module_sites, nothing_selected
from nnx_inspector.inspector.handles import Handles
from nnx_inspector.inspector.metrics import Meter, Metrics
from nnx_inspector.inspector.nnx.modes import Modes
from nnx_inspector.inspector.nnx.switches import Switches
from nnx_inspector.inspector.passes.call import Call
from nnx_inspector.inspector.passes.programs import OwnedPasses
from nnx_inspector.inspector.passes.trials import Shown, Trial
from nnx_inspector.live.figures import Observer, gauges_of
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.perturbations.slots import CLEAN, Setting
from nnx_inspector.program.analysis.trace import Trace, traced
from nnx_inspector.recordings.facts import Figures
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.records.layers import layers_of
from nnx_inspector.records.record import Record
from nnx_inspector.screen import protocol
from nnx_inspector.screen.layout import layout_of, shown_of, stacks_of
from nnx_inspector.screen.presenter import Presenter
from nnx_inspector.screen.timeline import Settings

Answer = tuple[Any, bytes | None]
"""A message to the browser, and its buffer."""


class Core:
    """The state of one inspector.

    Args:
        model: is never changed.
        selection: the sites that are shown.
        example: what is run at first.

    Attributes:
        entry: how the model is called where there is no loss.
        watched: the model that loops watch, as it was given.
        model: the same with the state that passes are made with.
        example: the last forward pass that was asked for.
        trial: the last pass that was asked for.
        shown: the last pass that was made for the screen.
        trace: the calls of the example.
        eager: why the pass on screen was not traced; "" where it was.
        step: the step of the loop under way, otherwise the last one shown.
        looping: whether a loop is watched now.
        pending: whether something was changed that the loop has not taken over yet.
        parts: whoever holds a handle or a loop holds them all.
        closing: what is called when the inspector is closed, or when nobody holds the core any
            more. Nothing in it may refer to the core.
    """

    def __init__(self, model: nnx.Module, selection: Selection, example: Trial):
        self.watched = self.model = model
        self.selection = selection
        self.entry, self.example, self.trial = example.entry, example, example
        self.trace = self.traced_of(model)
        self.shown: Shown | None = None
        self.eager = ""
        self.lock = threading.RLock()
        self.closed = self.looping = self.pending = False
        self.step = 0
        self.parts: tuple[object, ...] = ()
        self.recording = Recording()
        self.programs = OwnedPasses((), selection)
        self.settings = Settings()
        self.handles = Handles()
        self.modes = Modes(model)
        self.meter = Meter()
        self.metrics = Metrics(self.recording, self.notice)
        self.effect: Callable[[], tuple[protocol.Effect | None, str]] = lambda: (None, "")
        self.asked: Callable[[Any], None] = lambda message: None  # by the browser
        self.view = Presenter(weakly(self._asked), self._snapshot)
        self._observer = Observer()
        self.closing = contextlib.ExitStack()
        self.closing.callback(self.view.close)
        self.closing.callback(self.meter.close)
        weakref.finalize(self, self.closing.close)
        self.take_trace(self.trace)

    def _asked(self, message: Any) -> None:
        self.asked(message)

    def _snapshot(self) -> dict[str, Any]:
        return {
            "recording": self.recording,
            "handles": self.handles.all(),
            "pending": self.pending and self.looping,
            "metrics": self.metrics.latest,
            "meter": self.meter,
            "effect": self.effect,
            "errors": self.metrics.errors,
        }

    def notice(self, level: str, text: str, site: str | None = None) -> None:
        """Put a text on screen."""
        self.view.notice(protocol.Notice(level=level, text=text, site=site))

    def require_open(self) -> Core:
        """The core itself; raises where the inspector was closed."""
        if self.closed:
            raise InspectorError(
                "This inspector was closed. Make a new one: nni.Inspector(model, x)."
            )
        return self

    def close(self) -> None:
        """End what is in threads, and the widget."""
        with self.lock:
            if self.closed:
                return
            self.closed, self.shown = True, None
        self.recording.detach()
        self.closing.close()

    # ------------------------------------------------------------- the model

    def update(self, model: nnx.Module) -> None:
        """Make passes with another model of an equal structure."""
        self.model = self.modes.model = model
        self.take_trace(self.trace)

    def call(self) -> Call:
        """The pass that was asked for last, of the model as it is now, in its modes."""
        return self.trial.call(self.model, self.modes.switches())

    def traced_of(self, model: nnx.Module) -> Trace:
        """The calls of the example, of a model."""
        call = self.entry.call(model, self.example.args, self.example.kwargs)
        return traced(*call, selection=self.selection, roots={(): model})

    def take_trace(self, found: Trace) -> None:
        """Show the sites of a trace from now on."""
        # what was traced may be a view with other modes: the rows are the model's own modules
        own = {site.path: site for site in module_sites(self.model)}
        modules = (*own.values(), *(site for site in found.modules if site.path not in own))
        self.trace = dataclasses.replace(found, modules=modules)
        self.programs.extend([*(c.site for c in found.calls), *(site.key for site in modules)])
        self.show_layout({})

    def show_layout(self, unseen: Mapping[str, str]) -> None:
        """Show the rows anew, with why some are not seen in a running program."""
        number = self.view.layouts + 1
        self.view.set_layout(layout_of(self.model, self.trace, number=number, unseen=unseen))

    def show_modes(self, switches: Switches) -> None:
        """Say on screen which modes are switched, and whether passes are traced."""
        standing: list[str] = []
        if switches:
            words = switches.in_words()
            text = f"Modes for inspected passes: {words}. A watched loop has the model's."
            standing.append(text)
        if self.eager:
            standing.append(
                f"The pass ran eagerly, line by line: {self.eager}. FLOPs and dataflow are not "
                f"known, and findings that need the program are not judged."
            )
        self.view.standing = tuple(
            protocol.Notice(level="info", text=text, site=None) for text in standing
        )

    def known(self, site: str, *, layers: bool = True) -> str:
        """A site's key itself, or a ValueError that names those that are nearest.

        Args:
            site: the key.
            layers: whether it may be that of one layer, as `"layers[3]"`.
        """
        if (without_layers(site)[0] if layers else site) not in self.view.keys:
            raise ValueError(nothing_selected(Selection(site), self.view.keys))
        return site

    def select(self, site: str) -> None:
        """Show one site's histogram and history."""
        self.view.select(self.known(site, layers=False))

    # ---------------------------------------------------------- the recording

    def record_pass(
        self,
        step: int,
        summaries: Mapping[str, Any],
        *,
        kind: str,
        setting: Setting,
        figures: Figures | None = None,
        held: int | None = None,
    ) -> None:
        """Record a pass. The lock is held by whoever measured it.

        Args:
            step: which it belongs to.
            summaries: by site and quantity.
            kind: "run", "step", "watch" or "push".
            setting: what is perturbed in it.
            figures: of parameters and units, where they were measured.
            held: the number under which the recording holds it already.
        """
        self.recording.append(
            step,
            summaries,
            kind=kind,
            perturbed=setting.active,
            setting=self.settings.number_of(setting),
            figures=figures,
            held=held,
        )

    def show_record(
        self,
        record: Record,
        *,
        kind: str,
        setting: Setting,
        metrics: Mapping[str, Any] | None = None,
        states: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a pass of the step that the run stands at, and show it.

        Args:
            record: on the host.
            kind, setting: as of `record_pass`.
            metrics: scalars that go with it.
            states: samples of parameters and statistics, for figures over the steps.
        """
        with self.lock:
            stacks, figures = shown_of(stacks_of(self.trace)), None
            if states is not None:
                figures = self._observer.figures(gauges_of(record, stacks), states, follow=False)
            summaries = {**record.merged(), **layers_of(record, stacks)}
            self.record_pass(self.step, summaries, kind=kind, setting=setting, figures=figures)
            self.metrics.add(self.step, metrics or {})
            self.metrics.settle()
            self.pending = self.pending and self.looping
            if self.view.progress.kind != "watch":  # a loop's progress stays on screen
                self.view.progress = protocol.Progress(
                    kind=kind, running=False, step=self.step, total=None, rate=None
                )
        self.view.present(force=True)

    def push(self, record: Record, step: int | None, metrics: Mapping[str, Any]) -> None:
        """See `Inspector.push`."""
        if not isinstance(record, Record):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"push takes a Record, as nni.capture returns it, got {type(record).__name__}."
            )
        with self.lock:
            self.step = self.step + 1 if step is None else int(step)
        self.show_record(jax.device_get(record), kind="push", setting=CLEAN, metrics=metrics)

    def add_metrics(self, values: Mapping[str, Any]) -> None:
        """See `Inspector.metrics`."""
        with self.lock:
            self.metrics.add(self.step, values)
            if not self.looping:
                self.metrics.settle(wait=True)
                self.view.present(force=True)

    def keep_file(self, path: Any) -> None:
        """Save the recording, and each pass as it comes."""
        self.recording.attach(path, weakly(self._not_saved))

    def _not_saved(self, text: str) -> None:
        self.metrics.errors += 1
        self.notice("error", text)
