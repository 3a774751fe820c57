"""The host's part in a device-driven step: who is dead, what waits too long, and what went wrong.

A kernel that waits can read host memory, but not file locks: it would notice a server's death only by its
deadline. And stream memory operations have no deadline at all. The thread of `Watch` looks at the mailbox
every few milliseconds while requests are open and makes the device give up; nothing else depends on it.
"""

from __future__ import annotations

import threading
import time

from gpu_service.experts.client import ExpertComputeFailed, ExpertUnavailable
from moebius.mailbox import MAX_SERVERS, ClientFailure, Mailbox

POLL_S = 0.01
# Polls without an open request after which the thread sleeps until the next step...
QUIET_POLLS = 100
# ... or this long: a step may compute for longer than that before it rings for the first time.
LOOK_AGAIN_S = 1.0


# A kernel has a deadline of its own, which should come first: it knows more.
GRACE_MS = 1000


def watch_deadline_ms(deadline_ms: int, is_memops: bool) -> int:
    """What the watch allows where one answer may take `deadline_ms`."""
    return deadline_ms if is_memops else deadline_ms + GRACE_MS


class Watch:
    """Armed by each step; `reason` says why the host made the device give up."""

    def __init__(self, mailbox: Mailbox, slots: range, deadline_ms: int, releases_waits: bool) -> None:
        """`releases_waits`: also end stream memory operations, which cannot look around themselves."""
        self.reason = ""
        self._mailbox = mailbox
        self._slots = slots
        self._deadline_ns = deadline_ms * 1_000_000
        self._releases_waits = releases_waits
        # By slot: the open epoch and when it was first seen there.
        self._seen: dict[int, tuple[int, int]] = {}
        # Requests up to this epoch were abandoned: no step waits for them.
        self._base = 0
        self._lock = threading.Lock()
        # Steps that have begun. A number, not a flag: a step that begins during a look is never forgotten.
        self._steps = 0
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="doorbell-watch", daemon=True)
        self._thread.start()

    def arm(self) -> None:
        """Called by each step before it is launched: wakes the thread."""
        with self._changed:
            self._steps += 1
            self._changed.notify_all()

    def restart(self, base: int) -> None:
        """Requests up to epoch `base` are forgotten, and so is why the last step was given up."""
        with self._lock:
            self._base = base
            self._seen.clear()
            self.reason = ""

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        # Before the first step nothing is open.
        quiet, seen = QUIET_POLLS, 0
        while not self._ended:
            if quiet < QUIET_POLLS:
                time.sleep(POLL_S)
            else:
                self._sleep(seen)
            # Before the look: a step that begins during it is news to the next one.
            begun, seen = self._steps != seen, self._steps
            quiet = 0 if self.look() or begun else quiet + 1

    def _sleep(self, seen: int) -> None:
        """Waits until another step than the last of `seen` has begun."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._steps != seen, LOOK_AGAIN_S)

    def look(self) -> bool:
        """One look at all slots; whether any request is open."""
        with self._lock:
            is_open = False
            for slot in self._slots:
                epoch = self._mailbox.kernel.open_epoch(slot)
                if epoch <= self._base:
                    continue
                is_open = True
                now = time.monotonic_ns()
                if self._seen.get(slot, (0, 0))[0] != epoch:
                    self._seen[slot] = (epoch, now)
                self._judge(slot, self._seen[slot][1])
            return is_open

    def _judge(self, slot: int, since_ns: int) -> None:
        kernel = self._mailbox.kernel
        found = kernel.overdue(slot, since_ns, self._deadline_ns)
        if found is None and self._others_left():
            found = (MAX_SERVERS, "another client of the mailbox gave up the step, or it is shut down")
        if found is None and not self.reason:
            return
        if found is not None and not self.reason:
            self.reason = found[1]
            kernel.set_abandon(1 + found[0])
        if self._releases_waits:
            kernel.release_waits(self._slots.start, len(self._slots))

    def _others_left(self) -> bool:
        kernel, own = self._mailbox.kernel, self._mailbox.client
        peers = (client for client in range(self._mailbox.geometry.num_clients) if client != own)
        return kernel.is_shut_down or any(kernel.client_report(peer)[0] != 0 for peer in peers)


def failure_of(
    mailbox: Mailbox, deadline_ms: int, reason: str
) -> ExpertUnavailable | ExpertComputeFailed | None:
    """Returns what this client, or else a peer that shares its slots, has reported; None: nothing.

    `reason`: why the host made its device give up, if it did.
    """
    peers = (client for client in range(mailbox.geometry.num_clients) if client != mailbox.client)
    for client in (mailbox.client, *peers):
        code, server, layer, slot, epoch = mailbox.kernel.client_report(client)
        failure = ClientFailure(code)
        if failure == ClientFailure.NONE:
            continue
        index = server if server < mailbox.geometry.num_servers else -1
        if failure == ClientFailure.COMPUTE:
            text = mailbox.kernel.error_text(slot, index, epoch)
            return ExpertComputeFailed(f"expert server {index}, layer {layer}: {text}")
        texts = {
            ClientFailure.DEADLINE: f"no answer within {deadline_ms} ms",
            ClientFailure.STALE_EPOCH: f"it answered another request than epoch {epoch} of slot {slot}",
            ClientFailure.RESTARTED: "it restarted during the step",
            ClientFailure.ABANDONED: reason or "the host gave up the step",
            ClientFailure.PEER: "another rank gave up the step",
            ClientFailure.SHUT_DOWN: f"mailbox '{mailbox.name}' is shut down",
        }
        return ExpertUnavailable(index, f"{texts[failure]} (layer {layer})")
    return None
