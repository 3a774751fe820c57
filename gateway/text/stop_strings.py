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
    the text was cut into pieces. Knuth, Morris and Pratt's automaton: a character costs the same however
    long the stop strings are.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        # Longest first: the first that is complete at a character is the one that wins.
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._falls = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters at the end of the text that begin each stop
        self._include = include_in_output
        self._held = ""

    def feed(self, text: str) -> StopResult:
        """Adds new text; after a match nothing more may be fed."""
        if not self._stops:
            return StopResult(text)
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            found = self._advance(character)
            if found is not None:
                self._held = ""
                return StopResult(buffer[: position if self._include else position - len(found)], found)
        shown = len(buffer) - max(self._matched)
        self._held = buffer[shown:]
        return StopResult(buffer[:shown])

    def flush(self) -> str:
        """The held text, at the end of the output."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Takes one character; the stop string that it completes."""
        for index, (stop, falls) in enumerate(zip(self._stops, self._falls, strict=True)):
            length = self._matched[index]
            while length and stop[length] != character:
                length = falls[length]
            length += stop[length] == character
            if length == len(stop):
                return stop
            self._matched[index] = length
        return None


def _borders(stop: str) -> list[int]:
    """For each length of a beginning of `stop`: that of the longest shorter one that is also its end."""
    borders, length = [0, 0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return borders
