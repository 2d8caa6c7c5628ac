"""The tree of a big model in a real Chromium: from its messages to what is painted, by the page's
own clock, without a kernel.

    python -m tests.benchmarks.tree_on_screen [--modules 10000] [--updates 60] [--pages 9]

Prints a table. Not a test: a shared machine's times mean nothing alone. The front end must be
built.
"""

from __future__ import annotations

import argparse
import pathlib

from nnx_inspector.screen.protocol import QUANTITIES, ROW_STATS, SPARK, STATISTICS
from tests.benchmarks.widget_page import PAGE, Site, messages, open_page, print_table, site

SCRIPT = pathlib.Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


def sites_of(modules: int) -> list[Site]:
    """Blocks of nine parts."""
    sites = [site("", -1, 0, "Net")]
    while len(sites) < modules:
        block, at = f"blocks/{len(sites) // 10}", len(sites)
        sites.append(site(block, 0, 1, "Block"))
        sites += [site(f"{block}/part{k}", at, 2, "Linear") for k in range(9)]
    return sites[:modules]


def measured(modules: int, updates: int, pages: int) -> dict[str, list[float]]:
    """Milliseconds by what was measured."""
    sizes = {"statistics": len(STATISTICS), "quantities": len(QUANTITIES), "spark": SPARK}
    sizes["figures"] = len(ROW_STATS)
    told = {**messages(sites_of(modules), "blocks/1/part3"), **sizes}
    firsts: list[float] = []
    times: dict[str, list[float]] = {}
    with open_page() as page:
        for number in range(pages):
            page.goto(PAGE)
            last = number == pages - 1
            times = page.evaluate(SCRIPT, {**told, "updates": updates if last else 0})
            firsts += times["first"]
    return {**times, "first": firsts}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modules", type=int, default=10_000)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--pages", type=int, default=25, help="new pages for the first paint")
    options = parser.parse_args()
    times = measured(options.modules, options.updates, options.pages)
    print(f"{options.modules} modules, milliseconds: least, median, 95th percentile")
    print_table(times)


if __name__ == "__main__":
    main()
