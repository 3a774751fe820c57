"""The demo model's routed experts in kernel engines, divided in any way, behind the expert client's calls.

The servers' transports are left out: this shows the division of weights and the kernels alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.split import split_bounds
from moebius.kernels import ExpertEngine
from moebius.models.checkpoint import find_layout, open_index
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from tests.helpers.demo import demo_checkpoint

Split = Literal["tensor", "expert"]
WeightDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Share:
    """What one engine holds; filled by `shares_of`. Both are [begin, end)."""

    experts: tuple[int, int]
    channels: tuple[int, int]


def shares_of(geometry: MoeGeometry, split: Split, weights: Sequence[int]) -> list[Share]:
    """Divide every expert's intermediate channels ("tensor") or the list of experts ("expert") by
    `weights`.
    """
    all_experts = (0, geometry.num_experts)
    all_channels = (0, geometry.moe_intermediate_size)
    if split == "tensor":
        return [Share(all_experts, bounds) for bounds in split_bounds(all_channels[1], weights)]
    return [Share(bounds, all_channels) for bounds in split_bounds(all_experts[1], weights)]


def load_share(share: Share, geometry: MoeGeometry, weight_dtype: WeightDtype) -> ExpertEngine:
    """Return an engine with the share's weights, read from the demo checkpoint."""
    begin, end = share.experts
    channels = slice(*share.channels)
    engine = ExpertEngine(
        geometry.hidden_size,
        channels.stop - channels.start,
        end - begin,
        geometry.num_layers,
        expert_begin=begin,
        weight_format=weight_dtype,
        num_threads=1,
    )
    layout = find_layout(open_index(demo_checkpoint()), "glm4_moe")
    with SliceReader() as reader:
        for layer in geometry.moe_layers:
            for expert in range(begin, end):
                sources = layout.tensors(layer, expert)
                gate, up = (source.read(reader, rows=channels) for source in (sources.gate, sources.up))
                engine.load_expert(layer, expert, gate, up, sources.down.read(reader, cols=channels))
    return engine


class KernelExperts:
    """Computes a layer's routed experts by summing the engines' partial outputs."""

    call_log = None

    def __init__(self, engines: Sequence[ExpertEngine]) -> None:
        """`engines` together hold every intermediate channel of every expert exactly once."""
        self.engines = tuple(engines)

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute at once; the ticket is the answer, float32 [T, H]."""
        rows, ids, weights = (value.contiguous().numpy() for value in (hidden_states, topk_ids, topk_weights))
        partial = [torch.from_numpy(engine.forward(layer, rows, ids, weights)) for engine in self.engines]
        return torch.stack(partial).sum(dim=0)

    def collect(self, ticket: torch.Tensor, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Return what `submit` computed."""
        return ticket if partial is None else partial.add_(ticket)

    def interrupt(self) -> None:
        """Nothing is waited for."""

    def damages(self) -> int:
        """Nothing is compared."""
        return 0


@functools.lru_cache(maxsize=1)  # 212 MB in fp32
def kernel_experts(split: Split, weights: tuple[int, ...], weight_dtype: WeightDtype) -> KernelExperts:
    """Return the demo model's experts divided among `len(weights)` engines."""
    geometry = read_geometry(demo_checkpoint())
    shares = shares_of(geometry, split, weights)
    return KernelExperts([load_share(share, geometry, weight_dtype) for share in shares])
