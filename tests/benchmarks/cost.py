"""The cost of seeing every activation and gradient, beside other tools; one table per model.

    python -m tests.benchmarks.cost [--write] [--rounds N] [--only TEXT] [--rows TEXT] [--tiny]

Runs on whatever jax finds first: an accelerator, or the CPU (`JAX_PLATFORMS=cpu`). Within a
framework the rows take turns, so that other load affects all; times are medians. `--write` puts the
tables into their section of notebooks/benchmarks.md and keeps all other text. The rows of
PyTorch and torchlens need the `bench` extra. Not a test.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import time

import jax

from tests.benchmarks.cost_jax import Case, Row, linen_rows, nnx_rows
from tests.benchmarks.machine import device, machine

PAGE = pathlib.Path(__file__).parents[2] / "notebooks" / "benchmarks.md"
BELOW = "## What was tried"
CASES = [
    Case("transformer, 4 layers, d=128", "Transformer", (128, 4, 256), (8, 128), 256),
    Case("transformer, 4 layers, d=512", "Transformer", (512, 4, 256), (4, 128), 256),
    Case("transformer, 48 layers scanned, d=64", "Transformer", (64, 48, 256), (4, 64), 256, True),
    Case("ResNet, 6 blocks", "ResNet", (16, 3, 2), (32, 32, 32, 3)),
    Case("MLP, 5 layers, d=1024", "MLP", (1024, 5), (256, 1024)),
]
LARGE = [
    Case("medium: transformer, 8 layers, d=1024, bfloat16", "Transformer", (1024, 8, 32_000),
         (16, 512), 32_000, half=True),
    Case("small: transformer, 4 layers, d=512", "Transformer", (512, 4, 32_000), (8, 128), 32_000),
]  # fmt: skip
"""Run on accelerators only."""
TINY = [
    Case("transformer, tiny", "Transformer", (8, 1, 16), (2, 4), 16),
    Case("MLP, tiny", "MLP", (8, 2), (4, 8)),
]


def other_rows(case: Case) -> tuple[list[Row], list[Row], str]:
    """The rows of PyTorch, those of torchlens, and what to say where they are not installed."""
    rows: list[Row] = []
    try:
        from tests.benchmarks import cost_torch

        rows = cost_torch.rows(case)
        return rows, cost_torch.torchlens_rows(case), ""
    except ImportError as error:
        return rows, [], f"Not installed: {error.name}."


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
        "| | ms | time | first call | compile | kernels | memory | result | machine |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        base = by_label[row.against]
        bare = base is row
        ms = f"{1e3 * statistics.median(row.times):.1f}" if row.times else "-"
        cells = [f"**{row.label}**" if bare else row.label, ms]
        cells.append(_ratio(_median(row), _median(base)))
        cells.append(_ratio(row.first_s, base.first_s))
        cells.append(_ratio(row.compile_s, base.compile_s))
        cells.append("-" if row.kernels is None else f"{row.kernels}")
        cells.append(_ratio(row.memory, base.memory))
        cells.append("-" if bare or row.result is None else f"{row.result / 1e6:.2f} MB")
        cells.append(row.machine or device())
        out.append(f"| {' | '.join(cells)} |")
    return out


def _median(row: Row) -> float | None:
    return statistics.median(row.times) if row.times else None


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base:.2f}x"


SECTION = """## {title}

Taken by `python -m tests.benchmarks.cost --write` on {machine}; medians of {rounds} rounds, load
{load:.1f} when it was written.
"""


def main() -> None:
    """Print the tables, and write them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=7, help="at least 3")
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--rows", default="", help="only bare steps, rows whose label holds this")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that it runs")
    options = parser.parse_args()
    rounds = max(options.rounds, 3)
    jax.config.update("jax_enable_compilation_cache", False)  # a program read from disk is not made
    load = os.getloadavg()[0]
    on_cpu = jax.default_backend() == "cpu"
    title = "On a CPU" if on_cpu else f"On a {jax.default_backend().upper()}"
    page = [SECTION.format(title=title, machine=machine(), rounds=rounds, load=load)]
    print(page[0])
    for case in TINY if options.tiny else CASES if on_cpu else [*LARGE, *CASES]:
        if options.only not in case.name:
            continue
        chosen = options.rows
        torch_rows, lens_rows, missing = other_rows(case)
        linen = [] if chosen else linen_rows(case)
        groups = [[*nnx_rows(case, chosen), *linen], torch_rows, lens_rows * (not chosen)]
        for group in groups:  # PyTorch's threads spin for a while and would slow the next row
            take_turns(group, rounds)
        rows = [row for group in groups for row in group]
        lines = [f"### {case.name}", "", *table(rows), "", missing]
        print("\n".join(lines), flush=True)
        page.append("\n".join(lines).rstrip() + "\n")
        if options.write:
            write(page)


def write(section: list[str]) -> None:
    """Put the tables in place of those of the same kind of machine, or above what was tried."""
    heading, old = section[0].partition("\n")[0] + "\n", PAGE.read_text()
    start = old.find(heading)
    start = old.index(BELOW) if start < 0 else start
    end = start if old.startswith(BELOW, start) else old.index("\n## ", start) + 1
    PAGE.write_text(old[:start] + "\n".join(section) + "\n" + old[end:])


if __name__ == "__main__":
    main()
