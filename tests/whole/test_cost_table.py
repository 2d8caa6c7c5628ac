"""The command that prints the cost table runs, and each of its rows has figures."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.benchmarks import cost
from tests.benchmarks.kernels import kernels

OPTIMISED = """HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[]}

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%p, %p)
}

add.2 (a: f32[], b: f32[]) -> f32[] {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %again = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %again)
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %many = s32[] constant(8)
  ROOT %less = pred[] compare(%i, %many), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %x)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body
  %last = f32[8]{0} get-tuple-element(%loop), index=1
  %call = (f32[8]{0}, /*index=1*/s8[4]{0}) custom-call(%last), custom_call_target="gemm"
  %y = f32[8]{0} get-tuple-element(%call), index=0
  %none = f32[] constant(0)
  ROOT %total = f32[] reduce(%y, %none), dimensions={0}, to_apply=add.2
}
"""


def test_kernels_are_counted_where_they_are_launched() -> None:
    # one in the body, one in the condition, and two in the main program
    assert kernels(OPTIMISED) == 4


def test_kernels_of_a_program_that_xla_made_here() -> None:
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU's library may want more than one
        one = jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile()
    assert kernels(one.as_text()) == 1


def test_a_section_replaces_that_of_its_machine_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(cost, "PAGE", page)
    page.write_text("# What\n\n## On a CPU\n\nold\n\n### a\n\n## What was tried\n\nmuch\n")
    cost.write(["## On a GPU\n", "### b\n"])
    cost.write(["## On a CPU\n", "new\n"])
    titles = [line for line in page.read_text().splitlines() if line]
    assert titles == [
        *("# What", "## On a CPU", "new", "## On a GPU", "### b", "## What was tried", "much")
    ]


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
        if len(cells) == 11
    }
    for label in ("ours", "ours, forward", "nnx.capture, all returned"):
        _, time, first, compiling, kernels, memory, result, machine = rows[label]
        assert float(time.removesuffix("x")) > 0
        assert float(first.removesuffix("x")) > 0
        assert int(kernels) > 1
        assert machine.startswith(f"{os.cpu_count()} cores of ")
        assert float(compiling.removesuffix("x")) > 0
        assert float(memory.removesuffix("x")) > 1
        assert result.endswith(" MB")
    # summaries of 8 numbers are larger than they are: three layers and their gradients
    assert rows["ours"][6] > rows["ours, forward"][6] > rows["nnx.capture, all returned"][6]
    assert rows["capture_intermediates, all returned"][1].endswith("x")
    bare = rows["train step"]
    assert [*bare[1:4], *bare[5:7]] == ["1.00x", "1.00x", "1.00x", "1.00x", "-"]
    assert "PyTorch" in run.stdout  # its rows, or a line that says it is not installed
