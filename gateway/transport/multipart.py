"""Reads `multipart/form-data` (RFC 7578) as it arrives: a file is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from gateway.schemas.errors import ApiError, bad_request

_MOST_HEADER_BYTES = 16 * 1024
_MOST_BOUNDARY = 200


@dataclass(frozen=True)
class PartBegin:
    """The headers of a part."""

    name: str
    filename: str | None  # None: a field, not a file


@dataclass(frozen=True)
class PartData:
    """Some bytes of the part that began last."""

    data: bytes


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary in a Content-Type header. Raises ApiError 400 where the body is no form."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise bad_request(
            "the body must be multipart/form-data with the fields 'file' and 'purpose'",
            None,
            "invalid_content_type",
        )
    if not 0 < len(boundary) <= _MOST_BOUNDARY:
        raise _broken("its boundary is too long")
    return boundary.encode("latin-1", "replace")


def _broken(reason: str) -> ApiError:
    return bad_request(f"the body is not valid multipart/form-data: {reason}", None, "invalid_multipart")


class MultipartReader:
    """Turns the pieces of a body into parts."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # The first delimiter may lack the line break before it.
        self._held = bytearray(b"\r\n")
        self._state = "preamble"

    def feed(self, data: bytes) -> Iterator[PartBegin | PartData]:
        """Yields what is certain after a piece. Raises ApiError 400."""
        self._held += data
        while self._state != "end":
            if self._state in ("preamble", "data"):
                at = self._held.find(self._delimiter)
                keep = len(self._delimiter) - 1
                end = at if at >= 0 else max(0, len(self._held) - keep)
                if self._state == "data" and end:
                    yield PartData(bytes(self._held[:end]))
                del self._held[:end]
                if at < 0:
                    return
                del self._held[: len(self._delimiter)]
                self._state = "delimiter"
            elif self._state == "delimiter":
                if len(self._held) < 2:
                    return
                mark = bytes(self._held[:2])
                if mark not in (b"\r\n", b"--"):
                    raise _broken("a boundary is followed by something else")
                # The line break stays: it is part of the empty line after no headers.
                self._state = "end" if mark == b"--" else "headers"
            else:
                at = self._held.find(b"\r\n\r\n")
                if at > _MOST_HEADER_BYTES or (at < 0 and len(self._held) > _MOST_HEADER_BYTES):
                    raise _broken("a part has too long headers")
                if at < 0:
                    return
                yield _part(bytes(self._held[:at]))
                del self._held[: at + 4]
                self._state = "data"
        self._held.clear()

    def finish(self) -> None:
        """Raises ApiError 400 unless the last part was complete."""
        if self._state != "end":
            raise _broken("it ends within a part")


def _part(headers: bytes) -> PartBegin:
    text = headers.lstrip(b"\r\n").decode("utf-8", "replace")
    found = HeaderParser().parsestr(text)
    name = found.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise _broken("a part has no name")
    return PartBegin(name, found.get_filename())
