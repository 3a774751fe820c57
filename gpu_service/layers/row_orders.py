"""How fused projections of checkpoints mix by head what is computed apart: orders for `FusedLinear`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpu_service.model_config import LinearAttentionConfig
from gpu_service.parallel.partition import Span


def _apart(begin: int, heads: int, widths: Sequence[int]) -> Iterator[list[int]]:
    """Rows from `begin` on, `widths` of each part for every head: for each part, those of all heads."""
    stride, offset = sum(widths), 0
    for width in widths:
        firsts = (begin + head * stride + offset for head in range(heads))
        yield [row for first in firsts for row in range(first, first + width)]
        offset += width


def gated_query_order(num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    """A query projection with each head's query, then its gate; keys; values: the gates go last."""
    query, gate = _apart(0, num_heads, (head_dim, head_dim))
    begin = 2 * num_heads * head_dim
    return [*query, *range(begin, begin + 2 * num_kv_heads * head_dim), *gate]


def linear_attention_order(config: LinearAttentionConfig) -> list[int]:
    """Rows of `in_proj_qkvz`, then of `in_proj_ba`, as queries, keys, values, gates, b, a of all heads.

    The checkpoint has for each key head: its query, its key, the values and then the gates of the value heads
    it serves; and b, then a of these.
    """
    heads = config.num_key_heads
    repeats = config.num_value_heads // heads
    values = repeats * config.value_head_dim
    widths = (config.key_head_dim, config.key_head_dim, values, values)
    parts = (*_apart(0, heads, widths), *_apart(heads * sum(widths), heads, (repeats, repeats)))
    return [row for part in parts for row in part]


def channels_of(config: LinearAttentionConfig, heads: Span) -> list[int]:
    """Of the queries, keys and values of all heads, one kind after the other, those of some key heads."""
    values = config.num_value_heads // config.num_key_heads * config.value_head_dim
    channels, begin = list[int](), 0
    for width in (config.key_head_dim, config.key_head_dim, values):
        own = heads.scaled(width)
        channels += range(begin + own.begin, begin + own.end)
        begin += own.total
    return channels
