"""Robustness of the page: a closed inspector, hostile names, malformed commands, a docked view."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser.lab import Sheet
from browser.notebook import Notebook
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

MODEL = """
import jax, jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni

class Two(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))

@nnx.jit
def step(model, x):
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(model, nnx.Param), grads))
    return loss

def batch(i):
    return jax.random.normal(jax.random.key(i), (16, 4))

model = Two(rngs=nnx.Rngs(0))
"""
INSPECT = "insp = nni.Inspector(model, batch(0))"

MARKUP = '<img src=x onerror="window.hacked=1"> & \'</script><b>bold</b>'
SITE = MARKUP.replace("/", "\\/")
HOSTILE = f"""
markup = {MARKUP!r}

class Hostile(nnx.Module):
    def __init__(self, *, rngs):
        setattr(self, markup, nnx.Linear(4, 4, rngs=rngs))
        self.odd = type(markup, (nnx.Linear,), {{}})(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.odd(getattr(self, markup)(x))

hostile = Hostile(rngs=nnx.Rngs(0))
insp = nni.Inspector(hostile, batch(0))
"""

COLLECT = """
window.nniReplies = [];
kernel.iopubMessage.connect((_, message) => {
  const data = message.content.data;
  if (message.header.msg_type === 'comm_msg' && message.content.comm_id === arg
      && data.method === 'custom' && data.content.type === 'reply') nniReplies.push(data.content);
});
"""
SEND = """
const comm = kernel._comms.get(arg[0]);
comm.send({method: 'custom', content: arg[1]});
"""


@pytest.fixture
def notebook(sheet: Sheet) -> Iterator[Notebook]:
    """A small model in the kernel, and a cell that makes its inspector, not yet run."""
    with sheet([MODEL, INSPECT]) as notebook:
        notebook.run(0, seconds=120)
        yield notebook


def test_closing_while_a_loop_runs(notebook: Notebook):
    notebook.run(1)
    View(notebook.cell(1)).root.wait_for()
    loop = notebook.append(
        "losses = []\n"
        "for i, x in enumerate(insp.watch([batch(i) for i in range(40)], every=2)):\n"
        "    losses.append(float(step(model, x)))\n"
        "    if i == 15:\n"
        "        insp.close()\n"
        "assert len(losses) == 40"
    )
    notebook.run(loop)
    # Jupyter takes a closed widget off the page
    expect(notebook.cell(1).get_by_test_id("nni-root")).to_have_count(0)
    recorded = notebook.ask("[p.step for p in insp.recording.passes if p.kind == 'watch']")
    assert recorded[0] <= 4  # the first two may run bare, while the program compiles
    assert recorded[-1] <= 15
    # as without us: the same model, trained the same way
    again = notebook.append(
        "model = Two(rngs=nnx.Rngs(0))\nplain = [float(step(model, batch(i))) for i in range(40)]"
    )
    notebook.run(again)
    assert notebook.ask("plain") == pytest.approx(notebook.ask("losses"), rel=1e-5)


def test_hostile_names_are_text(notebook: Notebook):
    index = notebook.append(HOSTILE)
    notebook.run(index)
    view = View(notebook.cell(index))
    trace = notebook.append("nni.trace(hostile, batch(0))")
    notebook.run(trace)
    notebook.run(notebook.append("insp"))
    printed = notebook.outputs(trace)[0]["data"]["text/plain"]
    assert printed.count(MARKUP) == 2, "once as the module's name, once as the type's"
    expect(view.row(SITE)).to_contain_text(MARKUP)
    view.select(SITE)
    expect(view.part("nni-selected")).to_have_text(SITE)
    view.perturb("Zero")
    expect(view.part("nni-perturbation")).to_have_attribute("data-site", SITE)
    expect(view.part("nni-perturbation")).to_contain_text(SITE)
    view.part("nni-effect").wait_for()
    view.part("nni-switch").click()
    view.part("nni-no-effect").wait_for()
    assert notebook.page.evaluate("window.hacked") is None
    inside = notebook.page.locator(".jp-OutputArea-output")
    others = "script:not(.nni-saved > script)"  # those in there are ours, and were looked at there
    for element in ("img", others, "b:text-is('bold')"):
        expect(inside.locator(element)).to_have_count(0)


def test_malformed_commands_get_one_readable_reply_and_change_nothing(notebook: Notebook):
    notebook.run(1)
    view = View(notebook.cell(1))
    state = (
        "[insp.selected, len(insp.perturbations), len(insp.recording),"
        " [float(v) for v in insp.recording.summary('first').quantile([0, 0.5, 1])]]"
    )
    before = notebook.ask(state)
    comm = notebook.ask("insp._core.view.screen.control.comm.comm_id")
    notebook.evaluate(COLLECT, comm)
    perturb = {"type": "perturb", "site": "first", "kind": "Zero", "strength": None, "at": "output"}
    adjust = {"type": "adjust", "perturbation": 1, "enabled": True, "strength": None}
    answered: list[dict[str, Any]] = [
        {},
        {"type": "no such thing"},
        {"type": ["perturb"]},
        {"type": {"type": "perturb"}},
        {"type": None},
        {"type": "frame"},
        {"type": "reply", "ok": True, "error": ""},
        {"type": "select"},
        {"type": "select", "site": 7},
        {"type": "select", "site": None},
        {"type": "select", "site": "nowhere"},
        {"type": "select", "site": "first", "extra": 1},
        {"type": "perturb", "site": "first"},
        perturb | {"site": "nowhere"},
        perturb | {"site": ["first"]},
        perturb | {"kind": "Explode"},
        perturb | {"kind": "__class__"},
        perturb | {"kind": {}},
        perturb | {"at": "parameter"},
        perturb | {"at": None},
        perturb | {"strength": 1},
        perturb | {"kind": "Scale", "strength": "2"},
        perturb | {"kind": "Scale", "strength": True},
        perturb | {"kind": "Scale", "strength": {"__class__": "inf"}},
        adjust,
        adjust | {"perturbation": -1},
        adjust | {"perturbation": 2**70},
        adjust | {"perturbation": "1"},
        adjust | {"enabled": 1},
        {"type": "switch_all", "enabled": "off"},
        {"type": "switch_all"},
        {"type": "remove", "perturbation": 99},
        {"type": "remove", "perturbation": None},
    ]
    for number, message in enumerate(answered, start=1000):
        notebook.evaluate(SEND, [comm, message | {"id": number}])
    silent: list[Any] = [None, 3, "text", [], [1], {"type": "select", "site": "second"}]
    silent += [{"type": "select", "site": "second", "id": wrong} for wrong in ("7", True, None, {})]
    silent += [{"type": "ack", "seq": seq} for seq in (-1, 2**70, "1", None)]
    silent += [{"type": "hello"}, {"type": "hello", "version": "1"}]
    for wrong in silent:
        notebook.evaluate(SEND, [comm, wrong])
    last = {"type": "select", "site": before[0], "id": 5000}
    notebook.evaluate(SEND, [comm, last])
    notebook.wait("window.nniReplies.some(reply => reply.id === 5000)")
    assert notebook.ask(state) == before

    # below 1000 are the view's own: its hello (number 0), and what it asks for of what is selected
    told: list[dict[str, Any]] = notebook.evaluate("return window.nniReplies")
    replies = [reply for reply in told if reply["id"] >= 1000]
    assert [r["id"] for r in replies if r["id"] == 5000 and r["ok"]] == [5000]
    by_id = {
        number: [r for r in replies if r["id"] == number]
        for number in range(1000, 1000 + len(answered))
    }
    for number, message in enumerate(answered, start=1000):
        assert len(by_id[number]) == 1, f"{json.dumps(message)}: {by_id[number]}"
        (reply,) = by_id[number]
        assert not reply["ok"], message
        assert reply["error"][0].isupper() or "." in reply["error"], reply
        for noise in ("Traceback", "object at 0x", "unhashable"):
            assert noise not in reply["error"]
    assert {r["id"] for r in replies} == {*by_id, 5000}
    view.select("second")  # and it still works
    notebook.ask_until("insp.selected", "second")


def test_keys_do_not_reach_jupyterlab(notebook: Notebook):
    notebook.run(1)
    view = View(notebook.cell(1))
    view.select("first")
    cells = notebook.count()
    for focus in ("nni-search", "nni-tree", "nni-perturb", "nni-menu"):
        for key in "abmyrx":  # insert a cell above or below, change its kind, cut it
            view.part(focus).focus()
            notebook.page.keyboard.press(key)
            assert notebook.count() == cells, f"{key!r} in {focus}"
    assert notebook.evaluate("return notebook.widgets.map(w => w.model.type)") == ["code"] * cells


def test_two_views_of_one_inspector(notebook: Notebook):
    notebook.run(1)
    second = notebook.append("from IPython.display import display\ndisplay(insp)")
    notebook.run(second)
    views = [View(notebook.cell(1)), View(notebook.cell(second))]
    for view in views:
        view.wait("nni-stat-output-size", "value > 0")
    assert views[0].figures() == views[1].figures()
    before = views[0].figures()
    notebook.run(notebook.append("insp.run(batch(1) * 3)"))
    mean = notebook.ask("insp.recording.summary('').mean")
    for view in views:
        view.wait("nni-stat-output-mean", "value === arg", mean)
        assert view.figures() != before
    views[1].select("second")
    views[0].wait_selected("second")
    views[0].perturb("Zero")
    for view in views:
        expect(view.part("nni-perturbation")).to_have_attribute("data-site", "second")
        view.part("nni-effect").wait_for()
    views[1].part("nni-remove").click()
    for view in views:
        expect(view.root.get_by_test_id("nni-perturbation")).to_have_count(0)


def test_a_view_docks_beside_the_notebook_and_stays_when_its_cell_runs_again(notebook: Notebook):
    notebook.run(1)
    view = View(notebook.cell(1))
    view.row("second").wait_for()
    view.part("nni-open-beside").click()
    beside = View(notebook.page.locator(".jupyterlab-sidecar"))
    beside.row("second").click()
    expect(beside.part("nni-open-beside")).to_be_hidden()
    expect(view.part("nni-shown-elsewhere")).to_contain_text("Two is shown beside the notebook.")

    first = notebook.ask("insp._core.view.screen.id")
    notebook.run(1)
    assert notebook.ask("insp._core.view.screen.id") != first
    expect(beside.part("nni-selected")).to_have_attribute("data-value", "")  # the new one
    view.part("nni-shown-elsewhere").get_by_role("button").click()
    view.row("second").wait_for()

    tab = notebook.page.locator(".lm-TabBar-tab", has_text="Two")
    tab.locator(".lm-TabBar-tabCloseIcon").click()
    expect(beside.root).to_have_count(0)
    notebook.run(1)
    view.row("second").wait_for()


def test_a_restarted_kernel_is_said_to_be_gone(notebook: Notebook):
    notebook.run(1)
    view = View(notebook.cell(1))
    view.select("first")
    shown = view.figures()
    notebook.restart_kernel()
    expect(view.part("nni-banner")).to_contain_text("Not connected")
    assert view.figures() == shown  # what was there stays to be read
    notebook.run(0, seconds=120)
    notebook.run(1)
    view = View(notebook.cell(1))
    view.select("second")
    expect(view.root.get_by_test_id("nni-banner")).to_have_count(0)
    notebook.ask_until("insp.selected", "second")
    # what a kernel writes in the moment of its end may reach JupyterLab in pieces, and of a comm
    # that ended with it JupyterLab itself says so
    theirs = ("Kernel message validation error", "Comm not found for comm id")
    notebook.console[:] = [line for line in notebook.console if not any(t in line for t in theirs)]


def test_a_reloaded_page_shows_everything_again(notebook: Notebook):
    notebook.run(1)
    view = View(notebook.cell(1))
    view.select("first")
    view.perturb("Zero")
    view.part("nni-effect").wait_for()
    shown = view.figures()
    notebook.save_and_reload()
    view = View(notebook.cell(1))
    view.wait_selected("first")
    expect(view.part("nni-perturbation")).to_have_attribute("data-site", "first")
    view.part("nni-effect").wait_for()
    assert view.figures() == shown
    view.part("nni-switch").click()
    view.part("nni-no-effect").wait_for()
    assert notebook.ask("insp.effect") is None
