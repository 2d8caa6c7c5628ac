"""Runs that are killed at a random moment: every file opens, and at most two steps are lost."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from nnx_inspector.recordings.load import load

TESTS = pathlib.Path(__file__).parents[1]
LONG = [pytest.mark.long]


def cases() -> list[object]:
    """One of each kind in every run; by hand 40 of the Inspector's and 10 of `nni.watch`."""
    kinds = ["inspector"] * 35 + ["region"] * 5 + ["watch"] * 10
    first = {"inspector": 0, "watch": 40}
    return [
        pytest.param(kind, seed, marks=[] if first.get(kind) == seed else LONG)
        for seed, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(("kind", "seed"), cases())
def test_a_killed_run_loses_at_most_two_steps(kind: str, seed: int, tmp_path: pathlib.Path) -> None:
    done = -1
    source, path = random.Random(seed), tmp_path / "run.nni"
    command = [sys.executable, str(TESTS / "helpers" / "killed_run.py"), kind, str(path)]
    modules = os.pathsep.join(map(str, (TESTS / "models", TESTS.parent)))
    where = {**os.environ, "PYTHONPATH": modules}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=where)
    assert process.stdout is not None
    try:
        for _ in range(source.randrange(2, 120)):
            done = int(process.stdout.readline() or -9)
            assert done >= 0, "it ended by itself"
        time.sleep(source.random() * 0.02)  # any moment of a step
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines()
        process.wait()
        process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    recording = load(path)
    loop = [p for p in recording.passes if p.kind == "watch"]
    done = int([str(done), *rest][-1])
    assert recording.thinned == 0
    first = loop[0].step
    assert [p.step for p in loop] == list(range(first, first + len(loop)))
    # the step itself, and the one before it, which the Inspector saves while the loop goes on
    assert len(loop) >= done - (kind == "inspector")
    for one in loop[:-1]:
        assert one.keys == loop[0].keys, "each has its gradients"
        assert {q for _, q in one.keys} >= {"output", "gradient"}
    if kind == "inspector":
        points = recording.curves()["loss"] if loop else []
        assert len(points) >= done
