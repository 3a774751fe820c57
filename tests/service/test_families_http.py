"""Invariant: every family, served by all processes, answers over HTTP as transformers does in float32.

One process each of gateway, engine and expert server, whose kernels compute the experts. Logits are compared
as log-probabilities, those of the likeliest tokens at every position of a prompt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from tests.helpers.stack import running_stack
from tests.helpers.tiny_models import TINY_MODELS, greedy_answer, write_tiny_model
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS

# One of each; in every run that whose experts have no gate, between projections into a space of their own.
FAMILIES = {tiny.model_type: name for name, tiny in reversed(TINY_MODELS.items())}
FAMILIES["nemotron_h"] = ALWAYS = "nemotron_h_latent_dense"
PROMPT = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77, 31, 9, 180, 12, 13, 14, 15]
# As many as the gateway gives of a position.
ALTERNATIVES = 20
TOKENS = 48


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == ALWAYS else pytest.mark.full)
        for name in sorted(FAMILIES.values())
    ],
)
def test_logits_and_greedy_tokens_over_http(name: str, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(300)
    tiny, size = TINY_MODELS[name], tokenizer.get_vocab_size()
    tiny = replace(tiny, changes=tiny.changes | {"vocab_size": size})
    checkpoint = tmp_path / "model"
    reference = write_tiny_model(tiny, checkpoint, seed=sum(name.encode()))
    if not (checkpoint / "tokenizer.json").exists():  # n-grams are hashed by the model's own
        write_tokenizer(checkpoint, tokenizer)
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "prompt_logprobs": ALTERNATIVES,
        "return_token_ids": True,
    }
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--language-model-only")
    with running_stack(checkpoint, tmp_path, *flags) as stack:
        response = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT])).logits[0].float()
    assert logits.std() > 0.5, "flat logits would hide errors"
    for position, found in enumerate(choice["prompt_logprobs"][1:]):
        assert len(found) >= ALTERNATIVES
        expected = logits[position].log_softmax(-1)
        for token, one in found.items():
            error = abs(one["logprob"] - expected[int(token)].item())
            assert error <= LOGITS_FLOAT32_VS_TRANSFORMERS, (position, token)
    assert choice["token_ids"] == greedy_answer(reference, PROMPT, TOKENS)
