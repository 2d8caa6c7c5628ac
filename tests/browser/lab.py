"""A real JupyterLab in a real Chromium, for tests: one server, and one page for each notebook.

The server has empty configuration folders of its own. The page may talk to that server alone:
every other request is refused and recorded in `Notebook.foreign`. Nothing here sleeps: it waits
for what JupyterLab, the kernel or the page says.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import nbformat
from browser import chromium
from playwright.sync_api import ConsoleMessage, Locator, Page, Route, sync_playwright

WAIT = 60.0
"""Seconds that anything may take; runs share two cores with others."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "notebook-extension/tracker": {"windowingMode": "none", "kernelShutdown": True},
    "docmanager-extension/plugin": {"autosave": False},
    "apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
}


def source_path() -> dict[str, str]:
    """Environment in which other processes import the very package that this one imports."""
    import nnx_inspector

    folder = str(pathlib.Path(nnx_inspector.__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}


class Lab:
    """A JupyterLab server and a browser, from `with` on; both end with it.

    Args:
        root: the folder that the server serves; notebooks are written into it.
        python: whose JupyterLab and kernel it is.
        env: changes to the environment of the server and its kernels; None removes a variable.
    """

    def __init__(
        self,
        root: pathlib.Path,
        *,
        python: str = sys.executable,
        env: Mapping[str, str | None] | None = None,
    ):
        self.root = root
        self._python = python
        self._env = dict(source_path()) if env is None else dict(env)
        self._token = secrets.token_hex(16)
        self._stack = contextlib.ExitStack()
        self.url = ""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._serve(stack)
            playwright = stack.enter_context(sync_playwright())
            self._browser = chromium.launch(playwright)
            stack.callback(self._browser.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _serve(self, stack: contextlib.ExitStack) -> None:
        home = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
        for name, settings in SETTINGS.items():
            path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings))
        env: dict[str, str | None] = {**os.environ, "JAX_PLATFORMS": "cpu", **self._env}
        for folder in ("CONFIG", "DATA", "RUNTIME"):
            (home / folder).mkdir()
            env[f"JUPYTER_{folder}_DIR"] = str(home / folder)
        env["JUPYTERLAB_SETTINGS_DIR"] = str(home / "settings")
        env["JUPYTERLAB_WORKSPACES_DIR"] = str(home / "workspaces")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        log = stack.enter_context((home / "log").open("wb"))
        server = subprocess.Popen(
            [self._python, "-m", "jupyter", "lab", "--no-browser", "--allow-root"]
            + [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
            + ["--ServerApp.ip=127.0.0.1", f"--IdentityProvider.token={self._token}"]
            + [f"--ServerApp.root_dir={self.root}", "--LabApp.expose_app_in_browser=True"]
            + ["--LabApp.news_url=None"],
            env={name: value for name, value in env.items() if value is not None},
            cwd=self.root,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(_end, server)
        deadline = time.monotonic() + WAIT
        while not _answers(f"{self.url}/api?token={self._token}"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"JupyterLab did not start:\n{(home / 'log').read_text()}")
            time.sleep(0.1)  # a server that is not there yet cannot say when it will be

    @contextlib.contextmanager
    def notebook(
        self, name: str, cells: Sequence[str] | None = None, *, width: int = 1400
    ) -> Iterator[Notebook]:
        """A notebook, open in a page of its own, its kernel idle.

        Args:
            name: its path under `root`.
            cells: code to write into it first; by default it is there already.
            width: of the page, in pixels.
        """
        if cells is not None:
            new = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
            new.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
            nbformat.write(new, self.root / name)
        context = self._browser.new_context(viewport={"width": width, "height": 1000})
        try:
            page = context.new_page()
            page.set_default_timeout(WAIT * 1000)
            notebook = Notebook(page, name, self.url)
            context.route("**/*", notebook.allow)
            page.goto(f"{self.url}/lab/tree/{name}?token={self._token}&reset")
            notebook.wait_ready()
            yield notebook
        finally:
            context.close()


class Notebook:
    """One notebook on one page.

    Attributes:
        page: the page, for everything that is not here.
        console: what the page wrote to its console, as "type: text".
        foreign: addresses outside the server that were asked for, and refused.
    """

    def __init__(self, page: Page, name: str, url: str):
        self.page = page
        self.console: list[str] = []
        self.foreign: list[str] = []
        self._name = name
        self._url = url
        self._asking: int | None = None
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.console.append(f"pageerror: {error}"))
        page.on("websocket", lambda socket: self._is_ours(socket.url))

    def _said(self, message: ConsoleMessage) -> None:
        self.console.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _is_ours(self, url: str) -> bool:
        ours = url.startswith((self._url, self._url.replace("http", "ws", 1), "blob:", "data:"))
        if not ours:
            self.foreign.append(url)
        return ours

    def allow(self, route: Route) -> None:
        """Let a request go to our server only."""
        if self._is_ours(route.request.url):
            route.continue_()
        else:
            route.abort()

    @property
    def errors(self) -> list[str]:
        """What on the console is an error."""
        return [line for line in self.console if line.startswith(("error:", "pageerror:"))]

    def evaluate(self, body: str, arg: Any = None) -> Any:
        """Run JavaScript with `app`, `panel`, `notebook` (JupyterLab's) and `arg` in scope."""
        return self.page.evaluate(f"async ([path, arg]) => {{{_SCOPE} {body}}}", [self._name, arg])

    def wait(self, condition: str, arg: Any = None, *, seconds: float = WAIT) -> None:
        """Wait until a JavaScript expression with the same names in scope is true."""
        self.page.wait_for_function(
            f"([path, arg]) => {{{_SCOPE} return {condition}}}",
            arg=[self._name, arg],
            timeout=seconds * 1000,
        )

    def wait_ready(self) -> None:
        """Wait for JupyterLab, the notebook and an idle kernel."""
        self.page.wait_for_function("() => window.jupyterapp?.restored")
        self.page.evaluate("() => window.jupyterapp.restored.then(() => undefined)")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.wait("kernel?.connectionStatus === 'connected' && kernel.status === 'idle'")

    # ---------------------------------------------------------------- cells

    def start(self, index: int) -> None:
        """Run a cell, as the menu does, without waiting for its end."""
        self.evaluate(
            "app.shell.activateById(panel.id); notebook.deselectAll();"
            "notebook.activeCellIndex = arg; (window.nniRan ??= {})[arg] = false;"
            "const ran = () => { window.nniRan[arg] = true };"
            "app.commands.execute('notebook:run-cell').then(ran, ran);",
            index,
        )

    def finish(self, index: int, *, seconds: float = WAIT) -> None:
        """Wait for the end of a cell that was started; an error in it is raised here."""
        self.wait("window.nniRan[arg]", index, seconds=seconds)
        for output in self.outputs(index):
            if output["output_type"] == "error":
                text = f"{output['ename']}: {output['evalue']}"
                raise AssertionError(f"Cell {index} of {self._name} failed with {text}")

    def run(self, index: int, *, seconds: float = WAIT) -> None:
        """Run a cell to its end."""
        self.start(index)
        self.finish(index, seconds=seconds)

    def append(self, code: str) -> int:
        """Add a code cell at the end; its index."""
        return self.evaluate(
            "notebook.model.sharedModel.addCell({cell_type: 'code', source: arg});"
            "return notebook.widgets.length - 1",
            code,
        )

    def ask(self, expression: str) -> Any:
        """What a Python expression is in the kernel, by way of JSON; uses one cell at the end."""
        code = f"import json\nprint(json.dumps({expression}))"
        if self._asking is None:
            self._asking = self.append(code)
        else:
            source = "notebook.widgets[arg[0]].model.sharedModel.setSource(arg[1])"
            self.evaluate(source, [self._asking, code])
        self.run(self._asking)
        printed = [o["text"] for o in self.outputs(self._asking) if o.get("name") == "stdout"]
        return json.loads("".join(printed))

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """A cell's outputs, in nbformat's form."""
        return self.evaluate("return notebook.widgets[arg].model.outputs?.toJSON() ?? []", index)

    def cell(self, index: int) -> Locator:
        """A cell on the page."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def count(self) -> int:
        """How many cells there are."""
        return self.evaluate("return notebook.widgets.length")

    # ------------------------------------------------------------- the rest

    def theme(self, *, dark: bool) -> None:
        """Switch JupyterLab's theme."""
        name = "JupyterLab Dark" if dark else "JupyterLab Light"
        self.evaluate("await app.commands.execute('apputils:change-theme', {theme: arg})", name)
        self.wait("document.body.dataset.jpThemeLight === String(!arg)", dark)

    def restart_kernel(self) -> None:
        """Restart the kernel, without asking, and wait until it is idle again."""
        self.evaluate("await kernel.restart()")
        self.wait("kernel.connectionStatus === 'connected' && kernel.status === 'idle'")

    def save_and_reload(self) -> None:
        """Save the notebook and load the page anew; the kernel stays."""
        self.evaluate("await panel.context.save()")
        self.page.reload()
        self.wait_ready()


_SCOPE = """
const app = window.jupyterapp;
const panel = [...app.shell.widgets('main')].find(w => w.context?.path === path);
const notebook = panel?.content, kernel = panel?.sessionContext?.session?.kernel;
"""


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and the kernels that it started, which are its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
