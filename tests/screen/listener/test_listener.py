"""Clicks in a running cell, without kernel subshells, in real kernels of several versions.

Each loop ends when its click has acted: a kernel that does not poll it never ends the test's cell,
and the test fails by its limit of steps.
"""

from __future__ import annotations

import itertools
import threading

import pytest
from kernels import PACKAGES, kernel

import nnx_inspector.screen.listener.listener as listeners
from nnx_inspector._compat.ipykernel import QueuedMessage
from nnx_inspector.screen.listener.listener import QueueListener

VERSIONS = [*PACKAGES]
"""The first, which is Colab's, and the last are in the run that everybody waits for."""

SETUP = """
import asyncio, collections, itertools, os, threading, time
import jax, jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni
from nnx_inspector.screen.listener.listener import listener

class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.second = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))

model, x = Net(rngs=nnx.Rngs(0)), jnp.ones((2, 3))
insp = nni.Inspector(model, x, display=False)
call = nnx.jit(lambda model, x: model(x))
call(model, x)
MOST = 20_000

def loss_fn(model, x):
    return (model(x) ** 2).mean()

def steps():
    'Steps of a millisecond until the click has acted; what another cell has done is not there.'
    global has_acted
    has_acted = False
    print("began", flush=True)
    for step in range(MOST):
        time.sleep(0.001)
        yield step
        if insp.selected == wanted:
            has_acted = True
            return

def heard_by(comm_id):
    notes = []
    listener().listen(comm_id, lambda content, buffers: notes.append(content))
    return notes
"""
LOOPS = {
    "iterated": "for _ in insp.watch(steps(), every=10**9): pass",
    "ticks": "with insp.watch(every=10**9):\n    for _ in steps(): insp.tick()",
    "region": "with insp.watch(every=10**9):\n    for _ in steps(): call(model, x)",
    "by hand": "for _ in steps(): insp.step(loss_fn, x)",
    "metrics": "with insp.watch(every=10**9):\n    for _ in steps(): insp.metrics(n=1.0)",
}


@pytest.fixture(scope="module", params=VERSIONS)
def kernel_of(request, tmp_path_factory):
    with kernel(request.param, tmp_path_factory.mktemp("ear") / request.param) as one:
        one.run(SETUP)
        one.comm = one.ask("insp._core.view.screen.control.model_id")
        one.numbers = itertools.count(1)
        one.version = request.param
        yield one


def click(one, site):
    """Select a site, as a click on its row does; returns the number of the request."""
    number = next(one.numbers)
    one.send(one.comm, {"type": "select", "id": number, "site": site})
    return number


def replies(one):
    data = [m["content"]["data"] for _, m in one.heard if m["msg_type"] == "comm_msg"]
    found = [d["content"] for d in data if d.get("method") == "custom"]
    return [c["id"] for c in found if c.get("type") == "reply" and c["ok"]]


def begin(one, loop, *, wanted, before=""):
    one.run(f"insp.selected, wanted = '', {wanted!r}\n{before}")
    request = one.start(loop)
    one.printed("began")
    return request


def acted(one, request, *, status="ok"):
    """The loop has ended, because its click has acted."""
    reply = one.reply(request)
    assert reply["status"] == status
    one.idle(request)
    while one.reply(one.start("pass"))["status"] == "aborted":
        pass  # after an error a kernel refuses cells for a moment
    assert one.ask("has_acted")
    return reply


def test_it_says_how_it_hears(kernel_of):
    listens = "steps" if kernel_of.version.startswith("6") else "during"
    assert kernel_of.ask("insp._core.view.screen.listening(None)") == listens


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_click_acts_in_each_kind_of_loop(kernel_of, loop):
    request = begin(kernel_of, loop, wanted="second")
    number = click(kernel_of, "second")
    acted(kernel_of, request)
    assert replies(kernel_of).count(number) == 1, "handled once"


