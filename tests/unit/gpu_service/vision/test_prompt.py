"""Invariant: an image's tokens, keys and positions stand where its placeholder stood, whole or in parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_service.core.images import (
    ImageError,
    ImageFeatures,
    ImageLayout,
    ImagePlan,
    ImageSlice,
    PreparedImage,
    place_images,
)
from gpu_service.core.request import Request, SamplingParams
from gpu_service.models.vision.tower import VisionTower
from gpu_service.vision.features import ImageEncoder
from gpu_service.vision.processor import content_key

PLACEHOLDER = ImageLayout(99, 99)


def image(key: int, rows: int, columns: int) -> PreparedImage:
    """Returns an image of rows x columns tokens; its pixels tell its key."""
    pixels = np.full((4 * rows * columns, 3), key, np.float32)
    return PreparedImage(key, pixels, (1, 2 * rows, 2 * columns), (rows, columns))


def test_placeholders_become_as_many_tokens_as_images_have() -> None:
    tokens, vision = place_images([5, 99, 6, 99], [image(-1, 2, 3), image(-2, 1, 2)], PLACEHOLDER)
    assert tokens == [5, *[99] * 6, 6, 99, 99]
    assert [(placed.start, placed.end) for placed in vision.images] == [(1, 7), (8, 10)]


def test_tiles_are_runs_with_tokens_of_the_layout_in_between() -> None:
    """Llama 4's order: rows of tiles, a token between columns and after each row, then all of the image."""
    layout = ImageLayout(99, 98, start=(1,), end=(2,), column=(3,), row=(4,), whole=(99,))
    pixels = np.zeros((5, 3), np.float32)
    cut = PreparedImage(-7, pixels, (5, 2, 4), (1, 2), tiles=(2, 2), tile_tokens=2)
    assert cut.num_tokens == 10
    tokens, vision = place_images([5, 99, 6], [cut], layout)
    run = [98, 98]
    assert tokens == [5, 1, *run, 3, *run, 4, *run, 3, *run, 4, 99, *run, 2, 6]
    assert [(part.start, part.end, part.first) for part in vision.images] == [
        (2, 4, 0),
        (5, 7, 2),
        (8, 10, 4),
        (11, 13, 6),
        (15, 17, 8),
    ]
    keys = [5, 1, -7, -7, 3, -7, -7, 4, -7, -7, 3, -7, -7, 4, 99, -7, -7, 2, 6]
    assert Request("r", tokens, SamplingParams(), vision=vision).prefix_keys(19) == keys
    whole = PreparedImage(-8, pixels, (1, 2, 4), (1, 2))
    tokens, vision = place_images([99], [whole], layout)
    assert tokens == [1, 99, 98, 98, 2]
    assert [(part.start, part.end, part.first) for part in vision.images] == [(2, 4, 0)]


def test_tiles_have_tokens_around_each_and_between_rows() -> None:
    """Step-3.7's order: crops, with a token between two rows, then all of the image, of more features."""
    layout = ImageLayout(99, 99, end=(2,), whole=(1,), tile_start=(3,), tile_end=(4,), between_rows=(5,))
    pixels = np.zeros((5, 3), np.float32)
    cut = PreparedImage(-7, pixels, (4, 4, 4), (1, 3), tiles=(2, 2), tile_tokens=1)
    tokens, vision = place_images([8, 99], [cut], layout)
    crop = [3, 99, 4]
    assert tokens == [8, *crop, *crop, 5, *crop, *crop, 1, 99, 99, 99, 2]
    assert [(part.start, part.count, part.first) for part in vision.images] == [
        (2, 1, 0),
        (5, 1, 1),
        (9, 1, 2),
        (12, 1, 3),
        (15, 3, 4),
    ]
    whole = PreparedImage(-8, pixels, (0, 4, 4), (1, 3))
    assert place_images([99], [whole], layout)[0] == [1, 99, 99, 99, 2]


def test_lines_of_an_image_are_kept_apart() -> None:
    """Mistral's order: a token between two lines and another one after the last, also of one line."""
    layout = ImageLayout(99, 99, end=(2,), line=(1,))
    tokens, vision = place_images([8, 99, 7, 99], [image(-7, 3, 2), image(-8, 1, 3)], layout)
    assert tokens == [8, 99, 99, 1, 99, 99, 1, 99, 99, 2, 7, 99, 99, 99, 2]
    assert [(part.start, part.count, part.first) for part in vision.images] == [
        (1, 2, 0),
        (4, 2, 2),
        (7, 2, 4),
        (11, 3, 0),
    ]
    keys = [8, -7, -7, 1, -7, -7, 1, -7, -7, 2, 7, -8, -8, -8, 2]
    assert Request("r", tokens, SamplingParams(), vision=vision).prefix_keys(15) == keys


