"""From token events to speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moebius.app.bench.engine.drive import TokenEvent


@dataclass(frozen=True)
class DecodeWindow:
    """The time in which all streams decode and none has ended; filled by `decode_window`."""

    seconds: float
    tokens: int
    # Steps that gave tokens in it: events of the stream with most of them.
    steps: int

    @property
    def tokens_per_second(self) -> float:
        """Of all streams together."""
        return self.tokens / self.seconds


def decode_window(events: Sequence[TokenEvent], streams: int) -> DecodeWindow:
    """From the moment every stream has its first token to the first stream's end.

    What the first moment's own step gave is not counted: it was computed before. Raises ValueError when a
    stream ended before another had begun.
    """
    first: dict[int, float] = {}
    ends: list[float] = []
    for event in events:
        if event.tokens:
            first.setdefault(event.stream, event.at)
        if event.ended:
            ends.append(event.at)
    if len(first) < streams or not ends or min(ends) <= max(first.values()):
        raise ValueError("the streams never decoded together: more tokens per stream are needed")
    begin, end = max(first.values()), min(ends)
    within = [event for event in events if begin < event.at <= end and event.tokens]
    per_stream = [sum(event.stream == number for event in within) for number in range(streams)]
    return DecodeWindow(end - begin, sum(event.tokens for event in within), max(per_stream))
