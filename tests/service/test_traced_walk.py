"""Guards the walk of one token in docs/structures.md: its table names the files that a streamed chat runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.traced_walk import documented, trace_walk

pytestmark = pytest.mark.demo
# How many files a reader of one request opens, and of one further token: numbers that only go down.
MOST_FILES, MOST_OF_A_STEP = 70, 45


@pytest.mark.timeout(1200)
def test_the_walk_is_true(tmp_path: Path) -> None:
    """The files of the table are those that a trace finds, in every process, and are not more than allowed.

    Where they differ: `python -m tests.helpers.traced_walk` writes the table.
    """
    walk = {row.path: row.is_steady for row in trace_walk(tmp_path)}
    assert walk == documented()
    assert len(walk) <= MOST_FILES
    assert sum(walk.values()) <= MOST_OF_A_STEP
