"""Jobs of several processes: all have the record of one, and train what they train bare.

`multi_process_training.py` is one of the processes. They exchange values in every program, so a job
whose processes launch different programs stops.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

import inspector_in_job
import multi_process_training
import numpy as np
import pytest
from devices import UNOPTIMIZED
from flax import nnx
from multi_process_training import FIGURES, RATE, STEPS, Deep, Net, X, trained

import nnx_inspector as nni

PROGRAM = pathlib.Path(multi_process_training.__file__)
LONG = ["data", "tensor", "halves"]
EVERY = {name: case.get("every", (3, 1)) for name, case in multi_process_training.CASES.items()}


def job(*names: str, count: int = 2, killed: int = -1, **more: str) -> dict[str, Any]:
    """Case -> what each of the processes says; {} if one of them kills itself."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    where = os.pathsep.join([str(PROGRAM.parents[2]), str(PROGRAM.parent)])
    flags = f"--xla_force_host_platform_device_count=2 {UNOPTIMIZED}"
    environment = {**os.environ, "PYTHONPATH": where, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["NPROC"] = "64"  # see elsewhere.md: the threads of XLA's exchanges
    environment |= {"RUN_KILLS": str(killed), **more}
    with contextlib.ExitStack() as stack:
        # files: a process that waits for a reader of its pipe would hold up the others
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * count)]
        processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), address, str(number), str(count), *names],
                stdout=files[number],
                stderr=files[count + number],
                env=environment,
            )
            for number in range(count)
        ]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            ends = [pool.submit(process.wait, 600) for process in processes]
            try:
                for end in concurrent.futures.as_completed(ends):
                    if end.result():
                        break  # the others would wait for it
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            for one in files:
                one.seek(0)
        if killed >= 0:
            assert processes[killed].returncode == -signal.SIGKILL
            return {}
        assert not any(one.returncode for one in processes), [one.read()[-4000:] for one in files]
        lines = [[json.loads(x) for x in one if x.startswith("{")] for one in files[:count]]
    said = [{line["name"]: line for line in found} for found in lines]
    return {name: tuple(one[name] for one in said) for name in names}


@pytest.fixture(scope="module")
def quick():
    return job("explicit", "disagreed", *inspector_in_job.CASES)


@pytest.fixture(scope="module")
def four():
    return job("data", "steered", "left", "controlled", "pipeline", count=4)


@pytest.fixture(scope="module")
def rest():
    return job(*LONG, "deep")


every_case = pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("explicit", "quick"),
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
        gradients = {
            "a/kernel": (w, x.T @ d_hidden),
            "a/bias": (b, d_hidden.sum(axis=0)),
            "b/kernel": (v, active.T @ d_out),
            "b/bias": (c, d_out.sum(axis=0)),
        }
        for path, (value, gradient) in gradients.items():
            found[f"{step} {path} parameter"] = value
            found[f"{step} {path} parameter_gradient"] = gradient
        w, b, v, c = (value - RATE * gradient for value, gradient in gradients.values())
    return found, losses, {"a/kernel": w, "a/bias": b, "b/kernel": v, "b/bias": c}


def figures_of(x: Any) -> dict[str, float]:
    zeros = np.count_nonzero(x == 0)
    found = (x.size, x.mean(), x.std(), x.min(), x.max(), zeros)
    return dict(zip(FIGURES, map(float, found), strict=True))


def close(found: Any, expected: Any, what: str) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6, err_msg=what)


def as_by_hand(record: Any, every: int, what: str) -> None:
    """The figures of all values are NumPy's, and each value is in a bin."""
    expected, _, _ = by_hand()
    wanted = [key for key in expected if int(key.split()[0]) % every == 0]
    assert sorted(wanted) == sorted(key for key in record if "figures" in record[key])
    for key in wanted:
        for figure, value in figures_of(expected[key]).items():
            close(record[key]["figures"][figure], value, f"{what} {every} {key} {figure}")
        assert sum(record[key]["bins"].values()) == expected[key].size


