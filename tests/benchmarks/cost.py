"""The cost of seeing every activation and gradient, beside other tools; one table per model.

    JAX_PLATFORMS=cpu python -m tests.benchmarks.cost [--write] [--rounds N] [--only TEXT] [--tiny]

Within a framework the rows take turns, so that other load affects all; times are medians.
`--write` puts the tables into notebooks/benchmarks.md and keeps the text below them. The rows of
PyTorch and torchlens need the `bench` extra. Not a test.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import platform
import re
import statistics
import time

import jax

from tests.benchmarks.cost_jax import Case, Row, linen_rows, nnx_rows

PAGE = pathlib.Path(__file__).parents[2] / "notebooks" / "benchmarks.md"
BELOW = "## What was tried"
CASES = [
    Case("transformer, 4 layers, d=128", "Transformer", (128, 4, 256), (8, 128), 256),
    Case("transformer, 4 layers, d=512", "Transformer", (512, 4, 256), (4, 128), 256),
    Case("transformer, 48 layers scanned, d=64", "Transformer", (64, 48, 256), (4, 64), 256, True),
    Case("ResNet, 6 blocks", "ResNet", (16, 3, 2), (32, 32, 32, 3)),
    Case("MLP, 5 layers, d=1024", "MLP", (1024, 5), (256, 1024)),
]
TINY = [
    Case("transformer, tiny", "Transformer", (8, 1, 16), (2, 4), 16),
    Case("MLP, tiny", "MLP", (8, 2), (4, 8)),
]


def other_rows(case: Case) -> tuple[list[Row], list[Row], str]:
    """The rows of PyTorch, those of torchlens, and what to say where they are not installed."""
    try:
        from tests.benchmarks import cost_torch
    except ImportError as error:
        return [], [], f"PyTorch and torchlens: not installed ({error.name})."
    return cost_torch.rows(case), cost_torch.torchlens_rows(case), ""


def take_turns(rows: list[Row], rounds: int) -> None:
    """Time each row once per round, a loop of many steps in every third; round 0 does not count."""
    for number in range(rounds + 1):
        for row in rows:
            if row.steps == 1 or (row.steps and number % 3 == 0):
                began = time.perf_counter()
                row.call()
                if number:
                    row.times.append((time.perf_counter() - began) / row.steps)


def table(rows: list[Row]) -> list[str]:
    """Markdown: ratios to the row that each is measured against."""
    by_label = {row.label: row for row in rows}
    out = [
        "| | ms | time | compile | memory | result |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        base = by_label[row.against]
        bare = base is row
        ms = f"{1e3 * statistics.median(row.times):.1f}" if row.times else "-"
        cells = [f"**{row.label}**" if bare else row.label, ms]
        cells.append(_ratio(_median(row), _median(base)))
        cells.append(_ratio(row.compile_s, base.compile_s))
        cells.append(_ratio(row.memory, base.memory))
        cells.append("-" if bare or row.result is None else f"{row.result / 1e6:.2f} MB")
        out.append(f"| {' | '.join(cells)} |")
    return out


def _median(row: Row) -> float | None:
    return statistics.median(row.times) if row.times else None


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}x"


def machine() -> str:
    """The machine by its cores, its processor and the versions; no name, no path."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(r"model name\s*: (.*)", cpuinfo.read_text())
        model = named[1] if named else model
    versions = []
    for name in ("jax", "flax", "numpy", "torch", "torchlens"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    device = jax.devices()[0]
    kind = "" if device.platform == "cpu" else f" and {device.device_kind}"
    return (
        f"{os.cpu_count()} cores of {model}{kind}, Python {platform.python_version()}, "
        f"{', '.join(versions)}"
    )


HEAD = """# What it costs

Written by `python -m tests.benchmarks.cost --write` on {machine}; medians of {rounds} rounds in
which the rows of a framework take turns, batch and sizes as in `tests/benchmarks/cost.py`. Ratios
are to the bold row above, of the same framework; the milliseconds are those of a shared machine and
mean nothing alone (load {load:.1f} on {cores} cores when it was written).

*time*: one step, dispatch included. *compile*: CPU time of tracing, lowering and compiling.
*memory*: the compiled program's temporaries and outputs (`compiled.memory_analysis()`); PyTorch
has no such figure. *result*: bytes returned besides what the bare step returns. "ours" is
`nni.value_and_grad` (all activations and their gradients) and `nni.capture` (forward) inside the
user's own `nnx.jit`, with inputs as well unless it says otherwise.
"""


def main() -> None:
    """Print the tables, and write them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=7, help="at least 3")
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that it runs")
    options = parser.parse_args()
    rounds = max(options.rounds, 3)
    load = os.getloadavg()[0]
    page = [HEAD.format(machine=machine(), rounds=rounds, load=load, cores=os.cpu_count())]
    print(page[0])
    for case in TINY if options.tiny else CASES:
        if options.only not in case.name:
            continue
        torch_rows, lens_rows, missing = other_rows(case)
        groups = [[*nnx_rows(case), *linen_rows(case)], torch_rows, lens_rows]
        for group in groups:  # PyTorch's threads spin for a while and would slow the next row
            take_turns(group, rounds)
        rows = [row for group in groups for row in group]
        lines = [f"## {case.name}", "", *table(rows), "", missing]
        print("\n".join(lines), flush=True)
        page.append("\n".join(lines).rstrip() + "\n")
        if options.write:
            write(page)


def write(page: list[str]) -> None:
    """Put the tables on top of what stands below them."""
    old = PAGE.read_text() if PAGE.exists() else ""
    kept = old[old.index(BELOW) :] if BELOW in old else ""
    PAGE.write_text("\n".join(page) + ("\n" + kept if kept else ""))


if __name__ == "__main__":
    main()
