"""Invariant: a program that wakes takes its former one's choice of kernels, if all it depends on is equal."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu_service.assembly import kernels
from gpu_service.assembly.kernels import install_kernels
from gpu_service.assembly.kv_memory import CacheShape
from gpu_service.ops import backends
from gpu_service.ops.example_sizes import SMALL
from moebius.config import MoebiusConfig

CHOSEN = {"rms_norm": "triton"}
GPU = torch.device("cuda", 0)


class Process:
    """A process whose programs fall asleep and wake: what one hands over the next one takes over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.text, self.known = "", dict[str, str]()
        monkeypatch.setattr(kernels, "describe_device", lambda device: f"{device} with a driver")
        monkeypatch.setattr(kernels, "take_over_text", lambda name: self.text)
        monkeypatch.setattr(kernels, "hand_over_text", self._hand_over)
        monkeypatch.setattr(backends, "install", self._install)

    def start(self, device: torch.device = GPU, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> None:
        """Runs a program's start."""
        shape = CacheShape((), 16, dtype, dtype, device)
        install_kernels(MoebiusConfig(), device, shape, [replace(SMALL, **sizes)])

    def _hand_over(self, name: str, text: str) -> None:
        self.text = text

    def _install(self, *arguments: Any) -> dict[str, str]:
        self.known = arguments[-1]
        return CHOSEN


def test_the_choice_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """By each program, however often the process falls asleep."""
    process = Process(monkeypatch)
    process.start()
    assert process.known == {}
    for _ in range(2):
        process.start()
        assert process.known == CHOSEN


@pytest.mark.parametrize(
    "changed",
    [{"device": torch.device("cuda", 1)}, {"dtype": torch.float16}, {"hidden": 4096}],
    ids=["device", "dtype", "sizes"],
)
def test_what_differs_is_tried_again(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    """A kernel that fits one GPU, type or size need not fit another."""
    process = Process(monkeypatch)
    process.start()
    process.start(**changed)
    assert process.known == {}


@pytest.mark.parametrize("package", kernels._PACKAGES)
def test_another_version_is_tried_again(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """A package may be replaced while the engine sleeps."""
    process = Process(monkeypatch)
    process.start()
    before = kernels._version
    monkeypatch.setattr(kernels, "_version", lambda name: "new" if name == package else before(name))
    process.start()
    assert process.known == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"asked": 1, "chosen": []})])
def test_a_text_that_cannot_be_read_is_nothing(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Everything is tried, as at a first start."""
    process = Process(monkeypatch)
    process.text = text
    process.start()
    assert process.known == {}


def test_a_cpu_hands_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are not tried."""
    process = Process(monkeypatch)
    process.start(torch.device("cpu"), torch.float32)
    assert process.text == ""
