"""The demo checkpoint, its bundled text and its golden values, for tests. Imports no torch."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.demo_model import build_demo_model, default_directory
from app.demo_model.download import fetch_gguf, silent

DATA = Path(__file__).parent.parent / "data"
GOLDEN_FILE = DATA / "demo_golden.json"

PROMPTS = (
    "What is the capital of France?",
    "What is a library?",
    "Who wrote Romeo and Juliet?",
    "List three reasons to learn a second language.",
    "Write one sentence about rain.",
)
MAX_NEW_TOKENS = 64
MODEL = "moebius-demo"
# Of `moebius serve`, where rounding must not choose: fp32, and all 16 experts, because the demo's routers
# score experts within a few ulps of one another.
EXACT_FLAGS = (
    *("--expert-servers", "2", "--served-model-name", MODEL),
    *("--dtype", "float32", "--experts-per-token", "16"),
)
REPETITION_PENALTIES = (1.0, 1.1)
HALF_TOKENS = 512
"""Length of the text that the test against the dense original scores."""
WINDOW_TOKENS = 128
"""Length of the short text window that the equality tests score."""


@dataclass(frozen=True)
class GoldenAnswer:
    """A greedy answer of the reference implementation in fp32; filled by `golden_answers`.

    prompt_ids, output_ids: token ids (output_ids ends with the end token when the answer is complete).
    min_margin: smallest difference of the two best penalised logits over all steps.
    min_routing_gap: smallest distance between a chosen and a refused expert's score. The prompts were picked
    so that both lie clearly above fp32 rounding: then every correct implementation gives the same tokens.
    """

    prompt: str
    repetition_penalty: float
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    min_margin: float
    min_routing_gap: float


@functools.cache
def demo_checkpoint() -> Path:
    """Return the demo checkpoint's directory; the first call on a machine builds it in the user's cache."""
    return build_demo_model()


@functools.cache
def demo_gguf() -> Path:
    """Return the dense original's GGUF, kept next to the demo checkpoint after its first download."""
    directory = default_directory().parent / "downloads"
    directory.mkdir(parents=True, exist_ok=True)
    return fetch_gguf(directory, silent)


def prose() -> str:
    """Return the bundled text (about 900 words of English prose written for this project)."""
    return (DATA / "demo_prose.txt").read_text()


def prose_ids() -> list[int]:
    """Return the bundled text's token ids under the demo tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(prose()).ids
    return ids


@functools.cache
def golden() -> dict[str, Any]:
    """Return the golden values that tests/tools/make_demo_golden.py recorded."""
    content: dict[str, Any] = json.loads(GOLDEN_FILE.read_text())
    return content


def golden_answers(repetition_penalty: float) -> list[GoldenAnswer]:
    """Return the recorded greedy answers to all prompts for one repetition penalty."""
    answers = [GoldenAnswer(**entry) for entry in golden()["answers"]]
    chosen = [answer for answer in answers if answer.repetition_penalty == repetition_penalty]
    assert len(chosen) == len(PROMPTS)
    return chosen
