"""Which consecutive part of an axis a tensor-parallel rank holds: functions of sizes and ranks alone."""

from __future__ import annotations

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
