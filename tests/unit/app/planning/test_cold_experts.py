"""Guards plans with experts on disk: when they are chosen, what they cost, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import app.planning.cold as cold_module
from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.gpu_use import plan_capacity
from app.planning.memory import EXPERTS_OF_SERVER
from app.supervisor import cold_experts as served
from app.supervisor.cold_experts import with_cold_experts
from moebius.config import MoebiusConfig
from moebius.errors import ConfigError, StartupError
from moebius.experts.placement import ExpertStatistics
from moebius.models.served import read_served_geometry
from tests.helpers.plan_models import GIB, PUBLISHED, hardware, settings, write_config

NAME = "qwen3-30b-a3b"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """57 GiB of experts in bfloat16."""
    return write_config(tmp_path_factory.mktemp(NAME), PUBLISHED[NAME][0])


def plan(model: Path, ram_gib: float, gpu: str | None = None, **flags: Any) -> CapacityPlan:
    host = hardware(gpu, ram_gib=ram_gib, sockets=1, cores=16, isa="avx512")
    return plan_capacity(settings(model, **flags), host, Wish(), fill=False)


def experts_in_ram(found: CapacityPlan) -> int:
    return sum(part.nbytes for part in found.components if part.part.startswith(EXPERTS_OF_SERVER))


def statistics(model: Path, path: Path) -> str:
    """Recorded routing where one expert in ten gets most choices."""
    geometry = read_served_geometry(settings(model))
    ranks = np.arange(1, geometry.num_experts + 1)
    counts = np.tile((1e9 / ranks**2).astype(np.int64), (len(geometry.moe_layers), 1))
    distinct = np.full(len(geometry.moe_layers), 1, np.int64)
    recorded = ExpertStatistics(
        geometry.model_type,
        geometry.num_experts,
        geometry.top_k,
        tuple(geometry.moe_layers),
        "stat",
        1,
        1,
        counts,
        distinct,
    )
    path.write_bytes(recorded.encode("json"))
    return str(path)


def test_auto_is_ram_as_long_as_all_fit(model: Path) -> None:
    """With room for all the plan is that of `ram`; a little less RAM puts a few experts on disk."""
    enough = plan(model, 1024)
    assert enough.cold is None
    needed = enough.total_of("RAM") / GIB
    few = plan(model, needed - 1.0)
    assert few.cold is not None
    assert 0 < few.cold.missed <= cold_module.MOST_MISSED
    assert few.total_of("RAM") <= (needed - 1.0) * GIB
    assert few.decode[0].tokens_per_second < enough.decode[0].tokens_per_second
    with pytest.raises(DoesNotFit, match="GiB are allowed"):
        plan(model, needed - 1.0, cold_experts="ram")


def test_too_many_misses_are_refused_with_the_speed(model: Path, tmp_path: Path) -> None:
    """Unless that is asked for, or the routing is known to be skewed."""
    with pytest.raises(DoesNotFit, match=r"--cold-experts disk\) 2\d\.\d% of a token's experts .* tokens/s"):
        plan(model, 48)
    asked = plan(model, 48, cold_experts="disk")
    assert asked.cold is not None
    assert experts_in_ram(asked) == pytest.approx(asked.cold.memory_bytes, rel=0.01)
    known = plan(model, 48, expert_statistics=statistics(model, tmp_path / "routing.json"))
    assert known.cold is not None
    assert known.cold.missed < 0.01
    assert known.cold.routing.endswith("routing.json")
    assert known.decode[0].tokens_per_second > asked.decode[0].tokens_per_second


def test_what_experts_on_disk_need_is_named(model: Path) -> None:
    """Three experts of each layer in RAM, and an engine without a GPU."""
    with pytest.raises(DoesNotFit, match="for 3 of each layer"):
        plan(model, 64, cold_experts="disk", expert_memory_gib=1.0)
    with pytest.raises(ConfigError, match="without a GPU"):
        plan(model, 64, "RTX 4090", cold_experts="disk")
    bounded = plan(model, 1024, cold_experts="disk", expert_memory_gib=40.0)
    assert experts_in_ram(bounded) == pytest.approx(40 * GIB, rel=0.01)


def serve_settings(model: Path, **flags: Any) -> tuple[MoebiusConfig, MoebiusConfig]:
    """(as the supervisor has them, as given)"""
    given = settings(model, **flags)
    experts = given.experts.model_copy(update={"expert_servers": 1, "split_count": 1, "mailbox": "m"})
    return given.model_copy(update={"experts": experts}), given


def test_serve_does_as_planned(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers get the directory and the RAM of the plan; a full disk is refused before packing."""
    geometry = read_served_geometry(settings(model))
    flags = {"cold_experts": "disk", "expert_memory_gib": 2.0, "expert_weights_dir": str(tmp_path / "e")}
    monkeypatch.setattr(served, "find_gpus", list)
    # Whatever other tests have of this machine's.
    monkeypatch.setattr("app.planning.hardware.available_memory", lambda root: 16 * GIB)
    config, given = serve_settings(model, **flags, expert_dtype="int4")
    monkeypatch.setattr(os, "statvfs", lambda path: _Disk(1 << 40))
    experts = with_cold_experts(config, given, geometry).experts
    assert (experts.cold_experts, experts.expert_weights_dir) == ("disk", str(tmp_path / "e"))
    assert experts.expert_memory_gib == pytest.approx(2.0)
    monkeypatch.setattr(os, "statvfs", lambda path: _Disk(1 << 30))
    with pytest.raises(StartupError, match=r"take \d+\.\d\d GiB in .*, where 1\.00 GiB are free"):
        with_cold_experts(config, given, geometry)
    ram = with_cold_experts(*serve_settings(model, cold_experts="ram"), geometry)
    assert ram.experts.cold_experts == "ram"


class _Disk:
    def __init__(self, free: int) -> None:
        self.f_bavail, self.f_frsize = free, 1