def test_the_stop_of_a_sweep_is_heard(kernel_of):
    kernel_of.run(
        "from nnx_inspector.progress import Bar\n"
        "bar = Bar('sweep')\n"
        "def work():\n"
        "    print('began', flush=True)\n"
        "    for done in range(MOST):\n"
        "        time.sleep(0.001)\n"
        "        if bar.report(done, MOST):\n"
        "            return 'stopped'\n"
        "    return 'never'"
    )
    button = kernel_of.ask("bar.button.model_id")
    request = kernel_of.start("print(f'ended: {work()}'); bar.close()")
    kernel_of.printed("began")
    kernel_of.send(button, {"event": "click"})
    kernel_of.printed("ended: stopped")
    kernel_of.idle(request)


def test_queued_cells_wait_in_their_order(kernel_of):
    loop = "for _ in insp.watch(steps(), every=10**9): pass\nran = len(order)"
    request = begin(kernel_of, loop, wanted="first", before="order = []")
    cells = [kernel_of.start(f"order.append({i})") for i in range(200)]
    clicks = [click(kernel_of, "second"), click(kernel_of, "first")]
    acted(kernel_of, request)
    for cell in cells:
        assert kernel_of.reply(cell)["status"] == "ok"
    assert kernel_of.ask("ran") == 0
    assert kernel_of.ask("order") == list(range(200))
    assert [number for number in replies(kernel_of) if number in clicks] == clicks


def test_an_error_still_ends_the_queued_cells(kernel_of):
    loop = "for _ in insp.watch(steps(), every=10**9): pass\nraise ZeroDivisionError"
    request = begin(kernel_of, loop, wanted="second", before="order = []")
    cells = [kernel_of.start(f"order.append({i})") for i in range(5)]
    click(kernel_of, "second")
    assert acted(kernel_of, request, status="error")["ename"] == "ZeroDivisionError"
    assert {kernel_of.reply(cell)["status"] for cell in cells} <= {"aborted", "error"}
    assert kernel_of.ask("order") == []


def test_an_interrupt_ends_the_loop_and_nothing_else(kernel_of):
    request = begin(
        kernel_of, "for _ in insp.watch(steps(), every=10**9): pass", wanted="never selected"
    )
    number = click(kernel_of, "second")
    kernel_of.until(lambda _, m: number in replies(kernel_of))
    kernel_of.manager.interrupt_kernel()
    assert kernel_of.reply(request)["ename"] == "KeyboardInterrupt"
    kernel_of.idle(request)
    request = begin(kernel_of, LOOPS["iterated"], wanted="first")
    click(kernel_of, "first")
    acted(kernel_of, request)


def test_messages_of_others_are_left_alone(kernel_of):
    """Those on another comm, and those on ours that are no custom ones, wait for the cell's end."""
    kernel_of.run(
        "import ipywidgets\n"
        "others = [ipywidgets.IntText() for _ in range(2)]\n"
        "got = []\n"
        "for other in others:\n"
        "    other.on_msg(lambda widget, content, buffers: got.append(content['n']))\n"
        "    other.observe(lambda change: got.append(change.new), 'value')\n"
    )
    first, second = kernel_of.ask("[one.model_id for one in others]")
    loop = "for _ in insp.watch(steps(), every=10**9): pass\nran = list(got)"
    request = begin(kernel_of, loop, wanted="second")
    sent = [kernel_of.send(first, {"n": 0})]
    sent.append(kernel_of.send_plain(second, {"method": "update", "state": {"value": 1}}))
    sent.append(kernel_of.send_plain(kernel_of.comm, {"method": "request_state"}))
    sent.append(kernel_of.send(second, {"n": 2}))
    click(kernel_of, "second")
    acted(kernel_of, request)
    for one in sent:
        kernel_of.idle(one)
    assert kernel_of.ask("ran") == []
    assert kernel_of.ask("got") == [0, 1, 2]


