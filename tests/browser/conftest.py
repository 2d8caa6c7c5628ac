"""The browser of tests that open saved pages, and the JupyterLab of those that run notebooks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from browser import chromium
from browser.lab import Lab, Server, Sheet
from playwright.sync_api import Browser, sync_playwright


@pytest.fixture(scope="session")
def chromium_and_loop() -> Iterator[tuple[Browser, asyncio.AbstractEventLoop]]:
    """One Chromium for all files of this process, and the loop of Playwright."""
    with sync_playwright() as playwright:
        loop = asyncio.get_running_loop()
        one = chromium.launch(playwright)
        yield one, loop
        asyncio._set_running_loop(loop)
        one.close()


@pytest.fixture(scope="module", autouse=True)
def browser(chromium_and_loop: tuple[Browser, asyncio.AbstractEventLoop]) -> Iterator[Browser]:
    """Playwright leaves its loop marked as running, and other files would find none of their own:
    `asyncio.run` refuses. So it is marked for as long as a file of this folder lasts.
    """
    one, loop = chromium_and_loop
    asyncio._set_running_loop(loop)
    yield one
    asyncio._set_running_loop(None)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of all temporary folders of this process."""
    with Server(tmp_path_factory.getbasetemp()) as server:
        yield server


@pytest.fixture(scope="module")
def lab(
    server: Server, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lab]:
    """A folder for each file of tests."""
    with Lab(tmp_path_factory.mktemp("lab"), server, browser=browser) as lab:
        yield lab


@pytest.fixture(scope="session")
def sheet(
    server: Server,
    chromium_and_loop: tuple[Browser, asyncio.AbstractEventLoop],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Sheet]:
    """One page and one kernel, whose cells each test replaces by its own."""
    browser, loop = chromium_and_loop
    asyncio._set_running_loop(loop)  # the first file that needs it may not be the first file
    with Lab(tmp_path_factory.mktemp("sheet"), server, browser=browser) as lab:
        with lab.notebook(Sheet.NAME, [""]) as notebook:
            yield Sheet(lab, notebook)
            asyncio._set_running_loop(loop)
