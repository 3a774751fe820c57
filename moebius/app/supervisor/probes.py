"""How the supervisor asks a process whether it is ready, and whether it lives."""

from __future__ import annotations

import http.client
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moebius.mailbox import ServerState

PROBE_TIMEOUT_S = 1.0


class Probe(ABC):
    """One question to one process; answers within about PROBE_TIMEOUT_S and never raises."""

    @abstractmethod
    def ready(self) -> bool:
        """True when the process can do its work now."""


class Liveness(ABC):
    """Signs of life of one process. Called from the thread that watches it."""

    @abstractmethod
    def sign(self, pid: int, timeout_s: float) -> object:
        """A value that differs from call to call as long as process `pid` lives; None: no sign.

        Returns after about `timeout_s` seconds at the latest and never raises.
        """

    def has_served(self) -> bool:
        """Whether the process, ready and alive, has done its work once; by default, to be ready shows it."""
        return True


@dataclass(frozen=True)
class GrpcProbe(Probe, Liveness):
    """`grpc.health.v1` says SERVING for `service` at `address`; any answer is a sign of life."""

    address: str
    service: str

    def ready(self) -> bool:
        """Asks once, on a fresh connection, so that a restarted process is found at once."""
        from grpc_health.v1 import health_pb2

        return self._status(PROBE_TIMEOUT_S) == int(health_pb2.HealthCheckResponse.SERVING)

    def sign(self, pid: int, timeout_s: float) -> object:
        """The time of the answer, whatever it says."""
        return None if self._status(timeout_s) is None else time.monotonic()

    def _status(self, timeout_s: float) -> int | None:
        """The status; 0 (UNKNOWN) when it is refused; None when there is no answer."""
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        request = health_pb2.HealthCheckRequest(service=self.service)
        # Channels of one address would share a connection, and its pauses between attempts to connect.
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self.address, options) as channel:
            try:
                return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s).status)
            except grpc.RpcError as error:
                silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                return None if error.code() in silent else 0


@dataclass(frozen=True)
class HttpProbe(Probe, Liveness):
    """`GET path` at host:port answers 200; any answer is a sign of life."""

    host: str
    port: int
    path: str

    def ready(self) -> bool:
        """Asks once; anything but 200 is no."""
        return self._status(PROBE_TIMEOUT_S) == 200

    def sign(self, pid: int, timeout_s: float) -> object:
        """The time of the answer, whatever it says."""
        return None if self._status(timeout_s) is None else time.monotonic()

    def _status(self, timeout_s: float) -> int | None:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", self.path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


@dataclass(frozen=True)
class MailboxLiveness(Liveness):
    """The progress of expert server `index` in mailbox `name`: it counts while waiting and while computing.

    Its gRPC answers count before it serves the mailbox only: they come from other threads.
    """

    name: str
    index: int
    grpc: GrpcProbe

    def sign(self, pid: int, timeout_s: float) -> object:
        """The counter, once the process has claimed its index."""
        found = self._state()
        if found is None or found.pid != pid:
            return self.grpc.sign(pid, timeout_s)
        answered = self.grpc.sign(pid, timeout_s) if found.state == "loading" else None
        return answered or found.progress

    def has_served(self) -> bool:
        """Whether a request was answered."""
        found = self._state()
        return found is not None and found.calls > 0

    def _state(self) -> ServerState | None:
        """None when there is no such mailbox, or no such server."""
        from moebius.mailbox import MailboxError, server_health

        try:
            return server_health(self.name)[self.index]
        except (MailboxError, IndexError):
            return None
