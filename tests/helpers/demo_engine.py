"""The demo model in our own engine's layers, scored in fp32 with any expert client."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

import torch

from gpu_service.attention.registry import make_attention
from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.request import Request, SamplingParams
from gpu_service.core.step import ForwardInputs
from gpu_service.layers.context import ForwardContext
from gpu_service.loader.load import load_weights
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from moebius.models.config import ModelOverrides
from moebius.models.read import read_model_config
from tests.helpers.demo import MAX_NEW_TOKENS, GoldenAnswer, demo_checkpoint
from tests.helpers.demo_experts import KernelExperts
from tests.helpers.engine_harness import Knobs

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


def one_request(ids: list[int]) -> ForwardInputs:
    """Returns the inputs of one step that prefills one request of T ids whole, with logits for every row."""
    count = len(ids)
    num_pages = -(-count // PAGE_SIZE)
    rows = torch.arange(count)
    return ForwardInputs(
        input_ids=torch.tensor(ids),
        positions=rows,
        slot_mapping=rows + PAGE_SIZE,  # page 0 is the dummy page
        block_table=torch.arange(1, num_pages + 1, dtype=torch.int32)[None],
        query_start_loc=[0, count],
        seq_lens=[count],
        logits_indices=rows,
        query_start_loc_tensor=torch.tensor([0, count], dtype=torch.int32),
        seq_lens_tensor=torch.tensor([count], dtype=torch.int32),
    )


@torch.inference_mode()
def prefill_logits(model: CausalLM, experts: ExpertClient | KernelExperts, ids: list[int]) -> torch.Tensor:
    """Return logits float32 [T, V] of all T ids, computed in one step on a KV cache of its own."""
    inputs = one_request(ids)
    pages = 1 + inputs.block_table.shape[1]
    cache = KVCache(model.config.layers, pages, PAGE_SIZE, model.dtype)
    attention = make_attention(model.config.layers, cache, "cpu")
    attention.plan(inputs)
    client = cast("ExpertClient", experts)  # KernelExperts has the two calls that a forward pass makes
    context = ForwardContext(inputs=inputs, kv_cache=cache, attention=attention, experts=client)
    return model.compute_logits(model(context))


def greedy_request(name: str, answer: GoldenAnswer, max_tokens: int = MAX_NEW_TOKENS) -> Request:
    """A request for the recorded answer, or as many of its first tokens."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=answer.repetition_penalty, max_tokens=max_tokens
    )
    return Request(name, answer.prompt_ids, params)
