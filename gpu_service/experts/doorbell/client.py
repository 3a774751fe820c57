"""Reaches expert servers of this host from a GPU stream: the mailbox's client without host work per layer.

`DoorbellLauncher` is what it needs of a device: work queued in the order of launches, and words it can set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from gpu_service.experts.client import (
    ExpertClientStats,
    ExpertComputeFailed,
    ExpertUnavailable,
    Ticket,
    check_submission,
)
from gpu_service.experts.doorbell.program import State
from gpu_service.experts.doorbell.watch import Watch, failure_of
from gpu_service.experts.servers import MailboxClient, MailboxServers
from moebius.mailbox import Mailbox, row_begin
from moebius.models.geometry import MoeGeometry
from moebius.telemetry import sampled_span_context


class DoorbellLauncher(ABC):
    """Queues the client's kernels on the device's current stream, where a graph may capture them.

    Tensors must live until the work has run, or as long as a graph that holds it.
    """

    @abstractmethod
    def pack(
        self,
        slot: int,
        layer: int,
        rows: int,
        begin: int,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> None:
        """Writes own rows `[begin, begin + n)` of a request of `rows` rows into `slot`, and rings.

        Contiguous `[n, H]` float32, bfloat16 or float16, int32 `[n, K]`, float32 `[n, K]`; n may be 0.
        """

    @abstractmethod
    def add(self, slot: int, layer: int, begin: int, partial: torch.Tensor) -> None:
        """Waits for the slot's answers; adds own rows `[begin, begin + n)` to float32 `[n, H]` in place."""

    @abstractmethod
    def set_words(self, first: int, values: Sequence[int]) -> None:
        """Sets words of `State`; not to be captured."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when all work queued so far on the steps' stream, which is the current one, has ended."""

    @abstractmethod
    def close(self) -> None:
        """Ends the work and gives up the device's hold on the mailbox. Graphs must be gone."""


SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class DoorbellChunk:
    """Rows [begin, end) of a ticket in one slot; filled by `DoorbellExpertClient`."""

    slot: int
    begin: int
    end: int


@dataclass(slots=True)
class DoorbellTicket(Ticket):
    """A layer cut into slot-sized chunks, of which as many as there are free slots are under way."""

    generation: int = 0
    next_row: int = 0
    chunks: deque[DoorbellChunk] = field(default_factory=deque)


