"""Durations as ollama's clients and variables write them."""

from __future__ import annotations

import re

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def seconds_of(text: str) -> float:
    """Returns seconds, negative ones included: of a number of seconds, or of Go's form, as 1h30m.

    Raises ValueError for any other text.
    """
    text = text.strip()
    try:
        return float(text)
    except ValueError:
        digits = text.lstrip("+-")
    found = _DURATION.findall(digits)
    if not found or "".join(number + unit for number, unit in found) != digits:
        raise ValueError(f"{text[:40]!r} is no duration; allowed are seconds, or as 5m, 1h30m, -1")
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in found)
    return -seconds if text.startswith("-") else seconds
