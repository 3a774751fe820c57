"""Chooses the client the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from gpu_service.device import TORCH_DTYPES
from gpu_service.experts.client import ExpertClient
from gpu_service.experts.grpc_client import GrpcExpertClient
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.experts.mailbox_client import MailboxExpertClient
from moebius.config import MoebiusConfig
from moebius.mailbox import Mailbox, open_mailbox
from moebius.mailbox.plan import activation_dtype, mailbox_geometry, mailbox_names, slots_of
from moebius.models.checkpoint import open_index
from moebius.models.geometry import MoeGeometry
from moebius.models.identity import checkpoint_fingerprint

CPU = torch.device("cpu")


def make_expert_client(
    config: MoebiusConfig, geometry: MoeGeometry, device: torch.device = CPU, fingerprint: str = ""
) -> ExpertClient:
    """Returns a client of `config.experts.expert_transport`; servers need not be ready yet (`wait_ready`).

    `device` is where its tensors are: on a GPU the mailbox is driven by kernels, the others by the host.
    `fingerprint`: `expert_fingerprint` of the checkpoint where it was read already; empty: it is read now.
    Of several ranks (`config.parallel`) each is another client of the mailbox; before the first submission
    all must call `agree_with_ranks`.

    Raises ValueError naming a missing setting, MailboxError naming what does not fit, CheckpointError.
    """
    return _TRANSPORTS[config.experts.expert_transport](config, geometry, device, fingerprint)


def _dtype(config: MoebiusConfig, geometry: MoeGeometry) -> torch.dtype:
    return TORCH_DTYPES[activation_dtype(config, geometry)]


def _read_fingerprint(config: MoebiusConfig) -> str:
    return checkpoint_fingerprint(open_index(config.model.expert_checkpoint or config.model.model))


def _mailbox(
    config: MoebiusConfig, geometry: MoeGeometry, device: torch.device, fingerprint: str
) -> ExpertClient:
    experts = config.experts
    if not experts.mailbox:
        raise ValueError("expert_transport is 'mailbox', but mailbox is empty: it names the shared memory")
    stage, client = divmod(config.parallel.rank, config.parallel.tensor_parallel_size)
    name = mailbox_names(config)[config.parallel.data_parallel_rank]
    mailbox = open_mailbox(name, mailbox_geometry(config, geometry), client, stage)
    fingerprint = fingerprint or _read_fingerprint(config)
    if device.type == "cuda":
        return _doorbell(config, geometry, device, mailbox, fingerprint)
    return MailboxExpertClient(mailbox, geometry, experts.mailbox_deadline_ms, slots_of(config), fingerprint)


def _doorbell(
    config: MoebiusConfig, geometry: MoeGeometry, device: torch.device, mailbox: Mailbox, fingerprint: str
) -> ExpertClient:
    from gpu_service.experts.doorbell.client import DoorbellExpertClient
    from gpu_service.experts.doorbell.cuda_launcher import CudaLauncher
    from gpu_service.experts.doorbell.watch import Watch, watch_deadline_ms

    experts, slots = config.experts, slots_of(config)
    copy_kib = experts.hand_off_copy_kib
    launcher = CudaLauncher(
        mailbox,
        device,
        experts.mailbox_deadline_ms,
        experts.signal,
        None if copy_kib is None else copy_kib * 1024,
    )
    is_memops = experts.signal == "memops"
    watch = Watch(mailbox, slots, watch_deadline_ms(experts.mailbox_deadline_ms, is_memops), is_memops)
    return DoorbellExpertClient(
        mailbox, geometry, launcher, slots, experts.mailbox_deadline_ms, watch, fingerprint
    )


def _grpc(
    config: MoebiusConfig, geometry: MoeGeometry, device: torch.device, fingerprint: str
) -> ExpertClient:
    experts = config.experts
    if not experts.expert_addresses:
        raise ValueError("expert_transport is 'grpc', but expert_addresses is empty")
    dtype = _dtype(config, geometry)
    deadline_ms = experts.mailbox_deadline_ms
    fingerprint = fingerprint or _read_fingerprint(config)
    return GrpcExpertClient(experts.expert_addresses, geometry, dtype, deadline_ms, fingerprint)


def _local(
    config: MoebiusConfig, geometry: MoeGeometry, device: torch.device, fingerprint: str
) -> ExpertClient:
    dtype = _dtype(config, geometry)
    model = config.model
    return LocalExpertClient(
        model.model,
        geometry,
        dtype,
        config.experts.expert_dtype,
        expert_checkpoint=model.expert_checkpoint,
    )


_TRANSPORTS: Mapping[str, Callable[[MoebiusConfig, MoeGeometry, torch.device, str], ExpertClient]] = {
    "mailbox": _mailbox,
    "grpc": _grpc,
    "local": _local,
}
