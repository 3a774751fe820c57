"""One open `Compute` stream: requests go out without waiting, answers are taken in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from gpu_service.experts.client import ExpertComputeFailed, ExpertUnavailable
from protos import expert_pb2, expert_pb2_grpc

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
