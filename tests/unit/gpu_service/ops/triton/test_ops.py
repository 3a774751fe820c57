"""Invariant: every Triton kernel of the ops is the torch reference, for odd sizes, strides and no rows.

Here the kernels run in Triton's interpreter; tests/gpu/test_ops_gpu.py runs them compiled.
"""

from __future__ import annotations

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.ops import activation, kv, norm, overflow, rope, sampling
from gpu_service.ops.rope_frequencies import inverse_frequencies
from gpu_service.ops.triton import activation as triton_activation
from gpu_service.ops.triton import kv as triton_kv
from gpu_service.ops.triton import norm as triton_norm
from gpu_service.ops.triton import overflow as triton_overflow
from gpu_service.ops.triton import rope as triton_rope
from gpu_service.ops.triton import sampling as triton_sampling
from tests.tolerances import OP_ROUNDINGS

DTYPES = [torch.float32, torch.float16]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is"),
    # Numpy speaks up where a GPU computes NaN or Inf in silence.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 7), (3, 96), (2, 3, 40)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(len(shape))
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    expected = norm.rms_norm.reference(x, weight, 1e-6)
    torch.testing.assert_close(
        triton_norm.rms_norm(x, weight, 1e-6), expected, rtol=OP_ROUNDINGS[dtype], atol=1e-6
    )


def test_rms_norm_of_heads_inside_wider_rows() -> None:
    """A view of the queries in the fused product: two free strides, neither that of a dense tensor."""
    wide = torch.randn(4, 9, 16)
    view = wide[:, 2:7]
    weight = torch.randn(16)
    expected = norm.rms_norm.reference(view, weight, 1e-5)
    torch.testing.assert_close(triton_norm.rms_norm(view, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)
    transposed = torch.randn(5, 6).t()
    expected = norm.rms_norm.reference(transposed, weight[:5], 1e-5)
    torch.testing.assert_close(
        triton_norm.rms_norm(transposed, weight[:5], 1e-5), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 5), (3, 130)])
def test_fused_add_rms_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """The residual is exactly the rounded sum; its norm is the norm's."""
    torch.manual_seed(shape[1])
    update, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[1]).to(dtype)
    wanted_residual = residual.clone()
    expected = norm.fused_add_rms_norm.reference(update.clone(), wanted_residual, weight, 1e-6)
    output = triton_norm.fused_add_rms_norm(update, residual, weight, 1e-6)
    assert torch.equal(residual, wanted_residual)
    torch.testing.assert_close(output, expected, rtol=OP_ROUNDINGS[dtype], atol=1e-6)


