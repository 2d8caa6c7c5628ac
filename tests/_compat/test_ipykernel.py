"""The kernel's private names, in a real kernel: each function, where its ipykernel has them."""

import signal
import types

import pytest
import zmq
from kernels import PACKAGES, kernel

from nnx_inspector._compat.ipykernel import (
    allow_thread_to_send,
    current_kernel,
    flush_shell_to_queue,
    shell_reader,
)

VERSIONS = ["newest", *(v for v in PACKAGES if v not in ("6.30", "newest")), "6.30"]
SETUP = """
import threading
import ipywidgets
from nnx_inspector._compat import ipykernel as private
kernel = private.current_kernel()
widget = ipywidgets.IntText()
"""


@pytest.fixture(scope="module", params=VERSIONS)
def kernel_of(request, tmp_path_factory):
    with kernel(request.param, tmp_path_factory.mktemp("private") / request.param) as one:
        one.run(SETUP)
        one.comm = one.ask("widget.model_id")
        one.version = request.param
        yield one


def test_who_reads_the_shell_socket(kernel_of):
    by = "queue" if kernel_of.version.startswith("6") else "thread"
    assert kernel_of.ask("private.shell_reader(kernel)") == by, (
        "this ipykernel has moved a name that clicks in a running cell need"
    )


def test_messages_are_taken_in_the_thread_that_reads_or_out_of_the_queue(kernel_of):
    """What is taken is not handled by the kernel, and what is not taken is."""
    kernel_of.run("got = []\nwidget.on_msg(lambda widget, content, buffers: got.append(content))")
    if kernel_of.version.startswith("6"):
        cell = (
            "print('began', flush=True)\n"
            "taken, seen = [], -1\n"
            "while len(taken) < 2:\n"
            "    private.flush_shell_to_queue(kernel)\n"
            "    for one in private.messages_after(kernel, seen):\n"
            "        seen, message = one.number, private.comm_message(kernel, one.frames)\n"
            "        if message is not None and message.data['content'] != 'leave':\n"
            "            assert private.remove_from_queue(kernel, one)\n"
            "            assert not private.remove_from_queue(kernel, one)\n"
            "            taken.append(message)\n"
        )
    else:
        cell = (
            "taken, both = [], threading.Event()\n"
            "def take(frames):\n"
            "    message = private.comm_message(kernel, frames)\n"
            "    if message is None or message.data['content'] == 'leave':\n"
            "        return False\n"
            "    taken.append(message)\n"
            "    if len(taken) == 2:\n"
            "        both.set()\n"
            "    return True\n"
            "private.intercept_shell(kernel, take)\n"
            "kernel.shell_channel_thread.io_loop.add_callback(lambda: print('began', flush=True))\n"
            "assert both.wait(60)\n"
        )
    request = kernel_of.start(cell)
    kernel_of.printed("began")
    sent = [kernel_of.send(kernel_of.comm, text) for text in ("first", "leave", "second")]
    assert kernel_of.reply(request)["status"] == "ok"
    kernel_of.idle(sent[1])
    assert kernel_of.ask("[one.data['content'] for one in taken]") == ["first", "second"]
    assert kernel_of.ask("[one.comm for one in taken]") == [kernel_of.comm] * 2
    assert kernel_of.ask("[one.subshell for one in taken]") == [None] * 2
    assert kernel_of.ask("got") == ["leave"]


def test_a_status_is_said_of_a_message(kernel_of):
    request = kernel_of.start("private.send_status(kernel, 'idle', private.cell_request(kernel))")
    kernel_of.reply(request)
    kernel_of.idle(request)
    of = [m for _, m in kernel_of.heard if m["parent_header"].get("msg_id") == request]
    said = [m["content"]["execution_state"] for m in of if m["msg_type"] == "status"]
    assert said[:2] == ["busy", "idle"]


def test_a_cell_is_told_from_what_runs_beside_it(kernel_of):
    kernel_of.run(
        "beside = []\n"
        "thread = threading.Thread(target=lambda: beside.append(private.is_in_cell()))\n"
        "thread.start(); thread.join()"
    )
    assert kernel_of.ask("[private.is_in_cell(), *beside]") == [True, False]


def test_a_thread_may_send_on_a_comm(kernel_of):
    kernel_of.run(
        "def send():\n"
        "    private.allow_thread_to_send()\n"
        "    widget.send({'from': 'a thread'})\n"
        "    sent.append(True)\n"
        "sent = []\n"
        "thread = threading.Thread(target=send)\n"
        "thread.start(); thread.join()"
    )
    assert kernel_of.ask("sent") == [True]
    data = [m["content"]["data"] for _, m in kernel_of.heard if m["msg_type"] == "comm_msg"]
    assert {"from": "a thread"} in [one.get("content") for one in data]


@pytest.mark.parametrize("kernel_of", ["newest"], indirect=True)
def test_a_comm_is_answered_where_it_is_addressed_whoever_last_sent_on_it(kernel_of):
    kernel_of.run(
        "private.disable_reply_subshell(widget.comm)\n"
        "heard = threading.Event()\n"
        "widget.on_msg(lambda w, content, b: heard.set())"
    )
    request = kernel_of.start(
        "widget.send({'from': 'the cell'})\nprint('began', flush=True)\nassert heard.wait(60)"
    )
    kernel_of.printed("began")
    there = {"method": "custom", "content": "leave"}  # not for an earlier test's tap
    kernel_of.send_plain(kernel_of.comm, there, kernel_of.subshell())
    assert kernel_of.reply(request)["status"] == "ok"


class Interrupted:
    """A shell stream into which an interrupt comes while it is read."""

    closed = staticmethod(lambda: False)
    read = False

    @property
    def socket(self):
        return self

    def getsockopt(self, option):
        return zmq.POLLIN

    def flush(self, flag):
        signal.raise_signal(signal.SIGINT)
        self.read = True


def test_an_interrupt_loses_no_message_that_is_being_read():
    kernel = types.SimpleNamespace(shell_stream=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        flush_shell_to_queue(kernel)
    assert kernel.shell_stream.read
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_kernel_that_has_moved_a_name_is_not_listened_to():
    names = ("session", "shell_stream", "iopub_socket", "get_parent", "_topic", "dispatch_shell")
    known = dict.fromkeys(names, object()) | {"msg_queue": types.SimpleNamespace(_queue=[])}
    assert shell_reader(types.SimpleNamespace(**known)) == "queue"
    for name in ("iopub_socket", "dispatch_shell", "msg_queue"):
        less = {key: value for key, value in known.items() if key != name}
        assert shell_reader(types.SimpleNamespace(**less)) == "other", name


def test_without_a_kernel_there_is_none():
    assert current_kernel() is None
    allow_thread_to_send()
