"""Chooses the client the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from gpu_service.experts.client import ExpertClient
from gpu_service.experts.grpc_client import GrpcExpertClient
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.experts.mailbox_client import MailboxExpertClient
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig
from moebius.mailbox import Mailbox, MailboxGeometry
from moebius.mailbox_plan import activation_dtype, mailbox_geometry

ATTACH_TIMEOUT_S = 60.0


def make_expert_client(config: MoebiusConfig, geometry: MoeGeometry) -> ExpertClient:
    """A client of `config.experts.expert_transport`; servers need not be ready yet (`wait_ready`).

    Raises ValueError naming a missing setting, MailboxError naming what does not fit, CheckpointError.
    """
    return _TRANSPORTS[config.experts.expert_transport](config, geometry)


def _dtype(config: MoebiusConfig, geometry: MoeGeometry) -> torch.dtype:
    return torch.float32 if activation_dtype(config, geometry) == "float32" else torch.bfloat16


def open_mailbox(name: str, geometry: MailboxGeometry) -> Mailbox:
    """The supervisor's segment, or, where processes are started by hand, one made here.

    One made here stays when this process ends, so that a restarted engine finds the servers still
    attached; once nobody holds it any more, the next engine of that name replaces it.
    Raises MailboxError naming what does not fit.
    """
    if Mailbox.is_stale(name) or not Mailbox.exists(name):
        return Mailbox.create(name, geometry)
    return Mailbox.attach(name, ATTACH_TIMEOUT_S, geometry)


def _mailbox(config: MoebiusConfig, geometry: MoeGeometry) -> ExpertClient:
    experts = config.experts
    if not experts.mailbox:
        raise ValueError("expert_transport is 'mailbox', but mailbox is empty: it names the shared memory")
    mailbox = open_mailbox(experts.mailbox, mailbox_geometry(config, geometry))
    return MailboxExpertClient(mailbox, geometry, experts.mailbox_deadline_ms)


def _grpc(config: MoebiusConfig, geometry: MoeGeometry) -> ExpertClient:
    experts = config.experts
    if not experts.expert_addresses:
        raise ValueError("expert_transport is 'grpc', but expert_addresses is empty")
    dtype = _dtype(config, geometry)
    return GrpcExpertClient(experts.expert_addresses, geometry, dtype, experts.mailbox_deadline_ms)


def _local(config: MoebiusConfig, geometry: MoeGeometry) -> ExpertClient:
    dtype = _dtype(config, geometry)
    return LocalExpertClient(config.model.model, geometry, dtype, config.experts.expert_dtype)


_TRANSPORTS: Mapping[str, Callable[[MoebiusConfig, MoeGeometry], ExpertClient]] = {
    "mailbox": _mailbox,
    "grpc": _grpc,
    "local": _local,
}
