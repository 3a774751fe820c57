"""FlashInfer's functions as its documentation states them, in torch: the adapters' logic runs on a CPU.

Signatures are those of 0.6.13, so that an argument of another name or kind fails here already. What the
real library refuses (dtypes, sizes, strides) is refused too.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional

_HALVES = (torch.float16, torch.bfloat16)


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    assert input.dtype in _HALVES
    assert input.dim() in (2, 3)
    assert input.stride(-1) == 1
    out = torch.empty_like(input) if out is None else out
    scale = (input.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return out.copy_(input.float() * scale * weight.float())


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float())


def silu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    assert input.is_contiguous()
    gate, up = input.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(input.dtype)


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    assert cos_sin_cache.dtype == torch.float32
    assert cos_sin_cache.is_contiguous()
    cos, sin = cos_sin_cache[positions.long()].unsqueeze(1).chunk(2, -1)
    num_pairs = cos.shape[-1]
    for heads in (query, key):
        heads = heads.view(heads.shape[0], -1, head_size)
        rotated = heads[..., : 2 * num_pairs]
        first, second = (
            (rotated[..., :num_pairs], rotated[..., num_pairs:])
            if is_neox
            else (rotated[..., ::2], rotated[..., 1::2])
        )
        a, b = first.float(), second.float()
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    keys, values = paged_kv_cache
    assert keys.stride() == values.stride()
    assert kv_indptr.shape[0] == kv_last_page_len.shape[0] + 1
    page_size = keys.shape[1]
    for row, (request, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = kv_indices[kv_indptr[request] + position // page_size]
        keys[page, position % page_size] = append_key[row]
        values[page, position % page_size] = append_value[row]


def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    assert isinstance(top_k, torch.Tensor)
    ordered = probs.sort(-1, descending=True).values
    pivot = ordered.gather(1, top_k.long().clamp(max=probs.shape[1]).unsqueeze(1) - 1)
    kept = torch.where(probs >= pivot, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True).clamp_min(1e-8)


def top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor | float, is_deterministic: bool = False
) -> torch.Tensor:
    assert isinstance(top_p, torch.Tensor)
    ordered = probs.sort(-1, descending=True).values.double()
    reached = ordered.cumsum(-1) >= top_p.double().unsqueeze(1) * ordered.sum(-1, keepdim=True)
    pivot = ordered.gather(1, reached.int().argmax(-1, keepdim=True))
    kept = torch.where(probs >= pivot, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True).clamp_min(1e-8)


class FakeSpec:
    """A module that could be compiled; notes in BUILT that it was."""

    def __init__(self, name: str) -> None:
        self.name = name

    is_aot = False

    def build(self, verbose: bool, need_lock: bool = True) -> None:
        BUILT.append(self.name)


def gen_norm_module() -> FakeSpec:
    return FakeSpec("norm")


def gen_sampling_module() -> FakeSpec:
    return FakeSpec("sampling")


def gen_act_and_mul_module(act_func_name: str) -> FakeSpec:
    return FakeSpec(act_func_name)


def gen_batch_prefill_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    use_fp16_qk_reduction: bool,
) -> FakeSpec:
    assert dtype_q == dtype_o
    assert [use_sliding_window, use_logits_soft_cap, use_fp16_qk_reduction, pos_encoding_mode] == [0] * 4
    return FakeSpec(f"prefill {backend} {dtype_kv} {dtype_idx} {head_dim_qk} {head_dim_vo}")


def gen_batch_decode_module(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
) -> FakeSpec:
    assert dtype_q == dtype_o
    assert [use_sliding_window, use_logits_soft_cap, pos_encoding_mode] == [0] * 3
    return FakeSpec(f"decode {dtype_kv} {dtype_idx} {head_dim_qk} {head_dim_vo}")


BUILT: list[str] = []


_MODULES = {
    "norm": (rmsnorm, fused_add_rmsnorm),
    "activation": (silu_and_mul,),
    "rope": (apply_rope_with_cos_sin_cache_inplace,),
    "page": (append_paged_kv_cache,),
    "sampling": (top_k_renorm_probs, top_p_renorm_probs),
    "jit": (gen_batch_prefill_module, gen_batch_decode_module),
    "jit.norm": (gen_norm_module,),
    "jit.activation": (gen_act_and_mul_module,),
    "jit.sampling": (gen_sampling_module,),
}


def install_fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import flashinfer` gives this until the test ends; adapters imported with it are forgotten then."""
    BUILT.clear()
    package = ModuleType("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    for name, functions in _MODULES.items():
        module = ModuleType(f"flashinfer.{name}")
        for function in functions:
            setattr(module, function.__name__, function)
        setattr(package, name, module)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    adapter = "gpu_service.ops.flashinfer"
    monkeypatch.delitem(sys.modules, adapter, raising=False)
    # So that undoing removes what the test imports.
    monkeypatch.setitem(sys.modules, adapter, ModuleType("unset"))
    del sys.modules[adapter]
