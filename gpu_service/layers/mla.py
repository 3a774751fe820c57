"""Multi-head latent attention, and the indexer of its sparse form.

Sources: DeepSeek-V2 (arXiv:2405.04434), section 2.1; sparse: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1;
layers that take over another one's choice: IndexCache (arXiv:2603.12201).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gpu_service.attention.mla.base import MlaAttentionBackend, absorb_query, project_values, up_project
from gpu_service.cache.kv_cache import IndexKeys
from gpu_service.core.partition import heads_shard
from gpu_service.core.step import ForwardInputs
from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.linear import CheckpointPart, FusedLinear, Linear, RowParallelLinear, empty_parameter
from gpu_service.layers.norm import LayerNorm, RMSNorm
from gpu_service.ops.kv import pool_index_keys
from gpu_service.ops.linear import linear
from gpu_service.ops.rope import RopeTable, apply_rope, half_split, learned_query_scales
from moebius.models.layers.latent import MLA, TokenIndexer
from moebius.models.layers.layer import Places
from moebius.models.layers.ranks import ShardRange


class StepSelection:
    """What layers of one model share within a step: the indexer's rotary table.

    The latest choice is the attention backend's: layers of two steps may be launched in turn.
    """

    def __init__(self) -> None:
        self._halves: tuple[RopeTable, RopeTable] | None = None

    def half_split(self, rope: RopeTable) -> RopeTable:
        """Returns the step's table with its pairs lying half a head apart; made once per step."""
        if self._halves is None or self._halves[0] is not rope:
            self._halves = rope, half_split(rope)
        return self._halves[1]


