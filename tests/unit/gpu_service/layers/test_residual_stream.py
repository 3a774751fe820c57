"""Invariant: a residual stream is the running sum, whenever it is read and however its additions wait."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpu_service.layers.decoder import ResidualStream
from gpu_service.layers.norm import RMSNorm
from moebius.models.layers.weights import rms_norm
from tests.helpers.layer_values import declared


def _norm(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(declared(rms_norm("norm", size), dtype).under("norm"), 1e-6)
    norm.weight = nn.Parameter(torch.randn(size).to(dtype), requires_grad=False)
    return norm


@settings(deadline=None)
@given(reads=st.lists(st.sampled_from(["add", "norm", "sum"]), max_size=12), seed=st.integers(0, 99))
def test_any_order_of_additions_and_readings_is_the_plain_sum(reads: list[str], seed: int) -> None:
    """Bit for bit: on a CPU the fused seam is an addition and a norm."""
    torch.manual_seed(seed)
    norm, total = _norm(6, torch.float32), torch.randn(3, 6)
    stream, expected = ResidualStream(total.clone()), total
    for read in reads:
        if read == "add":
            update = torch.randn(3, 6)
            stream.add(update.clone())
            expected = expected + update
        elif read == "norm":
            assert torch.equal(stream.normed(norm), norm(expected))
        else:
            assert torch.equal(stream.sum(), expected)
    assert torch.equal(stream.sum(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_updates_keep_the_streams_dtype(dtype: torch.dtype) -> None:
    norm, total, update = _norm(8, dtype), torch.randn(2, 8).to(dtype), torch.randn(2, 8)
    expected = (total.float() + update).to(dtype)
    stream = ResidualStream(total.clone())
    stream.add(update)
    normed = stream.normed(norm)
    assert normed.dtype == dtype
    assert torch.equal(normed, norm(expected))
    stream.add(update)
    assert torch.equal(stream.sum(), (expected.float() + update).to(dtype))


def test_what_was_normed_is_not_changed_by_later_additions() -> None:
    """A layer keeps its normed input while others add to the stream."""
    norm = _norm(4, torch.float32)
    stream = ResidualStream(torch.randn(2, 4))
    first = stream.normed(norm)
    kept = first.clone()
    stream.add(torch.randn(2, 4))
    second = stream.normed(norm)
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)
