"""NCCL's environment: what is set for ranks of one host, and what is in effect, for the log."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def set_up(
    host: str, num_hosts: int, environment: MutableMapping[str, str] | None = None
) -> Mapping[str, str]:
    """Sets what ranks need that meet at `host`, where the user has not; returns NCCL's variables in effect.

    Ranks of one host talk over NVLink, PCIe or shared memory: NCCL need not look for network adapters, which
    takes time and fails in containers that see one without its device files. Those that meet on the loopback
    interface may have no other, which gloo and NCCL would look for otherwise.
    """
    found = os.environ if environment is None else environment
    if num_hosts == 1:
        found.setdefault("NCCL_IB_DISABLE", "1")
    if host in LOOPBACK:
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
        found.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return {name: found[name] for name in sorted(found) if name.startswith(("NCCL_", "TORCH_NCCL_"))}
