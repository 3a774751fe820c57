"""Shared by all checks: the servers, the tools, a picture, and the list of checks."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class Server:
    """One server; `base` has no /v1."""

    base: str
    model: str

    @property
    def v1(self) -> str:
        """Returns the base URL for OpenAI's clients."""
        return f"{self.base}/v1"


@dataclass(frozen=True)
class Servers:
    """Both servers; filled by `__main__`."""

    scripted: Server  # follows rules: chooses tools by itself, thinks, sees
    demo: Server  # real weights: grammars force what has to be forced


Check = Callable[[Servers], None]
# (client, capability, check), in the order of the files.
CHECKS: list[tuple[str, str, Check]] = []


def check(client: str, capability: str) -> Callable[[Check], Check]:
    """Adds a check to the table's row and column."""

    def add(function: Check) -> Check:
        CHECKS.append((client, capability, function))
        return function

    return add


WEATHER = {"Oslo": -3, "Rome": 21}
ASK_ONE = "What is the weather in Oslo?"
ASK_BOTH = "What is the weather in Oslo and in Rome?"
ASK_CHAIN = "How warm is it in Rome, in Fahrenheit?"
CHAIN_ANSWER = "In Rome it is 69.8 degrees Fahrenheit."


def get_weather(city: str) -> str:
    """Returns the temperature of a city in degrees Celsius."""
    return f"{WEATHER[city]} degrees"


def to_fahrenheit(celsius: int) -> str:
    """Returns degrees Celsius in Fahrenheit."""
    return f"{celsius * 9 / 5 + 32:.1f}"


def function(name: str, description: str, field: str, kind: str) -> dict[str, Any]:
    """Returns a tool of one field in the form of OpenAI's API."""
    parameters = {
        "type": "object",
        "properties": {field: {"type": kind}},
        "required": [field],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    function("get_weather", "The temperature of a city", "city", "string"),
    function("to_fahrenheit", "Converts degrees", "celsius", "integer"),
]


class Report(BaseModel):
    """Structured output that a small model can only give when it has to.

    Without further fields: where a schema allows them, a small model never stops making some.
    """

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    degrees: int = Field(ge=0, le=40)
    is_warm: bool


def is_report(value: Report | None) -> None:
    """Fails unless the value is one."""
    assert isinstance(value, Report), value


def png(width: int = 4, height: int = 4) -> bytes:
    """Returns a red picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\x00" + b"\xc8\x1e\x3c" * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
