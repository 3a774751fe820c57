"""`Engine.GenerateWithImages`: a request whose images come in pieces."""

from __future__ import annotations

from protos import engine_pb2 as pb

MOST_BYTES = 2**28  # of all images together


class PiecesRefused(ValueError):
    """The messages are no request; the text says why."""


class GatheredRequest:
    """The request that has come so far. `take` every message, then `finish`; both raise PiecesRefused."""

    def __init__(self) -> None:
        self._request: pb.GenerateRequest | None = None
        self._image = 0
        self._pieces: list[bytes] = []  # of that image
        self._bytes = 0

    def take(self, message: pb.GenerateWithImagesRequest) -> None:
        """The next message of the stream."""
        if self._request is None:
            if message.WhichOneof("part") != "request":
                raise PiecesRefused("the first message has to be the request")
            self._request = message.request
            return
        if message.WhichOneof("part") != "piece":
            raise PiecesRefused("the messages after the first one have to be pieces of images")
        piece, count = message.piece, len(self._request.images)
        if not self._image <= piece.image < count:
            raise PiecesRefused(
                f"piece.image: {piece.image} is not allowed; allowed: {self._image}..{count - 1}"
            )
        self._bytes += len(piece.data)
        if self._bytes > MOST_BYTES:
            raise PiecesRefused(f"the images are larger than {MOST_BYTES // 2**20} MiB")
        if piece.image != self._image:
            self._complete()
            self._image = piece.image
        self._pieces.append(piece.data)

    def _complete(self) -> None:
        if self._request is not None and self._pieces:
            self._request.images[self._image].data = b"".join(self._pieces)
            self._pieces = []

    def finish(self) -> pb.GenerateRequest:
        """Returns the whole request, once the client has ended its side."""
        if self._request is None:
            raise PiecesRefused("there is no request")
        self._complete()
        return self._request
