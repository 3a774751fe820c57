"""Guards what a weight takes in memory: the table in `docs/gguf.md`, and that files hardly have less."""

from __future__ import annotations

from tests.helpers.format_bits import PAGE, format_bits, page_text

# The most of what the file has.
ALLOWED = 1.032


def test_the_table_is_current() -> None:
    """A format that takes more or fewer bits is in the table once it is written again."""
    assert PAGE.read_text(encoding="utf-8") == page_text(), "run python -m tests.helpers.format_bits"


def test_weights_take_what_they_take_in_the_file() -> None:
    """On servers and GPUs, in experts and dense layers."""
    assert not [row.type for row in format_bits() if row.most > ALLOWED * row.file]
