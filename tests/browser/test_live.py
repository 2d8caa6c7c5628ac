"""A training loop in a real JupyterLab, switched and tuned from the page while it runs.

The oracle is in the losses: while the last layer's output is zeros the loss is the mean square of
the targets, whatever the parameters are; it is nothing else by chance.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
from browser.lab import Lab, Sheet
from browser.notebook import COMPILATIONS, Notebook
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

MODEL = """
import pathlib, time
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import nnx_inspector as nni

class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))

rng = np.random.default_rng(0)
x, y = rng.normal(size=(16, 4)).astype("f"), rng.normal(size=(16, 3)).astype("f") + 2
zeroed = float(np.mean(y.astype(np.float64) ** 2))
traces = 0

def loss_fn(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

@nnx.jit
def train_step(model, optimizer, batch):
    global traces
    traces += 1
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss

class UntilStopped:
    '''A million batches, or as many as there are until the file `stop` appears.'''

    def __len__(self):
        return 1_000_000

    def __iter__(self):
        end = time.monotonic() + 240
        for _ in range(len(self)):
            if pathlib.Path("stop").exists() or time.monotonic() > end:
                return
            time.sleep(0.002)  # a step takes as long as a step does
            yield x, y

losses = []

def train():
    losses.clear()
    for batch in insp.watch(UntilStopped(), every=5):
        losses.append(float(train_step(model, optimizer, batch)))

model = Net(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(1e-4), wrt=nnx.Param)
"""
INSPECT = "insp = nni.Inspector(model, x)\ninsp.step(loss_fn, (x, y))"
IN_A_CELL, IN_A_THREAD = "train()", "thread = insp.background(train)"

FLAGS = "[[p.step, p.perturbed] for p in insp.recording.passes if p.kind == 'watch']"
NO_SUBSHELLS = {"apputils-extension/kernels-settings": {"commsOverSubshells": "disabled"}}
"""Settings of JupyterLab with which messages come as from VS Code.

They hold from the page's start: switched later, JupyterLab deletes a subshell with the messages in
it.
"""


@contextlib.contextmanager
def opened(sheet: Sheet) -> Iterator[tuple[Notebook, View]]:
    """A notebook whose inspector shows the last layer, and knows how it hears the page."""
    with sheet([MODEL, INSPECT]) as notebook:
        notebook.run(0, seconds=120)
        notebook.run(1, seconds=120)
        view = View(notebook.cell(1))
        view.select("second")
        view.open("nni-menu")
        expect(view.part("nni-listening")).not_to_be_empty()
        yield notebook, view


@contextlib.contextmanager
def training(sheet: Sheet, notebook: Notebook, view: View, code: str) -> Iterator[int]:
    """The loop runs for as long as the block lasts."""
    stop = sheet.root / "stop"
    stop.unlink(missing_ok=True)
    index = notebook.append(code)
    notebook.start(index)
    try:
        view.wait("nni-progress", "found.dataset.state === 'running' && value > 5")
        # a loop goes on bare while the program that measures it is compiled
        expect(view.root.locator(".nni-status-waiting")).to_have_count(0)
        yield index
    finally:
        stop.touch()
        notebook.finish(index)
        expect(view.part("nni-progress")).to_have_attribute("data-state", "idle")


def some_steps(view: View) -> None:
    """Wait until the loop has come further."""
    here = view.number("nni-progress")
    view.wait("nni-progress", "value > arg + 6", here)


def toggle(view: View, times: int) -> None:
    """Click the first switch, each time until the screen says what the training does."""
    marked = view.root.get_by_test_id("nni-training-perturbed")
    for _ in range(times):
        on = view.part("nni-switch").get_attribute("aria-checked") == "true"
        view.part("nni-switch").click()
        expect(marked).to_have_count(0 if on else 1)
        expect(view.root.get_by_test_id("nni-pending")).to_have_count(0)
        some_steps(view)


def assert_perturbed_as_toggled(
    notebook: Notebook, times: int, until: float = float("inf")
) -> None:
    """The losses say which steps were perturbed; the recording says the same up to a step."""
    zeroed, losses, flags, last = notebook.ask(f"[zeroed, losses, {FLAGS}, insp._core.step]")
    perturbed = [abs(loss - zeroed) < 1e-5 * zeroed for loss in losses]
    assert sum(a != b for a, b in itertools.pairwise(perturbed)) == times
    first = last - (len(losses) - 1)
    recorded = {step - first: flag for step, flag in flags if first <= step < until}
    assert len(recorded) > times, "too few steps were recorded to tell"
    assert {i: perturbed[i] for i in recorded} == recorded


WATCH_SCREEN = """root => {
  const find = id => root.querySelector(`[data-testid='${id}']`);
  const seen = (window.seen = { progress: [], effects: {} });
  const look = () => {
    const { value, state } = find('nni-progress').dataset;
    const step = Number(value);
    if (state === 'running' && seen.progress.at(-1) !== step) seen.progress.push(step);
    const loss = find('nni-effect-loss-perturbed')?.dataset.value;
    const name = find('nni-effect')?.lastElementChild.textContent.split(' on ')[0];
    if (loss) seen.effects[name.split(', before')[0]] = { ...seen.effects[name], [loss]: true };
  };
  new MutationObserver(look).observe(root, { subtree: true, childList: true, attributes: true });
}"""
"""Notes each progress that is shown, and under which name each effect stands."""


def assert_screen_was_true(view: View) -> None:
    """The counter never ran backwards, and no figure of an effect stood under another's name."""
    seen = view.root.page.evaluate("window.seen")
    assert len(seen["progress"]) > 10
    assert seen["progress"] == sorted(seen["progress"])
    names = [name for name in seen["effects"] if " of " in name]
    assert len(names) > 1, "there is nothing to confuse"
    for one, other in itertools.combinations(names, 2):
        assert not seen["effects"][one].keys() & seen["effects"][other].keys(), (one, other)


def test_a_cell_that_trains_is_switched_and_tuned_while_it_runs(sheet: Sheet):
    with opened(sheet) as (notebook, view):
        view.open("nni-menu")
        expect(view.part("nni-listening")).to_have_attribute("data-value", "during")
        expect(view.part("nni-listening")).to_contain_text("even while a cell runs")
        view.perturb("Zero")
        view.part("nni-output-change").wait_for()  # the measuring program is compiled once
        view.part("nni-switch").click()
        zeroed, compiled = notebook.ask(f"[zeroed, {COMPILATIONS}]")
        with training(sheet, notebook, view, IN_A_CELL) as cell:
            view.root.evaluate(WATCH_SCREEN)
            toggle(view, 1)
            near = "Math.abs(value - arg) < 1e-5 * arg"
            view.wait("nni-effect-loss-perturbed", near, zeroed)
            expect(view.part("nni-effect")).to_contain_text(
                "Effect of Zero on the batch of the last insp.step"
            )
            toggle(view, 1)
            expect(view.part("nni-no-effect")).to_have_text("Nothing is perturbed.")
            expect(view.root.get_by_test_id("nni-effect")).to_have_count(0)
            compiled += 3  # the step: as it is, measured, and perturbed but not measured
            view.open("nni-menu")
            view.wait("nni-compilations", "value === arg", compiled)
            view.shut()
            toggle(view, 4)
            scaled_from = view.number("nni-progress")
            view.select("first")
            view.perturb("Scale", 1.0)
            view.part("nni-amount").click()
            slider = view.root.get_by_test_id("nni-strength")
            slider.focus()
            for _ in range(30):
                notebook.page.keyboard.press("ArrowLeft")
            expect(view.part("nni-strength-number")).to_have_value("0.7")
            expect(view.root.get_by_test_id("nni-pending")).to_have_count(0)
            expect(view.part("nni-effect")).to_contain_text("Effect of Scale (factor 0.7) at first")
            view.open("nni-effect-more")
            view.part("nni-switch-all").click()  # both are off, the Zero was
            expect(view.root.get_by_test_id("nni-training-perturbed")).to_have_count(0)
            some_steps(view)
            assert view.compilations() == compiled, "a change compiled something"
            expect(view.part("nni-progress")).to_have_attribute("data-state", "running")
            assert not notebook.finished(cell)
            assert_screen_was_true(view)
        assert notebook.ask("traces") == 2, "as it is, and watched"
        assert_perturbed_as_toggled(notebook, 2 + 4, scaled_from)
        assert notebook.ask("[str(h.perturbation) for h in insp.perturbations]") == [
            "Zero()",
            "Scale(factor=0.7)",
        ]


BY_HAND = """
def by_hand(shift):
    'What the model gives with a shift of its first layer.'
    return np.asarray(model.second(nnx.relu(model.first(x) + shift)), np.float64)

clean, *shifted = (by_hand(shift) for shift in (0, 1, -0.5))
expected = [float(np.mean((out - y) ** 2)) for out in (clean, *shifted)]
moved = [float(np.linalg.norm(out - clean) / np.linalg.norm(clean)) for out in shifted]
"""


def test_kinds_are_added_and_tuned_from_the_page(sheet: Sheet):
    with opened(sheet) as (notebook, view):
        notebook.run(notebook.append(BY_HAND))
        (clean, *shifted), moved = notebook.ask("[expected, moved]")
        near = "Math.abs(value - arg) < 1e-4 * arg"
        view.select("first")
        view.perturb("Shift", 1.0)
        view.wait("nni-effect-loss-perturbed", near, shifted[0])
        view.wait("nni-effect-loss-clean", near, clean)
        expect(view.part("nni-expression")).to_have_attribute(
            "data-value", "nni.Shift(offset=1.0, strength=1.0)"
        )
        view.wait("nni-output-change", near, moved[0])
        view.open("nni-effect-more")
        view.wait("nni-downstream", near, moved[0])  # the last layer: it gives the output
        compiled = view.compilations()
        view.part("nni-amount").click()
        view.part("nni-strength-number").fill("-0.5")
        view.wait("nni-effect-loss-perturbed", near, shifted[1])
        view.wait("nni-output-change", near, moved[1])
        view.part("nni-switch").click()
        view.wait("nni-effect-loss-perturbed", near, clean)
        assert view.compilations() == compiled, "a change compiled something"

        view.part("nni-switch").click()
        view.part("nni-downstream").get_by_role("button").click()
        view.wait_selected("second")
        view.perturb("StopGradient", at="input")
        view.wait("nni-stat-gradient-norm", "value > 0")  # of the last layer's output
        view.select("first")
        view.wait("nni-stat-gradient-zeros", "value === arg", 16 * 8)
        expect(view.root.get_by_test_id("nni-row-compiling")).to_have_count(0)
        view.root.get_by_test_id("nni-switch").nth(1).click()
        view.wait("nni-stat-gradient-zeros", "value < arg", 16 * 8)


def test_a_loop_in_the_background_is_switched_while_cells_run(sheet: Sheet):
    with opened(sheet) as (notebook, view):
        with training(sheet, notebook, view, IN_A_THREAD) as cell:
            view.open("nni-menu")
            expect(view.part("nni-listening")).to_have_attribute("data-value", "thread")
            assert notebook.finished(cell)
            view.perturb("Zero")
            expect(view.part("nni-training-perturbed")).to_be_visible()
            some_steps(view)
            toggle(view, 3)
            assert notebook.ask("thread.is_alive()")
        notebook.run(notebook.append("thread.join()"))
        assert notebook.ask("traces") == 2
        assert_perturbed_as_toggled(notebook, 4)
        view.open("nni-menu")
        expect(view.part("nni-listening")).to_have_attribute("data-value", "during")


FEW_STEPS = """
insp.step(loss_fn, (x, y))
for _ in insp.watch(range(STEPS), every=2):
    insp.metrics(loss=train_step(model, optimizer, (x, y)))
"""

BOXES = """
root => [...root.querySelectorAll('.nni-view *')]
  .filter(e => !e.closest('[role=tabpanel], .nni-effect-items, .nni-time-plot, .nni-row'))
  .filter(e => !e.closest('.nni-progress, .nni-chip-status, .nni-footer, .nni-compiling'))
  .map(e => [e, e.getBoundingClientRect()])
  .filter(([, box]) => box.width > 0)
  .map(([e, box]) => [e.className, box.x, box.y, box.width, box.height].join(' '))
"""
"""Where each box of the frame is. Texts within boxes may change their length."""


@pytest.mark.parametrize("width", [900, pytest.param(1400, marks=pytest.mark.long)])
def test_a_switch_and_a_new_step_move_nothing(sheet: Sheet, width: int):
    with opened(sheet) as (notebook, view):
        notebook.page.set_viewport_size({"width": width, "height": 1000})
        notebook.evaluate("app.shell.collapseLeft()")
        notebook.run(notebook.append(FEW_STEPS.replace("STEPS", "8")), seconds=120)
        view.select("first")
        view.perturb("Zero")
        view.part("nni-effect").wait_for()
        view.row("second").hover()
        notebook.page.mouse.move(0, 0)
        expect(view.part("nni-compiling")).to_have_attribute("data-value", "0")
        expect(view.root.get_by_test_id("nni-training-perturbed")).to_have_count(0)
        before = view.root.evaluate(BOXES)
        clean = view.number("nni-effect-loss-clean")
        view.part("nni-switch").click()
        view.wait("nni-effect-loss-perturbed", "value === arg", clean)
        assert view.root.evaluate(BOXES) == before
        view.part("nni-switch").click()
        view.wait("nni-effect-loss-perturbed", "value !== arg", clean)
        assert view.root.evaluate(BOXES) == before
        step = view.number("nni-step")
        notebook.run(notebook.append(FEW_STEPS.replace("STEPS", "6")), seconds=120)
        view.wait("nni-step", "value > arg", step)
        expect(view.root.get_by_test_id("nni-training-perturbed")).to_have_count(0)
        after = view.root.evaluate(BOXES)
        assert [box for box in after if box not in before] == []


def test_without_subshells_a_cell_that_trains_is_switched_while_it_runs(lab: Lab):
    with lab.notebook("plain.ipynb", [""], settings=NO_SUBSHELLS) as one:
        assert one.evaluate("return kernel.commsOverSubshells") == "disabled"
        switch_while_training(Sheet(lab, one))


def switch_while_training(sheet: Sheet) -> None:
    with opened(sheet) as (notebook, view):
        view.open("nni-menu")
        expect(view.part("nni-listening")).to_have_attribute("data-value", "during")
        with training(sheet, notebook, view, IN_A_CELL) as cell:
            view.perturb("Zero")
            expect(view.part("nni-training-perturbed")).to_be_visible()
            some_steps(view)
            toggle(view, 3)
            assert not notebook.finished(cell)
        assert_perturbed_as_toggled(notebook, 4)


def test_two_pages_one_without_subshells_switch_one_cell_that_trains(sheet: Sheet):
    with contextlib.ExitStack() as second, opened(sheet) as (notebook, view):
        notebook.evaluate("await panel.context.save()")
        other = second.enter_context(sheet.in_another_page(settings=NO_SUBSHELLS))
        assert other.evaluate("return kernel.commsOverSubshells") == "disabled"
        theirs = View(other.cell(1))
        theirs.wait_selected("second")
        with training(sheet, notebook, view, IN_A_CELL) as cell:
            view.perturb("Zero")
            for one in (view, theirs):
                expect(one.part("nni-training-perturbed")).to_be_visible()
            some_steps(view)
            for one in (theirs, view, theirs):
                toggle(one, 1)
                on = one.part("nni-switch").get_attribute("aria-checked") or ""
                for each in (view, theirs):  # the next click is on what the other page shows
                    expect(each.part("nni-switch")).to_have_attribute("aria-checked", on)
            theirs.select("first")
            view.wait_selected("first")
            assert other.errors == []
            second.close()
            toggle(view, 1)
            assert not notebook.finished(cell)
        assert_perturbed_as_toggled(notebook, 5)
