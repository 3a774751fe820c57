"""Finds stop strings in streamed text, also when they cross the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopResult:
    """Filled by `StopStrings.feed`: text that may be shown now, and the stop string found, if any."""

    text: str
    matched: str | None = None


class StopStrings:
    """Holds back the longest end of the text that could still become a stop string.

    The match that is complete first wins (the longer one on a tie), so the result does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""

    def feed(self, text: str) -> StopResult:
        """Adds new text; after a match nothing more may be fed."""
        buffer = self._held + text
        matches = [(buffer.find(stop) + len(stop), buffer.find(stop), stop) for stop in self._stops]
        found = min((match for match in matches if match[1] >= 0), default=None)
        if found is not None:
            end, start, stop = found
            self._held = ""
            return StopResult(buffer[:end] if self._include else buffer[:start], stop)
        keep = self._held_length(buffer)
        self._held = buffer[len(buffer) - keep :]
        return StopResult(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """The held text, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
