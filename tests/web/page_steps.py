"""What a user does on the page, and what a script answers."""

from __future__ import annotations

from typing import Any

from tests.web.browser import Browser

LAST = "#messages article:last-child"


def say(page: Browser, text: str) -> None:
    """Sends a message by keyboard and waits for the end of the answer."""
    page.type("#composer", text + "\ue007")
    page.until(lambda: page.count(f"{LAST}.assistant .actions") == 1)


def contents(*texts: str) -> list[dict[str, Any]]:
    """Returns the deltas of an answer."""
    return [{"content": text} for text in texts]
