"""Limits the bytes of request bodies between their receipt and the end of their preparation."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from gateway.schemas.errors import ApiError
from gateway.transport.admission import RETRY_AFTER_S
from gateway.transport.streaming import ClientGone

_COMPRESSED = frozenset({"gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd"})
# The number of bodies of the largest size that may be in memory at once.
_LARGEST_AT_ONCE = 16


def too_large(most: int, what: str = "the body") -> ApiError:
    """Returns a 413 with the limit, bytes."""
    message = f"{what} is larger than {most / 2**20:g} MiB (max_body_mib)"
    return ApiError(413, message, code="request_too_large")


class BodyReceiver:
    """Counts the bytes of all bodies between their receipt and the end of their preparation."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of a body without images."""
        self._most = most
        self.held = 0  # bytes

    @contextlib.asynccontextmanager
    async def receive(self, request: Request, extra: int = 0) -> AsyncIterator[list[bytes]]:
        """Yields the body's pieces, which count as long as the context is open.

        Args:
            request: whose body has not been read.
            extra: bytes allowed for images.
        Raises:
            ApiError: 413 as soon as it is known that the body is too large, 415 when it is compressed; 429
                when too much is held.
            ClientGone: the client disconnected before it was complete.
        """
        most = self._most + extra
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_large(most)
        encoding = request.headers.get("content-encoding", "")
        # Compared by name: some clients add a character set.
        if _COMPRESSED.intersection(part.strip() for part in encoding.lower().split(",")):
            raise ApiError(
                415,
                f"the body has Content-Encoding {encoding[:40]!r}: send it uncompressed, without this header",
                code="unsupported_content_encoding",
            )
        pieces: list[bytes] = []
        size = 0
        try:
            async for piece in request.stream():
                size += len(piece)
                self.held += len(piece)
                if size > most:
                    raise too_large(most)
                if self.held > _LARGEST_AT_ONCE * most:
                    raise ApiError(
                        429,
                        "too many large requests at once: try again later",
                        code="queue_full",
                        retry_after_s=RETRY_AFTER_S,
                    )
                pieces.append(piece)
            yield pieces
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            self.held -= size
