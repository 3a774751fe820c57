"""Guards what `moebius serve` puts on GPUs by itself: all that fits, with room to serve, in RAM only if it
fits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.planning import fill
from app.planning.fill import DeviceUse, parse_gpu_memory, with_filled_gpus
from app.planning.planner import Planner
from app.supervisor import placement as supervisor_placement
from gpu_service.memory.plan import ExpertMemory
from moebius.config import PlacementConfig
from moebius.experts.placement import keeps_residents
from moebius.models.served import with_method
from tests.helpers.plan_models import GIB, PUBLISHED, hardware, settings, write_config
from tests.helpers.published_checkpoints import Published


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-30B-A3B's config.json."""
    return write_config(tmp_path_factory.mktemp("fill") / "qwen", PUBLISHED["qwen3-30b-a3b"][0])


def filled(
    monkeypatch: pytest.MonkeyPatch, model: Path, gpu_gib: float, ram_gib: float, **options: Any
) -> PlacementConfig | None:
    """With so much memory that is free."""
    monkeypatch.setattr(fill, "available_memory", lambda: int(ram_gib * GIB))
    config = settings(model, **{"expert_dtype": "int4", **options})
    found = fill.filled(config, (DeviceUse(int(gpu_gib * GIB), int(gpu_gib * GIB)),))
    return None if found is None else found.placement


def test_a_large_gpu_gets_everything(monkeypatch: pytest.MonkeyPatch, qwen: Path) -> None:
    """Then no expert server is started, whatever the RAM."""
    found = filled(monkeypatch, qwen, 139, 8)
    assert found is not None
    assert found.gpu_experts_ratio == 1.0
    assert not keeps_residents(found)


def test_a_small_gpu_gets_what_fits_beside_a_cache(monkeypatch: pytest.MonkeyPatch, qwen: Path) -> None:
    """A GPU gets as many as the plan for it says, and a larger one more; they are exchanged while all are in
    RAM, too.
    """
    counts = []
    for gib in (14, 16, 20):
        found = filled(monkeypatch, qwen, gib, 64)
        assert found is not None
        assert found.gpu_experts is None
        assert found.gpu_experts_ratio is not None
        assert keeps_residents(found)
        counts.append(found.gpu_experts_ratio * 128)
    assert 0 < counts[0] < counts[1] < counts[2] < 128
    config, host = settings(qwen, expert_dtype="int4"), hardware("4090", ram_gib=64, sockets=1)
    assert host.gpu is not None
    smaller = replace(host, gpu=replace(host.gpu, memory_bytes=16 * GIB))
    planned = Planner(config, on_gpu=True).plan(smaller)
    assert max(planned.residency.by_layer.values()) == counts[1]
    assert planned.kv.tokens >= 4 * 8192


def test_too_little_ram_means_that_residents_are_there_only(
    monkeypatch: pytest.MonkeyPatch, qwen: Path
) -> None:
    """Memory of GPU and host adds up where the host could not hold all experts."""
    found = filled(monkeypatch, qwen, 20, 12)
    assert found is not None
    assert found.gpu_experts_ratio
    assert not keeps_residents(found)


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch, qwen: Path) -> None:
    """Numbers that are given are bounds of nothing else; only what is left open is decided."""
    found = filled(monkeypatch, qwen, 139, 64, gpu_experts="3")
    assert found is not None
    assert (found.gpu_experts, found.gpu_experts_ratio, found.drop_resident) == (3, None, "keep")
    found = filled(monkeypatch, qwen, 139, 64, gpu_experts="0")
    assert found is not None
    assert found.gpu_experts == 0


def test_other_processes_memory_is_not_planned_with(monkeypatch: pytest.MonkeyPatch, qwen: Path) -> None:
    """A GPU of which half is taken is filled as one of half its size is."""
    monkeypatch.setattr(fill, "available_memory", lambda: 64 * GIB)
    config = settings(qwen, expert_dtype="int4")
    shared = fill.filled(config, (DeviceUse(32 * GIB, 16 * GIB),))
    alone = fill.filled(config, (DeviceUse(int(16 * GIB / 0.9), int(16 * GIB / 0.9)),))
    assert shared == alone
    assert shared is not None
    assert shared.placement.gpu_experts_ratio


def test_a_display_and_a_bound_leave_less(monkeypatch: pytest.MonkeyPatch, qwen: Path) -> None:
    """With what a display holds, or with a bound in GiB, fewer experts are placed; `plan` does alike."""
    monkeypatch.setattr(fill, "available_memory", lambda: 64 * GIB)
    config, bounded = (settings(qwen, expert_dtype="int4", gpu_memory_gib=gib) for gib in ("none", "14.4"))
    whole, display = DeviceUse(24 * GIB, 24 * GIB), DeviceUse(24 * GIB, 16 * GIB)
    ratios = []
    for given, use in ((config, whole), (bounded, whole), (config, display)):
        found = fill.filled(given, (use,))
        assert found is not None
        ratios.append(found.placement.gpu_experts_ratio or 0)
    assert ratios[0] > max(ratios[1:]) > 0
    assert fill.as_empty((whole, display), config.gpu) == [24 * GIB, int(16 * GIB / 0.9)]
    assert fill.as_empty((whole, display), bounded.gpu) == [24 * GIB, 16 * GIB]
    monkeypatch.setattr(fill, "gpu_memory", lambda: (display,))
    host = hardware("4090")
    seen = fill.with_free_memory(host, config.gpu)
    assert seen.gpu is not None
    assert seen.gpu.memory_bytes == int(16 * GIB / 0.9)
    monkeypatch.setattr(fill, "gpu_memory", lambda: ())
    assert fill.with_free_memory(host, config.gpu) == host


