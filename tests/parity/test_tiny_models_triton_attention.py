"""Invariant: with the Triton attention, whole models give what they give with torch's, whatever a step mixes.

Float32 in Triton's interpreter; everything but attention is the same code on both sides.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.triton_backend import TritonAttention
from tests.helpers.paged_runner import PagedRunner, load_runner
from tests.helpers.tiny_models import make_tiny_model
from tests.tolerances import LOGITS_FLOAT32_SELF

PROMPTS = [[3, 17, 100, 5, 99, 42, 42, 8, 50, 23, 61, 2, 110, 77, 31], [10, 120, 4]]


def logits_of(runner: PagedRunner) -> torch.Tensor:
    """Returns a prompt in chunks, then its decodes with the second prompt's chunk, then both decoding."""
    first, prefill = runner.prefill(PROMPTS[0], chunk=6)
    first.tokens += [7, 8, 9]
    second, _ = runner.prefill(PROMPTS[1][:1])
    second.tokens += [*PROMPTS[1][1:], 5]
    mixed = runner.step([(first, 1), (second, 2)])
    decodes = [runner.step([(first, 1), (second, 1)])]
    return torch.cat([prefill, mixed, *decodes])


@pytest.mark.parametrize(
    "name",
    [
        # Windows and sinks, chosen blocks, and neither.
        *("gpt_oss", "minimax_m3_vl", "qwen3_moe"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("glm4_moe_groups_tied", "llama4")),
    ],
)
def test_models_do_not_see_the_difference(name: str, tmp_path: Path) -> None:
    make_tiny_model(name, tmp_path)
    expected = logits_of(load_runner(tmp_path))
    runner = load_runner(tmp_path)
    runner.attention = TritonAttention(runner.model.config.layers, runner.kv_cache, min_split=16)
    torch.testing.assert_close(logits_of(runner), expected, rtol=0, atol=LOGITS_FLOAT32_SELF)
