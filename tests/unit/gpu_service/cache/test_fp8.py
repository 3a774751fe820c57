"""Invariant: 8-bit keys and values cost half the memory and a bounded error, and never become NaN.

e4m3 keeps 4 significant bits: half a unit of the last is 1/16 of a value, and what is below 2^-6 keeps
steps of 2^-9.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_service.attention.registry import make_attention
from gpu_service.attention.torch_reference import TorchReferenceAttention
from gpu_service.cache.fp8 import E4M3, E4M3_MAX, quantise_e4m3
from gpu_service.cache.kv_cache import KVCache, make_cache, page_bytes
from gpu_service.device import TORCH_DTYPES
from tests.helpers.attention_cases import LAYER, MIXTURES, Geometry, make_case, naive, run
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import TINY_MODELS, attending_to_all, write_tiny_model
from tests.parity.test_tiny_models_engine import cached
from tests.tolerances import ATTENTION_FP8, LOGITS_FLOAT32_SELF, LOGITS_FP8_KV_KL

GEOMETRY = Geometry(storage_dtype=E4M3)


@pytest.mark.parametrize("scale", [1.0, 0.25, 8.0])
def test_conversion_is_within_half_a_step_and_saturates(scale: float) -> None:
    values = torch.cat((torch.logspace(-5, 3, 999), -torch.logspace(-5, 3, 999), torch.zeros(1)))
    back = quantise_e4m3(values, scale).float() * scale
    largest = E4M3_MAX * scale
    inside = values.abs() <= largest
    error = (back - values).abs()[inside]
    assert (error <= torch.maximum(values.abs()[inside] / 16, torch.tensor(2.0**-10 * scale)) * 1.0001).all()
    assert (back[~inside].abs() == largest).all()
    assert quantise_e4m3(torch.tensor([float("nan")]), scale).float().isnan().all(), "NaN must stay visible"
    infinite = quantise_e4m3(torch.tensor([float("inf"), float("-inf")]), scale).float()
    assert infinite.isnan().all()


def test_the_cache_stores_what_the_conversion_gives() -> None:
    case = make_case(GEOMETRY, [(3, 2)])
    case.cache.key_scales[LAYER], case.cache.value_scales[LAYER] = 0.5, 2.0
    slots = case.inputs.slot_mapping
    case.cache.append(LAYER, case.key, case.value * 1000, slots)
    stored = case.cache.keys(LAYER).flatten(0, 1).view(torch.uint8)[slots]
    assert torch.equal(stored, quantise_e4m3(case.key, 0.5).view(torch.uint8))
    values = case.cache.values(LAYER).float()
    assert values.isfinite().all()
    assert values.abs().max() == E4M3_MAX


@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_attention_reads_what_was_stored(name: str) -> None:
    """Against the stored values attention is exact, scales included; against the originals it is bounded."""
    case, exact = make_case(GEOMETRY, MIXTURES[name]), make_case(Geometry(), MIXTURES[name])
    case.cache.key_scales[LAYER], case.cache.value_scales[LAYER] = 0.5, 2.0
    case.cache.append(LAYER, case.key, case.value, case.inputs.slot_mapping)
    expected = naive(case)
    output = run(case, make_attention(case.geometry.config().layers, case.cache, "cpu"))
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=LOGITS_FLOAT32_SELF)
    plain = make_case(GEOMETRY, MIXTURES[name])
    error = run(plain, TorchReferenceAttention(plain.geometry.config().layers, plain.cache)).double() - naive(
        exact
    )
    assert error.abs().max() < ATTENTION_FP8


def test_half_the_memory_and_the_same_rules() -> None:
    config = GEOMETRY.config()
    cache = KVCache(config.layers, 5, 4, torch.bfloat16, storage_dtype=E4M3)
    assert cache.nbytes == 5 * page_bytes(config.layers, 4, E4M3, TORCH_DTYPES[config.dtype])
    assert 2 * cache.nbytes == KVCache(config.layers, 5, 4, torch.bfloat16).nbytes
    assert cache.is_quantised
    assert not KVCache(config.layers, 5, 4, torch.bfloat16, storage_dtype=torch.bfloat16).is_quantised
    with pytest.raises(ValueError, match=r"allowed: torch\.bfloat16, torch\.float8_e4m3fn"):
        KVCache(config.layers, 5, 4, torch.bfloat16, storage_dtype=torch.float8_e5m2)
    cache.pages(1)[3] = float("nan")
    cache.zero_pages([3])
    assert not cache.pages(1).float().any()


@pytest.mark.covering(1, name=cached)
@pytest.mark.parametrize(
    # Compressed attention has no such pages.
    "name",
    sorted(
        name for name in TINY_MODELS if TINY_MODELS[name].model_type not in ("deepseek_v4", "deepseek_v41")
    ),
)
def test_a_models_predictions_stay_close(name: str, tmp_path: Path) -> None:
    """Mean KL divergence of the next token's distribution, wherever the prompt is cut.

    Cuts give the same only nearly: another order of sums may round a key to the next step.
    """
    tokens = torch.randint(0, 200, (48,), generator=torch.Generator().manual_seed(3)).tolist()
    write_tiny_model(attending_to_all(name, len(tokens)), tmp_path, seed=sum(name.encode()))
    exact, small = load_runner(tmp_path), load_runner(tmp_path)
    small.kv_cache = make_cache(small.model.config.layers, 256, 4, small.model.dtype, storage_dtype=E4M3)
    small.attention = make_attention(small.model.config.layers, small.kv_cache, "cpu")
    wanted = exact.prefill(tokens)[1].log_softmax(-1)
    for chunk in (None, 7):
        logits = small.prefill(tokens, chunk)[1]
        divergence = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).mean()
        assert 0 < divergence < LOGITS_FP8_KV_KL
