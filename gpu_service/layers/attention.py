"""Grouped-query attention with the switches that families differ in."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu_service.attention.base import AttentionBackend, AttentionLayer
from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.step import ForwardInputs
from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.host_mixer import HostPlaces
from gpu_service.layers.linear import Linear, RowParallelLinear, Seam, gated_query_order
from gpu_service.layers.norm import FullWidthNorm, Norm, RMSNorm, make_norm, make_rms_norm, norm_full_width
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.activation import apply_gate
from gpu_service.ops.kv import mean_index_keys
from gpu_service.ops.norm import rms_norm
from gpu_service.ops.rope import RopeTable, Unrotated, apply_rope, qk_norm_rope, query_scales
from moebius import _kernels
from moebius.models.layers import gqa as blocks
from moebius.models.layers.gqa import GQA, FullWidthQkNorm, GateActivation
from moebius.models.layers.layer import Places


class BlockIndexer(nn.Module):
    """A small query for each KV head and one key, whose products only rank blocks of tokens.

    A rank has the queries of its own KV heads. Attribute names are canonical ones of checkpoints;
    `index_layer` counts the layers of this stage that choose.
    """

    def __init__(self, index_layer: int, sizes: blocks.BlockIndexer, kv_heads: int, own: RankWeights) -> None:
        """`kv_heads`: the rank's."""
        super().__init__()
        self._index_layer, self._num_heads, self._head_dim = index_layer, kv_heads, sizes.head_dim
        self.block_size = sizes.block_size
        self.qk_proj = Linear(own.under("qk_proj"))
        self.q_norm = make_rms_norm(sizes.norm, own.under("q_norm"))
        self.k_norm = make_rms_norm(sizes.norm, own.under("k_norm"))

    def forward(
        self,
        hidden_states: torch.Tensor,
        rope: RopeTable,
        backend: AttentionBackend,
        inputs: ForwardInputs,
    ) -> torch.Tensor | None:
        """Returns what `backend.choose_blocks` returns for `[T, H]`; the step's keys are in the cache
        afterwards.
        """
        heads = self.qk_proj(hidden_states).view(-1, self._num_heads + 1, self._head_dim)
        norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        query, key = qk_norm_rope(heads, *norms, self._num_heads, rope)
        index_keys = backend.kv_cache.index_keys
        assert index_keys is not None, "the cache of this model holds the keys that layers choose by"
        index_keys.append(self._index_layer, key[:, 0], inputs.slot_mapping)
        return backend.choose_blocks(query, self._index_layer)


class MeanBlockIndexer(nn.Module):
    """Small queries that choose for all heads, and one key, of which blocks of tokens have the mean.

    Every rank has all of it. Attribute names are those of checkpoints.
    """

    def __init__(self, index_layer: int, sizes: blocks.BlockIndexer, own: RankWeights) -> None:
        super().__init__()
        self._index_layer, self._num_heads, self._head_dim = index_layer, sizes.shared_heads, sizes.head_dim
        self.block_size = sizes.block_size
        self.index_qk_proj = Linear(own.under("index_qk_proj"))
        self.q_layernorm = make_rms_norm(sizes.norm, own.under("q_layernorm"))
        self.k_layernorm = make_rms_norm(sizes.norm, own.under("k_layernorm"))

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable, backend: AttentionBackend, inputs: ForwardInputs
    ) -> torch.Tensor | None:
        """Chooses blocks as `BlockIndexer`; keys are normed and rotated once their block is whole."""
        assert not rope.interleaved, "the family's reader refuses it"
        heads = self.index_qk_proj(hidden_states).view(-1, self._num_heads + 1, self._head_dim)
        query = apply_rope(self.q_layernorm(heads[:, : self._num_heads].contiguous()), rope)
        pairs = rope.cos.shape[-1] // 2
        rows = (heads[:, self._num_heads], rope.cos[:, 0, :pairs], rope.sin[:, 0, pairs:])
        index_keys = backend.kv_cache.index_keys
        assert index_keys is not None, "the cache of this model holds the keys that layers choose by"
        index_keys.append(self._index_layer, torch.cat(rows, dim=1), inputs.slot_mapping)
        where = inputs.positions, inputs.slot_mapping, inputs.block_table, inputs.query_start_loc_tensor
        slots, norm = index_keys.pages(self._index_layer).flatten(0, 1), self.k_layernorm
        mean_index_keys(slots, norm.weight, norm.eps, self.block_size, *where, index_keys.page_size)
        return backend.choose_blocks(query, self._index_layer)


