"""An interrupt or a signal at any line: the loop ends with it, and all goes on as before."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from interrupts import Interrupt
from leftovers import patched_in_jax
from models import TwoLayers

import nnx_inspector as nni
from nnx_inspector.hooks.hook import open_hooks

IN_TIME = 120.0
STEPS = 4
SHARE = 199
"""One line of so many is interrupted in the run that everybody waits for."""


class Loops:
    """The loops of one kind, over one model, each saved to one file."""

    def __init__(self, kind, path):
        self.kind, self.path = kind, path
        self.model, self.x = TwoLayers(nnx.Rngs(0)), jnp.ones((4, 3))
        graphdef, self.state = nnx.split(self.model)
        # nothing of the model is written back, which flax does not do in one piece
        self.forward = jax.jit(jax.grad(lambda s, x: (nnx.merge(graphdef, s)(x) ** 2).mean()))
        self.insp = None
        self.every = 2 if "every 2" in kind else 1
        if "nni.watch" not in kind:
            self.insp = nni.Inspector(self.model, self.x, display=False)
            self.insp.save(path)
        if "switched" in kind:
            self.insp.perturb("a", nni.Scale(0.5))

    def step(self):
        with (
            nni.perturb("", nni.Scale(1.0)) if "perturb" in self.kind else contextlib.nullcontext()
        ):
            self.forward(self.state, self.x)
        if "metrics" in self.kind:
            self.insp.metrics(loss=1.0)

    def run(self):
        """Run a loop; returns how many passes it has added, and how many there are."""
        before = 0 if self.insp is None else len(self.insp.recording)
        if self.insp is None:
            with nni.watch(self.model, every=self.every, save=self.path) as recording:
                for _ in range(STEPS):
                    self.step()
            return len(recording), len(recording)
        if "iterator" in self.kind:
            for _ in self.insp.watch([self.x] * STEPS, every=self.every):
                self.step()
        else:
            with self.insp.watch(every=self.every):
                for _ in range(STEPS):
                    if "tick" in self.kind:
                        self.insp.tick()
                    self.step()
        return len(self.insp.recording) - before, len(self.insp.recording)


def open_now():
    """What is open in this thread, and what jax and flax have of ours."""
    return (
        open_hooks(),
        vars(nnx.Linear).get("__call__"),
        nnx.Module.sow.__code__,
        *patched_in_jax(),
        sys.unraisablehook,
    )


KINDS = (
    "iterator",
    "iterator, every 2, perturb",
    "iterator, metrics",
    "iterator, switched",
    "region",
    "region, every 2, metrics",
    "region, tick, perturb",
    "nni.watch",
)


def interrupted_at_lines(kind, path, *, share):
    """Interrupt a loop of a kind at a share of the lines of the package that it runs."""
    loops = Loops(kind, path)
    loops.run()
    loops.run()  # the next ones compile nothing
    with Interrupt() as dry:
        whole, _ = loops.run()
    before = open_now()
    lines = sorted(dry.last.values())
    ended = 0
    for at in lines[11 * KINDS.index(kind) % share :: share]:  # others for each kind
        one = Interrupt(at)
        try:
            with one:
                loops.run()
        except KeyboardInterrupt:
            ended += 1
        else:
            assert one.where is None, f"lost at {one.where}"
        assert open_now() == before, one.where
        added, of_all = loops.run()
        assert added == whole, one.where
        assert len(nni.load(path)) == of_all, one.where
    assert ended > 0
    return ended


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_is_interrupted_at_some_line_ends_with_that_and_the_next_one_runs(
    kind, tmp_path
):
    interrupted_at_lines(kind, tmp_path / "run.nni", share=SHARE)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_is_interrupted_at_any_line_ends_with_that_and_the_next_one_runs(
    kind, tmp_path
):
    interrupted_at_lines(kind, tmp_path / "run.nni", share=1)


# ------------------------------------------------------------------- single places


def test_an_interrupt_while_the_recording_thread_starts_holds_up_nothing(monkeypatch, tmp_path):
    loops = Loops("iterator", tmp_path / "run.nni")
    whole, _ = loops.run()
    start, armed = threading.Thread.start, [True]

    def interrupted(thread):
        if armed and thread.name == "nnx_inspector.recording":
            armed.clear()
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loops.run()
    assert not armed
    assert loops.run()[0] == whole


@pytest.mark.parametrize("kind", ["region", "region, tick", "nni.watch", "iterator"])
def test_an_interrupt_while_flax_writes_the_model_back_reaches_the_user(kind, tmp_path):
    loops = Loops(kind, tmp_path / "run.nni")
    step, count = loops.step, iter(range(STEPS))

    def cut():
        step()
        if next(count) == 1:
            vars(loops.model).clear()  # as flax does, before it puts the new values in
            raise KeyboardInterrupt

    loops.step = cut
    with pytest.raises(KeyboardInterrupt):
        loops.run()
    assert open_hooks() == ()


def test_an_interrupt_within_a_write_leaves_a_file_with_all_passes(monkeypatch, tmp_path):
    from nnx_inspector.recordings import save

    loops = Loops("region", tmp_path / "run.nni")
    loops.run()
    real, count = save.write_all, iter(range(10**6))

    def cut(file, data):
        if threading.current_thread() is not threading.main_thread() or next(count) != 1:
            return real(file, data)
        real(file, data[: len(data) // 2])  # the chain of checksums has gone on
        raise KeyboardInterrupt

    monkeypatch.setattr(save, "write_all", cut)
    with pytest.raises(KeyboardInterrupt):
        loops.run()
    assert len(nni.load(loops.path)) == len(loops.insp.recording)
    _, of_all = loops.run()
    assert len(nni.load(loops.path)) == of_all


def test_a_loop_that_nothing_interrupts_writes_its_file_but_once(monkeypatch, tmp_path):
    from nnx_inspector.recordings import save

    loops = Loops("iterator, metrics", tmp_path / "run.nni")
    written = []
    monkeypatch.setattr(save, "replace_file", lambda *args: written.append(args))
    _, of_all = loops.run()
    assert written == []
    assert len(nni.load(loops.path)) == of_all


# ---------------------------------------------------------- no warning in its place


def test_a_loop_that_is_left_in_its_first_step_does_not_say_that_nothing_acts(tmp_path):
    loops = Loops("iterator, switched", tmp_path / "run.nni")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in loops.insp.watch([loops.x] * 2, every=1):
            break
    assert [str(one.message) for one in found] == []


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_interrupt_as_a_loop_ends_is_not_replaced_by_a_warning(interrupted, tmp_path):
    insp, x = Loops("iterator, switched", tmp_path / "run.nni").insp, jnp.ones((4, 3))

    def batches():
        yield x
        yield x
        if interrupted:
            raise KeyboardInterrupt

    expected = KeyboardInterrupt if interrupted else nni.InspectorWarning
    with pytest.raises(expected):  # warnings are errors here, and the loop calls no model
        for _ in insp.watch(batches(), every=1):
            pass


def test_what_nni_watch_would_warn_of_becomes_a_note_of_the_error_that_leaves_it(
    monkeypatch, tmp_path
):
    from nnx_inspector.inspector.script import watch

    monkeypatch.setattr(watch, "dropped_warnings", lambda session: ["Something is lost."])
    with pytest.raises(KeyboardInterrupt) as caught, nni.watch(TwoLayers(nnx.Rngs(0))):
        raise KeyboardInterrupt
    assert caught.value.__notes__ == ["nnx_inspector: Something is lost."]


# ----------------------------------------------------------------- signals' handlers


class Handler:
    """The handler of a signal, which raises an error."""

    def __init__(self, error):
        self.error = error

    def __call__(self, number, frame):
        raise self.error("from the handler")


@pytest.mark.parametrize(
    ("kind", "where", "error"),
    [  # each pair of two values
        ("region", "begin", SystemExit), ("region", "receive", TimeoutError),
        ("nni.watch", "begin", TimeoutError), ("nni.watch", "receive", KeyboardInterrupt),
        ("iterator", "begin", KeyboardInterrupt), ("iterator", "receive", SystemExit),
    ],
)  # fmt: skip
def test_what_a_handler_raises_within_a_callback_leaves_the_loop_at_once(
    kind, where, error, monkeypatch, tmp_path
):
    from nnx_inspector.live.inbox import Inbox

    loops = Loops(kind, tmp_path / "run.nni")
    loops.run()
    real, steps, count = getattr(Inbox, where), [], iter(range(10**6))
    before = signal.signal(signal.SIGTERM, Handler(error))

    def signalled(*args, **kwargs):
        if next(count) == 1:
            signal.raise_signal(signal.SIGTERM)
        return real(*args, **kwargs)

    step = loops.step
    loops.step = lambda: (steps.append(1), step())
    monkeypatch.setattr(Inbox, where, signalled)
    try:
        with pytest.raises(error, match="from the handler"):
            loops.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(steps) == 2
    assert open_hooks() == ()


def test_an_error_of_our_own_in_a_callback_does_not_leave_the_loop(monkeypatch, tmp_path):
    from nnx_inspector.live.inbox import Inbox

    loops = Loops("nni.watch", tmp_path / "run.nni")
    loops.run()

    def fails(*args, **kwargs):
        raise TimeoutError("ours")

    monkeypatch.setattr(Inbox, "receive", fails)
    with pytest.warns(nni.InspectorWarning, match="TimeoutError: ours"):
        loops.run()


@pytest.mark.long
@pytest.mark.parametrize("error", [SystemExit, TimeoutError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["region", "nni.watch", "iterator"])
def test_a_signal_at_any_moment_leaves_the_loop(kind, error, tmp_path):
    loops = Loops(kind, tmp_path / "run.nni")
    loops.run()
    before = signal.signal(signal.SIGALRM, Handler(error))
    step = loops.step

    def without_end():
        while True:
            step()

    loops.step = without_end
    try:
        for trial in range(60):
            signal.setitimer(signal.ITIMER_REAL, 0.05 + 0.003 * trial)
            with pytest.raises(error, match="from the handler"):
                loops.run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------- closed in another thread, or at exit


def closed_elsewhere(loop):
    """Close a generator in another thread, as the collector does."""
    thread = threading.Thread(target=loop.close)
    thread.start()
    thread.join(IN_TIME)
    assert not thread.is_alive()


@pytest.mark.parametrize("every", [1, 2])
def test_a_generator_closed_in_another_thread_leaves_the_users_own_programs(every):
    model, x, traced = TwoLayers(nnx.Rngs(0)), jnp.ones((4, 3)), []

    @nnx.jit
    def step(model, x):
        traced.append("step")
        return model(x)

    @jax.jit
    def other(x):
        traced.append("other")
        return 2 * x

    step(model, x), other(x)
    insp = nni.Inspector(model, x, display=False)
    for _ in insp.watch([x] * 4, every=every):
        step(model, x)
    loop = insp.watch([x] * 5, every=every)
    next(loop)
    step(model, x)
    closed_elsewhere(loop)
    traced.clear()
    step(model, x), other(x)
    assert traced == []
    assert open_hooks() == ()
    for _ in insp.watch([x] * 3, every=1):  # and the next loop is watched
        step(model, x)
    assert insp.recording.steps[-3:] == list(
        range(insp.recording.steps[-1] - 2, insp.recording.steps[-1] + 1)
    )


def test_a_region_that_another_thread_has_left_lets_jax_go():
    model, x = TwoLayers(nnx.Rngs(0)), jnp.ones((4, 3))
    forward = nnx.jit(lambda model, x: model(x))
    forward(model, x)
    clean = open_now()
    insp = nni.Inspector(model, x, display=False)
    region = insp.watch(every=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(region)
        forward(model, x)
        left = stack.pop_all()
        thread = threading.Thread(target=left.close)
        thread.start()
        thread.join(IN_TIME)
    forward(model, x)
    forward(model, x)
    assert open_now() == clean
    assert len(insp.recording) == 1


AT_EXIT = """
import pathlib, sys
import jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni
folder, x = pathlib.Path(sys.argv[1]), jnp.ones((256, 64))
forward = nnx.jit(lambda model, x: model(x))
models = [nnx.Linear(64, 64, rngs=nnx.Rngs(i)) for i in range(4)]
insps = [nni.Inspector(model, x, display=False) for model in models[:3]]
for number, insp in enumerate(insps):
    insp.save(folder / f"{number}.nni")
loop = insps[0].watch([x] * 9, every=1)
next(loop)
regions = [insp.watch(every=1) for insp in insps[1:]]
for region in regions:
    region.__enter__()
insps[2].tick()
watch = nni.watch(models[3], every=1, save=folder / "3.nni")
watch.__enter__()
for _ in range(20):
    for model in models:
        forward(model, x)
"""


def test_what_is_open_when_the_interpreter_ends_is_closed_in_silence(tmp_path):
    """A loop over batches, regions without and with ticks, and `nni.watch`."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=5 * IN_TIME,
        env=os.environ,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(len(nni.load(tmp_path / f"{number}.nni")) > 0 for number in range(4))
