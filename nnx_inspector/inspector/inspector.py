"""`Inspector`: one model on screen, connected to tracing, passes, watching and perturbing.

Invariant: an error of the screen or of a browser's request never reaches the user's training loop;
it is counted and shown. Measures, draws and formats nothing itself.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from nnx_inspector._compat.configuration import forbids_nan
from nnx_inspector.errors import warn
from nnx_inspector.gc_pause import gc_paused
from nnx_inspector.hooks.sites import Only, Selection
from nnx_inspector.inspector.commands import Commands
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.diagnosing import Diagnosing
from nnx_inspector.inspector.export import Brief
from nnx_inspector.inspector.handles import Handle
from nnx_inspector.inspector.loops import Loops
from nnx_inspector.inspector.metrics import require_named
from nnx_inspector.inspector.nnx.modes import Modes
from nnx_inspector.inspector.nnx.page import Pages
from nnx_inspector.inspector.passes.batch import show_inputs
from nnx_inspector.inspector.passes.entry import entry_of, others_in_words, saying_if_ensemble
from nnx_inspector.inspector.passes.operations import selected
from nnx_inspector.inspector.passes.pass_request import PassRequest
from nnx_inspector.inspector.passes.rerun import Reruns
from nnx_inspector.inspector.passes.sweeps import Sweeps
from nnx_inspector.inspector.passes.update import renewed
from nnx_inspector.inspector.readings import Readings
from nnx_inspector.inspector.studies.studies import Studies, require_site, study
from nnx_inspector.inspector.targets import Targets
from nnx_inspector.lenses.examples import TopExamples
from nnx_inspector.live.steps import Region, Watching, check_start
from nnx_inspector.perturbations.places import Known
from nnx_inspector.perturbations.values import Perturbation
from nnx_inspector.program.editing.counting import where_of
from nnx_inspector.records.record import Record
from nnx_inspector.screen.inputs import Decode, Names, inputs_of, passing_on
from nnx_inspector.screen.presenter import runs_by_itself
from nnx_inspector.trackers.kinds import tracker_of

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    from nnx_inspector.perturbations.effects import Logits
    from nnx_inspector.progress import Progress

T = TypeVar("T")


class Inspector(Readings):
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
        where: which positions count, in all that is measured; see `nni.capture`.
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
        >>> insp.close()

        A function of the model; `run` takes its other arguments:

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
        inputs, others = inputs_of(f, decode=decode, tokens=tokens, images=images, labels=labels)
        kwargs |= others
        with passing_on(others):
            entry, model, args, kwargs = entry_of(f, args, kwargs)
            entry = dataclasses.replace(entry, where=where_of(where))
            selection = Selection(entry.selecting(only))
            selection.require_match(model)
            example = PassRequest(args, kwargs, entry=entry)
            with saying_if_ensemble(model), gc_paused():
                self._core = core = Core(model, selection, example, inputs)
        core.parameters = parameters
        self._rerun = Reruns(core)
        self._loops = Loops(core, self._rerun)
        self._targets = Targets(core, self._rerun)
        self._sweeps = Sweeps(core)
        self._studies = Studies(core)
        self._pages, self._opening = Pages(core), core.opening
        parts: Any = {"targets": self._targets, "sweeps": self._sweeps, "studies": self._studies}
        parts |= {"pages": self._pages, "opening": self._opening, "rerun": self._rerun}
        self._commands = Commands(core, **parts)
        self._diagnosing = Diagnosing(core, self._loops)
        core.parts = (self._commands, self._diagnosing, Brief(core))
        show_inputs(core)
        if others := others_in_words(args, kwargs):
            core.notice("info", others)
        try:
            if core.missing:  # another version of jax may name it otherwise: the rest is shown
                core.notice("warning", core.missing)
                warn(core.missing)
            if (core.trace.eager or forbids_nan()) and not core.spread:
                self.run()
            if display and core.view.display_in_notebook(repr(self)):
                self._rerun.begin(wait=runs_by_itself())
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------- one pass

    def run(self, *args: Any, **kwargs: Any) -> Any:
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

    def update(self, *new: Any) -> None:
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
            >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            >>> insp = nni.Inspector(model, jnp.ones((4, 2)))
            >>> step = jax.jit(lambda state: jax.tree.map(lambda p: 0 * p, state), donate_argnums=0)
            >>> state = step(nnx.state(model))  # the model's own arrays are deleted
            >>> insp.update(state)
            >>> float(insp.run(jnp.ones((4, 2))).sum())
            0.0
            >>> insp.close()
        """
        core = self._core.require_open()
        model = renewed(core.watched, new)
        with core.lock:
            if any(model is one for one in new):
                self._loops.update(model)
            core.update(model)

    def step(self, loss_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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

    def push(self, record: Record, *, step: int | None = None, **metrics: Any) -> None:
        """Put a record of your own (from `nni.capture` or `nni.value_and_grad`) on screen.

        Args:
            record: on the device or the host.
            step: the step that it belongs to; by default the one after the last.
            metrics: scalars that belong to the same step.
        """
        self._core.require_open().push(record, step, metrics)

    # ---------------------------------------------------------------- loops

    @overload
    def watch(self, batches: Iterable[T], **how: Unpack[Watching]) -> Generator[T, Any, None]: ...

    @overload
    def watch(self, batches: None = None, **how: Unpack[Watching]) -> Region: ...

    def watch(
        self,
        batches: Iterable[Any] | None = None,
        *,
        every: int = 10,
        only: Only = None,
        gradients: bool = True,
        tree: int | None = None,
        start: int | None = None,
        to: Any = None,
        optimizer: Any = None,
    ) -> Generator[Any, Any, None] | Region:
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
            gradients: whether to measure the gradients of activations too.
            tree: which tree is the model, where one program merges several of its structure (a
                student and the average of its weights): 0 is the one that the program calls first.
                Without it the model is the tree with the arrays that the model holds, and none of
                them is measured if nothing tells which that is.
            start: the number of the first step, for instance that of the checkpoint which a run
                goes on from. By default steps are counted on from the last loop of this inspector.
            to: the experiment tracker, or function, that gets what is measured; see `nni.watch`.
            optimizer: the optimizers whose state is measured too; see `nni.watch`.

        Raises:
            TypeError: `batches` cannot be iterated over, or `to` or `optimizer` is not taken.
            ValueError: `every` is less than 1, `only` matches no site, or `tree` or `start` is not
                a number.
            InspectorError: a loop is being watched already.
        """
        self._core.require_open()
        start = None if start is None else check_start(start)
        how: Any = dict(every=every, only=only, gradients=gradients, tree=tree, start=start)
        how |= dict(to=tracker_of(to), optimizer=optimizer)
        return self._loops.watch(batches, **how)

    def tick(self) -> None:
        """Mark the start of a step in a loop inside `with insp.watch(every=10):`.

        Call it once per step. From then on steps are counted, and steps that are not measured run
        exactly the program that runs without the inspector.

        Raises:
            InspectorError: the call is outside a watched region.
        """
        self._loops.tick()

    def metrics(self, *unnamed: Any, **values: Any) -> None:
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
        self._rerun.first(needed=False)
        self._core.require_open().keep_file(path)

    # --------------------------------------------------------- perturbations

    def perturb(self, only: Only, perturbation: Known) -> Handle:
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
        asked = self._sweeps.wanted(sites, perturbation, layers, logits, chunk, units)
        return self._sweeps.run(asked, progress)

    def start_sweep(self, only: Only = "**", perturbation: Perturbation | None = None) -> None:
        """Run `sweep` in a thread and show the result on screen."""
        self._sweeps.start(self._sweeps.wanted(only, perturbation))

    def stop_sweep(self) -> None:
        """Stop the running sweep and keep what it has measured so far."""
        self._sweeps.stop()

    def examples(
        self,
        data: Iterable[Any] | None,
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
        site = self._core.require_open().known(require_site(site))
        asked = study("examples", site=site, unit=unit or 0, axis=axis)
        found = self._studies.examples(asked, data, k, inputs, progress)
        return found if unit is None else found.to_frame(unit)

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

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
            >>> insp.show_operations("")
            >>> [site for site in insp.recording.sites if "@" in site]
            ['@dot_general', '@add']
            >>> insp.close()
        """
        self._core.require_open()
        self._rerun.show(selected(self._core, site, shown=shown))

    def close(self) -> None:
        """Free the widget, the programs and the hooks. The recording stays readable.

        A loop that is being watched goes on without; what it has measured so far is recorded.
        """
        self._loops.settle()
        self._core.close()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        self._rerun.begin()
        return self._core.view.mimebundle(repr(self), **kwargs)

    def __repr__(self) -> str:
        state = ", closed" if self._core.closed else ""
        return f"Inspector({type(self._core.model).__name__}, {self._core.recording!r}{state})"
