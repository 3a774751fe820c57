"""The choices of one MoE layer: expert servers are asked for their share, the device computes its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_service.experts.choice_samples import ChoiceSamples
from gpu_service.experts.client import ExpertCall, ExpertClient
from gpu_service.experts.resident.experts import ResidentExperts, Share
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.layers.deferral import Collect


@dataclass(frozen=True)
class AskedExperts:
    """A layer whose expert servers have their share; filled by `ask_experts`.

    Its choices are in parts with sums of their own, each computed first and then fetched, in order.
    """

    layer_id: int
    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    parts: tuple[torch.Tensor, ...]  # int32 [T, K] each, -1 where another part has the choice
    fetch: tuple[Collect, ...]  # by part: adds what servers answer
    resident: ResidentExperts | None  # None: nothing of the layer is resident, or streamed
    streamed: StreamedExperts | None

    def compute(self, partial: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Returns the device's share by part, float32 `[T, H]`, or what it was given; `partial` is the
        first's.
        """
        sums = [partial, *[None] * (len(self.parts) - 1)]
        rows, weights = self.hidden_states, self.topk_weights
        if self.resident is not None:
            pairs = zip(self.parts, sums, strict=True)
            sums = [self.resident.forward(self.layer_id, rows, ids, weights, own) for ids, own in pairs]
        if self.streamed is not None:
            sums = [*self.streamed.forward(self.layer_id, rows, self.parts, weights, sums)]
        return sums

    def collect(self, partial: torch.Tensor | None) -> torch.Tensor:
        """Returns `partial` `[T, H]` (None: zeros) with all choices, of a layer whose choices are
        one part.
        """
        (computed,) = self.compute(partial)
        return self.fetch[0](computed)


def ask_experts(
    layer_id: int,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: ExpertClient | None,
    resident: ResidentExperts | None,
    streamed: StreamedExperts | None = None,
    parts: Sequence[torch.Tensor] | None = None,
    samples: ChoiceSamples | None = None,
) -> AskedExperts:
    """Hands the expert servers their share of `[T, H]` rows, int32 `[T, K]` ids and float32 weights.

    What is returned computes the resident and the streamed share and collects: it adds all to a partial sum
    `[T, H]` (None: zeros), each chosen expert of each row once. Of several ranks each has only its part of
    the sum. `parts`: the ids in several tensors, each with a sum of its own and servers asked in this order.
    `samples` is given what the rows choose. Raises what the expert client and `streamed` raise, and
    RuntimeError when servers are needed and there is no client.
    """
    share = Share.NONE if resident is None else resident.share(layer_id)
    streams = Share.NONE if streamed is None else streamed.share(layer_id)
    divided = (topk_ids,) if parts is None else tuple(parts)
    if Share.ALL in (share, streams):
        fetch: tuple[Collect, ...] = (_only_partial,) * len(divided)
        if resident is not None and share is Share.SOME:
            resident.note(layer_id, topk_ids)
        if samples is not None:
            samples.note(layer_id, topk_ids, None if share is Share.ALL else topk_ids, None)
    elif experts is None:
        raise RuntimeError(f"layer {layer_id} routes to experts, but the context has no client")
    else:
        served = missing = topk_ids
        if resident is not None and share is not Share.NONE:
            served = missing = resident.cpu_ids(layer_id, served)
        if streamed is not None and streams is not Share.NONE:
            served = streamed.cpu_ids(layer_id, served)
        if samples is not None:
            samples.note(layer_id, topk_ids, missing, served)
        asked = [served] if parts is None else [served.masked_fill(ids < 0, -1) for ids in divided]
        fetch = tuple(_submit(layer_id, hidden_states, ids, topk_weights, experts) for ids in asked)
    here = resident if share is not Share.NONE else None
    streaming = streamed if streams is not Share.NONE else None
    return AskedExperts(layer_id, hidden_states, topk_weights, divided, fetch, here, streaming)


def _submit(
    layer_id: int,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: ExpertClient,
) -> Collect:
    if experts.call_log is not None and not experts.is_device_driven:
        return _submit_logged(layer_id, hidden_states, topk_ids, topk_weights, experts, experts.call_log)
    ticket = experts.submit(layer_id, hidden_states, topk_ids, topk_weights)
    return lambda partial: experts.collect(ticket, None if partial is None else partial.float())


def _submit_logged(
    layer_id: int,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: ExpertClient,
    log: list[ExpertCall],
) -> Collect:
    submitted = time.monotonic_ns()
    ticket = experts.submit(layer_id, hidden_states, topk_ids, topk_weights)

    def collect(partial: torch.Tensor | None) -> torch.Tensor:
        collecting = time.monotonic_ns()
        answer = experts.collect(ticket, None if partial is None else partial.float())
        log.append(ExpertCall(layer_id, hidden_states.shape[0], submitted, collecting, time.monotonic_ns()))
        return answer

    return collect


def _only_partial(partial: torch.Tensor | None) -> torch.Tensor:
    """Nothing is to be collected: the device has computed the whole layer."""
    assert partial is not None
    return partial
