"""Multi-head latent attention, over all tokens or those that an indexer chooses.

Sources: DeepSeek-V2 (arXiv:2405.04434), section 2.1; sparse: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from moebius.models.layers.mixer import Mixer
from moebius.models.layers.ranks import WHOLE, Cut, Even, even_shard
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.tensors import CacheTensor
from moebius.models.layers.weights import Weight, Weights, fused, layer_norm, linear, rms_norm, under


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIndexer:
    """Small queries and keys whose dot products only rank tokens; every rank has all of it."""

    num_heads: int  # Of the queries; keys have one head.
    head_dim: int  # Elements of its queries and keys; as many of them are rotated as of attention's.
    # Most tokens that a token attends to, itself included; not counted are those after the last whole pool.
    top_k: int
    interleaved: bool  # Whether rotated pairs are (2j, 2j+1), else half a head apart.
    # Consecutive tokens that are chosen together, by one key; those after the last whole pool always are.
    pool: int = 1
    reads_hidden: bool = False  # Whether queries come from the normed hidden states, not from their latent.
    rotates_last: bool = False  # Whether the last elements are rotated, not the first.
    key_eps: float = 1e-6  # Of the keys' norm.

    @property
    def row_dim(self) -> int:
        """Elements that the cache holds of a token: its key, and its logits within a pool."""
        return self.head_dim * (1 if self.pool == 1 else 2)

    def weights(self, hidden_size: int, latent_size: int, grows: bool) -> Weights:
        """Yields what checkpoints store; `latent_size`: elements of what queries come from, `grows`: whether
        they grow with positions.
        """
        if self.reads_hidden:
            yield from layer_norm("q_input_norm", hidden_size)
        yield from linear("wq_b", self.num_heads * self.head_dim, latent_size)
        if grows:
            yield from learned_growth(self.num_heads, WHOLE)
        yield from linear("wk", self.head_dim, hidden_size)
        yield from layer_norm("k_norm", self.head_dim)
        # Its few rows weigh whole heads against one another: in 16 bits, ranks of tokens would change.
        yield from linear("weights_proj", self.num_heads, hidden_size, dtype="float32")
        if self.pool > 1:
            # Of a token's weight among those of its pool; float32 as they are added.
            yield Weight("index_kpool_compress_ape", (self.pool, self.head_dim), "float32")
            yield Weight("index_kpool_compress_gate", (self.head_dim, hidden_size))


def learned_growth(num_heads: int, cut: Cut) -> Weights:
    """Yields by how much queries of each head grow with their position."""
    for name in ("scale", "bias"):
        yield Weight(f"softmax_scaling.{name}", (num_heads,), cut=cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLA(Mixer):
    """Queries of all heads read one latent of each token, from which their keys and values are projected."""

    num_heads: int
    q_lora_rank: int | None  # Rank of the queries' projection; None: they are projected directly.
    kv_lora_rank: int  # Elements of a token's latent.
    # A query or key of a head: what carries no position, then what is rotated.
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float  # Factor of the scores: that of the head's size, times what rotary scaling adds.
    rope: RopeConfig | None
    bias: bool = False  # Of the projections from and to the hidden size.
    gate: Literal["head", "element"] | None = None  # Sigmoids that weigh what attention answers.
    has_sinks: bool = False  # As in `GQA`.
    latent_eps: float = 1e-6  # Of the norms of latents.
    latent_scale: float = 1.0  # What latents of keys and values are multiplied by after their norm.
    # Whether each head's queries are multiplied by `scale * ln(position + 1) + bias`, both learned; the
    # indexer's as well.
    learned_query_growth: bool = False
    # Whether keys have no part that all heads share: `qk_rope_head_dim` more elements are projected from the
    # latent instead, and the cache holds zeros for that part.
    all_from_latent: bool = False
    # How many layers before this one the latents are that it attends to; 0: its own.
    latents_back: int = 0
    # Whether it attends to chosen tokens only: by its own indexer, or as the nearest earlier one chose.
    is_sparse: bool = False
    indexer: TokenIndexer | None = None
    shares_latents: bool = False  # Whether a later layer attends to its latents.

    @property
    def is_plain(self) -> bool:
        """Whether it is DeepSeek-V2's, with sinks and without rotation at most."""
        grows = self.learned_query_growth or (self.rope is not None and self.rope.query_growth != 0.0)
        shares = self.latents_back > 0 or self.all_from_latent
        own = self.gate is None and self.latent_scale == 1.0
        return own and not (self.is_sparse or self.indexer is not None or grows or shares)

    @property
    def qk_head_dim(self) -> int:
        """Elements of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_dim(self) -> int:
        """Elements of a key that all heads share."""
        return 0 if self.all_from_latent else self.qk_rope_head_dim

    @property
    def nope_dim(self) -> int:
        """Elements of a head's key that come from the latent."""
        return self.qk_head_dim - self.shared_dim

    @property
    def cached_dim(self) -> int:
        """Elements that the cache holds of a token: its latent, and the part of keys that heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def cache(self) -> tuple[CacheTensor, ...]:
        """Latents unless they are another layer's; the indexer's keys."""
        rows = () if self.latents_back else (CacheTensor((self.cached_dim,)),)
        if self.indexer is None:
            return rows
        return *rows, CacheTensor((self.indexer.row_dim,), is_index=True)

    def on_rank(self, rank: int, num_ranks: int) -> Self:
        """Latents, which all heads share, are every rank's."""
        return replace(self, num_heads=even_shard(self.num_heads, rank, num_ranks).size)

    def indivisible(self, num_ranks: int) -> str:
        heads = self.num_heads
        return f"{heads} attention heads and {heads} KV heads" if heads % num_ranks else ""

    @property
    def attends_back(self) -> int:
        return self.latents_back

    @property
    def awaits_choice(self) -> bool:
        return self.is_sparse and self.indexer is None

    @property
    def row_elements(self) -> int:
        absorbed = 2 * self.kv_lora_rank
        written_out = 2 * self.qk_nope_head_dim + self.qk_rope_head_dim + 2 * self.v_head_dim
        gates = self.v_head_dim if self.gate == "element" else 0
        each = self.qk_head_dim + max(absorbed, written_out) + 2 * self.v_head_dim + gates
        return self.num_heads * each

    @property
    def widest_row(self) -> int:
        return self.num_heads * max(self.kv_lora_rank, self.qk_head_dim)

    def weights(self, hidden_size: int) -> Weights:
        heads, rank, count = Even(self.num_heads), self.q_lora_rank, self.num_heads
        query_rows, outputs = count * self.qk_head_dim, count * self.v_head_dim
        narrow: dict[str, tuple[int, Cut]] = {} if rank is None else {"q_a_proj": (rank, WHOLE)}
        if rank is not None or not self.latents_back:
            narrow["kv_a_proj_with_mqa"] = self.kv_lora_rank + self.shared_dim, WHOLE
        yield from fused("a_proj", hidden_size, narrow, bias=self.bias)
        if rank is None:
            # Never biased, so that it cannot share the product of the latents.
            yield from linear("q_proj", query_rows, hidden_size, cut=heads)
        else:
            yield from rms_norm("q_a_layernorm", rank)
            yield from linear("q_b_proj", query_rows, rank, cut=heads)
        if not self.latents_back:
            yield from rms_norm("kv_a_layernorm", self.kv_lora_rank)
        # No product: absorbed, its rows are used head by head.
        heads_shape = count * (self.nope_dim + self.v_head_dim), self.kv_lora_rank
        yield Weight("kv_b_proj.weight", heads_shape, cut=heads)
        if self.learned_query_growth:
            yield from learned_growth(count, heads)
        if self.gate is not None:
            yield from linear("g_proj", outputs if self.gate == "element" else count, hidden_size, cut=heads)
        if self.has_sinks:
            yield Weight("sinks", (count,), "float32", cut=heads)
        yield from linear("o_proj", hidden_size, outputs, bias=self.bias, cut=heads, axis=1)
        if self.indexer is not None:
            latent_size = hidden_size if self.indexer.reads_hidden or rank is None else rank
            own = self.indexer.weights(hidden_size, latent_size, self.learned_query_growth)
            yield from under("indexer", own)

    @property
    def score_width(self) -> int:
        """The mean of a score's and of a weighted sum's."""
        return self.num_heads * (self.cached_dim + self.kv_lora_rank) // 2

    def choice_bytes(self, hidden_size: int, max_model_len: int, activation_bytes: int) -> int:
        index = self.indexer
        if index is None:
            return 0
        query = 2 * index.num_heads * index.head_dim * activation_bytes
        if self.shares_latents:
            # Latents that later layers attend to, of both kinds of layers.
            query += 2 * self.cached_dim * activation_bytes
        # Hidden states and weights of heads in float32, and the chosen positions.
        return query + 4 * (hidden_size + 2 * index.num_heads + 2 * (index.top_k + index.pool))
