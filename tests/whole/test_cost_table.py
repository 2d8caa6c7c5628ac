"""The command that prints the cost table runs, and each of its rows has figures."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.long
def test_the_table_is_printed() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.cost", "--tiny", "--only=MLP", "--rounds=3"],
        cwd=pathlib.Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = {
        cells[1].strip(" *"): [c.strip() for c in cells[2:-1]]
        for cells in (line.split("|") for line in run.stdout.splitlines())
        if len(cells) == 8
    }
    for label in ("ours", "ours, forward", "nnx.capture, all returned"):
        _, time, compiling, memory, result = rows[label]
        assert float(time.removesuffix("x")) > 0
        assert float(compiling.removesuffix("x")) > 0
        assert float(memory.removesuffix("x")) > 1
        assert result.endswith(" MB")
    # summaries of 8 numbers are larger than they are: three layers and their gradients
    assert rows["ours"][4] > rows["ours, forward"][4] > rows["nnx.capture, all returned"][4]
    assert rows["capture_intermediates, all returned"][1].endswith("x")
    assert rows["train step"][1:] == ["1.00x", "1.00x", "1.00x", "-"]
    assert "PyTorch" in run.stdout  # its rows, or a line that says it is not installed
