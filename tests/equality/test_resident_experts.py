"""Invariant: any placement gives what any other gives, in every stored format, requantised or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.planning.memory import chosen_residency, stored_experts
from app.planning.memory import resident_bytes as planned_bytes
from gpu_service.core.parallel import ParallelContext
from gpu_service.experts.adaptive.exchange import SlotExchanges, Wanted
from gpu_service.experts.client import ExpertClient
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.experts.resident.experts import ResidentExperts, Share, SlotChange
from gpu_service.experts.resident.make import make_resident_experts, resident_bytes
from gpu_service.experts.streaming.ring import HostTransfers
from moebius.checkpoint.errors import CheckpointError
from moebius.config import (
    ExpertConfig,
    ModelConfigSection,
    MoebiusConfig,
    ParallelConfig,
    PlacementConfig,
)
from moebius.errors import UserError
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from tests import tolerances
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.quantised_checkpoints import QUANTIZATION_CONFIGS, GptOssMoe, QuantisedMoe
from tests.helpers.quantised_sources import Floats

CPU = torch.device("cpu")

ROWS = 6


def configuration(directory: Path, expert_dtype: Any = "keep", **placement: Any) -> MoebiusConfig:
    """Returns a model and a placement."""
    return MoebiusConfig(
        model=ModelConfigSection(model=str(directory)),
        experts=ExpertConfig(expert_dtype=expert_dtype),
        placement=PlacementConfig(**placement),
    )


def load(
    config: MoebiusConfig, geometry: MoeGeometry, dtype: torch.dtype = torch.float32, **options: Any
) -> ResidentExperts:
    """Resident experts on the CPU; there must be some."""
    resident = make_resident_experts(config, geometry, CPU, dtype, **options)
    assert resident is not None
    resident.check_integrity()
    return resident


def routed(geometry: MoeGeometry, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the rows of variance 1, ids with a -1 among them, weights."""
    generator = torch.Generator().manual_seed(layer)
    ids = torch.rand(ROWS, geometry.num_experts, generator=generator).argsort(1)[:, : geometry.top_k].int()
    ids[2, 0] = -1
    hidden_states = torch.randn(ROWS, geometry.hidden_size, generator=generator)
    return hidden_states, ids.contiguous(), torch.rand(ids.shape, generator=generator)


