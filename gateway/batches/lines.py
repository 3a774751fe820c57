"""Reads the lines of an input file in chunks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 2**18  # bytes of lines that are checked together
_MOST_LINES = 256


@dataclass(frozen=True)
class Chunk:
    """Consecutive lines; filled by `chunks_of`."""

    first: int  # number of the first line, from 1
    lines: tuple[bytes, ...]  # without their ends; empty ones included
    is_too_long: bool = False  # a line above the bound, of which only the beginning is here


def chunks_of(path: Path, longest: int) -> Iterator[Chunk]:
    """Yields a file's lines in order. `longest`: bytes of a line. Raises OSError."""
    with path.open("rb") as file:
        number, lines, size = 1, list[bytes](), 0
        while line := file.readline(longest + 2):
            if len(line.rstrip(b"\r\n")) > longest:
                if lines:
                    yield Chunk(number, tuple(lines))
                yield Chunk(number + len(lines), (line[:_CHUNK],), is_too_long=True)
                return
            lines.append(line.rstrip(b"\r\n"))
            size += len(line)
            if size >= _CHUNK or len(lines) >= _MOST_LINES:
                yield Chunk(number, tuple(lines))
                number, lines, size = number + len(lines), [], 0
        if lines:
            yield Chunk(number, tuple(lines))
