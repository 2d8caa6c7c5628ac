"""The tree of a big model in a real Chromium: from its messages to what is painted, by the page's
own clock, without a kernel.

    python -m tests.benchmarks.tree_on_screen [--modules 10000] [--updates 60] [--pages 9]

Prints a table. Not a test: a shared machine's times mean nothing alone. The front end must be
built.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys

from playwright.sync_api import Route, sync_playwright

ROOT = pathlib.Path(__file__).resolve().parents[2]
STATIC = ROOT / "nnx_inspector" / "static"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

from browser.chromium import launch  # noqa: E402 - of the tests, which are no package

PAGE = "http://widget.test/"

SCRIPT = pathlib.Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


def messages(modules: int) -> dict[str, object]:
    """Headers as a kernel sends them: blocks of nine parts, one of which is selected."""
    from nnx_inspector.screen import protocol

    def site(key: str, parent: int, depth: int, kind: str) -> protocol.Site:
        shape = "float32[8,64]"
        return protocol.Site(
            key=key, name=key.rpartition("/")[2], kind=kind, parent=parent, depth=depth,
            inputs=shape, output=shape, parameters=4160, flops=1e6, calls=1, stacked=0, aliases=(),
            source="model.py:1", perturbable=True, unseen="",
        )  # fmt: skip

    sites = [site("", -1, 0, "Net")]
    while len(sites) < modules:
        block, at = f"blocks/{len(sites) // 10}", len(sites)
        sites.append(site(block, 0, 1, "Block"))
        sites += [site(f"{block}/part{k}", at, 2, "Linear") for k in range(9)]
    progress = protocol.Progress(kind="watch", running=True, step=1, total=None, rate=None)
    cost = protocol.Cost(
        plain_seconds=None, inspected_seconds=None, compilations=0, bytes_sent=0, frames_dropped=0,
        errors=0,
    )  # fmt: skip
    state = protocol.State(
        version=protocol.VERSION, seq=1, selected="blocks/1/part3", perturbations=(),
        training_perturbed=False, listening="during", compiling=0, effect=None, no_effect="",
        progress=progress, cost=cost, notices=(), python="", closed=False,
    )  # fmt: skip
    frame = protocol.Frame(
        version=protocol.VERSION, seq=1, layout=1, step=1, perturbed=False, metrics={},
        histograms=(), progress=progress, number=1, held=False,
    )  # fmt: skip
    layout = protocol.Layout(
        version=protocol.VERSION, layout=1, model="Net", sites=tuple(sites[:modules])
    )
    named = {"layout": layout, "state": state, "frame": frame}
    return {name: protocol.to_header(message) for name, message in named.items()}


def measured(modules: int, updates: int, pages: int) -> dict[str, list[float]]:
    """Milliseconds by what was measured."""
    from nnx_inspector.screen.protocol import QUANTITIES, SPARK, STATISTICS

    types = {"widget.js": "text/javascript", "widget.css": "text/css"}
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        # a notebook shows code and headings before any widget: these fonts are there already
        text = (
            '<p style="font: 13px system-ui">In <b>a</b> <code style="font-size: 11px">f32</code>'
        )
        html = f'<!doctype html><link rel="stylesheet" href="/widget.css"><body>{text}'
        files = {name: (STATIC / name).read_text(encoding="utf-8") for name in types}

        def answer(route: Route) -> None:
            name = route.request.url.removeprefix(PAGE)
            kind = types.get(name, "text/html")
            route.fulfill(body=files.get(name, html), content_type=kind)

        page.route(f"{PAGE}**", answer)
        sizes = {"statistics": len(STATISTICS), "quantities": len(QUANTITIES), "spark": SPARK}
        told = {**messages(modules), **sizes}
        firsts: list[float] = []
        times: dict[str, list[float]] = {}
        for _ in range(pages):
            page.goto(PAGE)
            last = len(firsts) == pages - 1
            times = page.evaluate(SCRIPT, {**told, "updates": updates if last else 0})
            firsts += times["first"]
        browser.close()
    return {**times, "first": firsts}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modules", type=int, default=10_000)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--pages", type=int, default=25, help="new pages for the first paint")
    options = parser.parse_args()
    times = measured(options.modules, options.updates, options.pages)
    print(f"{options.modules} modules, milliseconds: least, median, 95th percentile")
    for name, values in times.items():
        high = sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
        print(f"{name:24}{min(values):8.1f}{statistics.median(values):8.1f}{high:8.1f}")


if __name__ == "__main__":
    main()
