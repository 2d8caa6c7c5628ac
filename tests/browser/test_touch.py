"""The screen under a finger: what can be tapped is large enough, and taps reach all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser.lab import Lab
from browser.notebook import Notebook
from browser.test_screen import measure_layout
from browser.view import GROUPS, MENUS, SIZE, View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

MODEL = """
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
import nnx_inspector as nni

class Attends(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(7, 8, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
        self.head = nnx.Linear(8, 7, rngs=rngs)

    def __call__(self, ids):
        return self.head(nnx.relu(self.attn(self.embed(ids))))

ids = np.random.default_rng(0).integers(0, 7, (3, 5))
model = Attends(rngs=nnx.Rngs(0))
insp = nni.Inspector(model, ids)
insp.step(lambda model, ids: (model(ids) ** 2).mean(), ids)
insp.perturb("head", nni.Scale(0.5))
for i in range(4):
    insp.metrics(loss=1 / (1 + i))
insp.selected = "attn"
"""

SMALL = """
root => {
  const controls = 'button, select, input, summary, [role=tab], [role=separator], [role=row][id]';
  const clipping = ['auto', 'scroll', 'hidden', 'clip'];
  const clips = e => clipping.includes(getComputedStyle(e).overflowX);
  const within = (e, x, y) => {
    for (let at = e.parentElement; at && at !== root.parentElement; at = at.parentElement) {
      const box = at.getBoundingClientRect();
      const inside = x >= box.left && x <= box.right && y >= box.top && y <= box.bottom;
      if (clips(at) && !inside) return false;
    }
    return true;
  };
  const place = root.querySelector('.nni-menu-list, .nni-perturb-list') ?? root;
  return [...place.querySelectorAll(controls)].flatMap(e => {
    const all = e.closest('label') ?? e, box = all.getBoundingClientRect();
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    const hidden = e.closest('svg, [aria-hidden=true]');
    const passive = hidden || getComputedStyle(e).pointerEvents === 'none';
    const there = within(e, x - 12, y - 12) && within(e, x + 12, y + 12);
    if (passive || !there || !e.checkVisibility({ opacityProperty: true })) return [];
    const own = at => at && all.contains(at);
    const missed = [[-11, 0], [11, 0], [0, -11], [0, 11]]
      .filter(([dx, dy]) => !own(document.elementFromPoint(x + dx, y + dy)));
    return missed.length ? [`${box.width} x ${box.height} ${e.outerHTML.slice(0, 120)}`] : [];
  });
}
"""
"""The controls in sight, of an open menu alone, that a finger beside their centre misses."""


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Notebook]:
    with lab.notebook("touch.ipynb", [MODEL], width=1200, touch=True) as notebook:
        notebook.evaluate("app.shell.collapseLeft()")
        notebook.run(0, seconds=240)
        notebook.cell(0).get_by_test_id("nni-root").evaluate(
            "root => root.scrollIntoView({ block: 'center' })"
        )
        yield notebook
        assert notebook.errors == []
        assert notebook.foreign == []


@pytest.mark.parametrize("width", [420, 1000])
def test_all_of_it_is_reached_by_taps(notebook: Notebook, width: int):
    page, view = notebook.page, View(notebook.cell(0))
    assert page.evaluate("matchMedia('(pointer: coarse)').matches")
    view.root.evaluate(SIZE, [width, 850])
    view.part("nni-effect").wait_for()
    seen: list[str] = []
    for group, panels in GROUPS.items():
        tab = view.part(f"nni-group-{group}")
        tab.tap()
        expect(tab).to_have_attribute("aria-selected", "true")
        for panel in panels:
            if view.root.get_by_test_id(f"nni-tab-{panel}").count() == 0:
                continue
            view.part(f"nni-tab-{panel}").tap()
            expect(view.part(f"nni-tab-{panel}")).to_have_attribute("aria-selected", "true")
            expect(view.root.locator("[aria-busy=true]")).to_have_count(0)
            assert view.root.evaluate(SMALL) == [], panel
            assert measure_layout(view)["wide"] == [], panel
            seen.append(panel)
    assert {"overview", "values", "attention", "units", "sweep", "attribution", "flow"} <= set(seen)
    for menu in MENUS:
        view.part(menu).tap()
        expect(view.part(menu)).to_have_attribute("aria-expanded", "true")
        assert view.root.evaluate(SMALL) == [], menu
        assert measure_layout(view)["wide"] == [], menu
        view.part(menu).tap()
        expect(view.part(menu)).to_have_attribute("aria-expanded", "false")


def test_a_finger_perturbs_and_switches(notebook: Notebook):
    view = View(notebook.cell(0))
    view.root.evaluate(SIZE, [420, 850])
    view.row("embed").tap()
    view.wait_selected("embed")
    view.part("nni-perturb").tap()
    view.part("nni-perturb-Zero").tap()
    chip = view.root.locator("[data-testid=nni-perturbation][data-site=embed]")
    chip.get_by_test_id("nni-switch").tap()
    expect(chip.get_by_test_id("nni-switch")).to_have_attribute("aria-checked", "false")
    notebook.ask_until("[h.enabled for h in insp.perturbations if h.site == 'embed']", [False])
    notebook.ask("[h.remove() for h in insp.perturbations if h.site == 'embed']")
    expect(chip).to_have_count(0)
