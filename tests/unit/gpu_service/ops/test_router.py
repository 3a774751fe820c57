"""Invariant: `route` is every family's router. The bias chooses and never weighs; groups limit the choice."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gpu_service.layers.moe import Router
from gpu_service.ops.router import route
from moebius.checkpoint.errors import CheckpointError
from moebius.models.layers.router import RouterConfig
from tests.helpers.layer_values import declared
from tests.tolerances import OP_FLOAT32

ROWS, HIDDEN = 33, 24


def _dense(weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Returns the weights by expert `[T, E]`: routers may order their choices differently."""
    return torch.zeros(weights.shape[0], num_experts).scatter_(1, ids.long(), weights)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
def test_sigmoid_router_is_transformers_glm4_moe(norm: bool, groups: int, top_groups: int) -> None:
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    torch.manual_seed(groups + norm)
    reference = Glm4MoeTopkRouter(
        Glm4MoeConfig(
            hidden_size=HIDDEN,
            n_routed_experts=12,
            num_experts_per_tok=5,
            n_group=groups,
            topk_group=top_groups,
            norm_topk_prob=norm,
            routed_scaling_factor=2.5,
        )
    )
    torch.nn.init.normal_(reference.weight)
    # Larger than any score, so that a bias leaking into the weights cannot stay within the tolerance.
    torch.nn.init.normal_(reference.e_score_correction_bias, std=3.0)
    config = RouterConfig(
        12, 5, "sigmoid", True, groups, top_groups, "top2_sum", "renormalize" if norm else "none", 1e-20, 2.5
    )
    with torch.no_grad():
        logits, expected_weights, expected_ids = reference(torch.randn(ROWS, HIDDEN))
        weights, ids = route(logits, reference.e_score_correction_bias, config)
    expected = _dense(expected_weights, expected_ids, 12)
    torch.testing.assert_close(_dense(weights, ids, 12), expected, rtol=0, atol=OP_FLOAT32)


@pytest.mark.parametrize("norm", [True, False])
def test_softmax_router_is_transformers_qwen3_moe(norm: bool) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    torch.manual_seed(norm)
    reference = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=9, num_experts_per_tok=4, norm_topk_prob=norm)
    )
    torch.nn.init.normal_(reference.weight)
    config = RouterConfig(9, 4, "softmax", post="renormalize" if norm else "none")
    with torch.no_grad():
        logits, expected_weights, expected_ids = reference(torch.randn(ROWS, HIDDEN))
        weights, ids = route(logits, None, config)
    expected = _dense(expected_weights, expected_ids, 9)
    torch.testing.assert_close(_dense(weights, ids, 9), expected, rtol=0, atol=OP_FLOAT32)


@pytest.mark.parametrize("noise", [0.01, 0.3])
def test_sparse_mixer_is_transformers_phimoe(noise: float) -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    torch.manual_seed(5)
    logits = torch.randn(ROWS, 7)
    expected_weights, expected_ids = sparsemixer(logits, jitter_eps=noise, training=False)
    weights, ids = route(logits, None, RouterConfig(7, 2, "sparse_mixer", mixer_width=2 * noise))
    expected = _dense(expected_weights, expected_ids, 7)
    torch.testing.assert_close(_dense(weights, ids, 7), expected, rtol=0, atol=OP_FLOAT32)


def test_raw_scores_with_softmax_afterwards_is_the_gpt_oss_order() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    weights, ids = route(logits, None, RouterConfig(4, 2, "none", post="softmax"))
    expected = torch.tensor([[3.0, 2.0]]).softmax(-1)
    assert sorted(ids[0].tolist()) == [1, 2]
    torch.testing.assert_close(weights.sort(descending=True).values, expected)


def test_group_score_is_max_or_sum_of_top_two() -> None:
    """Group 0 has the single best expert, group 1 the best pair: the two rules must disagree."""
    logits = torch.tensor([[5.0, -9.0, 4.0, 4.0]])
    by_sum = RouterConfig(4, 1, "none", num_groups=2, top_groups=1, group_score="top2_sum")
    assert route(logits, None, by_sum)[1].item() in (2, 3)
    assert route(logits, None, replace(by_sum, group_score="max"))[1].item() == 0


def test_output_types_are_the_expert_client_contract() -> None:
    weights, ids = route(torch.randn(5, 8, dtype=torch.bfloat16), None, RouterConfig(8, 3, "softmax"))
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert weights.shape == ids.shape == (5, 3)


def test_a_tokens_id_chooses_its_experts_and_scores_weigh_them() -> None:
    """Experts are those of the table; rows of padding choose no expert, and the table is as before."""
    config = RouterConfig(6, 2, "sqrt_softplus", post="renormalize", scale=1.5)
    router = Router(config, declared(config.weights(4, hashed_tokens=5)))
    assert router.e_score_correction_bias is None
    assert router.tid2eid is not None
    table = torch.tensor([[0, 1], [5, 2], [3, 4], [1, 0], [2, 2]], dtype=torch.int32)
    router.weight = torch.nn.Parameter(torch.randn(6, 4), requires_grad=False)
    router.tid2eid = torch.nn.Parameter(table.clone(), requires_grad=False)
    router.pack()
    rows, ids = torch.randn(3, 4), torch.tensor([1, 3, 1])
    inputs = SimpleNamespace(input_ids=ids, valid_rows=torch.tensor([True, True, False]))
    weights, chosen = router(rows, inputs)
    assert chosen.tolist() == [[5, 2], [1, 0], [-1, -1]]
    scores = torch.nn.functional.softplus(rows @ router.weight.T).sqrt()
    expected = scores[:2].gather(1, table[ids[:2]].long())
    expected = 1.5 * expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(weights[:2], expected)
    assert torch.equal(router.tid2eid, table)


@pytest.mark.parametrize("expert", [-1, 6])
def test_a_table_with_unknown_experts_is_refused(expert: int) -> None:
    """What a server was asked for that it does not have could be anything."""
    config = RouterConfig(6, 2, "sqrt_softplus")
    router = Router(config, declared(config.weights(4, hashed_tokens=2)))
    table = torch.tensor([[0, expert], [1, 2]], dtype=torch.int32)
    router.tid2eid = torch.nn.Parameter(table, requires_grad=False)
    with pytest.raises(CheckpointError, match=f"expert {expert}; allowed: 0 to 5"):
        router.pack()
