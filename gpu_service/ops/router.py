"""The router of every family: one function with eight parameters; and what it may choose besides experts."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpu_service.ops.registry import Op
from moebius.models.layers.router import RouterConfig


def _scores(router_logits: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """Returns score function, always in float32."""
    logits = router_logits.float()
    if config.logit_softcap:
        logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
    if config.score == "softmax":
        return logits.softmax(dim=-1)
    if config.score == "sigmoid":
        return logits.sigmoid()
    if config.score == "sqrt_softplus":
        return functional.softplus(logits).sqrt()
    return logits


def _mask_groups(choice: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """Put -inf on the experts outside the best `top_groups` of `num_groups` equal, adjacent groups."""
    grouped = choice.view(-1, config.num_groups, config.num_experts // config.num_groups)
    if config.group_score == "max":
        group_scores = grouped.amax(dim=-1)
    else:
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(config.top_groups, dim=-1, sorted=False).indices
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


@Op
def route(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    config: RouterConfig,
    valid_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts per token.

    router_logits `[T, E]`; correction_bias float32 `[E]` or None. Returns weights float32 `[T, top_k]`
    and ids int32 `[T, top_k]`; the order within a row is not defined. The bias decides who is chosen,
    never how much they weigh. With the score "sparse_mixer", `_mixed` chooses. Rows where bool `[T]`
    valid_rows is False (padding) choose no expert: id -1.
    """
    if config.score == "sparse_mixer":
        weights, ids = _mixed(router_logits.float(), config.top_k, config.mixer_width)
        return weights, _valid(ids, valid_rows)
    scores = _scores(router_logits, config)
    choice = scores if correction_bias is None else scores + correction_bias
    if config.top_groups < config.num_groups:
        choice = _mask_groups(choice, config)
    ids = choice.topk(config.top_k, dim=-1, sorted=False).indices
    return _finished(scores, ids, config, valid_rows)


@Op
def zero_experts(
    hidden_states: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Returns what choices without weights answer: what they are given, each times its weight.

    hidden_states `[T, H]`; weights float32 and ids int32 `[T, K]`, contiguous. Returns float32 `[T, H]`. An
    id of `num_experts` or more is such a choice; in place it becomes -1, so that no expert server computes
    it.
    """
    chosen = ids >= num_experts
    total = weights.masked_fill(~chosen, 0.0).sum(dim=-1, keepdim=True)
    ids.masked_fill_(chosen, -1)
    return hidden_states.float() * total


@Op
def choose_by_kind(
    input_ids: torch.Tensor,
    second_tokens: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    num_experts: int,
    num_parts: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each token's choice among the experts of its kind, as choices of their parts.

    input_ids int64 `[T]`, second_tokens int64 `[V]`: ids of tokens of the second kind; `first`, `second`:
    what `route` answers, `[T, top_k]`, for either kind of `num_experts`, of `num_parts` parts each. Returns
    weights float32 and ids int32 `[T, top_k * max(num_parts)]`, -1 where there is nothing: a part weighs as
    much as its expert, and those of the second kind are counted after all of the first.
    """
    is_second = (input_ids.unsqueeze(1) == second_tokens).any(dim=1, keepdim=True)
    size, begin, found = first[1].shape[1] * max(num_parts), 0, []
    for (weights, ids), parts in zip((first, second), num_parts, strict=True):
        part = torch.arange(parts, dtype=torch.int32, device=ids.device)
        own = torch.where(ids.unsqueeze(2) < 0, -1, begin + ids.unsqueeze(2) * parts + part).flatten(1)
        missing = size - own.shape[1]
        repeated = weights.unsqueeze(2).expand(-1, -1, parts).flatten(1)
        repeated = functional.pad(repeated, (0, missing))
        found.append((repeated, functional.pad(own, (0, missing), value=-1)))
        begin += num_experts * parts
    weights, ids = (torch.where(is_second, theirs, ours) for ours, theirs in zip(*found, strict=True))
    return weights, ids


def weigh_chosen(
    router_logits: torch.Tensor,
    ids: torch.Tensor,
    config: RouterConfig,
    valid_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `route`, with experts that are chosen already: int32 `[T, top_k]`, which may be overwritten.

    No kernel of its own: some small launches, in the few layers that have it.
    """
    return _finished(_scores(router_logits, config), ids, config, valid_rows)


def _finished(
    scores: torch.Tensor, ids: torch.Tensor, config: RouterConfig, valid_rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights of the chosen, and their ids where rows are valid."""
    weights = scores.gather(-1, ids.long())
    if config.post in ("sigmoid", "sigmoid_renormalize"):
        weights = weights.sigmoid()
    if config.post in ("renormalize", "sigmoid_renormalize"):
        weights = weights / (weights.sum(dim=-1, keepdim=True) + config.renormalize_epsilon)
    elif config.post == "softmax":
        weights = weights.softmax(dim=-1)
    if config.scale != 1.0:
        weights = weights * config.scale
    return weights, _valid(ids, valid_rows)


def _valid(ids: torch.Tensor, valid_rows: torch.Tensor | None) -> torch.Tensor:
    """Returns the ids as int32, -1 where rows are padding."""
    ids = ids.int()
    return ids if valid_rows is None else ids.masked_fill_(~valid_rows.unsqueeze(1), -1)


def _mixed(logits: torch.Tensor, top_k: int, width: float) -> tuple[torch.Tensor, torch.Tensor]:
    """SparseMixer's choice at inference (Liu et al. 2024, arXiv:2409.12136): the best expert, weighed by a
    softmax over those that are hardly worse; then the same without it, and so on.

    logits float32 `[T, E]`. Expert i is hardly worse than the best b where `(b - l_i) / max(b, |l_i|)` is at
    most `width`. Returns weights `[T, top_k]` and ids int64 of the same shape.
    """
    left, weights, ids = logits, [], []
    for _ in range(top_k):
        best, index = left.max(dim=-1, keepdim=True)
        is_worse = (best - logits) / logits.abs().clamp(min=best) > width
        weights.append(left.masked_fill(is_worse, float("-inf")).softmax(dim=-1).gather(-1, index))
        ids.append(index)
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(ids, dim=-1)
