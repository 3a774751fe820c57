"""Guards that what a sleeping engine does ahead of its wake costs nothing: no failure, no memory of a GPU."""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from gpu_service.assembly import ahead
from gpu_service.assembly.ahead import AheadOfWake
from gpu_service.assembly.identity import read_identity
from gpu_service.ops import backends
from moebius.config import GpuConfig, ModelConfigSection, MoebiusConfig
from moebius.models.checkpoint import open_index
from moebius.models.served import read_served_model
from moebius.process.progress import take_phases
from protos.engine_pb2 import Constraint
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer
from tests.helpers.waiting import wait_until


def imported(monkeypatch: pytest.MonkeyPatch, has_context: bool) -> list[Any]:
    """Returns the log of imports for a GPU, with one library that is there and one that is not."""
    names = ("colorsys", "no_such_library")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(ahead, "_OWN", names)
    monkeypatch.setattr(ahead, "resolve_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(ahead, "has_context", lambda device: has_context)
    monkeypatch.setitem(backends.BACKENDS, "auto", ())
    with capture_logs() as logs:
        AheadOfWake(MoebiusConfig()).join()
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


def test_memory_of_a_wake_is_no_library_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake that begins during the imports makes a context beside them, of which nothing is said."""
    found: list[AheadOfWake] = []

    def has_context(device: torch.device) -> bool:
        wait_until(lambda: bool(found))
        found[0].wake()
        return True

    monkeypatch.setattr(ahead, "_OWN", ())
    monkeypatch.setattr(ahead, "resolve_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(ahead, "has_context", has_context)
    monkeypatch.setitem(backends.BACKENDS, "auto", ())
    with capture_logs() as logs:
        found.append(AheadOfWake(MoebiusConfig()))
        found[0].join()
    assert logs == []


def test_headers_are_held_until_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU needs none of the imports, but the headers."""
    monkeypatch.setattr(ahead, "_OWN", ("no_such_library",))
    model = ModelConfigSection(model=str(TinyMoe().write(tmp_path)))
    with capture_logs() as logs:
        found = AheadOfWake(MoebiusConfig(model=model, gpu=GpuConfig(device="cpu")))
        found.join()
    assert logs == []
    opened = weakref.ref(open_index(tmp_path))
    assert opened() is not None
    found.forget()
    gc.collect()
    assert opened() is None


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, AheadOfWake]:
    """Returns a model, and what an engine on a GPU has read of it while it slept."""
    make_tiny_model("qwen3_moe", tmp_path)
    write_tokenizer(tmp_path, byte_level_tokenizer())
    monkeypatch.setattr(ahead, "_OWN", ())
    monkeypatch.setattr(ahead, "resolve_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(ahead, "has_context", lambda device: False)
    monkeypatch.setitem(backends.BACKENDS, "auto", ())
    found = AheadOfWake(MoebiusConfig(model=ModelConfigSection(model=str(tmp_path))))
    found.join()
    found.wake()
    return tmp_path, found


def woken(model: Path, found: AheadOfWake) -> Any:
    """Returns what a wake gets of a model as it is now."""
    config = MoebiusConfig(model=ModelConfigSection(model=str(model)))
    return found.compiler(read_served_model(config), read_identity(config).parts)


def test_the_tokenizer_is_there_once(slept: tuple[Path, AheadOfWake]) -> None:
    """It compiles constraints, and its reading is no phase of the wake."""
    found = woken(*slept)
    assert found.make(Constraint(json_schema="{}"))[0].matcher is not None
    assert woken(*slept) is None
    assert "reading the tokenizer" not in take_phases()


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_tokenizer_of_other_files_is_not_taken(slept: tuple[Path, AheadOfWake], name: str) -> None:
    """Whatever has changed of the files that describe the model."""
    file = slept[0] / name
    file.write_text(json.dumps(json.loads(file.read_text()), indent=3))
    assert woken(*slept) is None


def test_a_wake_ends_what_is_not_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is imported still is waited for, and nothing of the model is read beside loading."""
    goes_on = threading.Event()
    monkeypatch.setattr(AheadOfWake, "_import_all", lambda self: goes_on.wait(60))
    monkeypatch.setattr(ahead, "read_ahead", lambda config: pytest.fail("read"))
    make_tiny_model("qwen3_moe", tmp_path)
    with capture_logs() as logs:
        found = AheadOfWake(MoebiusConfig(model=ModelConfigSection(model=str(tmp_path))))
        found.wake()
        goes_on.set()
        assert woken(tmp_path, found) is None
    assert logs == []


def test_a_missing_checkpoint_is_left_to_the_start(tmp_path: Path) -> None:
    """It may be there again by then; a line says why nothing was read."""
    model = ModelConfigSection(model=str(tmp_path / "gone"))
    with capture_logs() as logs:
        AheadOfWake(MoebiusConfig(model=model, gpu=GpuConfig(device="cpu"))).join()
    assert [line["log_level"] for line in logs] == ["info"]
