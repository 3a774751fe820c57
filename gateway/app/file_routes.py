"""HTTP routes of OpenAI's files: the inputs and results of batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.requests import ClientDisconnect

from gateway.app.openapi import refuses
from gateway.app.state import gateway_of
from gateway.batches.files import FileFacts, FileStore, Upload, storing
from gateway.batches.store import BatchStore
from gateway.schemas.batches import LONGEST_LIFE_S, SHORTEST_LIFE_S
from gateway.schemas.errors import ApiError, bad_request
from gateway.transport.keys import owner_of
from gateway.transport.multipart import MultipartReader, PartBegin, PartData, boundary_of
from gateway.transport.streaming import ClientGone

router = APIRouter()
_WRITE = 2**20  # bytes of an upload that are written together
_MOST_FIELD = 1024  # bytes of a form's field
_FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"const": "batch"},
                    "expires_after[anchor]": {"const": "created_at"},
                    "expires_after[seconds]": {"type": "integer"},
                },
            }
        }
    },
}


def store_of(request: Request) -> BatchStore:
    """Returns the store. Raises ApiError 404 where no directory is configured."""
    store = gateway_of(request).batches
    if store is None:
        raise ApiError(
            404, "this server keeps no files and batches: it has no directory (batch_dir)", code="unknown_url"
        )
    return store


def no_file(file_id: str, param: str = "file_id") -> ApiError:
    """Returns the 404 for a file that this client does not have."""
    return ApiError(404, f"No such File object: {file_id[:100]}", param=param, code="file_not_found")


class _Form:
    """The fields of an upload, and the file as it is written."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._fields: dict[str, bytearray] = {}
        self._field: bytearray | None = None  # None: the file, or one that is ignored
        self._filename: str | None = None
        self._is_file = False
        self._pending = bytearray()

    @property
    def is_full(self) -> bool:
        """Whether enough waits to be written."""
        return len(self._pending) >= _WRITE

    def take(self, part: PartBegin | PartData) -> None:
        """Takes a part's headers or bytes. Raises ApiError 400."""
        if isinstance(part, PartBegin):
            self._is_file = part.name == "file"
            if self._is_file and self._filename is not None:
                raise bad_request("the form has more than one 'file'", "file")
            if self._is_file:
                self._filename = part.filename or "file"
            self._field = None if self._is_file else self._fields.setdefault(part.name[:100], bytearray())
        elif self._is_file:
            self._pending += part.data
        elif self._field is not None:
            self._field += part.data
            if len(self._field) > _MOST_FIELD or len(self._fields) > 32:
                raise bad_request("the form has too large or too many fields", None)

    def write(self) -> None:
        """Writes what waits; blocks on the disk."""
        pending, self._pending = bytes(self._pending), bytearray()
        self._upload.write(pending)

    def facts(self) -> FileFacts:
        """Returns what the fields say. Raises ApiError 400."""
        if self._filename is None:
            raise bad_request("missing required parameter: 'file'", "file", "missing_required_parameter")
        values = {name: bytes(value).decode("utf-8", "replace") for name, value in self._fields.items()}
        purpose = values.get("purpose")
        if purpose is None:
            raise bad_request(
                "missing required parameter: 'purpose'", "purpose", "missing_required_parameter"
            )
        if purpose != "batch":
            raise bad_request(f"'purpose' is {purpose[:100]!r}; allowed: 'batch'", "purpose")
        return FileFacts(self._filename[:255], purpose, _life_s(values))


def _life_s(values: dict[str, str]) -> int:
    anchor, seconds = values.get("expires_after[anchor]"), values.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return LONGEST_LIFE_S
    if anchor != "created_at":
        raise bad_request("'expires_after[anchor]' must be 'created_at'", "expires_after[anchor]")
    if seconds is None or not seconds.isdecimal() or not SHORTEST_LIFE_S <= int(seconds) <= LONGEST_LIFE_S:
        raise bad_request(
            f"'expires_after[seconds]' must be a number from {SHORTEST_LIFE_S} to {LONGEST_LIFE_S}",
            "expires_after[seconds]",
        )
    return int(seconds)


