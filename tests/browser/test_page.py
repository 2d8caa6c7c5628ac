"""A page that `to_html` wrote, opened from disk with the network off."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from browser.axe import violations
from browser.notebook import WAIT
from browser.view import View
from flax import nnx
from inside import inside
from playwright.sync_api import Browser, Page, expect

import nnx_inspector as nni
from nnx_inspector.screen import protocol

pytestmark = pytest.mark.browser

STEPS = 12


class Block(nnx.Module):
    """A gate over a layer, <b>in bold</b> & </script> for whoever takes this for markup."""

    def __init__(self, size: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(size, rngs=rngs)
        self.up = nnx.Linear(size, size, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * nnx.relu(self.up(self.norm(x)))


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Linear(3, 8, rngs=rngs)
        self.blocks = nnx.List([Block(8, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def inspector() -> Iterator[nni.Inspector]:
    """After a short training, with a perturbation on."""
    model = Net(rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (16, 3))
    insp = nni.Inspector(model, x, labels=["no", "yes"], display=False)

    @nnx.jit
    def train_step(model: Net, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1.0) ** 2))(model)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        nnx.update(model, moved)
        return loss

    before = nnx.clone(model)
    for _ in insp.watch(range(STEPS), every=1):
        insp.metrics(loss=train_step(model, x))
    insp.compare(before, name="the start")
    look_at_the_head(insp)
    insp.perturb("blocks/1", nni.Scale(0.5))
    insp.selected = "blocks/0/up"
    yield insp
    insp.close()


def look_at_the_head(insp: nni.Inspector) -> None:
    """Do what the panels Values and Compare do when they are opened."""
    commands = inside(insp).commands
    commands.answer(protocol.Compare(id=1, number=STEPS, pinned=1))
    commands.answer(protocol.ShowValues(id=2, site="head", part="output", clean=False))
    commands.wait()
    (opened,) = inside(insp).core.page_values.answers().values()
    message = opened[0]
    assert isinstance(message, protocol.Arrays)
    commands.answer(
        protocol.ReadValues(
            id=3, array=message.arrays[0].number, index=(0, 0), axes=(-1, 0, 1), starts=(0, 0, 0),
            ends=(1, 16, 2), most=(1, 99, 99), norm_over=-1, component="value", exact=False,
        )
    )  # fmt: skip
    commands.answer(protocol.ChooseExample(id=4, example=3))
    commands.wait()


@pytest.fixture(scope="module")
def path(inspector: nni.Inspector, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("page") / "run.html"
    assert inspector.to_html(path) == path.stat().st_size
    return path


@dataclasses.dataclass
class OpenPage:
    page: Page
    view: View
    said: list[str]
    asked: list[str]


@pytest.fixture(params=[(1400, "light"), (600, "dark")], ids=["wide-light", "narrow-dark"])
def opened(
    request: pytest.FixtureRequest, browser: Browser, path: pathlib.Path
) -> Iterator[OpenPage]:
    """The page, from disk, offline; what it wrote to its console, and what it asked for."""
    width, scheme = request.param
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    said: list[str] = []
    asked: list[str] = []
    page = context.new_page()
    page.set_default_timeout(WAIT * 1000)
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"pageerror: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    view = View(page.locator("body"))
    view.wait("nni-stat-output-size", "value > 0")
    yield OpenPage(page, view, said, asked)
    foreign = [url for url in asked if not url.startswith((path.as_uri(), "blob:", "data:"))]
    context.close()
    assert foreign == []
    assert said == []


def test_tree_flow_detail_and_time(opened: OpenPage, inspector: nni.Inspector):
    view, recording = opened.view, inspector.recording
    view.wait_selected("blocks/0/up")
    dark = opened.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert ("nni-dark" in (view.root.get_attribute("class") or "")) == dark
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    # tree and detail: the figures are the recording's own
    view.select("blocks/1")
    view.row("blocks/1").press("ArrowRight")
    view.select("blocks/1/up")
    for quantity in ("output", "gradient"):
        summary = recording.summary("blocks/1/up", quantity, index=-1)  # type: ignore[arg-type]
        shown = view.figures()[quantity]
        if summary is None:
            assert set(shown.values()) == {"NaN"}
        else:
            assert float(shown["mean"]) == summary.mean
            assert float(shown["std"]) == summary.std

    # time: an older pass, by the slider
    step = 5
    index = recording.steps.index(step, 1)  # the first pass is the example's
    view.part("nni-scrub").fill(str(index))
    view.wait("nni-step", "value === arg", step)
    older = recording.summary("blocks/1/up", "gradient", index=index)
    assert older is not None
    assert float(view.figures()["gradient"]["norm"]) == older.norm
    assert float(view.figures()["gradient"]["max"]) == older.max
    view.part("nni-scrub").press("ArrowLeft")
    view.wait("nni-step", "value === arg", step - 1)
    view.pause()
    expect(view.part("nni-time")).to_have_attribute("data-state", "follow")

    # flow: in by a double click
    view.row("").click()
    view.tab("flow")
    node = "[data-testid='nni-flow-node'][data-role='module'][data-site='{}']"
    view.root.locator(node.format("embed")).wait_for()
    labels = view.root.get_by_test_id("nni-flow-node").evaluate_all(
        "nodes => nodes.sort((a, b) => a.offsetTop - b.offsetTop).map(n => n.ariaLabel)"
    )
    assert [label.partition(",")[0] for label in labels] == [
        "input", "embed", "blocks/0", "blocks/1", "head", "output"
    ]  # fmt: skip
    view.root.locator(node.format("blocks/0")).dblclick()
    view.root.locator(node.format("blocks/0/norm")).wait_for()


def test_parameters_units_code_and_state(opened: OpenPage, inspector: nni.Inspector):
    view = opened.view
    view.row("head").click()
    view.wait_selected("head")
    parameters = view.root.get_by_test_id("nni-parameter")
    expect(parameters).to_have_count(len(inspector.parameters("head")))
    view.tab("units")
    view.part("nni-strip").wait_for()
    assert view.number("nni-dead-units") == inspector.units("head").dead.sum()
    view.row("blocks/0").click()
    view.tab("code")
    expect(view.root).to_contain_text("<b>in bold</b> & </script>")
    view.tab("nnx")
    expect(view.part("nni-nnx")).to_have_attribute("data-value", "blocks/0")
    assert view.root.locator("[data-testid='nni-nnx-variable']").count() == 4


def test_values_and_comparisons_that_were_opened(opened: OpenPage, inspector: nni.Inspector):
    view = opened.view
    view.tab("compare")
    rows = view.root.get_by_test_id("nni-weight-row")
    expect(rows).to_have_count(len(jax.tree.leaves(nnx.state(inspector.model, nnx.Param))))
    view.row("head").click()
    view.wait_selected("head")
    view.tab("values")
    expect(view.part("nni-examples")).to_have_attribute("data-value", "3")
    view.part("nni-legend-high").wait_for()
    values = inside(inspector).core.page_values.answers()
    _, buffer = next(one for one in values.values() if isinstance(one[0], protocol.Values))
    shown = np.frombuffer(buffer, np.float32)[: 16 * 2]
    low, high = view.number("nni-legend-low"), view.number("nni-legend-high")
    assert (low, high) == (pytest.approx(shown.min()), pytest.approx(shown.max()))
    view.row("embed").click()
    expect(view.part("nni-values-problem")).to_contain_text("only the values that were open")


def test_of_many_columns_the_tree_shows_those_that_fit(opened: OpenPage):
    view, tree = opened.view, opened.view.root.locator(".nni-tree")
    tree.locator(".nni-find .nni-menu-anchor > button").click()
    for box in tree.locator("[data-testid^='nni-column-']").all():
        box.check()
    opened.page.keyboard.press("Escape")
    here, detail = tree.bounding_box(), view.root.locator(".nni-detail").bounding_box()
    assert here is not None
    assert detail is not None
    is_head = "([x, y]) => document.elementFromPoint(x, y).closest('.nni-columns') !== null"
    assert opened.page.evaluate(is_head, [here["x"] + here["width"] - 60, here["y"] + 16])
    assert not opened.page.evaluate(is_head, [detail["x"] + 60, detail["y"] + 16])
    tree.locator(".nni-rows").evaluate("rows => { rows.scrollLeft = 300; }")
    expect(tree.locator(".nni-grid")).to_have_attribute("data-sideways", "true")
    name = view.row("blocks/0/up").locator(".nni-name").bounding_box()
    assert name is not None
    assert here["x"] <= name["x"] < here["x"] + 100  # it does not scroll away


def test_what_needs_the_model_is_switched_off_and_said(opened: OpenPage):
    view = opened.view
    expect(view.part("nni-banner")).to_contain_text(f"with all {STEPS + 1} passes")
    expect(view.part("nni-perturbation")).to_have_attribute("data-site", "blocks/1")
    expect(view.part("nni-switch")).to_be_disabled()
    for absent in (
        "nni-perturb",
        "nni-add-here",
        "nni-switch-all",
        "nni-remove",
    ):
        expect(view.root.get_by_test_id(absent)).to_have_count(0)
    view.row("head").focus()
    opened.page.keyboard.press("Space")
    view.tab("sweep")
    expect(view.root.get_by_test_id("nni-study-start")).to_have_count(0)
    expect(view.root.get_by_test_id("nni-notice")).to_have_count(0)
    expect(view.root.get_by_test_id("nni-perturbation")).to_have_count(1)


def test_it_is_accessible(opened: OpenPage):
    # axe comes by a script of the test's, which the page's own policy refuses
    session = opened.page.context.new_cdp_session(opened.page)
    session.send("Page.setBypassCSP", {"enabled": True})
    opened.page.reload()
    opened.view.wait("nni-stat-output-size", "value > 0")
    assert violations(opened.page, opened.view.root) == []


def test_its_policy_lets_nothing_out(opened: OpenPage):
    tried = """async () => {
        const image = new Promise(done => {
            const one = new Image();
            one.onload = () => done('loaded');
            one.onerror = () => done('');
            one.src = 'https://example.org/x.png';
        });
        const fetched = fetch('https://example.org/').then(() => 'fetched', () => '');
        const script = document.createElement('script');
        script.textContent = 'window.ran = true';
        document.body.append(script);
        return [await image, await fetched, window.ran ?? ''];
    }"""
    assert opened.page.evaluate(tried) == ["", "", ""]
    assert len(opened.said) >= 3
    opened.said.clear()  # the refusals
    opened.asked[:] = [url for url in opened.asked if "example.org" not in url]


def test_a_page_that_was_damaged_says_so(browser: Browser, path: pathlib.Path, tmp_path):
    text = path.read_text()
    start = text.index('id="nni-recording">') + len('id="nni-recording">')
    broken = tmp_path / "broken.html"
    broken.write_text(text[: start + 1000] + text[text.index("</script>", start) :])
    page = browser.new_page()
    page.goto(broken.as_uri())
    expect(page.locator("#nni-page")).to_contain_text("This page cannot be shown")
    page.close()
