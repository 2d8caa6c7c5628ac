"""`Inspector`: one model on screen, and what ties it to tracing, passes, watching and perturbing.

Invariant: whatever goes wrong with the screen or with what the browser asks never reaches the
user's training loop; it is counted and shown. Measures, draws and formats nothing itself.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax
from flax import nnx

from nnx_inspector._compat.configuration import Configuration
from nnx_inspector.background import weakly
from nnx_inspector.errors import InspectorError
from nnx_inspector.findings.findings import Finding, diagnose
from nnx_inspector.hooks.layers import unwatched
from nnx_inspector.hooks.sites import (
    Only,
    Selection,
    module_sites,
    nothing_selected,
)
from nnx_inspector.inspector.commands import Answer, Answering, Request, answer
from nnx_inspector.inspector.diagnosing import Diagnosing, message_of
from nnx_inspector.inspector.export import Brief, told_by
from nnx_inspector.inspector.handles import Handle, Handles
from nnx_inspector.inspector.loops import Loops, Parts
from nnx_inspector.inspector.metrics import Meter, Metrics
from nnx_inspector.inspector.nnx.modes import Modes
from nnx_inspector.inspector.nnx.page import Pages
from nnx_inspector.inspector.nnx.switches import Switches
from nnx_inspector.inspector.panels import look, parameters_at, units_at, units_messages
from nnx_inspector.inspector.passes.entry import entry_of, others_in_words, say_if_ensemble
from nnx_inspector.inspector.passes.programs import OwnedPasses
from nnx_inspector.inspector.passes.rerun import Around, Evaluating
from nnx_inspector.inspector.passes.sweeps import Asked, Sweeps
from nnx_inspector.inspector.passes.trials import Shown, Trial
from nnx_inspector.inspector.passes.update import renewed
from nnx_inspector.inspector.values.opening import Look, Opening, Part, opened_tree
from nnx_inspector.inspector.values.reading import read_values
from nnx_inspector.live.figures import Observer, gauges_of
from nnx_inspector.live.steps import Region
from nnx_inspector.perturbations.apply import chosen_layer, parameter_keys
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.perturbations.region import Known, check_applies, is_live, require_known
from nnx_inspector.perturbations.slots import CLEAN, Setting, place_of
from nnx_inspector.perturbations.values import Perturbation, Zero
from nnx_inspector.program.analysis.trace import Trace, traced
from nnx_inspector.program.eager import why_untraceable
from nnx_inspector.recordings.compare import compare
from nnx_inspector.recordings.layers import Stack
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.records.layers import layers_of
from nnx_inspector.records.record import Record
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comparison import other_pass, recording_of
from nnx_inspector.screen.export.page import MAX_BYTES, page_of, write_page
from nnx_inspector.screen.export.replay import Told
from nnx_inspector.screen.layout import layout_of, shown_of, stacks_of
from nnx_inspector.screen.presenter import Presenter
from nnx_inspector.screen.timeline import Settings
from nnx_inspector.stats.summary import Summary

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]
    import plotly.graph_objects as go

    from nnx_inspector.perturbations.effects import Logits
    from nnx_inspector.progress import Progress
    from nnx_inspector.stats.bins import Scale

T = TypeVar("T")
_ZERO = Zero()


class Inspector:
    """A live view of one model. In a notebook it displays itself.

    Making one traces the example and runs one forward pass; the model is not changed.

    Args:
        f: an `nnx.Module`; a bound method of one, `model.encode`; or a function that takes the
            model as one of its arguments, your own `nnx.vmap` over an ensemble among them. The
            first module among the arguments is the model; other modules run, and are not shown.
        args: the example, what `f` is called with.
        only: which sites are shown; see `intercept_methods`. By default `__call__` of every
            module, and the method that `f` is.
        display: whether to show the widget now, where there is a notebook.
        kwargs: keyword arguments of the example.

    Raises:
        TypeError: `f` is none of these, or cannot be called with the example.
        Whatever the forward pass raises on the example, with a note that names the failing site.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
        >>> insp.recording.summary("").size
        12
        >>> insp.close()

        A function of the model, whose other arguments `run` takes:

        >>> def forward(model, x):
        ...     return 2 * model(x)
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> insp = nni.Inspector(forward, model, jnp.ones((4, 2)))
        >>> insp.run(jnp.ones((5, 2))).shape
        (5, 3)
        >>> insp.close()
    """

    def __init__(
        self,
        f: Any,
        /,
        *args: Any,
        only: Only = None,
        display: bool = True,
        **kwargs: Any,
    ):
        self._entry, model, args, kwargs = entry_of(f, args, kwargs)
        self._watched = self._model = model
        self._selection = Selection(self._entry.selecting(only))
        self._selection.require_match(model)
        self._lock = threading.RLock()
        self._closed = False
        self._eager = ""  # why the pass on screen was not traced
        try:
            self._trace = self._traced_of(model, args, kwargs)
        except Exception as error:
            say_if_ensemble(error, model)
            raise
        self._modes = Modes(model, self._modes_changed)
        self._pages = Pages(model, self._modes)
        self._recording = Recording()
        self._passes = OwnedPasses((), self._selection)
        self._handles = Handles(self._perturbations_changed, self._check_value)
        self._sweeps = Sweeps(weakly(self._sweep_moved))
        weakref.finalize(self, self._sweeps.close)
        self._settings = Settings()
        self._observer = Observer()
        self._meter = Meter()
        self._metrics = Metrics(self._recording, self._notice)
        self._view = Presenter(weakly(self._asked), self._snapshot)
        self._opening = Opening(self._selection)
        weakref.finalize(self, self._opening.shelf.clear)
        # widget registries must not keep an inspector that nobody holds
        weakref.finalize(self, self._view.close)
        self._diagnosing = Diagnosing(weakly(self._found), self._view.keep, weakly(self._not_found))
        weakref.finalize(self, self._diagnosing.close)
        self._view.presented = weakly(self._diagnose)
        self._brief = Brief()
        self._view.tell = weakly(self._told_briefly)
        reply = self._view.screen.reply
        self._looks = Answering(weakly(self._answer), self._view.send, reply)
        weakref.finalize(self, self._looks.close)
        around = Around(
            lock=self._lock,
            selection=self._selection,
            passes=self._passes,
            handles=self._handles,
            modes=self._modes,
            view=self._view,
            looping=weakly(self._is_looping),
            step=weakly(self._step),
            show=weakly(self._show_own),
            before=weakly(self._show_modes),
            notice=weakly(self._notice),
        )
        self._evaluating = Evaluating(model, Trial(args, kwargs, entry=self._entry), around)
        parts = Parts(
            lock=self._lock,
            recording=self._recording,
            metrics=self._metrics,
            meter=self._meter,
            view=self._view,
            handles=self._handles,
            refresh=self._evaluating.refresh,
            reach=self._evaluating.reached,
            unseen=weakly(self._new_layout),
            stacks=weakly(self._stacks_told),
            settings=self._settings,
        )
        self._loops = Loops(parts)
        self._handles.elsewhere = self._loops.is_compiling
        self._take_trace(self._trace)
        if others := others_in_words(args, kwargs):
            self._notice("info", others)
        try:
            self.run(*args, **kwargs)
        except BaseException:
            self.close()
            raise
        if display:
            self._view.display_in_notebook()

    # ------------------------------------------------------------- one pass

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass of the model on screen, with what is perturbed; the model stays as is.

        Args:
            args: those of the module, method or function that the inspector was made with; a
                function's without the model, which takes its place again. Without any, and without
                keywords, those of the last `run`, at first of the example.
            kwargs: its keyword arguments.

        Returns:
            What the module, method or function returns.
        """
        self._require_open()
        if not args and not kwargs:
            return self._evaluating.run(self._evaluating.example)
        return self._evaluating.run(Trial(args, kwargs, entry=self._entry))

    def update(self, *new: Any) -> None:
        """Give the inspector the model's new state; the user's own objects stay as they are.

        A training step that donates the model's arrays, or a functional loop, leaves the model
        that was given behind, with old or deleted arrays.

        Args:
            new: a model of an equal structure: it takes the place of the one that was given, also
                in the loops that are watched from here on. Or a state (`nnx.state(model)`, the
                states of `nnx.split`, nested dicts of arrays): it is what `run`, `step`, values,
                parameters, units and sweeps read from here on, and loops go on watching the model
                that was given. What a state leaves out stays as it is.

        Raises:
            ValueError: the structure differs; the text names where.
            TypeError: neither a model nor a state.
            InspectorError: there are deleted arrays in it, or another model is given while a loop
                is watched.

        Example:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            >>> insp = nni.Inspector(model, jnp.ones((4, 2)))
            >>> step = jax.jit(lambda state: jax.tree.map(lambda p: 0 * p, state), donate_argnums=0)
            >>> state = step(nnx.state(model))  # the model's own arrays are deleted
            >>> insp.update(state)
            >>> float(insp.run(jnp.ones((4, 2))).sum())
            0.0
            >>> insp.close()
        """
        self._require_open()
        model = renewed(self._watched, new)
        of_a_model = any(model is one for one in new)
        with self._lock:
            if of_a_model:
                self._loops.forget()
                self._watched = model
            self._model = self._evaluating.model = self._modes.model = self._pages.model = model
        self._take_trace(self._trace)

    def step(self, loss_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One forward and backward pass of `loss_fn(model, *args, **kwargs)` on screen.

        Nothing of the model changes: no update is made, no statistic or RNG stream advances. Where
        something is perturbed the clean pass is made too, and the effect is shown.

        Args:
            loss_fn: returns a scalar, or `(scalar, aux)`; the scalars in a dict `aux` are shown
                as metrics.
            args: what follows the model, for instance the batch.
            kwargs: keyword arguments of `loss_fn`.

        Returns:
            What `loss_fn` returns, with what is perturbed.
        """
        self._require_open()
        if not callable(loss_fn):
            raise TypeError(
                f"step takes a function loss_fn(model, *args), got {type(loss_fn).__name__}."
            )
        return self._evaluating.run(Trial(args, kwargs, loss_fn, entry=self._entry))

    def _show_own(self, shown: Shown) -> None:
        # a loss is not among the metrics' curves: those are the training's, this is an evaluation
        outcome = shown.outcome
        self._eager = outcome.perturbed.record.eager
        self._show_modes(shown.switches)
        self._recording.learn(self._passes.facts(shown.trial.call(self._model, shown.switches)))
        self._show(
            outcome.perturbed.record,
            {},
            shown.trial.kind,
            setting=shown.setting,
            states=outcome.perturbed.states,
        )

    def push(self, record: Record, *, step: int | None = None, **metrics: Any) -> None:
        """Put a record of your own (from `nni.capture` or `nni.value_and_grad`) on screen.

        Args:
            record: on the device or the host.
            step: which step it belongs to; by default the one after the last.
            metrics: scalars to go with it.
        """
        self._require_open()
        if not isinstance(record, Record):
            raise TypeError(
                f"push takes a Record, as nni.capture returns it, got {type(record).__name__}."
            )
        with self._lock:
            self._loops.step = self._loops.step + 1 if step is None else int(step)
        self._show(jax.device_get(record), metrics, "push", setting=CLEAN)

    def _show(
        self,
        record: Record,
        metrics: Mapping[str, Any],
        kind: str,
        *,
        setting: Setting,
        states: Mapping[str, Any] | None = None,
    ) -> None:
        with self._lock:
            stacks = shown_of(stacks_of(self._trace))
            summaries = {**record.merged(), **layers_of(record, stacks)}
            figures = None
            if states is not None:
                figures = self._observer.figures(gauges_of(record, stacks), states, follow=False)
            self._recording.append(
                self._loops.step,
                summaries,
                kind=kind,
                perturbed=setting.active,
                setting=self._settings.number_of(setting),
                figures=figures,
            )
            self._metrics.add(self._loops.step, metrics)
            self._metrics.settle()
            if not self._loops.running:
                self._loops.pending = False
            if self._view.progress.kind != "watch":  # a loop's progress stays on screen
                self._view.progress = protocol.Progress(
                    kind=kind, running=False, step=self._loops.step, total=None, rate=None
                )
        self._view.present(force=True)

    # ---------------------------------------------------------------- loops

    @overload
    def watch(
        self,
        batches: Iterable[T],
        *,
        every: int = 10,
        only: Only = None,
        gradients: bool = True,
    ) -> Generator[T, Any, None]: ...

    @overload
    def watch(
        self,
        batches: None = None,
        *,
        every: int = 10,
        only: Only = None,
        gradients: bool = True,
    ) -> Region: ...

    def watch(
        self,
        batches: Iterable[Any] | None = None,
        *,
        every: int = 10,
        only: Only = None,
        gradients: bool = True,
    ) -> Generator[Any, Any, None] | Region:
        """Iterate over `batches` and watch your own training step, jitted and unchanged.

        Every `every`-th step is measured; the others run exactly the program that runs without
        us, unless a perturbation is on. Perturbations act on the real step.

        Without batches it is a context, `with insp.watch(every=10):`, for a loop that is out of
        reach: passes of the model are counted and sampled inside the program, at a small cost.
        `insp.tick()` once a step makes steps of it.

        Args:
            batches: what to iterate over.
            every: measure the steps (passes) 0, every, 2 every, ...
            only: which of the inspector's sites to measure; see `intercept_methods`.
            gradients: whether to measure the gradients of activations too.

        Raises:
            TypeError: `batches` cannot be iterated over.
            ValueError: `every` is less than 1, or `only` matches no site.
            InspectorError: a loop is being watched already.
        """
        self._require_open()
        modules = {site.key for site in self._trace.modules}
        besides = tuple(c.site for c in self._trace.calls if c.site not in modules)
        return self._loops.watch(
            self._watched,
            batches,
            every=every,
            selected=self._selection.terms,
            only=only,
            gradients=gradients,
            besides=besides,
        )

    def tick(self) -> None:
        """A step begins, in a loop inside of `with insp.watch(every=10):`; call it once a step.

        From then on steps are counted, and those that are not measured run exactly the program
        that runs without us.

        Raises:
            InspectorError: not inside of such a region.
        """
        self._require_open()
        self._loops.tick()

    def metrics(self, **values: Any) -> None:
        """Scalars of the current step (`loss=..., accuracy=...`), drawn as curves.

        Arrays on the device are fetched when they are ready, without holding the loop up. What is
        no scalar is left out: an InspectorWarning says so once for each name, and the screen does.
        """
        self._require_open()
        with self._lock:
            self._metrics.add(self._loops.step, values)
            if not self._loops.running:
                self._metrics.settle(wait=True)
                self._view.present(force=True)

    def background(self, train: Callable[[], Any]) -> threading.Thread:
        """Run a loop in a thread, so that the notebook (and the widget) stay responsive.

        Args:
            train: a function that trains, for instance by `for batch in insp.watch(batches)`. The
                settings of jax that hold here hold in the thread too.

        Returns:
            The started thread. What `train` raises is shown in the widget.
        """
        self._require_open()
        if not callable(train):
            raise TypeError(f"background takes a function, got {type(train).__name__}.")

        configuration = Configuration.here()

        def work() -> None:
            try:
                with configuration.held():
                    train()
            except Exception as error:  # noqa: BLE001 - there is no caller: it is shown
                self._notice(
                    "error", f"The background loop stopped: {type(error).__name__}: {error}"
                )
                self._view.state_changed()

        thread = threading.Thread(target=work, name="nnx_inspector.background", daemon=True)
        thread.start()
        return thread

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the recording, and from then on each pass and metric as it comes.

        Until `close` or another `save`. A process that is killed loses what it was measuring and
        no more; `nni.load` reads the file. What fails while a loop runs is shown, never raised.

        Args:
            path: of the file; what is there is replaced in one piece.

        Raises:
            OSError: the file cannot be made.
        """
        self._require_open()
        self._recording.attach(path, weakly(self._not_saved))

    def _not_saved(self, text: str) -> None:
        self._metrics.errors += 1
        self._notice("error", text)

    # --------------------------------------------------------- perturbations

    def perturb(self, only: Only, perturbation: Known) -> Handle:
        """Switch a perturbation on, as the click does; from the next pass on.

        `Zero` and `Scale` on outputs act at once. For other kinds, for inputs and for one layer of
        a stack, the program needs a place that it may not have yet: it is compiled once, in the
        background, while the old one goes on (`handle.compiling`); `run` and `step` wait for it.
        On one site perturbations act in the order in which they were added.

        Args:
            only: a site key or a glob, `"layers[3]"` for one layer of a stacked module, a filter,
                or several. For `ParameterNoise` and `PruneMask` it selects parameters: their
                paths, or modules, of which it means all parameters.
            perturbation: any kind, `nni.Zero()`, `nni.Mask(units)`, `nni.StopGradient()`. Kinds
                for parameters act in `run` and `step`.

        Raises:
            TypeError: not a perturbation, or it has no meaning for a site's values.
            ValueError: nothing matches (the text names the nearest), an array does not fit, or
                there is no such layer.
            InspectorError: a traced value.
        """
        self._require_open()
        require_known(perturbation)
        only, rows = chosen_layer(only)
        if isinstance(perturbation, ParameterPerturbation):
            sites = parameter_keys(self._model, only)
        else:
            sites = self._called_sites(only)
        self._check(perturbation, sites, rows)
        name = only if isinstance(only, str) else ", ".join(sites)
        name += "".join(f"[{i}]" for i in rows)
        return self._handles.add(name, sites, perturbation, rows)

    def _called_sites(self, only: Only) -> list[str]:
        selection = Selection(only)
        called = dict.fromkeys(call.site for call in self._trace.calls)
        modules = {site.key: site for site in self._trace.modules}
        sites = [
            key
            for key in called
            if (  # what only a call reveals has no module here
                selection.matches(modules[key].path, "__call__", modules[key].module)
                if key in modules
                else selection.matches_key(key)
            )
        ]
        if not sites:
            raise ValueError(nothing_selected(selection, sorted(called)))
        return sites

    def _check(self, one: Known, sites: Sequence[str], rows: tuple[int, ...]) -> None:
        """Raise where a perturbation has no meaning in the pass that is on screen."""
        if isinstance(one, ParameterPerturbation):
            self._evaluating.reached().check_parameters(one, sites, rows)
        elif is_live(one) and not rows:
            outputs = {call.site: call.output for call in self._trace.calls}
            for site in sites:
                check_applies(one, site, outputs[site])
        else:
            self._evaluating.reached().check(one, sites, rows)

    def _check_value(self, value: Known, handle: Handle) -> None:
        if place_of(value, handle.sites, handle.rows) != handle.place:
            self._check(value, handle.sites, handle.rows)

    @property
    def perturbations(self) -> list[Handle]:
        """The perturbations there are, oldest first."""
        return self._handles.all()

    def switch_all(self, enabled: bool) -> None:
        """Switch every perturbation on, or off: one change, from the next pass on."""
        if not isinstance(enabled, bool):
            raise TypeError(f"switch_all takes True or False, got {enabled!r}.")
        self._require_open()
        self._handles.switch_all(enabled)

    def sweep(
        self,
        only: Only = "**",
        perturbation: Perturbation = _ZERO,
        *,
        layers: bool = True,
        logits: Logits = None,
        chunk: int | None = None,
        progress: Progress = True,
    ) -> pd.DataFrame:
        """Measure and show what perturbing each site alone does to the last `step` (the example,
        where there is no step since): its loss and what the model returns.

        The pass is made of a copy of the model as it is now, in `modes`, without what is perturbed
        besides; training may go on. See `nni.sweep` for the arguments and the frame: without a
        loss the columns `loss` and `loss_change` are missing, and the largest change of the output
        is first.

        Raises:
            InspectorError: a sweep runs already, or a training step has taken the model's arrays.
            TypeError, ValueError: as of `nni.sweep`.
        """
        return self._sweeps.run(self._to_sweep(only, perturbation, layers, logits, chunk), progress)

    def start_sweep(self, only: Only = "**", perturbation: Perturbation = _ZERO) -> None:
        """As `sweep`, in a thread: the result is on screen."""
        self._sweeps.start(self._to_sweep(only, perturbation))

    def stop_sweep(self) -> None:
        """End the sweep that runs; what is measured so far stays."""
        self._sweeps.stop()

    def _to_sweep(self, only: Only, perturbation: Perturbation, *how: Any) -> Asked:
        self._require_open()
        Selection(only).require_match(self._model)
        trial, read = self._evaluating.trial, self._evaluating.call
        source = f"{trial.name.lower()}, at step {self._loops.step}"
        return Asked(read, source, trial.loss_fn is not None, only, perturbation, *how)

    def _sweep_moved(self, message: protocol.Sweep) -> None:
        self._view.keep(message)

    def _perturbations_changed(self) -> None:
        with self._lock:
            self._loops.changed()
            looping = self._loops.running
        if not looping:
            self._evaluating.refresh()
        self._view.state_changed()

    # ----------------------------------------------------------------- modes

    @property
    def modes(self) -> Modes:
        """What the modules let you switch (deterministic, use_running_average ...) for `run`,
        `step` and the effect, without touching the model.
        """
        return self._modes

    def _modes_changed(self, view: nnx.Module) -> None:
        self._require_open()
        args, kwargs, runs = self._evaluating.example.args, self._evaluating.example.kwargs, True
        try:
            self._take_trace(self._traced(view, args, kwargs))
        except Exception as error:  # noqa: BLE001 - shown: another example may well run
            text = f"The example cannot be run in these modes: {type(error).__name__}: {error}"
            self._notice("warning", text)
            runs = self._evaluating.trial is not self._evaluating.example
        if runs and not self._loops.running:
            self._evaluating.refresh()
        self._show_modes(self._modes.switches())
        self._view.state_changed()

    def _traced(self, view: nnx.Module, args: Any, kwargs: Any) -> Trace:
        """The calls of the example in other modes; a view has shapes, and no array to be read."""
        with unwatched():
            try:
                return self._traced_of(view, args, kwargs)
            except Exception as error:
                if not why_untraceable(error):
                    raise
            copy = self._evaluating.example.call(self._model, self._modes.switches()).copied()
            return self._traced_of(copy.model, args, kwargs)

    def _traced_of(self, model: nnx.Module, args: Any, kwargs: Any) -> Trace:
        call = self._entry.call(model, args, kwargs)
        return traced(*call, selection=self._selection, roots={(): model})

    def _show_modes(self, switches: Switches) -> None:
        text = f"Modes for inspected passes: {switches.in_words()}. A watched loop has the model's."
        standing = [text] if switches else []
        if self._eager:
            standing.append(
                f"The pass ran eagerly, line by line: {self._eager}. FLOPs and dataflow are not "
                f"known, and findings that need the program are not judged."
            )
        notices = (protocol.Notice(level="info", text=text, site=None) for text in standing)
        self._view.standing = tuple(notices)

    # ------------------------------------------------------------- reading

    @property
    def model(self) -> nnx.Module:
        """The model, as it was given (to `update` last, where that was a model)."""
        return self._watched

    @property
    def trace(self) -> Trace:
        """The calls of the example."""
        return self._trace

    @property
    def recording(self) -> Recording:
        """What was measured so far."""
        return self._recording

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, worst first."""
        self._loops.take_up()
        return diagnose(self._recording)

    @property
    def effect(self) -> protocol.Effect | None:
        """What the perturbations that are on change, against the clean pass; None as long as that
        is not measured.

        After `step` it is there without a perturbation too, with equal figures on both sides.
        Waits for what is being compiled for it, unless a loop is watched: there each measured step
        measures it. `source` says which pass it is of, and of which step's model.
        """
        if not self._loops.running:
            self._evaluating.wait()
        return self._evaluating.effect()[0]

    @property
    def selected(self) -> str:
        """The site on screen. May be set."""
        return self._view.selected

    @selected.setter
    def selected(self, site: str) -> None:
        if site not in self._view.keys:
            selection = Selection(site)
            raise ValueError(nothing_selected(selection, self._view.keys))
        self._view.select(site)

    def parameters(self, site: str) -> dict[str, Summary]:
        """The Summary of each `nnx.Param` of a module (and of what is in it) as it is now, by
        path.

        Raises:
            ValueError: there is no such site.
            InspectorError: a training step that still runs has taken the arrays.
        """
        rows, _ = parameters_at(self._trace, self._known(site))
        return {row.path: row.summary for row in rows}

    def units(self, site: str) -> Any:
        """The Units of what a site returns (a pytree of them for a pytree): figures for each unit
        of the last axis, from a pass of what was run last, with what is perturbed. Compiled once a
        site.

        Raises:
            ValueError: there is no such site.
            InspectorError: it returns no array with units, or as of `parameters`.
        """
        self._require_open()
        setting = self._handles.setting()
        return units_at(self._passes, self._evaluating.call, setting, self._known(site))

    def _known(self, site: str) -> str:
        if without_layers(site)[0] not in self._view.keys:
            raise ValueError(nothing_selected(Selection(site), self._view.keys))
        return site

    def source_of_pass(self) -> str:
        """What was run last, in words."""
        return self._evaluating.trial.name.lower()

    def ask(self, request: Request) -> None:
        """Answer what the screen asks, in a thread."""
        self._looks.ask(request)

    def _answer(self, request: Request) -> Answer | None:
        if isinstance(request, protocol.ShowValues | protocol.ReadValues):
            return read_values(request, self._opening, self._to_look_at)
        if isinstance(request, protocol.Compare):
            found = self._view.compared(request)
            return None if found is None else (found, None)
        self._known(request.site)
        return look(request, self)

    def compare(
        self,
        other: Recording | Record | None,
        *,
        at: int | tuple[int | None, int | None] | None = None,
        name: str = "",
    ) -> pd.DataFrame | None:
        """Compare this run with another one, and put that beside it on screen.

        The other's pass is pinned there: its figures and histograms stand beside those of the pass
        on screen, and the panel "Compare" ranks the sites.

        Args:
            other: a Recording, for instance `nni.load("run.nni")`, or a Record of `nni.capture`,
                of this model or of one with sites of the same names. None takes it away.
            at: as of `nni.compare`: a step of both, or a pair of a step of the other's and one of
                this run's.
            name: what the other run is called on screen; its file's name where there is one.

        Returns:
            The frame of `nni.compare(other, insp.recording)`, the farthest apart first: its `a` is
            the other run. None without one.

        Raises:
            TypeError, ValueError: as of `nni.compare`.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            >>> insp = nni.Inspector(model, jnp.ones((4, 2)))
            >>> _, record = nni.capture(model)(2 * jnp.ones((4, 2)))
            >>> insp.compare(record, name="doubled").site.tolist()
            ['', '']
            >>> insp.close()
        """
        self._require_open()
        if other is None:
            self._view.show_other(None, "", step=None)
            return None
        theirs, ours = at if isinstance(at, tuple) else (at, at)
        of_no_step = isinstance(other, Record)
        if of_no_step:
            record, theirs = jax.device_get(other), None
            layers = layers_of(record, shown_of(stacks_of(self._trace)))
            other = recording_of({**record.merged(), **layers})
        frame = compare(other, self._recording, at=(theirs, ours))
        shown = other_pass(other, theirs, sites=self._recording.sites)
        called = name or other.name or "another run"
        self._view.show_other(shown, called, step=None if of_no_step else shown.step)
        return frame

    def figure(self, site: str, *, quantity: str = "output", scale: Scale = "symlog") -> go.Figure:
        """A plotly figure of one site: its histogram now and over the steps.

        `scale` is the axis of the histograms, "symlog" or "linear".
        """
        from nnx_inspector.recordings.figure import figure

        return figure(self._recording, site, quantity=quantity, scale=scale)  # type: ignore[arg-type]

    def to_html(self, path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> int:
        """Write one page that shows what was recorded, without a kernel and without a network.

        It is the same screen: tree, flow, distributions, time, parameters, units, code and state
        as they are now. What needs the model (perturbing, sweeps, values) is not on it. Of large
        models the details of 300 modules are kept, the selected one and those nearest to the root.

        Args:
            path: of the file; one that is there is replaced, once the new one is complete.
            max_bytes: how large it may be; where the recording does not fit, passes are left out,
                evenly, and the page says so.

        Returns:
            The size of the file in bytes.

        Raises:
            InspectorError: it does not fit with two passes.
            OSError: the file cannot be written.

        Example:
            >>> import pathlib, tempfile
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     insp.to_html(pathlib.Path(folder) / "run.html") < 500_000
            True
            >>> insp.close()
        """
        title = f"{type(self._model).__name__} - nnx_inspector"
        return write_page(
            path, page_of(self._recording, self._told(), title=title, max_bytes=max_bytes)
        )

    def _told(self) -> Told:
        """What a page tells besides the recording."""
        if not self._loops.running:
            self._evaluating.wait()  # for the effect
        layout, state = self._view.layout, self._view.state_at_rest()
        assert layout is not None  # both are from the beginning on
        assert state is not None
        shown, pages = self._evaluating.shown, Pages(self._model, self._modes)
        return told_by(
            self,
            layout=layout,
            state=state,
            kept=[x for x in (message_of(self.findings), self._view.kept("sweep")) if x],
            nnx=lambda site: pages.page(
                site,
                0,
                step=self._loops.step,
                passed="" if shown is None else shown.trial.kind,
                record=None if shown is None else shown.outcome.perturbed.record,
            ),
            units=lambda sites: units_messages(
                self._passes,
                self._evaluating.call,
                self._handles.setting(),
                sites,
                self.source_of_pass(),
            ),
        )

    def _told_briefly(self, *shown: Any) -> Told:
        return self._brief.told(self, *shown)

    def values(
        self, site: str, *, part: Part = "output", call: int | None = None, clean: bool = False
    ) -> Any:
        """The arrays of one site in the pass on screen: what the panel "Values" shows.

        Makes that pass (the example's, or the last `run`'s or `step`'s) with the model's present
        parameters, in a program of its own, and keeps this site's arrays alone.

        Args:
            site: its key.
            part: "output", "input", "gradient" (of the loss by the output, after `step`), or
                "parameter".
            call: which call of the site, where it was called several times.
            clean: without what is perturbed.

        Returns:
            What the module returned (for inputs its only array, or `(args, kwargs)`), as arrays
            on the device, None for what is none. In front they have an axis for each scan around
            the call, then one for each vmap. Of parameters a dict from name to array.

        Raises:
            InspectorError: there are no such values; the text says why.
            IndexError: there is no such call.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
            >>> insp.values("").shape
            (4, 3)
            >>> sorted(insp.values("", part="parameter"))
            ['bias', 'kernel']
            >>> insp.close()
        """
        self._require_open()
        if site not in self._view.keys:
            raise ValueError(nothing_selected(Selection(site), self._view.keys))
        opened = self._opening.open(self._to_look_at(), site, part, clean=clean)
        return opened_tree(opened, site, call)

    def _to_look_at(self) -> Look:
        """The pass that is on screen, with what its sites are."""
        shown, looping = self._evaluating.shown, self._loops.running
        trial, switches = self._evaluating.trial, self._modes.switches()
        setting = self._handles.setting()
        if shown is not None and not looping and shown.trial is trial:
            switches, setting = shown.switches, shown.setting
        of = f"{trial.name}, with the parameters that the model had when this was read"
        return Look(
            call=trial.call(self._model, switches),
            setting=setting,
            modules={site.key: site.module for site in module_sites(self._model)},
            stacked={call.site: call.stacked for call in self._trace.calls},
            keys=self._passes.keys,
            trial=trial,
            source=f"{of}; a loop is running." if looping else f"{of}.",
        )

    # ------------------------------------------------------------ the screen

    def _asked(self, message: Any) -> None:
        answer(message, self, self._handles, self._view)

    def _diagnose(self, forced: bool) -> None:
        self._diagnosing.look(now=forced)

    def _found(self) -> list[Finding]:
        return self.findings

    def _not_found(self, error: Exception) -> None:
        text = f"Looking for what is wrong failed: {type(error).__name__}: {error}"
        self._notice("warning", text)

    def _show_nnx(self, site: str, number: int) -> None:
        """The page of one module as NNX sees it, onto the screen."""
        shown = self._evaluating.shown
        page = self._pages.page(
            site,
            number,
            step=self._loops.step,
            passed="" if shown is None else shown.trial.kind,
            record=None if shown is None else shown.outcome.perturbed.record,
        )
        self._view.screen.send(page)

    def _switch_mode(self, module: str, name: str, value: bool | None) -> None:
        self._pages.switch(module, name, value)

    def _snapshot(self) -> dict[str, Any]:
        return {
            "recording": self._recording,
            "handles": self._handles.all(),
            "pending": self._loops.pending and self._loops.running,
            "metrics": self._metrics.latest,
            "meter": self._meter,
            "effect": self._evaluating.effect,
            "errors": self._metrics.errors,
        }

    def _take_trace(self, found: Trace) -> None:
        # what was traced may be a view with other modes: the rows are the model's own modules
        own = {site.path: site for site in module_sites(self._model)}
        modules = (*own.values(), *(site for site in found.modules if site.path not in own))
        self._trace = dataclasses.replace(found, modules=modules)
        self._passes.extend([*(c.site for c in found.calls), *(site.key for site in modules)])
        self._new_layout({})

    def _new_layout(self, unseen: Mapping[str, str]) -> None:
        layout = layout_of(self._model, self._trace, number=self._view.layouts + 1, unseen=unseen)
        self._view.set_layout(layout)

    def _stacks_told(self) -> dict[str, Stack]:
        stacks = stacks_of(self._trace)
        found = {
            site: Stack(count, self._evaluating.reached().turns(site))
            for site, count in shown_of(stacks).items()
        }
        return {s: one for s, one in found.items() if one.turns and abs(one.turns[0]) == stacks[s]}

    def _is_looping(self) -> bool:
        return self._loops.running

    def _step(self) -> int:
        return self._loops.step

    def _notice(self, level: str, text: str, site: str | None = None) -> None:
        self._view.notice(protocol.Notice(level=level, text=text, site=site))

    def _require_open(self) -> None:
        if self._closed:
            raise InspectorError(
                "This inspector was closed. Make a new one: nni.Inspector(model, x)."
            )

    def close(self) -> None:
        """Free the widget, the programs and the hooks. What was recorded stays readable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._evaluating.close()
            self._sweeps.close()
            self._looks.close()
            self._diagnosing.close()
            self._opening.shelf.clear()
            self._pages.forget()
            self._loops.close()
            self._meter.close()
        self._recording.detach()
        self._view.close()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self._view.mimebundle(repr(self), **kwargs)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"Inspector({type(self._model).__name__}, {self._recording!r}{state})"
