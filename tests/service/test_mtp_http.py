"""Guards multi-token prediction as it is served: settings reach every process, and no token changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx

from tests.helpers.mtp_models import make_foreseen, write_mtp_model
from tests.helpers.stack import running_stack
from tests.helpers.tiny_models import TINY_MODELS, greedy_answer
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

PROMPT, TOKENS = [3, 17, 200, 5, 99, 42], 24
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


def test_drafts_of_the_models_own_layer_are_accepted_over_http(tmp_path: Path) -> None:
    """Expert servers hold the layer's experts, too; the engine asks for them in the shared mailbox."""
    from transformers import AutoModelForCausalLM

    tokenizer, checkpoint = byte_level_tokenizer(300), tmp_path / "model"
    tiny = TINY_MODELS["glm4_moe"]
    write_mtp_model(
        replace(tiny, changes=tiny.changes | {"vocab_size": tokenizer.get_vocab_size()}), checkpoint
    )
    make_foreseen(checkpoint)
    write_tokenizer(checkpoint, tokenizer)
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--speculative-method", "auto")
    with running_stack(checkpoint, tmp_path, *flags, "--no-adaptive-drafts") as stack:
        response = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=120)
        lines = httpx.get(f"{stack.base_url}/metrics", timeout=60).text.splitlines()
    assert response.status_code == 200, response.text
    reference = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    assert response.json()["choices"][0]["token_ids"] == greedy_answer(reference, PROMPT, TOKENS)
    accepted = sum(float(line.split()[-1]) for line in lines if line.startswith(ACCEPTED))
    assert accepted > 8
    details = response.json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == accepted
    assert details["rejected_prediction_tokens"] >= 0