def test_a_handler_that_raises_or_looks_itself_is_harmless(kernel_of):
    kernel_of.run(
        "import ipywidgets\n"
        "odd = ipywidgets.IntText()\n"
        "seen = []\n"
        "def handle(content, buffers):\n"
        "    seen.append(content['n'])\n"
        "    insp._core.view.screen.poll()\n"
        "    raise ZeroDivisionError\n"
        "listener().listen(odd.model_id, handle)"
    )
    odd = kernel_of.ask("odd.model_id")
    request = begin(kernel_of, LOOPS["iterated"], wanted="second")
    sent = [kernel_of.send(odd, {"n": n}) for n in range(3)]
    click(kernel_of, "second")
    acted(kernel_of, request)
    for one in sent:
        kernel_of.idle(one)
    assert kernel_of.ask("seen") == [0, 1, 2]


def test_a_storm_is_handled_whole_in_its_order(kernel_of):
    kernel_of.run(
        "import ipywidgets\nstorm = ipywidgets.IntText()\nrained = heard_by(storm.model_id)"
    )
    storm = kernel_of.ask("storm.model_id")
    request = begin(kernel_of, LOOPS["iterated"], wanted="second")
    for n in range(500):
        kernel_of.send(storm, {"n": n})
    click(kernel_of, "second")
    acted(kernel_of, request)
    assert kernel_of.ask("[one['n'] for one in rained]") == list(range(500))


def test_a_closed_inspector_leaves_its_messages_to_the_kernel(kernel_of):
    kernel_of.run("gone = nni.Inspector(model, x, display=False)")
    comm = kernel_of.ask("gone._core.view.screen.control.model_id")
    request = begin(kernel_of, "gone.close()\n" + LOOPS["iterated"], wanted="second")
    late = kernel_of.send(comm, {"type": "select", "id": 1, "site": "first"})
    click(kernel_of, "second")
    acted(kernel_of, request)
    kernel_of.idle(late)


ASYNC = {
    "that waits": "for _ in insp.watch(steps(), every=10**9): await asyncio.sleep(0)",
    "with a gui": "%gui asyncio\nfor _ in insp.watch(steps(), every=10**9): pass",
}


@pytest.mark.parametrize("loop", ASYNC.values(), ids=ASYNC)
def test_a_click_acts_in_a_cell_that_is_a_task_or_has_a_gui(kernel_of, loop):
    request = begin(kernel_of, loop, wanted="second")
    click(kernel_of, "second")
    acted(kernel_of, request)


@pytest.mark.parametrize("kernel_of", ["newest"], indirect=True)
def test_what_is_for_a_subshell_goes_there_and_another_click_acts_beside_it(kernel_of):
    """As with two front ends on one kernel, of which one asks for a subshell."""
    kernel_of.run(
        "import ipywidgets\n"
        "from nnx_inspector._compat.ipykernel import disable_reply_subshell\n"
        "both = ipywidgets.IntText()\n"
        "disable_reply_subshell(both.comm)\n"
        "by_shell, by_ear = [], []\n"
        "name = lambda: threading.current_thread().name\n"
        "both.on_msg(lambda widget, content, buffers: by_shell.append(name()))\n"
        "listener().listen(both.model_id, lambda content, buffers: by_ear.append(name()))"
    )
    both, subshell = kernel_of.ask("both.model_id"), kernel_of.subshell()
    request = begin(kernel_of, LOOPS["iterated"], wanted="second")
    there = kernel_of.send_plain(both, {"method": "custom", "content": {}}, subshell)
    here = kernel_of.send(both, {})
    kernel_of.idle(there)
    kernel_of.idle(here)
    click(kernel_of, "second")
    acted(kernel_of, request)
    assert kernel_of.ask("by_ear") == ["nnx_inspector.listener"]
    (name,) = kernel_of.ask("by_shell")
    assert "subshell" in name


