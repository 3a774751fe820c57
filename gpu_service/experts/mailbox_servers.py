"""Whether the servers of a mailbox compute, and what they should: what its clients wait for."""

from __future__ import annotations

import threading
import time

from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.newcomers import Newcomers
from moebius.errors import WrongIdentity
from moebius.mailbox import Mailbox, ServerLost, ShutDown

# How soon a wait notices that it was interrupted.
_SLICE_S = 0.1


class MailboxServers:
    """`problem` and `interrupt` may be called by any thread."""

    def __init__(self, mailbox: Mailbox, deadline_ms: int, fingerprint: str = "") -> None:
        """`deadline_ms`: the longest wait for one answer; a server that is silent for longer is lost.

        `fingerprint`: see `Newcomers`.
        """
        self.newcomers = Newcomers(mailbox.geometry.num_servers, fingerprint)
        self._mailbox = mailbox
        self._deadline_ms = deadline_ms
        self._interrupted = threading.Event()

    def wait_ready(self, timeout_s: float) -> list[int]:
        """Generations of the servers, all of them ready; the mailbox takes answers of no others then.

        Raises ExpertUnavailable naming the first that is not ready and why a replacement was refused, or
        WrongIdentity when the servers serve another checkpoint than this engine.
        """
        generations = self._wait(timeout_s)
        problem = self.newcomers.problem_of(self._mailbox.identity)
        if problem:
            name = self._mailbox.name
            raise WrongIdentity(f"the expert servers of mailbox '{name}' do not fit this engine: {problem}")
        self._mailbox.accept_generations(generations)
        self.newcomers.arrived(generations)
        return generations

    def _wait(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._interrupted.is_set():
                raise ExpertUnavailable(-1, "the wait for expert servers was given up: the engine stops")
            remaining = deadline - time.monotonic()
            try:
                return self._mailbox.wait_servers_ready(min(max(remaining, 0.0), _SLICE_S))
            except ServerLost as error:
                if remaining <= _SLICE_S:
                    raise ExpertUnavailable(error.server_index, str(error)) from error
            except ShutDown as error:
                raise ExpertUnavailable(error.server_index, str(error)) from error

    def reject_newcomers(self, reason: str) -> None:
        """Tells the unconfirmed servers to leave."""
        for server in self.newcomers.unconfirmed():
            self._mailbox.reject(server, self.newcomers.process(server), reason)

    def interrupt(self) -> None:
        """See `ExpertClient.interrupt`."""
        self._interrupted.set()

    def problem(self) -> str:
        """See `ExpertClient.problem`."""
        for index in range(self._mailbox.geometry.num_servers):
            server = self._mailbox.server_state(index)
            if server.state != "ready":
                why = f": {server.refusal}" if server.refusal else ""
                return f"expert server {index} is {server.state}{why}"
            if server.heartbeat_age_s * 1000 > self._deadline_ms:
                return f"expert server {index} has been silent for {server.heartbeat_age_s:.0f} s"
        return ""