def test_a_float32_update_is_rounded_after_the_addition() -> None:
    """The update is float32 as a mixture of experts sums: there is no kernel of its own for the cast, and no
    second rounding.
    """
    residual, weight = torch.full((2, 8), 1024.0).half(), torch.ones(8).half()
    update = torch.full((2, 8), 1.5001)
    wanted_residual = residual.clone()
    expected = norm.fused_add_rms_norm.reference(update.clone(), wanted_residual, weight, 1e-6)
    output = triton_norm.fused_add_rms_norm(update, residual, weight, 1e-6)
    assert output.dtype == expected.dtype == torch.float16
    assert torch.equal(residual, wanted_residual)
    # 1025.5 lies between 1025 and 1026; rounding 1.5001 to a half first would make it a tie.
    assert residual.unique().tolist() == [1026.0]
    torch.testing.assert_close(output, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rope_table(interleaved: bool, tokens: int) -> None:
    positions = torch.tensor([0, 1, 77, 40_000, 262_143])[:tokens]
    frequencies = inverse_frequencies(1e4, 12, "default", {})
    expected = rope.rope_table.reference(positions, frequencies, torch.float32, interleaved, 0.75)
    table = triton_rope.rope_table(positions, frequencies, torch.float32, interleaved, 0.75)
    torch.testing.assert_close(table.cos, expected.cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(table.sin, expected.sin, rtol=0, atol=1e-6)
    assert table.interleaved == interleaved


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_table_of_pairs_with_positions_of_their_own(interleaved: bool) -> None:
    """mRoPE: a transposed view, as a choice of rows leaves it."""
    positions = torch.randint(0, 262_144, (6, 5), generator=torch.Generator().manual_seed(0)).t()
    frequencies = inverse_frequencies(1e4, 12, "default", {})
    expected = rope.rope_table.reference(positions, frequencies, torch.float32, interleaved)
    table = triton_rope.rope_table(positions, frequencies, torch.float32, interleaved)
    torch.testing.assert_close(table.cos, expected.cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(table.sin, expected.sin, rtol=0, atol=1e-6)


def _table(tokens: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype) -> rope.RopeTable:
    frequencies = inverse_frequencies(1e4, rotary_dim, "default", {})
    return rope.rope_table.reference(torch.arange(tokens) * 37, frequencies, dtype, interleaved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("tokens", "num_heads", "rotary_dim"), [(3, 5, 20), (3, 5, 12), (0, 2, 8)])
def test_apply_rope(
    dtype: torch.dtype, interleaved: bool, tokens: int, num_heads: int, rotary_dim: int
) -> None:
    """Rotation is in place, in a slice of wider rows; elements beyond the rotated ones and other heads are
    untouched.
    """
    torch.manual_seed(tokens)
    wide = torch.randn(tokens, num_heads + 3, 20).to(dtype)
    expected = wide.clone()
    table = _table(tokens, rotary_dim, interleaved, dtype)
    rope.apply_rope.reference(expected[:, 1 : 1 + num_heads], table)
    view = wide[:, 1 : 1 + num_heads]
    assert triton_rope.apply_rope(view, table) is view
    torch.testing.assert_close(wide, expected, rtol=OP_ROUNDINGS[dtype], atol=3 * OP_ROUNDINGS[dtype])
    assert torch.equal(wide[:, -2:], expected[:, -2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "num_q", "num_k", "head_dim", "rotary_dim"),
    [(1, 4, 1, 16, 16), (3, 5, 2, 20, 12), (0, 2, 2, 8, 8)],
)
def test_qk_norm_rope(
    dtype: torch.dtype, interleaved: bool, tokens: int, num_q: int, num_k: int, head_dim: int, rotary_dim: int
) -> None:
    torch.manual_seed(tokens)
    fused = torch.randn(tokens, num_q + 2 * num_k, head_dim).to(dtype) * 2
    heads = fused[:, : num_q + num_k]
    q_weight, k_weight = torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)
    table = _table(tokens, rotary_dim, interleaved, dtype)
    wanted_q, wanted_k = rope.qk_norm_rope.reference(heads, q_weight, k_weight, 1e-6, num_q, table)
    value = fused[:, num_q + num_k :].clone()
    query, key = triton_rope.qk_norm_rope(heads, q_weight, k_weight, 1e-6, num_q, table)
    tolerance = OP_ROUNDINGS[dtype]
    torch.testing.assert_close(query, wanted_q, rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(key, wanted_k, rtol=tolerance, atol=4 * tolerance)
    assert torch.equal(fused[:, num_q + num_k :], value)


@pytest.mark.covering(2)
@pytest.mark.parametrize("storage", [None, torch.float8_e4m3fn], ids=["plain", "fp8"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("tokens", "head_dim", "rotary_dim"), [(1, 16, 16), (3, 20, 12), (35, 8, 8)])
def test_rotate_and_append(
    storage: torch.dtype | None,
    interleaved: bool,
    normed: bool,
    tokens: int,
    head_dim: int,
    rotary_dim: int,
) -> None:
    """Queries, keys and slots are those of the ops one after the other; other slots stay as they were."""
    torch.manual_seed(tokens)
    num_q, num_k = 5, 2
    fused = torch.randn(tokens, num_q + 2 * num_k + 1, head_dim) * 2
    heads, value = fused[:, : num_q + num_k], fused[:, num_q + num_k : -1]
    weights = torch.randn(2, head_dim) if normed else (None, None)
    table, mapping = (
        _table(tokens, rotary_dim, interleaved, torch.float32),
        torch.randperm(2 * tokens)[:tokens],
    )
    slots = torch.randn(2 * tokens, 2 * num_k, head_dim).to(storage or torch.float32)
    wanted_slots, scales = slots.clone(), (0.5, 2.0) if storage else (1.0, 1.0)
    arguments = weights[0], weights[1], 1e-6, num_q, table, value
    wanted = kv.rotate_and_append.reference(heads.clone(), *arguments, slots.clone(), mapping)
    found = triton_rope.rotate_and_append(heads, *arguments, slots, mapping, *scales)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=4e-5)
    triton_kv.append_kv(wanted_slots, found[1], value, mapping, *scales)
    assert torch.equal(slots.view(torch.uint8), wanted_slots.view(torch.uint8))


def test_many_tokens_share_programs_between_heads() -> None:
    """From 64 tokens on a program takes four heads; the last one here gets two, of which one is a key."""
    torch.manual_seed(0)
    heads, weight = torch.randn(64, 6, 8), torch.randn(2, 8)
    table = _table(64, 8, False, torch.float32)
    wanted = rope.qk_norm_rope.reference(heads, weight[0], weight[1], 1e-6, 5, table)
    computed = triton_rope.qk_norm_rope(heads, weight[0], weight[1], 1e-6, 5, table)
    torch.testing.assert_close(computed, wanted, rtol=1e-5, atol=4e-5)
    rotated = rope.apply_rope.reference(heads.clone(), table)
    torch.testing.assert_close(triton_rope.apply_rope(heads, table), rotated, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 6), (1, 14), (3, 2100), (2, 3, 10)])
def test_gated_activations(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(shape[-1])
    gate_up = (torch.randn(shape) * 4).to(dtype)
    expected = getattr(activation, name).reference(gate_up.clone())
    output = getattr(triton_activation, name)(gate_up)
    torch.testing.assert_close(output, expected, rtol=OP_ROUNDINGS[dtype], atol=2 * OP_ROUNDINGS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_append_kv(dtype: torch.dtype, tokens: int) -> None:
    """Exact copies of strided rows; every other slot is untouched."""
    slots = torch.full((9, 6, 5), 7.0).to(dtype)
    expected = slots.clone()
    fused = torch.randn(tokens, 8, 5).to(dtype)
    key, value = fused[:, 1:4], fused[:, 5:8]
    slot_mapping = torch.tensor([7, 2, 0, 5])[:tokens]
    kv.append_kv.reference(expected, key, value, slot_mapping)
    triton_kv.append_kv(slots, key, value, slot_mapping)
    assert torch.equal(slots, expected)


def test_append_kv_in_fp8_is_scaled_and_clipped() -> None:
    """Values need no rounding here: Triton's interpreter loses the carry of one that is rounded up to a power
    of two, which GPUs do not.
    """
    slots = torch.zeros(4, 4, 8).to(torch.float8_e4m3fn)
    expected = slots.clone()
    key, value = (torch.randn(2, 2, 8).to(torch.float8_e4m3fn).float() * factor for factor in (0.5, 16.0))
    key[0, 0, 0], value[1, 1, 1] = 1e6, -1e6
    slot_mapping = torch.tensor([3, 1])
    kv.append_kv.reference(expected, key, value, slot_mapping, 0.5, 2.0)
    triton_kv.append_kv(slots, key, value, slot_mapping, 0.5, 2.0)
    assert torch.equal(slots.float(), expected.float())
    assert slots[3, 0, 0].float() == 448.0
    assert slots[1, 3, 1].float() == -448.0


@pytest.mark.parametrize("shape", [(0, 9), (1, 1), (3, 5000), (2, 8192)])
def test_argmax_and_finite(shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[1])
    logits = torch.randn(shape)
    expected = sampling.argmax_and_finite.reference(logits) if shape[0] else (torch.empty(0).long(), None)
    ids, finite = triton_sampling.argmax_and_finite(logits)
    assert torch.equal(ids, expected[0])
    assert finite.tolist() == [True] * shape[0]
    assert ids.dtype == torch.int64


def test_the_first_layer_that_overflows_is_noted() -> None:
    """The layer is noted for a sum that is infinite only once it is rounded, for NaN, and for either half; a
    later layer changes nothing, and the largest number is no overflow.
    """
    none = overflow.NO_OVERFLOW
    total, update = torch.zeros(7, 70, dtype=torch.float16), torch.zeros(7, 70)
    total[0, 69], update[0, 69] = 65504.0, 15.9
    total[1, 69], update[1, 69] = 65504.0, 16.0
    total[2, 3], update[3, 4], total[4, 5] = -torch.inf, 1e6, torch.nan
    total[5, 0] = torch.inf
    before = [none, none, none, none, none, 2, 9]
    for implementation in (overflow.note_overflow.reference, triton_overflow.note_overflow):
        first = torch.tensor(before, dtype=torch.int32)
        implementation(first, total, update, 5)
        assert first.tolist() == [none, 5, 5, 5, 5, 2, 9]
        implementation(first, total, None, 6)
        assert first.tolist() == [none, 5, 5, 5, 5, 2, 9]
        first.fill_(none)
        implementation(first, total, None, overflow.EMBEDDING)
        assert first.tolist() == [none, none, -1, none, -1, -1, none]
        implementation(first[:0], total[:0], update[:0], 5)


@pytest.mark.parametrize(("rows", "vocabulary", "num_words"), [([], 9, 1), ([0], 1, 1), ([2, 0], 5000, 160)])
def test_mask_logits(rows: list[int], vocabulary: int, num_words: int) -> None:
    """Bits of all values and places; other rows, and allowed logits to the last bit, stay as they are."""
    torch.manual_seed(vocabulary)
    logits = torch.randn(3, vocabulary)
    words = torch.randint(-(2**31), 2**31, (len(rows), num_words), dtype=torch.int32)
    expected = logits.clone()
    for row, mask in zip(rows, words, strict=True):
        allowed = [bool(int(mask[token // 32]) >> token % 32 & 1) for token in range(vocabulary)]
        expected[row, ~torch.tensor(allowed)] = -torch.inf
    for implementation in (sampling.mask_logits.reference, triton_sampling.mask_logits):
        masked = logits.clone()
        implementation(masked, torch.tensor(rows, dtype=torch.int64), words)
        assert torch.equal(masked, expected)


def test_argmax_names_the_lowest_of_equal_logits_and_flags_what_is_not_finite() -> None:
    logits = torch.zeros(6, 4100)
    logits[0, [4097, 9, 4000]] = 3.0
    logits[1, 4099] = float("nan")
    logits[2, 3] = float("inf")
    logits[3, 4098] = float("-inf")
    logits[4] = float("nan")
    logits[5] = float("-inf")
    ids, finite = triton_sampling.argmax_and_finite(logits)
    assert ids.tolist() == [9, 0, 3, 0, 0, 0]
    assert finite.tolist() == [True, False, False, False, False, False]
