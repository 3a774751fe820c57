"""gRPC reflection: clients without our stubs can list services and messages. Off unless asked for."""

from __future__ import annotations

import grpc


def enable_reflection(server: grpc.Server | grpc.aio.Server, service: str) -> None:
    """Adds reflection of `service` and of the health service to a server that has not started."""
    from grpc_health.v1 import health
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
