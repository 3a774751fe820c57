"""The expert process's side of a mailbox."""

from __future__ import annotations

from dataclasses import dataclass

from moebius import _kernels


@dataclass(frozen=True)
class TracedCall:
    """One sampled request as a tracing span wants it; filled by `MailboxServer.take_traced_calls`."""

    trace_id: bytes  # 16 bytes, W3C
    span_id: bytes  # 8 bytes, the parent span
    flags: int  # bit 0: sampled
    layer: int  # decoder layer
    rows: int  # token rows
    start_unix_ns: int  # start of the computation, nanoseconds since the epoch
    duration_ns: int  # nanoseconds in the backend


class MailboxServer:
    """Serves one index of a mailbox from a C++ thread that never takes the GIL."""

    def __init__(
        self,
        mailbox_name: str,
        server_index: int,
        backend: _kernels.ExpertBackend,
        *,
        attach_timeout_s: float = 10.0,
        heartbeat_s: float = 0.1,
        spin_ns: int = -1,
        num_threads: int = 1,
        identity: str = "",
    ) -> None:
        """Attaches and claims the index: its state is "loading" until `start`.

        `heartbeat_s` is the longest sleep. `num_threads` of compute per server, with the number of servers,
        decides against the allowed cores how long an idle server spins; `spin_ns` >= 0 overrides that.
        `identity` as `moebius.experts.slices` writes it; the first server's is the mailbox's.

        Raises:
            MailboxError: no such mailbox, or the index is served by a living process.
            AbiMismatch: the mailbox was made by another version.
            IdentityMismatch: naming what differs from the mailbox's identity.
            ValueError: the index, or the backend's hidden_size, does not fit the mailbox.
        """
        if server_index < 0:
            raise ValueError(f"server index {server_index} must not be negative")
        self.mailbox_name = mailbox_name
        self.server_index = server_index
        self._kernel = _kernels.MailboxServer(
            mailbox_name,
            server_index,
            backend,
            attach_timeout_s=attach_timeout_s,
            heartbeat_s=heartbeat_s,
            spin_ns=spin_ns,
            num_threads=max(num_threads, 1),
            identity=identity,
        )

    def start(self, weights_digest: int = 0) -> None:
        """State "ready": answers what a predecessor left open, then whatever is rung. Once only.

        `weights_digest` of what the backend has packed, 0: unknown. Raises IdentityMismatch, and leaves, when
        a predecessor had packed something else.
        """
        self._kernel.start(weights_digest)

    def beat(self) -> None:
        """A sign of life while the backend is being filled; from any thread."""
        self._kernel.beat()

    def note_damage(self) -> None:
        """Tells clients that an expert was found damaged: earlier answers may be wrong. From any thread."""
        self._kernel.note_damage()

    def note_problem(self, reason: str) -> None:
        """Writes into the server's state why it does not compute everything; empty: it does."""
        self._kernel.note_problem(reason)

    @property
    def rejection(self) -> str:
        """Returns why a client sent this server away, which has ended it; empty: none did."""
        return self._kernel.rejection

    def drain(self, timeout_s: float) -> bool:
        """Answers until nothing is outstanding, then leaves. False: still busy after `timeout_s` seconds."""
        return self._kernel.drain(timeout_s)

    def stop(self) -> None:
        """Leaves after the request being computed; unanswered ones stay for a successor."""
        self._kernel.stop()

    @property
    def is_running(self) -> bool:
        """False before `start`, after leaving, and once the mailbox is shut down."""
        return self._kernel.is_running

    @property
    def generation(self) -> int:
        """Returns how many times this index has been claimed since the mailbox was created."""
        return self._kernel.generation

    def take_traced_calls(self) -> list[TracedCall]:
        """Returns sampled requests since the last call, the newest 1024 at most."""
        return [TracedCall(*call) for call in self._kernel.take_traced_calls()]
