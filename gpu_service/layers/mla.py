"""Multi-head latent attention, and the indexer of its sparse form.

Sources: DeepSeek-V2 (arXiv:2405.04434), section 2.1; sparse: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1;
layers that take over another one's choice: IndexCache (arXiv:2603.12201).
"""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.attention.mla.base import MlaAttentionBackend, up_project
from gpu_service.cache.kv_cache import IndexKeys, MlaCache
from gpu_service.core.step import ForwardInputs
from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.host_mixer import HostPlaces
from gpu_service.layers.linear import Linear, RowParallelLinear
from gpu_service.layers.norm import LayerNorm, RMSNorm
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.kv import pool_index_keys
from gpu_service.ops.latent import absorb_query, project_values
from gpu_service.ops.linear import linear
from gpu_service.ops.rope import RopeTable, apply_rope, half_split, learned_query_scales
from moebius import _kernels
from moebius.models.layers.latent import MLA, TokenIndexer
from moebius.models.layers.layer import Places


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

    def __init__(self, own: RankWeights) -> None:
        super().__init__()
        self.scale, self.bias = own.parameter("scale"), own.parameter("bias")

    def forward(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps `[T, num_heads, size]` and int64 `[T]` to a new `[T, num_heads, size]`."""
        return query * learned_query_scales(positions, self.scale, self.bias, query.dtype)


class Indexer(nn.Module):
    """Small queries and keys whose dot products only rank tokens. Every rank has all of it.

    Attribute names are those of the checkpoint. `index_layer` counts the layers of this stage that choose.
    """

    def __init__(
        self, index_layer: int, spec: MLA, indexer: TokenIndexer, own: RankWeights, selection: StepSelection
    ) -> None:
        super().__init__()
        assert spec.q_lora_rank is not None or indexer.reads_hidden, "the reader asks for a latent of queries"
        self._index_layer, self._sizes, self._selection = index_layer, indexer, selection
        # Elements before those that are rotated.
        self._unrotated = indexer.head_dim - spec.qk_rope_head_dim if indexer.rotates_last else 0
        eps, input_norm = indexer.key_eps, own.under("q_input_norm")
        self.q_input_norm = LayerNorm(input_norm, eps) if input_norm else None
        self.wq_b, self.wk = Linear(own.under("wq_b")), Linear(own.under("wk"))
        self.softmax_scaling = LearnedGrowth(growth) if (growth := own.under("softmax_scaling")) else None
        self.k_norm = LayerNorm(own.under("k_norm"), eps)
        self.weights_proj = Linear(own.under("weights_proj"))
        self.index_kpool_compress_ape = own.optional("index_kpool_compress_ape")
        self.index_kpool_compress_gate = own.optional("index_kpool_compress_gate")
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

    def __init__(self, spec: MLA, own: RankWeights) -> None:
        """`spec`: what the rank computes."""
        super().__init__()
        self._num_heads, self._latent_dim = spec.num_heads, spec.kv_lora_rank
        self.weight = own.parameter("weight")

    def by_head(self) -> torch.Tensor:
        """Returns a view `[num_heads, nope_dim + value_dim, latent_dim]`: each head's key rows, then its
        value rows.
        """
        return self.weight.view(self._num_heads, -1, self._latent_dim)


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
        own, eps = made.weights(spec.weights(made.hidden_size)), spec.latent_eps
        self.indexer: Indexer | None = None
        if spec.indexer is not None and places.index is not None:
            selection = made.shared(StepSelection)
            self.indexer = Indexer(places.index, spec, spec.indexer, own.under("indexer"), selection)
        self._shared_dim, self._nope_dim = spec.shared_dim, spec.nope_dim
        self.a_proj = Linear(narrow) if (narrow := own.under("a_proj")) else None
        if spec.q_lora_rank is None:
            self.q_proj = Linear(own.under("q_proj"))
        else:
            self.q_a_layernorm = RMSNorm(own.under("q_a_layernorm"), eps)
            self.q_b_proj = Linear(own.under("q_b_proj"))
        latent_norm = own.under("kv_a_layernorm")
        self.kv_a_layernorm = RMSNorm(latent_norm, eps) if latent_norm else None
        self.kv_b_proj = LatentProjection(made.own(spec), own.under("kv_b_proj"))
        self.softmax_scaling = LearnedGrowth(growth) if (growth := own.under("softmax_scaling")) else None
        self.g_proj = Linear(gates) if (gates := own.under("g_proj")) else None
        self.sinks = own.optional("sinks")
        self.o_proj = RowParallelLinear(own.under("o_proj"), made.parallel)
        # As `host_weights` gives them away.
        self._wide_sinks: torch.Tensor | None = None

    @property
    def sight(self) -> tuple[None, None]:
        """Neither window nor chunk: rows see all tokens before them, see `HostMixer`."""
        return None, None

    def host_weights(self, places: HostPlaces) -> _kernels.LatentWeights | None:
        """Returns the layer as `_kernels.DecoderLayers` computes it; None: there is more to do than it does.

        See `HostMixer`.
        """
        spec, cache, heads = self._sizes, places.cache, self.kv_b_proj.weight
        queries = self.q_proj if spec.q_lora_rank is None else self.q_b_proj
        narrow = None if self.a_proj is None else self.a_proj.projection
        query, output = queries.projection, self.o_proj.projection
        assert isinstance(cache, MlaCache), "the cache of this model holds latents"
        if narrow is None or query is None or output is None or self.kv_a_layernorm is None:
            return None
        if not spec.is_plain or heads.dtype != cache.dtype or not heads.is_contiguous():
            return None
        if self.sinks is not None:
            self._wide_sinks = self.sinks.float().contiguous()
        return _kernels.LatentWeights(
            narrow=narrow,
            query=query,
            output=output,
            query_norm=None if spec.q_lora_rank is None else self.q_a_layernorm.host_weights(),
            latent_norm=self.kv_a_layernorm.host_weights(),
            heads=heads.data_ptr(),
            sinks=0 if self._wide_sinks is None else self._wide_sinks.data_ptr(),
            pages=cache.pages(self.layer_id).data_ptr(),
            page_size=cache.page_size,
            num_heads=spec.num_heads,
            latent_dim=spec.kv_lora_rank,
            nope_dim=spec.qk_nope_head_dim,
            rope_dim=spec.qk_rope_head_dim,
            value_dim=spec.v_head_dim,
            scale=spec.softmax_scale,
            rotation=places.rotation if spec.rope is not None else None,
            sight=places.sight,
            storage=cache.host_storage(self.layer_id),
        )

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
