"""Guards that a request with images arrives as it was sent, in pieces, and nothing else is taken for one."""

from __future__ import annotations

import random

import pytest

from gateway.replicas.engine_client import _PIECE_BYTES, _write_with_images
from gpu_service.server import image_pieces
from gpu_service.server.image_pieces import GatheredRequest, PiecesRefused
from protos import engine_pb2 as pb


class SentMessages:
    """The client's side of a call; keeps what was sent as the bytes it would be."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.ended = False

    async def write(self, message: pb.GenerateWithImagesRequest) -> None:
        """One message."""
        self.messages.append(message.SerializeToString())

    async def done_writing(self) -> None:
        """The last one was sent."""
        self.ended = True


async def test_images_arrive_whole_in_small_messages() -> None:
    """Images of all sizes, none at all included, arrive, and no message is much larger than a piece."""
    draw = random.Random(0)
    sizes = (3 * _PIECE_BYTES + 17, 0, _PIECE_BYTES, 1)
    images = [draw.randbytes(size) for size in sizes]
    request = pb.GenerateRequest(request_id="a", stream=True)
    for detail in (pb.IMAGE_DETAIL_LOW, *[pb.IMAGE_DETAIL_HIGH] * 3):
        request.images.add(detail=detail)
    call = SentMessages()
    await _write_with_images(call, request, images)
    assert call.ended
    assert max(map(len, call.messages)) < _PIECE_BYTES + 100
    gathered = GatheredRequest()
    for message in call.messages:
        gathered.take(pb.GenerateWithImagesRequest.FromString(message))
    whole = gathered.finish()
    assert [image.data for image in whole.images] == images
    assert whole.images[0].detail == pb.IMAGE_DETAIL_LOW
    assert (whole.request_id, whole.stream) == ("a", True)


def piece(image: int, data: bytes = b"x") -> pb.GenerateWithImagesRequest:
    return pb.GenerateWithImagesRequest(piece=pb.ImagePiece(image=image, data=data))


def test_what_is_no_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of images that the request does not have or has had, too many bytes, a second request, none."""
    first = pb.GenerateWithImagesRequest(request=pb.GenerateRequest(images=[pb.ImageInput()] * 2))
    monkeypatch.setattr(image_pieces, "MOST_BYTES", 3)
    for messages, reason in (
        ([], "no request"),
        ([piece(0)], "the first message"),
        ([first, first], "pieces of images"),
        ([first, piece(2)], r"piece.image: 2 .* allowed: 0..1"),
        ([first, piece(1), piece(0)], r"piece.image: 0 .* allowed: 1..1"),
        ([first, piece(0, b"12"), piece(1, b"34")], "larger than"),
    ):
        gathered = GatheredRequest()
        with pytest.raises(PiecesRefused, match=reason):
            _take_all(gathered, messages)


def _take_all(gathered: GatheredRequest, messages: list[pb.GenerateWithImagesRequest]) -> None:
    for message in messages:
        gathered.take(message)
    gathered.finish()
