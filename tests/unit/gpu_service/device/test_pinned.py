"""Guards that a limit of page-locked memory is found before anything is planned, and left as it was."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from structlog.testing import capture_logs

from gpu_service.device.pinned import LEFT_BYTES, MIB, in_place, may_be_limited, pinned_limit
from gpu_service.experts.streaming.make import ServedPart, StreamingPlan, with_pinned_limit
from gpu_service.experts.streaming.plan import ring_layout
from tests.helpers.limited_pinning import Limited

if TYPE_CHECKING:
    from gpu_service.experts.resident.panels import LayerFormat

GIB = 2**30


@pytest.mark.parametrize("limit", [0, 10 * MIB, 500 * MIB, 3 * GIB, 8 * GIB])
def test_what_a_driver_allows_is_found_in_steps(limit: int) -> None:
    """To a 64th of what is wanted, never more than there is; nothing stays registered."""
    driver, wanted = Limited(limit), 4 * GIB
    found = pinned_limit(driver, wanted)
    assert not driver.locked
    if limit >= wanted:
        assert found is None
        return
    assert driver.refused == 1
    assert found is not None
    assert limit - wanted // 64 <= found <= limit


def test_some_memory_stays_free() -> None:
    """Layers are page-locked from the first on, beside what buffers need; without a limit all are."""
    sizes = [100 * MIB] * 5
    assert in_place(sizes, None) == 5
    assert in_place(sizes, LEFT_BYTES + 250 * MIB) == 2
    assert in_place(sizes, LEFT_BYTES - 1) == in_place(sizes, 0) == 0


@pytest.mark.parametrize(("version", "is_windows"), [("6.6 Microsoft-standard-WSL2", True), ("6.1", False)])
def test_reasons_for_a_limit(
    version: str, is_windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows below Linux, or a limit of locked memory; trying takes time and is left out without one."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text(version)
    for soft in (resource.RLIM_INFINITY, 8 * MIB):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert may_be_limited(tmp_path) == (is_windows or soft == 8 * MIB)


def test_a_plan_of_streaming_says_what_a_limit_means() -> None:
    """One line names the limit and which layers are copied in place; without a limit nothing is said."""
    kind = cast("LayerFormat", SimpleNamespace(expert_bytes=64 * MIB))
    parts = {layer: [ServedPart(8, kind)] for layer in range(4)}
    plan = StreamingPlan(tuple(parts), parts, ring_layout(512 * MIB, 64 * MIB, 1, None))
    with capture_logs() as lines:
        assert with_pinned_limit(plan, Limited(8 * GIB)) == plan
        limited = with_pinned_limit(plan, Limited(GIB + LEFT_BYTES + 100 * MIB))
    assert plan.layers_in_place == {0, 1, 2, 3}
    assert limited.layers_in_place == {0, 1}
    (line,) = lines
    assert "1.3" in line["event"]
    assert "2 of 4 layers" in line["event"]
    assert "WSL2" in line["remedy"]
