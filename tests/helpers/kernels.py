"""Real kernels of several versions of ipykernel, spoken to as a front end does.

A version lies in a folder of its own before the packages of this environment. What happens is told
by messages, never by a clock; `SECONDS` only ends a test that has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

import nnx_inspector

SECONDS: Final = 60.0
PACKAGES: Final = {
    "6.17": (
        "ipykernel==6.17.1", "ipython==7.34.0", "ipywidgets==7.7.1", "anywidget==0.9.21",
        "traitlets==5.7.1", "jupyter_client==7.4.9", "backcall==0.2.0", "pickleshare==0.7.5",
        "ipython_genutils==0.2.0", "nest_asyncio==1.6.0", "entrypoints==0.4", "psutil",
        "decorator==5.2.1",
    ),
    "6.30": ("ipykernel==6.30.1", "nest_asyncio==1.6.0"),
    "7.0": ("ipykernel==7.0.1", "nest_asyncio==1.6.0"),
    "7.1": ("ipykernel==7.1.0", "nest_asyncio==1.6.0"),
    "newest": (),
}  # fmt: skip
"""Version -> what it needs besides the packages of this environment. The first is Colab's."""


def installed(version: str, folder: pathlib.Path) -> list[str]:
    """The folders that come first where this version is used."""
    if PACKAGES[version]:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input"]
        subprocess.run([*pip, "--target", str(folder), *PACKAGES[version]], check=True)
    return [str(folder), str(pathlib.Path(nnx_inspector.__file__).parents[1])]


class Kernel:
    """A kernel and its one client.

    Attributes:
        heard: all messages that were received, oldest first: `(channel, message)`.
    """

    def __init__(self, manager: KernelManager, client: BlockingKernelClient):
        self.manager, self._client = manager, client
        self.heard: list[tuple[str, Any]] = []

    def start(self, code: str) -> str:
        """Send a cell, and return the id of its request."""
        return self._client.execute(code)

    def send(self, comm: str, content: Any) -> str:
        """Send a custom message on the comm of a widget."""
        return self.send_plain(comm, {"method": "custom", "content": content})

    def send_plain(self, comm: str, data: Any, subshell: str | None = None) -> str:
        message = self._client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self._client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def control(self, kind: str, content: Any) -> Any:
        """Ask on the control channel, and return the content of the reply."""
        message = self._client.session.msg(kind, content)
        self._client.control_channel.send(message)
        return self._client.control_channel.get_msg(timeout=SECONDS)["content"]

    def subshell(self) -> str:
        """Ask for a subshell, and return its id."""
        return self.control("create_subshell_request", {})["subshell_id"]

    def until(self, wanted: Callable[[str, Any], bool]) -> Any:
        """Receive until a message comes that is wanted; return it."""
        for channel, message in self._messages():
            self.heard.append((channel, message))
            if wanted(channel, message):
                return message
        raise AssertionError("the kernel has ended")

    def _messages(self) -> Iterator[tuple[str, Any]]:
        import zmq

        channels = {"iopub": self._client.iopub_channel, "shell": self._client.shell_channel}
        poller = zmq.Poller()
        for channel in channels.values():
            poller.register(channel.socket, zmq.POLLIN)
        while self.manager.is_alive():
            ready = dict(poller.poll(int(1000 * SECONDS)))
            assert ready, f"the kernel says nothing; at last {self.heard[-3:]}"
            for name, channel in channels.items():
                if channel.socket in ready:
                    yield name, channel.get_msg(timeout=SECONDS)

    def printed(self, text: str) -> Any:
        """Receive until a cell prints a line with this text."""

        def wanted(channel: str, message: Any) -> bool:
            content = message["content"]
            if message["msg_type"] == "error":
                raise AssertionError("\n".join(content["traceback"]))
            return message["msg_type"] == "stream" and text in content["text"]

        return self.until(wanted)

    def idle(self, request: str) -> None:
        """Receive until the kernel is done with a request, if it was not before."""
        self._of(request, lambda channel, m: _is_idle(m))

    def reply(self, request: str) -> Any:
        """The reply to a cell: its content."""
        return self._of(request, lambda channel, m: channel == "shell")["content"]

    def _of(self, request: str, wanted: Callable[[str, Any], bool]) -> Any:
        def is_it(channel: str, message: Any) -> bool:
            return message["parent_header"].get("msg_id") == request and wanted(channel, message)

        return next((m for channel, m in self.heard if is_it(channel, m)), None) or self.until(
            is_it
        )

    def run(self, code: str) -> None:
        request = self.start(code)
        content = self.reply(request)
        assert content["status"] == "ok", "\n".join(content.get("traceback", ()))
        self.idle(request)

    def ask(self, expression: str) -> Any:
        """The value of an expression, as JSON has it."""
        request = self.start(f"import json; print(json.dumps({expression}))")
        content = self.reply(request)
        assert content["status"] == "ok", "\n".join(content.get("traceback", ()))
        printed = self._of(request, lambda channel, m: m["msg_type"] == "stream")
        return json.loads(printed["content"]["text"])


def _is_idle(message: Any) -> bool:
    return message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"


@contextlib.contextmanager
def kernel(version: str, folder: pathlib.Path) -> Iterator[Kernel]:
    """A kernel of this version, whose packages are put into the folder."""
    paths = [*installed(version, folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    manager = KernelManager()  # of this environment's Python
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    manager.start_kernel(env=env, cwd=str(folder.parent))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=SECONDS)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
