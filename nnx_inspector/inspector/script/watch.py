"""`watch`: records a loop without a screen, in a script or on a cluster.

Invariant: a failure to record never stops the loop; a warning says what was lost when the region
is left.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence

import jax
from flax import nnx

from nnx_inspector.errors import warn, warn_or_note
from nnx_inspector.findings.facts import Shapes, facts_of_modules, reader_of, shapes_of
from nnx_inspector.findings.findings import diagnose
from nnx_inspector.hooks.sites import Only, require_module
from nnx_inspector.inspector.script.control import Control
from nnx_inspector.inspector.script.steering import Steering
from nnx_inspector.live.diagnostics import Diagnostics, dropped_warnings, failure_warnings
from nnx_inspector.live.inbox import PassData, WatchedPass
from nnx_inspector.live.optimizer import measure_states
from nnx_inspector.live.parameter_samples import nonfinite_parameters
from nnx_inspector.live.session import Session
from nnx_inspector.live.steps import (
    LoopCallbacks,
    Region,
    check_every,
    check_replica,
    check_start,
    closed_at_exit,
)
from nnx_inspector.perturbations.places import AnyPerturbation
from nnx_inspector.program.analysis.stacks import layers_with_rows, stacks_of
from nnx_inspector.program.analysis.trace import Trace
from nnx_inspector.program.editing.position_masks import where_of
from nnx_inspector.program.function import WatchedCall
from nnx_inspector.recordings.facts import Facts
from nnx_inspector.recordings.load import load_or_create
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.recordings.tree_rows import MODULES, Site, Stack, columns_of_rows, leaf_of
from nnx_inspector.records.rows import rows_of
from nnx_inspector.trackers.detection import tracker_of
from nnx_inspector.trackers.writer import TrackerWriter


@contextlib.contextmanager
@closed_at_exit
def watch(
    model: nnx.Module,
    *,
    every: int = 10,
    only: Only = None,
    gradients: bool = True,
    parameters: bool = True,
    save: str | bytes | os.PathLike[str] | None = None,
    tree: int | None = None,
    start: int = 0,
    control: bool | Mapping[str, AnyPerturbation] = False,
    to: object = None,
    optimizer: object = None,
    where: object = None,
) -> Generator[Recording, None, None]:
    """Record the passes that this thread makes through a model, which stays jitted and unchanged.

    A pass is a call of the model, and its number is the step in the recording. Calls of its parts
    beside it belong to the pass under way; in a loop that calls only parts, a run of the first
    program is a pass. Passes 0, `every`, 2 * `every` and so on are measured, inside the compiled
    program. The README lists the costs.

    Args:
        model: the model to record. Other models of the same class are not recorded.
        every: measure every `every`-th pass.
        only: the sites to record; see `intercept_methods`.
        gradients: whether to measure the gradients of activations too.
        parameters: whether to measure the parameters, their gradients, and how far each step moves
            them.
        save: a file to write each pass to when the next one begins, so that a process that is
            killed loses at most one. `nni.load` reads it. An existing file is replaced. In a job of
            several processes the first one writes it.
        tree: which tree is the model, where one program merges several of its structure (a student
            and the average of its weights): 0 is the one that the program calls first. Without it
            the model is the tree with the arrays that the model holds, and none of them is measured
            if nothing tells which that is.
        start: the step with which a run that was restarted from a checkpoint goes on: passes
            `start`, `start + every` and so on are measured. The recording in the file goes on too,
            and `recording.seams` says where.
        control: whether `nni.open` may steer the run, through files in a folder beside `save` that
            only this user may write: switch perturbations, change `every`, measure the next step,
            send what a site returns.
            `Zero` and `Scale` on outputs can be added. Other perturbations are declared here, by
            site, and are off at first. What was done is in the recording.
        to: what gets each measured pass, the metrics and the findings too, in a thread: a
            SummaryWriter (tensorboardX, torch), a W&B, Aim or MLflow run, or a function that is
            called with each `Pass`. If it raises, blocks or is slower than the loop, it loses a
            part, and a warning says so. It is not closed. In a job, process 0 writes.
        optimizer: the optimizer whose state is measured when a pass begins: an `nnx.Optimizer` (or
            any object of NNX), a function that returns the state which the loop carries, `lambda:
            opt_state`, or a dict of several by name. `recording.states` lists its arrays.
        where: which positions count, in all figures: a function of what the model is called with,
            or an array of booleans; see `nni.capture`. A new lambda compiles again.

    Yields:
        The recording. It may be read at any time and is complete when the region is left.

    Raises:
        TypeError: `model` is not an `nnx.Module`, a declared perturbation is none, `to` is none
            of the trackers, or `optimizer` is a state that the loop replaces.
        ValueError: `every` is less than 1, `only` matches no site, `tree` or `start` is not a
            number of this kind, or `control` is given without `save`.
        InspectorError: others may write into the folder of `control`.
        OSError: the file cannot be created. Later failures are reported in a warning at the end.
        InspectorError: with `start`, the file that is there is not a recording, or is damaged.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> forward = nnx.jit(lambda model, x: model(x))
        >>> with nni.watch(model, every=2) as recording:
        ...     for _ in range(4):
        ...         y = forward(model, jnp.ones((4, 2)))
        >>> [one.step for one in recording.passes], recording.summary("").size
        ([0, 2], 12)
    """
    start, tracker, counted = check_start(start), tracker_of(to), where_of(where)
    require_module(model)
    if control is not False and save is None:
        raise ValueError("control needs a recording: nni.watch(model, save=path, control=True).")
    session = Session(
        model,
        only=only,
        gradients=gradients,
        parameters=parameters,
        replica=check_replica(tree),
        where=counted,
    )
    measure_states(session, optimizer)
    saves = save if jax.process_index() == 0 else None  # of a job, the first process
    known, failed = facts_of_modules(model), list[str]()
    recording = load_or_create(saves, known) if saves is not None and start else Recording()
    diagnostics, uncalled = Diagnostics(session, every, start, in_region=True), None
    writing: TrackerWriter | None = None
    try:
        try:
            if saves is not None:
                recording.attach(saves, failed.append)
            recording.learn(known)
            recording.count_where("" if counted is None else counted.words)
            if tracker is not None and jax.process_index() == 0:
                find = functools.partial(diagnose, recording)
                writing = TrackerWriter(tracker, recording, find, failed.append)
            recorder = _Recorder(recording, start)
            with contextlib.ExitStack() as steering:
                if control is not False:
                    steers = Steering(
                        session,
                        declared=control if isinstance(control, Mapping) else {},
                        every=check_every(every),
                        start=start,
                        warns=failed.append,
                    )
                    recorder.shares = steers
                    if saves is not None:
                        recorder.control = Control(
                            saves,
                            session,
                            recording,
                            steering=steers,
                            start=start,
                            failed=failed.append,
                            learn=functools.partial(recorder.learn, session),
                        )
                        steering.callback(recorder.control.close)
                with Region(recorder, session, check_every(every)):
                    yield recording
            given = save is not None or to is not None
            if given and jax.process_index() and session.group is None:
                failed.append(NOT_SAVED.format(jax.process_index()))
            count = session.inbox.count
            diagnostics.note(count)
            if count:
                last = start + count - 1
                recording.learn(nonfinite_parameters(model, recording.facts_so_far, last))
            uncalled = diagnostics.uncalled(over=True)
            if uncalled is not None:
                recording.miss(uncalled)
                failed.append(f"{uncalled.what}: {uncalled.advice}.")
        except BaseException as error:
            session.close()
            recording.detach(error)
            raise
        finally:
            session.close()
            if writing is not None:
                writing.end()
            recording.detach()
    except BaseException as error:
        for text in (*failed, *dropped_warnings(session), *failure_warnings(session)):
            warn_or_note(error, text)
        raise
    finally:  # again: an interrupt may come at any line
        session.close()
        recording.detach()
    lost = [*dropped_warnings(session), *failure_warnings(session)]
    for text in (*failed, *(lost if uncalled is None else ())):
        warn(text)


NOT_SAVED = (
    "Process {} of this job wrote no file, and nothing to a tracker, because process 0 does. If "
    "each process trains a model of its own, write its recording yourself: "
    "recording.attach(path), recording.subscribe(f)."
)
_Traced = tuple[Facts, dict[str, int], tuple[Site, ...]]
_TRACED: weakref.WeakKeyDictionary[WatchedCall, _Traced] = weakref.WeakKeyDictionary()
"""What was learnt from a call, kept as long as a program that was traced for it."""


def _trace_call(call: WatchedCall, readers: Sequence[Callable[[], tuple[Facts, Trace]]]) -> _Traced:
    """What the first reader gives that can trace the call; nothing if none can."""
    if call not in _TRACED:
        for read in readers:
            with contextlib.suppress(Exception):  # the user's call itself worked: do without them
                facts, trace = read()
                _TRACED[call] = facts, stacks_of(trace), rows_of(trace, unseen={})
                break
    return _TRACED.get(call, (Facts(), {}, ()))


class _Recorder(LoopCallbacks):
    """The owner of a region that is recorded without a screen."""

    control: Control | None = None

    def __init__(self, recording: Recording, start: int = 0):
        self._recording, self.start = recording, start
        self._calls: list[WatchedCall] = []
        self._stacked: list[WatchedCall] = []  # those whose stacks are known
        self._first_shapes: list[Shapes] = []  # the model when the loop began, if it could be read
        self._lock = threading.RLock()  # the thread that answers requests learns too
        self._called_rows = 0  # how many rows of the recording's table of modules are called

    def step_begins(self, session: Session) -> bool:
        if not self._first_shapes:
            with contextlib.suppress(Exception):  # a model of the user's: do without its facts
                self._first_shapes.append(shapes_of(session.model))
        if self.control is not None:
            self.control.start()
        return False

    def pass_ends(self, session: Session, step: int, one: WatchedPass, *, newest: bool) -> None:
        self.learn(session, one)
        found = session.summaries_of([one])
        if found:
            self._recording.append(
                step,
                found,
                kind="watch",
                perturbed=one.perturbed,
                figures=session.stats_of([one], found),
                held=one.number,
            )

    def learn(self, session: Session, one: WatchedPass) -> None:
        """Learn what the calls of a pass say of the model: of each kind of call the facts that the
        rules need, when somebody asks for them, and its stacks as soon as something has rows.
        """
        sent = one.sent
        rows = any(found.rows for every in sent.arrived.values() for found in every)
        rows = rows or any(value.loops for value in sent.values)
        with self._lock:
            for call in sent.calls:
                if call is not None:
                    self._learn_call(session, call, rows=rows)
            self._add_members(session, sent)

    def _learn_call(self, session: Session, call: WatchedCall, *, rows: bool) -> None:
        is_new = all(call is not known for known in self._calls)
        needs_stacks = rows and all(call is not known for known in self._stacked)
        if not is_new and not needs_stacks:
            return
        self._calls += [call] * is_new
        self._stacked += [call] * needs_stacks
        models = list[Shapes]()
        with contextlib.suppress(Exception):
            models.append(shapes_of(session.model))
        # This is another thread than the loop's, in which nnx takes the attributes of modules out
        # and puts them back while a program ends. What was read meanwhile may lack some, and then
        # the call cannot be traced: so the model as the loop began is tried after it.
        models += self._first_shapes
        readers = [reader_of(one, call, session.selection, session.where) for one in models]
        if needs_stacks:
            self._stack(session, _trace_call(call, readers)[1])
        if is_new:
            self._recording.learn(lambda: self._facts(*_trace_call(call, readers)))

    def _facts(self, facts: Facts, _: dict[str, int], rows: tuple[Site, ...]) -> Facts:
        """The facts of a call; with them the recording gets the rows of the model's tree."""
        called = sum(row.calls > 0 for row in rows)
        if called > self._called_rows:  # else it may be a call of a part
            self._called_rows = called
            self._recording.keep_table(MODULES, columns_of_rows(rows))
        return facts

    def _add_members(self, session: Session, sent: PassData) -> None:
        """Give rows to the members of an ensemble, whose calls the model's trace does not show."""
        apart = {
            leaf_of(key)[0]: sent.members
            for (key, _), found in sent.arrived.items()
            if sent.members and all(summary.rows == (sent.members,) for summary in found)
        }
        if not apart.keys() <= session.stacks.keys():
            self._stack(session, apart)

    def _stack(self, session: Session, stacks: Mapping[str, int]) -> None:
        rows = {
            site: Stack(count, stacks[site]) for site, count in layers_with_rows(stacks).items()
        }
        session.stacks = {**session.stacks, **rows}

    def pass_held(self, session: Session, step: int, one: WatchedPass) -> None:
        if self._recording.attached and one.sent.arrived:
            found = session.summaries_of([one], ended=False)
            self._recording.hold(one.number, step, found, kind="watch", perturbed=one.perturbed)
