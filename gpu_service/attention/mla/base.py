"""The contract of a backend for multi-head latent attention.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2; `ops.latent` has the algebra.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_service.attention.base import PlannedAttention
from gpu_service.cache.kv_cache import MlaCache
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.linear import linear, widened


def up_project(
    latent: torch.Tensor, key_rope: torch.Tensor, weight: torch.Tensor, nope_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latents `[T, latent_dim]` and rotated parts `[T, rope_dim]` written out for every head.

    weight `[H, nope_dim + value_dim, latent_dim]`, contiguous: each head's key rows, then its value rows.
    Returns keys `[T, H, nope_dim + rope_dim]` and values `[T, H, value_dim]`, both contiguous.
    """
    num_heads, rows, _ = weight.shape
    heads = linear(latent, weight.flatten(0, 1), None).view(-1, num_heads, rows)
    shared = key_rope[:, None].expand(-1, num_heads, -1)
    return torch.cat((heads[..., :nope_dim], shared), dim=-1), heads[..., nope_dim:].contiguous()


@dataclass(frozen=True, slots=True)
class IndexDimensions:
    """Sizes of sparse attention's indexer, the same on every rank; filled as `MlaDimensions`."""

    num_heads: int
    head_dim: int
    top_k: int  # Tokens that a query attends to at most, but for those after the last whole pool.
    # The number of tokens that have one key and are chosen together; `top_k` is a multiple of it.
    pool: int = 1

    @property
    def selected(self) -> int:
        """Tokens that a query attends to at most."""
        return self.top_k + self.pool - 1


@dataclass(frozen=True, slots=True)
class MlaDimensions:
    """Sizes of one rank's attention; filled by the model family from its configuration."""

    num_heads: int  # of this rank
    latent_dim: int  # kv_lora_rank
    nope_dim: int  # qk_nope_head_dim
    rope_dim: int  # qk_rope_head_dim
    value_dim: int  # v_head_dim
    softmax_scale: float  # (nope_dim + rope_dim) ** -0.5, times what a family's rotary scaling adds.
    index: IndexDimensions | None = None  # None: a query attends to all tokens before it.
    # Whether each head has a learned logit that joins its softmax's sum and has no value. Then no step takes
    # `forward_non_absorbed`, whose kernels know none.
    has_sinks: bool = False