def hybrid(
    experts: ExpertClient, resident: ResidentExperts | None, layer: int, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Returns what the MoE block does, without router and shared experts."""
    hidden_states, ids, weights = inputs
    partial = torch.full_like(hidden_states, 0.5)
    share = Share.NONE if resident is None else resident.share(layer)
    if resident is None or share is Share.NONE:
        return experts.collect(experts.submit(layer, hidden_states, ids, weights), partial)
    if share is Share.ALL:
        return resident.forward(layer, hidden_states, ids, weights, partial)
    ticket = experts.submit(layer, hidden_states, resident.cpu_ids(layer, ids), weights)
    return experts.collect(ticket, resident.forward(layer, hidden_states, ids, weights, partial))


def assert_equal_placements(directory: Path, expert_dtype: str = "keep") -> None:
    """All on expert servers against parts and all on the device."""
    geometry = read_geometry(directory)
    local = LocalExpertClient(str(directory), geometry, torch.float32, expert_dtype)  # type: ignore[arg-type]
    placements: list[dict[str, Any]] = [
        {"gpu_experts": 1},
        {"gpu_layers": str(geometry.moe_layers[-1])},
        {"gpu_experts_ratio": 0.5, "placement_strategy": "random"},
        {"gpu_experts_ratio": 0.4, "placement_strategy": "front-loading"},
        {"gpu_experts_ratio": 1.0},
    ]
    expected = {layer: hybrid(local, None, layer, routed(geometry, layer)) for layer in geometry.moe_layers}
    for placement in placements:
        config = configuration(directory, expert_dtype, **placement)
        resident = load(config, geometry)
        assert resident.nbytes == resident_bytes(config, geometry, torch.float32)
        for layer, wanted in expected.items():
            found = hybrid(local, resident, layer, routed(geometry, layer))
            error = (found - wanted).abs().max() / wanted.abs().max()
            assert error < tolerances.EXPERTS_SUMMED_APART, (placement, layer)


@pytest.mark.parametrize("encoder", QUANTIZATION_CONFIGS)
def test_stored_formats(encoder: str, tmp_path: Path) -> None:
    """Plain floats, fp8 of three kinds, int8, int4 of four checkpoint layouts, nvfp4: kept as they are."""
    assert_equal_placements(QuantisedMoe(encoder).write(tmp_path))


def test_mxfp4_with_biases(tmp_path: Path) -> None:
    """gpt-oss: interleaved gate and up, biases, its own activation."""
    assert_equal_placements(GptOssMoe().write(tmp_path))


@pytest.mark.parametrize("expert_dtype", ["bfloat16", "int8", "int4"])
def test_requantised(expert_dtype: str, tmp_path: Path) -> None:
    """Requantising rounds on the device as it does on the CPU."""
    assert_equal_placements(TinyMoe(dtype="BF16").write(tmp_path), expert_dtype)


@pytest.mark.parametrize("encoder", ["bfloat16", "fp8_block", "compressed_int4_g32_zeros", "nvfp4"])
def test_ranks_hold_parts_that_add_up(encoder: str, tmp_path: Path) -> None:
    """Tensor-parallel ranks divide the intermediate channels; a partial sum of each makes the whole."""
    QuantisedMoe(encoder, TinyMoe(hidden_size=96, moe_intermediate_size=256, num_layers=1)).write(tmp_path)
    geometry = read_geometry(tmp_path)
    config = configuration(tmp_path, gpu_experts_ratio=0.6)
    inputs = routed(geometry, 0)
    whole = load(config, geometry).forward(0, *inputs)
    ranks = [load(config, geometry, parallel=ParallelContext(tp_rank=r, tp_size=2)) for r in range(2)]
    assert all(rank.nbytes < load(config, geometry).nbytes for rank in ranks)
    total = sum((rank.forward(0, *inputs) for rank in ranks), torch.zeros_like(whole))
    assert (total - whole).abs().max() / whole.abs().max() < tolerances.EXPERTS_SUMMED_APART


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_whole_experts(ranks: int, tmp_path: Path) -> None:
    """Each resident expert is on one rank, which computes it for all: their sums make what one rank computes.

    Servers are asked by every rank for the same, and nothing of what another one has; a rank without a slot
    adds nothing; planning counts the bytes that an engine takes.
    """
    geometry = read_geometry(TinyMoe(num_layers=2).write(tmp_path))
    # Three experts over two layers: with four ranks some have none of either.
    config = configuration(tmp_path, gpu_experts_ratio=1.5 / geometry.num_experts)
    parallel = ParallelConfig(tensor_parallel_size=ranks, gpu_expert_split="expert")
    config = config.model_copy(update={"parallel": parallel})
    one = load(config, geometry)
    places = [ParallelContext(rank, ranks, holds_whole_experts=True) for rank in range(ranks)]
    parts = [load(config, geometry, parallel=place) for place in places]
    stored, placed = stored_experts(tmp_path, geometry), chosen_residency(config, geometry).resident
    for place, part in zip(places, parts, strict=True):
        assert part.nbytes == resident_bytes(config, geometry, torch.float32, place)
        counted = config, geometry, stored, placed, geometry.moe_layers, place.tp_rank, "float32"
        assert planned_bytes(*counted) == (3, part.nbytes)
    assert sum(part.nbytes for part in parts) == one.nbytes
    for layer in geometry.moe_layers:
        hidden_states, ids, weights = routed(geometry, layer)
        whole = one.forward(layer, hidden_states, ids, weights)
        total = sum(
            (part.forward(layer, hidden_states, ids, weights) for part in parts), torch.zeros_like(whole)
        )
        assert (total - whole).abs().max() / whole.abs().max() < tolerances.EXPERTS_SUMMED_APART
        for part in parts:
            assert part.experts(layer) == one.experts(layer)
            assert part.share(layer) is Share.SOME
            assert torch.equal(part.cpu_ids(layer, ids), one.cpu_ids(layer, ids))


def test_a_layer_on_all_ranks_asks_no_server(tmp_path: Path) -> None:
    """All experts of a layer are resident though no rank has them all."""
    geometry = read_geometry(TinyMoe().write(tmp_path))
    place = ParallelContext(1, 2, holds_whole_experts=True)
    part = load(configuration(tmp_path, gpu_layers="1"), geometry, parallel=place)
    assert [part.share(layer) for layer in range(3)] == [Share.NONE, Share.ALL, Share.NONE]
    assert 0 < part.num_experts < geometry.num_experts


def test_ranks_add_a_bias_once(tmp_path: Path) -> None:
    """The first rank's sum has the down matrix's bias, the others' has not."""
    geometry = read_geometry(GptOssMoe().write(tmp_path))
    config = configuration(tmp_path, gpu_layers="0")
    inputs = routed(geometry, 0)
    whole = load(config, geometry).forward(0, *inputs)
    parts = [
        load(config, geometry, parallel=ParallelContext(tp_rank=r, tp_size=2)).forward(0, *inputs)
        for r in range(2)
    ]
    assert (parts[0] + parts[1] - whole).abs().max() / whole.abs().max() < tolerances.EXPERTS_SUMMED_APART


def test_more_ranks_than_groups_are_refused(tmp_path: Path) -> None:
    """Quantisation groups stay whole."""
    QuantisedMoe("compressed_int4_g128").write(tmp_path)
    geometry = read_geometry(tmp_path)
    with pytest.raises(UserError, match=r"tensor_parallel_size is 2.* groups of 128"):
        load(configuration(tmp_path, gpu_experts=1), geometry, parallel=ParallelContext(0, 2))


def test_float32_experts_take_the_type_of_the_computation(tmp_path: Path) -> None:
    """A bfloat16 engine keeps no experts in float32; what no placement asks for is not loaded."""
    geometry = read_geometry(TinyMoe().write(tmp_path))
    config = configuration(tmp_path, gpu_experts=2)
    wide = resident_bytes(config, geometry, torch.float32)
    assert resident_bytes(config, geometry, torch.bfloat16) < 0.6 * wide
    assert make_resident_experts(configuration(tmp_path), geometry, CPU, torch.float32) is None
    only = load(config, geometry, layers=[1])
    assert [only.share(layer) for layer in range(3)] == [Share.NONE, Share.SOME, Share.NONE]


def test_experts_can_be_exchanged(tmp_path: Path) -> None:
    """While an expert takes another's slot, in an emptied slot and in a filled one, sums stay the same."""
    geometry = read_geometry(TinyMoe().write(tmp_path))
    local = LocalExpertClient(str(tmp_path), geometry, torch.float32)
    resident, device = load(configuration(tmp_path, gpu_experts=3), geometry), HostTransfers()
    exchanges = SlotExchanges(resident, device, None)
    inputs = routed(geometry, 1)
    expected = hybrid(local, None, 1, inputs)

    def check() -> None:
        resident.check_integrity()
        found = hybrid(local, resident, 1, inputs)
        assert (found - expected).abs().max() / expected.abs().max() < tolerances.EXPERTS_SUMMED_APART

    before = resident.experts(1)
    others = [expert for expert in range(geometry.num_experts) if expert not in before]
    exchanges.advance([Wanted(1, others[0], before[0])])
    check()
    while exchanges.under_way:
        exchanges.advance(())
        check()
    assert resident.experts(1) == tuple(sorted((others[0], *before[1:])))
    resident.remap([SlotChange(1, 2, -1)], device)
    assert len(resident.experts(1)) == 2
    check()
    exchanges.advance([Wanted(1, others[1], -1)])
    exchanges.wait()
    assert len(resident.experts(1)) == 3
    assert others[1] in resident.experts(1)
    check()
    exchanges.close()


def test_impossible_exchanges_are_not_begun(tmp_path: Path) -> None:
    """Nothing is lost or doubled by a wish that has become impossible, and a whole layer stays whole."""
    geometry = read_geometry(TinyMoe().write(tmp_path))
    resident = load(configuration(tmp_path, gpu_layers="2", gpu_experts=2), geometry)
    exchanges = SlotExchanges(resident, HostTransfers(), None)
    before = {layer: resident.experts(layer) for layer in resident.slots}
    held, absent = before[0], sorted({*range(geometry.num_experts)} - {*before[0]})
    for wanted in (
        Wanted(0, held[1], held[0]),  # It is in another slot.
        Wanted(0, held[0], held[0]),
        Wanted(0, absent[0], absent[1]),  # Who shall leave is not there.
        Wanted(0, absent[0], -1),  # No slot is empty.
        Wanted(2, 0, 1),
    ):
        exchanges.advance([wanted])
        exchanges.wait()
        assert {layer: resident.experts(layer) for layer in resident.slots} == before, wanted
    assert exchanges.count == 0
    resident.check_integrity()
    exchanges.close()


def test_experts_of_another_format_are_refused(tmp_path: Path) -> None:
    """A layer whose experts differ in format is an error that names the tensor, as on expert servers."""
    stored = TinyMoe(dtype="BF16", shards=1)
    name = "model.layers.0.mlp.experts.4"
    wide: dict[str, Floats] = {
        f"{name}.{part}_proj.weight": TinyMoe(shards=1).tensors()[f"{name}.{part}_proj.weight"]
        for part in ("gate", "up")
    }
    geometry = read_geometry(stored.write(tmp_path, wide))
    with pytest.raises(CheckpointError, match=rf"{name}.gate_proj.* is float32/bfloat16"):
        load(configuration(tmp_path, gpu_layers="0"), geometry)


def test_requantising_has_its_limit(tmp_path: Path) -> None:
    """What expert servers refuse to requantise is refused here as well."""
    geometry = read_geometry(TinyMoe(dtype="BF16").write(tmp_path))
    config = configuration(tmp_path, "int4", gpu_experts=1)
    strict = config.experts.model_copy(update={"max_requantise_error": 0.01})
    with pytest.raises(UserError, match="max_requantise_error allows"):
        load(config.model_copy(update={"experts": strict}), geometry)
