"""Invariant: pooled hidden states are those of transformers, whatever way the engine computed the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_service.core.request import Pooling, Request, SamplingParams
from moebius.config import ExpertConfig, GpuConfig, ModelConfigSection, MoebiusConfig
from tests.helpers.built_engine import running_engine
from tests.helpers.tiny_models import make_tiny_model

SHARED = [11, 48, 190, 3, 66, 71, 28, 39, 5, 123, 8, 54]
PROMPTS = [
    [*SHARED, 201, 17, 90],
    [*SHARED, 4],
    [10],
    [(7 * i * i + 3 * i + 1) % 211 for i in range(50)],
]
# Whole prompts at once; and steps of 16 tokens with few pages.
ROOMY = GpuConfig(
    page_size=4, num_pages=256, max_num_batched_tokens=64, gpu_threads=1, overlap_scheduling=False
)
TIGHT = GpuConfig(page_size=4, num_pages=32, max_num_batched_tokens=16, gpu_threads=1)
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "qwen3_next"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Returns a checkpoint of keys and values, of latents, or with recurrent states, and
    transformers' model.
    """
    directory = tmp_path_factory.mktemp("pooled")
    return directory, make_tiny_model(request.param, directory)


def expected(model: Any, prompt: list[int], pooling: Pooling) -> np.ndarray:
    """Returns transformers' last hidden state of the last token, or the mean of all tokens'."""
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    return states[-1] if pooling == Pooling.LAST else states.mean(0)


@pytest.mark.parametrize("gpu", [ROOMY, TIGHT], ids=["whole", "chunks"])
def test_pooled_states_are_those_of_transformers(tiny: tuple[Path, Any], gpu: GpuConfig) -> None:
    """Pooled states agree beside requests that write text, and twice, so that the second ones find cached
    prefixes.
    """
    directory, model = tiny
    config = MoebiusConfig(
        model=ModelConfigSection(model=str(directory), language_model_only=True),
        gpu=gpu,
        experts=ExpertConfig(expert_transport="local"),
    )
    text = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with running_engine(config) as engine:
        for turn in range(2):
            pooled = [
                Request(
                    f"{turn}-{pooling.name}-{index}",
                    list(prompt),
                    SamplingParams(max_tokens=1, pooling=pooling),
                )
                for index, prompt in enumerate(PROMPTS)
                for pooling in (Pooling.LAST, Pooling.MEAN)
            ]
            texts = [Request(f"{turn}-text-{index}", list(PROMPTS[index]), text) for index in (0, 3)]
            engine.run([*texts[:1], *pooled, *texts[1:]])
            for request in pooled:
                states, prompt = request.pooled_states, request.prompt_token_ids
                assert states is not None, request.request_id
                wanted = expected(model, prompt, request.params.pooling)
                assert np.abs(states - wanted).max() <= TOLERANCE * np.abs(wanted).max(), request.request_id
                assert len(request.output_token_ids) == 1


def test_a_prompt_that_is_computed_again_begins_a_new_sum() -> None:
    """After a preemption in the middle of a prompt no hidden state counts twice."""
    request = Request("r", [1, 2, 3, 4], SamplingParams(max_tokens=1, pooling=Pooling.MEAN))
    assert request.pooled_states is None
    for step_sum, from_start in ((1.0, True), (2.0, False), (3.0, True), (4.0, False)):
        request.add_pooled(np.full(2, step_sum, np.float32), from_start)
    assert request.pooled_states is not None
    assert request.pooled_states.tolist() == [7 / 4, 7 / 4]
