"""One browser for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.web.browser import Browser, running_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Tests open pages of origins, and so storages, of their own."""
    with running_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found
