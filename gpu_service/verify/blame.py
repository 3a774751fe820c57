"""Which of the servers that divide an expert is wrong: each is asked alone, for its own neurons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import structlog
import torch

from gpu_service.experts.client import ExpertComputeFailed, ExpertUnavailable
from gpu_service.experts.grpc_client import GrpcExpertClient
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.verify.errors import relative_error
from gpu_service.verify.probe import make_probe
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig
from protos import expert_pb2, expert_pb2_grpc

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
    """In words, those whose part of the expert is off by more than `allowed`, and how far.

    Empty: asked by gRPC each gives the right part, so that the fault lies between them and here. None: they
    can not be asked.
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
        _log.warning("expert servers can not be asked one by one", error=str(error))
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
    """Of one server's part."""
    neurons = _neurons(address)
    probe = make_probe(layer, (expert,), geometry.hidden_size, geometry.top_k, dtype)
    arguments = (layer, probe.hidden_states, probe.topk_ids, probe.topk_weights)
    reference = LocalExpertClient(config.model.model, geometry, dtype, keeps=False, neurons=neurons)
    client = GrpcExpertClient([address], geometry, dtype, config.experts.mailbox_deadline_ms)
    try:
        answer = client.collect(client.submit(*arguments))
    finally:
        client.close()
    return relative_error(answer, reference.collect(reference.submit(*arguments)))


def _neurons(address: str) -> tuple[int, int]:
    """What the server says it holds of every expert."""
    make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
    with grpc.insecure_channel(address) as channel:
        info = make_stub(channel).Info(expert_pb2.InfoRequest(), timeout=_TIMEOUT_S)
    return info.intermediate_begin, info.intermediate_end
