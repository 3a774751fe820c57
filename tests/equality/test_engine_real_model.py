"""Guards the engine on real models: its greedy tokens are those of transformers, however it schedules."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from gpu_service.build import WarmUpGate, build_engine, model_info
from gpu_service.engine.interface import OutputDelta
from gpu_service.request import Request, SamplingParams
from gpu_service.telemetry import EngineMetrics, EngineTelemetry
from moebius.config import ExpertConfig, GpuConfig, ModelConfigSection, MoebiusConfig
from tests.helpers.tiny_models import make_tiny_model

LENGTHS = (5, 33, 18, 12)


def config_for(directory: Path, **gpu: Any) -> MoebiusConfig:
    """The in-process expert reference and a small pool."""
    defaults: dict[str, Any] = {"num_pages": 64, "page_size": 4, "gpu_threads": 1}
    return MoebiusConfig(
        model=ModelConfigSection(model=str(directory), dtype="float32"),
        gpu=GpuConfig(**(defaults | gpu)),
        experts=ExpertConfig(expert_transport="local"),
    )


def prompts(vocab_size: int) -> list[list[int]]:
    """Four different prompts."""
    return [
        [(i * 37 + k * k * 5 + k) % (vocab_size - 3) + 3 for k in range(n)] for i, n in enumerate(LENGTHS)
    ]


def engine_tokens(config: MoebiusConfig, wanted: list[list[int]]) -> list[list[int]]:
    """Starts an engine as the process does, runs all prompts at once, stops it."""
    ended = threading.Semaphore(0)

    def on_output(deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                ended.release()

    gate = WarmUpGate()
    built = build_engine(config, EngineTelemetry(EngineMetrics("tiny", CollectorRegistry())), gate.on_output)
    built.engine.start()
    try:
        gate.run(built.engine, built.model_config.vocab_size, 30)
        gate.open(on_output)
        assert model_info(config, built).max_context_length == built.context_limit
        params = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=24)
        requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(wanted)]
        for request in requests:
            built.engine.submit([request])
        for _ in requests:
            assert ended.acquire(timeout=60)
    finally:
        built.engine.stop()
    built.engine.scheduler.check_integrity()
    assert [request.error_message for request in requests] == [""] * len(requests)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Mixed batches, chunks with overlap, and preemption in a pool too small for all: one truth."""
    reference = make_tiny_model(name, tmp_path)
    wanted = prompts(reference.config.vocab_size)
    expected = []
    for prompt in wanted:
        with torch.inference_mode():
            output = reference.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=24, min_new_tokens=24
            )
        expected.append(output[0, len(prompt) :].tolist())
    variants: list[dict[str, Any]] = [
        {"overlap_scheduling": False},
        {"max_num_batched_tokens": 16, "num_pages": 18},
    ]
    for gpu in variants:
        assert engine_tokens(config_for(tmp_path, **gpu), wanted) == expected
