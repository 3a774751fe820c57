"""Guards that images arrive at other ranks as they were sent, each once, however long a message gets."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_service.engine.inbox import Add
from gpu_service.parallel.codec import decode_messages, encode_messages
from gpu_service.request import Request, SamplingParams
from gpu_service.vision.prompt import PreparedImage, place_images

PLACEHOLDER = 9


def image(key: int, rows: int, columns: int) -> PreparedImage:
    """Random patches of more than one dimension each."""
    pixels = np.random.default_rng(-key).normal(size=(4 * rows * columns, 3, 2)).astype(np.float32)
    return PreparedImage(key, pixels, (1, 2 * rows, 2 * columns), (rows, columns))


def request(name: str, prompt: list[int], images: list[PreparedImage]) -> Request:
    """With images in the place of its placeholders."""
    tokens, vision = place_images(prompt, images, PLACEHOLDER)
    return Request(name, tokens, SamplingParams(), vision=vision if images else None)


ONE, TWO = image(-(2**63), 1, 3), image(-2, 2, 2)


def test_images_arrive_as_they_were_sent() -> None:
    """Pixels to the last bit, places, keys and positions; a request without images has none."""
    sent = [request("a", [1, 9, 2, 9], [ONE, TWO]), request("b", [3], []), request("c", [9], [TWO])]
    (arrived,) = decode_messages(encode_messages([Add(tuple(sent))]))
    assert isinstance(arrived, Add)
    assert [r.prompt_token_ids for r in arrived.requests] == [r.prompt_token_ids for r in sent]
    assert arrived.requests[1].vision is None
    for ours, theirs in ((arrived.requests[0], sent[0]), (arrived.requests[2], sent[2])):
        assert ours.vision is not None
        assert theirs.vision is not None
        assert ours.vision.positions.tolist() == theirs.vision.positions.tolist()
        assert ours.vision.offset == theirs.vision.offset
        assert ours.prefix_keys(ours.total_len) == theirs.prefix_keys(theirs.total_len)
        for mine, other in zip(ours.vision.images, theirs.vision.images, strict=True):
            assert (mine.start, mine.image.key, mine.image.grid) == (
                other.start,
                other.image.key,
                other.image.grid,
            )
            assert np.array_equal(mine.image.pixels, other.image.pixels)
            assert mine.image.pixels.flags.writeable


def test_outputs_of_one_request_share_their_images() -> None:
    once = encode_messages([Add((request("a", [9], [TWO]),))])
    thrice = encode_messages([Add(tuple(request(name, [9], [TWO]) for name in "abc"))])
    assert len(thrice) - len(once) < TWO.pixels.nbytes + 2000
    assert thrice.count(TWO.pixels.tobytes()) == 1


def test_a_message_that_ends_within_an_image_is_refused() -> None:
    payload = encode_messages([Add((request("a", [9], [ONE]),))])
    with pytest.raises(ValueError, match="buffer"):
        decode_messages(payload[: -ONE.pixels.nbytes // 2 - 4 * 3])
