"""Invariant: on a GPU, mixed steps of linear attention are the recurrence token by token, in float64.

At the sizes of Qwen3-Next and of the largest Qwen3.5, from states that are not zero.
"""

from __future__ import annotations

import pytest
import torch

from gpu_service.ops.linear_attention import causal_conv_extend
from gpu_service.ops.triton.table import IMPLEMENTATIONS
from tests.helpers.linear_cases import (
    KIMI_LINEAR,
    QWEN3_5_LARGE,
    QWEN3_NEXT,
    LinearSizes,
    make_delta_case,
    make_kimi_case,
    naive_delta,
    naive_kimi,
    sequences_of,
    slots,
)
from tests.tolerances import DELTA_RULE_GPU, OP_ROUNDINGS

pytestmark = pytest.mark.gpu
SEVERAL = [1, 1000, 64, 1, 1, 65, 63, 300]
STEPS = {"1": [1], "63": [63], "64": [64], "65": [65], "1000": [1000], "several": SEVERAL}


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the error over that of what is wanted."""
    return float((got.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(QWEN3_NEXT, torch.bfloat16), (QWEN3_5_LARGE, torch.bfloat16), (QWEN3_NEXT, torch.float32)],
    ids=["next", "3.5", "next in float32"],
)
@pytest.mark.parametrize("step", STEPS)
def test_outputs_and_states_are_the_recurrence(step: str, sizes: LinearSizes, dtype: torch.dtype) -> None:
    case = make_delta_case(sizes, STEPS[step], dtype, "cuda")
    outputs, states = naive_delta(case)
    before = case.states.clone()
    got = IMPLEMENTATIONS["gated_delta_extend"].function(*case)
    assert relative_error(got, outputs) < DELTA_RULE_GPU[dtype]
    for slot in case.writes.tolist():
        assert relative_error(case.states[slot], states[slot]) < DELTA_RULE_GPU[dtype]
    unwritten = len(STEPS[step]) + 1
    assert torch.equal(case.states[:unwritten], before[:unwritten])


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, None), (torch.bfloat16, -5.0), (torch.float32, -5.0)]
)
@pytest.mark.parametrize("step", STEPS)
def test_decays_of_elements(step: str, dtype: torch.dtype, bound: float | None) -> None:
    """Kimi Delta Attention, at Kimi-Linear's sizes."""
    case = make_kimi_case(KIMI_LINEAR, STEPS[step], dtype, "cuda", bound)
    outputs, states = naive_kimi(case)
    got = IMPLEMENTATIONS["kimi_delta_extend"].function(*case)
    assert relative_error(got, outputs) < DELTA_RULE_GPU[dtype]
    for slot in case.writes.tolist():
        assert relative_error(case.states[slot], states[slot]) < DELTA_RULE_GPU[dtype]


def test_the_same_token_again_and_again() -> None:
    """Equal keys, no decay and beta 1: powers of a chunk's system reach 10^17, its inverse stays small."""
    case = make_delta_case(QWEN3_NEXT, [1000], torch.bfloat16, "cuda")
    width = 2 * QWEN3_NEXT.key_heads * QWEN3_NEXT.key_dim
    case.qkv[:, :width] = case.qkv[:1, :width].clone()
    case.a.fill_(-40.0)
    case.b.fill_(40.0)
    outputs, states = naive_delta(case)
    got = IMPLEMENTATIONS["gated_delta_extend"].function(*case)
    assert relative_error(got, outputs) < DELTA_RULE_GPU[torch.bfloat16]
    assert relative_error(case.states, states) < DELTA_RULE_GPU[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_convolution(dtype: torch.dtype) -> None:
    """Rows are columns of the layer's wider product."""
    generator = torch.Generator().manual_seed(0)
    channels, lengths = QWEN3_NEXT.conv_size, [1, 2, 16, 1, 1000, 3]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", dtype)

    rows = random(sum(lengths), channels + 64)[:, :channels]
    weight, states = random(channels, 4), random(2 * len(lengths) + 1, 3, channels)
    theirs, ours = states.clone(), states.clone()
    rest = weight, *slots(lengths, "cuda"), sequences_of(lengths, "cuda")
    expected = causal_conv_extend.reference(rows, theirs, *rest)
    got = IMPLEMENTATIONS["causal_conv_extend"].function(rows, ours, *rest)
    tolerance = OP_ROUNDINGS[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=4 * tolerance)
    assert torch.equal(ours, theirs)
