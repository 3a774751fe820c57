"""Guards readiness: a probe says yes only to a server that says so itself, and no to every failure."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from app.supervisor.health import GrpcProbe, HttpProbe
from app.supervisor.process import CHILD_PROGRAM
from app.supervisor.supervisor import Supervisor
from moebius.network.grpc_channels import listen
from tests.helpers.fake_programs import QUICK, plan, spec
from tests.helpers.sse_server import scripted_server

SERVICE = "moebius.engine.v1.Engine"


def test_grpc_probe_follows_the_health_service(tmp_path: Path) -> None:
    """Not listening, unknown service and NOT_SERVING are no; SERVING is yes; gone is no again."""
    probe = GrpcProbe(f"unix:{tmp_path}/gpu.sock", SERVICE)
    assert not probe.ready()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    listen(server, probe.address)
    server.start()
    assert not probe.ready()
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert not probe.ready()
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    assert probe.ready()
    server.stop(None).wait()
    assert not probe.ready()


def test_http_probe_wants_200() -> None:
    """Any 200 at that path is yes; a server that is gone is no."""
    with scripted_server([]) as server:
        probe = HttpProbe("127.0.0.1", server.server_port, "/ready")
        assert probe.ready()
        server.get_status = 503
        assert not probe.ready()
    assert not probe.ready()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be restricted further")
def test_children_run_on_their_cpus(tmp_path: Path) -> None:
    """A process with CPUs of its own is bound to them; one without may use all of ours."""
    program = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(str(os.sched_getaffinity(0)))"
    program += "; import signal; signal.pause()"
    last = max(os.sched_getaffinity(0))
    bound = replace(spec("bound", program, tmp_path), cpus=(last,))
    with Supervisor(plan(tmp_path, bound, spec("free", program, tmp_path)), QUICK) as supervisor:
        supervisor.wait_ready()
    assert (tmp_path / "bound").read_text() == str({last})
    assert (tmp_path / "free").read_text() == str(os.sched_getaffinity(0))


def test_child_program_refuses_a_dead_parent() -> None:
    """Started for a parent that is gone, the wrapper ends instead of running unwatched."""
    command = [sys.executable, "-I", "-S", CHILD_PROGRAM, "1", "-", "/bin/true"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "the supervisor is gone" in result.stderr
