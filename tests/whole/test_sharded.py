"""Models over a mesh: summaries are made where the data lies, and equal those of one device.

`sharded.py` runs all cases in one separate process with eight devices, because starting takes
long.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import socket
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from collectives import collectives, elements

from nnx_inspector.stats.bins import MINUS_ZERO_BIN, UNSEEN_BIN, ZERO_BIN
from nnx_inspector.stats.samples.parameter_stats import SAMPLE
from nnx_inspector.stats.samples.unit_stats import EXAMPLES, POSITIONS, UNITS

BINS = 4096
DEVICES, NUMBERS = 8, 12
SAMPLED = 65_536  # more values than these are sampled
PROGRAM = pathlib.Path(__file__).parents[1].joinpath("helpers", "sharded.py")

QUICK = ["shard_map, cond", "explicit, auto"]
LONG = [
    "both", "uneven", "scan of remat", "data", "tensor", "one axis", "no mesh is current", "eager",
    "constrained", "scan", "ensemble", "inner jit", "image", "attention", "loops", "microbatches",
    "each example", "shard_map", "shard_map, eager", "shard_map, scan", "shard_map, while",
    "shard_map, unchecked", "explicit, shard_map", "explicit, scan", "explicit, remat",
    "explicit, cond", "explicit, vmap",
]  # fmt: skip
INEXACT = {"image": 2e-5, "attention": 2e-5}
"""Cases whose sums round differently in another order, and the error of that."""


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=PROGRAM.parent.parent,
        # elsewhere.md says why NPROC: the threads of XLA's exchanges
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2]), "NPROC": "64"},
    )


def said(process: subprocess.Popen[str], timeout: float) -> dict[str, dict]:
    """The output of a process, by case. Waits for its end, and ends it after a time limit."""
    try:
        out, error = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, error[-4000:]
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


@pytest.fixture(scope="module")
def quick():
    return said(start(*QUICK), 600)


@pytest.fixture(scope="module")
def rest():
    return said(start(*LONG), 3000)


every_case = pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("explicit, auto", "quick"),
        pytest.param("shard_map, cond", "quick", marks=pytest.mark.long),
        *[pytest.param(name, "rest", marks=pytest.mark.long) for name in LONG],
    ],
)


def rows_of(case: dict) -> int:
    return max(math.prod(s["rows"]) for s in case["sharded"]["said"].values())


@every_case
def test_no_activation_is_moved(name, runs, request):
    """The program moves only counts and a few numbers per device and row beyond the bare one's."""
    case = request.getfixturevalue(runs)[name]
    rows = rows_of(case)
    more = Counter(case["sharded"]["ours"]) - Counter(case["sharded"]["bare"])
    for collective in more:
        counts = collective.startswith("all-reduce u32[") and elements(collective) >= BINS
        limit = rows * (BINS + NUMBERS * DEVICES) if counts else 16 * rows
        assert elements(collective) <= limit, (collective, more)


@every_case
def test_a_record_is_that_of_one_device(name, runs, request):
    case = request.getfixturevalue(runs)[name]
    ours, one = case["sharded"]["said"], case["one"]
    assert case["sharded"]["unseen"] == {}
    assert set(ours) == set(one)
    assert any("output" in key for key in ours)
    if name != "each example":
        assert case["sharded"]["whole"]
    for key, expected in one.items():
        if "shard_map" in name and key.startswith("down ") and "input" not in key:
            continue  # of partial sums; see below
        if "unchecked" in name and not key.startswith(("up 0 output", "up 0 gradient")):
            continue  # see below
        error = INEXACT.get(name, 0.0)
        assert_same(ours[key], expected, error, key, in_parts="shard_map" in name)


def assert_same(ours, one, error, key, *, in_parts=False):
    assert (ours["rows"], ours["ran"]) == (one["rows"], one["ran"]), key
    counts, expected = dict(ours["counts"]), dict(one["counts"])
    if error:
        moved = {b: ours["bins"].get(b, 0) - one["bins"].get(b, 0) for b in ours["bins"]}
        assert sum(map(abs, moved.values())) <= 1e-3 * expected["size"], key
        counts.pop("zeros"), expected.pop("zeros")
    elif not in_parts or expected["size"] <= SAMPLED:
        assert ours["bins"] == one["bins"], key
    else:  # each device samples its own part, and a sample's ranks are off by 1.1 %
        exact = {str(one) for one in (ZERO_BIN, MINUS_ZERO_BIN, UNSEEN_BIN)}  # of all values
        every = sorted({*ours["bins"], *one["bins"]} - exact, key=int)
        ranks = [np.cumsum([x["bins"].get(b, 0) for b in every]) for x in (ours, one)]
        mine, its = (rank / rank[-1] for rank in ranks)
        assert np.abs(mine - its).max() <= 0.022, key
    assert counts == expected, key
    size = one["figures"]["norm"] / math.sqrt(max(one["counts"]["finite"], 1))
    for figure, value in one["figures"].items():
        np.testing.assert_allclose(
            ours["figures"][figure],
            value,
            rtol=max(error, 1e-6),
            atol=max(error, 1e-6) * size,
            err_msg=f"{key} {figure}",
        )


