"""Code around a watched loop: prefetching, progress bars, epochs, ways to leave it.

Training equals that on the same batches without the package, each measured step has its number and
NumPy's figures, and the inspector can be used again afterwards.
"""

from __future__ import annotations

import gc
import itertools
import queue
import threading

import numpy as np
import pytest
from flax import nnx
from leftovers import assert_close, nothing_left
from loop_comparison import EVERY, check_statistics
from training import Call, Net, batches, by, figures, loss_of, numbers_of
from training_single_model import jitted

import nnx_inspector as nni

BATCHES = batches(6)
evaluate = nnx.jit(loss_of)


class Training:
    """The steps of a loop, their expected figures, and the steps that were made."""

    def __init__(self):
        self.model = Net()
        self.optimizer = by(self.model)
        self.expected, self.done = [], []

    def step(self, x):
        self.expected.append([figures(Call(numbers_of(self.model), x))])
        self.done.append(x)
        return float(jitted(self.model, self.optimizer, x))


def plainly(insp, step):
    for x in insp.watch(BATCHES, every=EVERY):
        insp.metrics(loss=step(x))


def prefetched(insp, step):
    """A thread makes batches ahead."""
    ready: queue.Queue = queue.Queue(2)

    def fill():
        for x in BATCHES:
            ready.put(x)
        ready.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    for x in insp.watch(iter(ready.get, None), every=EVERY):
        step(x)
    thread.join()


class Bar:
    """A progress bar: an iterable with a length if the wrapped one has one."""

    def __init__(self, over):
        self.over, self.shown = over, 0

    def __len__(self):
        return len(self.over)

    def __iter__(self):
        for one in self.over:
            yield one
            self.shown += 1


def bar_outside(insp, step):
    for x in Bar(insp.watch(BATCHES, every=EVERY)):
        step(x)


def bar_inside(insp, step):
    for _, (x, _) in enumerate(insp.watch(Bar(list(zip(BATCHES, "abcdef", strict=True))), every=2)):
        step(x)


def epochs(insp, step):
    """One loop per epoch, evaluated in between at other batch sizes; the last batch is smaller."""
    for _ in range(2):
        for x in insp.watch([*BATCHES[:2], BATCHES[2][:3]], every=EVERY):
            step(x)
        evaluate(insp.model, BATCHES[3][:2])


def broken_off(insp, step):
    """The batches never end; the step in which the loop is left counts."""
    for i, x in enumerate(insp.watch(itertools.cycle(BATCHES), every=EVERY)):
        insp.metrics(loss=step(x))
        if i == 2:
            break
    gc.collect()
    plainly(insp, step)


def left_before_the_step(insp, step):
    """A batch is taken but not used."""
    for i, x in enumerate(insp.watch(itertools.cycle(BATCHES), every=EVERY)):
        if i == 2:
            break
        step(x)
    gc.collect()
    plainly(insp, step)


def left_unmeasured(insp, step):
    """The loop is left in a step that is not measured; its loss shows that it was made."""
    for i, x in enumerate(insp.watch(itertools.cycle(BATCHES), every=EVERY)):
        insp.metrics(loss=step(x))
        if i == 3:
            break
    gc.collect()
    plainly(insp, step)


def interrupted(insp, step):
    """The user stops the loop after the third step, and continues."""

    def loop():
        for i, x in enumerate(insp.watch(BATCHES, every=EVERY)):
            step(x)
            if i == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    gc.collect()
    plainly(insp, step)


def batches_raise(insp, step):
    """The iterator of the batches fails between two steps."""

    def some():
        yield from BATCHES[:3]
        raise OSError("no more data")

    def loop():
        for x in insp.watch(some(), every=EVERY):
            step(x)

    with pytest.raises(OSError, match="no more data"):
        loop()
    plainly(insp, step)


def dropped(insp, step):
    """The loop is driven by hand and never finished."""
    watched = insp.watch(BATCHES, every=EVERY)
    for _ in range(3):
        step(next(watched))
    del watched
    gc.collect()
    plainly(insp, step)


def in_a_thread(insp, step):
    thread = insp.background(lambda: plainly(insp, step))
    thread.join()


def region_broken_off(insp, step):
    with insp.watch(every=EVERY):
        for i, x in enumerate(BATCHES):
            insp.tick()
            step(x)
            if i == 2:
                break
    plainly(insp, step)


WAYS = (
    plainly, prefetched, bar_outside, bar_inside, epochs, broken_off, left_before_the_step,
    left_unmeasured, interrupted, batches_raise, dropped, in_a_thread, region_broken_off,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_around_a_watched_loop(way):
    training, twin = Training(), Training()
    graphdef, threads = nnx.graphdef(training.model), set(threading.enumerate())
    with nothing_left():
        insp = nni.Inspector(training.model, BATCHES[0], display=False)
        way(insp, training.step)
        insp.run(BATCHES[0])
        insp.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    assert set(threading.enumerate()) <= threads
    assert nnx.graphdef(training.model) == graphdef
    for x in training.done:
        twin.step(x)
    assert_close(*(nnx.state((t.model, t.optimizer)) for t in (training, twin)), exactly=False)
    recorded = [one for one in insp.recording.passes if one.kind == "watch"]
    assert [one.step for one in recorded] == list(range(0, len(training.done), EVERY))
    for one in recorded:
        check_statistics(one, training.expected[one.step], 1e-4)
    loss = insp.recording.curves().get("loss")
    assert loss is None or len(set(loss[:, 0])) == len(loss)
    assert np.isfinite(1 if loss is None else loss).all()
