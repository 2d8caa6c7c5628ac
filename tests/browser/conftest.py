"""The browser of tests that open saved pages, and the JupyterLab of those that run notebooks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import chromium
from browser.lab import Lab, Server
from playwright.sync_api import Browser, sync_playwright


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        one = chromium.launch(playwright)
        yield one
        one.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of all temporary folders of this process."""
    with Server(tmp_path_factory.getbasetemp()) as server:
        yield server


@pytest.fixture(scope="module")
def lab(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A folder for each file of tests."""
    with Lab(tmp_path_factory.mktemp("lab"), server) as lab:
        yield lab
