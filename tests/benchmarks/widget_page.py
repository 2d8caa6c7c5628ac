"""The widget on a page of its own in a real Chromium, without a kernel, for programs that time what
it draws: its messages come from them, made by the protocol. `widget_page.js` is the part on the
page. The front end must be built.
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence

from playwright.sync_api import Page, Route, sync_playwright

ROOT = pathlib.Path(__file__).resolve().parents[2]
STATIC = ROOT / "nnx_inspector" / "static"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

from browser.chromium import launch  # noqa: E402 - of the tests, which are no package

from nnx_inspector.screen import protocol  # noqa: E402

PAGE = "http://widget.test/"
SCRIPT = pathlib.Path(__file__).with_suffix(".js").read_text(encoding="utf-8")

Site = protocol.Site


@contextlib.contextmanager
def open_page() -> Iterator[Page]:
    """A page that has the widget's files; `page.goto(PAGE)` begins anew."""
    types = {"widget.js": "text/javascript", "widget.css": "text/css"}
    # a notebook shows code and headings before any widget: these fonts are there already
    text = '<p style="font: 13px system-ui">In <b>a</b> <code style="font-size: 11px">f32</code>'
    html = f'<!doctype html><link rel="stylesheet" href="/widget.css"><body>{text}'
    files = {name: (STATIC / name).read_text(encoding="utf-8") for name in types}

    def answer(route: Route) -> None:
        name = route.request.url.removeprefix(PAGE)
        kind = types.get(name, "text/html")
        route.fulfill(body=files.get(name, html), content_type=kind)

    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.add_init_script(SCRIPT)
        page.route(f"{PAGE}**", answer)
        yield page
        browser.close()


def site(key: str, parent: int, depth: int, kind: str, shape: str = "float32[8,64]") -> Site:
    """A module of the tree, with a child's usual facts."""
    return protocol.Site(
        key=key, name=key.rpartition("/")[2], kind=kind, parent=parent, depth=depth,
        inputs=shape, output=shape, parameters=4160, flops=1e6, calls=1, stacked=0, aliases=(),
        source="model.py:1", perturbable=True, unseen="",
    )  # fmt: skip


def messages(sites: Sequence[Site], selected: str) -> dict[str, object]:
    """The headers of layout, state and frame, as a kernel sends them."""
    progress = protocol.Progress(kind="watch", running=True, step=1, total=None, rate=None)
    cost = protocol.Cost(
        plain_seconds=None, inspected_seconds=None, compilations=0, bytes_sent=0, frames_dropped=0,
        errors=0,
    )  # fmt: skip
    state = protocol.State(
        version=protocol.VERSION, seq=1, selected=selected, perturbations=(),
        training_perturbed=False, listening="during", compiling=0, effect=None, no_effect="",
        progress=progress, cost=cost, notices=(), python="", closed=False,
    )  # fmt: skip
    frame = protocol.Frame(
        version=protocol.VERSION, seq=1, layout=1, step=1, perturbed=False, metrics={},
        histograms=(), parameters=(), more=0, progress=progress, number=1, held=False,
    )  # fmt: skip
    layout = protocol.Layout(version=protocol.VERSION, layout=1, model="Net", sites=tuple(sites))
    named = {"layout": layout, "state": state, "frame": frame}
    return {name: protocol.to_header(message) for name, message in named.items()}


def print_table(times: Mapping[str, Sequence[float]]) -> None:
    """Least, median and 95th percentile of each."""
    for name, values in times.items():
        high = sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
        print(f"{name:40}{min(values):8.1f}{statistics.median(values):8.1f}{high:8.1f}")