@contextlib.asynccontextmanager
async def _uploading(files: FileStore, owner: str) -> AsyncIterator[Upload]:
    """Opens and ends an upload in threads, as both wait for the disk."""
    context = files.upload(owner)
    upload = await asyncio.to_thread(context.__enter__)
    try:
        yield upload
    except BaseException as error:
        # Shielded: a client that leaves must not leave half a file behind.
        with contextlib.suppress(type(error)):
            await asyncio.shield(asyncio.to_thread(context.__exit__, type(error), error, None))
        raise
    await asyncio.to_thread(context.__exit__, None, None, None)


@router.post("/v1/files", openapi_extra={"requestBody": _FORM}, **refuses(400, 401, 404, 413, 503))
async def upload_file(request: Request) -> dict[str, Any]:
    """Stores a file of requests for a batch; its lines are checked when a batch is made of it."""
    files = store_of(request).files
    reader = MultipartReader(boundary_of(request.headers.get("content-type", "")))
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        if int(declared) > files.most_file_bytes + _WRITE:
            raise files.too_large()
        with storing():
            await asyncio.to_thread(files.check_room, int(declared))
    owner, _ = owner_of(request.scope)
    with storing():
        async with _uploading(files, owner) as upload:
            form = _Form(upload)
            try:
                async for piece in request.stream():
                    for part in reader.feed(piece):
                        form.take(part)
                    if form.is_full:
                        await asyncio.to_thread(form.write)
            except ClientDisconnect:
                raise ClientGone from None
            reader.finish()
            await asyncio.to_thread(form.write)
            return await asyncio.to_thread(upload.finish, form.facts())


@router.get("/v1/files", **refuses(400, 401, 404))
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """Lists this client's files, newest first."""
    files, (owner, _) = store_of(request).files, owner_of(request.scope)

    def wanted() -> Iterator[dict[str, Any]]:
        ids = files.records.ids(owner)
        for file_id in ids_after(ids if order == "asc" else ids[::-1], after):
            found = files.find(owner, file_id)
            if found is not None and purpose in (None, found["purpose"]):
                yield found

    with storing():
        return await asyncio.to_thread(lambda: paged(wanted(), limit))


def ids_after(ids: list[str], after: str | None) -> list[str]:
    """Returns the ids behind `after`. Raises ApiError 400 if it is none of them."""
    if after is None:
        return ids
    if after not in ids:
        raise bad_request(f"'after' names nothing that was listed: {after[:100]!r}", "after")
    return ids[ids.index(after) + 1 :]


def paged(found: Iterator[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Returns the first `limit` as a page in OpenAI's shape."""
    page: list[dict[str, Any]] = []
    has_more = False
    for one in found:
        if len(page) == limit:
            has_more = True
            break
        page.append(one)
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }


async def _found(request: Request, file_id: str) -> tuple[dict[str, Any], Path]:
    files, (owner, _) = store_of(request).files, owner_of(request.scope)
    with storing():
        facts = await asyncio.to_thread(files.find, owner, file_id)
    if facts is None:
        raise no_file(file_id)
    return facts, files.data(owner, file_id)


@router.get("/v1/files/{file_id}", **refuses(401, 404))
async def retrieve_file(request: Request, file_id: str) -> dict[str, Any]:
    """Returns what is known of a file."""
    return (await _found(request, file_id))[0]


@router.get("/v1/files/{file_id}/content", response_class=FileResponse, **refuses(401, 404))
async def file_content(request: Request, file_id: str) -> Response:
    """Returns a file's bytes."""
    facts, path = await _found(request, file_id)
    return FileResponse(path, media_type="application/octet-stream", filename=facts["filename"])


@router.delete("/v1/files/{file_id}", **refuses(401, 404))
async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
    """Deletes a file; batches that were made of it go on."""
    files, (owner, _) = store_of(request).files, owner_of(request.scope)
    with storing():
        if not await asyncio.to_thread(files.records.delete, owner, file_id):
            raise no_file(file_id)
    return {"id": file_id, "object": "file", "deleted": True}
