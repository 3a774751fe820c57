"""Invariant: linear attention's parts are transformers', however a sequence is cut, and can be replayed."""

from __future__ import annotations

import pytest
import torch

from gpu_service.ops.kimi_delta import chunked_kimi_delta, kimi_delta_rows, kimi_delta_update
from gpu_service.ops.linear_attention import (
    causal_conv,
    causal_conv_update,
    chunked_delta_rule,
    delta_rows,
    gated_delta_update,
)
from gpu_service.ops.norm import gated_rms_norm, sigmoid_gated_rms_norm
from tests.tolerances import OP_FLOAT32

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 6, 12, 10
TOKENS = 150  # two whole chunks and a part


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def _inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    """qkv, a, b, A_log, dt_bias."""
    qkv = _random(tokens, 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM)
    a_log, dt_bias = _random(HEADS, seed=3), _random(HEADS, seed=4)
    return qkv, _random(tokens, HEADS, seed=1), _random(tokens, HEADS, seed=2), a_log, dt_bias


def test_chunks_are_transformers_and_any_cut_gives_the_same() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    qkv, a, b, a_log, dt_bias = _inputs(TOKENS)
    start = _random(HEADS, KEY_DIM, VALUE_DIM)
    rows = delta_rows(qkv, a, b, a_log, dt_bias, KEY_DIM, VALUE_DIM)
    query, key = qkv[:, : 2 * KEY_HEADS * KEY_DIM].chunk(2, dim=1)
    value = qkv[:, 2 * KEY_HEADS * KEY_DIM :]
    expected, end = torch_recurrent_gated_delta_rule(
        query.reshape(1, TOKENS, KEY_HEADS, KEY_DIM),
        key.reshape(1, TOKENS, KEY_HEADS, KEY_DIM),
        value.reshape(1, TOKENS, HEADS, VALUE_DIM),
        g=-a_log.exp() * torch.nn.functional.softplus(a + dt_bias)[None],
        beta=b.sigmoid()[None],
        initial_state=start[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    for chunk in (1, 7, 64, TOKENS):
        got, state = chunked_delta_rule(rows, start, chunk)
        torch.testing.assert_close(got, expected[0], rtol=1e-5, atol=5 * OP_FLOAT32)
        torch.testing.assert_close(state, end[0], rtol=1e-5, atol=5 * OP_FLOAT32)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_decays_of_elements_are_transformers_and_any_cut_gives_the_same(bound: float | None) -> None:
    """Kimi Delta Attention, from a state that is not zero; token by token as well."""
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    tokens, size = 40, HEADS * KEY_DIM
    qkv, a, b = _random(tokens, 2 * size + HEADS * VALUE_DIM), _random(tokens, size), _random(tokens, HEADS)
    a_log, dt_bias, start = _random(HEADS), _random(size), _random(HEADS, KEY_DIM, VALUE_DIM)
    step = (a + dt_bias).view(1, tokens, HEADS, KEY_DIM)
    rate = a_log.exp()[:, None]
    decays = -rate * torch.nn.functional.softplus(step) if bound is None else bound * (rate * step).sigmoid()
    columns = qkv[:, :size], qkv[:, size : 2 * size], qkv[:, 2 * size :]
    query, key, value = (part.reshape(1, tokens, HEADS, -1) for part in columns)
    expected, end = recurrent_kimi_delta_attention(
        query,
        key,
        value,
        g=decays,
        beta=b.sigmoid()[None],
        initial_state=start[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    rows = kimi_delta_rows(qkv, a, b, a_log, dt_bias, bound, KEY_DIM)
    for chunk in (1, 7, 16, tokens):
        got, state = chunked_kimi_delta(rows, start, chunk)
        torch.testing.assert_close(got, expected[0], rtol=1e-5, atol=5 * OP_FLOAT32)
        torch.testing.assert_close(state, end[0], rtol=1e-5, atol=5 * OP_FLOAT32)
    states = torch.stack((start, start))
    for token in range(tokens):
        slots = torch.tensor([token % 2]), torch.tensor([(token + 1) % 2])
        own, gates = slice(token, token + 1), (a_log, dt_bias, bound)
        got = kimi_delta_update(qkv[own], a[own], b[own], *gates, states, *slots)
        torch.testing.assert_close(got[0], expected[0, token], rtol=1e-5, atol=5 * OP_FLOAT32)


def test_strong_decay_makes_no_chunk_overflow() -> None:
    """Products of decays within a chunk leave float32's range on either side."""
    qkv, a, b, _, dt_bias = _inputs(64)
    rows = delta_rows(qkv, a + 30, b, torch.full((HEADS,), 3.0), dt_bias, KEY_DIM, VALUE_DIM)
    assert rows.log_decay.sum(0).max() < -1000
    values, state = chunked_delta_rule(rows, torch.zeros(HEADS, KEY_DIM, VALUE_DIM))
    single, _ = chunked_delta_rule(rows, torch.zeros(HEADS, KEY_DIM, VALUE_DIM), 1)
    assert state.isfinite().all()
    torch.testing.assert_close(values, single, rtol=1e-5, atol=OP_FLOAT32)


def test_updates_token_by_token_are_the_chunks() -> None:
    """Two requests in a batch, between slots of their own; what is read stays, so a step can be replayed."""
    qkv, a, b, a_log, dt_bias = _inputs(6)
    states = torch.zeros(7, HEADS, KEY_DIM, VALUE_DIM)
    rows = delta_rows(qkv, a, b, a_log, dt_bias, KEY_DIM, VALUE_DIM)
    expected = [
        chunked_delta_rule(type(rows)(*(part[begin::2] for part in rows)), states[0])[0] for begin in (0, 1)
    ]
    reads = torch.zeros(2, dtype=torch.int64)
    for step in range(3):
        writes = torch.tensor([2 * step + 1, 2 * step + 2])
        both = slice(2 * step, 2 * step + 2)
        arguments = (qkv[both], a[both], b[both], a_log, dt_bias, states, reads, writes)
        first = gated_delta_update(*arguments)
        states[writes] = torch.nan
        assert torch.equal(gated_delta_update(*arguments), first)
        wanted = torch.stack([expected[0][step], expected[1][step]])
        torch.testing.assert_close(first, wanted, rtol=1e-5, atol=OP_FLOAT32)
        reads = writes


@pytest.mark.parametrize("width", [2, 4])
def test_convolution_is_torch_and_any_cut_gives_the_same(width: int) -> None:
    rows, weight = _random(9, 5), _random(5, width)
    padded = torch.nn.functional.pad(rows.t(), (width - 1, 0))[None]
    expected = torch.nn.functional.silu(torch.conv1d(padded, weight[:, None], groups=5))[0].t()
    for cut in (1, 4, 9):
        recent = torch.zeros(width - 1, 5)
        pieces = []
        for begin in range(0, 9, cut):
            piece, recent = causal_conv(rows[begin : begin + cut], recent, weight)
            pieces.append(piece)
        torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-5, atol=OP_FLOAT32)
    states = torch.zeros(10, width - 1, 5)
    for step in range(9):
        arguments = (rows[step : step + 1], states, weight, torch.tensor([step]), torch.tensor([step + 1]))
        causal_conv_update(*arguments)
        got = causal_conv_update(*arguments)
        torch.testing.assert_close(got[0], expected[step], rtol=1e-5, atol=OP_FLOAT32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_norm_is_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    reference = Qwen3NextRMSNormGated(VALUE_DIM, eps=1e-6).to(dtype)
    torch.nn.init.normal_(reference.weight)
    values, gate = _random(3, HEADS, VALUE_DIM).to(dtype), _random(3, HEADS * VALUE_DIM).to(dtype)
    with torch.no_grad():
        expected = reference(values, gate.view_as(values)).flatten(1)
        got = gated_rms_norm(values, gate, reference.weight, 1e-6)
    torch.testing.assert_close(got, expected, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_with_a_sigmoid_gate_is_transformers(dtype: torch.dtype) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated

    reference = KimiLinearRMSNormGated(VALUE_DIM, eps=1e-6).to(dtype)
    torch.nn.init.normal_(reference.weight)
    values, gate = _random(3, HEADS, VALUE_DIM).to(dtype), _random(3, HEADS * VALUE_DIM).to(dtype)
    with torch.no_grad():
        expected = reference(values, gate.view_as(values)).flatten(1)
        got = sigmoid_gated_rms_norm(values, gate, reference.weight, 1e-6)
    # Rounded once, in the last place at most.
    torch.testing.assert_close(got, expected, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
