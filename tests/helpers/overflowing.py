"""A model one of whose tokens exceeds what float16 holds, and what an engine must do about it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gpu_service.core.request import FinishReason, Request, SamplingParams
from gpu_service.engine.sampler import overflow_error
from tests.helpers.tiny_models import make_tiny_model

MODEL, NUM_EXPERTS = "glm4_moe", 10
# The token whose hidden states overflow, and the layer whose always-active experts do it.
POISON, LAYER = 150, 2
_WAIT_S = 120.0


def make_overflowing(directory: Path) -> None:
    """Channel 0 of the token reaches 68 000 in that layer, whatever came before it; of no other one."""
    make_tiny_model(MODEL, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    block = f"model.layers.{LAYER}."
    embedding = tensors["model.embed_tokens.weight"]
    embedding[POISON] = 0.0
    embedding[POISON, 0] = 62_000.0
    # Next to that nothing else is left of its norm.
    channel = embedding.shape[1] ** 0.5 * tensors[f"{block}post_attention_layernorm.weight"][0]
    experts = f"{block}mlp.shared_experts."
    gate, up = (tensors[f"{experts}{name}_proj.weight"][:, 0] * channel for name in ("gate", "up"))
    active = torch.nn.functional.silu(gate) * up
    tensors[f"{experts}down_proj.weight"][0] = active.sign() * 6_000 / active.abs().sum()
    save_file(tensors, path, metadata={"format": "pt"})


def check_overflows(submit: Callable[[list[Request]], None], ended: threading.Semaphore) -> None:
    """In prompts of one chunk and of several, and in an output, each in a batch with others; twice, so that
    others have its pages next. `ended` counts requests that have ended, however they did.
    """
    expected = _run(submit, ended, alone := _good())
    assert [request.error_message for request in alone] == [""] * len(alone)
    for _ in range(2):
        likes_it = ((POISON, 100.0),)
        bad = [
            Request("short", [POISON, 10, 11, 12], _greedy()),
            # What is sampled from is another chunk than the one that overflows.
            Request("long", [POISON, *range(10, 60)], _greedy()),
            Request("output", [20, 21, 22], _greedy(likes_it)),
        ]
        others = _good()
        assert _run(submit, ended, [*bad, *others])[len(bad) :] == expected
        assert [request.error_message for request in others] == [""] * len(others)
        for request in bad:
            assert request.finish_reason is FinishReason.ERROR
            assert request.error_message == overflow_error(LAYER)
        # The token itself is sampled from finite logits; those after it are never seen.
        assert [request.output_token_ids for request in bad] == [[], [], [POISON]]


def _greedy(logit_bias: tuple[tuple[int, float], ...] = ()) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias=logit_bias)


def _good() -> list[Request]:
    """Returns the prompts of several lengths that never meet the token."""
    prompts = [[3 + (i * 31 + k * 7) % 140 for k in range(5 + 9 * i)] for i in range(3)]
    return [Request(f"g{i}", prompt, _greedy(((POISON, -100.0),))) for i, prompt in enumerate(prompts)]


def _run(
    submit: Callable[[list[Request]], None], ended: threading.Semaphore, requests: Sequence[Request]
) -> list[list[int]]:
    for request in requests:
        submit([request])
    for _ in requests:
        assert ended.acquire(timeout=_WAIT_S)
    return [request.output_token_ids for request in requests]
