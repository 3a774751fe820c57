"""Latent attention in plain torch: the reference of the other backends, and what a machine without GPU runs.

Which tokens sparse attention reads: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1. Its Hadamard rotation
leaves scores as they are and its 8-bit GEMMs approximate them; as in transformers, neither is done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_service.attention.mla.base import MlaAttentionBackend, MlaDimensions
from gpu_service.attention.torch_reference import attend_with_lse_unfused
from gpu_service.cache.kv_cache import MlaCache
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.linear import widened

# Products of all heads, float32, that are alive at a time.
_MAX_PRODUCTS = 2**24


def index_scores(query: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sum over heads of weight times ReLU(query · key), float32 `[T, K]`.

    query `[T, H, D]`; head_weights float32 `[T, H]`; keys `[K, D]`, those of one request.
    """
    num_rows, num_heads, _ = query.shape
    exact = keys.float().T
    scores = torch.empty(num_rows, keys.shape[0], dtype=torch.float32, device=query.device)
    step = max(1, _MAX_PRODUCTS // (num_heads * max(1, keys.shape[0])))
    for begin in range(0, num_rows, step):
        rows = slice(begin, begin + step)
        products = torch.matmul(query[rows].float(), exact).relu_()
        scores[rows] = torch.matmul(head_weights[rows, None], products)[:, 0]
    return scores


def select_tokens(scores: torch.Tensor, lengths: torch.Tensor, top_k: int) -> torch.Tensor:
    """Returns the positions of each row's `top_k` highest scores, ascending, padded with -1: int32 `[T,
    top_k]`.

    scores float32 `[T, K]`; lengths int `[T]`: a row chooses among its first `lengths[t]`, all of them where
    they are not more than `top_k`. Among equal scores the lower position wins. A row with a NaN chooses
    nothing. Shapes depend on shapes only, so that it may be captured in a graph.
    """
    num_rows, width = scores.shape
    positions = torch.arange(width, device=scores.device)
    visible = positions < lengths[:, None]
    scores = scores.masked_fill(~visible, float("-inf"))
    chosen = visible
    if width > top_k:
        # Which of several equal scores `topk` returns is left open; the lowest value it returns is not.
        lowest = scores.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        above, level = scores > lowest, (scores == lowest) & visible
        room = top_k - above.sum(-1, keepdim=True)
        chosen = above | (level & (level.cumsum(-1) <= room))
    selection = torch.full((num_rows, top_k + 1), -1, dtype=torch.int32, device=scores.device)
    # What is not chosen goes to a column after the last, which is dropped.
    column = torch.where(chosen, chosen.cumsum(-1) - 1, top_k)
    selection.scatter_(1, column, positions.to(torch.int32).expand(num_rows, -1))
    return selection[:, :top_k]


def expand_pools(pools: torch.Tensor, lengths: torch.Tensor, pool: int) -> torch.Tensor:
    """Returns the tokens of chosen pools, then those after the last whole pool, then -1: int32 `[T, K * pool
    + pool - 1]`.

    pools int `[T, K]`, ascending, padded with -1; lengths int `[T]`: tokens up to each row.
    """
    num_rows, most = pools.shape
    column = torch.arange(most * pool + pool - 1, device=pools.device)
    num_chosen = (pools >= 0).sum(-1, keepdim=True) * pool
    number = pools.gather(1, (column // pool).clamp(max=most - 1).expand(num_rows, -1).long())
    whole = lengths[:, None] // pool * pool
    after = whole + column - num_chosen
    rest = torch.where(after < lengths[:, None], after, -1)
    return torch.where(column < num_chosen, number * pool + column % pool, rest).to(torch.int32)


@dataclass(frozen=True, slots=True)
class _Span:
    """The rows of one request; filled by `plan`."""

    rows: slice
    pages: torch.Tensor  # int64 [P]
    kv_len: int
    mask: torch.Tensor | None  # [n, kv_len], 0 or -inf; None: a single row, which sees everything


class TorchMlaAttention(MlaAttentionBackend):
    """Gather a request's latents, then torch's scaled dot-product attention with one shared key head."""

    def __init__(self, dimensions: MlaDimensions, cache: MlaCache) -> None:
        super().__init__(dimensions, cache)
        self._spans: list[_Span] = []

    def plan(self, inputs: ForwardInputs) -> None:
        inputs.check(self.cache.page_size)
        self._inputs = inputs
        self.selects = self._may_select(max(inputs.seq_lens, default=0))
        self.non_absorbed = self._writes_keys_out(inputs)
        starts, table = inputs.query_start_loc, inputs.block_table.long()
        self._spans = [
            self._span(slice(starts[i], starts[i + 1]), inputs.seq_lens[i], table[i])
            for i in self._gathered(inputs)
        ]

    def _gathered(self, inputs: ForwardInputs) -> Sequence[int]:
        """Returns the requests that `_attend` computes: all of them."""
        return range(len(inputs.seq_lens))

    def _span(self, rows: slice, kv_len: int, pages: torch.Tensor) -> _Span:
        num_new, mask = rows.stop - rows.start, None
        if num_new > 1:
            mask = torch.full((num_new, kv_len), float("-inf"), dtype=self.cache.dtype, device=pages.device)
            mask.triu_(diagonal=kv_len - num_new + 1)
        return _Span(rows, pages[: -(-kv_len // self.cache.page_size)], kv_len, mask)

    def _attend(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        layer_id: int,
        selection: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        (query,) = widened(torch.cat((query, query_rope), dim=-1))
        for span in self._spans:
            keys, mask = widened(*self._keys_of(span, layer_id, selection))
            # A single row's heads stand in the place of positions: one GEMM for all of them.
            rows = query[span.rows] if span.mask is None else query[span.rows].transpose(0, 1)
            shared = keys.expand(rows.shape[0], -1, -1)
            values, scale = shared[..., : self.dimensions.latent_dim], self.dimensions.softmax_scale
            if sinks is None:
                attended = scaled_dot_product_attention(rows, shared, values, attn_mask=mask, scale=scale)
            else:
                seen = rows.new_zeros(()) if mask is None else mask
                attended, lse = attend_with_lse_unfused(rows, shared, values, seen, scale)
                of_head = sinks.float() if span.mask is None else sinks.float()[:, None]
                # As in `attention.torch_reference.attend`.
                attended = attended * torch.sigmoid(lse - of_head).unsqueeze(-1).to(attended.dtype)
            output[span.rows] = attended if span.mask is None else attended.transpose(0, 1)
        return output

    def _keys_of(
        self, span: _Span, layer_id: int, selection: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the latents of one request's tokens, `[K, latent_dim + rope_dim]`, and which row sees which
        of them.

        A single row is given those that it chose. The rows of a chunk chose differently: they share all.
        """
        if selection is None or not self._may_select(span.kv_len):
            return self.cache.gather(layer_id, span.pages)[: span.kv_len], span.mask
        chosen = selection[span.rows]
        if span.mask is None:
            positions, page_size = chosen[chosen >= 0].long(), self.cache.page_size
            slots = span.pages[positions // page_size] * page_size + positions % page_size
            return self.cache.gather_slots(layer_id, slots), None
        keys = self.cache.gather(layer_id, span.pages)[: span.kv_len]
        return keys, _selection_mask(chosen, span.kv_len, keys.dtype)

    def select(self, query: torch.Tensor, head_weights: torch.Tensor, index_layer: int) -> torch.Tensor:
        index, keys = self.dimensions.index, self.cache.index_keys
        assert index is not None, "asked only where `selects`"
        assert keys is not None, "the cache of this model holds the indexer's keys"
        pool = index.pool
        selection = torch.empty(query.shape[0], index.selected, dtype=torch.int32, device=query.device)
        for span in self._spans:
            rows, num_new = span.rows, span.rows.stop - span.rows.start
            gathered = keys.gather(index_layer, span.pages)[pool - 1 : span.kv_len : pool, : index.head_dim]
            scores = index_scores(query[rows], head_weights[rows], gathered)
            lengths = torch.arange(span.kv_len - num_new + 1, span.kv_len + 1, device=query.device)
            chosen = select_tokens(scores, lengths // pool, index.top_k // pool)
            selection[rows] = chosen if pool == 1 else expand_pools(chosen, lengths, pool)
        return selection


def _selection_mask(selection: torch.Tensor, kv_len: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns 0 where a row of `[n, top_k]` selects a token, else -inf: `[n, kv_len]`."""
    mask = torch.full((selection.shape[0], kv_len + 1), float("-inf"), dtype=dtype, device=selection.device)
    # -1 is the column after the last, which is dropped.
    return mask.scatter_(1, selection.long() % (kv_len + 1), 0.0)[:, :kv_len]
