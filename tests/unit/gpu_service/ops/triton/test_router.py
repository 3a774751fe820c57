"""Invariant: the router's kernel is `route` over the whole router space; its ids are always usable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.ops.router import route
from gpu_service.ops.triton.router import route as triton_route
from moebius.models.layers.router import RouterConfig
from tests.tolerances import OP_FLOAT32

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is"),
    # Numpy speaks up where a GPU computes NaN or Inf in silence.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def _dense(weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Returns the weights by expert `[T, E]`; an expert chosen with weight 0 still differs from one not
    chosen.
    """
    dense = torch.full((weights.shape[0], num_experts), -1.0)
    return dense.scatter_(1, ids.long(), weights)


@st.composite
def _configs(draw: st.DrawFn) -> RouterConfig:
    num_groups = draw(st.integers(1, 5))
    group_size = draw(st.integers(2, 9))
    top_groups = draw(st.integers(1, num_groups))
    return RouterConfig(
        num_experts=num_groups * group_size,
        top_k=draw(st.integers(1, min(8, top_groups * group_size))),
        score=draw(st.sampled_from(["softmax", "sigmoid", "sqrt_softplus", "none"])),
        correction_bias=draw(st.booleans()),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "top2_sum"])),
        post=draw(st.sampled_from(["none", "renormalize", "softmax", "sigmoid", "sigmoid_renormalize"])),
        renormalize_epsilon=draw(st.sampled_from([0.0, 1e-20])),
        scale=draw(st.sampled_from([1.0, 2.5])),
        logit_softcap=draw(st.sampled_from([0.0, 1.5])),
    )


@settings(deadline=None)
@given(config=_configs(), seed=st.integers(0, 1000), rows=st.integers(0, 3))
def test_route_is_the_reference(config: RouterConfig, seed: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Raw scores stay positive where sums of them are divided by.
    logits = torch.rand(rows, config.num_experts, generator=generator) * 4
    bias = torch.randn(config.num_experts, generator=generator) if config.correction_bias else None
    expected = _dense(*route.reference(logits, bias, config), config.num_experts)
    weights, ids = triton_route(logits, bias, config)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    torch.testing.assert_close(
        _dense(weights, ids, config.num_experts), expected, rtol=0, atol=4 * OP_FLOAT32
    )


@pytest.mark.parametrize("width", [0.02, 0.5])
def test_sparse_mixer_is_the_reference(width: float) -> None:
    """Logits of either sign, rows of padding, and more experts than a power of two."""
    logits = torch.randn(6, 21, generator=torch.Generator().manual_seed(3)).sort(descending=True).values
    valid = torch.tensor([True, True, False, True, True, True])
    config = RouterConfig(21, 2, "sparse_mixer", mixer_width=width)
    expected, chosen = route.reference(logits - 1.5, None, config, valid)
    weights, ids = triton_route(logits - 1.5, None, config, valid)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights, expected, rtol=0, atol=OP_FLOAT32)


def test_equal_scores_take_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 2.0], [0.0] * 5])
    _, ids = triton_route(logits, None, RouterConfig(5, 3, "softmax"))
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus", "none"])
@pytest.mark.parametrize("groups", [(1, 1), (3, 1)])
def test_ids_of_broken_logits_are_valid_and_distinct(score: str, groups: tuple[int, int]) -> None:
    """A request whose logits are NaN fails by itself; its row must not send others astray."""
    logits = torch.full((3, 12), float("nan"))
    logits[1] = float("-inf")
    logits[2, 3] = float("nan")
    config = RouterConfig(12, 4, score, num_groups=groups[0], top_groups=groups[1], post="renormalize")
    weights, ids = triton_route(logits, None, config)
    for row in ids.tolist():
        assert len(set(row)) == 4
        assert set(row) <= set(range(12))
    assert weights[0].isnan().all()


def test_rows_of_padding_choose_no_expert() -> None:
    """In both implementations, and the other rows keep their choice."""
    logits, valid = torch.randn(5, 9), torch.tensor([True, False, True, False, False])
    config = RouterConfig(9, 3, "softmax")
    for implementation in (route.reference, triton_route):
        _, everyone = implementation(logits, None, config)
        weights, ids = implementation(logits, None, config, valid)
        assert torch.equal(ids[valid], everyone[valid])
        assert (ids[~valid] == -1).all()
        assert weights.isfinite().all()


def test_rows_of_a_wider_product() -> None:
    wide = torch.randn(4, 20)
    config = RouterConfig(9, 3, "sigmoid")
    expected = _dense(*route.reference(wide[:, 5:14], None, config), 9)
    torch.testing.assert_close(
        _dense(*triton_route(wide[:, 5:14], None, config), 9), expected, rtol=0, atol=OP_FLOAT32
    )