def _indexer(
    spec: GQA, place: int | None, kv_heads: int, own: RankWeights
) -> BlockIndexer | MeanBlockIndexer | None:
    if spec.blocks is None or place is None:
        return None
    if spec.blocks.shared_heads:
        return MeanBlockIndexer(place, spec.blocks, own)
    return BlockIndexer(place, spec.blocks, kv_heads, own)


class GQAttention(nn.Module):
    """QKV in one GEMM, optional norm of queries and keys, rotary embedding, attention, output.

    A rank computes its own heads, and the output projection sums over ranks.
    """

    def __init__(self, spec: GQA, places: Places, made: Composition) -> None:
        super().__init__()
        assert places.cache is not None
        self.layer_id, self.head_dim = places.cache, spec.head_dim
        own, rank = made.weights(spec.weights(made.hidden_size)), made.own(spec)
        self.num_heads, self.num_kv_heads = rank.num_heads, rank.num_kv_heads
        self._value_dim, self._spec = spec.value_dim, spec
        # Of norms that have no weight to load; made by `pack`.
        self._value_ones: torch.Tensor | None = None
        self._head_ones: torch.Tensor | None = None
        order = None
        if spec.gate is not None and spec.gate.of == "query":
            order = gated_query_order(rank.num_heads, rank.num_kv_heads, spec.head_dim)
        self.qkv_proj = Linear(own.under("qkv_proj"), order)
        self.o_proj = RowParallelLinear(own.under("o_proj"), made.parallel)
        self.indexer = _indexer(spec, places.index, rank.num_kv_heads, own.under("indexer"))
        self.g_proj = Linear(gates) if (gates := own.under("g_proj")) else None
        self.sinks = own.optional("sinks")
        self.q_norm: FullWidthNorm | Norm | None = None
        self.k_norm: FullWidthNorm | Norm | None = None
        if isinstance(spec.qk_norm, FullWidthQkNorm):
            ranks, eps = made.parallel.tp_size, spec.qk_norm.eps
            self.q_norm = FullWidthNorm(own.under("q_norm"), ranks, eps)
            self.k_norm = FullWidthNorm(own.under("k_norm"), ranks, eps)
        elif spec.qk_norm is not None:
            self.q_norm = make_norm(spec.qk_norm.norm, own.under("q_norm"))
            self.k_norm = make_norm(spec.qk_norm.norm, own.under("k_norm"))
        self._norm_after_rope = spec.qk_norm is not None and spec.qk_norm.after_rope
        self._gate_activation: GateActivation = "sigmoid" if spec.gate is None else spec.gate.activation
        self._group, self._dtype = made.parallel.tensor_group, made.dtype
        # As `host_weights` gives them away.
        self._wide_sinks: torch.Tensor | None = None

    def read_seam(self, seam: Seam, inputs: ForwardInputs) -> tuple[torch.Tensor, ...] | None:
        """With queries, keys and values, see `ReadsSeam`."""
        return self.qkv_proj.after_seam(seam)

    def pack(self) -> None:
        """Makes what is used but not loaded; the loader calls it once."""
        if self._spec.value_norm or self._spec.unit_norm:
            kind: dict[str, Any] = {"dtype": self._dtype, "device": self.o_proj.weight.device}
            self._value_ones = torch.ones(self._value_dim, **kind)
            self._head_ones = torch.ones(self.head_dim, **kind)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rope: RopeTable | None,
        context: ForwardContext,
        projected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`; the new keys and values are in the cache afterwards.

        `rope` None: the layer knows no positions. `projected`: queries, keys and values, if they were
        computed already; may be overwritten.
        """
        if projected is None:
            projected = self.qkv_proj(hidden_states)
        # Queries and keys are neighbours: one call serves both.
        keys_end = (self.num_heads + self.num_kv_heads) * self.head_dim
        if self._spec.keys_are_values:
            # A copy, because keys may be normed and rotated where they are.
            values_end = keys_end
            values = projected[:, self.num_heads * self.head_dim : keys_end].clone()
        else:
            values_end = keys_end + self.num_kv_heads * self._value_dim
            values = projected[:, keys_end:values_end]
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = projected[:, :keys_end].view(-1, num_rotated, self.head_dim)
        value, gate = self._cached_value(values), projected[:, values_end:]
        backend = context.attention
        assert isinstance(backend, AttentionBackend), "the cache of this model holds keys and values"
        layer = AttentionLayer(self._spec.window, self.sinks, chunk=self._spec.chunk)
        if self.indexer is not None and rope is not None:
            kept = self.indexer(hidden_states, rope, backend, context.inputs)
            layer = layer._replace(kept_blocks=kept, block_size=self.indexer.block_size)
        fused = self._fused_norms()
        if rope is not None and fused is not None:
            unrotated = Unrotated(rotated, *fused, self.num_heads, rope)
            attended = backend.forward_unrotated(unrotated, value, self.layer_id, layer)
        else:
            query, key = self._norm_and_rotate(rotated, rope)
            growth = self._spec.query_growth
            if growth is not None:
                query = query * query_scales(context.inputs.positions + 1, *growth, query.dtype)
            elif rope is not None and rope.query_scale is not None:
                query = query * rope.query_scale
            attended = backend.forward(query, key, value, self.layer_id, layer)
        if self._value_dim < self.head_dim:
            by_head = attended.view(-1, self.num_heads, self.head_dim)
            attended = by_head[..., : self._value_dim].flatten(1)
        if gate.shape[1]:
            attended = apply_gate(attended, gate, self._gate_activation)
        if self.g_proj is not None:
            attended = apply_gate(attended, self.g_proj(hidden_states), self._gate_activation)
        output: torch.Tensor = self.o_proj(attended)
        return output

    def host_weights(self, places: HostPlaces) -> _kernels.AttentionWeights | None:
        """Returns the layer as `_kernels.DecoderLayers` computes it; None: there is more to do than it does.

        See `HostMixer`.
        """
        spec, norms, cache = self._spec, self._full_width_norms() or self._fused_norms(), places.cache
        qkv, output = self.qkv_proj.projection, self.o_proj.projection
        gate = None if self.g_proj is None else self.g_proj.projection
        plain_values = spec.value_dim == spec.head_dim and spec.value_scale == 1.0 and not spec.value_norm
        is_plain = plain_values and spec.blocks is None and not spec.keys_are_values
        if norms is None or not is_plain or spec.query_growth is not None:
            return None
        # Norms without a rotation after them are another op's, whose sums have another order.
        alone = spec.rope is None and (self.q_norm is not None or self.k_norm is not None)
        if alone or (spec.rope is not None and (spec.rope.query_growth or places.rotation is None)):
            return None
        if self.g_proj is not None and gate is None:
            return None
        weights = [weight for weight in norms[:2] if weight is not None]
        kinds = {weight.dtype for weight in weights}
        if qkv is None or output is None or kinds not in ({self._dtype}, {torch.float32}, set()):
            return None
        if self.sinks is not None:
            self._wide_sinks = self.sinks.float().contiguous()
        addresses = [0 if weight is None else weight.data_ptr() for weight in (*norms[:2], self._wide_sinks)]
        assert isinstance(cache, KVCache), "the cache of this model holds keys and values"
        return _kernels.AttentionWeights(
            qkv=qkv,
            output=output,
            gate=gate,
            gates_are_softplus=self._gate_activation == "softplus",
            query_norm=addresses[0],
            key_norm=addresses[1],
            norms_are_bfloat16=torch.bfloat16 in kinds,
            norms_are_full_width=isinstance(self.q_norm, FullWidthNorm),
            norm_eps=norms[2],
            sinks=addresses[2],
            pages=cache.pages(self.layer_id).data_ptr(),
            page_size=cache.page_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=spec.scale,
            rotation=None if spec.rope is None else places.rotation,
            sight=places.sight,
            storage=cache.host_storage(self.layer_id),
        )

    @property
    def sight(self) -> tuple[int | None, int | None]:
        """The layer's window and chunk, see `AttentionLayer`."""
        return self._spec.window, self._spec.chunk

    def _cached_value(self, projected: torch.Tensor) -> torch.Tensor:
        """Returns `[T, num_kv_heads, head_dim]` of projected values: normed, scaled, padded to a
        key's size.
        """
        value = self._clipped(projected).view(-1, self.num_kv_heads, self._value_dim)
        if self._spec.value_norm:
            assert self._value_ones is not None, "the loader calls `pack`"
            value = rms_norm(value.contiguous(), self._value_ones, self._spec.eps)
        if self._spec.value_scale != 1.0:
            value = value * self._spec.value_scale
        missing = self.head_dim - self._value_dim
        return functional.pad(value, (0, missing)) if missing else value

    def _clipped(self, heads: torch.Tensor) -> torch.Tensor:
        """Returns the same tensor, which is cut off where the model says so."""
        limit = self._spec.limit
        return heads if limit == math.inf else heads.clamp_(-limit, limit)

    def _fused_norms(self) -> tuple[torch.Tensor | None, torch.Tensor | None, float] | None:
        """Returns weights and epsilon of the norms before rotation, perhaps none; None: there is
        more to do.
        """
        q_norm, k_norm = self.q_norm, self.k_norm
        if self._spec.limit != math.inf or self._norm_after_rope or self._spec.unit_norm:
            return None
        if q_norm is None and k_norm is None:
            return None, None, self._spec.eps
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            return q_norm.weight, k_norm.weight, q_norm.eps
        return None

    def _full_width_norms(self) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Returns weights and epsilon of norms over all heads together; None: there is another norm."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if self._spec.limit != math.inf or self._norm_after_rope or self._spec.unit_norm:
            return None
        if isinstance(q_norm, FullWidthNorm) and isinstance(k_norm, FullWidthNorm) and q_norm.rows.is_whole:
            return q_norm.weight, k_norm.weight, q_norm.eps
        return None

    def _norm_and_rotate(
        self, heads: torch.Tensor, rope: RopeTable | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns queries and keys of `[T, num_heads + num_kv_heads, head_dim]`, which may be overwritten."""
        num_heads = self.num_heads
        if self.q_norm is None or self._norm_after_rope:
            rotated = self._rotated(heads, rope)
            query, key = rotated[:, :num_heads], rotated[:, num_heads:]
            return self._normed(query, key)
        query, key = self._normed(heads[:, :num_heads], heads[:, num_heads:])
        return self._rotated(query, rope), self._rotated(key, rope)

    def _rotated(self, heads: torch.Tensor, rope: RopeTable | None) -> torch.Tensor:
        """Returns the heads after all that is done to them between a norm before rotation and one
        after it.
        """
        heads = self._clipped(heads)
        if rope is None:
            return heads
        apply_rope(heads, rope)
        if not self._spec.unit_norm:
            return heads
        assert self._head_ones is not None, "the loader calls `pack`"
        return rms_norm(heads.contiguous(), self._head_ones, self._spec.eps)

    def _normed(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns query and key after the norms that have weights, where the model has them; shapes stay."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if isinstance(q_norm, FullWidthNorm) and isinstance(k_norm, FullWidthNorm):
            return norm_full_width(query, key, q_norm, k_norm, self._group)
        if q_norm is None or k_norm is None:
            return query, key
        return q_norm(query.contiguous()), k_norm(key.contiguous())
