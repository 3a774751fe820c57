"""Guards that what a sleeping engine imports ahead costs it nothing: no failure, and no memory of a GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from gpu_service.assembly import imports
from gpu_service.ops import backends
from moebius.config import GpuConfig, MoebiusConfig


def imported(monkeypatch: pytest.MonkeyPatch, has_context: bool) -> list[Any]:
    """Returns the log of imports for a GPU, with one library that is there and one that is not."""
    names = ("colorsys", "no_such_library")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(imports, "_OWN", names)
    monkeypatch.setattr(imports, "resolve_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: has_context, raising=False)
    monkeypatch.setitem(backends.BACKENDS, "auto", ())
    with capture_logs() as logs:
        imports._import_all(MoebiusConfig())
    assert "colorsys" in sys.modules
    return logs


def test_a_missing_library_is_left_to_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are imported nevertheless; no line is a warning, since loading gives one."""
    logs = imported(monkeypatch, has_context=False)
    assert [(line["log_level"], line.get("module")) for line in logs] == [("info", "no_such_library")]


def test_memory_of_the_gpu_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that makes a context while the engine sleeps takes what was given back: a line says so."""
    logs = imported(monkeypatch, has_context=True)
    assert [line["log_level"] for line in logs] == ["info", "warning"]


def test_nothing_is_imported_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU needs none of it, and is asked for none."""
    monkeypatch.setattr(imports, "_OWN", ("no_such_library",))
    with capture_logs() as logs:
        imports.begin_imports(MoebiusConfig(gpu=GpuConfig(device="cpu"))).join()
    assert logs == []
