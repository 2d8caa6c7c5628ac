"""What the tests of the screen share."""

import pytest
from fake_browser import FakeBrowser


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> FakeBrowser:
    return FakeBrowser(monkeypatch)
