"""Invariant: a device gets the best backend that is there; one asked for by name and missing is an error."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import structlog.testing
import torch

from gpu_service.attention import registry
from gpu_service.attention.registry import (
    ATTENTION_BACKENDS,
    MLA_BACKENDS,
    BackendEntry,
    check_attention_backend,
    choose_backend,
    make_attention,
)
from gpu_service.attention.torch_reference import TorchReferenceAttention
from moebius.errors import UserError
from tests.helpers.attention_cases import Geometry, make_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
THIS = __name__


class _Made:
    def __init__(self, config: Any, cache: Any) -> None:
        pass


class Able(_Made):
    @classmethod
    def unsupported(cls, config: Any, cache: Any) -> str:
        return ""


class Unable(_Made):
    @classmethod
    def unsupported(cls, config: Any, cache: Any) -> str:
        return "head_dim 80 has no kernel"


FIRST = BackendEntry(THIS, "Able", "json", "install json", device_type="cuda")
LAST = BackendEntry(THIS, "Able")


def choose(entries: dict[str, BackendEntry], name: str = "auto", device: torch.device = CUDA) -> Any:
    return type(choose_backend(entries, None, None, device, name))


def test_the_first_installed_is_taken_without_a_word() -> None:
    with structlog.testing.capture_logs() as logs:
        assert choose({"first": FIRST, "last": replace(LAST, class_name="Unable")}) is Able
    assert logs == []


@pytest.mark.parametrize(
    ("broken", "reason", "level"),
    [
        # The ops have warned of a missing package already.
        (
            replace(FIRST, package="not_there_at_all"),
            "package 'not_there_at_all' is not installed; install json",
            "info",
        ),
        (replace(FIRST, module="tests.no_such_module"), "cannot be imported", "warning"),
        (replace(FIRST, class_name="Unable"), "head_dim 80 has no kernel", "warning"),
    ],
)
def test_what_falls_out_costs_one_line_or_an_error_by_name(
    broken: BackendEntry, reason: str, level: str
) -> None:
    entries = {"first": broken, "second": replace(broken, class_name="Unable"), "last": LAST}
    with structlog.testing.capture_logs() as logs:
        assert choose(entries) is Able
    assert [log["log_level"] for log in logs] == [level]
    assert logs[0]["backend"] == "last"
    assert f"first: {reason}" in logs[0]["because"].replace("package 'json' ", "")
    assert "second: " in logs[0]["because"]
    with pytest.raises(UserError, match="attention_backend: 'first' cannot be used"):
        choose(entries, "first")


def test_what_does_not_run_here_is_left_to_the_next() -> None:
    """Kernels that a device cannot compile or hold show in a try-out, not at the first request."""

    def try_out(made: Any) -> None:
        raise RuntimeError("out of resource: shared memory, Required: 123392, Hardware limit: 101376\na page")

    entries = {"first": FIRST, "last": replace(LAST, cost="it is slower")}
    with structlog.testing.capture_logs() as logs:
        chosen = choose_backend(entries, None, None, CUDA, "auto", try_out)
    assert type(chosen) is Able
    (log,) = logs
    assert (log["log_level"], log["backend"], log["cost"]) == ("warning", "last", "it is slower")
    assert "first: its kernels do not run here (RuntimeError: out of resource: shared" in log["because"]
    assert "a page" not in log["because"]
    with pytest.raises(UserError, match=r"'first' cannot be used: its kernels do not run here"):
        choose_backend(entries, None, None, CUDA, "first", try_out)


def test_a_cpu_gets_the_reference_in_silence() -> None:
    case = make_case(Geometry(), [(3, 1)])
    with structlog.testing.capture_logs() as logs:
        chosen = make_attention(case.geometry.config().layers, case.cache, "cpu")
    assert isinstance(chosen, TorchReferenceAttention)
    assert logs == []
    for name in ("flashinfer", "triton"):
        with pytest.raises(UserError, match="needs a CUDA device, this one is 'cpu'"):
            make_attention(case.geometry.config().layers, case.cache, "cpu", name)


def test_a_missing_choice_is_seen_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("auto", "torch"):
        check_attention_backend(name, "cpu")
    with pytest.raises(UserError, match="'triton' cannot be used: it needs a CUDA device"):
        check_attention_backend("triton", "cpu")
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"package 'flashinfer' is not installed; install flashinfer-python"):
        check_attention_backend("flashinfer", "cuda")
    with pytest.raises(UserError, match="'fast' is unknown"):
        check_attention_backend("fast", "cuda")


def test_unknown_and_impossible_choices_are_refused() -> None:
    with pytest.raises(UserError, match="'fast' is unknown; allowed: auto, flashinfer, triton, cpu, torch"):
        choose(ATTENTION_BACKENDS, "fast")
    with pytest.raises(UserError, match="no attention backend can serve this model: only: head_dim 80"):
        choose({"only": replace(LAST, class_name="Unable")})


def test_without_flashinfer_a_gpu_user_learns_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        registry.importlib.util,  # type: ignore[attr-defined]
        "find_spec",
        lambda name: None if name == "flashinfer" else find(name),
    )
    case = make_case(Geometry(), [(3, 1)])
    with structlog.testing.capture_logs() as logs:
        chosen = choose_backend(ATTENTION_BACKENDS, case.geometry.config().layers, case.cache, CUDA, "auto")
    assert type(chosen).__name__ == "TritonAttention"
    assert len(logs) == 1
    assert "pip install 'moebius[gpu]'" in logs[0]["because"]


def test_every_entry_names_a_class() -> None:
    for entries in (ATTENTION_BACKENDS, MLA_BACKENDS):
        for name, entry in entries.items():
            assert entry.load().__name__.lower().startswith(name), name
