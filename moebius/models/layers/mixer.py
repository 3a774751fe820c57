"""What every mixer of tokens says of itself: its cache, its state, its part on a rank, its cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.tensors import CacheTensor, StateTensor
from moebius.models.layers.weights import Weights, matrix_elements


class Mixer(ABC):
    """Base of frozen values; sizes are of the whole model, or of a rank after `on_rank`."""

    __slots__ = ()

    # What checkpoints call it within a layer.
    name: ClassVar[str] = "self_attn"
    # Whether its pages may hold 8 bits an element.
    stores_8_bits: ClassVar[bool] = True
    rope: RopeConfig | None  # None: nothing is rotated.

    @property
    def cache(self) -> tuple[CacheTensor, ...]:
        """What it keeps in pages: rows that are attended to, then keys that these are chosen by.

        What a rejected draft left there is written over by the token that takes its position.
        """
        return ()

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """What it keeps in a slot of each request; each draft that a step verifies has one, too."""
        return ()

    @abstractmethod
    def on_rank(self, rank: int, num_ranks: int) -> Self:
        """Returns the part of one of `num_ranks` tensor-parallel ranks."""

    @abstractmethod
    def indivisible(self, num_ranks: int) -> str:
        """What `num_ranks` do not divide, for messages; empty: they divide all."""

    def within(self, max_model_len: int) -> Self:
        """The mixer where no sequence exceeds `max_model_len` tokens: without limits that none reaches."""
        return self

    @property
    def attends_back(self) -> int:
        """Returns how many layers before this one the cache is that it attends to; 0: its own."""
        return 0

    @property
    def chooses(self) -> bool:
        """Returns whether it chooses what it, and maybe later layers, attend to."""
        return any(part.is_index for part in self.cache)

    @property
    def awaits_choice(self) -> bool:
        """Returns whether it attends to what the nearest earlier layer chose."""
        return False

    @property
    @abstractmethod
    def row_elements(self) -> int:
        """Elements of one token that live at once while it is mixed, over all heads."""

    @property
    @abstractmethod
    def widest_row(self) -> int:
        """Elements of one token in the widest tensor."""

    @abstractmethod
    def weights(self, hidden_size: int) -> Weights:
        """Yields what checkpoints store of it; of the whole model's value, which ranks then cut."""

    def weight_elements(self, hidden_size: int) -> int:
        """Returns the number of elements of its matrices: a token costs two operations for each."""
        return matrix_elements(self.weights(hidden_size))

    @property
    def score_width(self) -> int:
        """Elements over all heads of a score, and of a weighted sum, of each token attended to."""
        return 0

    def choice_bytes(self, hidden_size: int, max_model_len: int, activation_bytes: int) -> int:
        """Returns the bytes of one token while it is chosen what it attends to."""
        return 0

    def num_block_scores(self, max_model_len: int) -> int:
        """Returns the scores of one token's blocks before the choice, float32; 0: none are chosen."""
        return 0
