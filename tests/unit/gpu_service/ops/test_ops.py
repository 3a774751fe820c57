"""Invariant: every op's torch reference is the formula it names, and the registry picks by device."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from gpu_service.ops.activation import silu_and_mul
from gpu_service.ops.kv import append_kv
from gpu_service.ops.linear import can_pack, linear, pack_weight
from gpu_service.ops.norm import rms_norm
from gpu_service.ops.registry import Op
from gpu_service.ops.rope import apply_rope, rope_table
from gpu_service.ops.rope_frequencies import inverse_frequencies
from tests.tolerances import OP_FLOAT32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    reference = Qwen3MoeRMSNorm(24, eps=1e-6).to(dtype)
    torch.nn.init.normal_(reference.weight)
    x = (torch.randn(5, 3, 24) * 7).to(dtype)
    with torch.no_grad():
        expected = reference(x)
    tolerance = 1e-5 if dtype == torch.float32 else 0.13  # one unit in the last place at 16
    torch.testing.assert_close(rms_norm(x, reference.weight.detach(), 1e-6), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_half_split_rope_is_transformers(rotary_dim: int) -> None:
    from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

    positions = torch.tensor([0, 1, 77, 5000])
    heads = torch.randn(4, 3, 16)
    frequencies = inverse_frequencies(1e4, rotary_dim, "default", {})
    angles = torch.cat([positions[:, None] * frequencies] * 2, -1)
    q = heads.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(q, q, angles.cos()[None], angles.sin()[None])
    rotated = apply_rope(heads.clone(), rope_table(positions, frequencies, torch.float32, False))
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), rtol=0, atol=OP_FLOAT32)


def test_interleaved_rope_is_a_complex_product() -> None:
    positions = torch.tensor([0, 3, 900])
    heads = torch.randn(3, 2, 12)
    frequencies = inverse_frequencies(1e4, 8, "default", {})
    turns = torch.polar(torch.ones(3, 1, 4), (positions[:, None] * frequencies)[:, None])
    pairs = torch.view_as_complex(heads[..., :8].reshape(3, 2, 4, 2)) * turns
    expected = torch.cat((torch.view_as_real(pairs).flatten(-2), heads[..., 8:]), -1)
    rotated = apply_rope(heads.clone(), rope_table(positions, frequencies, torch.float32, True))
    torch.testing.assert_close(rotated, expected, rtol=0, atol=OP_FLOAT32)


def test_silu_and_mul_takes_the_gate_first() -> None:
    gate, up = torch.randn(4, 5), torch.randn(4, 5)
    output = silu_and_mul(torch.cat((gate, up), -1))
    torch.testing.assert_close(output, gate * gate.sigmoid() * up, rtol=0, atol=OP_FLOAT32)


def test_append_kv_writes_the_named_slots_only() -> None:
    slots = torch.zeros(10, 4, 3)
    key, value = torch.randn(2, 2, 3), torch.randn(2, 2, 3)
    append_kv(slots, key, value, torch.tensor([7, 2]))
    assert torch.equal(slots[[7, 2]], torch.cat((key, value), 1))
    assert not slots[[0, 1, 3, 4, 5, 6, 8, 9]].any()


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_weight_gives_the_plain_product(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(40, 24), torch.randn(rows, 24)
    offset = torch.randn(40) if bias else None
    if not can_pack(weight):
        pytest.skip("this torch has no packed product for CPUs")
    packed = pack_weight(weight)
    assert torch.equal(packed.to_dense(), weight)
    expected = torch.nn.functional.linear(x.double(), weight.double()) + (0 if offset is None else offset)
    torch.testing.assert_close(linear(x, packed, offset), expected.float(), rtol=0, atol=2e-5)
    torch.testing.assert_close(linear(x, weight, offset), expected.float(), rtol=0, atol=2e-5)


WITHOUT_AVX512 = """
import torch
from gpu_service.ops.linear import can_pack, fp8_linear, linear, multiplies_bfloat16, pack_weight
torch.manual_seed(1)
weight, offset = torch.randn(40, 24).bfloat16(), torch.randn(40).bfloat16()
assert not multiplies_bfloat16()
packed = pack_weight(weight) if can_pack(weight) else weight
for rows in (1, 2, 7, 130):
    x = torch.randn(rows, 24).bfloat16()
    exact = (x.double() @ weight.double().T + offset.double()).bfloat16()
    for held in (weight, packed):
        found = linear(x, held, offset)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, exact, rtol=2**-8, atol=1e-6)
"""


def test_a_cpu_without_avx512_multiplies_bfloat16_weights() -> None:
    """oneDNN is asked what the CPU has: packed or plain, products are the exact values, rounded once."""
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, "-c", WITHOUT_AVX512], env=os.environ | limits, check=True, timeout=120)


def test_packed_products_meet_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps a compiled kernel for every number of rows: steps of any size need 31 of them, not 512."""
    weight = torch.randn(24, 16)
    if not can_pack(weight):
        pytest.skip("this torch packs no weights")
    packed, seen = pack_weight(weight), set()
    product = torch.ops.mkldnn._linear_pointwise

    def counted(hidden_states: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.add(hidden_states.shape[0])
        return product(hidden_states, *rest)

    monkeypatch.setattr("gpu_service.ops.linear._onednn", SimpleNamespace(_linear_pointwise=counted))
    for rows in range(513):
        hidden_states = torch.randn(rows, 16)
        output = linear(hidden_states, packed, None)
        torch.testing.assert_close(output, hidden_states @ weight.T, rtol=1e-4, atol=1e-4)
    assert len(seen - {0}) == 31
    assert set(range(9)) <= seen


def test_an_op_runs_what_its_device_uses() -> None:
    @Op
    def double(x: torch.Tensor) -> str:
        return "reference"

    assert double(torch.zeros(1)) == "reference"
    double.use("meta", lambda x: "fast")
    assert double(torch.zeros(1)) == "reference"
    assert double(torch.zeros(1, device="meta")) == "fast"
    double.use("meta", None)
    assert double(torch.zeros(1, device="meta")) == "reference"
