"""A plugin of pytest, `-p tests.tools.failed_ids --failed-ids FILE`: ids of what failed, a line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failed-ids", type=Path)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the ids of tests, and of files that cannot be imported; also those that xdist's workers ran."""
    path: Path | None = config.getoption("--failed-ids")
    if path is not None:
        reports = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
        path.write_text("".join(f"{name}\n" for name in dict.fromkeys(one.nodeid for one in reports)))
