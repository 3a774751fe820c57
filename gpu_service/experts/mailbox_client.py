"""Reaches expert servers of this host through shared memory, driven by host code."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from gpu_service.device import TORCH_DTYPES
from gpu_service.experts.client import (
    ExpertClientStats,
    ExpertComputeFailed,
    ExpertUnavailable,
    Ticket,
    add_to,
    checked_inputs,
)
from gpu_service.experts.servers import MailboxClient, MailboxServers
from moebius import _kernels
from moebius.mailbox import (
    MAX_SERVERS,
    ExpertComputeError,
    Mailbox,
    MailboxError,
    ServerLost,
    ShutDown,
    StaleEpoch,
)
from moebius.models.geometry import MoeGeometry
from moebius.telemetry import sampled_span_context

# `ClientFailure::kAbandoned` of layout.h: not the cause, which this client's own exception names.
ABANDONED = 5


@dataclass(slots=True)
class RowChunk:
    """Rows [begin, end) of a ticket in one slot; filled by `MailboxExpertClient`."""

    slot: int
    epoch: int
    begin: int
    end: int
    submitted: float  # time.perf_counter()


@dataclass(slots=True)
class MailboxTicket(Ticket):
    """A layer cut into slot-sized chunks, of which as many as there are free slots are under way."""

    # How often the client had forgotten its tickets when this was submitted.
    generation: int = 0
    next_row: int = 0
    chunks: deque[RowChunk] = field(default_factory=deque)


class MailboxExpertClient(MailboxClient):
    """One of the mailbox's clients. More rows than a slot holds are pipelined over all slots.

    Several ranks are given the same submissions, and each brings and collects its own part of every slot's
    rows. When one fails it tells its peers, whose waits end at once; all must then recover.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        geometry: MoeGeometry,
        deadline_ms: int,
        slots: range | None = None,
        fingerprint: str = "",
    ) -> None:
        """`slots`: those of this client's group; None: all. `fingerprint`: see `Newcomers`."""
        self.geometry = geometry
        self._mailbox = mailbox
        self._deadline_ms = deadline_ms
        super().__init__(MailboxServers(mailbox, deadline_ms, fingerprint))
        self._dtype = TORCH_DTYPES[mailbox.geometry.dtype]
        self._max_rows = mailbox.geometry.max_rows
        self._generation = 0
        self._slots = range(mailbox.geometry.num_slots) if slots is None else slots
        self._free: deque[int] = deque(self._slots)
        # Tickets with rows that found no free slot yet; the first one's are next.
        self._waiting: deque[MailboxTicket] = deque()
        self._agree: Callable[[int], int] | None = None
        self._stats = ExpertClientStats()
        self._hand_off_s = 0.0
        self._compute_ns = [0] * mailbox.geometry.num_servers
        self._driver = _kernels.MailboxExperts(mailbox.kernel)

    def agree_with_ranks(self, agree: Callable[[int], int]) -> None:
        self._agree = agree
        self._mailbox.kernel.claim(device=False)
        self._start_over(agree)

    def _start_over(self, agree: Callable[[int], int]) -> None:
        """Epochs go on, on all ranks alike, beyond everything that any of them has rung."""
        kernel = self._mailbox.kernel
        if self._mailbox.client == 0:
            kernel.abandon_requests(self._slots.start, len(self._slots))
        # A barrier, too: until here a peer may still have waited for the news that this rank gave up.
        kernel.set_epoch(agree(kernel.highest_epoch()))
        kernel.clear_failure()

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """What finds no free slot is submitted by `collect`, of this ticket or of an earlier one."""
        parts = checked_inputs(self.geometry, layer, hidden_states, topk_ids, topk_weights, self._dtype)
        ticket = MailboxTicket(layer, *parts, self._generation)
        if ticket.rows:
            self._waiting.append(ticket)
        self._fill_slots()
        return ticket

    def _fill_slots(self) -> None:
        """Put the next rows of waiting tickets into all free slots."""
        span = sampled_span_context()
        while self._free and self._waiting:
            ticket = self._waiting[0]
            slot, begin = self._free.popleft(), ticket.next_row
            end = min(begin + self._max_rows, ticket.rows)
            if span is not None:
                trace_id, span_id = span.trace_id.to_bytes(16, "big"), span.span_id.to_bytes(8, "big")
                self._mailbox.set_trace(slot, trace_id, span_id, int(span.trace_flags))
            submitted = time.perf_counter()
            try:
                epoch = self._mailbox.submit(
                    slot,
                    ticket.layer,
                    _address(ticket.hidden_states, begin),
                    _address(ticket.topk_ids, begin),
                    _address(ticket.topk_weights, begin),
                    end - begin,
                )
            except ShutDown as error:
                raise ExpertUnavailable(-1, str(error)) from error
            ticket.chunks.append(RowChunk(slot, epoch, begin, end, submitted))
            ticket.next_row = end
            if end == ticket.rows:
                self._waiting.popleft()

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """A freed slot is refilled before the next chunk is awaited."""
        if not isinstance(ticket, MailboxTicket) or ticket.generation != self._generation:
            raise ValueError("the ticket is not one of this client's since its last failure")
        begin = time.perf_counter()
        # Of several ranks each writes its own rows only.
        make = torch.empty if self._mailbox.geometry.num_clients == 1 else torch.zeros
        output = make((ticket.rows, self.geometry.hidden_size), dtype=torch.float32)
        collected = 0
        while collected < ticket.rows:
            if not ticket.chunks:
                raise RuntimeError("no free mailbox slot: earlier tickets have to be collected first")
            chunk = ticket.chunks.popleft()
            try:
                self._collect_chunk(chunk, output)
            except ExpertComputeFailed:
                # The client stays usable: new requests override what is left of this and of later tickets.
                self._forget_tickets()
                raise
            collected = chunk.end
            self._free.append(chunk.slot)
            self._fill_slots()
        self._stats.wait_seconds += time.perf_counter() - begin
        self._stats.calls += 1
        self._stats.rows += ticket.rows
        return add_to(partial, output)

    def _collect_chunk(self, chunk: RowChunk, output: torch.Tensor) -> None:
        begin = time.perf_counter()
        try:
            spent = self._mailbox.collect(
                chunk.slot, chunk.epoch, _address(output, chunk.begin), self._deadline_ms
            )
        except (ServerLost, StaleEpoch, ShutDown) as error:
            self._tell_peers(error, chunk)
            raise _unavailable(error) from error
        except ExpertComputeError as error:
            self._tell_peers(error, chunk)
            raise _compute_failed(error) from error
        for server, nanoseconds in enumerate(spent):
            self._compute_ns[server] += nanoseconds
        end = time.perf_counter()
        # An answer that was there before it was asked for cost no more than its copy.
        self._hand_off_s += max(0.0, min(end - chunk.submitted - max(spent) * 1e-9, end - begin))

    @contextmanager
    def driven_by_host(self, rows: int) -> Iterator[_kernels.RoutedExperts | None]:
        """Not for several ranks, sampled traces, or more rows than a slot holds."""
        is_busy = self._waiting or len(self._free) < len(self._slots)
        is_shared = self._mailbox.geometry.num_clients > 1
        if is_busy or is_shared or rows > self._max_rows or sampled_span_context() is not None:
            yield None
            return
        self._driver.use(self._free[0], self._deadline_ms)
        try:
            yield self._driver
        except (ServerLost, StaleEpoch, ShutDown) as error:
            raise _unavailable(error) from error
        except ExpertComputeError as error:
            raise _compute_failed(error) from error
        finally:
            self._count(*self._driver.take_times())

    def _count(self, calls: int, rows: int, waited_ns: int, hand_off_ns: int, compute_ns: list[int]) -> None:
        self._stats.calls += calls
        self._stats.rows += rows
        self._stats.wait_seconds += waited_ns * 1e-9
        self._hand_off_s += hand_off_ns * 1e-9
        self._compute_ns = [old + new for old, new in zip(self._compute_ns, compute_ns, strict=True)]

    def _tell_peers(self, error: MailboxError, chunk: RowChunk) -> None:
        """Ends the waits of ranks that share the slots: this one will not ring again in this step."""
        if self._mailbox.geometry.num_clients == 1:
            return
        server = error.server_index if error.server_index >= 0 else MAX_SERVERS
        layer = max(error.layer, 0)
        self._mailbox.kernel.report_failure(ABANDONED, server, layer, chunk.slot, chunk.epoch)

    def wait_ready(self, timeout_s: float) -> None:
        self._servers.wait_ready(timeout_s)

    def recover(self, timeout_s: float) -> None:
        """All slots are free afterwards: a new epoch overrides an old request."""
        self._forget_tickets()
        if self._agree is not None:
            self._start_over(self._agree)
        self.wait_ready(timeout_s)
        self._stats.recoveries += 1

    def _forget_tickets(self) -> None:
        self._generation += 1
        self._free = deque(self._slots)
        self._waiting.clear()

    def stats(self) -> ExpertClientStats:
        compute = tuple(nanoseconds * 1e-9 for nanoseconds in self._compute_ns)
        counters = self._stats
        return ExpertClientStats(
            counters.calls,
            counters.rows,
            counters.wait_seconds,
            self._hand_off_s,
            compute,
            counters.recoveries,
        )

    def busy_seconds(self) -> float:
        return max(self._compute_ns) * 1e-9

    def close(self) -> None:
        """Another process may be this client from now on; servers keep running."""
        self._mailbox.kernel.release()


def _unavailable(error: MailboxError) -> ExpertUnavailable:
    return ExpertUnavailable(
        error.server_index, error.reason if isinstance(error, ServerLost) else str(error)
    )


def _compute_failed(error: ExpertComputeError) -> ExpertComputeFailed:
    return ExpertComputeFailed(f"expert server {error.server_index}: {error}")


def _address(tensor: torch.Tensor, row: int) -> int:
    """Returns the address of one row of a contiguous matrix, for the C++ side."""
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()
