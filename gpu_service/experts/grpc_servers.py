"""Which processes serve the experts by gRPC: asked for their health, and then who they are.

Only its clients compare a remote server with its predecessor. One that does not fit is
healthy in its own eyes and stays where it is until it is replaced: callers that wait for it learn of it at
once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_service.experts.client import ExpertRefused, ExpertUnavailable
from gpu_service.experts.servers import Newcomers, difference
from moebius import __version__, _kernels
from moebius.errors import WrongIdentity
from protos import expert_pb2, expert_pb2_grpc

SERVICE = "moebius.expert.v1.Expert"
_POLL_S = 0.05
_PROBE_S = 1.0
_INFO_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a server; filled by `GrpcServers`."""

    # Why it does not compute what it should; empty: it does.
    problem: str = ""
    # Whether that stays so as long as this process is there.
    is_refused: bool = False
    # What it says of itself; None: it has not been asked, or has not answered.
    info: expert_pb2.InfoResponse | None = None


class GrpcServers:
    """`problem` and `interrupt` may be called by any thread."""

    def __init__(self, channels: Sequence[grpc.Channel], fingerprint: str) -> None:
        """`fingerprint` of the engine's own checkpoint, see `Newcomers`."""
        self.newcomers = Newcomers(len(channels), fingerprint)
        self._channels = channels
        # By server, of the first process that was ready; and processes that were sent away, with the reason.
        self._expected: dict[int, expert_pb2.InfoResponse] = {}
        self._rejected: dict[int, str] = {}
        # Processes whose refusal the log has already.
        self._noted: set[int] = set()
        self._interrupted = threading.Event()

    def wait_ready(self, timeout_s: float) -> list[int]:
        """Returns the instances of the servers, all of them ready and what they were before.

        Raises ExpertUnavailable naming the first that is not ready, ExpertRefused at once for one that has
        taken another's place, or WrongIdentity when servers do not fit from the start.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            looks = self._look(max(_POLL_S, deadline - time.monotonic()), expects=True)
            problems = [(index, look) for index, look in enumerate(looks) if look.problem]
            if not problems:
                break
            index, first = min(problems, key=lambda found: not found[1].is_refused)
            if first.is_refused:
                raise ExpertRefused(index, first.problem)
            if self._interrupted.is_set():
                raise ExpertUnavailable(index, "the wait for it was given up: the engine stops")
            if time.monotonic() >= deadline:
                raise ExpertUnavailable(index, f"not ready within {timeout_s:g} s: {first.problem}")
            time.sleep(_POLL_S)
        instances = [look.info.instance_id for look in looks if look.info is not None]
        self.newcomers.arrived(instances)
        return instances

    def problem(self) -> str:
        """Returns why a layer would not be computed now; asks all servers at once."""
        for index, look in enumerate(self._look(_PROBE_S)):
            # A damaged expert that cannot be repacked does not prevent requests for others.
            problem = look.problem or (look.info.problem if look.info is not None else "")
            if problem:
                return f"expert server {index}: {problem}"
        return ""

    def reject_newcomers(self, reason: str) -> None:
        """This engine does not work with these processes; others may."""
        for server in self.newcomers.unconfirmed():
            self._rejected[self.newcomers.process(server)] = reason

    def interrupt(self) -> None:
        self._interrupted.set()

    def _look(self, timeout_s: float, expects: bool = False) -> list[Look]:
        """Looks at all servers; with `expects` those seen for the first time are what is expected from then
        on.
        """
        healths = [_ask_health(channel, min(timeout_s, _PROBE_S)) for channel in self._channels]
        infos: list[Any] = []
        for channel, health in zip(self._channels, healths, strict=True):
            infos.append(_health_problem(health) or _ask_info(channel))
        looks = []
        for index, answer in enumerate(infos):
            try:
                found = answer if isinstance(answer, str) else answer.result()
            except grpc.RpcError as error:
                found = _status_text(error)
            looks.append(Look(found) if isinstance(found, str) else self._judge(index, found, expects))
        return looks

    def _judge(self, index: int, found: expert_pb2.InfoResponse, expects: bool) -> Look:
        """Returns what to think of a server that is ready."""
        if found.instance_id in self._rejected:
            return Look(f"it was refused: {self._rejected[found.instance_id]}", info=found)
        expected = self._expected.get(index)
        if expected is None:
            if expects:
                self._expect(index, found)
            return Look(info=found)
        problem = _change(expected, found)
        if not problem:
            return Look(info=found)
        problem = f"it was restarted and is refused: {problem}"
        if found.instance_id not in self._noted:
            self._noted.add(found.instance_id)
            _log.error("an expert server that returned is not the same", server=index, why=problem)
        return Look(problem, True, found)

    def _expect(self, index: int, found: expert_pb2.InfoResponse) -> None:
        """Notes what the server is from now on.

        Raises WrongIdentity if it does not fit engine or other servers.
        """
        problem = _other_version(found) or self.newcomers.problem_of(found.identity)
        for other, known in self._expected.items():
            differs = difference(known.identity, found.identity)
            if not differs and (known.split_count > 1) and known.split_index == found.split_index:
                differs = f"split_index is {found.split_index}, which that server is, too"
            if differs and not problem:
                problem = f"unlike expert server {other}, {differs}"
        if problem:
            raise WrongIdentity(f"expert server {index} does not fit: {problem}")
        self._expected[index] = found


def _change(expected: expert_pb2.InfoResponse, found: expert_pb2.InfoResponse) -> str:
    """Returns what is no longer as it was; empty: nothing that matters."""
    problem = _other_version(found) or difference(expected.identity, found.identity)
    if not problem and expected.split_index != found.split_index:
        problem = f"split_index is {found.split_index}, expected {expected.split_index}"
    if not problem and expected.weights_digest != found.weights_digest:
        problem = "the experts it has packed are not those that were served before: the weights have changed"
    return problem


def _other_version(found: expert_pb2.InfoResponse) -> str:
    """Returns whether it speaks of records of another layout than this engine; servers of others say nothing
    (0).
    """
    own = _kernels.MAILBOX_ABI_VERSION
    if found.abi_version in (0, own):
        return ""
    return (
        f"it is Moebius {found.version} with version {found.abi_version} of the records, this engine is "
        f"{__version__} with version {own}"
    )


def _ask_health(channel: grpc.Channel, timeout_s: float) -> Any:
    """Starts a health check of the server; `_health_problem` takes its result."""
    make_stub: Callable[[grpc.Channel], Any] = health_pb2_grpc.HealthStub
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    return make_stub(channel).Check.future(request, timeout=timeout_s, wait_for_ready=True)


def _health_problem(call: Any) -> str:
    """Returns empty when the server computes, else what it (or the connection) says instead."""
    try:
        answer = call.result()
    except grpc.RpcError as error:
        return _status_text(error)
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "still loading, or draining"


def _ask_info(channel: grpc.Channel) -> Any:
    """Starts asking a server who it is."""
    make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
    return make_stub(channel).Info.future(expert_pb2.InfoRequest(), timeout=_INFO_TIMEOUT_S)


_WORDS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "it does not answer",
    grpc.StatusCode.UNAVAILABLE: "it can not be reached",
}


def _status_text(error: Any) -> str:
    """Returns why there is no answer, for clients of the gateway, too: the library's own words name
    addresses.
    """
    return _WORDS.get(error.code(), f"it can not say whether it is ready ({error.code().name})")
