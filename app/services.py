"""What runs in a service's process, by its word on the command line."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from moebius.config import MoebiusConfig

Role = Literal["expert", "gateway", "gpu"]


def service(role: Role) -> Callable[[MoebiusConfig], object]:
    """Returns the service's `run`; imports it, and nothing of the others."""
    if role == "expert":
        from expert_service.main import run as run_expert

        return run_expert
    if role == "gateway":
        from gateway.main import run as run_gateway

        return run_gateway
    from gpu_service.main import run as run_gpu

    return run_gpu


def run_service(role: Role, settings_file: str) -> object:
    """Runs a service with the settings of a file, which name the model in full; returns the exit status."""
    # As in a program: off while it imports; services switch it on when they are done.
    gc.disable()
    from moebius.config.loader import load_config
    from moebius.process.limits import check_limits

    check_limits(role)
    config = load_config(settings_file, {})
    return service(role)(config)
