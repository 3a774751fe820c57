"""Invariant: the CPU's kernels of norms, rotation, gating, routing and attention are the torch references, at
every instruction-set level, for any number of rows and threads.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_service.ops import activation, kv, norm, router
from gpu_service.ops.backends import install, uninstall
from gpu_service.ops.host_kernels import HostKernels, implementations
from gpu_service.ops.rope import apply_rope, rope_table
from moebius import _kernels
from moebius.kernels import supported_isas
from moebius.models.layers.router import RouterConfig
from tests.tolerances import OP_FLOAT32, OP_ROUNDINGS

# Higher levels add products of matrices only.
OWN = ("scalar", "avx2", "avx512")
LEVELS = pytest.mark.parametrize("isa", [isa for isa in supported_isas() if isa in OWN])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SIZES = (16, 72, 100)


def kernels(isa: str, threads: int = 2) -> HostKernels:
    return HostKernels(_kernels.DenseThreads(threads, isa))


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=OP_ROUNDINGS[expected.dtype], atol=1e-6)


@LEVELS
@DTYPES
def test_norms(isa: str, dtype: torch.dtype) -> None:
    """Alone and of a sum; the update and the weight may be wider than the stream."""
    own = kernels(isa)
    for size in SIZES:
        for rows in (1, 7):
            residual, update = torch.randn(rows, size).to(dtype), torch.randn(rows, size)
            columns = torch.randn(rows, size + 8).to(dtype)[:, 4 : 4 + size]
            for weight in (torch.rand(size) + 0.5, (torch.rand(size) + 0.5).to(dtype)):
                assert_same(
                    own.rms_norm(residual, weight, 1e-5), norm.rms_norm.reference(residual, weight, 1e-5)
                )
                assert_same(
                    own.rms_norm(columns, weight, 1e-5), norm.rms_norm.reference(columns, weight, 1e-5)
                )
                for given in (update, update.to(dtype)):
                    ours, theirs = residual.clone(), residual.clone()
                    found = own.fused_add_rms_norm(given.clone(), ours, weight, 1e-5)
                    expected = norm.fused_add_rms_norm.reference(given.clone(), theirs, weight, 1e-5)
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
                    assert_same(found, expected)


@LEVELS
@DTYPES
def test_gating(isa: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        gate_up = (torch.randn(5, 2 * size) * 6).to(dtype)
        gate, up = gate_up.double().chunk(2, dim=-1)
        found = kernels(isa).silu_and_mul(gate_up)
        assert found.dtype == dtype
        expected = gate / (1 + (-gate).exp()) * up
        torch.testing.assert_close(found.double(), expected, rtol=OP_ROUNDINGS[dtype], atol=1e-6)
        assert activation.silu_and_mul.reference(gate_up.clone()).shape == found.shape


@LEVELS
@DTYPES
def test_activation(isa: str, dtype: torch.dtype) -> None:
    """Rows may be columns of a wider product."""
    for size in SIZES:
        values = (torch.randn(5, size + 3) * 6).to(dtype)[:, 3:]
        assert_same(kernels(isa).silu(values), activation.silu.reference(values))


@LEVELS
@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_and_storing(isa: str, dtype: torch.dtype, interleaved: bool) -> None:
    """Whole heads and parts of them, with norms and without; other slots keep what they have."""
    for head_dim, rotary_dim in ((32, 32), (48, 24), (16, 6)):
        frequencies = torch.rand(rotary_dim // 2)
        table = rope_table.reference(torch.arange(3, 8), frequencies, dtype, interleaved)
        projected = torch.randn(5, 8 * head_dim + 4).to(dtype)
        value = projected[:, 6 * head_dim : 8 * head_dim].view(5, 2, head_dim)
        weights = (torch.rand(2, head_dim) + 0.5).to(dtype)
        slots = torch.randn(9, 4, head_dim).to(dtype)
        mapping = torch.tensor([8, 2, 5, 1, 7])
        for q_weight, k_weight in ((None, None), (weights[0], weights[1])):
            results = []
            for function in (kernels(isa).rotate_and_append, kv.rotate_and_append.reference):
                heads = projected.clone()[:, : 6 * head_dim].view(5, 6, head_dim)
                cache = slots.clone()
                query, key = function(heads, q_weight, k_weight, 1e-6, 4, table, value, cache, mapping)
                results.append((query, key, cache))
            for ours, theirs in zip(*results, strict=True):
                allowed = 1e-5 if dtype == torch.float32 else 3e-2
                torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed)
            kept = [slot for slot in range(9) if slot not in mapping.tolist()]
            assert torch.equal(results[0][2][kept], slots[kept])


@LEVELS
@DTYPES
def test_storing_in_8_bits(isa: str, dtype: torch.dtype) -> None:
    """Every number that bfloat16 has, and float32 on both sides of every step of e4m3, to the bit; NaN stays
    NaN, infinity becomes it, and what is too large the largest number.
    """
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).to(dtype)
    if dtype == torch.float32:
        halves = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        middles = (halves[1:] + halves[:-1]) / 2
        near = torch.cat((middles, middles.nextafter(halves[1:]), middles.nextafter(halves[:-1])))
        every = torch.cat((every, near, -near, torch.zeros(-6 * near.numel() // 3 % 64)))
    rows = every[: every.numel() // 64 * 64].view(-1, 2, 32)
    table = rope_table.reference(torch.zeros(len(rows), dtype=torch.int64), torch.zeros(0), dtype, False)
    for key_scale, value_scale in ((1.0, 1.0), (0.7, 3.0)):
        stored = []
        for function in (kernels(isa).rotate_and_append, kv.rotate_and_append.reference):
            slots = torch.zeros(len(rows), 4, 32, dtype=torch.float8_e4m3fn)
            scales, mapping = (key_scale, value_scale), torch.arange(len(rows)).flip(0)
            function(rows.clone(), None, None, 1e-6, 0, table, rows, slots, mapping, *scales)
            stored.append(slots)
        ours, theirs = (slots.float() for slots in stored)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@LEVELS
@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_alone(isa: str, dtype: torch.dtype, interleaved: bool) -> None:
    """Heads are columns of a wider product, which keeps the others."""
    for head_dim, rotary_dim in ((32, 32), (48, 24)):
        table = rope_table.reference(torch.arange(3, 8), torch.rand(rotary_dim // 2), dtype, interleaved)
        ours = torch.randn(5, 4 * head_dim).to(dtype)
        theirs = ours.clone()
        for function, projected in ((kernels(isa).apply_rope, ours), (apply_rope.reference, theirs)):
            heads = projected[:, : 3 * head_dim].view(5, 3, head_dim)
            assert function(heads, table) is heads
        allowed = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed)


ROUTERS = {
    "softmax": RouterConfig(24, 3, "softmax"),
    "renormalised": RouterConfig(24, 4, "softmax", post="renormalize"),
    "sigmoid": RouterConfig(24, 3, "sigmoid", True, 4, 2, post="renormalize", scale=2.5),
    "best of groups": RouterConfig(24, 3, "softmax", False, 6, 3, "max"),
    "chosen first": RouterConfig(24, 4, "none", post="softmax"),
    "sigmoid after": RouterConfig(24, 1, "none", post="sigmoid"),
    "soft cap": RouterConfig(24, 3, "softmax", logit_softcap=2.0),
    "square root": RouterConfig(24, 3, "sqrt_softplus", post="renormalize", renormalize_epsilon=1e-20),
}


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_routing(name: str) -> None:
    """The same experts with the same weights; rows of padding choose none."""
    config, logits = ROUTERS[name], torch.randn(37, 24) * 2
    bias = torch.randn(24) if config.correction_bias else None
    valid = torch.arange(37) % 5 != 0
    for rows in (None, valid):
        found = kernels("auto").route(logits, bias, config, rows)
        expected = router.route.reference(logits, bias, config, rows)
        order = [ids.argsort(dim=1, stable=True) for _, ids in (found, expected)]
        ours, theirs = (
            (weights.gather(1, by), ids.gather(1, by))
            for (weights, ids), by in zip((found, expected), order, strict=True)
        )
        assert torch.equal(ours[1], theirs[1])
        chosen = ours[1] >= 0
        torch.testing.assert_close(ours[0][chosen], theirs[0][chosen], rtol=1e-5, atol=OP_FLOAT32)


def test_what_a_kernel_does_not_know_is_left_to_the_reference() -> None:
    """Float16, a strided sum that is to be changed, and a score that needs more than a choice of the best."""
    found = implementations(_kernels.DenseThreads(1))
    weight, strided = torch.ones(32), torch.zeros(2, 64)[:, ::2]
    assert not found["rms_norm"].supports(torch.zeros(2, 32).half(), weight, 1e-5)
    assert not found["fused_add_rms_norm"].supports(torch.zeros(2, 32), strided, weight, 1e-5)
    mixed = replace(ROUTERS["softmax"], score="sparse_mixer")
    assert not found["route"].supports(torch.zeros(2, 24), None, mixed)


def test_the_setting_chooses_between_kernels_and_references() -> None:
    """`attention_backend: torch` is the reference on a CPU, too."""
    try:
        assert install(torch.device("cpu"), "auto")["rms_norm"] == "cpu > torch"
        assert install(torch.device("cpu"), "torch") == {}
    finally:
        uninstall("cpu")


@LEVELS
@DTYPES
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_attention(isa: str, dtype: torch.dtype, in_8_bits: bool) -> None:
    """Lengths around the blocks and parts that sequences are cut into; heads in groups of any size; what is
    stored in 8 bits counts as it is dequantised.
    """
    key_scale, value_scale = (0.3, 1.7) if in_8_bits else (1.0, 1.0)
    own = _kernels.DenseThreads(3, isa)
    for kv_heads, group, head_dim in ((2, 3, 16), (1, 9, 80), (3, 4, 64)):
        pages = torch.randn(90, 16, 2 * kv_heads, head_dim).to(torch.float8_e4m3fn if in_8_bits else dtype)
        table = (torch.randperm(89)[:86].view(2, 43) + 1).int().contiguous()
        rows = [(0, 0, 1), (1, 0, 64), (0, 0, 65), (1, 7, 513), (0, 100, 612), (1, 0, 688)]
        requests, begins, ends = torch.tensor(rows, dtype=torch.int32).t().contiguous()
        query = torch.randn(len(rows), kv_heads * group, head_dim).to(dtype)
        sinks = torch.randn(kv_heads * group)
        output = torch.empty_like(query)
        own.attend(
            *(dtype == torch.bfloat16, query.data_ptr(), query.stride(0), pages.data_ptr(), 16),
            *(table.data_ptr(), 43, requests.data_ptr(), begins.data_ptr(), ends.data_ptr()),
            *(sinks.data_ptr(), output.data_ptr(), 0.3, len(rows), kv_heads * group, kv_heads, head_dim),
            *(False, in_8_bits, key_scale, value_scale),
        )
        for row, (request, begin, end) in enumerate(rows):
            seen = pages.double()[table[request].long()].flatten(0, 1)[begin:end]
            seen[:, :kv_heads] *= key_scale
            seen[:, kv_heads:] *= value_scale
            key, value = (part.repeat_interleave(group, dim=1) for part in seen.chunk(2, dim=1))
            scores = torch.einsum("hd,thd->ht", query[row].double(), key) * 0.3
            weights = torch.cat((scores, sinks.double()[:, None]), dim=1).softmax(1)[:, :-1]
            expected = torch.einsum("ht,thd->hd", weights, value)
            allowed = 2e-5 if dtype == torch.float32 else 8e-3 * value_scale
            torch.testing.assert_close(output[row].double(), expected, rtol=0, atol=allowed)
