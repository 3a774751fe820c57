"""A batch of messages whose body is larger than others may be: it goes to disk as it arrives."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO, Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from gateway.apis.batch_lines import repeated_id
from gateway.app.state import Gateway
from gateway.batches.files import FileStore
from gateway.batches.records import make_private
from gateway.schemas.batches import MAX_MESSAGE_REQUESTS
from gateway.schemas.errors import ApiError, bad_request
from gateway.transport.admission import RETRY_AFTER_S
from gateway.transport.json_elements import ElementReader
from gateway.transport.keys import owner_of
from gateway.transport.streaming import ClientGone

# Characters of requests that a prompt process checks together.
_GROUP = 2**20
_MOST_IN_GROUP = 256
# Bodies of this kind at once, in each gateway process: each has an element of up to max_body_mib in memory.
_AT_ONCE = 4
_PLACE = re.compile(r"requests\[(\d+)\]")


def is_large(request: Request, gateway: Gateway) -> bool:
    """Returns whether the body says that it is larger than others may be."""
    declared = request.headers.get("content-length", "")
    return declared.isdecimal() and int(declared) > gateway.max_body_bytes


@asynccontextmanager
async def received_lines(
    request: Request, gateway: Gateway, files: FileStore
) -> AsyncIterator[tuple[IO[bytes], int]]:
    """Yields a file with the requests as lines of an input file, from its start, and their number.

    Raises:
        ApiError: 400 what is wrong, 413 above batch_file_mib, 429 while others are received.
        ClientGone: the client left.
    """
    declared = int(request.headers["content-length"])
    if declared > files.most_file_bytes:
        raise files.too_large()
    await asyncio.to_thread(files.check_room, declared)
    if gateway.large_bodies >= _AT_ONCE:
        message = "too many large batches at once: try again later"
        raise ApiError(429, message, code="queue_full", retry_after_s=RETRY_AFTER_S)
    directory = gateway.config.gateway.batch_directory
    assert directory is not None, "there is a store of files"
    gateway.large_bodies += 1
    try:
        await asyncio.to_thread(make_private, directory)
        with tempfile.TemporaryFile(dir=directory) as lines:
            count = await _write_lines(request, gateway, lines)
            lines.seek(0)
            yield lines, count
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        gateway.large_bodies -= 1


async def _write_lines(request: Request, gateway: Gateway, lines: IO[bytes]) -> int:
    """Writes all requests; returns how many there are."""
    reader = ElementReader("requests", gateway.max_body_bytes)
    owner, _ = owner_of(request.scope)
    group: list[str] = []
    ids: set[str] = set()

    async def check() -> None:
        first = reader.count - len(group)
        body = b'{"requests": [%b]}' % ",".join(group).encode()
        group.clear()
        try:
            checked = await gateway.read_messages(body, owner)
        except ApiError as error:
            raise _moved(error, first) from None
        await asyncio.to_thread(lines.write, checked)

    async for text, value in _elements(request, reader):
        # An id of another type is refused with its group.
        custom_id = str(value.get("custom_id"))
        if custom_id in ids:
            raise repeated_id(custom_id)
        ids.add(custom_id)
        group.append(text)
        if reader.count > MAX_MESSAGE_REQUESTS:
            raise bad_request(f"'requests' may have up to {MAX_MESSAGE_REQUESTS} items", "requests")
        if sum(map(len, group)) >= _GROUP or len(group) >= _MOST_IN_GROUP:
            await check()
    if group or not reader.count:
        await check()
    return reader.count


async def _elements(request: Request, reader: ElementReader) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yields text and value of each request as it arrives."""
    async for piece in request.stream():
        for element in reader.feed(piece):
            yield element
    for element in reader.finish():
        yield element


def _moved(error: ApiError, first: int) -> ApiError:
    """Returns the error of a group that begins at request `first` with places in the whole body."""

    def moved(text: str) -> str:
        return _PLACE.sub(lambda found: f"requests[{int(found[1]) + first}]", text)

    param = None if error.param is None else moved(error.param)
    return ApiError(error.status, moved(error.message), param=param, code=error.code)
