"""Invariant: norms whose checkpoints hold `weight - 1` are transformers', also where the weight is small."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.layers.norm import OnePlusWeightRMSNorm, make_norm
from gpu_service.ops import norm, rope
from gpu_service.ops.rope_frequencies import inverse_frequencies
from gpu_service.ops.triton import norm as triton_norm
from gpu_service.ops.triton import rope as triton_rope
from moebius.models.layers.norms import RMSNorm
from tests.helpers.layer_values import declared
from tests.tolerances import OP_ROUNDINGS

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loaded_norm_is_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    reference = Qwen3NextRMSNorm(24, eps=1e-6).to(dtype)
    # Near zero, where 1 + weight has no bfloat16 of its own.
    nn.init.normal_(reference.weight, std=0.003)
    value = RMSNorm(1e-6, one_plus_weight=True)
    ours = make_norm(value, declared(value.weights("norm", 24), dtype).under("norm"))
    assert isinstance(ours, OnePlusWeightRMSNorm)
    assert ours.weight.dtype == torch.float32
    ours.weight = nn.Parameter(reference.weight.detach().float(), requires_grad=False)
    ours.pack()
    hidden_states = (torch.randn(5, 3, 24) * 7).to(dtype)
    with torch.no_grad():
        expected, got = reference(hidden_states), ours(hidden_states)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)


@interpreted
def test_triton_norms_take_a_float32_weight_next_to_halves() -> None:
    weight = 1 + 0.2 * torch.randn(40)
    rows, residual = torch.randn(3, 40).half(), torch.randn(3, 40).half()
    tolerance = OP_ROUNDINGS[torch.float16]
    expected = norm.rms_norm.reference(rows, weight, 1e-6)
    torch.testing.assert_close(triton_norm.rms_norm(rows, weight, 1e-6), expected, rtol=tolerance, atol=1e-6)
    expected = norm.fused_add_rms_norm.reference(rows.clone(), residual.clone(), weight, 1e-6)
    got = triton_norm.fused_add_rms_norm(rows, residual, weight, 1e-6)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=1e-6)


@interpreted
def test_the_fused_norm_and_rotation_takes_one_too() -> None:
    heads = torch.randn(3, 5, 16).half()
    table = rope.rope_table(torch.arange(3), inverse_frequencies(1e4, 8, "default", {}), torch.half, False)
    queries, keys = 1 + 0.2 * torch.randn(2, 16)
    expected = rope.qk_norm_rope.reference(heads.clone(), queries, keys, 1e-6, 3, table)
    got = triton_rope.qk_norm_rope(heads, queries, keys, 1e-6, 3, table)
    tolerance = OP_ROUNDINGS[torch.float16]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=4 * tolerance)
