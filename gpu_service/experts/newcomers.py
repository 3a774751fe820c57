"""Which process of each expert server an engine has checked, and which it will not work with.

Two things can have changed when a server returns: what it is meant to compute (its identity, compared before
anything else) and what it really computes (compared with what its predecessor computed, by
`gpu_service.experts.checked`). A process stays confirmed for its life.
"""

from __future__ import annotations

from collections.abc import Sequence

from moebius import _kernels
from moebius.expert_identity import CHECKPOINT, identity_part


class Newcomers:
    """Processes by server, each known by a number (generation, instance) that no successor has."""

    def __init__(self, num_servers: int, fingerprint: str) -> None:
        """`fingerprint` of the engine's own checkpoint; empty: not compared."""
        self._fingerprint = fingerprint
        self._present = [0] * num_servers
        self._confirmed = [0] * num_servers

    def problem_of(self, identity: str) -> str:
        """What of a server's identity does not fit this engine, in words; empty: nothing, or it has none."""
        theirs = identity_part(identity, CHECKPOINT)
        if not theirs or not self._fingerprint or theirs == self._fingerprint:
            return ""
        return (
            f"{CHECKPOINT} is {theirs}, this engine has {self._fingerprint}: other files, or files that have "
            "changed since the servers or the engine started"
        )

    def arrived(self, present: Sequence[int]) -> None:
        """These processes are ready now."""
        self._present = list(present)

    def unconfirmed(self) -> tuple[int, ...]:
        """Servers that have been started since they were last confirmed."""
        pairs = enumerate(zip(self._present, self._confirmed, strict=True))
        return tuple(server for server, (now, then) in pairs if now != then)

    def confirm(self) -> None:
        """All that are present compute what they should."""
        self._confirmed = list(self._present)

    def process(self, server: int) -> int:
        """The number of the process that is present."""
        return self._present[server]


def difference(expected: str, found: str) -> str:
    """What of two identities differs, in words; empty: nothing."""
    return _kernels.mailbox_identity_difference(expected, found)