class LearnedGrowth(nn.Module):
    """How much larger each head's queries are at later positions; a rank has its heads' numbers."""

    def __init__(self, heads: ShardRange, *, dtype: torch.dtype) -> None:
        super().__init__()
        self._heads = heads
        self.scale = empty_parameter(heads.size, dtype=dtype)
        self.bias = empty_parameter(heads.size, dtype=dtype)

    def forward(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps `[T, num_heads, size]` and int64 `[T]` to a new `[T, num_heads, size]`."""
        return query * learned_query_scales(positions, self.scale, self.bias, query.dtype)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        for name in ("scale", "bias"):
            yield CheckpointPart("", name, self._heads, None)


class Indexer(nn.Module):
    """Small queries and keys whose dot products only rank tokens. Every rank has all of it.

    Attribute names are those of the checkpoint. `index_layer` counts the layers of this stage that choose.
    """

    def __init__(self, index_layer: int, spec: MLA, indexer: TokenIndexer, made: Composition) -> None:
        super().__init__()
        rank, size, dtype = spec.q_lora_rank, made.hidden_size, made.dtype
        assert rank is not None or indexer.reads_hidden, "the family's reader asks for a latent of queries"
        self._index_layer, self._sizes, self._selection = index_layer, indexer, made.shared(StepSelection)
        # Elements before those that are rotated.
        self._unrotated = indexer.head_dim - spec.qk_rope_head_dim if indexer.rotates_last else 0
        self.q_input_norm: LayerNorm | None = None
        if indexer.reads_hidden:
            rank = size
            self.q_input_norm = LayerNorm(rank, indexer.key_eps, dtype=dtype)
        assert rank is not None
        self.wq_b = Linear(rank, indexer.num_heads * indexer.head_dim, bias=False, dtype=dtype)
        whole, grows = ShardRange.whole(indexer.num_heads), spec.learned_query_growth
        self.softmax_scaling = LearnedGrowth(whole, dtype=dtype) if grows else None
        self.wk = Linear(size, indexer.head_dim, bias=False, dtype=dtype)
        self.k_norm = LayerNorm(indexer.head_dim, indexer.key_eps, dtype=dtype)
        # Its few rows weigh whole heads against one another: in 16 bits, ranks of tokens would change.
        self.weights_proj = Linear(size, indexer.num_heads, bias=False, dtype=torch.float32)
        # Of a token's weight among those of its pool; float32 as they are added.
        self.index_kpool_compress_ape: nn.Parameter | None = None
        self.index_kpool_compress_gate: nn.Parameter | None = None
        if indexer.pool > 1:
            self.index_kpool_compress_ape = empty_parameter(
                indexer.pool, indexer.head_dim, dtype=torch.float32
            )
            self.index_kpool_compress_gate = empty_parameter(indexer.head_dim, size, dtype=dtype)
        self._score_scale = (indexer.head_dim * indexer.num_heads) ** -0.5

    def forward(
        self,
        hidden_states: torch.Tensor,
        query_latent: torch.Tensor,
        rope: RopeTable | None,
        context: ForwardContext,
    ) -> None:
        """Leaves the choice for each row with the attention backend, and the step's keys in the cache.

        hidden_states `[T, H]` after the layer's norm; query_latent `[T, q_lora_rank]`, normed, or the hidden
        states where queries come from them; rope: that of the layers.
        """
        backend, sizes = context.attention, self._sizes
        assert isinstance(backend, MlaAttentionBackend), "the cache of this model holds latents"
        if rope is not None and not sizes.interleaved:
            rope = self._selection.half_split(rope)
        keys: torch.Tensor = self.k_norm(self.wk(hidden_states))
        if rope is not None:
            apply_rope(keys[:, None, self._unrotated :], rope)
        index_keys = backend.cache.index_keys
        assert index_keys is not None, "the cache of this model holds the indexer's keys"
        self._store(index_keys, keys, hidden_states, context.inputs)
        backend.selection = None
        if backend.selects:
            if self.q_input_norm is not None:
                query_latent = self.q_input_norm(query_latent)
            query = self.wq_b(query_latent).view(-1, sizes.num_heads, sizes.head_dim)
            if self.softmax_scaling is not None:
                query = self.softmax_scaling(query, context.inputs.positions)
            if rope is not None:
                apply_rope(query[..., self._unrotated :], rope)
            weights = self.weights_proj(hidden_states.float()) * self._score_scale
            backend.selection = backend.select(query, weights, self._index_layer)

    def _store(
        self, index_keys: IndexKeys, keys: torch.Tensor, hidden_states: torch.Tensor, inputs: ForwardInputs
    ) -> None:
        """Keys of the step's tokens, and of the pools that end with one of them."""
        offsets, gate = self.index_kpool_compress_ape, self.index_kpool_compress_gate
        if offsets is None or gate is None:
            index_keys.append(self._index_layer, keys, inputs.slot_mapping)
            return
        rows = torch.cat((keys, linear(hidden_states, gate, None)), dim=1)
        index_keys.append(self._index_layer, rows, inputs.slot_mapping)
        starts = inputs.query_start_loc_tensor
        where = inputs.positions, inputs.slot_mapping, inputs.block_table, starts, index_keys.page_size
        pool_index_keys(index_keys.pages(self._index_layer).flatten(0, 1), offsets, *where)


class LatentProjection(nn.Module):
    """From a latent to each head's keys and values; a rank has its own heads' rows.

    No `Linear`: absorbed, the rows are used head by head, so they keep their plain layout.
    """

    def __init__(self, spec: MLA, heads: ShardRange, *, nope_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._num_heads, self._latent_dim = heads.size, spec.kv_lora_rank
        self._rows = heads.scaled(nope_dim + spec.v_head_dim)
        self.weight = empty_parameter(self._rows.size, spec.kv_lora_rank, dtype=dtype)

    def by_head(self) -> torch.Tensor:
        """Returns a view `[num_heads, nope_dim + value_dim, latent_dim]`: each head's key rows, then its
        value rows.
        """
        return self.weight.view(self._num_heads, -1, self._latent_dim)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        yield CheckpointPart("", "weight", self._rows, ShardRange.whole(self._latent_dim))


class MLAttention(nn.Module):
    """Queries and latents from the hidden state, rotary embedding of their last parts, attention, output.

    A rank computes its own heads; latents, which all heads share, are computed and cached by every rank.

    Without latents of its own, the layer attends to those of an earlier layer, in whose cache they are.
    Sparse attention: a layer without an `indexer` attends to what the latest layer with one chose.
    """

    def __init__(self, spec: MLA, places: Places, made: Composition) -> None:
        super().__init__()
        assert places.cache is not None
        self.layer_id, self._sizes = places.cache, spec
        size, dtype, bias = made.hidden_size, made.dtype, spec.bias
        heads = heads_shard(spec.num_heads, made.parallel)
        self.indexer: Indexer | None = None
        if spec.indexer is not None and places.index is not None:
            self.indexer = Indexer(places.index, spec, spec.indexer, made)
        query_rows = heads.scaled(spec.qk_head_dim)
        # Elements of a head's key from the latent, and of the part that all heads share.
        self._shared_dim = 0 if spec.all_from_latent else spec.qk_rope_head_dim
        self._nope_dim = spec.qk_head_dim - self._shared_dim
        has_latents = not spec.latents_back
        latent_rows = {"kv_a_proj_with_mqa": ShardRange.whole(spec.kv_lora_rank + self._shared_dim)}
        self.a_proj: FusedLinear | None = None
        if spec.q_lora_rank is None:
            # Never biased, so that it cannot share the GEMM of the latents.
            self.q_proj = FusedLinear(size, {"q_proj": query_rows}, bias=False, dtype=dtype)
            if has_latents:
                self.a_proj = FusedLinear(size, latent_rows, bias=bias, dtype=dtype)
        else:
            rows = {"q_a_proj": ShardRange.whole(spec.q_lora_rank)} | latent_rows
            self.a_proj = FusedLinear(size, rows, bias=bias, dtype=dtype)
            self.q_a_layernorm = RMSNorm(spec.q_lora_rank, spec.latent_eps, dtype=dtype)
            self.q_b_proj = FusedLinear(spec.q_lora_rank, {"q_b_proj": query_rows}, bias=False, dtype=dtype)
        self.kv_a_layernorm: RMSNorm | None = None
        if has_latents:
            self.kv_a_layernorm = RMSNorm(spec.kv_lora_rank, spec.latent_eps, dtype=dtype)
        self.kv_b_proj = LatentProjection(spec, heads, nope_dim=self._nope_dim, dtype=dtype)
        self.softmax_scaling = LearnedGrowth(heads, dtype=dtype) if spec.learned_query_growth else None
        self._heads = heads
        self.g_proj = self._gates(made)
        self.sinks = empty_parameter(heads.size, dtype=torch.float32) if spec.has_sinks else None
        self.o_proj = RowParallelLinear(
            heads.scaled(spec.v_head_dim), size, bias=bias, dtype=dtype, parallel=made.parallel
        )

    def _gates(self, made: Composition) -> FusedLinear | None:
        """Returns the gates of elements or heads; None: there are none."""
        if self._sizes.gate is None:
            return None
        of_elements = self._sizes.gate == "element"
        gates = self._heads.scaled(self._sizes.v_head_dim) if of_elements else self._heads
        return FusedLinear(made.hidden_size, {"g_proj": gates}, bias=False, dtype=made.dtype)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """Returns the parts that a rank has of this module's own parameters: those of its heads."""
        if self.sinks is not None:
            yield CheckpointPart("", "sinks", self._heads, None)

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`; the new latents are in the cache afterwards.

        `rope` None: no part of queries and keys is rotated.
        """
        mla, backend = self._sizes, context.attention
        assert isinstance(backend, MlaAttentionBackend), "the cache of this model holds latents"
        query, compressed = self._project(hidden_states, rope, context)
        if rope is not None and rope.query_scale is not None:
            query = query * rope.query_scale
        if self.softmax_scaling is not None:
            query = self.softmax_scaling(query, context.inputs.positions)
        if rope is not None:
            apply_rope(query[..., self._nope_dim :], rope)
        latent, key_rope = self._latents(compressed, rope)
        weight, layer_id, nope_dim = self.kv_b_proj.by_head(), self.layer_id, self._nope_dim
        if backend.non_absorbed:
            if latent is not None and key_rope is not None:
                of_step = latent, key_rope
                if mla.shares_latents:
                    backend.step_latents[self._shared_dim] = of_step
            else:
                of_step = backend.step_latents[self._shared_dim]
            key, value = up_project(of_step[0], of_step[1][:, : self._shared_dim], weight, nope_dim)
            attended = backend.forward_non_absorbed(query, key, value, latent, key_rope, layer_id)
        else:
            key_weight, value_weight = weight[:, :nope_dim], weight[:, nope_dim:]
            query_latent = absorb_query(query[..., :nope_dim], key_weight)
            query_rope = query[..., nope_dim:]
            if self._shared_dim < mla.qk_rope_head_dim:
                # The cache has zeros there.
                query_rope = query[..., : mla.qk_rope_head_dim]
            chosen = backend.selection if mla.is_sparse else None
            rows = query_latent, query_rope, latent, key_rope
            latents = backend.forward(*rows, layer_id, chosen, self.sinks)
            attended = project_values(latents, value_weight)
        if self.g_proj is not None:
            gates = self.g_proj(hidden_states).sigmoid_()
            attended = attended * (gates.view_as(attended) if mla.gate == "element" else gates.unsqueeze(-1))
        output: torch.Tensor = self.o_proj(attended.flatten(1))
        return output

    def _latents(
        self, compressed: torch.Tensor | None, rope: RopeTable | None
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Returns latents `[T, kv_lora_rank]`, normed, and parts of keys that all heads share, rotated, as
        they are stored; None: an earlier layer has stored them.
        """
        if compressed is None or self.kv_a_layernorm is None:
            return None, None
        mla = self._sizes
        latent: torch.Tensor = self.kv_a_layernorm(compressed[:, : mla.kv_lora_rank])
        if mla.latent_scale != 1.0:
            latent = latent * mla.latent_scale
        key_rope = compressed[:, mla.kv_lora_rank :]
        if self._shared_dim < mla.qk_rope_head_dim:
            return latent, latent.new_zeros(latent.shape[0], mla.qk_rope_head_dim)
        if rope is not None:
            apply_rope(key_rope[:, None], rope)
        return latent, key_rope

    def _project(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns queries `[T, num_heads, qk_head_dim]`, and latents with key parts to rotate, or None
        without them.

        The indexer, which reads the queries' latent or the hidden states, has made its choice afterwards.
        """
        compressed: torch.Tensor | None = None if self.a_proj is None else self.a_proj(hidden_states)
        rank = self._sizes.q_lora_rank
        if rank is None:
            if self.indexer is not None:
                self.indexer(hidden_states, hidden_states, rope, context)
            query = self.q_proj(hidden_states)
        else:
            assert compressed is not None, "a latent of queries comes with one of keys"
            query_latent = self.q_a_layernorm(compressed[:, :rank])
            if self.indexer is not None:
                self.indexer(hidden_states, query_latent, rope, context)
            query = self.q_b_proj(query_latent)
            compressed = compressed[:, rank:]
        return query.view(hidden_states.shape[0], -1, self._sizes.qk_head_dim), compressed
