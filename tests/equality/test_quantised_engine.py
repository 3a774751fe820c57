"""Invariant: an engine built whole on a quantised checkpoint says what transformers' dequantised model says.

With linear layers dequantised and with fp8 ones kept, as `dense_weights` has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.core.request import Request, SamplingParams
from moebius.config import MoebiusConfig
from tests.helpers.built_engine import running_engine
from tests.helpers.model_formats import MODEL_FORMATS
from tests.helpers.quantised_models import PROMPT, cached_plain_models, write_quantised

NEW_TOKENS = 12


def config_for(directory: Path, dense_weights: str) -> MoebiusConfig:
    gpu = {"device": "cpu", "gpu_threads": 1, "num_pages": 32, "page_size": 4, "max_num_seqs": 2}
    return MoebiusConfig.model_validate(
        {
            "model": {"model": str(directory), "dtype": "float32", "dense_weights": dense_weights},
            "gpu": {**gpu, "max_num_batched_tokens": 16},
            "experts": {"expert_transport": "local"},
        }
    )


@torch.inference_mode()
def greedy(reference: Any) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(NEW_TOKENS):
        tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("dense_weights", ["dequantise", "keep"])
def test_greedy_tokens_are_those_of_the_dequantised_model(
    dense_weights: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chosen = MODEL_FORMATS["fp8_block"]
    plain = cached_plain_models(tmp_path_factory.mktemp("plain"))("deepseek_v3")
    reference = write_quantised(plain, tmp_path, lambda _: chosen, chosen.config)
    request = Request(
        "r", list(PROMPT), SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    )
    with running_engine(config_for(tmp_path, dense_weights)) as engine:
        (found,) = engine.run([request])
    assert found == greedy(reference)
