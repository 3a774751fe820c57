"""How the supervisor asks a process whether it is ready."""

from __future__ import annotations

import http.client
from abc import ABC, abstractmethod
from dataclasses import dataclass

PROBE_TIMEOUT_S = 1.0


class Probe(ABC):
    """One question to one process; answers within about PROBE_TIMEOUT_S and never raises."""

    @abstractmethod
    def ready(self) -> bool:
        """True when the process can do its work now."""


@dataclass(frozen=True)
class GrpcProbe(Probe):
    """`grpc.health.v1` says SERVING for `service` at `address`."""

    address: str
    service: str

    def ready(self) -> bool:
        """Asks once, on a fresh connection, so that a restarted process is found at once."""
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        request = health_pb2.HealthCheckRequest(service=self.service)
        with grpc.insecure_channel(self.address) as channel:
            try:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(request, timeout=PROBE_TIMEOUT_S)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(frozen=True)
class HttpProbe(Probe):
    """`GET path` at host:port answers 200."""

    host: str
    port: int
    path: str

    def ready(self) -> bool:
        """Asks once; anything but 200 is no."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", self.path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