def test_within_shard_map_a_site_has_the_values_of_each_device(quick):
    """The devices hold partial sums: twice as many values, which add up to the whole."""
    case = quick["shard_map, cond"]
    ours, one = case["sharded"]["said"], case["one"]
    part, whole = ours["down 0 output"], one["down 0 output"]
    assert part["counts"]["size"] == 2 * whole["counts"]["size"]
    np.testing.assert_allclose(2 * part["figures"]["mean"], whole["figures"]["mean"], rtol=1e-6)
    given, received = ours["down 0 gradient"], one["down 0 gradient"]
    assert given["bins"] == {b: 2 * n for b, n in received["bins"].items()}
    copies, once = ours["same 0 output"], one["same 0 output"]
    assert copies["counts"] == once["counts"]


@pytest.mark.long
def test_an_unchecked_shard_map_counts_every_devices_copy(rest):
    case = rest["shard_map, unchecked"]
    copies, once = (part["same 0 output"] for part in (case["sharded"]["said"], case["one"]))
    assert copies["bins"] == {b: 2 * n for b, n in once["bins"].items()}
    np.testing.assert_allclose(copies["figures"]["mean"], once["figures"]["mean"], rtol=1e-6)


# ------------------------------------------------------------------------------ samples


@pytest.mark.long
def test_of_a_sample_no_more_is_moved_than_is_examined():
    """The number of examples, positions and units is bounded, however large the array is."""
    most = EXAMPLES * POSITIONS * UNITS
    program = PROGRAM.with_name("sharded_samples.py")
    command = [sys.executable, str(program)]
    where = os.pathsep.join([str(PROGRAM.parents[2]), str(PROGRAM.parent)])
    process = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": where}
    )
    assert process.returncode == 0, process.stderr[-4000:]
    cases = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    assert len(cases) > 10
    for case in cases:
        for moved, limit in zip(case["moved"], (most, 2 * SAMPLE), strict=True):
            for collective in moved:
                assert elements(collective) <= limit, (case["name"], collective)
        for found, alone in zip(case["found"], case["alone"], strict=True):
            np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-5, err_msg=case["name"])
    assert any(moved for case in cases for moved in case["moved"])


# ---------------------------------------------------------------------- two processes


@pytest.mark.long
def test_two_processes_have_the_record_of_one(rest):
    names = ["both"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [start(*names, "--coordinator", address, "--process", str(i)) for i in range(2)]
    try:
        first, second = (said(process, 300) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for name in names:
        a, b = first[name]["sharded"], second[name]["sharded"]
        assert a["whole"]
        assert a["said"] == b["said"]
        for key, expected in rest[name]["one"].items():
            assert_same(a["said"][key], expected, 0.0, key)


# ------------------------------------------------------------------------ reading HLO


def test_collectives_are_found_in_hlo_with_the_larger_of_operand_and_result():
    hlo = """
      %p = f32[8,16]{1,0} parameter(0)
      %gather = f32[32,16]{1,0} all-gather(%p), dimensions={0}
      %both = (u32[4096]{0}, f32[]) all-reduce(%bins, %sum), to_apply=%add
      %bins = u32[4096]{0} fusion(%p), kind=kLoop
      %start = (f32[8,16]{1,0}, f32[32,16]{1,0}) all-gather-start(%p), dimensions={0}
      %done = f32[32,16]{1,0} all-gather-done(%start)
      ROOT %scatter = f32[2,16]{1,0} reduce-scatter(%p), dimensions={0}
    """
    assert collectives(hlo) == {
        "all-gather f32[512]": 2,
        "all-reduce u32[4096]": 1,
        "all-reduce f32[1]": 1,
        "reduce-scatter f32[128]": 1,
    }
