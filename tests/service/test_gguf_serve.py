"""Invariant: `moebius serve FILE.gguf` needs nothing but the file, and answers as transformers' model does.

Gateway, engine and expert servers each read their part of it: tokenizer and template, dense weights, experts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import httpx

from gateway.text.tokenizer import Tokenizer
from tests.helpers.gguf_files import GgufTypes, write_gguf
from tests.helpers.gguf_models import CASES
from tests.helpers.gguf_tokenizers import add_byte_level
from tests.helpers.stack import running_stack
from tests.helpers.tiny_models import TinyModel, greedy_answer, write_tiny_model
from tests.helpers.tiny_tokenizer import BOS, EOS, byte_level_tokenizer

VOCABULARY, ANSWER = 408, 12
# Packed exactly and float32 elsewhere, so that greedy choices are the reference's; with this seed, its best
# logit leads by 0.05 at least.
TYPES = GgufTypes("Q4_0", "Q4_0", "F32")


def test_a_file_is_all_that_is_needed(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    changes = CASES["qwen3_moe_tied"].changes | {
        "vocab_size": VOCABULARY,
        "pad_token_id": tokenizer.token_to_id("<|pad|>"),
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    reference = write_tiny_model(TinyModel("qwen3_moe", changes), tmp_path / "published", seed=15)
    directory = tmp_path / "model"
    directory.mkdir()
    describe = partial(add_byte_level, tokenizer=tokenizer, pre="gpt-2", vocab_size=VOCABULARY)
    write_gguf(reference, directory / "tiny-Q4_0.gguf", TYPES, max_tensors=10, describe=describe)
    first = min(directory.iterdir())
    prompt = f"{BOS}user\nThe quick fox{EOS}\n{BOS}assistant\n"
    ids = tokenizer.encode(prompt).ids
    answer = greedy_answer(reference, ids, ANSWER)
    flags = ["--device", "cpu", "--num-pages", "16", "--expert-servers", "2", "--expert-split", "expert"]
    with running_stack(first, tmp_path, *flags) as stack:
        body = {
            "model": "tiny-Q4_0",
            "messages": [{"role": "user", "content": "The quick fox"}],
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        reply = httpx.post(f"{stack.base_url}/v1/chat/completions", json=body, timeout=60).json()
    assert reply["usage"]["prompt_tokens"] == len(ids), reply
    # Ids that the vocabulary leaves unused have a spelling in the file alone.
    wanted = Tokenizer.from_dir(first).decode(answer, skip_special_tokens=False)
    assert reply["choices"][0]["message"]["content"] == wanted
