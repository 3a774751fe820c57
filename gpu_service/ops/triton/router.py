"""The router in one launch: a program scores one token's experts, limits the groups and picks.

Experts lie in a tile `[groups, experts of a group]`, padded to powers of two. A padded or already chosen
entry counts as -inf, while whatever else must lose (an expert of a dropped group, NaN) counts as the
lowest finite number: so the chosen ids are valid and distinct whatever the logits hold. Of equal scores
the lowest id wins.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from gpu_service.ops.triton.jit import jit, next_power_of_2, overlap, wait_for_previous
from moebius.models.layers.router import RouterConfig

_SCORES = {"none": 0, "softmax": 1, "sigmoid": 2, "sqrt_softplus": 3}
_POSTS = {"none": 0, "renormalize": 1, "softmax": 2, "sigmoid": 3, "sigmoid_renormalize": 4}
_LOWEST = -3.0e38


@jit
def _capped(logits: tl.tensor, softcap: float, CAPS: tl.constexpr) -> tl.tensor:
    """Computes `softcap * tanh(logits / softcap)`, by the logistic function, whose powers never overflow."""
    if CAPS:
        logits = softcap * (2.0 / (1.0 + tl.exp(-2.0 * logits / softcap)) - 1.0)
    return logits


@jit
def _softmax_bounds(logits: tl.tensor, valid: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Returns the largest logit of the tile, and the sum of the powers relative to it."""
    logits = tl.where(valid, logits, float("-inf"))
    top = tl.max(tl.max(logits, axis=1), axis=0)
    return top, tl.sum(tl.sum(tl.exp(logits - top), axis=1), axis=0)


@jit
def _score(logits: tl.tensor, top: tl.tensor, total: tl.tensor, SCORE: tl.constexpr) -> tl.tensor:
    """Score function in float32, of logits that are capped already."""
    if SCORE == 1:
        logits = tl.exp(logits - top) / total
    if SCORE == 2:
        logits = 1.0 / (1.0 + tl.exp(-logits))
    if SCORE == 3:
        # Softplus, whose powers never overflow; next to 1 a small one would be rounded away.
        power = tl.exp(-tl.abs(logits))
        series = power * (1.0 - power * (0.5 - power / 3.0))
        logits = tl.sqrt(tl.maximum(logits, 0.0) + tl.where(power < 0.01, series, tl.log(1.0 + power)))
    return logits


@jit
def _group_scores(choice: tl.tensor, SUM_OF_TWO: tl.constexpr) -> tl.tensor:
    """Returns `[G, S]` to `[G]`: the best of each group, or the sum of its best two."""
    best = tl.max(choice, axis=1)
    if SUM_OF_TWO:
        place = tl.arange(0, choice.shape[1])[None, :]
        others = tl.where(place == tl.argmax(choice, axis=1)[:, None], float("-inf"), choice)
        best += tl.max(others, axis=1)
    return best


@jit
def _kept_groups(
    scores: tl.tensor, num_groups: int, TOP_GROUPS: tl.constexpr, LOWEST: tl.constexpr
) -> tl.tensor:
    """Returns 1 for the best `TOP_GROUPS` of the first `num_groups`, int32 `[G]`."""
    group = tl.arange(0, scores.shape[0])
    scores = tl.where(group < num_groups, tl.maximum(scores, LOWEST), float("-inf"))
    kept = tl.zeros_like(group)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(scores, axis=0)
        kept = tl.where(group == best, 1, kept)
        scores = tl.where(group == best, float("-inf"), scores)
    return kept


@jit
def _finished(
    weights: tl.tensor, used: tl.tensor, epsilon: float, scale: float, POST: tl.constexpr
) -> tl.tensor:
    """Returns what happens to the chosen scores `[K]`."""
    if POST >= 3:
        weights = 1.0 / (1.0 + tl.exp(-weights))
    if POST == 1 or POST == 4:
        weights = weights / (tl.sum(tl.where(used, weights, 0.0), axis=0) + epsilon)
    if POST == 2:
        weights = tl.where(used, weights, float("-inf"))
        powers = tl.exp(weights - tl.max(weights, axis=0))
        weights = powers / tl.sum(powers, axis=0)
    return weights * scale


