"""One browser for the tests of this folder, and the page in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.web.browser import Browser, running_browser
from tests.web.scripted_api import MODEL, Script, running_api


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Tests open pages of origins, and so storages, of their own."""
    with running_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def script() -> Script:
    """Returns what the API answers."""
    return Script()


@pytest.fixture
def page(browser: Browser, script: Script) -> Iterator[Browser]:
    """The page, shown; a test that leaves errors in the browser's log fails."""
    with running_api(script) as url:
        browser.resize(1200, 800)
        browser.open(url)
        browser.until(lambda: browser.text("#model") == MODEL)
        browser.problems()
        yield browser
        assert browser.problems() == []
