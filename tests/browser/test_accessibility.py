"""Accessibility for people with low vision, a screen reader, or only a keyboard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser.axe import violations
from browser.lab import Sheet
from browser.notebook import Notebook
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

MODEL = """
import jax, jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni

class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)
        self.tied = self.head

    def __call__(self, x):
        return self.tied(self.drop(nnx.relu(self.norm(self.conv(x)))).mean((1, 2)))

x = jax.random.normal(jax.random.key(0), (8, 6, 6, 1))
insp = nni.Inspector(Net(nnx.Rngs(0)), x)
"""
BUSY = """
insp.step(lambda m, x: ((m(x) ** 2).mean(), {"accuracy": 0.5}), x)
insp.perturb("conv", nni.Noise(0.5)); insp.perturb("norm", nni.Zero()).enabled = False
insp.modes.eval("drop"); insp.metrics(loss=1.0); insp.metrics(loss=0.5)
insp.compare(nni.capture(insp.model)(2 * x)[1], name="twice the input")
insp.selected = "norm"
"""


@pytest.fixture(scope="module")
def notebook(sheet: Sheet) -> Iterator[Notebook]:
    with sheet([MODEL, BUSY]) as notebook:
        notebook.evaluate("app.shell.collapseLeft()")
        notebook.run(0, seconds=240)
        notebook.run(1, seconds=240)
        yield notebook


def test_axe_finds_nothing_serious(notebook: Notebook):
    """Every panel, both themes, both widths."""
    view = View(notebook.cell(0))
    view.wait_selected("norm")
    found: list[str] = []
    for width in (1400, 600):
        notebook.page.set_viewport_size({"width": width, "height": 1000})
        for dark in (False, True):
            notebook.theme(dark=dark)
            groups = view.root.get_by_role("tablist").first.get_by_role("tab")
            for group in groups.all():
                group.click()
                tabs = view.root.get_by_role("tablist").nth(1).get_by_role("tab")
                for i in range(tabs.count()):
                    tabs.nth(i).click()
                    expect(tabs.nth(i)).to_have_attribute("aria-selected", "true")
                    expect(view.root.locator("[aria-busy=true]")).to_have_count(0)
                    where = f"{width} px, {'dark' if dark else 'light'}, {tabs.nth(i).inner_text()}"
                    found += [f"{where}: {v}" for v in violations(notebook.page, view.root)]
            menus = ("nni-menu", "nni-time-menu", "nni-tree-menu", "nni-perturb", "nni-site-menu")
            for menu in menus:
                view.open(menu)
                where = f"{width} px, {'dark' if dark else 'light'}, {menu}"
                found += [f"{where}: {v}" for v in violations(notebook.page, view.root)]
                notebook.page.keyboard.press("Escape")
    assert not found, "\n".join(found)


def test_by_keyboard_alone(notebook: Notebook):
    """Select, look at the panel of NNX, switch a mode, add and switch off a perturbation."""
    page = notebook.page
    page.set_viewport_size({"width": 1400, "height": 1000})
    view = View(notebook.cell(0))
    view.part("nni-tree").focus()
    page.keyboard.press("Home")
    view.wait_selected("")
    page.keyboard.press("/")
    expect(view.part("nni-search")).to_be_focused()
    page.keyboard.type("drop")
    page.keyboard.press("Enter")
    view.wait_selected("drop")
    page.keyboard.press("/")
    page.keyboard.press("Escape")

    def tab_to(testid: str, inner: str = "") -> None:
        """Tab until the focus is on a part, which must be possible, and visible."""
        target = f"[data-testid='{testid}']{inner}"
        for _ in range(80):
            if page.evaluate("t => document.activeElement.matches(t)", target):
                break
            page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert page.evaluate("t => document.activeElement.matches(t)", target), testid
        assert outline != "none", f"the focus on {testid} cannot be seen"

    tab_to("nni-perturb")
    page.keyboard.press("Enter")
    expect(view.part("nni-perturb-Zero")).to_be_focused()
    page.keyboard.press("Enter")
    expect(view.root.locator("[data-testid=nni-perturbation][data-site=drop]")).to_have_count(1)
    page.keyboard.press("5")  # the group Structure
    expect(view.part("nni-group-Structure")).to_have_attribute("aria-selected", "true")
    tab_to("nni-group-Structure")
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    expect(view.part("nni-tab-nnx")).to_have_attribute("aria-selected", "true")
    view.part("nni-nnx-mode").wait_for()
    tab_to("nni-nnx-mode", " [role=switch]")
    page.keyboard.press("Space")
    switch = view.part("nni-nnx-mode").get_by_role("switch")
    expect(switch).to_have_attribute("aria-checked", "false")
    assert notebook.ask("insp.modes['drop']['deterministic']") is False
    assert notebook.ask("insp.model.drop.deterministic") is False
    assert notebook.ask("[h.site for h in insp.perturbations]") == ["conv", "norm", "drop"]


def test_nothing_moves_for_who_asked_for_that(notebook: Notebook):
    view = View(notebook.cell(0))
    moving = """
        root => [...root.querySelectorAll('*')].filter(e => [undefined, '::before'].some(part => {
            const s = getComputedStyle(e, part);
            const slides = s.transitionDuration.split(',').some(d => parseFloat(d) > 0.01);
            return slides || (s.animationName !== 'none' && parseFloat(s.animationDuration) > 0.01);
        })).map(e => e.className)
    """
    assert view.root.evaluate(moving) != [], "switches slide otherwise: the test sees motion"
    notebook.page.emulate_media(reduced_motion="reduce")
    assert view.root.evaluate(moving) == []
    notebook.page.emulate_media(reduced_motion="no-preference")
