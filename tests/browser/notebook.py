"""One notebook, open on a page of JupyterLab: cells, the kernel, the theme, and what went wrong.

The page may connect only to its server: every other request is refused and recorded. Nothing here
sleeps: it waits for events of JupyterLab, the kernel or the page.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from playwright.sync_api import (
    ConsoleMessage,
    Error,
    Locator,
    Page,
    Route,
    TimeoutError,
    WebSocket,
    expect,
)

WAIT = 60.0
"""The time limit in seconds; runs share two cores with others."""
expect.set_options(timeout=WAIT * 1000)

COMPILATIONS = "(insp._rerun._compiler.wait(), insp._core.meter.compilations.count)[1]"
"""For `Notebook.ask`: the compilations so far, those for insp.run and insp.step included."""

RESET_KERNEL = """
import gc
from nnx_inspector import Inspector
for one in [one for one in gc.get_objects() if type(one) is Inspector]:
    one._rerun._compiler.wait()  # what is being compiled, as COMPILATIONS does
    one.close()
get_ipython().reset(new_session=False)
"""

_SCOPE = """
const app = window.jupyterapp;
const panel = [...app.shell.widgets('main')].find(w => w.context?.path === path);
const notebook = panel?.content, kernel = panel?.sessionContext?.session?.kernel;
"""


class Notebook:
    """One notebook on one page.

    Attributes:
        page: the page, for everything else.
        console: what the page wrote to its console, as "type: text".
        foreign: the refused requests to other addresses.
    """

    def __init__(self, page: Page, name: str, url: str):
        self.page = page
        self.console: list[str] = []
        self.foreign: list[str] = []
        self._name = name
        self._url = url
        self._address = ""
        self._asking: int | None = None
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.console.append(f"pageerror: {error}"))
        page.on("websocket", self._on_websocket)

    def _on_console(self, message: ConsoleMessage) -> None:
        self.console.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _on_websocket(self, socket: WebSocket) -> None:
        self._is_ours(socket.url)

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
        """The errors on the console."""
        return [line for line in self.console if line.startswith(("error:", "pageerror:"))]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Add to an error what the page shows under its cells and wrote to its console."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Error):  # of a page that has crashed
                shown = self.page.locator(".jp-Notebook .jp-Cell-outputArea").all_inner_texts()
                state = self.evaluate("return [kernel?.status, kernel?.connectionStatus]")
                rows = [f"The kernel: {state}", *(text[:500] for text in shown)]
                error.add_note("\n".join([*rows, *self.console[-40:]]))
            raise

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

    def go(self, address: str) -> None:
        """Load the page from an address."""
        self._address = address
        self.page.goto(address)

    def wait_ready(self) -> None:
        """Wait for JupyterLab, the notebook and an idle kernel."""
        self.page.wait_for_function("() => window.jupyterapp?.restored")
        self.page.evaluate("() => window.jupyterapp.restored.then(() => undefined)")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.wait("kernel?.connectionStatus === 'connected' && kernel.status === 'idle'")

    def refuse_kernel(self) -> None:
        """Wait for JupyterLab and the notebook, and choose no kernel."""
        self.page.wait_for_function("() => window.jupyterapp?.restored")
        self.page.locator(".jp-Dialog").get_by_role("button", name="No Kernel").click()
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.wait("panel && !kernel")

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

    def finished(self, index: int) -> bool:
        """Whether a cell that was started has come to its end."""
        return self.evaluate("return window.nniRan[arg]", index)

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

    def begin(self, cells: Sequence[str]) -> None:
        """Close what the kernel shows, empty its namespace, and put these cells into the page."""
        try:
            self.wait("kernel.status === 'idle'")
            self.run(self.append(RESET_KERNEL))
        except TimeoutError:
            self.restart_kernel()  # what a test has left behind does not end
        self.evaluate(
            "const { sharedModel } = notebook.model, before = notebook.widgets.length;"
            "for (const source of arg) sharedModel.addCell({ cell_type: 'code', source });"
            "sharedModel.deleteCellRange(0, before); app.shell.expandLeft()",
            list(cells),
        )
        if self.evaluate("return document.body.dataset.jpThemeLight") != "true":
            self.theme(dark=False)
        self._asking = None
        self.console.clear()
        self.foreign.clear()

    def ask(self, expression: str) -> Any:
        """The value of a Python expression in the kernel, by JSON; uses one cell at the end."""
        code = f"import json\nprint(json.dumps({expression}))"
        if self._asking is None:
            self._asking = self.append(code)
        else:
            source = "notebook.widgets[arg[0]].model.sharedModel.setSource(arg[1])"
            self.evaluate(source, [self._asking, code])
        self.run(self._asking)
        printed = [o["text"] for o in self.outputs(self._asking) if o.get("name") == "stdout"]
        return json.loads("".join(printed))

    def ask_until(self, expression: str, value: Any) -> None:
        """As `ask`, again until it is `value`: what was clicked may reach the kernel after a cell
        that was run later, for it comes by another channel.
        """
        deadline = time.monotonic() + WAIT
        while (found := self.ask(expression)) != value:
            assert time.monotonic() < deadline, f"{expression} stays {found}, not {value}"

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
        # not by a reload, for JupyterLab takes `reset` out of the address: it would open what
        # another page of this server had open too
        self.go(self._address)
        self.wait_ready()
