"""Invariant: a mixed step of linear attention by kernels is the recurrence token by token, in float64.

In Triton's interpreter: heads that fill no block, requests of one token, of less and more than a chunk, and
of several chunks, next to one another.
"""

from __future__ import annotations

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.ops.linear_attention import causal_conv_extend
from gpu_service.ops.triton import kimi_delta as kimi
from gpu_service.ops.triton import linear_attention_chunks as chunks
from gpu_service.ops.triton.linear_attention_chunks import gated_delta_extend, supports_extend
from tests.helpers.linear_cases import (
    LinearSizes,
    make_delta_case,
    make_kimi_case,
    naive_delta,
    naive_kimi,
    sequences_of,
    slots,
)
from tests.tolerances import DELTA_RULE, OP_ROUNDINGS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")
LENGTHS = [1, 65, 1, 2, 63, 64, 130]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes", [LinearSizes(2, 4, 8, 10), LinearSizes(1, 3, 12, 6), LinearSizes(2, 2, 6, 36)], ids=str
)
def test_outputs_and_states_are_the_recurrence(sizes: LinearSizes, dtype: torch.dtype) -> None:
    """States that no request writes stay as they are."""
    case = make_delta_case(sizes, LENGTHS, dtype)
    outputs, states = naive_delta(case)
    got = gated_delta_extend(*case)
    tolerance = DELTA_RULE[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), outputs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.states.double(), states, rtol=tolerance, atol=tolerance)
    unwritten = len(LENGTHS) + 1
    assert torch.equal(case.states[:unwritten].double(), states[:unwritten])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [LinearSizes(2, 2, 8, 10), LinearSizes(3, 3, 12, 36)], ids=str)
@pytest.mark.parametrize("bound", [None, -5.0])
def test_decays_of_elements(sizes: LinearSizes, dtype: torch.dtype, bound: float | None) -> None:
    """Kimi Delta Attention: requests of one token, of a part of a chunk, and of several chunks."""
    case = make_kimi_case(sizes, [1, 17, 1, 2, 15, 16, 40], dtype, bound=bound)
    outputs, states = naive_kimi(case)
    got = kimi.kimi_delta_extend(*case)
    tolerance = DELTA_RULE[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), outputs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.states.double(), states, rtol=tolerance, atol=tolerance)
    assert torch.equal(case.states[:8].double(), states[:8])


def test_strong_decay_of_some_elements_makes_no_chunk_overflow() -> None:
    """Elements that hardly decay lie next to them, so that their products must not be lost."""
    case = make_kimi_case(LinearSizes(2, 2, 8, 8), [64, 70], torch.float32)
    case.a[:, ::2].add_(60)
    case.a[:, 1::2].sub_(60)
    case.a_log.fill_(3.0)
    outputs, states = naive_kimi(case)
    tolerance = DELTA_RULE[torch.float32]
    torch.testing.assert_close(
        kimi.kimi_delta_extend(*case).double(), outputs, rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(case.states.double(), states, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_same_token_again_and_again(dtype: torch.dtype) -> None:
    """Equal keys, no decay and beta 1: powers of a chunk's system reach 10^17, its inverse stays small."""
    case = make_delta_case(LinearSizes(1, 1, 16, 16), [128], dtype)
    case.qkv[:, :32] = case.qkv[:1, :32].clone()
    case.a.fill_(-40.0)
    case.b.fill_(40.0)
    outputs, states = naive_delta(case)
    tolerance = DELTA_RULE[dtype]
    torch.testing.assert_close(gated_delta_extend(*case).double(), outputs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.states.double(), states, rtol=tolerance, atol=tolerance)


def test_strong_decay_makes_no_chunk_overflow() -> None:
    """Products of decays within a chunk leave float32's range on either side."""
    case = make_delta_case(LinearSizes(1, 2, 8, 8), [64, 70], torch.float32)
    case.a.add_(30)
    case.a_log.fill_(3.0)
    outputs, states = naive_delta(case)
    tolerance = DELTA_RULE[torch.float32]
    torch.testing.assert_close(gated_delta_extend(*case).double(), outputs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.states.double(), states, rtol=tolerance, atol=tolerance)


def test_heads_that_are_too_large_are_left_to_torch() -> None:
    for sizes, fits in ((LinearSizes(1, 1, 128, 128), True), (LinearSizes(1, 1, 128, 129), False)):
        assert supports_extend(*make_delta_case(sizes, [2], torch.float32)) is fits


@pytest.mark.parametrize(("width", "activates"), [(2, True), (4, True), (3, False)])
def test_convolution_of_short_and_long_requests(width: int, activates: bool) -> None:
    """Fewer tokens than a state remembers, tiles that end with a request and one row after it."""
    lengths = [1, 2, 16, 1, 17, 3]
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(sum(lengths), 150, generator=generator)[:, :130]
    weight = torch.randn(130, width, generator=generator)
    states = torch.randn(2 * len(lengths) + 1, width - 1, 130, generator=generator)
    theirs, ours = states.clone(), states.clone()
    rest = weight, *slots(lengths, "cpu"), sequences_of(lengths, "cpu")
    expected = causal_conv_extend.reference(rows, theirs, *rest, None, activates)
    got = chunks.causal_conv_extend(rows, ours, *rest, None, activates)
    tolerance = OP_ROUNDINGS[torch.float32]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(ours, theirs)
