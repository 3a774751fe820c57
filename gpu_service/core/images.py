"""A prompt with images: its tokens, what stands for an image in the prefix tree, positions by axis.

as sent      t t [image] t t            one placeholder token for each image
as computed  t t s i i i i i i e t t    as many as the image has features; s and e where a model has them
in the tree  t t s k k k k k k e t t    k: negative, from the image's content

An image that is cut into tiles has a run of features for each of them, with tokens of its layout in between;
where lines of an image are kept apart, each line is a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Time, height, width.
NUM_AXES = 3
Positions = npt.NDArray[np.int64]


class ImageError(ValueError):
    """A prompt's images cannot be used; the message says which one and why."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """One image as the tower reads it; filled by `ImagePreparer`."""

    # Negative, equal for equal files only; stands for each of the image's tokens in the prefix tree.
    key: int
    pixels: npt.NDArray[Any]  # float32 [patches, ...], as the family's image processor makes them.
    grid: tuple[int, int, int]  # Patches in time, height and width.
    token_grid: tuple[int, int]  # Height and width in tokens, of all of the image.
    # Rows and columns of the tiles that come before the tile with all of the image; (0, 0): it is not cut.
    tiles: tuple[int, int] = (0, 0)
    tile_tokens: int = 0  # Of each of these.

    @property
    def num_tokens(self) -> int:
        """Tokens that the image is for the language model, those of the layout left out."""
        return math.prod(self.token_grid) + math.prod(self.tiles) * self.tile_tokens


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Token ids of an image in a prompt; filled by `gpu_service.vision.processor.read_layout`."""

    placeholder: int  # What chat templates write for an image.
    image: int  # What stands at each of its features.
    # Around an image, between two columns of tiles, after a row of them, and before the tile with all of it.
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    column: tuple[int, ...] = ()
    row: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    # Around each tile but the one with all of the image, and between two rows of them.
    tile_start: tuple[int, ...] = ()
    tile_end: tuple[int, ...] = ()
    between_rows: tuple[int, ...] = ()
    line: tuple[int, ...] = ()  # Between two lines of features.
    sees_ahead: bool = False  # As `VisionConfig.sees_ahead`.

    def runs(self, image: PreparedImage) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yields the tokens of the layout, and how many features follow them; `end` comes after the last."""
        rows, columns = image.tiles
        before = self.start
        for row in range(rows):
            for column in range(columns):
                yield before + self.tile_start, image.tile_tokens
                after_row = self.row + (self.between_rows if row + 1 < rows else ())
                before = self.tile_end + (self.column if column + 1 < columns else after_row)
        before += self.whole
        height, width = image.token_grid
        if not self.line:
            yield before, height * width
            return
        for _ in range(height):
            yield before, width
            before = self.line


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image, or a part of it, at tokens [start, end) of the prompt; filled by `place_images`."""

    image: PreparedImage
    start: int
    first: int  # Which of the image's features stands at `start`.
    count: int  # Features.

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.count


@dataclass(frozen=True, slots=True, eq=False)
class VisionPrompt:
    """What a request with images has besides its tokens; filled by `locate`."""

    images: tuple[PromptImage, ...]
    positions: Positions  # int64 [3, P], positions of the prompt's P tokens in time, height and width.
    # What is added to the index of a token after the prompt: an image takes fewer positions than tokens.
    offset: int
    # Whether the tokens of an image see one another, so that one step has to compute all of them.
    sees_ahead: bool = False

    def uncut(self, start: int, count: int, most: int) -> int:
        """Returns the number of tokens to compute from `start` on, about `count` and up to `most`, that end
        within no such image.

        0: the image at `start` is longer than `most`.
        """
        end = start + count
        cut = next((p for p in self.images if p.start < end < p.end), None) if self.sees_ahead else None
        if cut is None:
            return count
        if cut.start > start:
            return cut.start - start
        return cut.end - start if cut.end - start <= most else 0

    def axis_positions(self, start: int, end: int) -> Positions:
        """int64 `[3, end - start]` for the tokens at [start, end), those of the prompt or after it."""
        prompt_len = self.positions.shape[1]
        after = np.arange(max(start, prompt_len), max(end, prompt_len)) + self.offset
        return np.concatenate(
            (self.positions[:, start:end], np.broadcast_to(after, (NUM_AXES, len(after)))), axis=1
        )

    def keyed(self, tokens: Sequence[int]) -> list[int]:
        """Returns `tokens`, the request's first ones, with the images' keys in place of their
        placeholders.
        """
        keys = list(tokens)
        for placed in self.images:
            stop = min(placed.end, len(keys))
            keys[placed.start : stop] = [placed.image.key] * max(0, stop - placed.start)
        return keys


@dataclass(frozen=True, slots=True)
class ImageSlice:
    """Tokens [begin, end) of an image that a step computes; filled by the input builder."""

    image: PreparedImage
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """A step's image tokens; filled by the input builder."""

    rows: torch.Tensor  # int64 [N], rows of the step that are image tokens
    slices: tuple[ImageSlice, ...]  # in the order of these rows


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What image tokens are in the stream; filled by `ImageEncoder.features_of`."""

    rows: torch.Tensor  # int64 [N]
    # [1 + D, N, H]: instead of the embeddings, then what is added after each of the first D layers.
    values: torch.Tensor

    def replace_embeddings(self, stream: torch.Tensor) -> None:
        """Writes into `stream` `[T, H]`."""
        stream.index_copy_(0, self.rows, self.values[0].to(stream.dtype))

    def add_after(self, layer: int, stream: torch.Tensor) -> None:
        """Adds what belongs there, if anything, into `stream` `[T, H]`, as decoder layer `layer` left it."""
        if self.reaches(layer):
            stream.index_add_(0, self.rows, self.values[1 + layer].to(stream.dtype))

    def reaches(self, layer: int) -> bool:
        """Returns whether anything is added after decoder layer `layer`."""
        return layer + 1 < self.values.shape[0]


def place_images(
    token_ids: Sequence[int], images: Sequence[PreparedImage], layout: ImageLayout
) -> tuple[list[int], VisionPrompt]:
    """Puts each image in the place of its placeholder; the longer prompt, and what it has besides tokens.

    Raises ImageError unless there are as many placeholders as images.
    """
    places = [index for index, token in enumerate(token_ids) if token == layout.placeholder]
    if len(places) != len(images):
        raise ImageError(
            f"{len(images)} images for {len(places)} placeholders (token {layout.placeholder}) in the prompt"
        )
    tokens: list[int] = []
    placed: list[PromptImage] = []
    taken = 0
    for place, image in zip(places, images, strict=True):
        tokens += token_ids[taken:place]
        first = 0
        for before, count in layout.runs(image):
            tokens += before
            placed.append(PromptImage(image, len(tokens), first, count))
            tokens += [layout.image] * count
            first += count
        tokens += layout.end
        taken = place + 1
    tokens += token_ids[taken:]
    return tokens, locate(len(tokens), placed, layout.sees_ahead)


def locate(num_tokens: int, placed: Sequence[PromptImage], sees_ahead: bool = False) -> VisionPrompt:
    """Returns what a prompt of `num_tokens` tokens has besides them. `placed`: its images, ascending.

    Text counts on along all axes. An image's tokens share one position in time and count along the
    others; what follows begins after the longer side (Qwen2-VL, arXiv 2409.12191, section 2.1). Models whose
    images come in several runs have no such axes, and do not read the positions.
    """
    pieces: list[Positions] = []
    position = taken = 0
    for item in placed:
        pieces.append(_text(position, item.start - taken))
        position += item.start - taken
        height, width = item.image.token_grid
        rows, columns = np.divmod(np.arange(item.first, item.first + item.count), width)
        pieces.append(np.stack((np.zeros_like(rows), rows, columns)) + position)
        position += max(height, width)
        taken = item.end
    pieces.append(_text(position, num_tokens - taken))
    return VisionPrompt(tuple(placed), np.concatenate(pieces, axis=1), position - taken, sees_ahead)


def _text(start: int, count: int) -> Positions:
    return np.broadcast_to(np.arange(start, start + count), (NUM_AXES, count))
