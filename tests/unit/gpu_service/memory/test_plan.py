"""Guards the VRAM plan: it names every part, gives the KV cache the rest, and refuses what cannot fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.assembly.rank_plan import RankPlan, Trial, has_room_to_stream, smallest_change
from gpu_service.cache.kv_cache import page_bytes
from gpu_service.cache.request_states import num_state_slots
from gpu_service.cache.state_cache import StateSlots, state_bytes
from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.device import TORCH_DTYPES
from gpu_service.experts.resident.panels import PAIRS_BYTES, UNPACKED_BYTES
from gpu_service.loader.held import HeldWeights, held_weights
from gpu_service.memory.device_memory import MemoryUse
from gpu_service.memory.plan import (
    ACTIVATIONS,
    DENSE,
    GRAPHS,
    KV,
    LANE,
    RESIDENT,
    STATES,
    ExpertMemory,
    MemoryPlan,
    MemoryShort,
    StepSize,
    activation_bytes,
    graph_bytes,
    parameter_bytes,
    plan_memory,
    prompt_sizes,
    size_kv_pool,
    useful_pages,
)
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from gpu_service.parallel.group import SoloGroup
from lab.random_model.shapes import parse_shape
from moebius.config import MoebiusConfig
from moebius.config.loader import load_config
from moebius.errors import UserError
from moebius.models.read import read_model_config
from moebius.models.weights import model_weights
from tests.helpers.fake_memory import GIB, FakeMemory
from tests.unit.moebius.models.test_linear_attention import NEXT

H200 = 140 * GIB
# Of Qwen3-30B-A3B as int4 in groups of 32.
INT4_EXPERT = 3 * 2048 * 768 * 9 // 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """Returns the full shape, composed on the meta device."""
    directory = tmp_path_factory.mktemp("shape")
    (directory / "config.json").write_text(json.dumps(parse_shape("qwen3-30b-a3b", 0).hf_config(None)))
    return build_model(read_model_config(directory))


def settings(**flags: Any) -> MoebiusConfig:
    return load_config(None, {"max_num_batched_tokens": 2048, **flags})


def plan(
    model: CausalLM,
    config: MoebiusConfig,
    memory: FakeMemory | None = None,
    experts: ExpertMemory | None = None,
    parallel: ParallelContext = SOLO,
) -> MemoryPlan:
    use = (memory or FakeMemory(H200)).use()
    page = page_bytes(
        model.config.layers, config.gpu.page_size, torch.bfloat16, TORCH_DTYPES[model.config.dtype]
    )
    return plan_memory(config, model.config, parameter_bytes(model), use, page, experts, parallel)


def all_values(model: CausalLM) -> HeldWeights:
    """Returns the model's weights as values, beside a GPU."""
    return held_weights(model.config, SOLO, model_weights(model.config), {}, on_cpu=False)


def test_the_parts_make_up_the_budget(model: CausalLM) -> None:
    """Dense weights as the checkpoint has them; the KV cache is exactly what all other parts leave."""
    found = plan(model, settings())
    assert found.budget == int(0.9 * H200)
    assert sum(line.nbytes for line in found.lines) == found.budget
    head_and_embedding = 2 * 151936 * 2048
    attention = 48 * 2 * (4096 + 512) * 2048
    router = 48 * 128 * 2048
    assert found.of(DENSE) == pytest.approx(2 * (head_and_embedding + attention + router), rel=1e-3)
    assert found.of(RESIDENT) == 0


def test_resident_experts_are_counted(model: CausalLM) -> None:
    """Every expert on the GPU: their bytes leave the KV cache, the ring and nothing else changes."""
    alone, held = (
        plan(model, settings(), experts=ExpertMemory(count, INT4_EXPERT)) for count in (0, 48 * 128)
    )
    assert held.of(RESIDENT) == 48 * 128 * INT4_EXPERT
    assert alone.kv_bytes - held.kv_bytes >= held.of(RESIDENT)
    assert held.of(ACTIVATIONS) > alone.of(ACTIVATIONS)


def test_experts_of_many_rows_are_computed_in_parts(model: CausalLM) -> None:
    """Products of experts take bounded memory however many the rows; the rest of a step grows with them."""
    sizes = [
        activation_bytes(model.config, StepSize(tokens, 1), SOLO, True)
        - activation_bytes(model.config, StepSize(tokens, 1), SOLO, False)
        for tokens in (16384, 65536)
    ]
    # 131072 and four times as many pairs, a few bytes each.
    assert sizes[1] - sizes[0] <= 16 * 4 * 131072
    assert UNPACKED_BYTES < sizes[0] < PAIRS_BYTES + UNPACKED_BYTES + 16 * 2**20


