"""Guards `docs/settings.md`: it is what the typed tree says, and has every setting."""

from __future__ import annotations

import re

from moebius.config.loader import leaves
from tests.helpers.settings_page import PAGE, page_text


def test_the_page_is_current() -> None:
    """A setting that was added, renamed or described otherwise is on the page once it is written again."""
    assert PAGE.read_text(encoding="utf-8") == page_text(), "run python -m tests.helpers.settings_page"


def test_each_setting_has_a_row_of_five_cells() -> None:
    """No description breaks its row: bars and other markup in it are escaped."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [re.findall(r"`(\w+)`", row)[0] for row in rows] == [leaf.name for leaf in leaves()]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}
