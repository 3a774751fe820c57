"""Which part of an axis a tensor-parallel rank holds: functions of sizes and ranks alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Elements [begin, end) of a dimension of `total` elements."""

    begin: int
    end: int
    total: int

    @staticmethod
    def whole(total: int) -> ShardRange:
        """Returns the range of an axis that is not divided."""
        return ShardRange(0, total, total)

    @property
    def size(self) -> int:
        """Elements of the range."""
        return self.end - self.begin

    @property
    def is_whole(self) -> bool:
        """Returns whether the range covers its axis."""
        return self.size == self.total

    def scaled(self, factor: int) -> ShardRange:
        """Returns the same part of a dimension whose every element is `factor` wide."""
        return ShardRange(self.begin * factor, self.end * factor, self.total * factor)

    @property
    def slice(self) -> slice:
        """The range as an index."""
        return slice(self.begin, self.end)

    @property
    def indices(self) -> range:
        """The elements of the range."""
        return range(self.begin, self.end)


def even_shard(total: int, rank: int, count: int) -> ShardRange:
    """The rank-th of `count` nearly equal parts."""
    return ShardRange(rank * total // count, (rank + 1) * total // count, total)


def kv_shard(num_heads: int, rank: int, count: int) -> ShardRange:
    """Returns the key and value heads of a rank: a share of them, or, with more ranks than heads, one, held
    by several.

    query heads  | 0 1 | 2 3 | 4 5 | 6 7 |      8 query heads, 2 KV heads, 4 ranks
    KV heads     |  0  |  0  |  1  |  1  |
    """
    if num_heads >= count:
        return even_shard(num_heads, rank, count)
    head = rank * num_heads // count
    return ShardRange(head, head + 1, num_heads)


class Cut(ABC):
    """Which elements of one axis of a stored tensor a rank has; frozen values."""

    __slots__ = ()

    @abstractmethod
    def part(self, size: int, rank: int, count: int) -> ShardRange:
        """Returns what the rank reads of `size` elements."""

    def held(self, size: int, rank: int, count: int) -> int:
        """Returns the number of elements in the rank's memory: those it reads, and maybe some of padding."""
        return self.part(size, rank, count).size

    def kept(self, size: int, rank: int, count: int) -> Sequence[int] | None:
        """Returns which of the elements that the rank reads it keeps, in order; None: all."""
        return None


@dataclass(frozen=True, slots=True)
class Whole(Cut):
    """Every rank has all."""

    def part(self, size: int, rank: int, count: int) -> ShardRange:
        return ShardRange.whole(size)


WHOLE = Whole()


@dataclass(frozen=True, slots=True)
class Even(Cut):
    """Ranks share units (heads, groups, channels), each of which is as many elements as any other."""

    units: int

    def part(self, size: int, rank: int, count: int) -> ShardRange:
        return even_shard(self.units, rank, count).scaled(size // self.units)


@dataclass(frozen=True, slots=True)
class KvHeads(Cut):
    """Ranks share heads, and with more ranks than heads several have the same one, as in `kv_shard`."""

    heads: int

    def part(self, size: int, rank: int, count: int) -> ShardRange:
        return kv_shard(self.heads, rank, count).scaled(size // self.heads)


@dataclass(frozen=True, slots=True)
class Segments(Cut):
    """Axes of `sizes` that lie one after the other, in each of which ranks share the same units.

    A rank's elements do not lie together: it reads all and keeps its own.
    """

    sizes: tuple[int, ...]
    units: int

    def part(self, size: int, rank: int, count: int) -> ShardRange:
        return ShardRange.whole(size)

    def kept(self, size: int, rank: int, count: int) -> Sequence[int] | None:
        own, kept, begin = even_shard(self.units, rank, count), list[int](), 0
        if own.is_whole:
            return None
        for segment in self.sizes:
            shard = own.scaled(segment // self.units)
            kept += range(begin + shard.begin, begin + shard.end)
            begin += segment
        return kept


# Rows of a rank's part of the vocabulary: products of GPUs like multiples of 8.
_VOCABULARY_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Vocabulary(Cut):
    """Rows of tokens; later ranks may have fewer, or none.

    All ranks hold equally many, so that gathered logits have equal parts; those without a token are zero.
    """

    def part(self, size: int, rank: int, count: int) -> ShardRange:
        rows = self.held(size, rank, count)
        begin = min(rank * rows, size)
        return ShardRange(begin, min(begin + rows, size), size)

    def held(self, size: int, rank: int, count: int) -> int:
        if count == 1:
            return size
        return -(-size // (count * _VOCABULARY_MULTIPLE)) * _VOCABULARY_MULTIPLE


@dataclass(frozen=True, slots=True)
class TableRows(Cut):
    """Rows from `first` on of a table of `total` rows, which ranks share evenly and of which several tensors
    have parts.
    """

    first: int
    total: int

    def part(self, size: int, rank: int, count: int) -> ShardRange:
        shard = even_shard(self.total, rank, count)
        begin, end = (min(max(bound - self.first, 0), size) for bound in (shard.begin, shard.end))
        return ShardRange(begin, end, size)
