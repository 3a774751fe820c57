"""Whether the servers of a mailbox compute: what its clients wait for and what readiness is about."""

from __future__ import annotations

import threading
import time

from gpu_service.experts.client import ExpertUnavailable
from moebius.mailbox import Mailbox, ServerLost, ShutDown

# How soon a wait notices that it was interrupted.
_SLICE_S = 0.1


class MailboxServers:
    """All methods may be called by any thread."""

    def __init__(self, mailbox: Mailbox, deadline_ms: int) -> None:
        """`deadline_ms`: the longest wait for one answer; a server that is silent for longer is lost."""
        self._mailbox = mailbox
        self._deadline_ms = deadline_ms
        self._interrupted = threading.Event()

    def wait_ready(self, timeout_s: float) -> None:
        """See `ExpertClient.wait_ready`."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._interrupted.is_set():
                raise ExpertUnavailable(-1, "the wait for expert servers was given up: the engine stops")
            remaining = deadline - time.monotonic()
            try:
                self._mailbox.wait_servers_ready(min(max(remaining, 0.0), _SLICE_S))
                return
            except ServerLost as error:
                if remaining <= _SLICE_S:
                    raise ExpertUnavailable(error.server_index, str(error)) from error
            except ShutDown as error:
                raise ExpertUnavailable(error.server_index, str(error)) from error

    def interrupt(self) -> None:
        """See `ExpertClient.interrupt`."""
        self._interrupted.set()

    def problem(self) -> str:
        """See `ExpertClient.problem`."""
        for index in range(self._mailbox.geometry.num_servers):
            server = self._mailbox.server_state(index)
            if server.state != "ready":
                return f"expert server {index} is {server.state}"
            if server.heartbeat_age_s * 1000 > self._deadline_ms:
                return f"expert server {index} has been silent for {server.heartbeat_age_s:.0f} s"
        return ""
