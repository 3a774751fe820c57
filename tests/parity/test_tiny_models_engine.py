"""Invariant: the whole engine on a real (tiny) model says what transformers says, greedy tokens each.

Four requests at once, through chunked prefill, mixed batches, prefix hits, preemption, and both loops.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_service.core.request import Request, SamplingParams
from moebius.config import ExpertConfig, GpuConfig, ModelConfigSection, MoebiusConfig
from tests.helpers.built_engine import running_engine
from tests.helpers.tiny_models import KINDS, TINY_MODELS, greedy_answer, make_tiny_model

# Tokens of each answer, and pages of 4 tokens of which four such requests need more, so that someone is
# preempted: of `make test-all`, and otherwise.
LONG, SHORT = (64, 40), (10, 24)
SHARED = [11, 48, 190, 3, 66, 71, 28, 39, 5, 123, 8, 54]
PROMPTS = [
    [*SHARED, 201, 17, 90],
    [*SHARED, 4],
    [10, 210, 4],
    [(7 * i * i + 3 * i + 1) % 211 for i in range(50)],
]
ROOMY = GpuConfig(
    page_size=4, num_pages=256, max_num_batched_tokens=64, gpu_threads=1, overlap_scheduling=False
)


def kind(name: str) -> str:
    """Returns what the engine's loop keeps of a sequence; the model itself is test_tiny_models.py's
    business.
    """
    return next((kind for kind, models in KINDS.items() if name in models), "keys and values")


def cached(name: str) -> str:
    """Returns what decides how a sequence may be cut: a family, where its caches are its own; those of keys
    and values alone differ by their layers.
    """
    tiny = TINY_MODELS[name]
    if kind(name) != "keys and values":
        return tiny.model_type
    by_layer = ("window", "layer_types", "sink", "block", "pattern", "chunk")
    return " ".join(sorted(key for key in tiny.changes if any(part in key for part in by_layer)))


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Returns a checkpoint and transformers' model of it."""
    directory = tmp_path_factory.mktemp("engine")
    return directory, make_tiny_model(request.param, directory)


@pytest.fixture
def sizes(pytestconfig: pytest.Config) -> tuple[int, int]:
    return LONG if pytestconfig.getoption("--full") else SHORT


def _run(directory: Path, gpu: GpuConfig, num_tokens: int) -> list[Request]:
    """Returns all prompts at once; the requests after their end."""
    config = MoebiusConfig(
        # Towers are `test_vision.py`'s business.
        model=ModelConfigSection(model=str(directory), language_model_only=True),
        gpu=gpu,
        experts=ExpertConfig(expert_transport="local"),
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [Request(f"r{i}", list(prompt), params) for i, prompt in enumerate(PROMPTS)]
    with running_engine(config) as engine:
        engine.run(requests)
    return requests


def _answers(model: Any, requests: list[Request], num_tokens: int) -> list[list[int]]:
    """Returns what transformers answers to each prompt alone."""
    return [
        greedy_answer(model, prompt, num_tokens, request.output_token_ids)
        for prompt, request in zip(PROMPTS, requests, strict=True)
    ]


@pytest.mark.covering(1, tiny=kind)
def test_synchronous_engine_says_what_transformers_says(
    tiny: tuple[Path, Any], sizes: tuple[int, int]
) -> None:
    (directory, model), (num_tokens, _) = tiny, sizes
    requests = _run(directory, ROOMY, num_tokens)
    assert [request.output_token_ids for request in requests] == _answers(model, requests, num_tokens)


@pytest.mark.covering(1, tiny=cached)
def test_overlapped_preempting_engine_says_it_too(tiny: tuple[Path, Any], sizes: tuple[int, int]) -> None:
    (directory, model), (num_tokens, num_pages) = tiny, sizes
    tight = GpuConfig(page_size=4, num_pages=num_pages, max_num_batched_tokens=16, gpu_threads=1)
    requests = _run(directory, tight, num_tokens)
    assert [request.output_token_ids for request in requests] == _answers(model, requests, num_tokens)
    assert sum(request.num_preemptions for request in requests) > 0
