"""What tests of the APIs' translations and formats share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.generation.model import ServedModel, load_served_model
from gateway.parsers.events import (
    ContentDelta,
    Finish,
    OutputEvent,
    ParsedDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from gateway.text.tokenizer import Tokenizer
from protos import engine_pb2
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer


def served_model(directory: Path, reasoning_parser: str = "qwen3") -> ServedModel:
    """Returns a model as the prompt processes know it."""
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    info = engine_pb2.GetModelInfoResponse(
        model_path="tiny",
        max_context_length=4096,
        vocab_size=tokenizer.get_vocab_size(),
        served_model_name="tiny",
        eos_token_ids=[2],
    )
    return load_served_model(info, Tokenizer.from_dir(directory), "", parsers=("hermes", reasoning_parser))


def delta(*events: OutputEvent, finish: Finish | None = None) -> ParsedDelta:
    """Returns one message of an engine, parsed."""
    return ParsedDelta(0, events, (), (), 1, finish=finish)


# A thought, a text and two calls.
ANSWER = [
    delta(ReasoningDelta("Let me ")),
    delta(ReasoningDelta("see.")),
    delta(ContentDelta("I look it up.")),
    delta(ToolCallStart(0, "call_1", "weather"), ToolCallArguments(0, '{"city": ')),
    delta(ToolCallArguments(0, '"Rome"}')),
    delta(ToolCallStart(1, "call_2", "weather"), ToolCallArguments(1, "{}")),
    delta(finish=Finish("tool_calls")),
]


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, whose names have to be their types."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
