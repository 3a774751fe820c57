"""Guards the reader of forms: whatever pieces a body arrives in, its parts are the same."""

from __future__ import annotations

import os

import pytest

from gateway.schemas.errors import ApiError
from gateway.transport.multipart import MultipartReader, PartBegin, PartData, boundary_of

CONTENT = b"\r\n--x\r\n--bound\r\r\n" + os.urandom(100) + b"\r\n--boundar"
BODY = (
    b'--boundary\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--boundary\r\nContent-Disposition: form-data; name="file"; filename="a b.jsonl"\r\n'
    b"Content-Type: application/json\r\n\r\n" + CONTENT + b"\r\n--boundary\r\n"
    b'Content-Disposition: form-data; name="empty"\r\n\r\n\r\n--boundary--\r\nepilogue'
)


def parts_of(body: bytes, size: int) -> list[tuple[str, str | None, bytes]]:
    """Name, file name and content of each part, of a body in pieces of `size` bytes."""
    reader = MultipartReader(b"boundary")
    parts: list[tuple[str, str | None, bytes]] = []
    for start in range(0, len(body), size):
        for part in reader.feed(body[start : start + size]):
            if isinstance(part, PartBegin):
                parts.append((part.name, part.filename, b""))
            else:
                assert isinstance(part, PartData)
                name, filename, before = parts[-1]
                parts[-1] = (name, filename, before + part.data)
    reader.finish()
    return parts


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_parts(size: int) -> None:
    """Content that looks like a boundary, empty parts and an epilogue, in pieces of every size."""
    assert parts_of(BODY, size) == [
        ("purpose", None, b"batch"),
        ("file", "a b.jsonl", CONTENT),
        ("empty", None, b""),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x" * 100,
        BODY[:-20],
        b"--boundaryx",
        b"--boundary\r\n\r\n\r\n",
        b"--boundary\r\n" + b"a" * 20_000,
    ],
    ids=["empty", "no boundary", "cut off", "wrong end", "no name", "long headers"],
)
def test_broken_bodies(body: bytes) -> None:
    """A body that is no form, or ends too early, is a 400."""
    with pytest.raises(ApiError, match="not valid multipart") as caught:
        parts_of(body, 50)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "header", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=b"]
)
def test_other_bodies(header: str) -> None:
    """A body of another type, or without a boundary, is a 400 that says what is allowed."""
    with pytest.raises(ApiError, match="multipart/form-data"):
        boundary_of(header)
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
