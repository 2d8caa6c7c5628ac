"""One view of an inspector on a page: its texts and buttons, found by `data-testid`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Locator, expect

from nnx_inspector.screen.protocol import QUANTITIES, STATISTICS

GROUPS = {
    "Look": ("overview", "values", "attention", "experts", "words"),
    "Units": ("units", "examples"),
    "Test": ("sweep", "compare", "precision"),
    "Explain": ("attribution", "lens"),
    "Structure": ("flow", "code", "nnx"),
}
"""The group of each panel."""

MENUS = ("nni-menu", "nni-time-menu", "nni-tree-menu", "nni-site-menu", "nni-perturb")
"""The buttons of the menus."""

SIZE = """
(root, [width, height]) => {
  root.style.width = `${width}px`;
  root.querySelector('.nni-view').style.height = `${height}px`;
  return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
}
"""
"""Gives the root of a view a size: [width, height], in pixels."""

SHOWN = tuple(name for name in STATISTICS if name != "seen")
"""The statistics of the table; the histogram says how many values it has seen."""


class View:
    """The root of one view.

    Args:
        place: where it is, for instance a notebook's cell.
    """

    def __init__(self, place: Locator):
        self.root = place.get_by_test_id("nni-root").first
        self.root.wait_for()

    def part(self, testid: str) -> Locator:
        """The first part with this id."""
        return self.root.get_by_test_id(testid).first

    def value(self, testid: str) -> str:
        """A part's `data-value`."""
        value = self.part(testid).get_attribute("data-value")
        assert value is not None, f"{testid} has no data-value"
        return value

    def number(self, testid: str) -> float:
        """A part's `data-value` as a number, all its digits."""
        return float(self.value(testid))

    def wait(self, testid: str, condition: str, arg: Any = None) -> float:
        """Wait until a JavaScript condition on `value` (a number) and `arg` is true; the value."""
        found = self.root.page.wait_for_function(
            "([root, testid, arg]) => {"
            "  const found = root.querySelector(`[data-testid='${testid}']`);"
            "  if (!found) return false;"
            "  const value = Number(found.dataset.value);"
            f" return ({condition}) && {{value}} }}",
            arg=[self.root.element_handle(), testid, arg],
        )
        return found.json_value()["value"]

    def row(self, site: str) -> Locator:
        """A site's row in the tree."""
        return self.root.locator(f"[data-testid='nni-row'][data-site={json.dumps(site)}]")

    def rows(self) -> list[str]:
        """The sites of the rows in view, top to bottom."""
        rows = self.root.get_by_test_id("nni-row")
        by_place = "rows => rows.sort((a, b) => a.getBoundingClientRect().y - " \
            "b.getBoundingClientRect().y).map(row => row.dataset.site)"  # fmt: skip
        return rows.evaluate_all(by_place)

    def select(self, site: str) -> None:
        """Click a row, and wait until the figures on screen are that site's."""
        self.shut()
        self.row(site).click()
        self.wait_selected(site)

    def perturb(self, kind: str, strength: float | None = None, at: str = "output") -> None:
        """Add a perturbation to the selected site, by the menu in the detail."""
        self.open("nni-perturb")
        self.part("nni-perturb-at").get_by_role("button", name=at, exact=True).click()
        if strength is not None:
            self.part(f"nni-add-strength-{kind}").fill(str(strength))
        self.part(f"nni-perturb-{kind}").click()

    def every_panel(self) -> Iterator[str]:
        """Each panel that is offered, shown, with its name."""
        for group in GROUPS:
            if self.root.get_by_test_id(f"nni-group-{group}").count() == 0:
                continue
            self.part(f"nni-group-{group}").click()
            for tab in self.root.get_by_role("tablist").nth(1).get_by_role("tab").all():
                tab.click()
                expect(self.root.locator("[aria-busy=true]")).to_have_count(0)
                yield tab.inner_text()

    def tab(self, panel: str) -> None:
        """Show a panel, by a click on its group and one on its tab."""
        if self.root.get_by_test_id(f"nni-tab-{panel}").count() == 0:
            group = next(name for name, panels in GROUPS.items() if panel in panels)
            self.part(f"nni-group-{group}").click()
        self.part(f"nni-tab-{panel}").click()

    def open(self, testid: str) -> None:
        """Open a menu, or the part behind a button, unless it is open."""
        if self.part(testid).get_attribute("aria-expanded") != "true":
            self.shut()
            self.part(testid).click()
        expect(self.part(testid)).to_have_attribute("aria-expanded", "true")

    def shut(self) -> None:
        """Close the menu that is open, which may cover what is below it."""
        if self.root.locator(".nni-menu-list").count() > 0:
            self.root.page.keyboard.press("Escape")

    def compilations(self) -> int:
        """The count of compilations, in the menu of the top line."""
        self.open("nni-menu")
        found = int(self.number("nni-compilations"))
        self.root.page.keyboard.press("Escape")
        return found

    def pause(self) -> None:
        """Hold the pass on screen, or follow the newest again: by its button, or in the menu."""
        if self.root.get_by_test_id("nni-pause").count() == 0:
            self.open("nni-time-menu")
        self.part("nni-pause").click()
        self.root.page.keyboard.press("Escape")

    def switch_unit(self, unit: int) -> None:
        """Click one of a few units in the strip, after "Edit mask"."""
        strip = self.part("nni-strip")
        strip.click(position={"x": 26 * unit + 13, "y": 15})
        expect(self.part("nni-unit-pointed")).to_have_attribute("data-value", str(unit))
        expect(self.part("nni-units-off")).to_have_attribute("data-value", "1")

    def wait_selected(self, site: str) -> None:
        """Wait until the detail shows a site; in the overview, with its histogram."""
        expect(self.part("nni-selected")).to_have_attribute("data-value", site)
        if self.root.locator("[data-testid=nni-tab-overview][aria-selected=true]").count() == 1:
            self.part("nni-hist-count-output").wait_for()

    def figures(self) -> dict[str, dict[str, str]]:
        """All statistics on screen, at one moment, every digit: quantity -> statistic -> text.

        The columns of values that are not finite are there only if one is not 0.
        """
        texts = self.root.evaluate(
            "(root, [quantities, statistics]) => { const at = (q, s) =>"
            " root.querySelector(`[data-testid='nni-stat-${q}-${s}']`)?.dataset.value;"
            " return quantities.map(q => statistics.map(s =>"
            " at(q, s) ?? (at(q, 'size') === 'NaN' ? 'NaN' : '0'))) }",
            [QUANTITIES, SHOWN],
        )
        figures: dict[str, dict[str, str]] = {}
        for quantity, row in zip(QUANTITIES, texts, strict=True):
            figures[quantity] = {s: text for s, text in zip(SHOWN, row, strict=True)}
        return figures
