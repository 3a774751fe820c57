"""Compressed attention: a window of tokens, and entries that stand for earlier ones. See
`attention.compressed.base` for the formulas.

Source: DeepSeek-V4's report, section 2.3. Attribute names of compressor and indexer are those of the
checkpoint.
"""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.attention.compressed.base import CompressedAttentionBackend, Compression
from gpu_service.core.step import ForwardInputs
from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.decoder import RotaryEmbedding
from gpu_service.layers.linear import Linear, RowParallelLinear
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.linear import widened
from gpu_service.ops.norm import rms_norm
from gpu_service.ops.rope import RopeTable, apply_rope
from moebius.models.layers import compressed
from moebius.models.layers.layer import Places
from moebius.models.layers.rope import RopeConfig


class StepTables:
    """Rotary tables that layers share within a pass: of entries, and back from a query's position.

    A pass is known by its own rotary table. Its inputs will not do: a graph is recorded from those that the
    pass before it, which warmed up, was given, and tables of that pass would stay out of the graph.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        self._rotary = rotary
        self._pass: RopeTable | None = None
        self._entries: dict[int, RopeTable] = {}
        self._inverse: dict[int, tuple[RopeTable, RopeTable]] = {}

    def of_entries(self, table: RopeTable, positions: torch.Tensor, rate: int) -> RopeTable:
        """Returns the rotation of the first token of the entry that each row ends; `table` is of the rows'
        own `positions`.
        """
        if self._pass is not table:
            self._pass, self._entries = table, {}
        if rate not in self._entries:
            self._entries[rate] = self._rotary.table((positions - rate + 1).clamp(min=0))
        return self._entries[rate]

    def inverse(self, table: RopeTable, has_entries: bool) -> RopeTable:
        """Returns the table that rotates back; a step has one table for layers with entries, and one for
        others.
        """
        known = self._inverse.get(has_entries)
        if known is None or known[0] is not table:
            cos_sin = table.cos_sin
            if cos_sin is not None:
                half = cos_sin.shape[1] // 2
                cos_sin = torch.cat((cos_sin[:, :half], -cos_sin[:, half:]), dim=1)
            known = table, table._replace(sin=-table.sin, cos_sin=cos_sin)
            self._inverse[has_entries] = known
        return known[1]


def _step_tables(
    rope: RopeConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> StepTables:
    return StepTables(RotaryEmbedding(rope, max_model_len, dtype=dtype, device=device))


class Compressor(nn.Module):
    """What tokens project for their entries; every rank has all of it."""

    def __init__(self, spec: compressed.CompressedAttention, own: RankWeights) -> None:
        super().__init__()
        self.rate = spec.rate
        self.projections, self.ape = Linear(own.under("projections")), own.parameter("ape")
        self.norm = RMSNorm(own.under("norm"), spec.eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        recent: torch.Tensor,
        pages: torch.Tensor,
        table: RopeTable,
        backend: CompressedAttentionBackend,
    ) -> None:
        """Compresses `[T, H]`: entries go to the pages, the latest rows to the slots that the step writes."""
        how = Compression(self.rate, self.ape, self.norm.weight, self.norm.eps, table)
        backend.compress(self.projections(hidden_states), recent, pages, how)


class EntryQueries(nn.Module):
    """Small queries whose products with small keys only rank entries; every rank has all of it."""

    def __init__(
        self, spec: compressed.EntryAttention, sizes: compressed.EntryIndexer, own: RankWeights
    ) -> None:
        super().__init__()
        self._heads, self._head_dim, self._rope_dim = sizes.num_heads, sizes.head_dim, spec.rope_dim
        self.wq_b, self.weights_proj = Linear(own.under("wq_b")), Linear(own.under("weights_proj"))
        self._score_scale = (self._heads * self._head_dim) ** -0.5

    def forward(
        self,
        hidden_states: torch.Tensor,
        query_latent: torch.Tensor,
        rope: RopeTable,
        backend: CompressedAttentionBackend,
        layer_id: int,
        blocks: compressed.EntryBlocks | None = None,
    ) -> torch.Tensor:
        """Returns the choice of each row, as `CompressedAttentionBackend.select`; its entries are stored
        already.
        """
        query = self.wq_b(query_latent).view(-1, self._heads, self._head_dim)
        apply_rope(query[..., self._head_dim - self._rope_dim :], rope)
        weights = self.weights_proj(hidden_states.float()) * self._score_scale
        return backend.select(query, weights, layer_id, blocks)


class EntryIndexer(EntryQueries):
    """The same with small entries of its own, which have the tokens' own projections."""

    def __init__(
        self, spec: compressed.CompressedAttention, sizes: compressed.EntryIndexer, own: RankWeights
    ) -> None:
        super().__init__(spec, sizes, own)
        self.compressor = Compressor(spec, own.under("compressor"))


