"""A real JupyterLab in a real Chromium, for tests: one page for each notebook.

The server has empty configuration folders of its own, and ends with its kernels when the `with`
block does. Files of tests share one (conftest.py): it takes seconds to start.
`notebook.Notebook` handles a page.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Self

import nbformat
from browser import chromium
from browser.notebook import WAIT, Notebook
from playwright.sync_api import Browser, ViewportSize, sync_playwright

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "notebook-extension/tracker": {"windowingMode": "none", "kernelShutdown": True},
    "docmanager-extension/plugin": {"autosave": False},
    "apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
}

APPS: Mapping[str, str] = {"lab": "LabApp", "notebook": "JupyterNotebookApp"}


def source_path() -> dict[str, str]:
    """An environment in which other processes import the same package as this one."""
    import nnx_inspector

    folder = str(pathlib.Path(nnx_inspector.__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}


class Openable(abc.ABC):
    """What is open from `with` on, and closed again where opening it fails half-way."""

    @abc.abstractmethod
    def _open(self, stack: contextlib.ExitStack) -> None: ...

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


class Server(Openable):
    """A JupyterLab server, from `with` on; it ends with its kernels.

    Args:
        root: the folder that it serves.
        python: whose JupyterLab and kernel it is.
        env: changes to the environment of the server and its kernels; None removes a variable.
        app: "lab", or "notebook" for Notebook 7, which is built of the same parts.
    """

    def __init__(
        self,
        root: pathlib.Path,
        *,
        python: str = sys.executable,
        env: Mapping[str, str | None] | None = None,
        app: Literal["lab", "notebook"] = "lab",
    ):
        self.root = root
        self.app = app
        self.token = secrets.token_hex(16)
        self.url = ""
        self._python = python
        self._env = dict(source_path()) if env is None else dict(env)
        self._home = pathlib.Path()

    def end_kernels(self, folder: pathlib.Path) -> None:
        """Those of the notebooks in a folder."""
        here = folder.relative_to(self.root).as_posix()
        for session in json.loads(self._request("GET", "api/sessions")):
            if pathlib.PurePosixPath(session["path"]).is_relative_to(here):
                self._request("DELETE", f"api/sessions/{session['id']}")

    def settle(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """These are the settings, whatever pages changed in them."""
        shutil.rmtree(self._home / "settings", ignore_errors=True)
        for name, values in {**SETTINGS, **settings}.items():
            name = name if name.startswith("@") else f"@jupyterlab/{name}"
            path = self._home / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))

    def _request(self, method: str, path: str) -> bytes:
        head = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}/{path}", method=method, headers=head)
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            return answer.read()

    def _answers(self) -> bool:
        try:
            return bool(self._request("GET", "api"))
        except (urllib.error.URLError, OSError):
            return False

    def _open(self, stack: contextlib.ExitStack) -> None:
        home = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
        self._home = home
        env: dict[str, str | None] = {**os.environ, "JAX_PLATFORMS": "cpu", **self._env}
        # `jupyter` looks for `jupyter-lab` there: another Python's may come first
        beside = str(pathlib.Path(self._python).parent)
        env["PATH"] = os.pathsep.join(filter(None, [beside, os.environ.get("PATH")]))
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
        options = (
            f"--no-browser --allow-root --ServerApp.port={port} --ServerApp.port_retries=0 "
            f"--ServerApp.ip=127.0.0.1 --IdentityProvider.token={self.token} "
            "--LabApp.news_url=None "
            f"--{APPS[self.app]}.expose_app_in_browser=True"
        )
        server = subprocess.Popen(
            [self._python, "-m", "jupyter", self.app, *options.split()],
            env={name: value for name, value in env.items() if value is not None},
            cwd=self.root,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(_end, server)
        deadline = time.monotonic() + WAIT
        while not self._answers():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"JupyterLab did not start:\n{(home / 'log').read_text()}")
            time.sleep(0.1)  # a server that is still starting cannot say when it is ready


class Lab(Openable):
    """A folder of a server, and a browser, from `with` on; its kernels end with it.

    Args:
        root: the folder of the notebooks.
        server: one that serves this folder or one above it; by default there is one for this
            folder alone, which ends with the block.
        browser: one that stays; by default there is one for this block.
        settings: of extensions, by the name of the file, that of JupyterLab's own without
            `@jupyterlab/`.
        more: of the server that is for this folder alone.
    """

    def __init__(
        self,
        root: pathlib.Path,
        server: Server | None = None,
        *,
        browser: Browser | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        **more: Any,
    ):
        self.root = root
        self._browser_given = browser
        self._settings = settings or {}
        self._given = server
        self._server = server or Server(root, **more)

    def _open(self, stack: contextlib.ExitStack) -> None:
        if self._given is None:
            stack.enter_context(self._server)
        else:
            # none takes time from the tests that follow
            stack.callback(self._server.end_kernels, self.root)
        if self._browser_given is None:
            playwright = stack.enter_context(sync_playwright())
            self._browser = chromium.launch(playwright)
            stack.callback(self._browser.close)
        else:
            self._browser = self._browser_given

    @contextlib.contextmanager
    def notebook(
        self,
        name: str,
        cells: Sequence[str] | None = None,
        *,
        width: int = 1400,
        kernel: bool = True,
        touch: bool = False,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Iterator[Notebook]:
        """A notebook, open in a page of its own, its kernel idle.

        Args:
            name: its path under `root`.
            cells: code to write into it first; by default it is there already.
            width: of the page, in pixels.
            kernel: whether it gets one; without, JupyterLab asks, for the notebook names none.
            touch: whether the page is under a finger.
            settings: of this page, beside the lab's.
        """
        if cells is not None:
            new = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
            new.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
            nbformat.write(new, self.root / name)
        server = self._server
        server.settle({**self._settings, **(settings or {})})
        path = (self.root / name).relative_to(server.root).as_posix()
        size = ViewportSize(width=width, height=1000)
        context = self._browser.new_context(viewport=size, has_touch=touch)
        try:
            page = context.new_page()
            page.set_default_timeout(WAIT * 1000)
            notebook = Notebook(page, path, server.url)
            context.route("**/*", notebook.allow)
            place = "lab/tree" if server.app == "lab" else "notebooks"
            notebook.go(f"{server.url}/{place}/{path}?token={server.token}&reset")
            if kernel:
                notebook.wait_ready()
            else:
                notebook.refuse_kernel()
            with notebook.noting():
                yield notebook
        finally:
            context.close()


class Sheet:
    """A notebook whose page and kernel serve many tests, one after the other.

    Attributes:
        root: the folder in which its cells run.
    """

    NAME: Final = "sheet.ipynb"

    def __init__(self, lab: Lab, notebook: Notebook):
        self.root = lab.root
        self._lab, self._notebook = lab, notebook

    def in_another_page(
        self, *, settings: Mapping[str, Mapping[str, Any]]
    ) -> contextlib.AbstractContextManager[Notebook]:
        """The notebook as it was saved, in another page, with the same kernel."""
        return self._lab.notebook(self.NAME, settings=settings)

    @contextlib.contextmanager
    def __call__(self, cells: Sequence[str], *, width: int = 1400) -> Iterator[Notebook]:
        """The notebook with these cells alone, nothing of those before them in the kernel."""
        notebook = self._notebook
        notebook.begin(cells)
        notebook.page.set_viewport_size({"width": width, "height": 1000})
        with notebook.noting():
            yield notebook
        assert notebook.errors == []
        assert notebook.foreign == []


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and the kernels that it started, which are its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