class MlaAttentionBackend(PlannedAttention):
    """Attention over a paged cache of latents; one of the forwards is called once per layer.

    Absorbed, every head's queries are carried into the latent space, where all heads share one key (the
    latent and the rotated part) and one value (the latent); `ops.latent` has the algebra.

    Of a model with sparse attention, a layer's `select` says which tokens each query attends to, and
    `forward` is given that selection: int32 `[T, index.selected]`, positions within the row's own request,
    ascending, then -1. A query with at most `top_k` tokens up to it selects all of them, so that its
    attention is the dense one. Several layers may use one selection.
    """

    def __init__(self, dimensions: MlaDimensions, cache: MlaCache) -> None:
        if (dimensions.latent_dim, dimensions.rope_dim) != (cache.latent_dim, cache.rope_dim):
            raise ValueError(
                f"attention over latents of {dimensions.latent_dim} + {dimensions.rope_dim} elements got a "
                f"cache of {cache.latent_dim} + {cache.rope_dim}"
            )
        self.dimensions = dimensions
        self.cache = cache
        # Whether the planned step takes `forward_non_absorbed`, else `forward`; filled by `plan`.
        self.non_absorbed = False
        # Whether queries of the planned step may have to choose, else selections are None; filled by `plan`.
        self.selects = False
        # What the latest layer with an indexer chose; None: all tokens. Filled and read by the step's layers.
        self.selection: torch.Tensor | None = None
        # The step's latest latents that layers share, with parts of keys that all heads share, for others;
        # by the elements of such a part, in which kinds of layers differ. Filled and read by layers.
        self.step_latents: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def unsupported(cls, dimensions: MlaDimensions, cache: MlaCache) -> str:
        """Why this backend cannot serve these sizes on this machine; empty: it can."""
        return ""

    def forward(
        self,
        query_latent: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor | None,
        key_rope: torch.Tensor | None,
        layer_id: int,
        selection: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new latents of this layer, then attend in the latent space.

        query_latent `[T, num_heads, latent_dim]` (queries after absorbing the key projection); query_rope
        `[T, num_heads, rope_dim]`; latent `[T, latent_dim]` (normed); key_rope `[T, rope_dim]`; rotary
        embedding already applied, all of the cache's `dtype`. Returns `[T, num_heads, latent_dim]`, to be
        carried through the value projection. selection: None means all tokens; else see the class. sinks:
        `[num_heads]`, any float type, where `dimensions.has_sinks`. latent and key_rope None: an earlier
        layer of this step has stored them.
        """
        if latent is not None and key_rope is not None:
            self.cache.append(layer_id, latent, key_rope, self._planned.slot_mapping)
        return self._attend(query_latent, query_rope, layer_id, selection, sinks)

    @abstractmethod
    def _attend(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        layer_id: int,
        selection: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes `forward` after storing; `query` is its `query_latent`."""

    def forward_non_absorbed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        latent: torch.Tensor | None,
        key_rope: torch.Tensor | None,
        layer_id: int,
    ) -> torch.Tensor:
        """Returns the same for a step of first chunks only, with keys and values of each head written out.

        Fewer operations than `forward` while nothing earlier is attended to; taken where `non_absorbed`.
        query, key `[T, num_heads, nope_dim + rope_dim]`; value `[T, num_heads, value_dim]`; latent and
        key_rope as there. Returns `[T, num_heads, value_dim]`: what `forward` gives after the value
        projection.
        """
        if not self.non_absorbed:
            raise ValueError(
                "keys are written out only in steps of first chunks; ask `non_absorbed` after planning"
            )
        if latent is not None and key_rope is not None:
            self.cache.append(layer_id, latent, key_rope, self._planned.slot_mapping)
        return self._attend_first_chunks(query, key, value)

    def _attend_first_chunks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Computes plain causal attention of each request to itself, by torch."""
        output = torch.empty_like(value, memory_format=torch.contiguous_format)
        for begin, end in pairwise(self._planned.query_start_loc):
            q, k, v = (part[begin:end].transpose(0, 1) for part in widened(query, key, value))
            attended = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.dimensions.softmax_scale
            )
            output[begin:end] = attended.transpose(0, 1)
        return output

    def select(self, query: torch.Tensor, head_weights: torch.Tensor, index_layer: int) -> torch.Tensor:
        """Returns the tokens with the highest scores, int32 as the class says; where `selects`.

        query `[T, index heads, index head_dim]`, rotary embedding applied; head_weights float32 `[T, index
        heads]`, scales included; the step's keys are in `cache.index_keys` already. A token's score is the
        sum over heads of weight times ReLU(query · key); among equal ones the earlier token wins, so that
        the way a sequence was cut into steps cannot decide. Tokens in pools have one score, that of the key
        in the row of a pool's last token; a query chooses among the pools that end up to it, and the tokens
        after those are selected as well. Raises NotImplementedError where this backend cannot serve sparse
        attention.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot select tokens")

    def _writes_keys_out(self, inputs: ForwardInputs) -> bool:
        """Returns whether a step is one that `forward_non_absorbed` serves; asked after `selects`
        is known.
        """
        may = not (self.cache.is_quantised or self.selects or self.dimensions.has_sinks)
        return may and has_only_first_chunks(inputs)

    def _may_select(self, longest: int) -> bool:
        """Returns whether a step whose longest sequence has `longest` tokens must choose among them."""
        index = self.dimensions.index
        return index is not None and longest // index.pool > index.top_k // index.pool


def has_only_first_chunks(inputs: ForwardInputs) -> bool:
    """Returns whether no request attends to anything earlier than this step, and some compute
    several tokens.
    """
    starts = inputs.query_start_loc
    first = all(
        end - begin == length
        for begin, end, length in zip(starts[:-1], starts[1:], inputs.seq_lens, strict=True)
    )
    return first and not inputs.is_uniform_decode
