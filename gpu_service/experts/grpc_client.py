"""Reaches expert servers anywhere by gRPC, a `Compute` stream each; the records are those of the mailbox."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import torch

from gpu_service.experts.client import (
    ExpertClientStats,
    ExpertComputeFailed,
    ExpertUnavailable,
    Ticket,
    add_to,
    checked_inputs,
)
from gpu_service.experts.grpc_servers import GrpcServers
from gpu_service.experts.servers import ServedClient
from moebius.mailbox.plan import INSTANCE_METADATA, MOST_GRPC_ROWS
from moebius.models.geometry import MoeGeometry
from moebius.network.grpc_channels import open_channel
from moebius.telemetry import sampled_span_context, traceparent
from protos import expert_pb2, expert_pb2_grpc

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A server that was restarted is to be found again soon.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]
_PROTO_DTYPES = {
    torch.float32: expert_pb2.DTYPE_FLOAT32,
    torch.bfloat16: expert_pb2.DTYPE_BFLOAT16,
    torch.float16: expert_pb2.DTYPE_FLOAT16,
}


@dataclass(slots=True)
class GrpcTicket(Ticket):
    """A layer sent to all servers, in one record or, beyond MOST_GRPC_ROWS rows, in several."""

    # Of the first record; the others follow it.
    epoch: int = 0
    # Recoveries of the client when this was submitted.
    generation: int = 0


class GrpcExpertClient(ServedClient[GrpcServers]):
    """Sends every record to all servers and adds their partial sums in server order."""

    def __init__(
        self,
        addresses: Sequence[str],
        geometry: MoeGeometry,
        dtype: torch.dtype,
        deadline_ms: int,
        fingerprint: str = "",
    ) -> None:
        """`fingerprint` of the engine's checkpoint, see `Newcomers`."""
        self.geometry = geometry
        self._dtype = dtype
        self._deadline_s = deadline_ms / 1000
        self._channels = [open_channel(address, _OPTIONS) for address in addresses]
        super().__init__(GrpcServers(self._channels, fingerprint))
        # Processes that were found ready and right, by server; empty: no others may be asked.
        self._instances: list[int] = []
        self._streams: list[ComputeStream] = []
        self._epoch = 0
        self._generation = 0
        # By server, as its latest answer said; and of all, also of processes that are gone.
        self._damages = [0] * len(addresses)
        self._all_damages = 0
        self._stats = ExpertClientStats(compute_seconds=(0.0,) * len(self._channels))

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        parts = checked_inputs(self.geometry, layer, hidden_states, topk_ids, topk_weights, self._dtype)
        ticket = GrpcTicket(layer, *parts, self._epoch + 1, self._generation)
        if not self._streams:
            self._streams = self._open_streams()
        for rows in _records(ticket.rows):
            self._epoch += 1
            request = self._record(ticket, rows)
            for stream in self._streams:
                stream.send(request)
        return ticket

    def _open_streams(self) -> list[ComputeStream]:
        """To the processes that `wait_ready` has found. Raises ExpertUnavailable when it has found none."""
        if not self._instances:
            raise ExpertUnavailable(-1, "the expert servers are not ready")
        pairs = enumerate(zip(self._channels, self._instances, strict=True))
        return [ComputeStream(index, channel, instance) for index, (channel, instance) in pairs]

    def _record(self, ticket: GrpcTicket, rows: slice) -> expert_pb2.ComputeRequest:
        span = sampled_span_context()
        return expert_pb2.ComputeRequest(
            epoch=self._epoch,
            layer=ticket.layer,
            rows=rows.stop - rows.start,
            dtype=_PROTO_DTYPES[self._dtype],
            hidden_states=_bytes(ticket.hidden_states[rows]),
            topk_ids=_bytes(ticket.topk_ids[rows]),
            topk_weights=_bytes(ticket.topk_weights[rows]),
            traceparent=traceparent(span) if span is not None else "",
        )

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(ticket, GrpcTicket) or ticket.generation != self._generation:
            raise ValueError("the ticket is not one of this client's since its last recovery")
        begin = time.perf_counter()
        output = torch.zeros((ticket.rows, self.geometry.hidden_size), dtype=torch.float32)
        spent = list(self._stats.compute_seconds)
        for index, stream in enumerate(self._streams):
            for number, rows in enumerate(_records(ticket.rows)):
                remaining = self._deadline_s - (time.perf_counter() - begin)
                answer = stream.receive(ticket.epoch + number, max(0.0, remaining))
                wanted = output[rows]
                if len(answer.output) != wanted.nbytes:
                    message = f"answered {len(answer.output)} bytes instead of {wanted.nbytes}"
                    raise ExpertUnavailable(index, message)
                # A bytearray, because torch wants writable memory.
                share = torch.frombuffer(bytearray(answer.output), dtype=torch.float32)
                wanted += share.view_as(wanted)
                spent[index] += answer.compute_seconds
                self._note_damages(index, answer.damages)
        counters = self._stats
        self._stats = replace(
            counters,
            calls=counters.calls + 1,
            rows=counters.rows + ticket.rows,
            wait_seconds=counters.wait_seconds + time.perf_counter() - begin,
            compute_seconds=tuple(spent),
        )
        return add_to(partial, output)

    def _note_damages(self, index: int, count: int) -> None:
        """Adds the damages that a server reports to those counted; a restarted server counts from 0."""
        if count > self._damages[index]:
            self._all_damages += count - self._damages[index]
        self._damages[index] = count

    def damages(self) -> int:
        return self._all_damages

    def wait_ready(self, timeout_s: float) -> None:
        """Waits as `GrpcServers.wait_ready`."""
        self._instances = self._servers.wait_ready(timeout_s)

    def recover(self, timeout_s: float) -> None:
        """Opens new streams, so that late answers cannot be mistaken."""
        self._close_streams()
        self._instances = []
        self._generation += 1
        self.wait_ready(timeout_s)
        self._stats = replace(self._stats, recoveries=self._stats.recoveries + 1)

    def stats(self) -> ExpertClientStats:
        return replace(self._stats)

    def close(self) -> None:
        self._close_streams()
        for channel in self._channels:
            channel.close()

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams = []


def _records(rows: int) -> list[slice]:
    """Returns the rows of each record of a ticket: at most MOST_GRPC_ROWS in one."""
    starts = range(0, rows, MOST_GRPC_ROWS)
    return [slice(start, min(start + MOST_GRPC_ROWS, rows)) for start in starts]


def _bytes(tensor: torch.Tensor) -> bytes:
    """Returns the memory of a contiguous CPU tensor, whatever its dtype."""
    return tensor.view(torch.uint8).numpy().tobytes()


_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class ComputeStream:
    """Lives until an error or `close`. A thread reads answers, since a blocking read knows no deadline."""

    def __init__(self, server_index: int, channel: grpc.Channel, instance: int) -> None:
        """`instance`: of the one process that is to answer; another one at that address refuses."""
        self._server_index = server_index
        self._requests: queue.SimpleQueue[expert_pb2.ComputeRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[expert_pb2.ComputeResponse | grpc.RpcError] = queue.SimpleQueue()
        make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
        metadata = ((INSTANCE_METADATA, str(instance)),)
        self._call = make_stub(channel).Compute(self._outgoing(), metadata=metadata)
        name = f"expert-{server_index}-answers"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    def _outgoing(self) -> Iterator[expert_pb2.ComputeRequest]:
        while (request := self._requests.get()) is not None:
            yield request

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
        except grpc.RpcError as error:
            self._answers.put(error)

    def send(self, request: expert_pb2.ComputeRequest) -> None:
        """Queue one record."""
        self._requests.put(request)

    def receive(self, epoch: int, timeout_s: float) -> expert_pb2.ComputeResponse:
        """Returns the answer to `epoch`, which is the oldest unanswered record.

        Raises ExpertUnavailable (deadline, lost connection, wrong epoch) or ExpertComputeFailed.
        """
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            message = f"no answer within {timeout_s:.3f} s"
            raise ExpertUnavailable(self._server_index, message) from None
        if isinstance(answer, grpc.RpcError):
            raise self._translated(answer) from answer
        if answer.epoch != epoch:
            message = f"answered epoch {answer.epoch} instead of {epoch}"
            raise ExpertUnavailable(self._server_index, message)
        return answer

    def _translated(self, error: Any) -> Exception:
        details = f"{error.code().name}: {error.details()}"
        if error.code() in _REFUSALS:
            return ExpertComputeFailed(f"expert server {self._server_index}: {details}")
        return ExpertUnavailable(self._server_index, details)

    def close(self) -> None:
        """End the stream and its thread."""
        self._requests.put(None)
        self._call.cancel()
        self._reader.join(timeout=5)