def test_positions_are_those_of_the_paper() -> None:
    """Text counts on; an image is a grid from where it stands; then on from the end of its longer side."""
    _, vision = place_images([5, 99, 6, 7], [image(-1, 2, 3)], PLACEHOLDER)
    time = [0, 1, 1, 1, 1, 1, 1, 4, 5]
    height = [0, 1, 1, 1, 2, 2, 2, 4, 5]
    width = [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert vision.positions.tolist() == [time, height, width]
    # Generated tokens go on after the last one, whatever part is asked for.
    assert vision.axis_positions(7, 11).tolist() == [[4, 5, 6, 7]] * 3
    assert vision.axis_positions(9, 12).tolist() == [[6, 7, 8]] * 3
    assert vision.axis_positions(2, 4).tolist() == [[1, 1], [1, 1], [2, 3]]


def test_images_that_touch_are_two() -> None:
    _, vision = place_images([99, 99], [image(-1, 1, 2), image(-2, 2, 1)], PLACEHOLDER)
    assert vision.positions.tolist() == [[0, 0, 2, 2], [0, 0, 2, 3], [0, 1, 2, 2]]
    assert vision.offset == 0


def test_in_the_prefix_tree_an_image_is_its_content() -> None:
    """The image is its content also where a prefix ends within it; text and generated tokens keep
    their ids.
    """
    tokens, vision = place_images([5, 99, 6], [image(-7, 1, 3)], PLACEHOLDER)
    request = Request("r", tokens, SamplingParams(), vision=vision)
    request.output_token_ids = [99, 8]
    assert request.prefix_keys(7) == [5, -7, -7, -7, 6, 99, 8]
    assert request.prefix_keys(3) == [5, -7, -7]
    assert request.known_tokens(0, 3) == [5, 99, 99]


def test_content_keys_are_no_token_ids() -> None:
    """They are negative, fit the tree's integers, and differ where files, details or salts do."""
    keys = [content_key(bytes([number])) for number in range(200)]
    assert len(set(keys)) == 200
    assert all(-(2**63) <= key < 0 for key in keys)
    assert content_key(b"a") == content_key(b"a")
    keys += [content_key(bytes([number]), low_detail=True) for number in range(200)]
    keys += [content_key(bytes([number]), cache_salt="a") for number in range(200)]
    assert len(set(keys)) == 600


@pytest.mark.parametrize("prompt", [[5, 6], [99, 5, 99]])
def test_placeholders_and_images_must_be_as_many(prompt: list[int]) -> None:
    with pytest.raises(ImageError, match="1 images for"):
        place_images(prompt, [image(-1, 1, 1)], PLACEHOLDER)


class KeyTower(VisionTower):
    """Features that tell which image and which token they are of, and one set to add after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def encode(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        count = int(grid.prod()) // 4
        first = pixels[:1, 0] * 100 + torch.arange(count)
        return torch.stack([first, -first])[..., None].expand(2, count, 5)


def test_images_are_encoded_once_and_the_oldest_are_given_up() -> None:
    """Room for two of three; what was used last stays."""
    one, two, three = (image(-key, 1, 2) for key in (1, 2, 3))
    encoder = ImageEncoder(KeyTower(), torch.device("cpu"), cache_bytes=2 * (2 * 2 * 5 * 4))
    for wanted, encoded in [(one, 1), (two, 2), (one, 2), (three, 3), (one, 3), (two, 4), (one, 4)]:
        plan = ImagePlan(torch.tensor([0]), (ImageSlice(wanted, 1, 2),))
        features = encoder.features_of(plan)
        assert encoder.num_encoded == encoded
        assert features.values[:, 0, 0].tolist() == [wanted.key * 100 + 1, -(wanted.key * 100 + 1)]


def test_features_stand_in_their_rows_and_after_their_layers() -> None:
    stream = torch.zeros(4, 5)
    features = ImageFeatures(torch.tensor([1, 3]), torch.arange(20.0).view(2, 2, 5))
    features.replace_embeddings(stream)
    assert stream.tolist() == [[0] * 5, [0, 1, 2, 3, 4], [0] * 5, [5, 6, 7, 8, 9]]
    assert [features.reaches(layer) for layer in range(2)] == [True, False]
    features.add_after(0, stream)
    features.add_after(1, stream)
    assert stream.tolist() == [[0] * 5, [10, 12, 14, 16, 18], [0] * 5, [20, 22, 24, 26, 28]]
