"""Fetch slots over experts of made servers: what a step's kernels need, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_service.experts.fetching.slots import FetchLayer, FetchState, addresses_of, make_state
from gpu_service.experts.streaming.segments import ExpertSegments
from tests.helpers.stored_experts import MadeServer

# Prices at which copies of one expert take as long as servers take for three pairs.
SERVER_SECONDS, LINK_SECONDS = 16e-6, 48e-6


def fetch_state(
    servers: Sequence[MadeServer],
    num_slots: int,
    device: torch.device | None = None,
    segments: ExpertSegments | None = None,
    prices: tuple[float, float] = (SERVER_SECONDS, LINK_SECONDS),
    ranks: tuple[int, int] = (0, 1),
) -> tuple[FetchState, ExpertSegments]:
    """Returns the state of all layers, with addresses and prices; `segments`: those to copy from, which have
    to be kept; `ranks`: the number of the rank, and how many there are.
    """
    shape, layers = servers[0].shape, range(servers[0].num_layers)
    found = segments or ExpertSegments([server.segment() for server in servers], layers)
    is_tensor = servers[0].part.experts == servers[-1].part.experts
    kinds = {
        layer: [part.kind for part in (found.stored[layer] if is_tensor else found.stored[layer][:1])]
        for layer in layers
    }
    limits = dict.fromkeys(layers, shape.limit)
    state = make_state(kinds, num_slots, shape.experts, limits, device or torch.device("cpu"), *ranks)
    rows = []
    for layer in layers:
        stored = [(part, found.data[part.segment].data_ptr() + part.offset) for part in found.stored[layer]]
        rows.append(addresses_of(kinds[layer], stored, shape.experts))
    state.addresses.copy_(torch.tensor(rows, dtype=torch.int64))
    state.prices.copy_(torch.tensor(prices).expand_as(state.prices))
    return state, found


def check_layer(layer: FetchLayer, number: int, segments: ExpertSegments) -> None:
    """Raises AssertionError unless each slot holds one expert at most, and all its parts are the servers'."""
    slots = [slot for slot in layer.slot_of_expert.tolist() if slot >= 0]
    assert len(slots) == len(set(slots)) <= layer.count
    assert sorted(slots) == list(range(len(slots)))
    for expert, slot in enumerate(layer.slot_of_expert.tolist()):
        if slot < 0:
            continue
        held = [part for part in segments.stored[number] if expert in part.experts]
        for part, group in zip(held, layer.groups, strict=True):
            begin = part.offset + part.experts.index(expert) * part.kind.expert_bytes
            bytes_there = segments.data[part.segment][begin : begin + part.kind.expert_bytes]
            assert torch.equal(group.weights[slot].cpu(), bytes_there)
