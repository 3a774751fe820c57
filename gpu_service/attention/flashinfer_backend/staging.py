"""The memory that FlashInfer's planner works in, shared by all wrappers of a backend.

A plan is made on the host in a pinned buffer and copied to the device without waiting. Planning the next
step before that copy ran would corrupt the plan of a step that is still queued behind another: with
overlap scheduling this happens. So there are two pinned buffers in turn, each with an event recorded after
its copy; a buffer is written again only once its event has passed. By then the step before the last one
has ended, so the wait is not felt. On the device one buffer suffices: the copy of the next plan is queued
behind the kernels that read this one, because both are on the forward's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

# What FlashInfer's own constructors take.
PLAN_BYTES = 8 * 2**20
NUM_BUFFERS = 2


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used."""

    def record(self) -> None:
        """After what the current stream holds."""

    def synchronize(self) -> None:
        """Blocks until the recorded point has passed; at once if nothing was recorded."""


class PlanStaging:
    """Lends its buffers to one wrapper at a time, for one plan."""

    def __init__(
        self, device: torch.device, result_bytes: int, make_event: Callable[[], Event] | None = None
    ) -> None:
        pinned = device.type == "cuda"
        self.results = torch.zeros(result_bytes, dtype=torch.uint8, device=device)
        self.plans = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)
        self._hosts = [
            torch.empty(self.plans.shape, dtype=torch.uint8, pin_memory=pinned) for _ in range(NUM_BUFFERS)
        ]
        make: Callable[[], Event] = make_event or torch.cuda.Event
        self._events = [make() for _ in range(NUM_BUFFERS)]
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self.results.nbytes + self.plans.nbytes

    def reserve(self, result_bytes: int) -> None:
        """Gives wrappers adopted from now on at least this much; earlier ones keep what they have."""
        if self.results.nbytes < result_bytes:
            self.results = torch.zeros(result_bytes, dtype=torch.uint8, device=self.results.device)

    def adopt(self, wrapper: Any) -> Any:
        """Makes a new wrapper use the shared buffers. Returns it.

        Raises RuntimeError when this FlashInfer names them otherwise.
        """
        if not hasattr(wrapper, "_pin_memory_int_workspace_buffer"):
            raise RuntimeError(
                f"{type(wrapper).__name__} of this FlashInfer has no pinned plan buffer of the known name; "
                "supported: flashinfer-python >= 0.6.13, < 0.8"
            )
        wrapper._float_workspace_buffer = self.results
        wrapper._int_workspace_buffer = self.plans
        wrapper._pin_memory_int_workspace_buffer = self._hosts[0]
        return wrapper

    def plan(self, wrapper: Any, planner: Callable[..., None], *args: Any, **options: Any) -> None:
        """`planner(*args, **options)`, which plans for the wrapper, in the next free pinned buffer."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        event = self._events[self._turn]
        event.synchronize()
        wrapper._pin_memory_int_workspace_buffer = self._hosts[self._turn]
        planner(*args, **options)
        event.record()


def host_int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 on the host, pinned where a device copies from it without waiting."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
