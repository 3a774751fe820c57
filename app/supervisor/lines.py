"""How the supervisor passes on what its processes print."""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Callable

# gRPC's C++ library writes a line for each failed handshake: "E1122 18:04:40.4 1 file.cc:2] words".
_NATIVE = re.compile(r"([IWEF])\d{4} [\d:.]+\s+\d+ ([\w.]+):\d+\] (.*)")
_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "critical"}
_HANDSHAKE = "Handshake failed"
HANDSHAKE_EVERY_S = 60.0
# Torch's profiler starts in a thread, which matters only to a daemon that we do not run.
_NOISE = ("ERROR: External init callback must run in same thread as registerClient",)


class ForwardedLines:
    """The lines of one process. Where logs are JSON, every line that is passed on is a JSON object."""

    def __init__(self, name: str, json_logs: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`name` prefixes lines for people, and is `process` of those that were no JSON."""
        self._name = name
        self._json = json_logs
        self._clock = clock
        self._prefix = f"{name:<9}| "
        self._said: dict[str, float] = {}

    def forwarded(self, text: str) -> str | None:
        """Returns the line to write; None: it was said a moment ago, or is of no use to anybody."""
        if text.startswith(_NOISE):
            return None
        native = _NATIVE.fullmatch(text)
        if native is not None and _HANDSHAKE in text and self._is_repeated(native[3]):
            return None
        if not self._json:
            return self._prefix + text
        if _is_json(text):
            return text
        line = {
            "event": native[3] if native else text,
            "level": _LEVELS[native[1]] if native else "info",
            "logger": native[2] if native else "output",
            "process": self._name,
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
        }
        return json.dumps(line, ensure_ascii=False)

    def _is_repeated(self, words: str) -> bool:
        """Returns whether a failed handshake for this reason was passed on within the last minute."""
        now = self._clock()
        if now - self._said.get(words, -HANDSHAKE_EVERY_S) < HANDSHAKE_EVERY_S:
            return True
        self._said[words] = now
        return False


def _is_json(text: str) -> bool:
    """Returns whether a logger wrote it as an object."""
    if not text.startswith("{"):
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
