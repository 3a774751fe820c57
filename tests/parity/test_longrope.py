"""Invariant: a model with LongRoPE is transformers'; the longest served sequence chooses its factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moebius.models.config import ModelOverrides
from tests.helpers.gguf_models import reference_logits
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import TinyModel, write_tiny_model
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS

ORIGINAL = 16
ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [1.0 + 1.5 * pair for pair in range(8)],
}
PROMPT = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77, 31, 9, 180, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("longrope")
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "rope_parameters": ROPE}
    return directory, write_tiny_model(TinyModel("qwen3_moe", changes), directory, seed=11)


def _logits(directory: Path, prompt: list[int], longest: int | None) -> torch.Tensor:
    overrides = ModelOverrides(max_model_len=longest)
    _, logits = load_runner(directory, overrides=overrides).prefill(prompt, chunk=5)
    return logits


@pytest.mark.parametrize(
    ("longest", "length"), [(ORIGINAL, ORIGINAL), (ORIGINAL + 5, ORIGINAL + 5), (None, 21)]
)
def test_logits_are_those_of_transformers(
    checkpoint: tuple[Path, Any], longest: int | None, length: int
) -> None:
    """Logits agree for prompts on the side of the limit that the server is on, in chunks that begin
    below it.
    """
    directory, reference = checkpoint
    logits = _logits(directory, PROMPT[:length], longest)
    expected = reference_logits(reference, PROMPT[:length])
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


def test_the_two_sets_of_factors_differ(checkpoint: tuple[Path, Any]) -> None:
    """Guards the test above: with the other set, logits would be others."""
    short, long = (_logits(checkpoint[0], PROMPT[:12], longest) for longest in (ORIGINAL, None))
    assert (short - long).abs().max() > 100 * LOGITS_FLOAT32_VS_TRANSFORMERS
