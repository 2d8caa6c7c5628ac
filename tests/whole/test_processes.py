"""Loops of a job of two processes: both have the record of one, and train what they train bare.

`trained_apart.py` is one of the processes. They exchange values in every program, so a job whose
processes launch different programs stops.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import pytest
import trained_apart
from flax import nnx
from trained_apart import FIGURES, RATE, STEPS, Deep, Net, X, trained

PROGRAM = pathlib.Path(trained_apart.__file__)
QUICK, LONG = ["data", "tensor", "explicit"], ["halves"]
EVERY = {name: case.get("every", (3, 1)) for name, case in trained_apart.CASES.items()}


def job(*names: str) -> dict[str, tuple[Any, Any]]:
    """Case -> what each of the two processes says."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    where = os.pathsep.join([str(PROGRAM.parents[2]), str(PROGRAM.parent)])
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "PYTHONPATH": where, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as stack:
        # files: a process that waits for a reader of its pipe would hold up the other one
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(4)]
        processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), address, str(number), *names],
                stdout=files[number],
                stderr=files[2 + number],
                env=environment,
            )
            for number in range(2)
        ]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            ends = [pool.submit(process.wait, 300) for process in processes]
            try:
                for end in concurrent.futures.as_completed(ends):
                    if end.result():
                        break  # the other one would wait for it
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            for one in files:
                one.seek(0)
        assert not any(one.returncode for one in processes), [one.read()[-4000:] for one in files]
        lines = [[json.loads(x) for x in one if x.startswith("{")] for one in files[:2]]
    said = [{line["name"]: line for line in found} for found in lines]
    return {name: (said[0][name], said[1][name]) for name in names}


@pytest.fixture(scope="module")
def quick():
    return job(*QUICK, "disagreed")


@pytest.fixture(scope="module")
def rest():
    return job(*LONG, "deep")


every_case = pytest.mark.parametrize(
    ("name", "runs"),
    [
        *[(name, "quick") for name in QUICK],
        *[pytest.param(name, "rest", marks=pytest.mark.long) for name in LONG],
    ],
)


def by_hand() -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Step, site and quantity -> values, the losses, and the trained parameters, in float64."""
    net = Net(nnx.Rngs(0))
    w, v = (np.asarray(one.kernel[...], np.float64) for one in (net.a, net.b))
    b, c = np.zeros(w.shape[1]), np.zeros(v.shape[1])
    x, found, losses = X.astype(np.float64), dict[str, Any](), list[float]()
    for step in range(STEPS):
        hidden = x @ w + b
        active = np.maximum(hidden, 0)
        out = active @ v + c
        losses.append((out**2).mean())
        d_out = 2 * out / out.size
        d_hidden = (d_out @ v.T) * (hidden > 0)
        for site, value, gradient in (("", out, d_out), ("b", out, d_out), ("a", hidden, d_hidden)):
            found[f"{step} {site} output"] = value
            found[f"{step} {site} gradient"] = gradient
        w, b = w - RATE * x.T @ d_hidden, b - RATE * d_hidden.sum(axis=0)
        v, c = v - RATE * active.T @ d_out, c - RATE * d_out.sum(axis=0)
    return found, losses, {"a/kernel": w, "a/bias": b, "b/kernel": v, "b/bias": c}


def figures_of(x: Any) -> dict[str, float]:
    zeros = np.count_nonzero(x == 0)
    found = (x.size, x.mean(), x.std(), x.min(), x.max(), zeros)
    return dict(zip(FIGURES, map(float, found), strict=True))


def close(found: Any, expected: Any, what: str) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6, err_msg=what)


@every_case
def test_both_processes_have_the_record_of_the_whole_batch(name, runs, request):
    first, second = request.getfixturevalue(runs)[name]
    expected, losses, _ = by_hand()
    for number, every in enumerate(EVERY[name]):
        ours, theirs = first["loops"][number], second["loops"][number]
        assert ours == theirs
        record = ours["record"]
        wanted = [key for key in expected if int(key.split()[0]) % every == 0]
        assert sorted(wanted) == sorted(key for key in record if "figures" in record[key])
        for key in wanted:
            for figure, value in figures_of(expected[key]).items():
                close(record[key]["figures"][figure], value, f"{name} {every} {key} {figure}")
            assert sum(record[key]["bins"].values()) == expected[key].size
        close(ours["losses"], losses, name)


@every_case
def test_the_loop_trains_what_it_trains_bare(name, runs, request):
    _, losses, parameters = by_hand()
    for said in request.getfixturevalue(runs)[name]:
        assert said["warnings"] == []
        *watched, bare = said["loops"]
        assert bare["record"] == {}
        close(bare["losses"], losses, name)
        for one in watched:
            close(one["losses"], bare["losses"], name)
            assert set(one["parameters"]) >= set(parameters)
            for path, value in parameters.items():
                close(one["parameters"][path], bare["parameters"][path], path)
                close(one["parameters"][path], value, path)


@every_case
def test_the_other_figures_are_those_of_one_process(name, runs, request):
    make = trained_apart.CASES[name].get("make", trained_apart.whole)
    same_figures(request.getfixturevalue(runs)[name][0], EVERY[name], make(), Net)


def same_figures(said: Any, numbers: Any, step: Any, model: Any) -> None:
    """Those of single units and of parameters, and the histograms up to rounding."""
    for one, every in zip(said["loops"], numbers, strict=False):
        alone = trained(None, step, every=every, model=model)
        assert list(one["record"]) == list(alone["record"])
        for key, found in one["record"].items():
            expected = alone["record"][key]
            if key.endswith((" figures", " parameters")):
                assert found[0] == list(expected[0])
                for row, other in zip(found[1], expected[1], strict=True):
                    np.testing.assert_allclose(row, other, rtol=1e-3, atol=1e-5, err_msg=key)
            else:
                bins = {*found["bins"], *expected["bins"]}
                moved = [found["bins"].get(b, 0) - expected["bins"].get(b, 0) for b in bins]
                assert np.abs(moved).sum() <= 0.05 * expected["figures"]["size"], key


@pytest.mark.long
def test_of_layers_in_a_scan_that_are_computed_again(rest):
    first, second = rest["deep"]
    assert first == second
    assert first["warnings"] == []
    step = trained_apart.whole()
    alone = trained(None, step, every=0, model=Deep)
    for one in first["loops"]:
        close(one["losses"], alone["losses"], "losses")
        for path, value in alone["parameters"].items():
            close(one["parameters"][path], value, path)
    same_figures(first, EVERY["deep"], step, Deep)


def test_if_one_process_does_not_come_or_watches_otherwise_none_measures(quick):
    """And the next loop, which both watch alike, is measured."""
    first, second = quick["disagreed"]
    _, losses, _ = by_hand()
    for said in (first, second):
        alone, unlike, alike, bare = said["loops"]
        for one in (alone, unlike, alike, bare):
            close(one["losses"], losses, "losses")
            assert one["parameters"] == bare["parameters"]
        assert alone["record"] == unlike["record"] == {}
        assert {key.split()[0] for key in alike["record"]} == {"0", "3", "6"}, said["warnings"]
    assert first["loops"][2]["record"] == second["loops"][2]["record"]
    absent, *of_first = first["warnings"]
    assert "Process 1 of 2 did not watch within 2 seconds of process 0: " in absent
    assert len(of_first) == 1
    assert "Process 1 watches with every=2, and process 0 with 1" in of_first[0]
    (of_second,) = second["warnings"]
    assert "Process 0 watches with every=1, and process 1 with 2: no process meas" in of_second
