"""NCCL's environment: what is set for ranks of one host, and what is in effect, for the log."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def set_up(host: str, num_hosts: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables that ranks need which meet at `host`, where the user has not.

    Ranks of one host talk over NVLink, PCIe or shared memory: NCCL need not look for network adapters, which
    takes time and fails in containers that see one without its device files. Those that meet on the loopback
    interface may have no other, which gloo and NCCL would look for otherwise.
    """
    if num_hosts == 1:
        environment.setdefault("NCCL_IB_DISABLE", "1")
    if host in LOOPBACK:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")


def in_effect(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns NCCL's variables by name, also those of torch for it."""
    names = sorted(name for name in environment if name.startswith(("NCCL_", "TORCH_NCCL_")))
    return {name: environment[name] for name in names}