@every_case
def test_both_processes_have_the_record_of_the_whole_batch_and_train_what_they_train_bare(
    name, runs, request
):
    _, losses, parameters = by_hand()
    first, second = request.getfixturevalue(runs)[name]
    for number, every in enumerate(EVERY[name]):
        assert first["loops"][number] == second["loops"][number]
        as_by_hand(first["loops"][number]["record"], every, name)
    for said in (first, second):
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
    make = multi_process_training.CASES[name].get("make", multi_process_training.whole)
    assert_same_statistics(request.getfixturevalue(runs)[name][0], EVERY[name], make(), Net)


def assert_same_statistics(said: Any, numbers: Any, step: Any, model: Any) -> None:
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
    step = multi_process_training.whole()
    alone = trained(None, step, every=0, model=Deep)
    for one in first["loops"]:
        close(one["losses"], alone["losses"], "losses")
        for path, value in alone["parameters"].items():
            close(one["parameters"][path], value, path)
    assert_same_statistics(first, EVERY["deep"], step, Deep)


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
        as_by_hand(alike["record"], 3, "disagreed")
    assert first["loops"][2]["record"] == second["loops"][2]["record"]
    absent, *of_first = first["warnings"]
    assert "Process 1 of 2 did not watch within 2 seconds of process 0: " in absent
    assert len(of_first) == 1
    assert "Process 1 watches with every=2, and process 0 with 1" in of_first[0]
    (of_second,) = second["warnings"]
    assert "Process 0 watches with every=1, and process 1 with 2: no process meas" in of_second


# ---------------------------------------------------------------- an inspector


def bare(steps: int) -> list[float]:
    """The losses of as many steps in one process."""
    net, optimizer, x = multi_process_training.made(None, "data", Net)
    step = multi_process_training.whole()
    return [float(step(net, optimizer, x)) for _ in range(steps)]


def test_no_pass_is_made_by_one_process_alone(quick):
    first, second = quick["alone"]
    assert (first["effect"], first["passes"]) == (True, 0)
    for name, text in {**first["errors"], "unplaced": first["unplaced"]}.items():
        assert "the arrays are spread over the 2 processes of this job" in text, name
    assert sum("spread over the 2 processes" in text for text in first["notices"]) == 1
    assert first["losses"] == second["losses"]
    assert first["warnings"] == second["warnings"] == []


def test_a_model_of_one_process_is_inspected_as_ever(quick):
    said = quick["local"][1]
    assert said["output"][0] == 16 * 2 * multi_process_training.D
    assert (said["change"], said["rows"]) == (pytest.approx(0.5), 3)
    close(said["losses"][:STEPS], by_hand()[1], "losses")
    assert [step for step, _ in said["steps"]][-4:] == [0, 2, 0, 2]
    assert said["warnings"] == []


def test_passes_that_all_processes_make_are_those_of_one(quick):
    first, second = quick["passes"]
    assert first["layouts"] == second["layouts"]
    for layout, expected in inspector_in_job.passes(None)["layouts"].items():
        for what, figures in expected.items():
            close(first["layouts"][layout][what], figures, f"{layout} {what}")
    for said, other in ((first, 1), (second, 0)):
        text = f"Process {other} makes a pass with "
        assert said["unlike"].startswith(text)
        assert "perturbations" in said["unlike"]
        assert said["warnings"] == []


@pytest.mark.parametrize(
    ("runs", "stages"), [("quick", 4), pytest.param("four", 8, marks=pytest.mark.long)]
)
def test_a_pipeline_over_all_processes_has_the_record_of_one(runs, stages, request):
    first, *others = request.getfixturevalue(runs)["pipeline"]
    assert all(first == other for other in others)
    alone = inspector_in_job.pipeline(None, stages)
    close(first["losses"], alone["losses"], "losses")
    assert len(first["record"]) == len(alone["record"])
    for found, expected in zip(first["record"], alone["record"], strict=True):
        assert found[:3] == expected[:3]
        close(found[3:], expected[3:], str(expected[:3]))


every_count = pytest.mark.parametrize(
    "runs", ["quick", pytest.param("four", marks=pytest.mark.long)]
)


