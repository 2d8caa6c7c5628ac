"""The page of a module on an inspector's screen: what changed, modes, bounds, other threads."""

import threading

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from inside import inside, receive

import nnx_inspector as nni
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comm import InspectorWidget


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.dense(x)))


class Asked:
    """An inspector whose messages are collected, as a browser would receive them."""

    def __init__(self, monkeypatch, model, *args):
        self.sent = []
        monkeypatch.setattr(
            InspectorWidget, "send", lambda _, content, *__: self.sent.append(content)
        )
        self.insp = nni.Inspector(model, *args, display=False)
        inside(self.insp).rerun.wait_for_first()
        self.number = 0

    def ask(self, message):
        """The replies, and the stream's messages before them."""
        self.number += 1
        inside(
            self.insp
        ).core.recorder.wait()  # which shows a step of a loop while the loop goes on
        self.sent.clear()
        header = {**message, "id": self.number}
        receive(inside(self.insp).view.screen, header)
        got = [protocol.from_header(h) for h in self.sent]
        replies = [m for m in got if isinstance(m, protocol.Reply)]
        assert [r.id for r in replies] == [self.number]
        own = [m for m in got if not isinstance(m, protocol.Findings)]  # they come when they will
        assert own[-1] is replies[0]
        return replies[0], [m for m in got if isinstance(m, protocol.Nnx)]

    def page(self, site=""):
        reply, pages = self.ask({"type": "show_nnx", "site": site})
        assert reply.ok, reply.error
        (page,) = pages
        assert (page.id, page.site) == (self.number, site)
        return page


def batch():
    return jax.random.normal(jax.random.key(0), (16, 3))


@pytest.fixture
def asked(monkeypatch):
    asked = Asked(monkeypatch, Noisy(nnx.Rngs(0)), batch())
    yield asked
    asked.insp.close()


def of(page):
    return {v.path: v for v in page.variables}


def test_the_last_pass_tells_what_it_would_have_changed(asked):
    model, x = asked.insp.model, np.asarray(batch(), np.float64)
    before = nnx.to_pure_dict(nnx.state(model))
    kernel, bias = (
        np.asarray(v, np.float64) for v in (model.dense.kernel[...], model.dense.bias[...])
    )
    y = x @ kernel + bias
    new_var = 0.99 * np.ones(4) + 0.01 * y.var(0)
    for site in ("", "norm"):
        rows = of(asked.page(site))
        var, mean = rows["norm/var"].passed, rows["norm/mean"].passed
        assert var.distance == pytest.approx(np.linalg.norm(new_var - 1), rel=1e-4)
        assert var.relative == pytest.approx(np.linalg.norm(new_var - 1) / 2, rel=1e-4)
        assert mean.distance == pytest.approx(np.linalg.norm(0.01 * y.mean(0)), rel=1e-4)
        assert mean.relative is None, "it was 0"
        assert rows["norm/scale"].passed.same
    assert of(asked.page("drop"))["drop/rngs/count"].passed.distance == 1
    assert asked.page().passed == "run"
    after = nnx.to_pure_dict(nnx.state(model))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, after))


def test_what_the_loop_changed_is_told_by_the_step(asked):
    insp, model = asked.insp, asked.insp.model
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)

    pages, kernels = [], []
    for x in insp.watch([batch()] * 3, every=1):
        pages.append(asked.page())
        kernels.append(np.asarray(model.dense.kernel[...], np.float64))
        step(model, optimizer, x)
    first, second, third = pages
    assert first.since is None
    assert (second.since, second.step, third.since) == (first.step, first.step + 1, second.step)
    assert all(v.change is None for v in first.variables)
    moved = of(third)["dense/kernel"].change
    assert moved.distance == pytest.approx(np.linalg.norm(kernels[2] - kernels[1]), rel=1e-9)
    assert moved.relative == pytest.approx(
        np.linalg.norm(kernels[2] - kernels[1]) / np.linalg.norm(kernels[1]), rel=1e-9
    )
    count = of(third)["drop/rngs/count"].change
    assert (count.before, count.after) == ("1", "2")
    assert of(third)["drop/rngs/key"].change.same


def test_asked_twice_the_last_change_is_still_there(asked):
    asked.page("norm")
    asked.insp.model.norm.var[...] = 3 * jnp.ones(4)
    for _ in range(3):
        page = asked.page("norm")
        assert of(page)["norm/var"].change.relative == pytest.approx(2)
        assert of(page)["norm/scale"].change.same
    asked.page("dense")
    assert asked.page("norm").since is None, "one module's Variables are kept at a time"


