"""The demo model in our own engine's layers, scored in fp32 with any expert client."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from gpu_service.core.request import Request, SamplingParams
from gpu_service.loader.load import load_weights
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from moebius.models.config import ModelOverrides
from moebius.models.read import read_model_config
from tests.helpers.demo import MAX_NEW_TOKENS, GoldenAnswer, demo_checkpoint
from tests.helpers.demo_experts import KernelExperts
from tests.helpers.engine_harness import Knobs
from tests.helpers.paged_runner import PagedRunner

if TYPE_CHECKING:
    from gpu_service.experts.client import ExpertClient

PAGE_SIZE = 16
# How an engine serves the demo model.
SERVING = Knobs(
    num_pages=256, page_size=PAGE_SIZE, max_num_seqs=16, budget=512, context_limit=256, overlap=True
)


@functools.lru_cache(maxsize=1)  # 320 MB
def demo_model(top_k: int | None = None) -> CausalLM:
    """Return the demo model in fp32 without its routed experts; `top_k` overrides experts per token."""
    config = read_model_config(demo_checkpoint(), ModelOverrides(top_k=top_k, dtype="float32"))
    model = build_model(config)
    load_weights(model, demo_checkpoint())
    return model


def prefill_logits(model: CausalLM, experts: ExpertClient | KernelExperts, ids: list[int]) -> torch.Tensor:
    """Return logits float32 [T, V] of all T ids, computed in one step on a KV cache of its own."""
    num_pages = 1 + -(-len(ids) // PAGE_SIZE)
    return PagedRunner(model, experts, page_size=PAGE_SIZE, num_pages=num_pages).prefill(ids)[1]


def greedy_request(name: str, answer: GoldenAnswer, max_tokens: int = MAX_NEW_TOKENS) -> Request:
    """A request for the recorded answer, or as many of its first tokens."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=answer.repetition_penalty, max_tokens=max_tokens
    )
    return Request(name, answer.prompt_ids, params)