@pytest.mark.parametrize(("ring_gib", "fits"), [(0, True), (1, True), (20, False)])
def test_a_ring_that_does_not_fit_is_noticed(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, ring_gib: int, fits: bool
) -> None:
    """The ring is noticed before anything is loaded, so that an engine that may do without streams
    nothing.
    """
    monkeypatch.setattr("gpu_service.assembly.rank_plan.make_device_memory", lambda _: FakeMemory(24 * GIB))
    held = ExpertMemory(ring_bytes=ring_gib * GIB)
    found = has_room_to_stream(settings(), model, held, SoloGroup(), torch.device("cpu"))
    assert found is fits


RING = ExpertMemory(ring_bytes=GIB)


def test_the_prefill_lane_is_planned_with_where_experts_are_streamed(model: CausalLM) -> None:
    """Its largest step comes on top of the main lane's, with tensor-parallel ranks where one is asked for;
    else they and pipeline stages have a longer step instead of it.
    """
    config = settings(prefill_chunk_max=16384)
    nothing, lane = plan(model, config), plan(model, config, experts=RING)
    assert nothing.of(LANE) == 0
    assert lane.of(LANE) > lane.of(ACTIVATIONS)
    two = ParallelContext(tp_rank=0, tp_size=2)
    in_turns = plan(model, config, experts=RING, parallel=two)
    assert in_turns.of(LANE) == 0
    wanted = settings(prefill_chunk_max=16384, prefill_lane_min_tokens=20)
    ranks = plan(model, wanted, experts=RING, parallel=two)
    assert lane.of(LANE) > ranks.of(LANE) > ranks.of(ACTIVATIONS)
    stages = plan(model, config, experts=RING, parallel=ParallelContext(stage=0, num_stages=2))
    assert stages.of(LANE) == 0
    assert stages.of(ACTIVATIONS) > lane.of(ACTIVATIONS)


@pytest.mark.parametrize(("gib", "least", "most"), [(140, 16384, 16384), (10, 4096, 12288), (6, 0, 0)])
def test_the_chunk_of_a_streamed_step_is_what_fits(model: CausalLM, gib: int, least: int, most: int) -> None:
    """Unset it leaves room for requests in the KV cache; without streaming, or without room, none."""
    config, use = settings(max_num_batched_tokens=512, max_num_seqs=16), FakeMemory(gib * GIB).use()
    found = RankPlan(config, all_values(model), use, RING).prefill_chunk(config)
    assert least <= found <= most
    assert RankPlan(config, all_values(model), use, ExpertMemory()).prefill_chunk(config) == 0


def test_an_impossible_chunk_is_refused(model: CausalLM) -> None:
    """Shorter than a usual step, by name and with what is allowed; too large for the card, with what fits."""
    config = settings(prefill_chunk_max=1024)
    with pytest.raises(UserError, match=r"prefill_chunk_max: 1024 is not allowed; allowed: 2048 .* to 65536"):
        RankPlan(config, all_values(model), FakeMemory(H200).use(), RING).prefill_chunk(config)
    config = settings(max_num_batched_tokens=512, prefill_chunk_max=65536, max_num_seqs=1)
    rank = RankPlan(config, all_values(model), FakeMemory(9 * GIB).use(), RING)
    assert rank.fits(), "it is the chunk that does not"
    with pytest.raises(MemoryShort, match="prefill lane") as caught:
        rank.make(config)
    assert "it fits with --prefill-chunk-max" in str(rank.refusal(config, caught.value))


def change_for(
    model: CausalLM, config: MoebiusConfig, memory: FakeMemory, num_experts: int = 0
) -> str | None:
    """Returns what is proposed for this model on this device."""

    def fits(trial: Trial) -> bool:
        try:
            plan(model, trial.config, memory, ExpertMemory(trial.num_experts, INT4_EXPERT))
        except MemoryShort:
            return False
        return True

    return smallest_change(config, num_experts, model.config.max_model_len, fits)