class GroupedProjection(nn.Module):
    """Groups of heads, each projected by itself; a rank has its groups' rows."""

    def __init__(self, groups: int, own: RankWeights) -> None:
        """`groups`: the rank's."""
        super().__init__()
        self._groups, self.weight = groups, own.parameter("weight")
        self._columns = self.weight.shape[1]

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Maps `[T, heads, head_dim]` to `[T, groups * rank]`."""
        grouped = heads.reshape(heads.shape[0], self._groups, -1).transpose(0, 1)
        rows, weight = widened(grouped, self.weight.view(self._groups, -1, self._columns))
        return torch.bmm(rows, weight.transpose(1, 2)).transpose(0, 1).flatten(1).to(heads.dtype)


class EntryAttention(nn.Module):
    """Queries through a latent, one head of keys that are values, both rotated at their ends; attention; the
    result rotated back, so that of a value only its distance counts; output in groups of heads.

    A rank computes its own heads; keys and entries, which all heads share, are computed and kept by every
    rank. A subclass fills in where entries come from.
    """

    def __init__(self, spec: compressed.EntryAttention, places: Places, made: Composition) -> None:
        super().__init__()
        assert places.cache is not None
        assert places.state is not None
        self.layer_id, self._state, self._spec = places.cache, places.state, spec
        self._tables = made.shared(_step_tables, spec.rope, made.max_model_len, made.dtype, made.device)
        own, eps = made.weights(spec.weights(made.hidden_size)), spec.eps
        self._own = own
        self.a_proj = Linear(own.under("a_proj"))
        self.q_a_norm, self.kv_norm = RMSNorm(own.under("q_a_norm"), eps), RMSNorm(own.under("kv_norm"), eps)
        self.q_b_proj, self.sinks = Linear(own.under("q_b_proj")), own.parameter("sinks")
        self.o_a_proj = GroupedProjection(made.own(spec).output_groups, own.under("o_a_proj"))
        self.o_b_proj = RowParallelLinear(own.under("o_b_proj"), made.parallel)

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`; what later tokens need of these is in cache and states
        afterwards.
        """
        spec, backend, states = self._spec, context.attention, context.states
        assert isinstance(backend, CompressedAttentionBackend), "the cache of this model holds entries"
        assert states is not None, "a model with compressed attention keeps the latest tokens"
        assert rope is not None, "every layer rotates"
        rotated = slice(spec.head_dim - spec.rope_dim, None)
        narrow: torch.Tensor = self.a_proj(hidden_states)
        latent: torch.Tensor = self.q_a_norm(narrow[:, : spec.q_lora_rank])
        keys: torch.Tensor = self.kv_norm(narrow[:, spec.q_lora_rank :])
        apply_rope(keys[:, None, rotated], rope)
        query = self._query(self.q_b_proj(latent).view(hidden_states.shape[0], -1, spec.head_dim))
        apply_rope(query[..., rotated], rope)
        window, *recent = states.of(self._state)
        selection = self._compress(hidden_states, latent, rope, context.inputs, recent, backend)
        attended = backend.attend(query, keys, window, self.layer_id, self.sinks, selection)
        inverse = self._tables.inverse(rope, spec.rate > 0)
        apply_rope(attended[..., rotated], inverse)
        output: torch.Tensor = self.o_b_proj(self.o_a_proj(attended))
        return output

    def _query(self, query: torch.Tensor) -> torch.Tensor:
        """Returns queries `[T, heads, head_dim]` before they are rotated."""
        return query

    def _compress(
        self,
        hidden_states: torch.Tensor,
        latent: torch.Tensor,
        rope: RopeTable,
        inputs: ForwardInputs,
        recent: list[torch.Tensor],
        backend: CompressedAttentionBackend,
    ) -> torch.Tensor | None:
        """Stores the step's entries; which ones its rows see, None where they see all."""
        raise NotImplementedError


class CompressedAttention(EntryAttention):
    """Every layer has entries of its own, and queries are normed."""

    def __init__(self, spec: compressed.CompressedAttention, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        own = self._own
        self.compressor = Compressor(spec, own.under("compressor")) if spec.rate else None
        self.indexer: EntryIndexer | None = None
        if spec.indexer is not None:
            self.indexer = EntryIndexer(spec, spec.indexer, own.under("indexer"))
        # Of the queries' norm, which has no weight to load; made by `pack`.
        self._ones: torch.Tensor | None = None

    def pack(self) -> None:
        """Makes what is used but not loaded; the loader calls it once."""
        weight = self.kv_norm.weight
        self._ones = torch.ones(self._spec.head_dim, dtype=weight.dtype, device=weight.device)

    def _query(self, query: torch.Tensor) -> torch.Tensor:
        assert self._ones is not None, "the loader calls `pack`"
        return rms_norm(query, self._ones, self._spec.eps)

    def _compress(
        self,
        hidden_states: torch.Tensor,
        latent: torch.Tensor,
        rope: RopeTable,
        inputs: ForwardInputs,
        recent: list[torch.Tensor],
        backend: CompressedAttentionBackend,
    ) -> torch.Tensor | None:
        layer_id, compressor = self.layer_id, self.compressor
        if compressor is None:
            return None
        table = self._tables.of_entries(rope, inputs.positions, compressor.rate)
        compressor(hidden_states, recent[0], backend.cache.pages(layer_id), table, backend)
        if self.indexer is None:
            return None
        keys = backend.cache.index_pages(layer_id)
        self.indexer.compressor(hidden_states, recent[1], keys, table, backend)
        if not backend.selects:
            return None
        selection: torch.Tensor = self.indexer(hidden_states, latent, rope, backend, layer_id)
        return selection
