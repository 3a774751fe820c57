"""The indexer of sparse attention: chooses, for each token, the ones that it attends to.

Source: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1; layers that take over another one's choice: IndexCache
(arXiv:2603.12201).
"""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.attention.mla.base import MlaAttentionBackend
from gpu_service.context import ForwardContext
from gpu_service.layers.layer_norm import LayerNorm
from gpu_service.layers.linear import Linear
from gpu_service.model_config import ModelConfig
from gpu_service.ops.rope import RopeTable, apply_rope
from gpu_service.ops.rope_pairing import half_split

# Of the keys' norm, whatever `rms_norm_eps` says: so were all families trained.
_KEY_EPS = 1e-6


class StepSelection:
    """What layers of one model share within a step: the latest choice, and the indexer's rotary table."""

    def __init__(self) -> None:
        # int32 [T, top_k] as `MlaAttentionBackend` says, None: all tokens; filled by layers with an indexer.
        self.tokens: torch.Tensor | None = None
        self._halves: tuple[RopeTable, RopeTable] | None = None

    def half_split(self, rope: RopeTable) -> RopeTable:
        """The step's table with its pairs lying half a head apart; made once per step."""
        if self._halves is None or self._halves[0] is not rope:
            self._halves = rope, half_split(rope)
        return self._halves[1]


class Indexer(nn.Module):
    """Small queries and keys whose products only rank tokens. Every rank has all of it.

    Attribute names are those of the checkpoint. `index_layer` counts the layers of this stage that choose.
    """

    def __init__(
        self, index_layer: int, config: ModelConfig, selection: StepSelection, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert config.mla is not None, "the family's reader fills `mla`"
        indexer, rank = config.mla.indexer, config.mla.q_lora_rank
        assert indexer is not None, "the family's reader fills `indexer`"
        assert rank is not None, "the family's reader asks for a latent of queries"
        self._index_layer, self._sizes, self._selection = index_layer, indexer, selection
        self.wq_b = Linear(rank, indexer.num_heads * indexer.head_dim, bias=False, dtype=dtype)
        self.wk = Linear(config.hidden_size, indexer.head_dim, bias=False, dtype=dtype)
        self.k_norm = LayerNorm(indexer.head_dim, _KEY_EPS, dtype=dtype)
        # Its few rows weigh whole heads against one another: in 16 bits, ranks of tokens would change.
        self.weights_proj = Linear(config.hidden_size, indexer.num_heads, bias=False, dtype=torch.float32)
        self._score_scale = (indexer.head_dim * indexer.num_heads) ** -0.5

    def forward(
        self,
        hidden_states: torch.Tensor,
        query_latent: torch.Tensor,
        rope: RopeTable,
        context: ForwardContext,
    ) -> None:
        """Leaves the choice for each row in the `StepSelection`, and the step's keys in the cache.

        hidden_states `[T, H]` after the layer's norm; query_latent `[T, q_lora_rank]`, normed; rope: that of
        the layers.
        """
        backend, sizes = context.attention, self._sizes
        assert isinstance(backend, MlaAttentionBackend), "the cache of this model holds latents"
        if not sizes.interleaved:
            rope = self._selection.half_split(rope)
        keys: torch.Tensor = self.k_norm(self.wk(hidden_states))
        apply_rope(keys[:, None], rope)
        index_keys = backend.cache.index_keys
        assert index_keys is not None, "the cache of this model holds the indexer's keys"
        index_keys.append(self._index_layer, keys, context.inputs.slot_mapping)
        self._selection.tokens = None
        if backend.selects:
            query = self.wq_b(query_latent).view(-1, sizes.num_heads, sizes.head_dim)
            apply_rope(query, rope)
            weights = self.weights_proj(hidden_states.float()) * self._score_scale
            self._selection.tokens = backend.select(query, weights, self._index_layer)
