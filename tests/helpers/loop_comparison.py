"""Runs a training loop bare and watched, and compares training, leftovers, figures and warnings.

Invariant: the expectations come from the bare loop and from NumPy alone.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections import Counter
from typing import Any

import leftovers
import numpy as np
import training_many_models
import training_other_gradients
import training_single_model
import training_split_models
from flax import nnx
from inside import inside
from leftovers import assert_close, nothing_left

import nnx_inspector as nni
from nnx_inspector.recordings.tree_rows import layer_of

LOOPS = {
    one.__name__.replace("_", " "): one
    for group in (
        training_single_model,
        training_many_models,
        training_split_models,
        training_other_gradients,
    )
    for one in group.LOOPS
}
EVERY = 2
FACTOR = 0.5


@dataclasses.dataclass
class Ran:
    """The results of a loop, and the figures that were seen.

    Attributes:
        expected: for each step its calls: site and quantity -> values.
        told: the messages for the user, in Python and on screen.
    """

    losses: list[float]
    state: list[np.ndarray]
    expected: list[list[Any]]
    recording: Any = None
    warned: tuple[str, ...] = ()
    noticed: tuple[str, ...] = ()


def train(loop, batches, before=lambda x: None):
    losses = []
    for x in batches:
        before(x)
        losses.append(float(loop.step(x)))
    return losses


@functools.cache
def bare(name: str, factor: float = 1.0) -> Ran:
    """The loop without the package, and the figures of each step by NumPy."""
    loop, expected = LOOPS[name](factor), []
    losses = train(
        loop, loop.batches, lambda x: expected.append([*map(loop.figures_of, loop.calls(x))])
    )
    return Ran(losses, numbers(loop), expected)


def numbers(loop) -> list[np.ndarray]:
    return [x.copy() for x in leftovers.arrays_of(loop.state())]


def iterated(insp, loop):
    return train(loop, insp.watch(loop.batches, every=EVERY))


def ticked(insp, loop):
    with insp.watch(every=EVERY):
        return train(loop, loop.batches, lambda x: insp.tick())


def region(insp, loop):
    with insp.watch(every=EVERY):
        return train(loop, loop.batches)


WAYS = {"iterated": iterated, "ticked": ticked, "region": region, "script": None}


def watched(name: str, way: str, *, perturbed: bool = False) -> tuple[Ran, Any]:
    loop = LOOPS[name](1.0)
    graphdef, threads = nnx.graphdef(loop.model), set(threading.enumerate())
    with warnings.catch_warnings(record=True) as caught, nothing_left():
        warnings.simplefilter("always", nni.InspectorWarning)
        if way == "script":
            noticed = ()
            with nni.watch(loop.model, every=EVERY) as recording:
                losses = train(loop, loop.batches)
        else:
            insp = nni.Inspector(loop.model, loop.batches[0], display=False)
            if perturbed:
                insp.perturb("a", nni.Scale(FACTOR))
            losses = WAYS[way](insp, loop)
            noticed = tuple(n for n in inside(insp).notices)
            recording = insp.recording
            insp.close()
        left = set(threading.enumerate()) - threads
        for thread in left:  # a closed thread may still be at work
            thread.join(60)
        assert not [thread for thread in left if thread.is_alive()]
    assert nnx.graphdef(loop.model) == graphdef
    warned = tuple(str(w.message) for w in caught if issubclass(w.category, nni.InspectorWarning))
    return Ran(losses, numbers(loop), [], recording, warned, noticed), loop


def passes_of(expected, way, *, evaluates):
    """Step -> the calls that the measured passes are of. If evaluations are programs of their own,
    the program that unmeasured passes alone have had for `EVERY` passes is measured too.
    """
    if way in ("iterated", "ticked"):
        return {i: calls for i, calls in enumerate(expected) if i % EVERY == 0}
    found, missed = {}, Counter()
    for i, call in enumerate(call for calls in expected for call in calls):
        graded = not evaluates or ("", "gradient") in call
        if i % EVERY == 0 or missed[graded] >= EVERY:
            found[i], missed[graded] = [call], 0
        else:
            missed[graded] += 1
    return found


def without_members(call):
    return {(site, q): x for (site, q), x in call.items() if layer_of(site) is None}


def nearest(one, calls):
    """The call, among some, that has the quantities and the outputs of a pass."""
    found = {(site, quantity) for site, quantity, _ in one.of_sites.items()}
    calls = [call for call in calls if set(call) == found] or calls
    return min(calls, key=lambda c: abs(one.summary("", "output").mean - c["", "output"].mean()))


def check_statistics(one, calls, tolerance):
    wanted: dict[Any, list[np.ndarray]] = {}
    for call in calls:
        for key, values in call.items():
            wanted.setdefault(key, []).append(np.ravel(values))
    found = {(site, quantity): summary for site, quantity, summary in one.of_sites.items()}
    assert set(found) == set(wanted), (one.step, set(found) ^ set(wanted))
    for key, summary in found.items():
        values = np.concatenate(wanted[key])
        said = f"{key} in step {one.step}"
        assert summary.size == values.size, said
        scale = float(np.abs(values).max()) + 1e-30
        close = functools.partial(np.testing.assert_allclose, rtol=tolerance, err_msg=said)
        close(summary.mean, values.mean(), atol=tolerance * scale)
        close(summary.norm, np.linalg.norm(values))
        close([summary.min, summary.max], [values.min(), values.max()], atol=tolerance * scale)


def check(name: str, way: str, *, perturbed: bool = False) -> None:
    ran, loop = watched(name, way, perturbed=perturbed)
    acts = perturbed and not loop.hidden
    reference = bare(name, FACTOR if acts else 1.0)
    np.testing.assert_allclose(ran.losses, reference.losses, rtol=1e-5, atol=1e-7)
    assert_close(ran.state, reference.state, exactly=False, tolerance=1e-5)
    told = ran.warned + ran.noticed
    assert loop.told in (None, bool(told)), told
    if way == "script" or loop.hidden:
        assert loop.told in (None, bool(ran.warned)), told
    if perturbed and loop.hidden:
        assert "not acting" in " ".join(ran.warned), told
    recorded = [one for one in ran.recording.passes if one.kind == "watch"]
    assert [one.perturbed for one in recorded] == [acts] * len(recorded)
    expected = passes_of(reference.expected, way, evaluates=loop.evaluates)
    expected = {step: calls for step, calls in expected.items() if any(calls)}
    assert [one.step for one in recorded] == list(expected)
    for one in recorded:
        calls = expected[one.step]
        if loop.unordered and len(calls) == 1:  # all of it belongs to one call of its step
            calls = [
                nearest(one, next(s for s in reference.expected if any(c is calls[0] for c in s)))
            ]
        if way != "script" and loop.inspected:  # an example's trace has no members
            calls = [*map(without_members, calls)]
        check_statistics(one, calls, loop.tolerance)
