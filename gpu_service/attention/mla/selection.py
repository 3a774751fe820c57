"""Which tokens sparse attention reads, in plain torch: the oracle of the kernels in `triton_index.py`.

Source: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1. Its Hadamard rotation leaves scores as they are and
its 8-bit products approximate them; as in transformers, neither is done here.
"""

from __future__ import annotations

import torch

# Products of all heads, float32, that are alive at a time.
_MAX_PRODUCTS = 2**24


def index_scores(query: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sum over heads of weight times ReLU(query · key), float32 `[T, K]`.

    query `[T, H, D]`; head_weights float32 `[T, H]`; keys `[K, D]`, those of one request.
    """
    num_rows, num_heads, _ = query.shape
    exact = keys.float().T
    scores = torch.empty(num_rows, keys.shape[0], dtype=torch.float32, device=query.device)
    step = max(1, _MAX_PRODUCTS // (num_heads * keys.shape[0]))
    for begin in range(0, num_rows, step):
        rows = slice(begin, begin + step)
        products = torch.matmul(query[rows].float(), exact).relu_()
        scores[rows] = torch.matmul(head_weights[rows, None], products)[:, 0]
    return scores


def select_tokens(scores: torch.Tensor, lengths: torch.Tensor, top_k: int) -> torch.Tensor:
    """Positions of each row's `top_k` highest scores, ascending, padded with -1: int32 `[T, top_k]`.

    scores float32 `[T, K]`; lengths int `[T]`: a row chooses among its first so many, all of them where they
    are not more than `top_k`. Among equal scores the lower position wins. A row with a NaN chooses nothing.
    Shapes depend on shapes only, so that it may be captured in a graph.
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
    # What is not chosen goes to a column behind the last, which is dropped.
    column = torch.where(chosen, chosen.cumsum(-1) - 1, top_k)
    selection.scatter_(1, column, positions.to(torch.int32).expand(num_rows, -1))
    return selection[:, :top_k]
