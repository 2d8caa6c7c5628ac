"""One thread for several jobs: their order, what fails, and how it ends."""

import threading

from nnx_inspector.background import Worker


def test_jobs_are_done_in_their_order_and_one_that_fails_holds_up_none():
    done, failed = [], []
    worker = Worker("test", failed.append)

    def fail():
        raise ValueError("no")

    gate = threading.Event()
    for job in (gate.wait, lambda: done.append(1), fail, lambda: done.append(2)):
        assert worker.do(job)
    gate.set()
    worker.wait()
    assert done == [1, 2]
    assert [str(error) for error in failed] == ["no"]
    assert worker.do(lambda: done.append(3)), "a thread that has ended begins anew"
    worker.wait()
    assert done == [1, 2, 3]


def test_closed_it_begins_nothing_and_joining_waits_for_what_is_under_way():
    done, began, gate = [], threading.Event(), threading.Event()
    worker = Worker("test", lambda error: None)

    def slow():
        began.set()
        gate.wait()
        done.append("slow")

    worker.do(slow)
    worker.do(lambda: done.append("never"))
    began.wait()
    worker.close()
    assert not worker.do(lambda: done.append("later"))
    gate.set()
    worker.join()
    assert done == ["slow"]


def test_waiting_for_oneself_returns():
    worker = Worker("test", lambda error: None)
    ended = threading.Event()
    worker.do(lambda: (worker.wait(), ended.set()))
    assert ended.wait(30)
