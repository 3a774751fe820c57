"""From the configuration to a rank's place in its group."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta

import structlog
import torch
from torch._C._distributed_c10d import TCPStore

from gpu_service.parallel.context import ParallelContext
from gpu_service.parallel.control import RankControl
from gpu_service.parallel.group import ProcessRankGroup, RankGroup, SoloGroup, make_process_groups
from gpu_service.parallel.rendezvous import Rendezvous, meet
from moebius.config import MoebiusConfig, ParallelConfig
from moebius.errors import PEER_LOST_EXIT, ConfigError
from protos import ranks_pb2

_log = structlog.get_logger(__name__)
# Collectives wait this many times as long as heartbeats: a rank may compile kernels inside its first steps
# while the others wait. That it is alive is the heartbeats' business.
_COLLECTIVE_PATIENCE = 5
# Settings that ranks of one group may differ in: a rank's own, and what only rank 0 uses.
_OWN_LEAVES = {
    "parallel": {"rank"},
    "gpu": {"gpu_metrics_port", "gpu_address", "gpu_threads"},
}
_OWN_SECTIONS = {"gateway", "supervisor", "telemetry"}


def place_of(settings: ParallelConfig) -> ParallelContext:
    """Which part this rank holds, without collectives yet. Raises ConfigError for a rank out of range."""
    size = settings.tensor_parallel_size * settings.pipeline_parallel_size
    if settings.rank >= size:
        raise ConfigError(f"rank: {settings.rank} is not allowed; allowed: 0 to {size - 1}")
    if size > 1 and not settings.rank_address:
        raise ConfigError(f"rank_address: empty, but {size} ranks have to meet; allowed: host:port")
    stage, tp_rank = divmod(settings.rank, settings.tensor_parallel_size)
    return ParallelContext(
        tp_rank=tp_rank,
        tp_size=settings.tensor_parallel_size,
        stage=stage,
        num_stages=settings.pipeline_parallel_size,
    )


def end_process(reason: str, own: bool) -> None:
    """The end of a rank whose group is lost: other threads may be inside a collective that never ends."""
    _log.error("the group of ranks ends", reason=reason)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if own else PEER_LOST_EXIT)


def join_group(
    config: MoebiusConfig, device: torch.device, on_lost: Callable[[str, bool], None] = end_process
) -> RankGroup:
    """Meets the other ranks and makes the process groups; the null object for one rank.

    Raises ConfigError for settings that contradict each other, UserError when ranks do not meet in time.
    """
    settings = config.parallel
    place = place_of(settings)
    if place.size == 1:
        return SoloGroup()
    rendezvous = Rendezvous(
        rank=place.rank,
        size=place.size,
        address=settings.rank_address,
        timeout_s=settings.rank_timeout_s,
        fingerprint=_fingerprint(config),
    )
    host, _ = rendezvous.host_port
    if host in ("127.0.0.1", "::1", "localhost"):
        # gloo would otherwise look for the interface that the host's name resolves to, if it does.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    listener = _store_listener(host) if place.rank == 0 else None
    own = ranks_pb2.Welcome(store_port=listener.getsockname()[1] if listener is not None else 0)
    connections, welcome = meet(rendezvous, own)
    control = RankControl(place.rank, place.size, connections, settings.rank_timeout_s, on_lost)
    store = _store(host, welcome.store_port, place.size, listener, settings.rank_timeout_s)
    parallel, agreement = make_process_groups(
        place,
        store,
        device,
        settings.rank_timeout_s * _COLLECTIVE_PATIENCE,
        settings.small_all_reduce == "one-shot",
    )
    _log.info("joined the group of ranks", rank=place.rank, ranks=place.size, device=str(device))
    return ProcessRankGroup(parallel, control, agreement)


def _store_listener(host: str) -> socket.socket:
    """On the ranks' own interface: the store itself would listen on all of them."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _store(host: str, port: int, size: int, listener: socket.socket | None, timeout_s: float) -> TCPStore:
    """Where process groups exchange addresses; rank 0 serves it."""
    return TCPStore(
        host,
        port,
        size,
        listener is not None,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _fingerprint(config: MoebiusConfig) -> str:
    """Digest of what all ranks must have alike, or their schedulers would part ways."""
    shared = config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=dict.fromkeys(names))
            for section, names in _OWN_LEAVES.items()
        }
    )
    text = shared.model_dump_json(exclude=_OWN_SECTIONS, warnings=False)
    return hashlib.sha256(text.encode()).hexdigest()