def test_a_gpu_that_does_not_hold_the_rest_is_left_to_the_engine_to_refuse(
    monkeypatch: pytest.MonkeyPatch, qwen: Path
) -> None:
    """It says what would fit; no expert is put where not even the dense layers are."""
    found = filled(monkeypatch, qwen, 3, 64)
    assert found is not None
    assert found.gpu_experts_ratio == 0


def test_states_leave_room_for_experts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fewer outputs at once than the engine would choose, where their states would take the experts' memory;
    as many as ever where all experts fit, and what is set stays.
    """
    monkeypatch.setattr(fill, "available_memory", lambda: 512 * GIB)
    model = write_config(tmp_path / "next", Published.load("qwen3-next-80b-a3b").config)
    chosen = {}
    for gib, set_number in ((24, None), (48, None), (139, None), (24, "32")):
        config = settings(model, expert_dtype="int4", max_num_seqs=set_number or "none")
        found = fill.filled(config, (DeviceUse(gib * GIB, gib * GIB),))
        assert found is not None
        chosen[gib, set_number] = found.max_num_seqs, found.placement.gpu_experts_ratio or 0
    assert chosen[139, None] == (None, 1.0)
    fewer, more = chosen[24, None], chosen[48, None]
    assert fewer[0] is not None
    assert more[0] is None or more[0] > fewer[0]
    assert fewer[1] > 10 * chosen[24, "32"][1]
    assert more[1] > fewer[1]


def test_without_a_gpu_nothing_is_placed(monkeypatch: pytest.MonkeyPatch, qwen: Path) -> None:
    """And servers keep no second copy; with a GPU whose driver is silent the settings stay."""
    monkeypatch.setattr(supervisor_placement, "find_gpus", lambda root=Path("/"): ())
    chosen = with_method(settings(qwen), "off")
    config = with_filled_gpus(chosen)
    assert config.placement == PlacementConfig(drop_resident="drop")
    monkeypatch.setattr(
        supervisor_placement, "find_gpus", lambda root=Path("/"): (supervisor_placement.Gpu(-1),)
    )
    monkeypatch.setattr(fill, "gpu_memory", lambda: ())
    assert with_filled_gpus(chosen) == chosen


def test_the_drivers_words() -> None:
    """MiB by GPU; other words are an error that is not taken for memory.

    What the driver keeps for itself is in neither number, and no process has it.
    """
    assert parse_gpu_memory("4, 143156\n80500, 500\n") == (
        DeviceUse(143160 * 2**20, 143156 * 2**20),
        DeviceUse(81000 * 2**20, 500 * 2**20),
    )
    with pytest.raises(ValueError, match="invalid literal"):
        parse_gpu_memory("[N/A], [N/A]\n")


@pytest.mark.parametrize(
    ("gpu_gib", "is_everything", "tokens"), [(139, True, 8192), (30, True, 2048), (139, False, 512)]
)
def test_steps_are_long_where_nothing_is_computed_elsewhere(
    gpu_gib: float, is_everything: bool, tokens: int, qwen: Path
) -> None:
    """Steps are long where no setting says else; on a small GPU less, and the usual budget where expert
    servers compute a part.
    """
    planner = Planner(settings(qwen, max_num_seqs="16"), on_gpu=True)
    held = ExpertMemory(is_everything=is_everything)
    memory = [int(gpu_gib * GIB)]
    assert planner.forecast.batched_tokens(planner.config, memory, [held]) == tokens
    chosen = settings(qwen, max_num_batched_tokens="777")
    assert planner.forecast.batched_tokens(chosen, memory, [held]) == 777


@pytest.mark.parametrize(
    ("gpu_gib", "is_everything", "tokens"), [(139, True, 2048), (7, True, 0), (139, False, 0)]
)
def test_graphs_of_prompts_leave_the_kv_cache_its_room(
    gpu_gib: float, is_everything: bool, tokens: int, qwen: Path
) -> None:
    """Where no setting says else, they are given up before requests' room; a setting is a demand."""
    planner = Planner(settings(qwen, max_num_seqs="16", max_num_batched_tokens="2048"), on_gpu=True)
    held, memory = ExpertMemory(is_everything=is_everything), [int(gpu_gib * GIB)]
    assert planner.forecast.prompt_graph_tokens(planner.config, memory, [held]) == tokens
    demanded = settings(qwen, cuda_graph_max_prompt_tokens="700")
    assert planner.forecast.prompt_graph_tokens(demanded, memory, [held]) == 700


@pytest.mark.parametrize(
    ("gpu_gib", "is_everything", "count"),
    [(139, True, 256), (14, True, 128), (8, True, 64), (139, False, 64)],
)
def test_many_sequences_where_gpus_hold_everything(
    gpu_gib: float, is_everything: bool, count: int, qwen: Path
) -> None:
    """The KV cache has to have room for them; a plan that fills a GPU says the same as its engine."""
    planner = Planner(settings(qwen, expert_dtype="int4"), on_gpu=True)
    held, memory = ExpertMemory(is_everything=is_everything), [int(gpu_gib * GIB)]
    assert planner.forecast.num_seqs(planner.config, memory, [held]) == count
    if gpu_gib == 139 and is_everything:
        plan = planner.plan(hardware("h200", sockets=1))
        assert (plan.settings["max_num_seqs"], plan.max_num_seqs) == ("256", None)
