"""What one step computes: the host's plan (`Batch`) and its device form (`ForwardInputs`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gpu_service.request import Request
from gpu_service.vision.features import ImageFeatures


@dataclass(slots=True)
class Batch:
    """Filled by the scheduler; read by the input builder, the sampler and the commit."""

    requests: list[Request]
    # Tokens computed for each request: positions [start, start + num_new_tokens).
    start_positions: list[int]
    num_new_tokens: list[int]
    # Whether the step reaches the request's last known token, so that a next one is sampled.
    samples: list[bool]
    # Requests given a slot in this step; their known tokens must be uploaded before it runs.
    admitted: list[Request] = field(default_factory=list)
    # Which output token (from 0) each request samples; meaningless where `samples` is False.
    output_positions: list[int] = field(default_factory=list)
    step: int = 0
    # Of models with linear attention: the slots that each request's state is read from and written to.
    state_reads: list[int] = field(default_factory=list)
    state_writes: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(self.num_new_tokens)

    @property
    def is_uniform_decode(self) -> bool:
        """True when every request computes exactly one token (what a captured graph needs)."""
        return all(n == 1 for n in self.num_new_tokens)


@dataclass(slots=True)
class ForwardInputs:
    """Filled by the input builder. T = tokens, R = requests, L = rows whose logits are needed.

    Row order: requests in batch order, each request's tokens ascending by position.
    """

    input_ids: torch.Tensor  # int64 [T], gathered on the device from the token pool
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T], page * page_size + offset of each new token's KV
    block_table: torch.Tensor  # int32 [R, max_pages], padded with the dummy page 0
    query_start_loc: list[int]  # [R + 1], first row of each request
    seq_lens: list[int]  # [R], KV length after this step (start + new)
    logits_indices: torch.Tensor  # int64 [L], rows of hidden_states that go through the head
    # The two lists above as int32 tensors beside the others; a backend on a GPU reads these.
    query_start_loc_tensor: torch.Tensor
    seq_lens_tensor: torch.Tensor
    # int64 [3, T], rows of time, height and width, of a model with mRoPE; None: `positions` say it all.
    mrope_positions: torch.Tensor | None = None
    # What image tokens of the step are in the stream; None: there are none.
    image_features: ImageFeatures | None = None
    # int64 [R] each, of models with linear attention: slots of `StateCache`; no slot is read and written.
    state_reads: torch.Tensor | None = None
    state_writes: torch.Tensor | None = None
    trace_sampled: bool = False  # whether expert spans are recorded for this step

    @property
    def is_uniform_decode(self) -> bool:
        """True when every request computes exactly one token."""
        return self.query_start_loc[-1] == len(self.seq_lens)
