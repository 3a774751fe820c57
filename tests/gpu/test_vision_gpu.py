"""Invariant: image prompts get on a GPU the answers of the CPU, in float32, with decode steps from graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moebius.config import GpuConfig
from tests.helpers.tiny_vision_models import VISION_MODELS, write_vision_model
from tests.helpers.vision_engine import vision_engine
from tests.parity.test_vision import PROMPTS

pytestmark = pytest.mark.gpu
SMALL = {"page_size": 4, "num_pages": 128, "max_num_batched_tokens": 16, "max_num_seqs": 8}


@pytest.mark.parametrize("name", sorted(VISION_MODELS))
def test_a_gpu_sees_what_a_cpu_sees(name: str, tmp_path: Path) -> None:
    """All experts are the device's, so that nothing of a decode step is the host's."""
    assert not torch.backends.cuda.matmul.allow_tf32, "float32 GEMMs are float32 here"
    write_vision_model(name, tmp_path)
    answers = []
    for device in ("cpu", "cuda"):
        gpu = GpuConfig.model_validate({**SMALL, "device": device})
        with vision_engine(tmp_path, gpu, gpu_experts_ratio=1.0 if device == "cuda" else 0.0) as engine:
            answers.append([request.output_token_ids for request in engine.run(PROMPTS)])
    assert answers[0] == answers[1]
