"""Rows that go to chosen experts only, what the answers differ by, and who computed them.

Of servers that divide an expert, each is asked alone, for its own intermediate channels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
import torch

from gpu_service.experts.client import ExpertComputeFailed, ExpertUnavailable
from gpu_service.experts.grpc_client import GrpcExpertClient
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.verify.errors import relative_error
from moebius.checkpoint.split import equal_shares, split_bounds
from moebius.config import ExpertConfig, MoebiusConfig
from moebius.models.geometry import MoeGeometry
from moebius.network.grpc_channels import open_channel
from protos import expert_pb2, expert_pb2_grpc

# Rows that choose one expert alone, and rows that choose all of a probe's experts together.
ROWS_EACH = 4
ROWS_TOGETHER = 2
# What computes `[T, H]` rows with int32 `[T, K]` ids and float32 weights of a layer: float32 `[T, H]`.
Compute = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """Inputs for one layer; filled by `make_probe`. All tensors are on the CPU."""

    layer: int
    experts: tuple[int, ...]
    hidden_states: torch.Tensor  # [T, H]
    topk_ids: torch.Tensor  # int32 [T, K]
    topk_weights: torch.Tensor  # float32 [T, K]

    def run(self, compute: Compute, device: torch.device) -> torch.Tensor:
        """Returns what `compute` answers, float32 `[T, H]`, on the device still."""
        return compute(
            self.layer,
            self.hidden_states.to(device),
            self.topk_ids.to(device),
            self.topk_weights.to(device),
        )

    def errors(self, found: torch.Tensor, wanted: torch.Tensor) -> list[tuple[tuple[int, ...], float]]:
        """Returns the errors of each expert alone, then of rows that chose several together; both `[T, H]` on
        the CPU.
        """
        together = sorted(expert for expert in self.topk_ids[-1].tolist() if expert >= 0)
        groups: list[tuple[tuple[int, ...], int]] = [((expert,), ROWS_EACH) for expert in self.experts]
        groups.append((tuple(together), ROWS_TOGETHER))
        errors, begin = [], 0
        for experts, rows in groups:
            part = slice(begin, begin + rows)
            errors.append((experts, relative_error(found[part], wanted[part])))
            begin += rows
        return errors


def make_probe(layer: int, experts: Sequence[int], hidden_size: int, top_k: int, dtype: torch.dtype) -> Probe:
    """Returns the rows of variance 1, the same on every rank and in every process."""
    generator = torch.Generator().manual_seed(layer)
    single = ROWS_EACH * len(experts)
    rows = single + ROWS_TOGETHER
    hidden_states = torch.randn(rows, hidden_size, generator=generator).to(dtype)
    ids = torch.full((rows, top_k), -1, dtype=torch.int32)
    weights = torch.zeros(rows, top_k)
    for row in range(single):
        # Every column of the choice is looked at.
        ids[row, row % top_k] = experts[row // ROWS_EACH]
        weights[row, row % top_k] = 1.0
    chosen = list(experts)[:top_k]
    for row in range(single, rows):
        ids[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        weights[row, : len(chosen)] = torch.rand(len(chosen), generator=generator) + 0.5
    return Probe(layer, tuple(experts), hidden_states, ids, weights)


def spread(items: Sequence[int], count: int) -> tuple[int, ...]:
    """Returns the up to `count` of the items, evenly spread: the first, the last (for 2 or more), some
    between.
    """
    if count >= len(items):
        return tuple(items)
    if count <= 1:
        return tuple(items[:count])
    last = len(items) - 1
    return tuple(dict.fromkeys(items[round(i * last / (count - 1))] for i in range(count)))


def place_of(
    config: MoebiusConfig, geometry: MoeGeometry, experts: Sequence[int], on_device: Collection[int]
) -> str:
    """Returns the device, this process, or the expert servers that hold a part of any of the experts."""
    served = [expert for expert in experts if expert not in on_device]
    places = [] if len(served) == len(experts) else ["the engine's device"]
    if served:
        places.append(_servers(config.experts, geometry, served))
    return " and ".join(places)


def shares_experts(config: ExpertConfig) -> bool:
    """Returns whether several servers hold a part of every expert each."""
    return config.expert_split == "tensor" and _count(config) > 1


def _count(config: ExpertConfig) -> int:
    return len(config.expert_addresses) if config.expert_transport == "grpc" else config.split_count


def _servers(config: ExpertConfig, geometry: MoeGeometry, experts: Sequence[int]) -> str:
    if config.expert_transport == "local":
        return "the engine's own process"
    count = _count(config)
    holders = list(range(count))
    if config.expert_split == "expert":
        bounds = split_bounds(geometry.num_experts, equal_shares(count, config.split_shares))
        holders = [i for i, (begin, end) in enumerate(bounds) if any(begin <= e < end for e in experts)]
    names = [f"{i} ({config.expert_addresses[i]})" if config.expert_addresses else str(i) for i in holders]
    if len(names) == 1:
        return f"expert server {names[0]}"
    return f"expert servers {', '.join(names)}, each of which holds a part"


_log = structlog.get_logger(__name__)
_TIMEOUT_S = 5.0


def wrong_servers(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    dtype: torch.dtype,
    layer: int,
    expert: int,
    allowed: float,
) -> list[str] | None:
    """Names the servers whose part of the expert is off by more than `allowed`, and how far.

    Empty: asked by gRPC each gives the right part, so that the fault lies between them and here. None: they
    cannot be asked.
    """
    addresses = config.experts.expert_addresses
    if config.experts.expert_transport == "local" or not addresses:
        return None
    found: list[str] = []
    try:
        for index, address in enumerate(addresses):
            error = _error(config, geometry, dtype, layer, expert, address)
            if not error <= allowed:
                found.append(f"{index} ({address}), its own part off by {error:.3g}")
    except (grpc.RpcError, ExpertUnavailable, ExpertComputeFailed) as error:
        _log.warning("expert servers cannot be asked one by one", error=str(error))
        return None
    return found


def _error(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    dtype: torch.dtype,
    layer: int,
    expert: int,
    address: str,
) -> float:
    """Returns relative error of one server's part of an expert against the checkpoint."""
    intermediate_range = _intermediate_range(address)
    probe = make_probe(layer, (expert,), geometry.hidden_size, geometry.top_k, dtype)
    arguments = (layer, probe.hidden_states, probe.topk_ids, probe.topk_weights)
    reference = LocalExpertClient(
        config.model.model,
        geometry,
        dtype,
        keeps=False,
        intermediate_range=intermediate_range,
        expert_checkpoint=config.model.expert_checkpoint,
    )
    client = GrpcExpertClient([address], geometry, dtype, config.experts.mailbox_deadline_ms)
    try:
        client.wait_ready(_TIMEOUT_S)
        answer = client.collect(client.submit(*arguments))
    finally:
        client.close()
    return relative_error(answer, reference.collect(reference.submit(*arguments)))


def _intermediate_range(address: str) -> tuple[int, int]:
    """What the server says it holds of every expert."""
    make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
    with open_channel(address) as channel:
        info = make_stub(channel).Info(expert_pb2.InfoRequest(), timeout=_TIMEOUT_S)
    return info.intermediate_begin, info.intermediate_end