@every_count
def test_what_process_0_switches_acts_in_all_from_the_next_measured_step_on(runs, request):
    first, *others = request.getfixturevalue(runs)["steered"]
    for other in others:
        assert other["losses"] == first["losses"]
    close(first["losses"], inspector_in_job.by_settings(), "losses")
    for one in (first, *others):
        assert one["steps"] == [[0, False], [3, True], [6, True], [9, True], [12, False]]
    *sent, unsent = first["handles"]
    for one in others:
        assert one["handles"] == sent
    assert [site for site, _, _ in sent] == ["a", "a", "b"]
    assert "cannot be sent" in unsent[2]
    assert first["warnings"] == []
    vain, *rest = others
    assert [text for text in vain["warnings"] if "perturb what process 0 does" in text]
    assert all(one["warnings"] == [] for one in rest)


@every_count
def test_a_process_that_leaves_a_loop_or_closes_its_inspector_holds_up_none(runs, request):
    every = request.getfixturevalue(runs)["left"]
    first = every[0]
    for other in every:
        assert {k: v for k, v in other.items() if k != "warnings"} == {
            k: v for k, v in first.items() if k != "warnings"
        }
    loops = [first[f"{how} {i}"] for how in ("interrupted", "closed") for i in range(len(every))]
    for one in loops:  # it happens in step 4, and every third step is measured
        assert one["steps"] == [0, 3]
    found = [loss for one in loops for loss in one["losses"]] + first["after"]
    close(found, bare(len(found)), "losses")
    assert first["steps"] == [0, 3]
    for number, one in enumerate(every):
        texts = " ".join(one["warnings"])
        for other in range(len(every)):
            assert (f"Process {other} of {len(every)} left this loop" in texts) == (other != number)


def test_if_the_coordinator_is_late_or_gone_the_job_goes_on_unmeasured(quick):
    first, second = quick["late"]
    assert first == second
    assert first["steps"] == [0, 3, 9]
    assert first["steered"] == [0, 3]
    close(first["losses"], bare(len(first["losses"])), "losses")
    gone, missed = first["warnings"]
    assert "The coordinator of this job does not answer (UNAVAILABLE: it is gone)" in gone
    assert "Not all of 2 processes came to a measured step: no process measures it any" in missed


@every_count
def test_what_is_asked_of_a_job_acts_in_all_from_the_next_measured_step_on(runs, request):
    """A perturbation, a declared one, `every` and one more measured step; values are refused. Once
    a process has left, none is measured or perturbed, and process 0 says so.
    """
    first, *others = request.getfixturevalue(runs)["controlled"]
    for one in (first, *others):
        assert one["losses"] == first["losses"]
        assert [step for step, on in one["steps"] if not on] == [0, 14, 16]
        assert [step for step, on in one["steps"] if on] == [3, 6, 8, 10, 11, 12]
        assert one["left"] == [[0, False], [3, True]]
    close(first["losses"], inspector_in_job.by_requests(), "losses")
    assert [step for step, _ in first["done"]] == [3, 6, 8, 10, 14, 14, 16]
    assert first["done"][0][1] == 'run.perturb("a", nni.Scale(factor=0.5))'
    said, gone = first["refusals"], f"Process 1 of {1 + len(others)} left this loop"
    assert "a job of several processes sends no values" in said["values"]
    assert "'nowhere' matches no site" in said["nowhere"]
    assert gone in said["left"]
    assert said["off"] == gone
    for number, one in enumerate((first, *others)):
        assert [gone in text for text in one["warnings"]] == [True] * (number != 1)


def test_a_step_that_is_not_measured_runs_the_text_of_the_bare_one(quick):
    """And one that is perturbed exchanges nothing more."""
    for said in quick["exchanged"]:
        (_, bare), *those = said["programs"]
        assert [equal for equal, _ in those] == [False, True, False]
        measured, unmeasured, perturbed = (moved for _, moved in those)
        assert unmeasured == perturbed == bare
        assert sum(measured.values()) > sum(bare.values())


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_the_file_of_a_job_survives_a_kill_and_goes_on_after_a_restart(killed, tmp_path):
    path = tmp_path / "run.nni"
    job("saving", killed=killed, RUN_FILE=str(path), RUN_START="0")
    kept = nni.load(path)
    assert kept.steps[:4] == [0, 2, 4, 6]  # of 0 to 8, at most one is lost
    first, second = job("saving", RUN_FILE=str(path), RUN_START="6")["saving"]
    found = nni.load(path)
    assert found.seams == (len(kept),)
    assert first["steps"] == found.steps == [*kept.steps, 6, 8, 10]
    assert second["steps"] == [6, 8, 10]
