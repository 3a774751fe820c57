"""Invariant: attention in the latent space is plain attention over written-out keys and values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.mla.base import IndexDimensions, MlaAttentionBackend
from gpu_service.attention.mla.cpu_backend import CpuMlaAttention
from gpu_service.attention.mla.torch_reference import TorchMlaAttention
from gpu_service.attention.mla.triton_backend import TritonMlaAttention
from gpu_service.attention.registry import MLA_BACKENDS, choose_backend
from gpu_service.cache.fp8 import E4M3
from gpu_service.cache.kv_cache import MlaCache
from moebius.errors import UserError
from tests.helpers.attention_cases import MIXTURES, as_capturable, refill
from tests.helpers.layer_values import latent_layers
from tests.helpers.mla_cases import (
    DEEPSEEK,
    LAYER,
    TINY,
    MlaCase,
    make_mla_case,
    naive_mla,
    run_absorbed,
    run_non_absorbed,
)
from tests.tolerances import ATTENTION_FLOAT16, MLA_FLOAT32

FIRST_CHUNKS = ("first chunk", "first chunks")


def backend_for(case: MlaCase, name: str) -> MlaAttentionBackend:
    if name == "torch":
        return TorchMlaAttention(case.dimensions, case.cache)
    return TritonMlaAttention(case.dimensions, case.cache, min_split=16)


STEPS = MIXTURES | {"mixture": [(9, 1), (0, 5), (6, 3), (40, 1)]}


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("storage", [None, E4M3])
@pytest.mark.parametrize("mixture", sorted(STEPS))
def test_absorbed_is_plain_attention(mixture: str, storage: torch.dtype | None, name: str) -> None:
    case = make_mla_case(TINY, STEPS[mixture], storage_dtype=storage)
    case.cache.scales[LAYER] = 0.5 if storage else 1.0
    expected = naive_mla(case)
    output = run_absorbed(case, backend_for(case, name))
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=MLA_FLOAT32)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("mixture", FIRST_CHUNKS)
def test_written_out_keys_give_the_same(mixture: str, name: str) -> None:
    """Both ways leave the same latents behind, so that later steps do not see which was taken."""
    case = make_mla_case(TINY, MIXTURES[mixture])
    expected, absorbed = naive_mla(case), replace(case, cache=case.fresh_cache())
    output = run_non_absorbed(case, backend_for(case, name))
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=MLA_FLOAT32)
    run_absorbed(absorbed, TorchMlaAttention(absorbed.dimensions, absorbed.cache))
    assert torch.equal(absorbed.cache.pages(LAYER), case.cache.pages(LAYER))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_sizes_of_deepseek(name: str) -> None:
    case = make_mla_case(DEEPSEEK, [(40, 1), (3, 2)], page_size=64, dtype=torch.float16)
    output = run_absorbed(case, backend_for(case, name))
    torch.testing.assert_close(output.double(), naive_mla(case), rtol=0, atol=ATTENTION_FLOAT16)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_keys_are_written_out_only_where_nothing_earlier_is_attended_to(name: str) -> None:
    for mixture, shape in MIXTURES.items():
        case = make_mla_case(TINY, shape)
        backend = backend_for(case, name)
        backend.plan(case.inputs)
        assert backend.non_absorbed == (mixture in FIRST_CHUNKS)
    query = torch.zeros(1, 5, 20)
    with pytest.raises(ValueError, match="first chunks"):
        backend.forward_non_absorbed(query, query, query, case.latent, case.key_rope, LAYER)
    quantised = make_mla_case(TINY, MIXTURES["first chunk"], storage_dtype=E4M3)
    backend = backend_for(quantised, name)
    backend.plan(quantised.inputs)
    assert not backend.non_absorbed, "what is stored must not depend on how a prompt was cut"


# Sizes that fill vectors, as the CPU's kernels have them.
WHOLE = replace(TINY, latent_dim=32, rope_dim=16)


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("storage", [None, E4M3])
@pytest.mark.parametrize("mixture", sorted(STEPS))
def test_a_cpu_computes_short_chunks_by_its_kernels(
    mixture: str, storage: torch.dtype | None, sinks: bool, page_size: int
) -> None:
    """Alone, and with longer chunks in the same step, whose rows torch computes."""
    dimensions = replace(WHOLE, has_sinks=sinks)
    case = make_mla_case(dimensions, STEPS[mixture], page_size, storage_dtype=storage)
    case.cache.scales[LAYER] = 0.3 if storage else 1.0
    expected = naive_mla(case)
    output = run_absorbed(case, CpuMlaAttention(dimensions, case.cache))
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=MLA_FLOAT32)


def test_lone_rows_are_those_of_steps_without_a_prompt() -> None:
    case = make_mla_case(WHOLE, [(9, 1), (6, 3)])
    attention = CpuMlaAttention(WHOLE, case.cache)
    attention.plan(case.inputs)
    rows = attention.lone_rows(None, None)
    assert rows is not None
    assert [part.tolist() for part in rows] == [[0, 1, 1, 1], [0, 0, 0, 0], [10, 7, 8, 9]]
    for shape in ([(9, 1), (0, 40)], [(0, 5)]):
        case = make_mla_case(WHOLE, shape)
        attention.cache = case.cache
        attention.plan(case.inputs)
        assert attention.lone_rows(None, None) is None


def test_a_captured_step_follows_its_refilled_tensors() -> None:
    case = make_mla_case(TINY, [(0, 1)] * 3, spare_pages=60)
    attention = TritonMlaAttention(TINY, case.cache, min_split=16)
    static = as_capturable(case.inputs)
    attention.plan_capture(static)
    later = make_mla_case(TINY, [(90, 1), (7, 1), (0, 1)])
    expected = naive_mla(later)
    attention.cache = later.fresh_cache()
    attention.plan_replay(refill(static, later.inputs))
    output = run_absorbed(later, attention, planned=True)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=MLA_FLOAT32)


def test_cache_arithmetic_and_refusals() -> None:
    layers = latent_layers(3, 24, 8)
    assert MlaCache(layers, 5, 4, torch.bfloat16).nbytes == 5 * 3 * 4 * (24 + 8) * 2
    with pytest.raises(ValueError, match="page 0 is the dummy"):
        MlaCache(layers, 1, 4, torch.bfloat16)
    with pytest.raises(ValueError, match="float16 are not supported"):
        MlaCache(layers, 5, 4, torch.bfloat16, storage_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"24 \+ 8 elements got a cache of 24 \+ 16"):
        TorchMlaAttention(TINY, MlaCache(latent_layers(3, 24, 16), 5, 4, torch.float32))


def test_cleared_pages_hold_nothing() -> None:
    case = make_mla_case(TINY, [(4, 1), (5, 1)], storage_dtype=E4M3)
    page = int(case.inputs.block_table[0, 1])
    case.cache.pages(LAYER)[page] = float("nan")
    case.cache.zero_pages([page])
    output = run_absorbed(case, TorchMlaAttention(TINY, case.cache))
    assert output.isfinite().all()


def test_a_cpu_gets_its_kernels_where_they_can() -> None:
    """Else the reference; the kernel's own name is refused with what it cannot do."""
    device = torch.device("cpu")
    case = make_mla_case(WHOLE, [(4, 1)])
    assert type(choose_backend(MLA_BACKENDS, WHOLE, case.cache, device)) is CpuMlaAttention
    quantised = make_mla_case(WHOLE, [(4, 1)], storage_dtype=E4M3)
    assert type(choose_backend(MLA_BACKENDS, WHOLE, quantised.cache, device)) is CpuMlaAttention
    assert type(choose_backend(MLA_BACKENDS, WHOLE, case.cache, device, "torch")) is TorchMlaAttention
    chooses = replace(WHOLE, index=IndexDimensions(7, 10, 6))
    left = {
        r"24 \+ 8 elements; allowed: multiples of 16": make_mla_case(TINY, [(4, 1)]),
        "float16; allowed: float32, bfloat16": make_mla_case(WHOLE, [(4, 1)], dtype=torch.float16),
        "an indexer chooses": make_mla_case(chooses, [(4, 1)]),
    }
    for reason, case in left.items():
        found = choose_backend(MLA_BACKENDS, case.dimensions, case.cache, device)
        assert type(found) is TorchMlaAttention
        with pytest.raises(UserError, match=reason):
            choose_backend(MLA_BACKENDS, case.dimensions, case.cache, device, "cpu")
