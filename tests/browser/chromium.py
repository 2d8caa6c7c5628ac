"""Chromium for the browser tests: found, or else installed, or a readable error; never a skip.

`CHROMIUM` in the environment names the program to use; without it the usual names are tried.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

from playwright.sync_api import Browser, Playwright
from playwright.sync_api import Error as PlaywrightError

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class ChromiumError(RuntimeError):
    """Chromium is not available; the text says what was tried and what to do."""


def launch(playwright: Playwright) -> Browser:
    """A running Chromium.

    Raises:
        ChromiumError: there is none and none could be installed, or it does not start.
    """
    program = _found(playwright) or _installed(playwright)
    try:
        return playwright.chromium.launch(executable_path=program, args=list(FLAGS))
    except PlaywrightError as error:
        raise ChromiumError(
            f"{program} does not start. The browser tests need a Chromium that does: name another "
            f"one in the environment variable CHROMIUM.\n{error.message}"
        ) from error


def _found(playwright: Playwright) -> str | None:
    named = os.environ.get("CHROMIUM")
    if named:
        program = shutil.which(named)
        if program is None:
            raise ChromiumError(f"The environment variable CHROMIUM is {named!r}: no such program.")
        return program
    on_path = next(filter(None, map(shutil.which, NAMES)), None)
    bundled = pathlib.Path(playwright.chromium.executable_path)
    return on_path or (str(bundled) if bundled.exists() else None)


def _installed(playwright: Playwright) -> str:
    tried: list[str] = []
    if shutil.which("apt-get") and os.geteuid() == 0:
        tried += [_ran("apt-get", "update"), _ran("apt-get", "install", "-y", "chromium")]
        program = _found(playwright)
        if program is not None:
            return program
    tried.append(_ran(sys.executable, "-m", "playwright", "install", "chromium"))
    program = _found(playwright)
    if program is None:
        raise ChromiumError(
            f"The browser tests need Chromium. None of {', '.join(NAMES)} is on the PATH, and "
            "installing it failed. Install it, or name it in the environment variable CHROMIUM.\n"
            + "\n".join(tried)
        )
    return program


def _ran(*command: str) -> str:
    """The output of a command, for the error; after a failure no Chromium is found."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip().splitlines()[-8:]
    return "\n".join([f"$ {' '.join(command)} (exit status {done.returncode})", *said])
