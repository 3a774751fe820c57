"""The contract between MoE layers and whatever computes the routed experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moebius import _kernels
from moebius.models.geometry import MoeGeometry


class ExpertUnavailable(RuntimeError):
    """A server is gone or silent. After `recover` the whole step may be run again; nothing was changed."""

    def __init__(self, server_index: int, reason: str) -> None:
        super().__init__(f"expert server {server_index}: {reason}" if server_index >= 0 else reason)
        # -1: no server in particular.
        self.server_index = server_index
        self.reason = reason


class ExpertRefused(ExpertUnavailable):
    """What came back in a server's place is not that server, and stays so until somebody replaces it."""


class ExpertComputeFailed(RuntimeError):
    """A server refused or failed a request although it is alive; running it again would fail again."""


@dataclass(slots=True)
class Ticket:
    """A layer in flight; filled by `submit`, spent by `collect`. Holds the inputs until then."""

    layer: int
    hidden_states: torch.Tensor  # [T, H]
    topk_ids: torch.Tensor  # int32 [T, K]
    topk_weights: torch.Tensor  # float32 [T, K]

    @property
    def rows(self) -> int:
        """Token rows."""
        return self.hidden_states.shape[0]


@dataclass(slots=True)
class ExpertClientStats:
    """Counters since start, filled by the client."""

    # Layers collected, and token rows in them.
    calls: int = 0
    rows: int = 0
    # Wall time `collect` waited.
    wait_seconds: float = 0.0
    # Of that, what no server computed in: copying, signalling, waking up. None: it is not measured.
    hand_off_seconds: float | None = None
    # Each server's compute time, by server index.
    compute_seconds: tuple[float, ...] = ()
    recoveries: int = 0


class ExpertCall(NamedTuple):
    """One layer that host code handed to the expert servers; times are CLOCK_MONOTONIC in nanoseconds."""

    layer_id: int
    rows: int
    submitted_ns: int
    collecting_ns: int
    collected_ns: int


class ExpertClient(ABC):
    """Computes, for each row, the weighted sum of its chosen experts. One thread drives a client.

    At least one layer may be in flight. Every row count is allowed, 0 included.

    Two kinds: one that host code drives (`submit` and `collect` block and raise), and one that a device
    drives (`is_device_driven`): its calls only launch kernels, so that they may be captured in a graph, and
    what went wrong is known from `failure` once the step has ended.
    """

    geometry: MoeGeometry
    is_device_driven = False
    call_log: list[ExpertCall] | None = None
    """A profiler sets it while it runs; who submits and collects appends."""

    @abstractmethod
    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """Start a layer: `[T, H]` floating, int32 `[T, K]` (-1: none), float32 `[T, K]`.

        Raises ValueError for shapes or types that do not fit the model, ExpertUnavailable.
        """

    @abstractmethod
    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the layer; float32 `[T, H]`. Once per ticket, in the order of submission.

        With `partial`, float32 `[T, H]` (what the device computed of the same layer), the answer is added
        to it in place and it is returned; without, the answer is a new tensor.
        Raises ExpertUnavailable, or ExpertComputeFailed with the server's reason.
        """

    def driven_by_host(self, rows: int) -> AbstractContextManager[_kernels.RoutedExperts | None]:
        """Gives what C++ code may ask for the experts of layers of `rows` rows, one layer at a time, in
        place of `submit` and `collect`; None: it may not.

        No layer is in flight, and none is submitted meanwhile. Raises as `collect` at the end.
        """
        return nullcontext(None)

    def agree_with_ranks(self, agree: Callable[[int], int]) -> None:
        """Several ranks drive clients of one mailbox: `agree` gives all of them the largest of their numbers.

        Called by all ranks at once, before the first submission; later calls of `recover` agree, too.
        """
        return

    def begin_step(self) -> None:
        """Host work before a step is launched, such as waking idle servers."""
        return

    def failure(self) -> ExpertUnavailable | ExpertComputeFailed | None:
        """Returns what went wrong in the device-driven step that has just ended; None: nothing."""
        return None

    @abstractmethod
    def wait_ready(self, timeout_s: float) -> None:
        """Return when every server computes. Raises ExpertUnavailable naming the first that does not."""

    @abstractmethod
    def recover(self, timeout_s: float) -> None:
        """Forgets all tickets after ExpertUnavailable, and waits until every server is ready again.

        Servers that are lost again meanwhile are waited for, too, however often. Raises ExpertUnavailable
        when one is not ready within the time, and ExpertRefused at once where no wait would help.
        """

    def problem(self) -> str:
        """Why a layer submitted now would have to wait for a server; empty: it would be computed.

        Any thread may ask, whatever the one that drives the client does; answers within about a second.
        """
        return ""

    def damages(self) -> int:
        """Experts that servers have found damaged so far: answers before the latest find may be wrong."""
        return 0

    def interrupt(self) -> None:
        """Ends waits for servers, the one under way and later ones, with ExpertUnavailable. Any thread."""
        return

    def newcomers(self) -> tuple[int, ...]:
        """Servers that are ready and were started since `confirm`."""
        return ()

    def confirm(self) -> None:
        """The servers that are ready compute what they should."""
        return

    def reject(self, reason: str) -> None:
        """The newcomers compute something else: none of them is ready any more, their successors may be."""
        return

    def agree_on(self, answer: bool) -> bool:
        """Returns whether any rank says yes; all ranks call it at the same place."""
        return answer

    @abstractmethod
    def stats(self) -> ExpertClientStats:
        """Returns a snapshot of the counters."""

    def busy_seconds(self) -> float:
        """Returns seconds since start that the server which computed longest has computed."""
        return max(self.stats().compute_seconds, default=0.0)

    @abstractmethod
    def close(self) -> None:
        """Give up all resources; the client is unusable afterwards."""


def add_to(partial: torch.Tensor | None, answer: torch.Tensor) -> torch.Tensor:
    """Returns the rule of `ExpertClient.collect` for an answer that is complete: float32 `[T, H]` both."""
    return answer if partial is None else partial.add_(answer.to(partial.device))


def checked_inputs(
    geometry: MoeGeometry,
    layer: int,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tensors of a submission as they travel: contiguous, on the CPU, hidden states in `dtype`.

    Raises ValueError naming what of it does not fit the model.
    """
    check_submission(geometry, layer, hidden_states, topk_ids, topk_weights)
    return (
        hidden_states.to(device="cpu", dtype=dtype).contiguous(),
        topk_ids.to("cpu").contiguous(),
        topk_weights.to("cpu").contiguous(),
    )


def check_submission(
    geometry: MoeGeometry,
    layer: int,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Raises ValueError naming what of a submission does not fit the model."""
    if layer not in geometry.moe_layers:
        raise ValueError(f"layer {layer} has no routed experts; layers {list(geometry.moe_layers)} have")
    rows = hidden_states.shape[0]
    _check("hidden_states", hidden_states, (rows, geometry.hidden_size), None)
    _check("topk_ids", topk_ids, (rows, geometry.top_k), torch.int32)
    _check("topk_weights", topk_weights, (rows, geometry.top_k), torch.float32)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype | None) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; {list(shape)} expected")
    if tensor.dtype != dtype and (dtype is not None or not tensor.dtype.is_floating_point):
        raise ValueError(f"{name} has dtype {tensor.dtype}; {dtype or 'a floating type'} expected")