def test_comms_that_the_page_closes_leave_the_loop_and_its_recording_alone(kernel_of):
    """The loop is measured, and so drawn, at each step; the kernel is told as by the page."""
    kernel_of.run(
        "import ipywidgets\n"
        "left, closer = nni.Inspector(model, x, display=False), ipywidgets.IntText()\n"
        "screen = left._core.view.screen\n"
        "comms = [screen.control.comm, screen.stream.comm]\n"
        "def close(content, buffers):\n"
        "    for one in comms:\n"
        "        message = {'content': {'comm_id': one.comm_id, 'data': {}}}\n"
        "        get_ipython().kernel.comm_manager.comm_close(None, None, message)\n"
        "listener().listen(closer.model_id, close)"
    )
    closer = kernel_of.ask("closer.model_id")
    loop = (
        "for ran in left.watch(steps(), every=1):\n"
        "    call(model, x)\n"
        "    if ran == 5: print('drawn', flush=True)"
    )
    request = begin(kernel_of, loop, wanted="second")
    kernel_of.printed("drawn")
    kernel_of.idle(kernel_of.send(closer, {}))
    click(kernel_of, "second")
    acted(kernel_of, request)
    assert kernel_of.ask("[one._closed for one in comms]") == [True, True]
    passes = "[one.step for one in left.recording.passes if one.kind == 'watch']"
    recorded, ran = kernel_of.ask(f"[{passes}, ran]")
    assert recorded[-1] == ran
    kernel_of.run("left.run(x); left.close()")


def test_a_click_acts_and_cells_keep_their_order_while_a_debugger_is_attached(kernel_of):
    numbers = itertools.count(1)

    def debug(command, **arguments):
        request = {"type": "request", "seq": next(numbers)}
        answer = kernel_of.control(
            "debug_request", request | {"command": command, "arguments": arguments}
        )
        assert answer["success"], answer

    debug("initialize", clientID="test", adapterID="python")
    debug("attach", type="python", request="attach")
    debug("configurationDone")
    try:
        request = begin(kernel_of, LOOPS["iterated"], wanted="second", before="order = []")
        cells = [kernel_of.start(f"order.append({i})") for i in range(5)]
        click(kernel_of, "second")
        acted(kernel_of, request)
        for cell in cells:
            assert kernel_of.reply(cell)["status"] == "ok"
        assert kernel_of.ask("order") == list(range(5))
    finally:
        debug("disconnect", restart=False, terminateDebuggee=False)


def test_a_click_between_two_cells_is_handled_as_ever(kernel_of):
    number = click(kernel_of, "first")
    kernel_of.until(lambda _, m: number in replies(kernel_of))
    assert kernel_of.ask("insp.selected") == "first"


class QueuedKernel:
    """A pump of a kernel that has queued some messages, of which each takes a while to look at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, messages: int, seconds: float):
        self.now, self.seconds, self.looks, self.seen = 100.0, seconds, 0, []
        self.queued = [QueuedMessage(number, [b""], None) for number in range(messages)]
        monkeypatch.setattr(listeners.time, "monotonic", lambda: self.now)
        for name, does in {
            "flush_shell_to_queue": self.look,
            "messages_after": lambda kernel, number: self.queued[number + 1 :],
            "comm_message": self.read,
        }.items():
            monkeypatch.setattr(listeners.ipykernel, name, does)
        self.pump = QueueListener(None)

    def look(self, kernel: object) -> None:
        self.looks += 1

    def read(self, kernel: object, frames: object) -> None:
        self.seen.append(self.looks)
        self.now += self.seconds


def test_the_socket_is_looked_at_ten_times_a_second_in_the_thread_of_the_cells(monkeypatch):
    kernel = QueuedKernel(monkeypatch, messages=0, seconds=0.0)
    for _ in range(10_000):  # steps of a millisecond
        kernel.pump.poll()
        kernel.now += 0.001
    assert kernel.looks == pytest.approx(100, abs=2)
    kernel.now += 1.0
    before = kernel.looks
    other = threading.Thread(target=kernel.pump.poll)
    other.start()
    other.join()
    assert kernel.looks == before


def test_a_step_waits_for_five_milliseconds_and_the_next_one_goes_on(monkeypatch):
    kernel = QueuedKernel(monkeypatch, messages=7, seconds=0.002)
    for _ in range(5):
        kernel.pump.poll()
    assert kernel.seen == [1, 1, 1, 2, 2, 2, 3]
    assert kernel.looks == 3, "all were seen: the next look is a tenth of a second later"
