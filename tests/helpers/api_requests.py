"""What tests of the APIs' translations and formats share."""

from __future__ import annotations

from pathlib import Path

from gateway.model import ServedModel, load_served_model
from gateway.text.tokenizer import Tokenizer
from protos import engine_pb2
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer


def served_model(directory: Path, supports_vision: bool = False) -> ServedModel:
    """A model as the prompt processes know it."""
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    info = engine_pb2.GetModelInfoResponse(
        model_path="tiny",
        max_context_length=4096,
        vocab_size=tokenizer.get_vocab_size(),
        served_model_name="tiny",
        eos_token_ids=[2],
        supports_vision=supports_vision,
    )
    return load_served_model(info, Tokenizer.from_dir(directory), "")
