"""Invariant: linear attention's kernels are their references, in slots that a tensor names.

In Triton's interpreter; sizes that fill no block, several blocks of columns, more value heads than key heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.ops.activation import clamped_swiglu_and_mul
from gpu_service.ops.block_attention import block_scores, mean_block_scores
from gpu_service.ops.gated_streams import (
    gate_values,
    inject_update,
    mix_gated_streams,
    norm_streams,
)
from gpu_service.ops.hyper_connections import collapse_streams, mix_streams
from gpu_service.ops.kimi_delta import kimi_delta_extend, kimi_delta_update
from gpu_service.ops.kv import mean_index_keys, pool_index_keys
from gpu_service.ops.linear_attention import (
    causal_conv_extend,
    causal_conv_update,
    gated_delta_extend,
    gated_delta_update,
)
from gpu_service.ops.ngrams import ngram_rows
from gpu_service.ops.norm import gated_group_rms_norm, gated_rms_norm, sigmoid_gated_rms_norm
from gpu_service.ops.registry import Op
from gpu_service.ops.selective_scan import selective_scan_extend, selective_scan_update
from gpu_service.ops.state_space import state_space_extend, state_space_update
from gpu_service.ops.triton import activation, block_attention, kv, ngrams, selective_scan, state_space
from gpu_service.ops.triton import gated_streams as gated
from gpu_service.ops.triton import hyper_connections as hyper
from gpu_service.ops.triton import kimi_delta as kimi
from gpu_service.ops.triton import linear_attention as kernels
from gpu_service.ops.triton import linear_attention_chunks as chunks
from tests.helpers.ops import assert_same_op, example

DTYPES = [torch.float32, torch.float16]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        (causal_conv_update, kernels.causal_conv_update),
        (causal_conv_extend, chunks.causal_conv_extend),
        (gated_delta_update, kernels.gated_delta_update),
        (gated_delta_extend, chunks.gated_delta_extend),
        (collapse_streams, hyper.collapse_streams),
        (mix_streams, hyper.mix_streams),
        (pool_index_keys, kv.pool_index_keys),
        (block_scores, block_attention.block_scores),
        (mean_block_scores, block_attention.mean_block_scores),
        (mean_index_keys, kv.mean_index_keys),
        (norm_streams, gated.norm_streams),
        (mix_gated_streams, gated.mix_gated_streams),
        (inject_update, gated.inject_update),
        (gate_values, gated.gate_values),
        (ngram_rows, ngrams.ngram_rows),
        (clamped_swiglu_and_mul, activation.clamped_swiglu_and_mul),
        (kimi_delta_update, kimi.kimi_delta_update),
        (kimi_delta_extend, kimi.kimi_delta_extend),
        (gated_rms_norm, kernels.gated_rms_norm),
        (selective_scan_update, selective_scan.selective_scan_update),
        (selective_scan_extend, selective_scan.selective_scan_extend),
        (state_space_update, state_space.state_space_update),
        (state_space_extend, state_space.state_space_extend),
        (gated_group_rms_norm, state_space.gated_group_rms_norm),
        (sigmoid_gated_rms_norm, kernels.sigmoid_gated_rms_norm),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_kernels_are_their_references(op: Op[..., Any], kernel: Any, dtype: torch.dtype) -> None:
    """What the states hold afterwards is compared as well."""
    assert_same_op(op, kernel, example(op, torch.device("cpu"), dtype), dtype)


@pytest.mark.parametrize("a", [-40.0, -12.0, 0.0, 30.0])
def test_decays_near_none_and_near_all_are_exact(a: float) -> None:
    """Where exp(a) is lost next to 1, and where softplus(a) is a."""
    qkv, _, b, a_log, dt_bias, states, reads, writes = example(
        gated_delta_update, torch.device("cpu"), torch.float32
    )()
    # Of the read slots only what decays: without a key, nothing is known or written.
    qkv[:, 32:64] = 0
    column = torch.full_like(b, a)
    expected, ours = states.clone(), states.clone()
    a_log, dt_bias = a_log * 0 + 2.7, dt_bias * 0
    gated_delta_update.reference(qkv, column, b, a_log, dt_bias, expected, reads, writes)
    kernels.gated_delta_update(qkv, column, b, a_log, dt_bias, ours, reads, writes)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


def test_no_request_is_no_launch() -> None:
    none, heads = torch.empty(0, dtype=torch.int64), torch.zeros(4)
    qkv, gates, states = torch.empty(0, 64), torch.empty(0, 4), torch.zeros(2, 4, 8, 8)
    got = kernels.gated_delta_update(qkv, gates, gates, heads, heads, states, none, none)
    assert got.shape == (0, 4, 8)
