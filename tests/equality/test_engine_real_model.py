"""Guards the engine on real models: its greedy tokens are those of transformers, however it schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.assembly.build import model_info
from gpu_service.core.request import Request, SamplingParams
from moebius.config import ExpertConfig, GpuConfig, ModelConfigSection, MoebiusConfig
from tests.helpers.built_engine import running_engine
from tests.helpers.tiny_models import make_tiny_model

LENGTHS = (5, 33, 18, 12)


def config_for(directory: Path, **gpu: Any) -> MoebiusConfig:
    """Returns the in-process expert reference and a small pool."""
    defaults: dict[str, Any] = {"num_pages": 64, "page_size": 4, "gpu_threads": 1}
    return MoebiusConfig(
        model=ModelConfigSection(model=str(directory), dtype="float32"),
        gpu=GpuConfig(**(defaults | gpu)),
        experts=ExpertConfig(expert_transport="local"),
    )


def prompts(vocab_size: int) -> list[list[int]]:
    """Returns four different prompts."""
    return [
        [(i * 37 + k * k * 5 + k) % (vocab_size - 3) + 3 for k in range(n)] for i, n in enumerate(LENGTHS)
    ]


def engine_tokens(config: MoebiusConfig, wanted: list[list[int]]) -> list[list[int]]:
    """Starts an engine as the process does, runs all prompts at once, stops it."""
    params = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=24)
    with running_engine(config) as engine:
        assert model_info(config, engine.built).max_context_length == engine.built.context_limit
        return engine.run([Request(f"r{i}", prompt, params) for i, prompt in enumerate(wanted)])


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
