"""The kernel of a notebook: how messages of the browser are seen while a cell runs.

In ipykernel 7.1 and later a thread of the kernel reads the shell socket, even while a cell runs. In
ipykernel 6, and in the kernels built on it, the thread that runs the cells reads it between two
cells, into a queue. Nothing here takes a message that its caller does not ask for.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

Kernel: TypeAlias = Any
"""A kernel of ipykernel, whose class differs with its version."""
Frames: TypeAlias = Any
"""What was received on a socket: parts of one message, of zmq."""
Message: TypeAlias = Any
"""A message of Jupyter, as its session has it."""


def current_kernel() -> Kernel | None:
    """The kernel of this process, or None: a script, a terminal."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None)


def shell_reader(kernel: Kernel) -> Literal["thread", "queue", "other"]:
    """Who reads the shell socket: a thread of its own, or the thread of the cells, into a queue.

    "other" is a kernel in which messages cannot be seen while a cell runs.
    """
    # Names within ipykernel, which differ between 6.17 (Colab) and 7.2. A kernel without one of
    # them is left alone: its clicks wait for the cell's end, and the screen says so. It can go when
    # ipykernel delivers comm messages while a cell runs, as subshells do.
    needs = ("session", "shell_stream", "iopub_socket", "get_parent", "_topic")
    if any(getattr(kernel, name, None) is None for name in needs):
        return "other"
    thread, queue = (getattr(kernel, x, None) for x in ("shell_channel_thread", "msg_queue"))
    if thread is not None:
        seen = hasattr(thread, "io_loop") and hasattr(kernel.shell_stream, "_recv_callback")
        return "thread" if seen else "other"
    return "queue" if hasattr(queue, "_queue") and hasattr(kernel, "dispatch_shell") else "other"


# ------------------------------------------------------------------- a thread


def intercept_shell(kernel: Kernel, take: Callable[[Frames], bool]) -> None:
    """Offer each message to `take` first, in the thread that reads the shell socket.

    What it returns False for takes its usual way, in order.
    """
    stream = kernel.shell_stream

    def install() -> None:
        usual = stream._recv_callback
        # A stream has one receiver. Ours looks at each message and hands it on, in the thread that
        # reads the socket, so none overtakes another. Without it, a click would wait for the end of
        # the cell.
        stream.on_recv(lambda frames: None if take(frames) else usual(frames), copy=False)

    kernel.shell_channel_thread.io_loop.add_callback(install)


# ------------------------------------------------------------------- a queue


@dataclasses.dataclass(frozen=True, eq=False)
class QueuedMessage:
    """A message in the kernel's queue.

    Attributes:
        number: its place among all that were ever queued.
        frames: what was received, or None for a job of the kernel's own.
    """

    number: int
    frames: Frames | None
    item: object


def flush_shell_to_queue(kernel: Kernel) -> None:
    """Let the kernel queue what has arrived on the shell socket, as it does between two cells.

    Only for the thread that runs the cells. No message is lost to an interrupt meanwhile.
    """
    import zmq

    stream = kernel.shell_stream
    if not stream.closed() and stream.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        # An interrupt between reading it and queueing it would lose it: an execute request that
        # never ends.
        with _deferred_interrupt():
            stream.flush(zmq.POLLIN)


def messages_after(kernel: Kernel, number: int) -> list[QueuedMessage]:
    """What the kernel has queued since the message of this number, oldest first."""
    queue = kernel.msg_queue._queue
    if not queue or queue[-1][0] <= number:
        return []
    new = [item for item in list(queue) if item[0] > number]
    usual = kernel.dispatch_shell
    return [QueuedMessage(x[0], x[2][0] if x[1] == usual else None, x) for x in new]


def remove_from_queue(kernel: Kernel, one: QueuedMessage) -> bool:
    """Take a message out of the queue, from any thread; False if the kernel has taken it."""
    try:
        kernel.msg_queue._queue.remove(one.item)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual):  # ignored, or not Python's to put back
        yield
        return
    came: list[tuple[int, types.FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            usual(*came[0])


def is_in_cell() -> bool:
    """Whether this thread is within the code of a cell."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "run_code" and "IPython" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


# ------------------------------------------------------------------- messages


@dataclasses.dataclass(frozen=True, eq=False)
class CommMessage:
    """A message on a comm.

    Attributes:
        comm: the id of the comm.
        subshell: the subshell that it is addressed to, if any.
        data: its content.
        buffers: what came with it.
        header: the whole message but its content.
    """

    comm: str
    subshell: str | None
    data: Message
    buffers: list[Any]
    header: Message


def comm_message(kernel: Kernel, frames: object) -> CommMessage | None:
    """The message in some frames, if it is one on a comm. Nothing notes that it was read."""
    session = kernel.session
    try:
        _, rest = session.feed_identities(frames, copy=False)
        message = session.deserialize(rest, content=False, copy=False)
        if message["header"]["msg_type"] != "comm_msg":
            return None
        content = session.unpack(message["content"])
        comm, data = content["comm_id"], content["data"]
    except (ValueError, TypeError, KeyError):  # the kernel says so in its turn
        return None
    subshell = message["header"].get("subshell_id")
    return CommMessage(comm, subshell, data, message["buffers"], message)


def send_status(kernel: Kernel, state: Literal["busy", "idle"], parent: object) -> None:
    """Tell the front end how the kernel is because of a message; any thread may."""
    topic = kernel._topic("status")
    content = {"execution_state": state}
    kernel.session.send(kernel.iopub_socket, "status", content, parent=parent, ident=topic)


def allow_thread_to_send() -> None:
    """Let comms send from this thread, which in ipykernel 7.0 only threads of the kernel's may."""
    kernel = current_kernel()
    parent = getattr(kernel, "_shell_parent", None)
    if isinstance(parent, contextvars.ContextVar) and not hasattr(kernel, "_shell_context"):
        parent.set(parent.get({}))


def disable_reply_subshell(comm: object) -> None:
    """Let each message on a comm be handled where the browser addresses it: by its subshell, or by
    the shell.

    Where no kernel has the comm, or an ipykernel that does so by itself, nothing is changed.
    """
    # ipykernel 7.4 keeps the shell that last sent on a comm, and hands what arrives on it to that
    # shell instead (ipykernel's comm/comm.py, `_reply_subshell_for`). For us that would be the
    # shell of a cell that trains, so clicks would wait for the cell's end, or the subshell of
    # another page, which may be gone. The method is replaced on this one comm. It can go when a
    # comm can say in public where its messages are handled.
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default  # type: ignore[attr-defined]


def cell_request(kernel: Kernel) -> Message:
    """The message whose code runs in the thread of the cells."""
    return kernel.get_parent("shell")
