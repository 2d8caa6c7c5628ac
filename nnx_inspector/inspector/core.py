"""The state that the parts of one inspector share: its model, handles, recording and screen.

Every part takes the core. The core knows none of them by name, and nothing about the Inspector.
Invariant: every pass of run, step, watch and push reaches the recording through `record_pass`.
Threads and widgets hold the core weakly, and are closed once nothing else holds it. Runs no pass
itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx

from nnx_inspector._compat.configuration import Configuration
from nnx_inspector._compat.flax_graphs import module_links
from nnx_inspector._compat.processes import spans_processes
from nnx_inspector.background import Worker, run_loop, weak_method
from nnx_inspector.errors import InspectorError, error_text, warn
from nnx_inspector.findings.facts import facts_of_modules
from nnx_inspector.findings.finding import Finding
from nnx_inspector.hooks.sites import Selection, module_sites, no_match_text
from nnx_inspector.inspector.cost.meter import Meter
from nnx_inspector.inspector.handles import Handles
from nnx_inspector.inspector.metrics import Metrics
from nnx_inspector.inspector.nnx.modes import Modes
from nnx_inspector.inspector.nnx.switches import Switches
from nnx_inspector.inspector.passes.call import Call
from nnx_inspector.inspector.passes.owned_passes import OwnedPasses
from nnx_inspector.inspector.passes.pass_request import PassRequest, ShownPass
from nnx_inspector.inspector.values.array_reader import ArrayReader, attention_counts, takes_ids
from nnx_inspector.inspector.values.page_values import PageValues
from nnx_inspector.live.pass_stats import (
    PassStatsBuilder,
    Summaries,
    choices_of,
    unit_samples_of,
    updates_in,
)
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.perturbations.places import CLEAN, Setting
from nnx_inspector.program.analysis.stacks import layers_with_rows, stacks_of
from nnx_inspector.program.analysis.trace import Trace, trace_of
from nnx_inspector.program.stage import CachedTrace, StagedCall
from nnx_inspector.recordings.facts import PassStats
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.recordings.tree_rows import MODULES, columns_of_rows, layer_key, leaf_of
from nnx_inspector.records.donated import require_not_deleted, several_processes_text
from nnx_inspector.records.record import Record, layers_of
from nnx_inspector.records.rows import rows_of
from nnx_inspector.screen import protocol
from nnx_inspector.screen.batch_reader import BatchReader
from nnx_inspector.screen.presenter import Presenter
from nnx_inspector.screen.requests import Answer
from nnx_inspector.typing import Kwargs

if TYPE_CHECKING:
    from nnx_inspector.profiling.result import Profile


def _summaries_of(record: Record, stacks: Mapping[str, int], *, parameters: bool) -> Summaries:
    held = record.parameters if parameters else {}
    of_parameters = {path: one.recorded() for path, one in held.items()}
    return {**record.merged(), **layers_of(record, stacks), **of_parameters}


class Core:
    """The state of one inspector.

    Args:
        inputs: how to read its batch.

    Attributes:
        entry: how the model is called in a pass without a loss.
        user_selection: the sites that the user selected.
        parameters: whether parameters are measured.
        states: the arrays of optimizers that loops measure, with the type of each.
        selection: the sites that are shown.
        watched_model: the model that loops watch, as the user gave it.
        model: the same model, with the state that passes use.
        example: the last forward pass that was requested.
        last_step: the last pass of a loss that was requested.
        request: the last pass that was requested.
        shown: the last pass that was made for the screen.
        trace: the calls of the example.
        stacks: its stacked sites, with how many of their layers have sites of their own.
        missing: which selected operation the example does not have, in words; or "".
        why_eager: why the pass on screen was not traced; "" if it was.
        step: the step of the running loop, otherwise the last step shown.
        setting_number: the number of the last pass with perturbations; it grows when they change.
        looping: whether a loop is being watched.
        pending: whether there is a change that the loop has not adopted yet.
        study_lock: held while a sweep or a study runs.
        array_reader: reads the arrays of a site.
        batch: the batch of a pass, read once per pass.
        embedded: the inputs of a program that its embeddings receive, found once per program.
        unaligned: the sites of a program without words, see `batch.unaligned_sites`.
        position_answers: by site, the figures of a text that the screen has shown of this batch.
        page_values: the values that the screen has shown.
        comparisons: the comparisons of two passes that the screen has shown, by their numbers.
        current_findings: gives the present findings, as the rules give them.
        recorder: records and shows the measured steps of a loop, while the loop goes on.
        parts: the parts, kept here so that a handle or a loop keeps all of them alive.
        closing: callbacks for closing, or for when nothing holds the core any more. None of them
            may refer to the core.
    """

    def __init__(
        self,
        model: nnx.Module,
        selection: Selection,
        example: PassRequest,
        inputs: BatchReader | None = None,
    ):
        began = time.monotonic()
        self.watched_model = self.model = model
        self.inputs = inputs or BatchReader()
        self.entry, self.example, self.request = example.entry, example, example
        self.last_step: PassRequest | None = None
        self._passes: dict[Selection, OwnedPasses] = {}
        self._waiting: dict[str, tuple[str, float]] = {}
        self.user_selection = selection
        self.select_sites(selection)
        self.modes = Modes(model)
        self._links = module_links(model)
        example.require_there()
        require_not_deleted((call := self.call()).parts.leaves, "The model", model)
        self.trace, self.missing = self.programs.read(call, self._first_trace)
        self.shown: ShownPass | None = None
        self.why_eager = ""
        self.lock = threading.RLock()
        self.recorder = Worker("nnx_inspector.recording", weak_method(self._recording_failed))
        self.study_lock = threading.Lock()
        self.closed = self.looping = self.pending = False
        self.parameters, self.states = True, dict[str, str]()
        self.step = 0
        self.parts: tuple[object, ...] = ()
        self.recording = Recording()
        if self.entry.where is not None:
            self.recording.count_where(self.entry.where.words)
        self.array_reader = ArrayReader()
        self.batch: tuple[PassRequest, protocol.Inputs] | None = None
        self.embedded: tuple[CachedTrace, dict[int, dict[str, bool]]] | None = None
        self.unaligned = weakref.WeakKeyDictionary[CachedTrace, tuple[str, ...]]()
        self.position_answers: dict[str, Answer] = {}
        self.page_values = PageValues()
        self.comparisons: dict[str, Answer] = {}
        self.setting_number, self._setting = 0, CLEAN
        self.handles = Handles()
        self.meter = Meter(weak_method(self._step_of_the_loop))
        self.metrics = Metrics(self.recording, self.notice)
        self.effect: Callable[[], tuple[protocol.Effect | None, str]] = lambda: (None, "")
        self._warning_given: dict[str, bool] = {}  # text -> whether the warning was given
        self.view = Presenter(self._snapshot)
        self._stats_builder = PassStatsBuilder()
        self._profile: Profile | None = None
        self._unseen: Mapping[str, str] = {}
        self.current_findings: Callable[[], list[Finding]] = list
        self.closing = contextlib.ExitStack()
        self.closing.callback(self.view.close)
        self.closing.callback(self.meter.close)
        self.closing.callback(self.recorder.close)
        # at exit the comms are closed already, and `background` ends the threads
        weakref.finalize(self, self.closing.close).atexit = False
        self.show_trace(self.trace)
        if self.in_all_processes:
            self.notice("info", several_processes_text("The example"))
        self.meter.waited["tree_seconds"] = time.monotonic() - began

    def _step_of_the_loop(self) -> int | None:
        return self.step if self.looping else None

    def _first_trace(self, stage: StagedCall) -> tuple[Trace, str]:
        found = trace_of(stage)
        called = [call.site for call in found.calls]
        return found, self.selection.missing(called, stage.scope.operations)

    def _snapshot(self) -> Kwargs:
        return {
            "recording": self.recording,
            "handles": self.handles.all(),
            "pending": self.pending and self.looping,
            "metrics": self.metrics.latest,
            "cost": self.meter.cost,
            "effect": self.effect,
            "errors": self.metrics.errors + self.meter.errors,
            "waiting": tuple(
                protocol.Waiting(what=what, seconds=time.monotonic() - since)
                for what, since in list(self._waiting.values())
            ),
        }

    def show_waiting(self, who: str, what: str = "") -> None:
        """Show that a part of the inspector waits for something; "" for nothing any more."""
        if self._waiting.get(who, ("", 0.0))[0] != what:
            if what and not self.closed:
                self._waiting[who] = what, time.monotonic()
            else:
                self._waiting.pop(who, None)
            self.view.state_changed()

    def notice(self, level: str, text: str, site: str | None = None) -> None:
        self.view.notice(protocol.Notice(level=level, text=text, site=site))

    def require_open(self) -> Core:
        """Return the core; raise an error if the inspector was closed."""
        self.view.screen.poll()  # every call of the user's begins with this
        if self.closed:
            raise InspectorError(
                "This inspector was closed. Make a new one: nni.Inspector(model, x)."
            )
        return self

    def close(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed, self.shown = True, None
        self._waiting.clear()  # nothing waits for what is still under way
        self.recording.detach()
        self.closing.close()
        for text in self.warnings():
            warn(text)

    # ------------------------------------------------------------- the model

    def update(self, model: nnx.Module) -> None:
        """Use another model of an equal structure for passes."""
        self.model = self.modes.model = model
        self._links = module_links(model)
        self.show_trace(self.trace)

    def modules_have_changed(self) -> bool:
        """Whether a module was added, removed, replaced or moved since the last time."""
        before, links = self._links, module_links(self.model)
        if links is None:  # flax did not finish: what the model would have been, is not known
            return False
        self._links = links
        return links != before

    def select_sites(self, selection: Selection) -> None:
        """Select other sites, without showing them yet. What was compiled for a selection stays."""
        passes = self._passes.get(selection)
        if passes is None:
            passes = self._passes[selection] = OwnedPasses((), selection, self.watched_model)
            passes.on_wait = weak_method(self.show_waiting)
        self.selection, self.programs = selection, passes

    def call(self) -> Call:
        """The last requested pass, with the present model and modes."""
        return self.request.call(self.model, self.modes.switches())

    def set_request(self, request: PassRequest) -> None:
        """Take a pass for the last one, and for the last of its kind."""
        self.request = request
        if request.loss_fn is None:
            self.example = request
        else:
            self.last_step = request

    def last_request(self, which: str) -> PassRequest:
        """The last forward pass ("run"), or the last step.

        Raises:
            InspectorError: a loop is running, or there was no step.
        """
        if self.looping:
            raise InspectorError("A loop is running. Another batch can be chosen after it.")
        request = self.example if which == "run" else self.last_step
        if request is None:
            raise InspectorError("There was no step yet: insp.step(loss_fn, batch) makes one.")
        return request

    def example_call(self) -> Call:
        """The forward pass of the example, with the present model and modes."""
        return self.example.call(self.model, self.modes.switches())

    @property
    def in_all_processes(self) -> bool:
        """Whether a pass must run in all processes of a job; then none is made unasked."""
        if jax.process_count() == 1:
            return False
        call = self.call()
        with call.configuration.applied():  # with its mesh, in any thread
            return spans_processes(call.arrays)

    def require_one_process(self, what: str) -> None:
        """Raise an InspectorError if a pass must run in all processes of a job."""
        if self.in_all_processes:
            raise InspectorError(several_processes_text(what))

    def record_facts(self) -> None:
        """Give the recording the facts of the model and the last requested pass, once."""
        known = self.recording.facts_so_far
        if known is None or not known.sites:
            call = self.call()
            self.recording.learn(facts_of_modules(call.in_modes.model))
            self.recording.learn(self.programs.facts_reader(call))

    def trace_example(self) -> Trace:
        """The trace of the example, with the present model and modes."""
        return self.programs.read(self.example_call(), trace_of)

    def show_trace(self, found: Trace) -> None:
        """Show the sites of a trace from now on."""
        # the trace may be of a view with other modes; the rows are the model's own modules
        modules = found.modules
        if all(site.module is not self.model for site in modules):
            own = {site.path: site for site in module_sites(self.model)}
            modules = (*own.values(), *(site for site in modules if site.path not in own))
        self.trace = dataclasses.replace(found, modules=modules)
        self.stacks = layers_with_rows(stacks_of(self.trace))
        self.programs.add_keys([*(c.site for c in found.calls), *(site.key for site in modules)])
        self.show_layout({})

    def show_layout(self, unseen: Mapping[str, str]) -> None:
        """Show the rows again, with the reasons why a running program cannot show some of them."""
        self._unseen = unseen
        rows = rows_of(self.trace, unseen=unseen, states=self.states)
        rows = rows if self._profile is None else self._profile.shown_in(rows)
        attending = tuple(site for site, n in attention_counts(self.trace.calls).items() if n)
        layout = protocol.Layout(
            layout=self.view.layouts + 1,
            model=type(self.model).__name__,
            sites=rows,
            attending=attending,
            sequences=bool(attending) or takes_ids(self.trace, self.example),
            where=self.recording.where,
        )
        self.view.set_layout(layout)
        if self.recording.attached:
            self.recording.keep_table(MODULES, columns_of_rows(rows))

    def show_profile(self, found: Profile) -> None:
        """Show the figures of a step by module in the rows."""
        with self.lock:
            self._profile = found
            self.show_layout(self._unseen)
        self.view.present(force=True)

    def show_states(self, states: Mapping[str, str]) -> None:
        """Show rows for these arrays of optimizers too, by key and type."""
        if not states.items() <= self.states.items():
            self.states |= states
            self.show_layout(self._unseen)

    def show_modes(self, switches: Switches) -> None:
        """Show which modes are switched, and whether passes are traced."""
        lasting_notices: list[str] = []
        if switches:
            words = switches.in_words()
            text = f"Modes for inspected passes: {words}. A watched loop uses the model's own."
            lasting_notices.append(text)
        if self.why_eager:
            lasting_notices.append(
                f"The pass ran eagerly, line by line: {self.why_eager}. FLOPs and dataflow are "
                f"unknown, and findings that need the program are missing."
            )
        self.view.lasting_notices = tuple(
            protocol.Notice(level="info", text=text, site=None) for text in lasting_notices
        )

    def require_site(self, site: str, *, layers: bool = True, arrays: bool = False) -> str:
        """Return a site's key, or raise a ValueError that names the nearest keys.

        Args:
            site: the key; that of one layer also as `sweep` writes it, `"layers[3]/mlp"`.
            layers: whether it may be the key of one layer, `"layers/mlp[3]"`.
            arrays: whether it may be the key of one array of an output, `"head(logits)"`.
        """
        of, array = leaf_of(site)
        if array and not arrays and site in self.view.keys:
            raise ValueError(
                f"{site!r} is one array of what {of!r} returns, and has statistics only. "
                f"Pass {of!r} for the whole output."
            )
        whole, chosen = without_layers(site)
        key = functools.reduce(layer_key, chosen, whole)
        if whole not in self.view.keys:
            raise ValueError(no_match_text(Selection(whole), self.view.keys))
        if not layers and key not in self.view.keys:
            raise ValueError(f"{whole!r} has no layer {key.removeprefix(whole)}.")
        return key

    def select(self, site: str) -> None:
        self.view.select(self.require_site(site, layers=False, arrays=True))

    def in_background(self, train: Callable[[], object]) -> threading.Thread:
        if not callable(train):
            raise TypeError(f"background takes a function, got {type(train).__name__}.")
        configuration = Configuration.current()

        def loop() -> None:
            with configuration.applied():
                train()

        def failed(error: Exception) -> None:
            self.notice("error", f"The background loop stopped: {error_text(error)}")
            self.view.state_changed()
            if not self.view.is_visible:  # else there is no one to raise it for
                raise error

        return run_loop("nnx_inspector.background", loop, failed)

    # ---------------------------------------------------------- the recording

    def record_pass(
        self,
        step: int,
        summaries: Summaries,
        *,
        kind: str,
        setting: Setting,
        figures: PassStats | None = None,
        held: int | None = None,
    ) -> None:
        """Record a pass.

        Args:
            summaries: its summaries by site and quantity.
            kind: "run", "step", "watch" or "push".
            figures: figures of parameters and units, if measured.
            held: the number under which the recording already holds the pass.
        """
        with self.lock:
            last, self._setting = self._setting, setting
            if setting.active and not (last.active and setting.is_equivalent(last)):
                self.setting_number += 1
            number = self.setting_number if setting.active else 0
        self.recording.append(
            step,
            summaries,
            kind=kind,
            perturbed=setting.active,
            setting=number,
            figures=figures,
            held=held,
        )

    def show_record(
        self,
        record: Record,
        *,
        kind: str,
        setting: Setting,
        metrics: Mapping[str, object] | None = None,
        states: Mapping[str, np.ndarray] | None = None,
        clean: Record | None = None,
    ) -> None:
        """Record a pass of the present step, and show it; see `record_pass`.

        `states` are samples of parameters and statistics, for figures over the steps. `clean` is
        the same pass without its perturbations, which the screen shows behind it.
        """
        with self.lock:
            figures, measured = None, {p: x.recorded() for p, x in record.parameters.items()}
            if states is not None or measured or record.choices:
                rows = (
                    unit_samples_of(record, self.stacks),
                    states or {},
                    choices_of(record, self.stacks),
                )
                updates = updates_in(record.parameters)
                figures = self._stats_builder.build(
                    *rows, follow=False, updates=updates, measured=measured
                )
            # no method of this core: what is shown behind may not keep it alive
            read = functools.partial(_summaries_of, stacks=self.stacks, parameters=self.parameters)
            summaries = read(record)
            self.record_pass(self.step, summaries, kind=kind, setting=setting, figures=figures)
            before = None if clean is None else functools.partial(read, clean)
            self.view.set_clean_pass(before, self.recording.passes[-1])
            if metrics:
                self.metrics.add(self.step, metrics)
            self.metrics.settle()
            self.pending = self.pending and self.looping
            if self.view.progress.kind != "watch":  # a loop's progress stays on screen
                self.view.progress = protocol.Progress(
                    kind=kind, running=False, step=self.step, total=None, rate=None
                )
        self.view.present(force=True)

    def push(self, record: Record, step: int | None, metrics: Mapping[str, object]) -> None:
        if not isinstance(record, Record):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"push takes a Record, as nni.capture returns it, got {type(record).__name__}."
            )
        with self.lock:
            self.step = self.step + 1 if step is None else int(step)
        self.show_record(jax.device_get(record), kind="push", setting=CLEAN, metrics=metrics)

    def add_metrics(self, values: Mapping[str, object], passed: int | None = None) -> None:
        """See `Inspector.metrics`. `passed` is the last step known to have begun."""
        with self.lock:
            step = self.step if passed is None else self.metrics.next_step(values, passed)
            self.metrics.add(step, values)
            if not self.looping:
                self.metrics.settle(wait_until=math.inf)
                self.view.present(force=True)

    def save(self, path: str | bytes | os.PathLike[str]) -> None:
        """Save the recording, and from then on each new pass; of a job, process 0 does."""
        if jax.process_index() and self.in_all_processes:
            return
        layout = self.view.layout
        if layout is not None:
            self.recording.keep_table(MODULES, columns_of_rows(layout.sites))
        self.recording.attach(path, weak_method(self._saving_failed))

    def _saving_failed(self, text: str) -> None:
        self.metrics.errors += 1
        self.notice("error", text)
        self._warning_given.setdefault(text, False)

    def warnings(self) -> list[str]:
        """What a script, which has no screen, is to be warned of now; each text once."""
        found = [text for text, given in self._warning_given.items() if not given]
        self._warning_given.update(dict.fromkeys(found, True))
        return found

    def _recording_failed(self, error: Exception) -> None:
        self._saving_failed(f"A measured step was not recorded: {error_text(error)}")
