"""Guards page-locked memory with a limit, as WSL2's: what fits is registered, the rest staged, room stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from structlog.testing import capture_logs

from gpu_service.device import pinned
from gpu_service.experts.streaming import source as source_module
from gpu_service.experts.streaming.plan import CopyRun, Piece, StoredExperts
from gpu_service.experts.streaming.ring import HostTransfers
from gpu_service.experts.streaming.source import SegmentSource
from tests.helpers.limited_pinning import Limited

if TYPE_CHECKING:
    from gpu_service.experts.streaming.segments import ExpertSegments

LAYER_BYTES, LAYERS = 4096, 6


def segments() -> ExpertSegments:
    kind = SimpleNamespace(expert_bytes=LAYER_BYTES // 2)
    stored = {
        layer: [StoredExperts(layer, 0, layer * LAYER_BYTES, (0, 1), kind)]  # type: ignore[arg-type]
        for layer in range(LAYERS)
    }
    data = [torch.arange(LAYERS * LAYER_BYTES, dtype=torch.int32).to(torch.uint8)]
    found = SimpleNamespace(stored=stored, data=data, problem=lambda: "", close=lambda: None)
    return cast("ExpertSegments", found)


def test_a_limit_that_is_known_is_not_run_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers beyond it are staged, though the driver is never asked for more than it has, and nothing is said
    a second time.
    """
    monkeypatch.setattr(pinned, "LEFT_BYTES", LAYER_BYTES)
    opened, registrar = segments(), Limited(4 * LAYER_BYTES)
    with capture_logs() as lines:
        source = SegmentSource(lambda: opened, HostTransfers(), registrar, limit=4 * LAYER_BYTES)
        assert source.wait_ready(60.0)
    assert (len(registrar.locked), registrar.refused) == (3, 0)
    of_layers = [stored for (stored,) in opened.stored.values()]
    assert [source.address(opened, stored) is not None for stored in of_layers] == [True] * 3 + [False] * 3
    source.close()
    assert not [line for line in lines if line["log_level"] == "warning"]


@pytest.mark.parametrize(("limit", "locked"), [(LAYERS, 6), (LAYERS - 1, 3), (3, 1), (1, 0), (0, 0)])
def test_layers_beyond_the_limit_are_staged(monkeypatch: pytest.MonkeyPatch, limit: int, locked: int) -> None:
    """Two layers' worth stays free where there is a limit; every layer is copied whole, either way."""
    monkeypatch.setattr(source_module, "LEFT_BYTES", 2 * LAYER_BYTES)
    opened, registrar = segments(), Limited(limit * LAYER_BYTES)
    with capture_logs() as lines:
        source = SegmentSource(lambda: opened, HostTransfers(), registrar)
        assert source.wait_ready(60.0)
    assert len(registrar.locked) == locked
    of_layers = [stored for (stored,) in opened.stored.values()]
    in_place = [stored.layer for stored in of_layers if source.address(opened, stored) is not None]
    assert in_place == list(range(locked))
    for stored in of_layers:
        target = torch.zeros(LAYER_BYTES, dtype=torch.uint8)
        run = CopyRun(stored.offset, 0, LAYER_BYTES)
        source.copy(opened, target, Piece(stored, (0, 1), (run,)), run)
        assert torch.equal(target, opened.data[0][stored.offset : stored.offset + LAYER_BYTES])
    source.close()
    assert not registrar.locked
    warnings = [line for line in lines if line["log_level"] == "warning"]
    assert len(warnings) == (limit < LAYERS)
    assert all("page-locked" in line["event"] and "WSL2" in line["remedy"] for line in warnings)
