"""Reads JSON from clients: text that can be sent on, nested no deeper than anyone needs."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 64
MAX_KEYS = 10_000  # of one object
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """The text is not JSON, or not such JSON as is taken; the message says what is wrong, `param` where."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def parse_json(data: bytes | bytearray | str) -> Any:
    """The value that `data` (UTF-8) spells.

    Raises:
        JsonError: no JSON; deeper than `MAX_DEPTH`; an object of more than `MAX_KEYS` keys; half of a
            surrogate pair, which no text can hold.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 at byte {error.start}", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise JsonError(f"not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise JsonError(_too_deep(), code="invalid_json") from None
    except ValueError:  # Python reads no integers of more than 4300 digits
        raise JsonError("not valid JSON: a number has too many digits", code="invalid_json") from None
    _check(value, _ESCAPED_SURROGATE.search(text) is not None)
    return value


def _too_deep() -> str:
    return f"nested deeper than {MAX_DEPTH} levels"


def _check(value: Any, surrogates: bool) -> None:
    """Looks at every value once, without recursion; `surrogates`: whether text needs to be looked at."""
    waiting: list[tuple[Any, str, int]] = [(value, "", 1)]
    while waiting:
        item, place, depth = waiting.pop()
        if isinstance(item, str):
            if surrogates:
                _check_text(item, place)
            continue
        if depth > MAX_DEPTH:
            raise JsonError(_too_deep(), place or None)
        if isinstance(item, dict):
            if len(item) > MAX_KEYS:
                raise JsonError(f"an object has more than {MAX_KEYS} keys", place or None)
            for key in item if surrogates else ():
                _check_text(key, place)
            dot = "." if place else ""
            waiting += [
                (part, f"{place}{dot}{key}"[:200], depth + 1)
                for key, part in item.items()
                if isinstance(part, str | list | dict)
            ]
        elif isinstance(item, list):
            waiting += [
                (part, f"{place}[{index}]", depth + 1)
                for index, part in enumerate(item)
                if isinstance(part, list | dict) or (surrogates and isinstance(part, str))
            ]


def _check_text(text: str, place: str) -> None:
    half = None if text.isascii() else _SURROGATE.search(text)
    if half is not None:
        raise JsonError(f"half of a surrogate pair (\\u{ord(half.group()):04x}) is no text", place or None)