@jit
def route_row(
    token: tl.tensor, logits_ptr: tl.tensor, bias_ptr: tl.tensor, valid_rows_ptr: tl.tensor,
    weights_ptr: tl.tensor, ids_ptr: tl.tensor, row_stride: int, num_groups: int, group_size: int,
    epsilon: float, scale: float, softcap: float,
    SCORE: tl.constexpr, POST: tl.constexpr, CAPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_VALID_ROWS: tl.constexpr, LIMITS_GROUPS: tl.constexpr, SUM_OF_TWO: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr, LOWEST: tl.constexpr,
) -> None:  # fmt: skip
    """Writes float32 weights and int32 ids `[TOP_K]` of one row, best choice first."""
    group = tl.arange(0, BLOCK_GROUPS)[:, None]
    place = tl.arange(0, BLOCK_EXPERTS)[None, :]
    expert = group * group_size + place
    valid = (group < num_groups) & (place < group_size)
    row = logits_ptr + token * row_stride
    logits = _capped(tl.load(row + expert, mask=valid, other=0.0).to(tl.float32), softcap, CAPS)
    top, total = 0.0, 1.0
    if SCORE == 1:
        top, total = _softmax_bounds(logits, valid)
    choice = _score(logits, top, total, SCORE)
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=valid, other=0.0)
    choice = tl.where(choice > LOWEST, choice, LOWEST)
    choice = tl.where(valid, choice, float("-inf"))
    if LIMITS_GROUPS:
        kept = _kept_groups(_group_scores(choice, SUM_OF_TWO), num_groups, TOP_GROUPS, LOWEST)
        choice = tl.where(valid & (kept[:, None] == 0), LOWEST, choice)
    flat = tl.reshape(choice, [BLOCK_GROUPS * BLOCK_EXPERTS])
    entry = tl.arange(0, BLOCK_GROUPS * BLOCK_EXPERTS)
    rank = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(flat, axis=0)
        ids = tl.where(rank == k, best // BLOCK_EXPERTS * group_size + best % BLOCK_EXPERTS, ids)
        flat = tl.where(entry == best, float("-inf"), flat)
    used = rank < TOP_K
    # Scoring the chosen again is cheaper than reducing a tile for each of them.
    chosen = _capped(tl.load(row + ids, mask=used, other=0.0).to(tl.float32), softcap, CAPS)
    weights = _finished(_score(chosen, top, total, SCORE), used, epsilon, scale, POST)
    if HAS_VALID_ROWS:
        ids = tl.where(tl.load(valid_rows_ptr + token) != 0, ids, -1)
    tl.store(weights_ptr + token * TOP_K + rank, weights, mask=used)
    tl.store(ids_ptr + token * TOP_K + rank, ids, mask=used)


@jit
def route_kernel(
    logits_ptr: tl.tensor, bias_ptr: tl.tensor, valid_rows_ptr: tl.tensor, weights_ptr: tl.tensor,
    ids_ptr: tl.tensor, row_stride: int, num_groups: int, group_size: int, epsilon: float, scale: float,
    softcap: float, SCORE: tl.constexpr, POST: tl.constexpr, CAPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_VALID_ROWS: tl.constexpr, LIMITS_GROUPS: tl.constexpr, SUM_OF_TWO: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr, LOWEST: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Program t: `route_row` of row t."""
    wait_for_previous(OVERLAPS)
    route_row(
        tl.program_id(0).to(tl.int64), logits_ptr, bias_ptr, valid_rows_ptr, weights_ptr, ids_ptr, row_stride,
        num_groups, group_size, epsilon, scale, softcap, SCORE, POST, CAPS, HAS_BIAS, HAS_VALID_ROWS,
        LIMITS_GROUPS, SUM_OF_TWO, TOP_GROUPS, TOP_K, BLOCK_GROUPS, BLOCK_EXPERTS, BLOCK_K, LOWEST,
    )  # fmt: skip


@jit
def zero_experts_kernel(
    hidden_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    output_ptr: tl.tensor,
    row_stride: int,
    hidden_size: int,
    num_experts: int,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program t: row t times the sum of its choices without weights, whose ids become -1."""
    token = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, BLOCK_K)
    used = rank < TOP_K
    ids = tl.load(ids_ptr + token * TOP_K + rank, mask=used, other=-1)
    weights = tl.load(weights_ptr + token * TOP_K + rank, mask=used, other=0.0)
    total = tl.sum(tl.where(ids >= num_experts, weights, 0.0), axis=0)
    tl.store(ids_ptr + token * TOP_K + rank, tl.where(ids >= num_experts, -1, ids), mask=used)
    for begin in range(0, hidden_size, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        valid = column < hidden_size
        row = tl.load(hidden_ptr + token * row_stride + column, mask=valid, other=0.0).to(tl.float32)
        tl.store(output_ptr + token * hidden_size + column, row * total, mask=valid)


def zero_experts(
    hidden_states: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, num_experts: int
) -> torch.Tensor:
    rows = hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous()
    tokens, hidden_size = rows.shape
    output = torch.empty((tokens, hidden_size), dtype=torch.float32, device=rows.device)
    if tokens:
        zero_experts_kernel[(tokens,)](
            rows,
            weights,
            ids,
            output,
            rows.stride(0),
            hidden_size,
            num_experts,
            TOP_K=ids.shape[1],
            BLOCK_K=next_power_of_2(ids.shape[1]),
            BLOCK=min(1024, next_power_of_2(hidden_size)),
        )
    return output


@jit
def choose_by_kind_kernel(
    input_ids_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    first_weights_ptr: tl.tensor,
    first_ids_ptr: tl.tensor,
    second_weights_ptr: tl.tensor,
    second_ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_tokens: int,
    num_experts: int,
    FIRST_PARTS: tl.constexpr,
    SECOND_PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Program t: the parts that row t is computed by, of experts of its kind."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(input_ids_ptr + row)
    listed = tl.arange(0, BLOCK_TOKENS)
    others = tl.load(tokens_ptr + listed, mask=listed < num_tokens, other=-1)
    is_second = tl.max(tl.where((others == token) & (listed < num_tokens), 1, 0), axis=0)
    parts = tl.where(is_second == 1, SECOND_PARTS, FIRST_PARTS)
    begin = tl.where(is_second == 1, num_experts * FIRST_PARTS, 0)
    place = tl.arange(0, BLOCK)
    choice = place // parts
    used = choice < TOP_K
    in_first, in_second = used & (is_second == 0), used & (is_second == 1)
    at = row * TOP_K + choice
    # Of the two loads one is masked as a whole.
    ids = tl.load(first_ids_ptr + at, mask=in_first, other=-1)
    ids = tl.maximum(ids, tl.load(second_ids_ptr + at, mask=in_second, other=-1))
    weights = tl.load(first_weights_ptr + at, mask=in_first, other=0.0)
    weights += tl.load(second_weights_ptr + at, mask=in_second, other=0.0)
    ids = tl.where(ids < 0, -1, begin + ids * parts + place % parts)
    tl.store(weights_ptr + row * SIZE + place, weights, mask=place < SIZE)
    tl.store(ids_ptr + row * SIZE + place, ids, mask=place < SIZE)


def choose_by_kind(
    input_ids: torch.Tensor,
    second_tokens: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    num_experts: int,
    num_parts: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, top_k = first[1].shape
    size = top_k * max(num_parts)
    weights = torch.empty((tokens, size), dtype=torch.float32, device=input_ids.device)
    ids = torch.empty((tokens, size), dtype=torch.int32, device=input_ids.device)
    if tokens:
        choose_by_kind_kernel[(tokens,)](
            input_ids,
            second_tokens,
            *first,
            *second,
            weights,
            ids,
            second_tokens.shape[0],
            num_experts,
            FIRST_PARTS=num_parts[0],
            SECOND_PARTS=num_parts[1],
            TOP_K=top_k,
            SIZE=size,
            BLOCK=next_power_of_2(size),
            BLOCK_TOKENS=next_power_of_2(second_tokens.shape[0]),
            num_warps=1,
        )
    return weights, ids


@jit
def sparse_mixer_kernel(
    logits_ptr: tl.tensor,
    valid_rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    row_stride: int,
    num_experts: int,
    width: float,
    HAS_VALID_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    LOWEST: tl.constexpr,
) -> None:
    """Program t: row t's best experts, each weighed among those left that are hardly worse."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < num_experts
    logits = tl.load(logits_ptr + token * row_stride + expert, mask=inside, other=0.0).to(tl.float32)
    # What is neither padded nor chosen counts as the lowest finite number at least: ids stay valid.
    left = tl.where(inside, tl.where(logits > LOWEST, logits, LOWEST), float("-inf"))
    is_valid = True
    if HAS_VALID_ROWS:
        is_valid = tl.load(valid_rows_ptr + token) != 0
    for k in tl.static_range(TOP_K):
        index = tl.argmax(left, axis=0)
        best = tl.max(left, axis=0)
        is_near = (best - logits) / tl.maximum(tl.abs(logits), best) <= width
        powers = tl.where(is_near & (left > float("-inf")), tl.exp(left - best), 0.0)
        tl.store(weights_ptr + token * TOP_K + k, 1.0 / tl.sum(powers, axis=0))
        tl.store(ids_ptr + token * TOP_K + k, tl.where(is_valid, index, -1))
        left = tl.where(expert == index, float("-inf"), left)


def _mix(
    logits: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    config: RouterConfig,
    valid: torch.Tensor | None,
) -> None:
    tokens, num_experts = logits.shape
    sparse_mixer_kernel[(tokens,)](
        logits,
        logits if valid is None else valid,
        weights,
        ids,
        logits.stride(0),
        num_experts,
        config.mixer_width,
        HAS_VALID_ROWS=valid is not None,
        TOP_K=config.top_k,
        BLOCK=next_power_of_2(num_experts),
        LOWEST=_LOWEST,
        num_warps=1,
    )


def route(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    config: RouterConfig,
    valid_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = router_logits if router_logits.stride(-1) == 1 else router_logits.contiguous()
    tokens = logits.shape[0]
    weights, ids = chosen_memory(logits, config)
    if not tokens:
        return weights, ids
    if config.score == "sparse_mixer":
        _mix(logits, weights, ids, config, valid_rows)
    else:
        route_kernel[(tokens,)](
            **route_arguments(logits, correction_bias, config, valid_rows, weights, ids),
            # Every choice is a reduction: within one warp it needs no barrier.
            num_warps=1,
            **overlap(logits.device),
        )
    return weights, ids


def chosen_memory(logits: torch.Tensor, config: RouterConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory for weights and ids of all rows' choices."""
    weights = logits.new_empty((logits.shape[0], config.top_k), dtype=torch.float32)
    return weights, torch.empty_like(weights, dtype=torch.int32)


def route_arguments(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    config: RouterConfig,
    valid_rows: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> dict[str, Any]:
    """Returns the arguments of `route_row`, all but the row."""
    limits_groups = config.top_groups < config.num_groups
    # Groups that limit nothing are one group to the kernel.
    num_groups = config.num_groups if limits_groups else 1
    group_size = logits.shape[1] // num_groups
    return {
        "logits_ptr": logits,
        "bias_ptr": logits if correction_bias is None else correction_bias,
        "valid_rows_ptr": logits if valid_rows is None else valid_rows,
        "weights_ptr": weights,
        "ids_ptr": ids,
        "row_stride": logits.stride(0),
        "num_groups": num_groups,
        "group_size": group_size,
        "epsilon": config.renormalize_epsilon,
        "scale": config.scale,
        "softcap": config.logit_softcap,
        "SCORE": _SCORES[config.score],
        "POST": _POSTS[config.post],
        "CAPS": config.logit_softcap > 0.0,
        "HAS_BIAS": correction_bias is not None,
        "HAS_VALID_ROWS": valid_rows is not None,
        "LIMITS_GROUPS": limits_groups,
        "SUM_OF_TWO": config.group_score == "top2_sum",
        "TOP_GROUPS": config.top_groups,
        "TOP_K": config.top_k,
        "BLOCK_GROUPS": next_power_of_2(num_groups),
        "BLOCK_EXPERTS": next_power_of_2(group_size),
        "BLOCK_K": next_power_of_2(config.top_k),
        "LOWEST": _LOWEST,
    }
