"""One thread for several jobs: their order, replaced jobs, failures, and closing."""

import gc
import signal
import subprocess
import sys
import threading

import pytest

from nnx_inspector.background import STILL_BUSY, Worker, run_loop, weak_method

IN_TIME = 120.0


class Held:
    """A job that runs until it is released; then it ends in the given way."""

    def __init__(self, end=lambda: None):
        self.began, self.let_go, self._end = threading.Event(), threading.Event(), end

    def __call__(self):
        self.began.set()
        assert self.let_go.wait(IN_TIME)
        return self._end()


def fail():
    raise ZeroDivisionError("mine")


def test_jobs_are_done_in_their_order_and_one_that_fails_holds_up_none():
    done, failed = [], []
    worker = Worker("test", failed.append)

    def fail():
        raise ValueError("no")

    gate = threading.Event()
    for job in (gate.wait, lambda: done.append(1), fail, lambda: done.append(2)):
        assert worker.submit(job)
    gate.set()
    worker.wait()
    assert done == [1, 2]
    assert [str(error) for error in failed] == ["no"]
    assert worker.submit(lambda: done.append(3)), "a thread that has ended starts again"
    worker.wait()
    assert done == [1, 2, 3]


def test_closed_it_begins_nothing_and_joining_waits_for_what_is_under_way():
    done, began, gate = [], threading.Event(), threading.Event()
    worker = Worker("test", lambda error: None)

    def slow():
        began.set()
        gate.wait()
        done.append("slow")

    worker.submit(slow)
    worker.submit(lambda: done.append("never"))
    began.wait()
    worker.close()
    assert not worker.submit(lambda: done.append("later"))
    gate.set()
    worker.join()
    assert done == ["slow"]


def test_waiting_for_oneself_returns():
    worker = Worker("test", lambda error: None)
    ended = threading.Event()
    worker.submit(lambda: (worker.wait(), ended.set()))
    assert ended.wait(30)


def test_the_newest_wish_wins_and_the_end_is_told_once():
    ran, told = [], []
    worker = Worker("test", told.append, lambda: told.append(list(ran)))
    first = Held(lambda: ran.append("first"))
    worker.submit_instead(first)
    assert first.began.wait(IN_TIME)
    assert worker.busy
    worker.submit_instead(lambda: ran.append("never"))
    worker.submit_instead(lambda: ran.append("second"))
    first.let_go.set()
    worker.wait()
    assert (ran, told, worker.busy) == (["first", "second"], [["first", "second"]], False)


def test_a_wish_that_fails_is_told_and_another_may_follow():
    told = []
    worker = Worker("test", lambda error: told.append(str(error)), lambda: told.append("done"))
    worker.submit_instead(fail)
    worker.wait()
    worker.submit_instead(lambda: None)
    worker.wait()
    assert told == ["mine", "done"]


def test_a_wish_that_fails_takes_no_newer_one_with_it():
    told, older = [], Held(fail)
    worker = Worker("test", lambda error: told.append(str(error)), lambda: told.append("done"))
    worker.submit_instead(older)
    assert older.began.wait(IN_TIME)
    worker.submit_instead(lambda: told.append("newer"))
    older.let_go.set()
    worker.wait()
    assert told == ["newer", "done"], "the failure of the older job is not reported"


def test_what_is_told_at_the_end_may_ask_for_more_and_may_fail():
    told = []

    def done():
        told.append("done")
        if told == ["done"]:
            worker.submit_instead(lambda: told.append("more"))
            fail()

    worker = Worker("test", lambda error: told.append(str(error)), done)
    worker.submit_instead(lambda: None)
    worker.wait()
    assert told == ["done", "mine", "more", "done"]


@pytest.mark.parametrize("fails", [False, True])
def test_closed_it_tells_nobody_and_a_long_job_can_ask(fails):
    told = []
    worker = Worker("test", told.append, lambda: told.append("done"))
    job = Held(fail if fails else lambda: told.append(worker.closed))
    worker.submit_instead(job)
    worker.submit(lambda: told.append("never"))
    assert job.began.wait(IN_TIME)
    worker.close()
    job.let_go.set()
    worker.join()
    assert not worker.submit_instead(job)
    assert (told, worker.busy) == ([] if fails else [True], False)


def test_a_weak_method_keeps_its_object_alive_no_longer():
    class Owner:
        def name(self, of):
            return f"mine, {of}"

    owner = Owner()
    call = weak_method(owner.name)
    assert call("yours") == "mine, yours"
    del owner
    gc.collect()
    assert call("yours") is None


LEAVES = """
import sys, threading
from nnx_inspector import background
background.PATIENCE_SECONDS = 0.1
began = threading.Event()
background.Worker("test", print).submit(lambda: began.set() or sys.stdin.readline())
began.wait()
"""


@pytest.mark.parametrize("ends", [True, False])
def test_leaving_says_that_it_waits_for_a_job_and_an_interrupt_ends_it(ends):
    pipes = dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", LEAVES], text=True, **pipes) as process:
        assert process.stderr.readline().strip() == STILL_BUSY
        if ends:
            process.stdin.write("\n")
            process.stdin.flush()
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(IN_TIME) == (0 if ends else 130)
        assert process.stderr.read() == ""


TRAINS = """
import signal, sys, threading
import jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni

model, x = nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.ones((64, 64))
insp = nni.Inspector(model, x, display=False)
step = nnx.jit(lambda model, x: jnp.linalg.matrix_power(model(x), 60).sum())
under_way = threading.Event()

def train():
    try:
        for i in BATCHES:
            step(model, x).block_until_ready()
            if i == 20:
                under_way.set()
        print("has run to its end")
    finally:
        print("left")

insp.background(train)
under_way.wait()
"""
"""A loop that is within XLA nearly all the time."""
WATCHED, PLAIN = "insp.watch(range(10**9), every=2)", "range(10**9)"
ENDS = {
    "returns": (PLAIN, "", 0),
    "returns, watched": (WATCHED, "", 0),
    "is left": (WATCHED, "sys.exit(3)", 3),
    "raises": (WATCHED, "raise ZeroDivisionError", 1),
    "is interrupted": (PLAIN, "signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
}


@pytest.mark.parametrize(("batches", "end", "status"), ENDS.values(), ids=ENDS)
def test_a_script_may_end_while_a_loop_trains_in_the_background(batches, end, status):
    code = TRAINS.replace("BATCHES", batches) + end
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=IN_TIME, check=False
    )
    assert done.returncode == status, done.stderr
    assert done.stdout == "left\n"
    expected = {0: "", 3: "", 1: "ZeroDivisionError", -signal.SIGINT: "KeyboardInterrupt"}[status]
    assert done.stderr.strip().rpartition("\n")[2].startswith(expected), done.stderr
    assert expected or not done.stderr


def test_an_error_of_a_loop_is_handed_on():
    failed = []
    run_loop("test", fail, failed.append).join()
    assert [str(error) for error in failed] == ["mine"]
