"""The browser of the tests that open saved pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import chromium
from playwright.sync_api import Browser, sync_playwright


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        one = chromium.launch(playwright)
        yield one
        one.close()
