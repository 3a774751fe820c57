"""Measures what the largest step needs, by running one, before the KV pool takes the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from gpu_service.attention.mla.base import MlaAttentionBackend
from gpu_service.attention.registry import Attention
from gpu_service.cache.kv_cache import PagedCache
from gpu_service.cache.state_cache import ZERO_SLOT, StateSlots
from gpu_service.core.step import ForwardInputs
from gpu_service.experts.client import ExpertClient, ExpertClientStats, Ticket, add_to
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.layers.context import ForwardContext
from gpu_service.memory.device_memory import DeviceMemory
from gpu_service.memory.plan import StepSize
from moebius.models.geometry import MoeGeometry


class NullExpertClient(ExpertClient):
    """For profiling: capturable, never fails, always ready."""

    is_device_driven = True

    def __init__(self, geometry: MoeGeometry) -> None:
        self.geometry = geometry

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """Holds the tensors as a real client does."""
        return Ticket(layer, hidden_states, topk_ids, topk_weights)

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Returns zeros `[T, H]`, or `partial` unchanged."""
        return add_to(partial, torch.zeros_like(ticket.hidden_states, dtype=torch.float32))

    def wait_ready(self, timeout_s: float) -> None:
        """Ready at once."""

    def recover(self, timeout_s: float) -> None:
        """Nothing was lost."""

    def stats(self) -> ExpertClientStats:
        """Nothing is counted."""
        return ExpertClientStats()

    def close(self) -> None:
        """Nothing is held."""


class ProfiledModel(Protocol):
    """What is profiled; `models.common.CausalLM` is the real one."""

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Returns hidden states `[T, H]`."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps `[L, H]` to float32 `[L, V]`."""


def profile_activations(
    model: ProfiledModel,
    make_cache: Callable[[int], PagedCache],
    make_attention: Callable[[PagedCache], Attention],
    geometry: MoeGeometry | None,
    step: StepSize,
    page_size: int,
    memory: DeviceMemory | None,
    sample: Callable[[torch.Tensor], object] = lambda logits: logits.softmax(-1).sort(-1),
    resident: ResidentExperts | None = None,
    states: StateSlots | None = None,
    vocab_size: int = 1,
    streamed: StreamedExperts | None = None,
) -> int:
    """Returns the most bytes of tensors alive during one step of `step.tokens` tokens, weights and cache not
    counted.

    The step is a prefill of one request on a cache of its own (`make_cache(pages)`); of latent attention,
    which computes otherwise after earlier tokens, also one after as many as it takes. Experts of servers
    answer zeros, those in `resident` and `streamed` are computed, `states` are there already, and `sample`
    is given `step.sequences` rows of logits. Its blocks stay reserved by the allocator, so that steps in
    service find them. 0 without a `memory`.
    """
    if memory is None:
        return 0
    cache = make_cache(1 + -(-step.tokens // page_size))
    attention = make_attention(cache)
    experts = NullExpertClient(geometry) if geometry is not None else None
    before = 0
    # A small step first: what libraries allocate once and keep is planned with the workspaces.
    for size in (StepSize(min(step.tokens, page_size), 1), step):
        memory.reset_peak()
        before = memory.use().allocated
        for earlier in _earlier_tokens(attention, page_size):
            inputs = profile_inputs(size, cache, vocab_size, earlier)
            if states is not None:
                inputs = with_dummy_states(inputs, states)
            context = ForwardContext(
                inputs, cache, attention, experts, resident=resident, streamed=streamed, states=states
            )
            _run(model, context, sample)
    return max(0, memory.use().peak - before)


def _earlier_tokens(attention: Attention, page_size: int) -> list[int]:
    """Returns the earlier tokens, in whole pages, of each step that has to be measured."""
    if not isinstance(attention, MlaAttentionBackend):
        return [0]
    index = attention.dimensions.index
    pages = 1 if index is None else -(-index.selected // page_size)
    return [0, pages * page_size]


@torch.inference_mode()
def _run(model: ProfiledModel, context: ForwardContext, sample: Callable[[torch.Tensor], object]) -> None:
    context.attention.plan(context.inputs)
    hidden_states = model.forward(context)
    sample(model.compute_logits(hidden_states[context.inputs.logits_indices]))


def with_dummy_states(inputs: ForwardInputs, states: StateSlots) -> ForwardInputs:
    """Returns the step of one request, from the state of zeros to the slot that no request has."""
    device = inputs.positions.device
    return replace(
        inputs,
        state_reads=torch.tensor([ZERO_SLOT], device=device),
        state_writes=torch.tensor([states.dummy_slot], device=device),
    )


def profile_inputs(step: StepSize, cache: PagedCache, vocab_size: int, earlier: int = 0) -> ForwardInputs:
    """Returns one request of `step.tokens` tokens in pages 1, 2, …; logits of as many rows as may be sampled.

    Its `earlier` tokens, whole pages of them, lie in the dummy page.
    """
    tokens, device = step.tokens, cache.device
    pages = -(-tokens // cache.page_size)
    positions = torch.arange(tokens, device=device)
    table = torch.zeros(1, earlier // cache.page_size + pages, dtype=torch.int32, device=device)
    table[0, -pages:] = torch.arange(1, pages + 1)
    return ForwardInputs(
        input_ids=positions % vocab_size,
        positions=positions + earlier,
        slot_mapping=positions + cache.page_size,
        block_table=table,
        query_start_loc=[0, tokens],
        seq_lens=[earlier + tokens],
        logits_indices=positions[-min(step.sequences, tokens) :],
        query_start_loc_tensor=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        seq_lens_tensor=torch.tensor([earlier + tokens], dtype=torch.int32, device=device),
    )
