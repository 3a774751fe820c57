"""Guards the RAM for prefixes that a plan counts and `serve` gives: the same, and within what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.planning.capacity import CapacityPlan, Wish
from app.planning.gpu_use import plan_capacity
from app.planning.memory import EXPERTS_OF_SERVER, RAM
from app.supervisor import prefix_memory
from app.supervisor.placement import Gpu
from app.supervisor.prefix_memory import with_prefix_memory, with_prefix_memory_of_engine
from moebius.config import MoebiusConfig
from moebius.kv_tiers import default_tier_bytes
from moebius.models.served import read_served_geometry
from tests.helpers.plan_models import GIB, PUBLISHED, hardware, settings, write_config

NAME = "qwen3-30b-a3b"
PREFIXES = "evicted prefixes"
AUTO: dict[str, Any] = {"kv_offload_gib": "auto"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """54 GiB of experts in bfloat16."""
    return write_config(tmp_path_factory.mktemp(NAME), PUBLISHED[NAME][0])


def plan(model: Path, ram_gib: float, gpu: str | None, **flags: Any) -> CapacityPlan:
    """Returns the plan without experts on GPUs; `kv_offload_gib` is auto unless `flags` have it."""
    host = hardware(gpu, ram_gib=ram_gib, gpus=2, sockets=1, cores=16, isa="avx512")
    return plan_capacity(settings(model, **AUTO | flags), host, Wish(), fill=False)


def sizes(found: CapacityPlan) -> tuple[int, int]:
    """Returns the bytes of prefixes and of experts in RAM."""
    parts = [part for part in found.components if part.place == RAM]
    experts = sum(part.nbytes for part in parts if part.part.startswith(EXPERTS_OF_SERVER))
    return sum(part.nbytes for part in parts if part.part.endswith(PREFIXES)), experts


def served(model: Path, monkeypatch: pytest.MonkeyPatch, ram_gib: float, **flags: Any) -> MoebiusConfig:
    """Returns the settings with what `serve` chooses on a machine with a GPU; `flags`: as of `plan`."""
    monkeypatch.setattr(prefix_memory, "find_gpus", lambda: (Gpu(-1), Gpu(-1)))
    monkeypatch.setattr(prefix_memory, "available_memory", lambda: int(ram_gib * GIB))
    given = settings(model, **AUTO | flags)
    planned = {"expert_servers": 1, "mailbox": "moebius"}
    config = given.model_copy(update={"experts": given.experts.model_copy(update=planned)})
    return with_prefix_memory(config, given, read_served_geometry(given))


@pytest.mark.parametrize("ram_gib", [128, 500])
@pytest.mark.parametrize("flags", [{}, {"tensor_parallel_size": 2}])
def test_a_plan_counts_what_serve_gives(
    model: Path, monkeypatch: pytest.MonkeyPatch, ram_gib: int, flags: dict[str, Any]
) -> None:
    """Both give a host with GPUs a fifth of what experts and processes leave, to a tenth of a GiB."""
    found = plan(model, ram_gib, "h100", **flags)
    prefixes, experts = sizes(found)
    assert 0 < prefixes < default_tier_bytes(ram_gib * GIB, experts)
    assert prefixes / GIB == pytest.approx(found.kv_offload_gib)
    assert prefixes > 0.9 * (ram_gib * GIB - experts - 8 * GIB) / 5
    chosen = served(model, monkeypatch, ram_gib, **flags).gpu.kv_offload_gib
    assert chosen == pytest.approx(found.kv_offload_gib, abs=0.1001)


@pytest.mark.parametrize(
    ("gpu", "ram_gib", "flags", "expected"),
    [
        (None, 500, {}, 0),  # On a CPU the KV cache is RAM itself.
        ("h100", 62, {}, 0),  # A fifth would be less than a GiB.
        ("h100", 500, {"prefix_caching": False}, 0),
        ("h100", 500, {"kv_offload_gib": 0.0}, 0),
        ("h100", 500, {"kv_offload_gib": 3.5}, 3.5),
    ],
)
def test_what_is_set_is_meant(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: str | None,
    ram_gib: int,
    flags: dict[str, Any],
    expected: float,
) -> None:
    """A number, 0 too, is just that; nothing is taken where it is of no use or RAM is short."""
    assert sizes(plan(model, ram_gib, gpu, **flags))[0] == expected * GIB
    if gpu is not None:
        assert served(model, monkeypatch, ram_gib, **flags).gpu.kv_offload_gib == expected


def test_an_engine_alone_leaves_room_for_experts_of_others(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a mailbox is, expert servers of the same host are; those over a network are elsewhere."""
    monkeypatch.setattr(prefix_memory, "find_gpus", lambda: (Gpu(-1),))
    monkeypatch.setattr(prefix_memory, "available_memory", lambda: 100 * GIB)
    beside = with_prefix_memory_of_engine(settings(model, mailbox="moebius", **AUTO)).gpu.kv_offload_gib
    addresses = {"expert_transport": "grpc", "expert_addresses": ("host:1",)}
    alone = with_prefix_memory_of_engine(settings(model, **addresses, **AUTO)).gpu.kv_offload_gib
    assert alone == pytest.approx((100 - 3.4) / 5, abs=0.2)
    assert beside == pytest.approx((100 - 54 - 3.5) / 5, abs=0.2)
    asked = settings(model, mailbox="moebius", kv_offload_gib=1.0)
    assert with_prefix_memory_of_engine(asked) == asked