class DoorbellExpertClient(MailboxClient):
    """One of the mailbox's clients. Slots are chosen alike in every step, and by every rank.

    All tickets of a step must be collected in it: a captured step then finds every slot free.
    """

    is_device_driven = True

    def __init__(
        self,
        mailbox: Mailbox,
        geometry: MoeGeometry,
        launcher: DoorbellLauncher,
        slots: range,
        deadline_ms: int,
        watch: Watch,
        fingerprint: str = "",
    ) -> None:
        """Claims the mailbox's client for the device. Raises MailboxError when another process is it."""
        self.geometry = geometry
        self._mailbox = mailbox
        self._launcher = launcher
        self._slots = slots
        self._deadline_ms = deadline_ms
        super().__init__(MailboxServers(mailbox, deadline_ms, fingerprint))
        self._watch = watch
        self._agree: Callable[[int], int] = _own
        self._generation = 0
        self._recoveries = 0
        self._traced = False
        self._free = list(slots)
        # Tickets with rows that found no free slot yet; the first one's are next.
        self._waiting: deque[DoorbellTicket] = deque()
        mailbox.kernel.claim(device=True)
        if mailbox.geometry.num_clients == 1:
            self._start_over()

    def agree_with_ranks(self, agree: Callable[[int], int]) -> None:
        self._agree = agree
        self._start_over()

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """What finds no free slot is submitted by `collect`, of this ticket or of an earlier one."""
        check_submission(self.geometry, layer, hidden_states, topk_ids, topk_weights)
        if hidden_states.dtype not in SOURCE_DTYPES:
            raise ValueError(f"hidden_states has dtype {hidden_states.dtype}; allowed: {SOURCE_DTYPES}")
        ticket = DoorbellTicket(
            layer,
            hidden_states.contiguous(),
            topk_ids.contiguous(),
            topk_weights.contiguous(),
            self._generation,
        )
        if ticket.rows:
            self._waiting.append(ticket)
        self._fill_slots()
        return ticket

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """A freed slot is refilled before the next chunk is awaited."""
        if not isinstance(ticket, DoorbellTicket) or ticket.generation != self._generation:
            raise ValueError("the ticket is not one of this client's since its last recovery")
        hidden_states = ticket.hidden_states
        if partial is None:
            partial = torch.zeros_like(hidden_states, dtype=torch.float32)
        elif partial.dtype != torch.float32 or not partial.is_contiguous():
            raise ValueError(f"partial is {partial.dtype}, {partial.stride()}; contiguous float32 expected")
        collected = 0
        while collected < ticket.rows:
            if not ticket.chunks:
                raise RuntimeError("no free mailbox slot: earlier tickets have to be collected first")
            chunk = ticket.chunks.popleft()
            own = self._own_rows(chunk)
            self._launcher.add(chunk.slot, ticket.layer, own.start - chunk.begin, partial[own])
            collected = chunk.end
            self._free.append(chunk.slot)
            self._fill_slots()
        return partial

    def _fill_slots(self) -> None:
        """Put the next rows of waiting tickets into free slots, the lowest first."""
        while self._free and self._waiting:
            ticket = self._waiting[0]
            slot, begin = min(self._free), ticket.next_row
            self._free.remove(slot)
            end = min(begin + self._mailbox.geometry.max_rows, ticket.rows)
            chunk = DoorbellChunk(slot, begin, end)
            own = self._own_rows(chunk)
            self._launcher.pack(
                slot,
                ticket.layer,
                end - begin,
                own.start - begin,
                ticket.hidden_states[own],
                ticket.topk_ids[own],
                ticket.topk_weights[own],
            )
            ticket.chunks.append(chunk)
            ticket.next_row = end
            if end == ticket.rows:
                self._waiting.popleft()

    def _own_rows(self, chunk: DoorbellChunk) -> slice:
        rows, clients = chunk.end - chunk.begin, self._mailbox.geometry.num_clients
        first, last = (row_begin(rows, self._mailbox.client + i, clients) for i in (0, 1))
        return slice(chunk.begin + first, chunk.begin + last)

    def begin_step(self) -> None:
        """Wakes sleeping servers, and hands on the trace context of a sampled step."""
        self._mailbox.kernel.wake_servers()
        self._watch.arm()
        span = sampled_span_context()
        if span is None and not self._traced:
            return
        self._traced = span is not None
        words = [0, 0, 0, 0]
        if span is not None:
            ids = span.trace_id.to_bytes(16, "big") + span.span_id.to_bytes(8, "big")
            words = [int.from_bytes(ids[i : i + 8], "little") for i in (0, 8, 16)] + [int(span.trace_flags)]
        self._launcher.set_words(State.TRACE, words)

    def failure(self) -> ExpertUnavailable | ExpertComputeFailed | None:
        """All ranks of the mailbox see the same step fail."""
        return failure_of(self._mailbox, self._deadline_ms, self._watch.reason)

    def wait_ready(self, timeout_s: float) -> None:
        generations = self._servers.wait_ready(timeout_s)
        self._launcher.set_words(State.GENERATION, generations)
        self._launcher.synchronize()

    def recover(self, timeout_s: float) -> None:
        """Ends the work of the steps' stream first, then starts over with all ranks."""
        self._launcher.synchronize()
        self._start_over()
        self.wait_ready(timeout_s)
        self._recoveries += 1

    def _start_over(self) -> None:
        """All slots are free, and epochs go on beyond everything outstanding. No step is running."""
        kernel = self._mailbox.kernel
        self._generation += 1
        self._free = list(self._slots)
        self._waiting.clear()
        if self._mailbox.client == 0:
            kernel.abandon_requests(self._slots.start, len(self._slots))
        # A barrier, too: until here a peer's device may still have waited for this rank's report.
        base = self._agree(kernel.highest_epoch())
        kernel.set_epoch(base)
        self._watch.restart(base)
        kernel.clear_failure()
        self._launcher.set_words(State.ARRIVED, [0] * (State.END - State.ARRIVED))
        self._launcher.set_words(State.EPOCH, [base, 0])
        # Steps run on another stream than this, perhaps.
        self._launcher.synchronize()

    def stats(self) -> ExpertClientStats:
        """The servers' own counters since they started: the host sees no single layer and no wait."""
        states = [self._mailbox.server_state(i) for i in range(self._mailbox.geometry.num_servers)]
        return ExpertClientStats(
            calls=max(state.calls for state in states),
            rows=max(state.rows for state in states),
            compute_seconds=tuple(state.busy_s for state in states),
            recoveries=self._recoveries,
        )

    def close(self) -> None:
        """Servers go on, waiting as for a host-driven client."""
        self._watch.close()
        self._launcher.close()
        self._mailbox.kernel.release()


def _own(value: int) -> int:
    return value
