"""A function that is given what is recorded: in order, slow, blocking, raising."""

import subprocess
import sys
import textwrap
import threading

import pytest

import nnx_inspector as nni
from nnx_inspector import background
from nnx_inspector.stats.summary import empty

IN_TIME = 120.0
SITE = {"head": {"output": empty()}}


def test_passes_and_metrics_come_in_the_order_of_recording_in_one_other_thread():
    recording, had, threads = nni.Recording(), [], set()

    def take(one):
        threads.add(threading.current_thread())
        had.append((one.step, one.keys, one.kind))

    recording.append(0, SITE)
    end = recording.subscribe(take, metrics=lambda step, values: had.append((step, values)))
    recording.append(1, SITE, metrics={"loss": 2.0}, kind="run")
    recording.add_metrics(1, {"accuracy": 0.5, "f1": 1.0})
    recording.append(3, SITE)
    end()
    recording.append(4, SITE)
    recording.add_metrics(4, {"loss": 1.0})
    assert had == [
        (1, {"loss": 2.0}),
        (1, (("head", "output"),), "run"),
        (1, {"accuracy": 0.5, "f1": 1.0}),
        (3, (("head", "output"),), "watch"),
    ]
    assert threading.current_thread() not in threads
    end()
    assert len(had) == 4


def test_each_subscriber_has_all_of_it_whatever_another_does():
    recording, one, other = nni.Recording(), [], []
    fails, ends = [], [recording.subscribe(one.append), recording.subscribe(other.append)]
    ends.append(recording.subscribe(lambda _: 1 / 0, failed=fails.append, name="The third"))
    for step in range(5):
        recording.append(step, SITE)
    for end in ends:
        end()
    assert one == other == [*recording.passes]
    assert fails == [
        "The third raised ZeroDivisionError: division by zero when it was given step 0. What "
        "raises is left out there; the recording has all of it, and the loop goes on."
    ]


def test_an_error_is_a_warning_when_it_ends_if_nobody_else_is_told():
    recording = nni.Recording()

    def broken(one):
        raise OSError(f"no room for {one.step}")

    end = recording.subscribe(broken)
    recording.append(3, SITE)
    recording.append(4, SITE)
    with pytest.warns(nni.InspectorWarning, match="function broken raised OSError: no room for 3"):
        end()
    end()


def test_what_comes_while_too_much_waits_is_left_out_for_the_function_alone(monkeypatch):
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    recording, had, gate, began = nni.Recording(), [], threading.Event(), threading.Event()

    def slow(one):
        had.append(one.step)
        began.set()
        assert gate.wait(IN_TIME)

    fails = []
    end = recording.subscribe(slow, failed=fails.append, name="The slow one")
    recording.append(0, SITE)
    assert began.wait(IN_TIME)
    for step in range(1, 10):
        recording.append(step, SITE)
    gate.set()
    end()
    assert had == [0, 1, 2, 3]
    assert recording.steps == [*range(10)]
    assert fails == [
        "The slow one was slower than the loop, so 6 of what was recorded was left out there. The "
        "recording has all of it."
    ]


def test_one_that_never_returns_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(background, "SILENT_SECONDS", 0.05)
    recording, gate, began, fails = nni.Recording(), threading.Event(), threading.Event(), []

    def blocks(one):
        began.set()
        assert gate.wait(IN_TIME)

    end = recording.subscribe(blocks, failed=fails.append, name="It")
    for step in range(4):
        recording.append(step, SITE)
    assert began.wait(IN_TIME)
    end()
    gate.set()
    end()  # its thread has ended now
    assert fails == [
        "It has not returned from step 0 for 0.05 seconds, so 3 of what was recorded was left out "
        "there. The recording has all of it."
    ]
    assert len(recording) == 4


def test_the_interpreter_ends_while_one_never_returns():
    code = """
        import threading
        import nnx_inspector as nni
        from nnx_inspector import background
        from nnx_inspector.stats.summary import empty
        background.SILENT_SECONDS = 0.05
        recording, began = nni.Recording(), threading.Event()
        end = recording.subscribe(lambda one: (began.set(), threading.Event().wait()), failed=print)
        recording.append(2, {"head": {"output": empty()}})
        began.wait()
        end()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert "<lambda> has not returned from step 2 for 0.05 seconds, so 0 of what" in done.stdout
    assert done.stderr == ""


def test_it_may_end_itself():
    recording, had = nni.Recording(), []

    def once(one):
        had.append(one.step)
        end()

    gate = threading.Event()
    first = recording.subscribe(lambda one: gate.wait(IN_TIME))
    end = recording.subscribe(once)
    recording.append(0, SITE)
    gate.set()
    first()
    end()
    recording.append(1, SITE)
    assert had == [0]


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="subscribe takes a function of a pass, got int"):
        nni.Recording().subscribe(3)