def test_modes_are_told_and_switched_for_inspected_passes_only(asked):
    page = asked.page()
    modes = {(m.module, m.name): m for m in page.modes}
    assert set(modes) == {("norm", "use_running_average"), ("drop", "deterministic")}
    mode = modes["drop", "deterministic"]
    assert (mode.own, mode.in_force, mode.value, mode.flag, mode.switched) == (
        "False", "False", False, True, False,
    )  # fmt: skip
    switch = {"type": "switch_mode", "module": "drop", "name": "deterministic"}
    reply, _ = asked.ask(switch | {"value": True})
    assert reply.ok
    assert asked.insp.modes["drop"]["deterministic"] is True
    assert asked.insp.model.drop.deterministic is False
    page = asked.page("drop")
    (mode,) = page.modes
    assert (mode.own, mode.value, mode.switched) == ("False", True, True)
    assert of(page)["drop/rngs/count"].passed.same, "no number was drawn in that mode"
    reply, _ = asked.ask(switch | {"value": None})
    assert reply.ok
    assert asked.insp.modes["drop"]["deterministic"] is False


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"module": "nowhere", "name": "deterministic", "value": True}, "'nowhere' has no mode"),
        ({"module": "drop", "name": "only", "value": True}, "has no mode 'only'. It has determin"),
        ({"module": "dense", "name": "__class__", "value": True}, "It has none."),
        ({"module": "**", "name": "deterministic", "value": True}, "'**' has no mode"),
        ({"module": "drop", "name": "deterministic", "value": 1}, "switch_mode.value must be bool"),
        ({"module": "drop", "name": "deterministic"}, "lacks ['value']"),
    ],
)
def test_a_switch_that_cannot_be_is_refused(asked, message, text):
    reply, _ = asked.ask({"type": "switch_mode", **message})
    assert not reply.ok
    assert text in reply.error
    assert not asked.insp.modes.switches()


@pytest.mark.parametrize("site", ["nowhere", "dense/kernel", "drop/rngs", "__proto__"])
def test_where_there_is_no_module_it_says_so(asked, site):
    reply, pages = asked.ask({"type": "show_nnx", "site": site})
    assert pages == []
    assert f"NNX has no module at {site!r}" in reply.error


def test_the_page_of_a_method_is_its_module_s(monkeypatch):
    asked = Asked(monkeypatch, models.Methods(models.rngs()), models.batch(2, 3))
    for key, path in ((":encode", ""), ("encoder:anything", "encoder")):
        assert asked.page(key).nodes[0].path == path
    asked.insp.close()


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(1, 1, rngs=rngs) for _ in range(400)])
        self.last = nnx.Linear(1, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(x)


def test_a_large_model_is_cut_and_says_how_much(monkeypatch):
    asked = Asked(monkeypatch, Wide(nnx.Rngs(0)), jnp.ones((1, 1)))
    page = asked.page()
    assert len(page.nodes) == protocol.MOST_NODES
    assert page.nodes_total == 403
    assert len(page.variables) == protocol.MOST_VARIABLES
    assert page.variables_total == 802
    assert page.kinds[0].variables == 802
    assert len(protocol.to_json(page)) < 400_000
    asked.insp.close()


def test_while_another_thread_trains_with_donated_buffers(asked):
    """Each page is complete or an error with a text; the training is not disturbed."""
    model = asked.insp.model
    state = nnx.state(model, (nnx.Param, nnx.BatchStat))
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 1, s), donate_argnums=0)
    errors, over = [], threading.Event()

    def train():
        nonlocal state
        try:
            for _ in range(200):
                state = step(state)
                nnx.update(model, state)
        except Exception as error:
            errors.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=train)
    thread.start()
    asked_times = 0
    while not over.is_set() or not asked_times:
        page = asked.page()
        asked_times += 1
        assert {v.held for v in page.variables} <= {"array", "deleted"}
    thread.join()
    assert errors == []
    assert {v.held for v in asked.page().variables} == {"array"}


def test_it_lets_go_of_its_copies_when_closed(asked):
    asked.page()
    assert inside(asked.insp).pages._snapshots is not None  # what is kept until the next look
    asked.insp.close()
    assert inside(asked.insp).pages._snapshots is None
