"""Two runs side by side in a real JupyterLab: the screen shows the figures of `nni.compare`."""

from __future__ import annotations

import pytest
from browser.lab import Sheet
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

RUNS = """
import jax, jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni

class Net(nnx.Module):
    def __init__(self, rngs, width=16):
        self.first = nnx.Linear(8, width, rngs=rngs)
        self.middle = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.tanh(self.middle(nnx.relu(self.first(x)))))

def loss(model, x):
    return (model(x) ** 2).mean()

x = jax.random.normal(jax.random.key(1), (64, 8))
other = nni.Inspector(Net(nnx.Rngs(7)), x, display=False)
other.step(loss, x)
other.recording.save("other.nni")
other.close()
insp = nni.Inspector(Net(nnx.Rngs(0)), x)
insp.step(loss, x)
"""


FRAME = "query(\"quantity == 'output'\")[['site', 'total_variation', 'quantile_distance']]"


def ranking(view: View) -> list[list[object]]:
    """Site, total variation and distance of each row, as shown."""
    rows = view.root.get_by_test_id("nni-compare-row").all()
    figures = [
        [float(row.get_attribute(f"data-{n}") or "nan") for n in ("value", "distance")]
        for row in rows
    ]
    return [
        [row.get_attribute("data-site"), *each] for row, each in zip(rows, figures, strict=True)
    ]


def test_another_run_out_of_a_file(sheet: Sheet):
    with sheet([RUNS]) as notebook:
        notebook.run(0, seconds=180)
        view = View(notebook.cell(0))
        view.wait_selected("")
        wanted = notebook.ask(f"insp.compare(nni.load('other.nni')).{FRAME}.values.tolist()")

        # it is pinned, under its file's name, and the sites are ranked as in the frame
        expect(view.part("nni-pinned")).to_have_text("◇ other.nni, step 0")
        expect(view.part("nni-compare-state")).to_have_attribute("data-state", "now")
        assert ranking(view) == wanted

        # a click selects; the other run's figures stand beside this one's
        view.part("nni-compare-row").get_by_role("button").click()
        site = str(wanted[0][0])
        view.wait_selected(site)
        view.tab("overview")
        mean = notebook.ask(f"nni.load('other.nni').summary({site!r}).mean")
        view.wait("nni-stat-pinned-output-mean", "value === arg", mean)
        mean = notebook.ask(f"insp.recording.summary({site!r}).mean")
        assert view.number("nni-stat-output-mean") == mean
        expect(view.part("nni-behind-output")).to_be_attached()

        # the run goes on: the ranking says of which step it is, until it is asked for again
        view.tab("compare")
        notebook.ask("insp.run(2 * x).shape")
        expect(view.part("nni-compare-state")).to_have_attribute("data-state", "before")
        assert ranking(view) == wanted
        view.part("nni-compare-again").click()
        expect(view.part("nni-compare-state")).to_have_attribute("data-state", "now")
        compared = f"nni.compare(nni.load('other.nni'), insp.recording).{FRAME}"
        assert ranking(view) == notebook.ask(f"{compared}.values.tolist()") != wanted

        # taken away again
        notebook.ask("insp.compare(None)")
        expect(view.part("nni-pinned")).to_have_text("")
        expect(view.part("nni-compare-row")).to_have_count(0)

        # the weights: the panel opens by itself, and ranks the arrays as the frame does
        view.tab("overview")
        notebook.ask("insp.model.head.kernel.set_value(3 * insp.model.head.kernel[...])")
        columns = "[['parameter', 'relative_change', 'distance']].values.tolist()"
        moved = notebook.ask(f"insp.compare(Net(nnx.Rngs(0)), name='the start'){columns}")
        assert moved[0][:2] == ["head/kernel", pytest.approx(2.0)]
        expect(view.part("nni-weight-row")).to_have_attribute("data-site", "head/kernel")
        shown = view.root.get_by_test_id("nni-weight-row").all()
        figures = [
            [row.get_attribute(f"data-{n}") for n in ("site", "value", "distance")] for row in shown
        ]
        assert [[one, float(a), float(b)] for one, a, b in figures] == moved
        shown[0].get_by_role("button").click()
        view.wait_selected("head")
