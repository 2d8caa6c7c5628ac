"""Every public function on a mesh whose axes are automatic, explicit or manual: the figures are
those of one device.

`meshes.py` tries the functions in a process with as many devices as asked for.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).parents[1].joinpath("helpers", "meshes.py")

QUICK = ["essentials"]
SOME = [
    "essentials", "value_and_grad", "perturb", "attribute", "sweep", "top_examples", "watch",
    "inspector_watch", "inspector_values",
]  # fmt: skip
OF_TEXT = [
    "bare", "operations", "trace", "lens", "logit_attribution", "attribute", "sweep",
    "inspector_words", "inspector_values", "inspector_studies",
]  # fmt: skip
WITHIN = [
    "essentials", "capture", "first_nan", "perturbed", "sweep", "attribute", "inspector_watch",
    "inspector_region", "inspector_effect", "inspector_sweep", "inspector_units",
    "inspector_studies",
]  # fmt: skip
EVERYTHING = [
    "bare", "capture", "capture_of_values", "capture_eagerly", "value_and_grad",
    "value_and_grad_eagerly", "operations", "trace", "first_nan", "diagnose", "perturb",
    "perturbed", "perturbed_eagerly", "perturbed_mapped", "intercept_methods", "sweep",
    "attribute", "top_examples", "summaries", "compare_weights", "watch", "inspector_watch",
    "inspector_watch_perturbed", "inspector_region", "inspector_ticks", "inspector_run",
    "inspector_values", "inspector_units", "inspector_sweep", "inspector_effect",
    "inspector_studies", "inspector_files", "inspector_of_a_function",
]  # fmt: skip
LONG: list[tuple[str, int, list[str]]] = [
    ("mlp, explicit, both", 8, EVERYTHING),
    ("mlp, explicit, data", 4, SOME),
    ("mlp, explicit, tensor", 8, SOME),
    ("mlp, explicit, no mesh is current", 8, SOME),
    ("mlp, auto, both", 8, SOME),
    ("mlp, auto, data", 4, SOME),
    ("text, explicit, both", 8, OF_TEXT),
    ("text, explicit, tensor", 4, OF_TEXT),
    ("text, auto, both", 8, OF_TEXT),
    ("manual, explicit, both", 8, WITHIN),
    ("manual, auto, both", 4, WITHIN),
]


def run(setup: str, devices: int, functions: list[str]) -> list[dict]:
    command = [sys.executable, str(PROGRAM), setup, "--devices", str(devices), "--functions"]
    where = os.pathsep.join([str(PROGRAM.parents[2]), str(PROGRAM.parent)])
    process = subprocess.run(
        [*command, *functions],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": where},
    )
    assert process.returncode == 0, process.stderr[-4000:]
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    assert [line["function"] for line in lines] == functions
    return lines


def assert_those_of_one_device(lines: list[dict]) -> None:
    for line in lines:
        assert line["errors"] == {}, line["function"]
        assert line["differences"] == {}, line["function"]
        assert line["figures"] > 0, line["function"]


def test_explicit_axes_in_short():
    assert_those_of_one_device(run("mlp, explicit, both", 8, QUICK))


@pytest.mark.long
@pytest.mark.parametrize(("setup", "devices", "functions"), LONG, ids=lambda x: str(x)[:32])
def test_each_function(setup: str, devices: int, functions: list[str]):
    assert_those_of_one_device(run(setup, devices, functions))
