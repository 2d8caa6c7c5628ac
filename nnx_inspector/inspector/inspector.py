"""`Inspector`: one model on screen, connected to tracing, passes, watching and perturbing.

Invariant: an error of the screen or of a browser's request never reaches the user's training loop;
it is counted and shown. Measures, draws and formats nothing itself.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from flax import nnx

from nnx_inspector._compat.configuration import forbids_nan
from nnx_inspector.errors import InspectorError, warn
from nnx_inspector.findings.finding import Findings, markdown_cell
from nnx_inspector.gc_pause import gc_paused
from nnx_inspector.hooks.sites import Only, Selection
from nnx_inspector.inspector.commands import Commands
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.cost.compilations import Compilation, compilations_table
from nnx_inspector.inspector.diagnosis import Diagnosis, first_nan_in
from nnx_inspector.inspector.export import KEPT_MESSAGES, NotebookContent, content_of
from nnx_inspector.inspector.handles import Handle
from nnx_inspector.inspector.loops import Loops
from nnx_inspector.inspector.metrics import require_named
from nnx_inspector.inspector.nnx.modes import Modes
from nnx_inspector.inspector.nnx.page import Pages
from nnx_inspector.inspector.panels import compare_with, parameters_at, units_at, words_at
from nnx_inspector.inspector.passes.batch import show_inputs
from nnx_inspector.inspector.passes.entry import ensemble_noted, entry_of, other_models_notice
from nnx_inspector.inspector.passes.operations import select_operations
from nnx_inspector.inspector.passes.pass_request import PassRequest
from nnx_inspector.inspector.passes.rerun import Reruns
from nnx_inspector.inspector.passes.sweeps import Sweeps
from nnx_inspector.inspector.passes.update import updated_model
from nnx_inspector.inspector.studies.studies import Studies, require_site_argument, study_request
from nnx_inspector.inspector.targets import Targets
from nnx_inspector.inspector.values.array_reader import Part
from nnx_inspector.inspector.values.requests import values_at
from nnx_inspector.lenses.attribution import Attribution, Method, attribute
from nnx_inspector.lenses.examples import TopExamples
from nnx_inspector.lenses.lens import Lens, lens
from nnx_inspector.lenses.logits import LogitAttribution, logit_attribution
from nnx_inspector.lenses.unembedding import Norm, Unembed
from nnx_inspector.live.steps import Region, WatchArgs
from nnx_inspector.perturbations.activations import Perturbation
from nnx_inspector.perturbations.places import AnyPerturbation
from nnx_inspector.program.analysis.operation import Operation
from nnx_inspector.program.analysis.trace import Trace
from nnx_inspector.program.editing.position_masks import where_of
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.records.record import Record
from nnx_inspector.screen import protocol
from nnx_inspector.screen.batch_reader import Decode, Names, noting_passed_on, reader_of
from nnx_inspector.screen.comparison import StepPair
from nnx_inspector.screen.export.replay import PageContent
from nnx_inspector.screen.frames import findings_message
from nnx_inspector.screen.presenter import is_unattended
from nnx_inspector.screen.recording_view import RecordingView
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import PyTree

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    from nnx_inspector.perturbations.effects import Logits
    from nnx_inspector.profiling.result import Profile
    from nnx_inspector.progress import Progress

T = TypeVar("T")


class Inspector(RecordingView):
    """A live view of one model. In a notebook it displays itself.

    The constructor traces the example; the model is not changed. Its first forward pass is compiled
    and run in a thread while the screen already shows the model. Whatever reads a figure, such as
    `recording`, waits for that pass, and makes it if the inspector is not on screen. A `run`,
    `step` or watched loop that comes first replaces it.

    Args:
        f: an `nnx.Module`; a bound method of one, `model.encode`; or a function that takes the
            model as one of its arguments, such as your own `nnx.vmap` over an ensemble. The first
            module among the arguments is the model; other modules run, and are not shown.
        args: the arguments of the example, a call of `f`.
        only: which sites are shown; see `intercept_methods`. By default `__call__` of every
            module, and the method that `f` is.
        decode: turns ids into text, so that the screen shows words: a function such as
            `tokenizer.decode`, or the texts of all ids. Without it, ids are numbers.
        tokens: the argument that holds the ids: its position, its name, or its path such as
            `"batch/ids"`. By default the one that an embedding receives.
        images: the argument that holds pictures, named in the same way; by default it is found by
            its shape and range. False shows none.
        labels: the names of the classes, for the examples and the predictions. Values of another
            kind (`decode=True`, `labels=y`) are keywords of the call, as are all others.
        parameters: whether passes and steps measure the parameters, their gradients and updates.
        where: which positions count, in all that is measured and searched; see `nni.capture`.
        display: whether to show the widget at once when running in a notebook.
        kwargs: keyword arguments of the example.

    Raises:
        TypeError: `f` is none of these, or cannot be called with the example.
        InspectorError: the arrays of the model or the example were donated to a step.
        Any error of tracing the example, with a note that names the failing site. An error of
            its first pass is raised when a figure is read.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
        >>> insp.recording.summary("").size
        12
        >>> insp.values("").shape
        (4, 3)
        >>> insp.run(jnp.ones((5, 2))).shape
        (5, 3)
        >>> insp.show_operations("")
        >>> [site for site in insp.recording.sites if "@" in site]
        ['@dot_general', '@add']
        >>> insp.close()

        A function of the model; `run` takes its other arguments:

        >>> def forward(model, x):
        ...     return jnp.sqrt(model(x))
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> insp = nni.Inspector(forward, model, jnp.ones((4, 2)))
        >>> insp.first_nan().name
        'sqrt'
        >>> step = nnx.jit(nnx.grad(lambda model, x: (model(x) ** 2).mean()))
        >>> [row.site for row in insp.profile(step, model, jnp.ones((4, 2))).rows]
        ['', '(outside modules)', '(idle)']
        >>> insp.close()
    """

    def __init__(
        self,
        f: Any,
        /,
        *args: Any,
        only: Only = None,
        decode: Decode | Any = None,
        tokens: str | int | Any = None,
        images: str | int | Any = None,
        labels: Names | Any = None,
        parameters: bool | Any = True,
        where: Any = None,
        display: bool = True,
        **kwargs: Any,
    ):
        if not isinstance(parameters, bool):
            kwargs["parameters"], parameters = parameters, True
        inputs, others = reader_of(f, decode=decode, tokens=tokens, images=images, labels=labels)
        kwargs |= others
        with noting_passed_on(others):
            entry, model, args, kwargs = entry_of(f, args, kwargs)
            entry = dataclasses.replace(entry, where=where_of(where))
            selection = Selection(entry.selecting(only))
            selection.require_match(model)
            example = PassRequest(args, kwargs, entry=entry)
            with ensemble_noted(model), gc_paused():
                self._core = core = Core(model, selection, example, inputs)
        core.parameters = parameters
        self._rerun = Reruns(core)
        self._loops = Loops(core, self._rerun)
        self._targets = Targets(core, self._rerun)
        self._sweeps = Sweeps(core)
        self._studies = Studies(core)
        self._view, self._pages = core.view, Pages(core)
        parts = self._targets, self._sweeps, self._studies, self._pages, self._rerun
        self._commands = Commands(core, *parts)
        self._diagnosis = Diagnosis(core, self._loops)
        core.parts = (self._commands, self._diagnosis, NotebookContent(core))
        show_inputs(core)
        if others := other_models_notice(args, kwargs):
            core.notice("info", others)
        try:
            if core.missing:  # another version of jax may name it otherwise: the rest is shown
                core.notice("warning", core.missing)
                warn(core.missing)
            if (core.trace.eager or forbids_nan()) and not core.in_all_processes:
                self.run()
            if display and core.view.display_in_notebook(repr(self)):
                self._rerun.start_first(wait=is_unattended())
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> nnx.Module:
        """The model as the user gave it: to the constructor, or later to `update`."""
        return self._core.watched_model

    @property
    def trace(self) -> Trace:
        """The trace of the example's calls."""
        return self._core.trace

    @property
    def recording(self) -> Recording:
        """Everything measured so far."""
        self._rerun.wait_for_first(needed=False)
        return self._core.recording

    @property
    def findings(self) -> Findings:
        """The problems found in this run, worst first."""
        self._rerun.wait_for_first()
        return self._diagnosis.findings()

    @property
    def compilations(self) -> list[Compilation]:
        """What jax has compiled in this process since the inspector was made, oldest first: which
        function, for how long, and why. The last thousand are kept.
        """
        return self._core.meter.compilations.all()

    def first_nan(self) -> Operation | None:
        """The operation that makes the first NaN of the last requested pass (the example, `run` or
        `step`), with the model's present parameters and without perturbations. After `step` the
        backward pass is searched too.

        Returns:
            See `nni.first_nan`.

        Raises:
            InspectorError: the pass cannot be searched; the text says why.
        """
        return first_nan_in(self._core.require_open())

    @property
    def effect(self) -> protocol.Effect | None:
        """The effect of the active perturbations against the clean pass, or None until it is
        measured.

        After `step` there is one without a perturbation too, with equal figures on both sides.
        Reading it waits for the program that measures it. In a watched loop it is that of the last
        measured step, or else of the model as it is now; from another thread than the loop's it is
        None until a step has measured it. `source` names the pass and the model's step.
        """
        return self._rerun.read_effect()

    def parameters(self, site: str) -> dict[str, Summary]:
        """The present Summary of each `nnx.Param` of a module (and of the modules in it), by
        path.

        Raises:
            ValueError: there is no such site.
            InspectorError: the arrays were donated to a training step that is still running.
        """
        return parameters_at(self._core.trace, self._core.require_site(site))

    def units(self, site: str, *, axis: int = -1) -> PyTree:
        """The Units of a site's output (a pytree of them for a pytree): figures for each unit along
        an axis, such as -2 for the heads of `query`, `key` and `value`. The last pass is made
        again, with its perturbations, in a program that is compiled once per site and axis.

        Raises:
            ValueError: there is no such site.
            InspectorError: it returns no array with units, or as in `parameters`.
        """
        core = self._core.require_open()
        return units_at(core, core.require_site(site), axis=axis)

    def compare(
        self,
        other: Recording | Record | nnx.Pytree | Mapping[Any, Any] | None,
        *,
        at: StepPair = None,
        name: str = "",
    ) -> pd.DataFrame | None:
        """Compare this run with another one, or the weights of the model, and show both on screen.

        The other run's pass is pinned: its figures and histograms stand beside those of the pass
        on screen, and the panel "Compare" ranks the sites.

        Args:
            other: a Recording, for instance `nni.load("run.nni")`, or a Record of `nni.capture`,
                of this model or of one with sites of the same names. Or weights: a module, its
                state, or dictionaries of arrays, as in `nni.compare_weights`; the panel then
                ranks the parameters. None ends the comparison.
            at: as in `nni.compare`: one step for both runs, or a pair of a step of the other run
                and a step of this one.
            name: the other run's name on screen; by default the name of its file, if any.

        Returns:
            The frame of `nni.compare(other, insp.recording)`, largest difference first; its `a` is
            the other run. For weights, that of `nni.compare_weights(other, model)`. None if `other`
            is None.

        Raises:
            TypeError, ValueError: as in `nni.compare`.
        """
        self._rerun.wait_for_first()
        return compare_with(self._core.require_open(), other, at, name)

    def profile(
        self,
        step: Callable[..., Any],
        /,
        *args: Any,
        runs: int = 3,
        folder: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Profile:
        """Measure where the time and the memory of your training step go, by module, and show it in
        the tree: in the columns "time, ms", "kept" and "of poss."

        The step runs on copies of its arguments, so the model, the optimizer and donated arrays
        stay as they are. It runs as it is, without perturbations.

        Args:
            step, args, runs, folder, kwargs: as in `nni.profile`.

        Raises:
            As `nni.profile`, and InspectorError while a loop runs.
        """
        from nnx_inspector.profiling.profile import profile

        core = self._core.require_open()
        core.require_one_process("The step")
        if core.looping:
            raise InspectorError("A loop is running. Profile its step before or after it.")
        found = profile(self.model, step, *args, runs=runs, folder=folder, **kwargs)
        core.show_profile(found)
        return found

    def values(
        self, site: str, *, part: Part = "output", call: int | None = None, clean: bool = False
    ) -> PyTree:
        """The arrays of one site in the pass on screen, as the panel "Values" shows them.

        The pass (the example, or the last `run` or `step`) is made again with the model's present
        parameters, in a program of its own that keeps the arrays of this site only.

        Args:
            site: its key; also that of an operation within a call, `"attn@attention"`, or of one
                layer of a stack, `"layers/mlp[2]"`.
            part: "output", "input", "gradient" (of the loss by the output, after `step`),
                "parameter", or "attention" (the patterns that a call computes).
            call: which call of the site, if it was called several times.
            clean: whether to leave the perturbations out.

        Returns:
            The module's output (for inputs its only array, or `(args, kwargs)`) as arrays on the
            device, with None in place of any other leaf. The first axes are those of the scans
            around the call, then those of the vmaps. For parameters, a dict from name to array.

        Raises:
            ValueError: there is no such site.
            InspectorError: there are no such values; the text says why.
            IndexError: there is no such call.
        """
        return values_at(self._core.require_open(), site, part, call=call, clean=clean)

    def words(
        self, site: str, example: int = 0, *, unit: int = 0, axis: int | None = None
    ) -> pd.DataFrame:
        """The tokens of an example, each with the figures of a site at its position.

        They colour the text in the panel "Words". The pass on screen is made again, as in `values`.

        Args:
            site: its key, `"layers[3]"` for one layer of a stack. Its output needs an axis for the
                positions of the tokens.
            example: which example of the batch.
            unit: the unit whose value is shown.
            axis: the axis of the tokens in what the site (or its layer) returns. Needed if it is
                not found, or to choose another: the keys of a pattern (-1) instead of its queries.

        Returns:
            A frame with a row for each position: `position`, `word`, `norm` (over the units),
            `unit` (its value) and, after `step`, `gradient` (its norm) and
            `gradient_times_activation` (added up over the units).

        Raises:
            ValueError: there is no such site.
            InspectorError: the site has no axis of positions, or it must be chosen by `axis`; or
                the tokens are not known: the inspector needs `decode=`.
            IndexError: there is no such example or unit.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> model, ids = nnx.Embed(3, 2, rngs=nnx.Rngs(0)), jnp.array([[0, 2]])
            >>> insp = nni.Inspector(model, ids, decode=["to", "be", "or"])
            >>> insp.words("").word.tolist()
            ['to', 'or']
            >>> insp.close()
        """
        return words_at(self._core.require_open(), site, example, unit=unit, axis=axis)

    # ------------------------------------------------------------- one pass

    def run(self, *args: object, **kwargs: object) -> PyTree:
        """Run one forward pass with the perturbations and show it; the model does not change.

        Args:
            args: arguments of the module, method or function that the inspector was made with.
                Leave out the model for a function: it is filled in. Without any arguments or
                keywords, the pass uses those of the last `run`, or at first the example.
            kwargs: keyword arguments of the same call.

        Returns:
            What the module, method or function returns.
        """
        core = self._core.require_open()
        given = args or kwargs
        return self._rerun.run(
            PassRequest(args, kwargs, entry=core.entry) if given else core.example
        )

    def update(self, *new: object) -> None:
        """Give the inspector the model's new state; the user's own objects stay as they are.

        A training step that donates the model's arrays, or a functional loop, leaves the user's
        model with old or deleted arrays.

        Args:
            new: a model of an equal structure, which replaces the old one, also in loops that are
                watched from now on. Or a state (`nnx.state(model)`, the states of `nnx.split`,
                nested dicts of arrays), which `run`, `step`, values, parameters, units and sweeps
                read from now on, while loops still watch the old model. Variables that are not in
                the state stay as they are.

        Raises:
            ValueError: the structure differs; the text names where.
            TypeError: `new` is neither a model nor a state.
            InspectorError: it has deleted arrays, or it is another model and a loop is being
                watched.

        Example:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
            >>> insp.update(jax.tree.map(jnp.zeros_like, nnx.state(insp.model)))
            >>> float(insp.run().sum())
            0.0
            >>> insp.close()
        """
        core = self._core.require_open()
        model = updated_model(core.watched_model, new)
        with core.lock:
            if any(model is one for one in new):
                self._loops.update(model)
            core.update(model)

    def step(self, loss_fn: Callable[..., Any], *args: object, **kwargs: object) -> PyTree:
        """Run a forward and backward pass of `loss_fn(model, *args, **kwargs)` and show it.

        The model does not change: no update is made, no statistic or RNG stream advances. If
        a perturbation is on, the clean pass runs too, and the effect is shown.

        Args:
            loss_fn: returns a scalar, or `(scalar, aux)`; the scalars in a dict `aux` are shown
                as metrics. A new lambda compiles again; those of the last few are kept.
            args: the arguments after the model, for instance the batch.
            kwargs: keyword arguments of `loss_fn`.

        Returns:
            What `loss_fn` returns in the perturbed pass.
        """
        core = self._core.require_open()
        return self._rerun.run(PassRequest.of_a_loss(loss_fn, args, kwargs, entry=core.entry))

    def push(self, record: Record, *, step: int | None = None, **metrics: object) -> None:
        """Put a record of your own (from `nni.capture` or `nni.value_and_grad`) on screen.

        Args:
            record: on the device or the host.
            step: the step that it belongs to; by default the one after the last.
            metrics: scalars that belong to the same step.
        """
        self._core.require_open().push(record, step, metrics)
        self._rerun.drop_first()  # it would come later, as if it were newer

    # ---------------------------------------------------------------- loops

    @overload
    def watch(self, batches: Iterable[T], **how: Unpack[WatchArgs]) -> Generator[T, None, None]: ...

    @overload
    def watch(self, batches: None = None, **how: Unpack[WatchArgs]) -> Region: ...

    def watch(
        self,
        batches: Iterable[object] | None = None,
        *,
        every: int = 10,
        only: Only = None,
        gradients: bool = True,
        tree: int | None = None,
        start: int | None = None,
        to: object = None,
        optimizer: object = None,
    ) -> Generator[object, None, None] | Region:
        """Iterate over `batches` and watch your own training step, jitted and unchanged.

        Every `every`-th step is measured. The others run exactly the program that runs without the
        inspector, unless a perturbation is on. Perturbations act on the real step.

        Without batches it is a context, `with insp.watch(every=10):`, for a loop that you cannot
        change: passes of the model are counted and sampled inside the program, at a small cost.
        A call of `insp.tick()` in each step marks the steps.

        Args:
            batches: the batches. What fetches ahead belongs inside: `watch(prefetch(batches))`.
            every: measure the steps (passes) 0, every, 2 every, ...
            only: which of the inspector's sites to measure; see `intercept_methods`.
            gradients, tree, to, optimizer: as in `nni.watch`.
            start: the number of the first step, for instance that of the checkpoint which a run
                goes on from. By default steps are counted on from the last loop of this inspector.

        Raises:
            TypeError: `batches` cannot be iterated over, or `to` or `optimizer` is not taken.
            ValueError: `every` is less than 1, `only` matches no site, or `tree` or `start` is not
                a number.
            InspectorError: a loop is being watched already.
        """
        return self._loops.watch(
            batches,
            every=every,
            only=only,
            gradients=gradients,
            tree=tree,
            start=start,
            to=to,
            optimizer=optimizer,
        )

    def tick(self) -> None:
        """Mark the start of a step in a loop inside `with insp.watch(every=10):`.

        Call it once per step. From then on steps are counted, and steps that are not measured run
        exactly the program that runs without the inspector.

        Raises:
            InspectorError: the call is outside a watched region, or in a loop that counts itself.
        """
        self._loops.tick()

    def metrics(self, *unnamed: object, **values: object) -> None:
        """Add scalars of the current step (`loss=..., accuracy=...`), drawn as curves.

        Arrays on the device are fetched when they are ready, without holding up the loop. Other
        values are left out; an InspectorWarning (once per name) and the screen say so.
        """
        require_named(unnamed)
        self._loops.add_metrics(values)

    def background(self, train: Callable[[], Any]) -> threading.Thread:
        """Run a loop in a thread, so that the notebook (and the widget) stay responsive.

        Args:
            train: a function that trains, for instance by `for batch in insp.watch(batches)`. The
                present settings of jax apply in the thread too.

        Returns:
            The started thread. An error of `train` is shown in the widget, or else printed.
            When Python ends, SystemExit leaves the loop, and its `finally` blocks run: a script
            that is to wait for it calls `join()`.
        """
        return self._core.require_open().in_background(train)

    def save(self, path: str | bytes | os.PathLike[str]) -> None:
        """Save the recording, and from then on each new pass and metric.

        Saving ends with `close` or another `save`. A killed process loses the step under way, and
        perhaps the measured step before it; `nni.load` reads the file. A failure in a running loop
        is shown, never raised. In a job of several processes the first one saves.

        Args:
            path: the file's path; an existing file is replaced atomically.

        Raises:
            OSError: the file cannot be created.
        """
        self._rerun.wait_for_first(needed=False)
        self._core.require_open().save(path)

    # --------------------------------------------------------- perturbations

    def perturb(self, only: Only, perturbation: AnyPerturbation) -> Handle:
        """Add a perturbation, as a click does. It acts from the next pass on; in a loop that marks
        its steps (`insp.watch(batches)`, `insp.tick()`), from the next step on.

        `Zero` and `Scale` on outputs act at once. Other kinds, inputs and single layers of a stack
        need a place in the program. A program with that place is compiled once, in the background,
        while the old one goes on (`handle.compiling`); `run` and `step` wait for it. On one site,
        perturbations act in the order in which they were added.

        Args:
            only: a site key or a glob, `"layers[3]"` for one layer of a stacked module, a filter,
                or several; an operation (`"attn@attention"`) is shown from then on. For
                `ParameterNoise` and `PruneMask` it selects parameters, by their paths or by
                modules. A layer that is added to the model later is not among them.
            perturbation: any kind, such as `nni.Zero()`, `nni.Mask(units)` or `nni.StopGradient()`.

        Raises:
            TypeError: it is not a perturbation, or has no meaning for a site's values.
            ValueError: nothing matches (the text names the nearest), or an array does not fit.
            InspectorError: it holds a traced value.
        """
        return self._targets.perturb(only, perturbation)

    @property
    def perturbations(self) -> list[Handle]:
        """All current perturbations, oldest first."""
        return self._core.handles.all()

    def switch_all(self, enabled: bool) -> None:
        """Switch every perturbation on or off, as one change, from the next pass on."""
        self._core.require_open().handles.switch_all(enabled)

    def sweep(
        self,
        sites: Only = "**",
        perturbation: Perturbation | None = None,
        *,
        layers: bool = True,
        units: int | None = None,
        logits: Logits = None,
        chunk: int | None = None,
        progress: Progress = True,
    ) -> pd.DataFrame:
        """Measure and show the effect of perturbing each site alone in the last pass of `step` or
        `run` (at first the example): on its loss and on the model's output.

        The passes use a copy of the present model, in `modes`, without the other perturbations;
        training may go on. See `nni.sweep` for the arguments and the frame. Without a loss the
        columns `loss` and `loss_change` are missing, and the largest change of the output comes
        first. With `units`, the screen shows the unit of each site that changes the most.

        Raises:
            InspectorError: a sweep is running, or the model's arrays were donated to a step.
            TypeError, ValueError: as in `nni.sweep`.
        """
        asked = self._sweeps.request(sites, perturbation, layers, logits, chunk, units)
        return self._sweeps.run(asked, progress)

    def start_sweep(self, only: Only = "**", perturbation: Perturbation | None = None) -> None:
        """Run `sweep` in a thread and show the result on screen."""
        self._sweeps.start(self._sweeps.request(only, perturbation))

    def stop_sweep(self) -> None:
        """Stop the running sweep and keep what it has measured so far."""
        self._sweeps.stop()

    @property
    def modes(self) -> Modes:
        """The switchable modes (deterministic, ...) of `run`, `step` and the effect."""
        return self._core.modes

    def show_operations(self, site: str, *, shown: bool = True) -> None:
        """Show what happens within a site's call as rows below it, or hide it again.

        The operations are sites like any others (`"attn@softmax"`): the next pass measures them,
        and they can be perturbed. `only=` selects them by name.

        Args:
            site: the key of a site that is called.
            shown: False hides its operations again.

        Raises:
            ValueError: there is no such site; nothing is seen within its call, or more than 200
                operations; or the inspector's `only=` selects what should be hidden.
            InspectorError: a loop is being watched, or an operation to hide is perturbed.
        """
        self._core.require_open()
        self._rerun.show_sites(select_operations(self._core, site, shown=shown))

    def lens(
        self,
        *,
        unembed: Unembed = None,
        norm: Norm = None,
        answer: Any = None,
        k: int = 5,
        sites: Only = None,
    ) -> Lens:
        """What the residual stream of the example already says after each layer.

        Like `nni.lens`, which explains the arguments, for the last forward pass, on a copy of the
        present model in `modes` and without the perturbations. The panel "Lens" shows it too.

        Raises:
            ValueError, TypeError, InspectorError: as in `nni.lens`; and without `unembed`, a
                ValueError if nothing indicates that the output is logits: no words, classes or
                pictures among the inputs, and no `labels`.
        """
        how = {"unembed": unembed, "norm": norm, "answer": answer, "k": k, "sites": sites}
        return self._studies.make(study_request("lens"), lens, **how)

    def logit_attribution(
        self,
        *,
        token: Any = None,
        minus: Any = None,
        unembed: Unembed = None,
        norm: Norm = None,
        sites: Only = None,
    ) -> LogitAttribution:
        """What each site adds to the logit of a token, for the example; see `lens`.

        Raises:
            ValueError, TypeError, InspectorError: as in `nni.logit_attribution`.
        """
        how = {"token": token, "minus": minus, "unembed": unembed, "norm": norm, "sites": sites}
        return self._studies.make(study_request("logits"), logit_attribution, **how)

    def attribute(
        self,
        *,
        output: PyTree = None,
        method: Method = "gradient_times_input",
        position: int = -1,
        site: str | None = None,
        baseline: Any = 0.0,
        steps: int = 32,
    ) -> Attribution:
        """How much each token or pixel of the example counts for an output; see `lens`.

        The arguments are those of `nni.attribute`. The panel "Attribution" shows it too.

        Raises:
            ValueError, TypeError, InspectorError: as in `nni.attribute`.
        """
        how = {"output": output, "method": method, "position": position, "site": site}
        asked = study_request("attribution", method=method, position=position)
        return self._studies.make(asked, attribute, **how, baseline=baseline, steps=steps)

    def examples(
        self,
        data: Iterable[object] | None,
        site: str | None = None,
        unit: int | None = None,
        *,
        k: int = 9,
        axis: int = -1,
        inputs: Callable[[Any], Any] | None = None,
        progress: Progress = True,
    ) -> TopExamples | pd.DataFrame:
        """Find the inputs in `data` that excite a unit of a site most and least, and a random few.

        The passes use a copy of the present model, in `modes`, without the perturbations. The panel
        "Examples" shows the result too.

        Args:
            data: any iterable of batches, of what `run` takes; see `nni.top_examples`, also for the
                other arguments. None searches the batch of the example.
            site: the site's key.
            unit: the unit whose table is returned; None for the result for all units.

        Raises:
            InspectorError, TypeError, ValueError, IndexError: as in `nni.top_examples`.
        """
        site = self._core.require_open().require_site(require_site_argument(site))
        asked = study_request("examples", site=site, unit=unit or 0, axis=axis)
        found = self._studies.examples(asked, data, k, inputs, progress)
        return found if unit is None else found.to_frame(unit)

    def _select(self, site: str) -> None:
        self._core.select(site)

    def _page(self) -> tuple[str, PageContent]:
        self._rerun.wait_unless_looping()  # for the effect
        kept = [findings_message(self.findings), *map(self._view.last_message, KEPT_MESSAGES)]
        return type(self.model).__name__, content_of(self._core, kept)

    def _report_fields(self) -> dict[str, Any]:
        each = [f"{one.perturbation} at {one.site!r}" for one in self.perturbations if one.enabled]
        return {
            "title": f"Report of {type(self.model).__name__}",
            "about": [f"perturbed now: {markdown_cell(one)}" for one in each],
            "tables": {"Compiled functions": compilations_table(self.compilations)},
        }

    def close(self) -> None:
        """Free the widget, the programs and the hooks. The recording stays readable.

        A loop that is being watched goes on without; what it has measured so far is recorded.
        """
        self._loops.settle()
        self._core.close()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        self._rerun.start_first()
        return self._core.view.mimebundle(repr(self), **kwargs)

    def __repr__(self) -> str:
        state = ", closed" if self._core.closed else ""
        return f"Inspector({type(self._core.model).__name__}, {self._core.recording!r}{state})"
