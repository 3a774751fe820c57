"""Embeddings of the latest tokens together, and how these are hashed: numbers that follow from a
`NGramConfig`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from moebius.models.layers.ranks import WHOLE, ShardRange, TableRows, even_shard
from moebius.models.layers.tensors import StateTensor
from moebius.models.layers.weights import Weight, Weights, conv_taps, fused, linear, under

_MASK64 = 2**64 - 1
# Of the splitmix64 generator (Steele, Lea, Flood 2014).
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Seeds of layers are so far apart.
_LAYER_STEP = 10007


@dataclass(frozen=True, slots=True)
class NGramConfig:
    """Embeddings of the latest tokens together, which some layers add to the residual streams (Qwen4).

    Rows of a table are found by hashing the latest 2, 3, ... `size` tokens, several times each.
    """

    # Layers that have them, ascending, counted over the whole model: a layer's place decides its hashes.
    layers: tuple[int, ...]
    size: int  # Tokens of the longest n-gram.
    heads: int  # Hashes of each order.
    embed_dim: int  # Elements of all hashes' rows together.
    vocab_base: int  # Each hash has a prime number of rows, the next ones from here on.
    padded_to: int  # A layer's table has a multiple of this many rows,
    parts: int  # and is stored as this many tensors of equal size.
    seed: int  # Of the hashes' factors.
    end_token_id: int  # No n-gram reaches beyond it; stands for what is before a sequence's begin, too.
    conv_taps: int  # Of the causal convolution, `size` tokens apart.
    generator: Literal["splitmix64", "pcg64"] = "splitmix64"  # Of the hashes' factors.

    @property
    def num_hashes(self) -> int:
        """Rows of the table that a token has."""
        return (self.size - 1) * self.heads

    @property
    def row_dim(self) -> int:
        """Elements of a row of the table."""
        return self.embed_dim // self.num_hashes

    @property
    def conv_width(self) -> int:
        """Tokens that the convolution spans, the newest included."""
        return (self.conv_taps - 1) * self.size + 1


@dataclass(frozen=True, slots=True)
class NGrams:
    """Embeddings of the latest tokens together, which are added to the streams at the layer's begin."""

    sizes: NGramConfig
    place: int  # Among the model's layers that have them: it decides the hashes.
    stream_size: int

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The latest tokens; inputs of the convolution over all elements of the streams."""
        tokens = StateTensor((self.sizes.size - 1,), "int64")
        return tokens, StateTensor((self.sizes.conv_width - 1, self.stream_size))

    def table_part(self, rank: int, count: int) -> ShardRange:
        """Returns the rows of the table that a rank has."""
        return even_shard(num_table_rows(self.sizes, self.place), rank, count)

    def weights(self, hidden_size: int) -> Weights:
        """Yields what checkpoints store: all is every rank's, but for the table."""
        sizes, width = self.sizes, self.stream_size
        yield from under("ple_embedding", table_weights(sizes, num_table_rows(sizes, self.place)))
        parts = {"key_proj": (width, WHOLE), "value_proj": (hidden_size, WHOLE)}
        yield from fused("kv_proj", sizes.embed_dim, parts)
        for name in ("norm_key", "norm_query", "norm_conv"):
            yield stream_norm(name, width)
        yield from conv_taps("conv1d", width, sizes.conv_taps)


# Columns of a row of an engram's table that share a scale.
ENGRAM_GROUP = 32


@dataclass(frozen=True, slots=True)
class Engram:
    """Embeddings of the latest tokens together, which are added to the streams at the layer's begin, gated by
    them (DeepSeek-V4.1). Tokens that are written alike but for case, accents and blanks count as one.

    Source: `inference/engram.py` and `Engram` in `inference/model.py` of the published model.
    """

    sizes: NGramConfig
    place: int  # Among the model's layers that have them.
    stream_size: int
    num_kinds: int  # Tokens that count as different.
    tokenizer: str = field(compare=False)  # File that says which do.

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The latest tokens' kinds."""
        return (StateTensor((self.sizes.size - 1,), "int64"),)

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return num_table_rows(self.sizes, self.place)

    def table_part(self, rank: int, count: int) -> ShardRange:
        """Returns the rows of the table that a rank has."""
        return even_shard(self.num_rows, rank, count)

    def weights(self, hidden_size: int) -> Weights:
        """Yields what checkpoints store: all is every rank's, but for the table."""
        rows, size = self.num_rows, self.sizes.row_dim
        # What checkpoints store in 8 bits has a scale for this number of columns.
        columns = 0 if size % ENGRAM_GROUP else ENGRAM_GROUP
        yield Weight(
            "embed.weight",
            (rows, size),
            cut=TableRows(0, rows),
            on_host=True,
            scale="embed.scale" if columns else "",
            scale_columns=columns,
        )
        yield from linear("wkv", self.stream_size + hidden_size, self.sizes.embed_dim)
        for name in ("q_weight", "k_weight"):
            yield Weight(name, (self.stream_size // hidden_size, hidden_size), "float32")


def table_weights(sizes: NGramConfig, num_rows: int) -> Weights:
    """Yields the parts of a table.

    No other tensor of a model is nearly as large, and a token reads some rows only.
    """
    table, part = "ngram_embedding", num_rows // sizes.parts
    for number in range(sizes.parts):
        yield Weight(
            f"{table}.shard_{number}.weight",
            (part, sizes.row_dim),
            cut=TableRows(number * part, num_rows),
            into=f"{table}.weight",
            on_host=True,
            scale=f"{table}.weight_scale",
        )


def stream_norm(name: str, stream_size: int) -> Weight:
    """Returns the weight of norms of each residual stream by itself, one after the other; less 1."""
    return Weight(f"{name}.weight", (stream_size,), "float32")


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK64
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK64
    return value ^ (value >> 31)


def _is_prime(value: int) -> bool:
    if value < 4:
        return value > 1
    return value % 2 == 1 and all(value % divisor for divisor in range(3, math.isqrt(value) + 1, 2))


def hash_factors(sizes: NGramConfig, place: int, vocab_size: int) -> list[int]:
    """Returns the factors of a token and of those before it, in the `place`-th layer that embeds n-grams;
    odd.

    No product of a token and a factor exceeds 63 bits.
    """
    half = max(1, (2**63 - 1) // max(vocab_size, 1) // 2)
    if sizes.generator == "pcg64":
        drawn = np.random.default_rng(sizes.seed * sizes.layers[place])
        return [2 * int(value) + 1 for value in drawn.integers(0, half, size=sizes.size, dtype=np.int64)]
    seed = sizes.seed + _LAYER_STEP * place
    return [2 * (_splitmix64((seed + _GAMMA * (i + 1)) & _MASK64) % half) + 1 for i in range(sizes.size)]


def hash_primes(sizes: NGramConfig, place: int) -> list[int]:
    """Returns the rows of each hash of that layer: the next primes after those of the layers before."""
    found: list[int] = []
    candidate = sizes.vocab_base
    while len(found) < (place + 1) * sizes.num_hashes:
        if _is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return found[place * sizes.num_hashes :]


@lru_cache(maxsize=64)
def num_table_rows(sizes: NGramConfig, place: int) -> int:
    """Returns the rows of that layer's table, padding included."""
    return -(-sum(hash_primes(sizes, place)) // sizes.padded_to) * sizes.padded_to
