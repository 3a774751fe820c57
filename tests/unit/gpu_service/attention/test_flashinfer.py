"""Invariant: what is planned for FlashInfer describes the step, and no plan is overwritten before its use.

FlashInfer itself needs a GPU (tests/gpu); a stand-in with its arguments and its way of copying plans
computes here from exactly what it was given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.flashinfer_backend import FlashInferAttention
from gpu_service.attention.flashinfer_plan import (
    PlanStaging,
    captured_bytes,
    eager_bytes,
    list_pages,
    page_bounds,
    unsupported_device,
    unsupported_types,
)
from gpu_service.attention.mla import flashinfer_backend as latent_backend
from gpu_service.attention.mla.flashinfer_backend import FlashInferMlaAttention
from gpu_service.cache.fp8 import E4M3
from gpu_service.core.step import ForwardInputs
from tests.helpers import fake_attention_library
from tests.helpers.attention_cases import (
    LAYER,
    MIXTURES,
    Case,
    Geometry,
    as_capturable,
    make_case,
    naive,
    refill,
    run,
)
from tests.helpers.fake_attention_library import FakeEvent, PlanningWrapper, run_copies
from tests.helpers.mla_cases import DEEPSEEK, TINY, make_mla_case, naive_mla, run_absorbed, run_non_absorbed
from tests.tolerances import ATTENTION_FLOAT16, LOGITS_FLOAT32_SELF, MLA_FLOAT32


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_attention_library)
    yield
    fake_attention_library._queued.clear()


def attention_for(case: Case) -> FlashInferAttention:
    return FlashInferAttention(case.geometry.config().layers, case.cache, events=FakeEvent)


def check(case: Case, output: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = ATTENTION_FLOAT16 if case.geometry.dtype == torch.float16 else LOGITS_FLOAT32_SELF
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("storage", [None, E4M3])
@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_mixtures(name: str, storage: torch.dtype | None) -> None:
    case = make_case(Geometry(dtype=torch.float16, storage_dtype=storage), MIXTURES[name])
    case.cache.key_scales[LAYER], case.cache.value_scales[LAYER] = (0.5, 2.0) if storage else (1.0, 1.0)
    expected = naive(case)
    check(case, run(case, attention_for(case)), expected)


@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_the_wrapper_that_fits_is_chosen(name: str) -> None:
    case = make_case(Geometry(), MIXTURES[name])
    attention = attention_for(case)
    attention.plan(case.inputs)
    decodes = name in ("one decode", "decodes", "first token")
    wanted = attention._decode if decodes else attention._paged
    if name in ("first chunk", "first chunks"):
        wanted = attention._ragged
    assert attention._wrapper is wanted
    quantised = make_case(Geometry(storage_dtype=E4M3), MIXTURES[name])
    attention = attention_for(quantised)
    attention.plan(quantised.inputs)
    assert attention._wrapper is not attention._ragged, "8-bit pages must be read as they were stored"


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_every_group_has_a_kernel(group: int) -> None:
    case = make_case(Geometry(num_heads=2 * group), [(9, 1), (20, 1)])
    check(case, run(case, attention_for(case)), naive(case))


def test_replays_follow_refilled_tensors_and_other_sizes_in_between() -> None:
    """Two captured sizes and eager steps share all memory; each replay answers its own step."""
    captured: dict[int, tuple[FlashInferAttention, ForwardInputs]] = {}
    first = make_case(Geometry(spare_pages=30), [(0, 1)] * 3)
    attention = attention_for(first)
    for size in (3, 1):
        case = make_case(Geometry(spare_pages=30), [(0, 1)] * size)
        static = as_capturable(case.inputs)
        attention.kv_cache = case.cache
        attention.plan_capture(static)
        # As a graph is recorded: what no step has run needs no plan.
        attention.forward(case.query, case.key, case.value, LAYER)
        captured[size] = attention, static
    for shape in ([(5, 1), (50, 1), (0, 1)], [(70, 1)], [(3, 4), (9, 1)], [(1, 1), (2, 1), (90, 1)]):
        case = make_case(Geometry(), shape)
        expected = naive(case)
        attention.kv_cache = case.cache
        if case.inputs.is_uniform_decode:
            static = captured[len(shape)][1]
            attention._inputs = static
            attention.plan_replay(refill(static, case.inputs))
            output = attention.forward(case.query, case.key, case.value, LAYER)
        else:
            output = run(case, attention)
        check(case, output, expected)
    with pytest.raises(ValueError, match=r"no step of 2 requests was captured; captured: \[1, 3\]"):
        attention.plan_replay(make_case(Geometry(), [(1, 1)] * 2).inputs)


def test_a_plan_waits_for_the_copy_of_the_one_before_the_last() -> None:
    """Under overlap the host is a step ahead: the stand-in fails when it overwrites what is not copied."""
    case = make_case(Geometry(), [(9, 1), (20, 1)])
    attention = attention_for(case)
    for _ in range(7):
        attention.plan(case.inputs)
    run_copies()


def test_one_buffer_would_be_overwritten() -> None:
    """The stand-in does see the race that the staging is there for."""
    case = make_case(Geometry(), [(9, 1), (20, 1)])
    attention = attention_for(case)
    attention._staging._hosts[1] = attention._staging._hosts[0]
    attention.plan(case.inputs)
    with pytest.raises(AssertionError, match="overwrites a plan not yet copied"):
        attention.plan(case.inputs)


def test_another_names_for_the_plan_buffer_are_refused() -> None:
    staging = PlanStaging(torch.device("cpu"), 16, FakeEvent)
    wrapper = PlanningWrapper(staging.results)
    del wrapper._pin_memory_int_workspace_buffer
    with pytest.raises(RuntimeError, match=r"supported: flashinfer-python >= 0\.6\.13"):
        staging.adopt(wrapper)


def test_results_have_room_for_the_largest_plan() -> None:
    """The room is what `PrefillPlan` allocates: tiles, rows of a tile, heads, a float32 per element and one
    more.
    """
    device = torch.device("cpu")
    assert eager_bytes(32, 4, 128, device) >= (2 * 132 // 4) * 128 * 32 * 129 * 4
    assert eager_bytes(16, 2, 256, device) >= (2 * 132 // 2) * 64 * 16 * 257 * 4
    assert eager_bytes(96, 8, 128, device) > 200 * 2**20
    assert captured_bytes(64, 32, 4, 128) >= (32 + 63) * 16 * 32 * 129 * 4
    assert captured_bytes(256, 96, 8, 128) > eager_bytes(96, 8, 128, device)
    case = make_case(Geometry(num_heads=64, num_kv_heads=8, head_dim=16), [(0, 1)] * 4)
    attention = attention_for(case)
    before = attention._staging.results
    attention._staging.reserve(before.nbytes + 1)
    attention.plan_capture(case.inputs)
    assert attention._captured[4]._float_workspace_buffer.nbytes == before.nbytes + 1
    assert attention._paged._float_workspace_buffer is before, "an adopted wrapper's memory stays"


def test_page_lists() -> None:
    lengths, table = [9, 4, 0, 1], torch.arange(1, 17, dtype=torch.int32).view(4, 4)
    bounds = page_bounds(lengths, 4, torch.device("cpu"))
    assert bounds.indptr.tolist() == [0, 3, 4, 4, 5]
    assert bounds.last_page_len[[0, 1, 3]].tolist() == [1, 4, 1]
    indices = torch.zeros(8, dtype=torch.int32)
    list_pages(table, torch.tensor(lengths, dtype=torch.int32), indices, 4)
    assert indices.tolist() == [1, 2, 3, 5, 13, 0, 0, 0]
    device = torch.full((5,), -1, dtype=torch.int32), torch.full((4,), -1, dtype=torch.int32)
    list_pages(table, torch.tensor(lengths, dtype=torch.int32), indices, 4, device)
    assert torch.equal(device[0], bounds.indptr)
    assert torch.equal(device[1], bounds.last_page_len)


def test_what_flashinfer_lacks_is_said() -> None:
    assert "not in torch.float32" in unsupported_types(torch.float32, 128)
    assert "not 80" in unsupported_types(torch.bfloat16, 80)
    assert unsupported_types(torch.bfloat16, 128) == ""
    assert "needs a CUDA device" in unsupported_device(torch.device("cpu"))
    case = make_case(Geometry(), [(3, 1)])
    assert FlashInferAttention.unsupported(case.geometry.config().layers, case.cache)


@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_latent_mixtures(name: str) -> None:
    case = make_mla_case(TINY, MIXTURES[name])
    expected = naive_mla(case)
    attention = FlashInferMlaAttention(TINY, case.cache, events=FakeEvent)
    output = run_absorbed(case, attention)
    assert not attention.non_absorbed, "no ragged kernel has these sizes"
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=MLA_FLOAT32)


def test_latent_first_chunks_are_written_out_where_a_kernel_has_the_sizes() -> None:
    case = make_mla_case(DEEPSEEK, [(0, 4), (0, 2)], page_size=64)
    attention = FlashInferMlaAttention(DEEPSEEK, case.cache, events=FakeEvent)
    expected = naive_mla(case)
    torch.testing.assert_close(run_non_absorbed(case, attention).double(), expected, rtol=0, atol=MLA_FLOAT32)
    with pytest.raises(ValueError, match="planned for forward_non_absorbed"):
        run_absorbed(case, attention)


def test_latent_replays_follow_refilled_tensors() -> None:
    first = make_mla_case(TINY, [(0, 1)] * 2, spare_pages=30)
    attention = FlashInferMlaAttention(TINY, first.cache, events=FakeEvent)
    static = as_capturable(first.inputs)
    attention.plan_capture(static)
    for shape in ([(5, 1), (40, 1)], [(0, 1), (7, 1)]):
        case = make_mla_case(TINY, shape)
        expected = naive_mla(case)
        attention.cache = case.cache
        attention.plan_replay(refill(static, case.inputs))
        output = run_absorbed(case, attention, planned=True)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=MLA_FLOAT32)
    with pytest.raises(ValueError, match=r"captured: \[2\]"):
        attention.plan_replay(make_mla_case(TINY, [(1, 1)]).inputs)


def test_latent_pages_that_flashinfer_lacks_are_said() -> None:
    quantised = make_mla_case(TINY, [(1, 1)], dtype=torch.float16, storage_dtype=E4M3)
    assert "pages of" in FlashInferMlaAttention.unsupported(TINY, quantised.cache)
    odd = make_mla_case(TINY, [(1, 1)], dtype=torch.float16)
    assert "(24, 8)" in FlashInferMlaAttention.unsupported(TINY, odd.cache)
    wide = make_mla_case(DEEPSEEK, [(1, 1)])
    assert "float32" in FlashInferMlaAttention.unsupported(DEEPSEEK, wide.cache)


def test_a_newer_interface_of_latent_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.7 keeps the names but moved the memory that plans are staged in."""
    case = make_mla_case(DEEPSEEK, [(1, 1)], dtype=torch.float16)
    monkeypatch.setattr(latent_backend, "unsupported_device", lambda device: "")
    assert FlashInferMlaAttention.unsupported(DEEPSEEK, case.cache) == ""
    monkeypatch.setattr(fake_attention_library.mla, "MLAPlanMetadata", object, raising=False)
    assert "supported: flashinfer-python 0.6.13" in FlashInferMlaAttention.unsupported(DEEPSEEK, case.cache)
