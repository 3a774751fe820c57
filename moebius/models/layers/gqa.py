"""Grouped-query attention, over all tokens, a window, a chunk, or blocks that each token chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from moebius.models.errors import ModelConfigError
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.norms import Norm, RMSNorm
from moebius.models.layers.ranks import WHOLE, Cut, Even, KvHeads, even_shard, kv_shard
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.tensors import CacheTensor
from moebius.models.layers.weights import Weight, Weights, fused, linear, rms_norm, under

GateActivation = Literal["sigmoid", "softplus"]


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Norms of queries and keys, each head by itself."""

    norm: Norm
    after_rope: bool = False


@dataclass(frozen=True, slots=True)
class FullWidthQkNorm:
    """Norms of queries and keys, all heads of either together."""

    eps: float
    after_rope: bool = False


@dataclass(frozen=True, slots=True)
class Gate:
    """Weights of what attention answers: of each head, or of each element; `query`: of elements, made by
    rows of the query projection.
    """

    of: Literal["head", "element", "query"]
    activation: GateActivation = "sigmoid"


@dataclass(frozen=True, slots=True)
class Window:
    """A query sees the latest tokens, its own included, up to this number."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A query sees the earlier tokens of its own chunk."""

    tokens: int


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """Blocks of tokens that each KV head chooses for itself (MiniMax-M3), or that are chosen once for all
    heads (`shared_heads`; Qwen4).
    """

    head_dim: int  # Of the small queries, one head for each KV head, and of the one key, that only score.
    block_size: int  # Consecutive tokens that are chosen together, by the best of them.
    top_blocks: int  # Most blocks that a query attends to, those that are always chosen included.
    local_blocks: int  # Latest blocks, the query's own included, that are always chosen.
    norm: RMSNorm
    # Heads whose positive products with the mean key of a block add up to its score, which counts for all
    # heads of attention; the tokens after the last whole block are always read, and not counted. 0: each KV
    # head has one of its own.
    shared_heads: int = 0
    rotary_dim: int = 0  # With shared heads, elements of their queries and keys that are rotated.

    @property
    def row_dim(self) -> int:
        """Elements that the cache holds of a token: its key, and with shared heads its rotation, by which
        the mean key of the block that it begins is rotated.
        """
        return self.head_dim + self.rotary_dim

    def weights(self, hidden_size: int, kv_heads: int) -> Weights:
        """Yields what checkpoints store; with shared heads every rank has all of it."""
        if self.shared_heads:
            norms = "q_layernorm", "k_layernorm"
            yield from linear("index_qk_proj", (self.shared_heads + 1) * self.head_dim, hidden_size)
        else:
            norms = "q_norm", "k_norm"
            own = {"q_proj": (kv_heads * self.head_dim, KvHeads(kv_heads)), "k_proj": (self.head_dim, WHOLE)}
            yield from fused("qk_proj", hidden_size, own)
        for name in norms:
            yield from self.norm.weights(name, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class GQA(Mixer):
    """Query heads in groups, each of which reads the keys and values of one head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # Elements of a query or key.
    value_dim: int  # Elements of a value, at most `head_dim`; the cache holds zeros for the rest.
    scale: float  # Factor of the scores.
    rope: RopeConfig | None
    eps: float  # Of norms without weights.
    input_width: int = 1  # How many times `hidden_size` the vector is long that is projected.
    sight: Window | Chunk | None = None  # None: a query sees all earlier tokens.
    # Whether each query head has a learned logit that joins its softmax's sum and has no value.
    has_sinks: bool = False
    bias: bool = False  # Of the projections before attention, and of the one after it.
    output_bias: bool = False
    qk_norm: QkNorm | FullWidthQkNorm | None = None
    # Whether rotated queries and keys are divided by their root mean square, before a norm after rotation.
    unit_norm: bool = False
    # Factor and length: queries that are not rotated are multiplied at position p by
    # `1 + factor * ln(1 + floor((p + 1) / length))`; None: they are not.
    query_growth: tuple[float, float] | None = None
    gate: Gate | None = None
    value_scale: float = 1.0  # What values are multiplied by.
    value_norm: bool = False  # Whether each value is divided by its root mean square.
    keys_are_values: bool = False  # Whether values are keys before their norm, without a projection.
    # Where queries, keys and values are cut off, after norms and before rotation; infinite: nowhere.
    limit: float = math.inf
    blocks: BlockIndexer | None = None  # None: it attends to all that it sees.

    def __post_init__(self) -> None:
        """Raises ModelConfigError for parts that no kernel computes together."""
        gated = None if self.gate is None else self.gate.of
        short_values = self.value_dim < self.head_dim
        refused = {
            "values that are longer than keys": self.value_dim > self.head_dim,
            "shorter values that are keys": short_values and self.keys_are_values,
            "gates made by the query projection beside values that are not as long as keys or are keys": (
                gated == "query" and (short_values or self.keys_are_values)
            ),
            "gates of elements beside biases": gated == "element" and self.bias,
            "blocks that are chosen within a window or a chunk": self.blocks is not None
            and self.sight is not None,
            "blocks that are chosen without rotation": self.blocks is not None and self.rope is None,
        }
        for what, is_asked in refused.items():
            if is_asked:
                raise ModelConfigError(f"attention: {what} are not computed")

    def within(self, max_model_len: int) -> Self:
        sight = self.sight
        return (
            replace(self, sight=None) if isinstance(sight, Chunk) and sight.tokens >= max_model_len else self
        )

    @property
    def window(self) -> int | None:
        """Latest tokens that a query sees; None: no window."""
        return self.sight.tokens if isinstance(self.sight, Window) else None

    @property
    def chunk(self) -> int | None:
        """Tokens of a chunk; None: no chunks."""
        return self.sight.tokens if isinstance(self.sight, Chunk) else None

    @property
    def cache(self) -> tuple[CacheTensor, ...]:
        """Keys, then values of all heads; the keys that blocks are chosen by."""
        rows = CacheTensor((2 * self.num_kv_heads, self.head_dim))
        if self.blocks is None:
            return (rows,)
        return rows, CacheTensor((self.blocks.row_dim,), is_index=True)

    def on_rank(self, rank: int, num_ranks: int) -> Self:
        heads = even_shard(self.num_heads, rank, num_ranks).size
        kv_heads = kv_shard(self.num_kv_heads, rank, num_ranks).size
        return replace(self, num_heads=heads, num_kv_heads=kv_heads)

    def indivisible(self, num_ranks: int) -> str:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if not heads % num_ranks and (not kv_heads % num_ranks or not num_ranks % kv_heads):
            return ""
        return f"{heads} attention heads and {kv_heads} KV heads"

    @property
    def row_elements(self) -> int:
        # Gates of elements are projected with the queries, and their weights are a tensor of their own.
        has_gates = self.gate is not None and self.gate.of == "element"
        return self.widest_row + (2 * self.num_heads * self.head_dim if has_gates else 0)

    @property
    def widest_row(self) -> int:
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

    def weights(self, hidden_size: int) -> Weights:
        heads, kv_heads = Even(self.num_heads), KvHeads(self.num_kv_heads)
        gates = None if self.gate is None else self.gate.of
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        output = self.num_heads * self.value_dim
        parts: dict[str, tuple[int, Cut]] = {"q_proj": (2 * query if gates == "query" else query, heads)}
        parts["k_proj"] = key, kv_heads
        if not self.keys_are_values:
            parts["v_proj"] = self.num_kv_heads * self.value_dim, kv_heads
        if gates == "element":
            parts["g_proj"] = output, heads
        yield from fused("qkv_proj", self.input_width * hidden_size, parts, bias=self.bias)
        yield from linear("o_proj", hidden_size, output, bias=self.output_bias, cut=heads, axis=1)
        if gates == "head":
            yield from linear("g_proj", self.num_heads, hidden_size, cut=heads)
        if self.has_sinks:
            yield Weight("sinks", (self.num_heads,), cut=heads)
        if self.blocks is not None:
            yield from under("indexer", self.blocks.weights(hidden_size, self.num_kv_heads))
        if isinstance(self.qk_norm, FullWidthQkNorm):
            yield from (*rms_norm("q_norm", query, heads), *rms_norm("k_norm", key, kv_heads))
        elif self.qk_norm is not None:
            for name in ("q_norm", "k_norm"):
                yield from self.qk_norm.norm.weights(name, self.head_dim)

    @property
    def score_width(self) -> int:
        return self.num_heads * self.head_dim

    def choice_bytes(self, hidden_size: int, max_model_len: int, activation_bytes: int) -> int:
        # Queries twice, the key, and a byte for each block of the longest sequence.
        blocks = self.blocks
        if blocks is None:
            return 0
        queries = 2 * (blocks.shared_heads or self.num_kv_heads) * blocks.head_dim
        num_blocks = -(-max_model_len // blocks.block_size)
        return (queries + 2 * blocks.row_dim) * activation_bytes + self.num_kv_heads * num_blocks

    def num_block_scores(self, max_model_len: int) -> int:
        # Shared heads' products before they are added up.
        blocks = self.blocks
        if blocks is None:
            return 0
        return (blocks.shared_heads or self.num_kv_heads) * -(-max_model_len // blocks.block_size)