def test_fewer_experts_are_proposed(model: CausalLM) -> None:
    """On 20 GiB not all experts fit; as many as are proposed do, with a request, and hardly any more."""
    small = FakeMemory(20 * GIB)
    config = settings(max_num_seqs=1, max_num_batched_tokens=64, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(MemoryShort, match=r"resident experts 15\.19.*GiB are missing") as caught:
        plan(model, config, small, ExpertMemory(48 * 128, INT4_EXPERT))
    assert caught.value.missing > 0
    change = change_for(model, config, small, 48 * 128)
    kept = re.search(r"^at most (\d+) of the 6144 experts on the GPU$", change or "")
    assert kept is not None, change
    assert plan(model, config, small, ExpertMemory(int(kept[1]), INT4_EXPERT)).kv_bytes > 0
    with pytest.raises(UserError, match="GiB are missing"):
        plan(model, config, small, ExpertMemory(int(kept[1]) + 400, INT4_EXPERT))


def test_smaller_steps_are_proposed(model: CausalLM) -> None:
    """Activations of 256 k tokens do not fit on 20 GiB; the number proposed does."""
    small = FakeMemory(20 * GIB)
    change = change_for(model, settings(max_num_batched_tokens=262144), small)
    proposed = re.search(r"^--max-num-batched-tokens (\d+)$", change or "")
    assert proposed is not None, change
    assert plan(model, settings(max_num_batched_tokens=int(proposed[1])), small).kv_bytes > 0


def test_a_smaller_cache_is_proposed_where_one_was_asked_for(model: CausalLM) -> None:
    """The size that is left, to a 64th of what was wanted."""
    config = settings(kv_cache_gib=200.0)
    with pytest.raises(MemoryShort, match=r"KV cache of 200\.00 GiB"):
        plan(model, config)
    change = change_for(model, config, FakeMemory(H200))
    proposed = re.search(r"^--kv-cache-gib ([\d.]+)$", change or "")
    assert proposed is not None, change
    assert plan(model, settings(kv_cache_gib=float(proposed[1]))).kv_bytes > 0
    with pytest.raises(MemoryShort):
        plan(model, settings(kv_cache_gib=float(proposed[1]) + 200 / 64))


def test_nothing_is_proposed_where_nothing_helps(model: CausalLM) -> None:
    """Dense weights alone are more than the device has."""
    assert change_for(model, settings(), FakeMemory(3 * GIB)) is None


def test_other_processes_are_respected(model: CausalLM) -> None:
    """What others hold is not planned with, and the message says so."""
    crowded = FakeMemory(H200, context=138 * GIB)
    with pytest.raises(UserError, match="less what other processes hold"):
        plan(model, settings(), crowded)
    half = FakeMemory(H200, context=70 * GIB)
    assert plan(model, settings(), half).budget <= H200 - 69 * GIB


def test_a_bound_in_gib_takes_the_place_of_a_share(model: CausalLM) -> None:
    """The engine plans with as much as it is given, at most what there is, and names the bound it lacks."""
    assert plan(model, settings(gpu_memory_gib="24")).budget == 24 * GIB
    assert plan(model, settings(gpu_memory_gib="999")).budget == H200
    with pytest.raises(UserError, match=r"gpu_memory_gib 2 of 140\.00 GiB\)"):
        plan(model, settings(gpu_memory_gib="2"))
    crowded = FakeMemory(H200, context=130 * GIB)
    with pytest.raises(UserError, match="less what other processes hold"):
        plan(model, settings(gpu_memory_gib="60", num_pages="100000"), crowded)


def test_a_wanted_pool_is_given_or_refused(model: CausalLM) -> None:
    """kv_cache_gib and num_pages are promises, not limits."""
    page = page_bytes(model.config.layers, 16, torch.bfloat16, TORCH_DTYPES[model.config.dtype])
    assert plan(model, settings(kv_cache_gib=7.0)).kv_bytes == 7 * GIB
    assert plan(model, settings(num_pages=1000)).of(KV) == 1000 * page
    with pytest.raises(UserError, match=r"KV cache of 200\.00 GiB or more, do not fit"):
        plan(model, settings(kv_cache_gib=200.0))


def test_graphs_of_prompts_are_counted_where_they_are_captured(model: CausalLM, tmp_path: Path) -> None:
    """With all experts on one GPU, up to the largest step and what the setting allows; else none, and no
    memory is set aside.
    """
    wanted = {"cuda_graph_max_prompt_tokens": 2048}
    gpu = settings(**wanted).gpu
    assert prompt_sizes(model.config, gpu, SOLO, True)[-1] == 2048
    few = settings(max_num_batched_tokens=512, cuda_graph_max_prompt_tokens=300).gpu
    assert prompt_sizes(model.config, few, SOLO, True) == [256, 300]
    (tmp_path / "config.json").write_text(json.dumps(NEXT))
    assert not prompt_sizes(model.config, gpu, SOLO, False), "expert servers are asked"
    assert not prompt_sizes(model.config, gpu, ParallelContext(tp_size=2), True)
    assert not prompt_sizes(model.config, settings(cuda_graphs=False, **wanted).gpu, SOLO, True)
    assert not prompt_sizes(model.config, settings().gpu, SOLO, True), "nothing is chosen yet"
    assert not prompt_sizes(read_model_config(tmp_path), gpu, SOLO, True), "states are no graph's"
    held = [ExpertMemory(48 * 128, INT4_EXPERT, is_everything=whole) for whole in (False, True)]
    without, counted = (plan(model, settings(**wanted), experts=each) for each in held)
    large, small = (
        activation_bytes(model.config, StepSize(*sizes), SOLO, True) for sizes in ((2048, 0), (64, 64))
    )
    assert counted.of(GRAPHS) - without.of(GRAPHS) > large - small
    assert counted.of(GRAPHS) - without.of(GRAPHS) == without.kv_bytes - counted.kv_bytes


def test_ranks_divide_what_is_divided(model: CausalLM) -> None:
    """Activations of sharded parts shrink with ranks, the residual stream does not; graphs are optional."""
    step = StepSize(2048, 64)
    one, four = (activation_bytes(model.config, step, ParallelContext(tp_size=size), True) for size in (1, 4))
    assert 0.3 * one < four < one
    assert graph_bytes(model.config, settings(cuda_graphs=False).gpu, SOLO, False) == 0
    assert graph_bytes(model.config, settings().gpu, SOLO, False) > 0
    assert parameter_bytes(model) == sum(p.numel() * 2 for p in model.parameters()) + sum(
        b.numel() * b.element_size() for b in model.buffers()
    )
    assert all_values(model).device_bytes == parameter_bytes(model)


def test_pool_takes_what_was_measured(model: CausalLM) -> None:
    """Weights 20 GiB, profile 5, context 1: the rest but graphs and slack, in whole pages."""
    config = settings(max_num_seqs=4096)
    planned = plan(model, config)
    use = MemoryUse(H200, H200 - 26 * GIB, 20 * GIB, 25 * GIB, 25 * GIB, 3)
    pages = size_kv_pool(planned, config, model.config, use)
    left = int(0.9 * H200) - 26 * GIB - planned.of(GRAPHS) - planned.of("allocator slack")
    assert left - planned.page_bytes < pages * planned.page_bytes <= left
    few = settings(max_num_seqs=1, max_model_len=1024)
    assert size_kv_pool(planned, few, model.config, use) == useful_pages(few, model.config)


def test_pool_is_refused_when_too_little_is_left(model: CausalLM) -> None:
    """The pool is refused both for the rest and for a size that was asked for."""
    config = settings()
    planned = plan(model, config)
    full = MemoryUse(H200, 14 * GIB, 120 * GIB, 125 * GIB, 125 * GIB, 3)
    with pytest.raises(UserError, match=r"0\.00 GiB of the 126\.00 GiB planned with are left; the KV cache"):
        size_kv_pool(planned, config, model.config, full)
    with pytest.raises(UserError, match=r"kv_cache_gib asks for takes 9\.00 GiB, but after loading"):
        size_kv_pool(planned, settings(kv_cache_gib=9.0), model.config, full)


def test_states_of_linear_attention_are_counted(tmp_path: Path) -> None:
    """Three for each request that runs, one for each snapshot, that of zeros and that of padding."""
    (tmp_path / "config.json").write_text(json.dumps(NEXT))
    hybrid = build_model(read_model_config(tmp_path))
    config = settings(max_num_seqs=8, state_snapshots=5)
    planned = plan(hybrid, config)
    assert planned.of(STATES) == (2 + 3 * 8 + 5) * state_bytes(
        hybrid.config.layers, TORCH_DTYPES[hybrid.config.dtype]
    )
    states = StateSlots(hybrid.config.layers, num_state_slots(config.gpu), torch.bfloat16, "meta")
    assert planned.of(STATES) == states.nbytes
    assert planned.fixed + planned.kv_bytes == planned.budget
