"""Invariant: experts that were kept over a sleep are the ones that were resident, or none."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from gpu_service.assembly.kept_experts import given_back, wait_for_memory
from gpu_service.experts.resident import kept as kept_module
from gpu_service.experts.resident.experts import ResidentExperts, SlotChange
from gpu_service.experts.resident.kept import KeptExperts, keep_residents
from gpu_service.experts.resident.make import make_resident_experts
from gpu_service.experts.resident.panels import layer_format
from gpu_service.experts.streaming.ring import HostTransfers
from gpu_service.parallel.group import SoloGroup
from moebius.config import ModelConfigSection, MoebiusConfig, PlacementConfig
from moebius.models.read import read_geometry
from tests.helpers.quantised_checkpoints import QuantisedMoe

IDENTITY = "a model"


@pytest.fixture
def config(tmp_path: Path) -> MoebiusConfig:
    """Returns int4 experts, most of them resident."""
    return MoebiusConfig(
        model=ModelConfigSection(model=str(QuantisedMoe("compressed_int4_g32").write(tmp_path))),
        placement=PlacementConfig(gpu_experts_ratio=0.7),
    )


def load(config: MoebiusConfig, kept: KeptExperts | None = None) -> tuple[ResidentExperts, int]:
    """Returns the residents, and how many of them were packed already."""
    geometry, device = read_geometry(config.model.model), torch.device("cpu")
    with capture_logs() as logs:
        found = make_resident_experts(config, geometry, device, torch.float32, packed=kept)
    assert found is not None
    (line,) = [line for line in logs if line["event"] == "resident experts loaded"]
    return found, line["packed_already"]


def keep(resident: ResidentExperts) -> int:
    """Returns the descriptor."""
    descriptor = keep_residents(resident, IDENTITY)
    assert descriptor is not None
    return descriptor


def assert_same(found: ResidentExperts, wanted: ResidentExperts) -> None:
    """All slots have the same bytes, and checksums that they match."""
    found.check_integrity()
    for layer, slots in wanted.slots.items():
        assert torch.equal(found.slots[layer].weights, slots.weights)
        for content, row in zip(found.slots[layer].contents, slots.weights, strict=True):
            assert content is not None
            assert content.matches(row)


def test_what_was_resident_is_there_again(config: MoebiusConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is copied, none packed; the memory is given back once its reader is closed."""
    resident, _ = load(config)
    descriptor = keep(resident)
    kept = KeptExperts.open(descriptor, IDENTITY)
    assert kept is not None
    found, copied = load(config, kept)
    assert copied == resident.num_experts > 0
    another = os.dup(descriptor)
    monkeypatch.setattr(kept_module, "_AT_A_TIME", 4096)
    kept.close().join()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert (os.fstat(another).st_size, os.fstat(another).st_blocks) == (0, 0)
    os.close(another)
    assert kept.packed(0, 0, resident.slots[0].kind) is None
    assert_same(found, resident)


def test_memory_is_free_before_it_is_counted(config: MoebiusConfig) -> None:
    """What comes after loading runs beside its giving back, also after a failure, and may wait for it."""
    resident, _ = load(config)
    descriptor = keep(resident)
    another = os.dup(descriptor)
    kept = KeptExperts.open(descriptor, IDENTITY)
    assert kept is not None
    with pytest.raises(ValueError, match="a layer"), given_back(kept):
        raise ValueError("a layer")
    wait_for_memory(SoloGroup())
    assert os.fstat(another).st_size == 0
    os.close(another)
    wait_for_memory(SoloGroup())


def test_what_is_not_there_is_packed(config: MoebiusConfig) -> None:
    """A slot that was empty, one whose bytes have changed since, and one that was damaged before."""
    resident, _ = load(config)
    resident.remap([SlotChange(0, 1, -1)], HostTransfers())
    resident.slots[1].weights[0, 5] ^= 1
    descriptor = keep(resident)
    with mmap.mmap(descriptor, 0) as area:
        # Of the first layer's first expert.
        area[kept_module._ALIGNMENT + 3] ^= 1
    found, copied = load(config, KeptExperts.open(descriptor, IDENTITY))
    assert copied == found.num_experts - 3
    assert_same(found, load(config)[0])


def test_other_models_and_formats_are_refused(config: MoebiusConfig) -> None:
    """A changed checkpoint or setting between the two programs."""
    resident, _ = load(config)
    assert KeptExperts.open(keep(resident), "another model") is None
    kept = KeptExperts.open(keep(resident), IDENTITY)
    assert kept is not None
    kind = resident.slots[0].kind
    (expert, *_) = resident.slots[0].experts
    assert kept.packed(0, expert, kind) is not None
    other = layer_format("int8", "int8", kind.hidden_size, kind.intermediate_size, has_bias=False)
    assert kept.packed(0, expert, other) is None


def test_a_file_without_a_table_is_refused() -> None:
    """Nothing is read from memory that no engine has filled."""
    for nbytes in (0, 1 << 16):
        descriptor = os.memfd_create("moebius-test")
        os.ftruncate(descriptor, nbytes)
        assert KeptExperts.open(descriptor, IDENTITY) is None


def test_memory_has_to_be_there(config: MoebiusConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept where another rank's would have no room; a line says so."""
    resident, _ = load(config)
    limit = int(1.5 * resident.nbytes) + 2 * kept_module._ALIGNMENT
    monkeypatch.setattr(kept_module, "available_memory", lambda: limit)
    monkeypatch.setattr(kept_module, "total_memory", lambda: limit)
    monkeypatch.setattr(kept_module, "_LEFT", 0.0)
    with capture_logs() as logs:
        assert keep_residents(resident, IDENTITY, ranks=2) is None
    assert "not kept" in logs[0]["event"]
    monkeypatch.setattr(kept_module, "available_memory", lambda: 8 * limit)
    os.close(keep(resident))
