"""Tiny dense models that draft tokens for others, and what they propose, computed by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.helpers.gguf_files import GgufTypes, write_gguf
from tests.helpers.tiny_models import TinyModel, write_tiny_model

DENSE_MODELS = {
    "llama": TinyModel("llama", {"tie_word_embeddings": True, "hidden_size": 36}),
    "llama3": TinyModel(
        "llama",
        {
            "attention_bias": True,
            "num_hidden_layers": 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": TinyModel("mistral", {"sliding_window": 9, "num_key_value_heads": 6}),
    "qwen2": TinyModel("qwen2", {"num_hidden_layers": 2, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3": TinyModel("qwen3", {"num_hidden_layers": 2}),
    "moe": TinyModel("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 2}),
}


@dataclass(frozen=True)
class DraftReference:
    """Transformers' model in float32, which has seen all tokens again for each that it proposes."""

    model: Any

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """What may follow; of tokens beyond its vocabulary it reads the last."""
        last = self.model.config.vocab_size - 1
        known = [min(token, last) for token in tokens]
        for _ in range(count):
            known.append(int(self.model(torch.tensor([known])).logits[0, -1].argmax()))
        return known[len(tokens) :]


def write_draft_model(name: str, directory: Path, **changes: Any) -> DraftReference:
    """Writes a checkpoint of random values."""
    tiny = DENSE_MODELS[name]
    return DraftReference(
        write_tiny_model(TinyModel(tiny.model_type, tiny.changes | changes), directory, seed=len(name))
    )


def write_draft_gguf(name: str, path: Path) -> DraftReference:
    """Writes a GGUF file of 8-bit weights; the reference has the weights that the file says."""
    reference = write_draft_model(name, path.parent / f"{path.stem}-published")
    write_gguf(reference.model, path, GgufTypes(other="Q8_0"))
    return reference
