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
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_service.experts.client import (
    ExpertClient,
    ExpertClientStats,
    ExpertComputeFailed,
    ExpertUnavailable,
    Ticket,
    add_to,
    make_ticket,
    sampled_span_context,
    traceparent,
)
from gpu_service.experts.servers import Newcomers, difference
from moebius.errors import WrongIdentity
from moebius.grpc_channels import open_channel
from moebius.mailbox_plan import MOST_GRPC_ROWS
from moebius.models.geometry import MoeGeometry
from protos import expert_pb2, expert_pb2_grpc

SERVICE = "moebius.expert.v1.Expert"
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
_POLL_S = 0.05
_PROBE_S = 1.0
_INFO_TIMEOUT_S = 5.0


@dataclass(slots=True)
class GrpcTicket(Ticket):
    """A layer sent to all servers, in one record or, beyond MOST_GRPC_ROWS rows, in several."""

    # Of the first record; the others follow it.
    epoch: int = 0
    # Recoveries of the client when this was submitted.
    generation: int = 0


class GrpcExpertClient(ExpertClient):
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
        self._newcomers = Newcomers(len(addresses), fingerprint)
        # By server, of the first process that was ready; and processes that were sent away, with the reason.
        self._expected: dict[int, expert_pb2.InfoResponse] = {}
        self._rejected: dict[int, str] = {}
        self._found: dict[int, expert_pb2.InfoResponse] = {}
        self.geometry = geometry
        self._dtype = dtype
        self._deadline_s = deadline_ms / 1000
        self._channels = [open_channel(address, _OPTIONS) for address in addresses]
        self._streams: list[ComputeStream] = []
        self._epoch = 0
        self._generation = 0
        self._interrupted = threading.Event()
        self._stats = ExpertClientStats(compute_seconds=(0.0,) * len(self._channels))

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        plain = make_ticket(self.geometry, layer, hidden_states, topk_ids, topk_weights, self._dtype)
        ticket = GrpcTicket(
            plain.layer,
            plain.hidden_states,
            plain.topk_ids,
            plain.topk_weights,
            self._epoch + 1,
            self._generation,
        )
        if not self._streams:
            self._streams = [ComputeStream(index, channel) for index, channel in enumerate(self._channels)]
        for rows in _records(ticket.rows):
            self._epoch += 1
            request = self._record(ticket, rows)
            for stream in self._streams:
                stream.send(request)
        return ticket

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
        counters = self._stats
        self._stats = replace(
            counters,
            calls=counters.calls + 1,
            rows=counters.rows + ticket.rows,
            wait_seconds=counters.wait_seconds + time.perf_counter() - begin,
            compute_seconds=tuple(spent),
        )
        return add_to(partial, output)

    def wait_ready(self, timeout_s: float) -> None:
        """Asks each server's standard health service, then who it is.

        Raises WrongIdentity when a server serves another checkpoint than this engine from the start.
        """
        deadline = time.monotonic() + timeout_s
        instances = []
        for index, channel in enumerate(self._channels):
            while (problem := self._problem(index, channel, deadline)) is not None:
                if self._interrupted.is_set():
                    raise ExpertUnavailable(index, "the wait for it was given up: the engine stops")
                if time.monotonic() >= deadline:
                    raise ExpertUnavailable(index, f"not ready within {timeout_s:g} s: {problem}")
                time.sleep(_POLL_S)
            instances.append(self._found[index].instance_id)
        self._newcomers.arrived(instances)

    def _problem(self, index: int, channel: grpc.Channel, deadline: float) -> str | None:
        """None when the server computes, and what it should."""
        problem = _health_problem(channel, deadline)
        if problem is not None:
            return problem
        make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
        try:
            found = make_stub(channel).Info(expert_pb2.InfoRequest(), timeout=_INFO_TIMEOUT_S)
        except grpc.RpcError as error:
            return _status_text(error)
        if found.instance_id in self._rejected:
            return f"it was refused: {self._rejected[found.instance_id]}"
        if index not in self._expected:
            self._expect(index, found)
        self._found[index] = found
        expected = self._expected[index]
        text = difference(expected.identity, found.identity)
        if not text and (expected.split_index, expected.weights_digest) != (
            found.split_index,
            found.weights_digest,
        ):
            text = "the experts it has packed are not those that were served before"
        return f"it was started anew and is refused: {text}" if text else None

    def _expect(self, index: int, found: expert_pb2.InfoResponse) -> None:
        """What the server is from now on. Raises WrongIdentity if it does not fit engine or other servers."""
        problem = self._newcomers.problem_of(found.identity)
        for other, known in self._expected.items():
            differs = difference(known.identity, found.identity)
            if differs and not problem:
                problem = f"unlike expert server {other}, {differs}"
        if problem:
            raise WrongIdentity(f"expert server {index} does not fit: {problem}")
        self._expected[index] = found

    def newcomers(self) -> tuple[int, ...]:
        return self._newcomers.unconfirmed()

    def confirm(self) -> None:
        self._newcomers.confirm()

    def reject(self, reason: str) -> None:
        """This engine does not work with these processes; others may."""
        for server in self._newcomers.unconfirmed():
            self._rejected[self._newcomers.process(server)] = reason

    def problem(self) -> str:
        """Asks all servers' health service at once."""
        deadline = time.monotonic() + _PROBE_S
        asked = [_ask_health(channel, deadline) for channel in self._channels]
        for index, answer in enumerate(asked):
            problem = _health_answer(answer)
            if problem is not None:
                return f"expert server {index}: {problem}"
        return ""

    def interrupt(self) -> None:
        self._interrupted.set()

    def recover(self, timeout_s: float) -> None:
        """Opens new streams, so that late answers cannot be mistaken."""
        self._close_streams()
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


def _health_problem(channel: grpc.Channel, deadline: float) -> str | None:
    """None when the server computes, else what it (or the connection) says instead."""
    return _health_answer(_ask_health(channel, deadline))


def _ask_health(channel: grpc.Channel, deadline: float) -> Any:
    """Starts a health check of the server; `_health_answer` takes its result."""
    make_stub: Callable[[grpc.Channel], Any] = health_pb2_grpc.HealthStub
    timeout_s = min(_PROBE_S, max(_POLL_S, deadline - time.monotonic()))
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    return make_stub(channel).Check.future(request, timeout=timeout_s, wait_for_ready=True)


def _health_answer(call: Any) -> str | None:
    """What a call of `_ask_health` came to; see `_health_problem`."""
    try:
        answer = call.result()
    except grpc.RpcError as error:
        return _status_text(error)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return "still loading, or draining"


def _records(rows: int) -> list[slice]:
    """Rows of each record of a ticket: at most MOST_GRPC_ROWS in one."""
    starts = range(0, rows, MOST_GRPC_ROWS)
    return [slice(start, min(start + MOST_GRPC_ROWS, rows)) for start in starts]


def _status_text(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"


def _bytes(tensor: torch.Tensor) -> bytes:
    """The memory of a contiguous CPU tensor, whatever its dtype."""
    return tensor.view(torch.uint8).numpy().tobytes()


_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class ComputeStream:
    """Lives until an error or `close`. A thread reads answers, since a blocking read knows no deadline."""

    def __init__(self, server_index: int, channel: grpc.Channel) -> None:
        self._server_index = server_index
        self._requests: queue.SimpleQueue[expert_pb2.ComputeRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[expert_pb2.ComputeResponse | grpc.RpcError] = queue.SimpleQueue()
        make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
        self._call = make_stub(channel).Compute(self._outgoing())
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
        """The answer to `epoch`, which is the oldest unanswered record.

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
