"""The checkpoint that drills serve, and greedy requests whose text is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.tiny_models import TinyModel, write_tiny_model
from tests.helpers.tiny_tokenizer import BOS, EOS, PAD, byte_level_tokenizer, write_tokenizer

MODEL = "drill"
# Every token takes all experts: a router's near tie would make the text depend on who shares the batch.
_NUM_EXPERTS = 6
# float32, so that batches differ by rounding only; choices closer than MARGIN are left out.
FLAGS = ("--served-model-name", MODEL, "--device", "cpu", "--dtype", "float32", "--num-pages", "1024")
# Smallest distance of the two best log-probabilities. Batches of float32 differ by about 1e-6 here.
MARGIN = 2e-4


def write_checkpoint(directory: Path, seed: int = 11) -> Path:
    """A tiny random model with a tokenizer; other weights for another `seed`. Returns `directory`."""
    tokenizer = byte_level_tokenizer()
    changes: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "num_hidden_layers": 2,
        "num_experts": _NUM_EXPERTS,
        "num_experts_per_tok": _NUM_EXPERTS,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "pad_token_id": tokenizer.token_to_id(PAD),
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    write_tiny_model(TinyModel("qwen3_moe", changes), directory, seed=seed)
    return write_tokenizer(directory, tokenizer)


@dataclass(frozen=True)
class GreedyCase:
    """A request and its text when nothing is disturbed; filled by `greedy_cases`."""

    body: dict[str, Any]
    text: str


def greedy_cases(base_url: str, count: int, max_tokens: int) -> list[GreedyCase]:
    """`count` prompts of different lengths, asked one at a time, that no rounding can turn."""
    cases: list[GreedyCase] = []
    for number in range(4 * count):
        if len(cases) == count:
            return cases
        prompt = f"Number {number}: the quick brown fox " + "jumps over the lazy dog " * (number % 7)
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        scored = body | {"logprobs": True, "top_logprobs": 2}
        reply = httpx.post(f"{base_url}/v1/chat/completions", json=scored, timeout=300)
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        best = [[one["logprob"] for one in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
        if all(first - second >= MARGIN for first, second in best):
            cases.append(GreedyCase(body, choice["message"]["content"]))
    raise RuntimeError(f"only {len(cases)} of {count} prompts have clear winners at every token")
