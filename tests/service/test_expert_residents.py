"""Guards that an expert server neither reads nor holds what is resident on GPUs: no expert is there twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.planning.memory import (
    expert_servers,
    packed_expert,
    ram_components,
    segment_bytes,
    stored_experts,
)
from expert_service.host import ExpertHost, LoadSettings
from expert_service.placement import ThreadPlacement
from moebius.config import MoebiusConfig, PlacementConfig
from moebius.experts.placement import make_placement
from moebius.experts.slices import SliceRequest, resident_fingerprint
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import TinyMoe

EXPERTS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with enough experts that pages do not hide a difference."""
    sizes = TinyMoe(hidden_size=64, moe_intermediate_size=128, num_experts=EXPERTS, dtype="BF16")
    return sizes.write(tmp_path_factory.mktemp("residents"))


def host_of(model: Path, placement: dict[str, Any], **request: Any) -> ExpertHost:
    """Returns a server in this process that has loaded its share."""
    settings = LoadSettings(calibrate_kernels=False)
    host = ExpertHost(ThreadPlacement(-1, 2, ()), lambda *_: None, lambda: None, settings)
    chosen = PlacementConfig(**{"drop_resident": "drop", **placement})
    host.load(SliceRequest(str(model), placement=chosen, **request))
    return host


def packed_bytes(host: ExpertHost) -> int:
    """Returns the mapped for experts."""
    assert host.loaded is not None
    return host.loaded.engine.packed_bytes


@pytest.mark.parametrize("split", ["tensor", "expert"])
@pytest.mark.parametrize(
    "placement",
    [
        {"gpu_experts": 20},
        {"gpu_layers": "1"},
        {"gpu_layers": "0", "gpu_experts_ratio": 0.5, "placement_strategy": "random"},
    ],
)
def test_residents_are_left_out(model: Path, placement: dict[str, Any], split: str) -> None:
    """Over both servers and the GPU, every expert is held once; the rest computes as with all there."""
    geometry = read_geometry(model)
    resident = make_placement(PlacementConfig(**placement), geometry).resident
    left = sum(EXPERTS - len(ids) for ids in resident.values())
    each = packed_expert(stored_experts(model, geometry)[0], 64, 128, "keep").expert_bytes
    servers = [host_of(model, placement, split=split, split_index=i, split_count=2) for i in range(2)]
    held = sum(packed_bytes(server) for server in servers)
    # Layers of a server end at whole pages.
    assert left * each <= held <= left * each + 2 * 3 * 4096
    whole = host_of(model, {})
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((9, 64), np.float32)
    for layer in geometry.moe_layers:
        ids = rng.integers(0, EXPERTS, (9, geometry.top_k)).astype(np.int32)
        ids = np.where(np.isin(ids, resident[layer]), -1, ids).astype(np.int32)
        weights = rng.random(ids.shape, np.float32)
        found = sum(server.forward(layer, rows, ids, weights) for server in servers)
        np.testing.assert_allclose(found, whole.forward(layer, rows, ids, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("split", ["tensor", "expert"])
def test_residents_are_kept_where_asked(model: Path, split: str) -> None:
    """With `keep` servers hold every expert, also those on a GPU, and are the same servers to engines of any
    placement that keeps them. The plan and the volumes of a Pod count all of them.
    """
    geometry = read_geometry(model)
    whole = host_of(model, {})
    placed = {"gpu_experts": 20, "drop_resident": "keep"}
    servers = [host_of(model, placed, split=split, split_index=i, split_count=2) for i in range(2)]
    without = [host_of(model, {}, split=split, split_index=i, split_count=2) for i in range(2)]
    assert [packed_bytes(server) for server in servers] == [packed_bytes(server) for server in without]
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((5, 64), np.float32)
    ids = rng.integers(0, EXPERTS, (5, geometry.top_k)).astype(np.int32)
    weights = rng.random(ids.shape, np.float32)
    found = sum(server.forward(1, rows, ids, weights) for server in servers)
    np.testing.assert_allclose(found, whole.forward(1, rows, ids, weights), rtol=1e-4, atol=1e-5)

    def identity(placement: dict[str, Any]) -> str:
        return resident_fingerprint(
            SliceRequest(str(model), placement=PlacementConfig(**placement)), geometry
        )

    assert identity(placed) == identity({**placed, "gpu_experts": 3}) == identity({})
    dropped = {"gpu_experts": 20, "drop_resident": "drop"}
    assert identity(dropped) != identity({**dropped, "gpu_experts": 3})
    kept, all_of_them, left = (planned_bytes(model, p) for p in (placed, {}, dropped))
    assert kept == all_of_them
    # Segments end at 2 MiB pages, which may hide so little; the plan counts smaller ones.
    assert kept[0] > left[0]
    assert kept[1] >= left[1]


def planned_bytes(model: Path, placement: dict[str, Any]) -> tuple[int, int]:
    """Returns, for two servers' experts, what the plan counts, and what their segments take, bytes."""
    tree = {"model": {"model": str(model)}, "placement": placement, "experts": {"expert_servers": 2}}
    config = MoebiusConfig.model_validate(tree)
    geometry = read_geometry(model)
    stored = stored_experts(model, geometry)
    servers = expert_servers(config, geometry, stored, 1)
    resident = make_placement(config.placement, geometry).resident
    parts = ram_components(config, geometry, stored, servers, (), 2, resident)
    held = sum(part.nbytes for part in parts if part.part.startswith("experts of server"))
    return held, sum(segment_bytes(config, geometry, 2))


def test_a_resident_is_refused_by_name(model: Path) -> None:
    """An engine with other settings than its servers gets an error, not zeros."""
    host = host_of(model, {"gpu_layers": "1"})
    rows, ids = np.zeros((1, 64), np.float32), np.array([[4, -1, -1]], np.int32)
    with pytest.raises(ValueError, match="expert 4 is not loaded"):
        host.forward(1, rows, ids, np.ones(ids.shape, np.float32))
    assert not host.forward(0, rows, ids, np.ones(ids.shape, np.float32)).any()
