"""The quickstart notebook in a real JupyterLab: the screen shows the kernel's figures."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from browser.axe import violations
from browser.lab import Lab
from browser.notebook import COMPILATIONS, Notebook
from browser.view import View
from package.test_notebooks import FINDINGS, check_and_keep
from playwright.sync_api import Locator, expect

from nnx_inspector.screen.protocol import QUANTITIES, STATISTICS

pytestmark = pytest.mark.browser

NOTEBOOK = pathlib.Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"
MODEL, INSPECTOR, TRAIN, STEP, PERTURB, RESTORE = 1, 3, 6, 8, 10, 12
"""Numbers of cells of the notebook."""
SITES = ("conv1", "block1/norm", "block2/conv", "head")

LOOP = """
import itertools, pathlib, time

traces = 0

@nnx.jit
def counted_step(model, optimizer, batch):
    global traces
    traces += 1
    (loss, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    optimizer.update(model, grads)
    return loss, aux


class UntilStopped:
    '''A hundred thousand batches, or as many as there are until the file `stop` appears.'''

    def __init__(self):
        self.batches = list(batches(epochs=1))

    def __len__(self):
        return 100_000

    def __iter__(self):
        end = time.monotonic() + 240
        for batch in itertools.islice(itertools.cycle(self.batches), len(self)):
            if pathlib.Path("stop").exists() or time.monotonic() > end:
                return
            yield batch
"""

TRAIN_UNTIL_STOPPED = """
seen = []  # of each step: what was switched on when it began, compilations and traces so far
for batch in insp.watch(UntilStopped(), every=1):
    on = any(handle.enabled for handle in insp.perturbations)
    loss, aux = counted_step(model, optimizer, batch)
    insp.metrics(loss=loss, accuracy=aux["accuracy"])
    seen.append((on, insp._core.meter.compilations.count, traces))
"""

FIGURES = """{
    q: {s: repr(float(getattr(insp.recording.summary(%r, q), s))) for s in %r}
    | {"finite": insp.recording.summary(%r, q).finite} for q in ("output", "gradient")
}"""


@dataclasses.dataclass
class Story:
    """The quickstart, run from the first cell to the last, and its states in between."""

    notebook: Notebook
    trained: dict[str, str | None] = dataclasses.field(default_factory=dict)
    compilations: list[int] = dataclasses.field(default_factory=list)
    executed: Any = None
    findings: dict[str, list[str]] = dataclasses.field(default_factory=dict)


@pytest.fixture(scope="module")
def story(lab: Lab) -> Iterator[Story]:
    """Tests leave it as they found it."""
    shutil.copyfile(NOTEBOOK, lab.root / NOTEBOOK.name)
    with lab.notebook(NOTEBOOK.name) as notebook:
        story = Story(notebook)
        for index in range(notebook.count()):
            notebook.run(index, seconds=180)
            if index == TRAIN:
                view = View(notebook.cell(INSPECTOR))
                progress = view.part("nni-progress")
                expect(progress).to_have_attribute("data-state", "finished")
                total = progress.get_by_role("progressbar").get_attribute("aria-valuemax")
                story.trained = {"steps": view.value("nni-progress"), "total": total}
            if index in (STEP, PERTURB):
                story.compilations.append(notebook.ask(COMPILATIONS))
        story.findings = notebook.ask(FINDINGS)
        story.executed = nbformat.read(NOTEBOOK, as_version=4)
        for index, cell in enumerate(story.executed.cells):
            if cell.cell_type == "code":
                cell.outputs = [nbformat.from_dict(o) for o in notebook.outputs(index)]
        notebook.run(notebook.append(LOOP))
        yield story


@pytest.fixture(scope="module")
def notebook(story: Story) -> Notebook:
    return story.notebook


@pytest.fixture
def view(notebook: Notebook) -> Iterator[View]:
    """The widget, whose perturbations and search end with each test."""
    view = View(notebook.cell(INSPECTOR))
    yield view
    view.part("nni-search").fill("")
    notebook.ask("[handle.remove() for handle in insp.perturbations]")
    expect(view.root.get_by_test_id("nni-perturbation")).to_have_count(0)


@contextlib.contextmanager
def training(lab: Lab, notebook: Notebook) -> Iterator[int]:
    """A watched loop that runs in the kernel's main thread for as long as the block lasts."""
    stop = lab.root / "stop"
    stop.unlink(missing_ok=True)
    index = notebook.append(TRAIN_UNTIL_STOPPED)
    notebook.start(index)
    try:
        yield index
    finally:
        stop.touch()
        notebook.finish(index)


def test_runs_from_the_first_cell_to_the_last_offline(story: Story, notebook: Notebook):
    check_and_keep(NOTEBOOK, story.executed, story.findings)
    for index in range(notebook.count()):
        stderr = [o for o in notebook.outputs(index) if o.get("name") == "stderr"]
        assert stderr == [], f"cell {index} warned"
    assert notebook.errors == []
    assert notebook.foreign == []


def test_the_run_is_shown_to_its_end(story: Story, notebook: Notebook, view: View):
    assert story.trained == {"steps": "800", "total": "800"}
    assert view.number("nni-step") == notebook.ask("insp.recording.passes[-1].step")
    for name in ("loss", "accuracy"):
        last = notebook.ask(f"float(insp.recording.curves()[{name!r}][-1, 1])")
        assert view.number(f"nni-metric-{name}") == last


def test_a_switch_compiles_nothing(story: Story, notebook: Notebook):
    before, after = story.compilations
    assert after - before <= 1, "the comparison of two passes, in a thread; no pass"
    compiled = notebook.ask(COMPILATIONS)
    notebook.run(PERTURB)
    notebook.run(RESTORE)
    assert notebook.ask(COMPILATIONS) == compiled


@pytest.mark.parametrize("site", SITES)
def test_figures_on_screen_are_the_kernels(notebook: Notebook, view: View, site: str):
    view.select(site)
    notebook.ask_until("insp.selected", site)
    kernel = notebook.ask(FIGURES % (site, STATISTICS, site))
    shown = view.figures()
    for quantity in QUANTITIES:
        for statistic, found in shown[quantity].items():
            expected = kernel[quantity][statistic]
            assert float(found) == float(expected), (quantity, statistic)
        total = view.number(f"nni-hist-count-{quantity}")
        assert total == kernel[quantity]["finite"] > 0


def test_zero_shows_loss_and_accuracy_beside_the_clean_ones(notebook: Notebook, view: View):
    notebook.run(STEP)
    clean = dict(zip(("loss", "accuracy"), _values(notebook, STEP), strict=True))
    view.select("conv1")
    before = view.figures()
    compilations = notebook.ask("insp._core.meter.compilations.count")

    view.perturb("Zero")
    view.part("nni-effect-loss-perturbed").wait_for()
    effect = notebook.ask("[insp.effect.clean, insp.effect.perturbed]")
    for name in ("loss", "accuracy"):
        assert view.number(f"nni-effect-{name}-clean") == effect[0][name] == clean[name]
        assert view.number(f"nni-effect-{name}-perturbed") == effect[1][name]
    assert effect[1]["loss"] != clean["loss"]
    during = view.figures()["output"]
    assert (during["zeros"], during["norm"]) == (during["size"], "0")
    expect(view.row("conv1").get_by_test_id("nni-badge-perturbed")).to_have_text("perturbed")

    view.part("nni-switch").click()
    expect(view.part("nni-effect-loss-perturbed")).to_have_attribute(
        "data-value", view.part("nni-effect-loss-clean").get_attribute("data-value") or "none"
    )
    for name in ("loss", "accuracy"):
        assert view.number(f"nni-effect-{name}-perturbed") == clean[name], "the old figure, exactly"
    assert view.figures() == before
    enabled = "[handle.enabled for handle in insp.perturbations]"
    notebook.ask_until(enabled, [False])
    assert notebook.ask("[float(insp.step(loss_fn, (images[test], labels[test]))[0])]") == [
        clean["loss"]
    ]
    view.part("nni-remove").click()
    expect(view.root.get_by_test_id("nni-perturbation")).to_have_count(0)
    notebook.ask_until("len(insp.perturbations)", 0)
    notebook.run(PERTURB)  # the same in Python
    assert f"without conv1: {effect[1]['loss']} " in notebook.outputs(PERTURB)[0]["text"]
    assert notebook.ask("insp._core.meter.compilations.count") == compilations


def test_detail_follows_a_click_while_a_cell_trains(lab: Lab, notebook: Notebook, view: View):
    view.select("head")
    with training(lab, notebook) as cell:
        start = view.wait("nni-progress", "found.dataset.state === 'running' && value > 0")
        for site in ("block1/conv", "block2/norm"):
            view.select(site)
            # two frames of that site, seen while the loop runs: it is followed, not shown once
            first = view.wait("nni-stat-output-mean", "Number.isFinite(value)")
            view.wait("nni-stat-output-mean", "Number.isFinite(value) && value !== arg", first)
            expect(view.part("nni-progress")).to_have_attribute("data-state", "running")
        assert view.wait("nni-progress", "value > arg", start) > start
        assert view.root.get_by_role("progressbar").get_attribute("aria-valuetext") is not None
        assert not notebook.finished(cell)
    expect(view.part("nni-progress")).to_have_attribute("data-state", "idle")
    kernel = notebook.ask(FIGURES % ("block2/norm", STATISTICS, "block2/norm"))
    view.wait("nni-stat-output-mean", "value === arg", float(kernel["output"]["mean"]))


def test_toggling_while_a_cell_trains(lab: Lab, notebook: Notebook, view: View):
    notebook.run(STEP)  # so that the effect is that on the test images
    view.select("block1/conv")
    marked = view.root.get_by_test_id("nni-training-perturbed")
    pending = view.root.get_by_test_id("nni-pending")
    with training(lab, notebook):
        view.wait("nni-progress", "found.dataset.state === 'running' && value > 0")
        expect(marked).to_have_count(0)
        view.perturb("Zero")
        for _ in range(2):
            expect(marked).to_be_visible()
            expect(pending).to_have_count(0)
            here = view.number("nni-progress")
            view.wait("nni-progress", "value > arg + 3", here)
            view.part("nni-effect-loss-perturbed").wait_for()
            view.part("nni-switch").click()
            expect(marked).to_have_count(0)
            here = view.number("nni-progress")
            view.wait("nni-progress", "value > arg + 3", here)
            view.part("nni-switch").click()
        expect(marked).to_be_visible()
    expect(marked).to_have_count(0)
    view.part("nni-remove").click()
    expect(view.root.get_by_test_id("nni-perturbation")).to_have_count(0)

    seen = notebook.ask("seen")
    flags = notebook.ask(
        "[p.perturbed for p in insp.recording.passes if p.kind == 'watch'][-len(seen):]"
    )
    assert len(flags) == len(seen), "the recording was thinned: make the loop shorter"
    on = [step[0] for step in seen]
    for i, flag in enumerate(flags):  # taken over between two steps, at the next one at latest
        assert flag in on[max(0, i - 1) : i + 1], f"step {i} of {len(flags)}"
    assert _changes(flags) == _changes(on) == 5
    first = flags.index(True)
    assert len({step[1] for step in seen[first - 1 :]}) == 1, "switching compiled something"
    assert len({step[2] for step in seen[1:]}) == 1, "switching traced the step anew"


def test_search_and_keyboard(notebook: Notebook, view: View):
    view.select("conv1")
    tree, search = view.part("nni-tree"), view.part("nni-search")
    tree.focus()
    notebook.page.keyboard.press("/")
    expect(search).to_be_focused()
    notebook.page.keyboard.type("block2 batch")
    expect(view.row("conv1")).to_have_count(0)
    assert view.rows() == ["", "block2", "block2/norm"]
    notebook.page.keyboard.press("Escape")
    expect(view.row("conv1")).to_have_count(1)
    search.fill("norm")
    blocks = ("block1", "block2", "block3")
    assert view.rows() == ["", *(site for block in blocks for site in (block, f"{block}/norm"))]
    notebook.page.keyboard.press("Enter")
    expect(tree).to_be_focused()
    view.wait_selected("block1/norm")
    search.fill("")
    tree.focus()
    for key, site in [
        ("ArrowUp", "block1/conv"),
        ("ArrowUp", "block1"),
        ("ArrowUp", "conv1"),
        ("End", "head"),
        ("Home", ""),
        ("ArrowDown", "conv1"),
    ]:
        notebook.page.keyboard.press(key)
        view.wait_selected(site)
    for on in (True, False, True):
        tree.focus()  # asking the kernel ran a cell, which takes the focus
        notebook.page.keyboard.press("Space")
        expect(view.part("nni-switch")).to_have_attribute("aria-checked", str(on).lower())
        expect(view.row("conv1").get_by_test_id("nni-badge-perturbed")).to_have_attribute(
            "data-value", str(on).lower()
        )
        enabled = "[handle.enabled for handle in insp.perturbations]"
        notebook.ask_until(enabled, [on])


@pytest.mark.parametrize("width", [1400, 600])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_both_themes_and_a_narrow_page(notebook: Notebook, view: View, width: int, dark: bool):
    page = notebook.page
    try:
        page.set_viewport_size({"width": width, "height": 1000})
        notebook.evaluate("app.shell.collapseLeft()")
        notebook.theme(dark=dark)
        notebook.run(STEP)
        view.select("conv1")
        for index, kind in enumerate(("plain", "perturbed")):
            if index:
                view.perturb("Scale", 0.5)
                view.part("nni-effect").wait_for()
            _screenshot(view, f"{'dark' if dark else 'light'}-{width}-{kind}")
            _assert_painted(view)
            cut: list[str] = view.root.evaluate(_CUT)
            assert cut == []
            assert violations(page, view.root) == []
        view.part("nni-remove").click()
        expect(view.root.get_by_test_id("nni-perturbation")).to_have_count(0)
    finally:
        notebook.theme(dark=False)
        page.set_viewport_size({"width": 1400, "height": 1000})


def _place_of_the_tree(view: View) -> list[float]:
    """Where it is in the view, wherever the notebook scrolls to for a click."""
    place = """(tree, view) => {
        const [a, b] = [tree, view].map((one) => one.getBoundingClientRect());
        return [a.x - b.x, a.y - b.y, a.width, a.height];
    }"""
    return view.part("nni-tree").evaluate(place, view.root.element_handle())


@pytest.mark.parametrize("width", [830, 1200])
def test_a_perturbed_view_has_room(notebook: Notebook, view: View, width: int):
    page = notebook.page
    try:
        page.set_viewport_size({"width": width, "height": 1000})
        notebook.evaluate("app.shell.collapseLeft()")
        view.select("conv1")
        view.perturb("Scale", 0.5)
        view.part("nni-effect").wait_for()
        view.root.scroll_into_view_if_needed()
        bar = view.part("nni-perturb-bar").bounding_box()
        panel = view.root.get_by_role("tabpanel").bounding_box()
        tree = _place_of_the_tree(view)
        assert bar is not None
        assert panel is not None
        assert bar["height"] <= 72
        assert panel["height"] > 240
        view.row("block1").hover()
        expect(view.part("nni-tip")).to_have_attribute("data-site", "block1")
        assert _place_of_the_tree(view) == tree, "the foot's figures move nothing"
        if width > 900:
            axis = view.part("nni-metric-log-loss")
            was = axis.inner_text()
            axis.click()
            expect(axis).not_to_have_text(was)
        view.tab("sweep")
        assert _place_of_the_tree(view) == tree, "the tree stays"
        view.tab("overview")
        view.part("nni-remove").click()
        expect(view.root.get_by_test_id("nni-perturbation")).to_have_count(0)
    finally:
        page.mouse.move(0, 0)
        page.set_viewport_size({"width": 1400, "height": 1000})


def node(view: View, site: str) -> Locator:
    return view.root.locator(
        f"[data-testid='nni-flow-node'][data-role='module'][data-site='{site}']"
    )


def named(view: View) -> list[str]:
    """What a screen reader says of the nodes, top to bottom."""
    return view.root.get_by_test_id("nni-flow-node").evaluate_all(
        "nodes => nodes.sort((a, b) => a.offsetTop - b.offsetTop).map(n => n.ariaLabel)"
    )


def wait_shown(view: View, site: str, inside: str) -> None:
    expect(view.part("nni-flow")).to_have_attribute("data-value", site)
    node(view, inside).wait_for()


def test_the_flow_is_gone_into_by_a_double_click_and_left_by_the_breadcrumb(
    notebook: Notebook, view: View
):
    view.row("").click()
    view.tab("flow")
    wait_shown(view, "", "conv1")
    assert named(view) == [
        "input, f32[64,8,8,1], feeds conv1",
        "conv1, Conv, f32[64,8,8,24], feeds block1",
        "block1, Block, f32[64,8,8,24], feeds block2",
        "block2, Block, f32[64,4,4,24], feeds block3",
        "block3, Block, f32[64,4,4,24], feeds head",
        "head, Linear, f32[64,10], feeds output",
        "output, f32[64,10]",
    ]
    tops = [node(view, site).bounding_box() for site in ("conv1", "block1", "block2")]
    assert [box["y"] for box in tops if box] == sorted(box["y"] for box in tops if box)

    view.part("nni-flow-figure").select_option("activation norm")
    norm = "float(insp.recording.summary('block1', 'output').norm)"
    expect(node(view, "block1")).to_have_attribute("data-value", repr(notebook.ask(norm)))

    node(view, "block1").click()
    expect(view.part("nni-selected")).to_have_attribute("data-value", "block1")
    wait_shown(view, "", "conv1")
    node(view, "block1").dblclick()
    wait_shown(view, "block1", "block1/norm")
    assert [text.partition(",")[0] for text in named(view)] == [
        "input", "block1/conv", "block1/norm", "output"
    ]  # fmt: skip
    node(view, "block1/conv").press("ArrowDown")
    expect(view.part("nni-selected")).to_have_attribute("data-value", "block1/norm")

    view.root.locator("[data-testid='nni-flow-crumb'][data-site='']").click()
    wait_shown(view, "", "block2")
    expect(node(view, "block1")).to_have_attribute("aria-pressed", "true")
    assert notebook.ask("insp.selected") == "block1"
    view.tab("overview")


def test_nothing_went_wrong_on_the_page(notebook: Notebook, view: View):
    """Last: after all that the tests above did."""
    assert notebook.errors == []
    assert notebook.foreign == []
    for testid in ("nni-error", "nni-notice", "nni-banner"):
        assert view.root.get_by_test_id(testid).all_inner_texts() == []
    assert notebook.ask("insp._core.view.screen.failures + insp._core.metrics.errors") == 0


def _values(notebook: Notebook, index: int) -> list[float]:
    """The numbers of a cell whose value is a tuple of them."""
    text = notebook.outputs(index)[-1]["data"]["text/plain"]
    return [float(part) for part in text.strip("()").split(",")]


def _changes(flags: list[bool]) -> int:
    return sum(a != b for a, b in itertools.pairwise(flags))


def _screenshot(view: View, name: str) -> None:
    folder = os.environ.get("NNI_SCREENSHOTS")
    if folder:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        view.root.page.mouse.move(0, 0)
        view.root.screenshot(path=str(pathlib.Path(folder) / f"{name}.png"))


_CUT = """
root => {
  const right = root.getBoundingClientRect().right + 1, cut = [];
  const scrolls = at => at && at !== root.parentElement &&
    (['auto', 'scroll'].includes(getComputedStyle(at).overflowX) && at.scrollWidth > at.clientWidth
      || scrolls(at.parentElement));
  for (const element of root.querySelectorAll('button, input, td, th, dt, dd, span, b, strong')) {
    const box = element.getBoundingClientRect();
    const beyond = box.width > 0 && box.right > right && !scrolls(element);
    const badge = element.closest('.nni-badges');
    const hidden = badge && box.right > badge.parentElement.getBoundingClientRect().right + 1;
    if (beyond || hidden) cut.push(element.textContent.trim() || element.outerHTML);
  }
  return cut;
}
"""
"""The parts that are cut off on the right, so that nobody can read or reach them."""


def _assert_painted(view: View) -> None:
    empty: list[Any] = view.root.evaluate(
        "root => [...root.querySelectorAll('canvas')].filter(c => c.width && c.height &&"
        " !c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
        ").map(c => c.outerHTML)"
    )
    assert empty == []
