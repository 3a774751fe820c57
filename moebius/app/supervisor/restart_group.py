"""Processes that only work together: when one ends all do, and they start again together."""

from __future__ import annotations

from collections.abc import Sequence

from moebius.app.supervisor.process import ManagedProcess

# The others notice the death by themselves and say which of them it was; then they have this long to end.
GROUP_GRACE_S = 5.0


class RestartGroup:
    """Members are never restarted while one of the former ones still runs."""

    def __init__(self, members: Sequence[ManagedProcess]) -> None:
        self._members = list(members)
        # Time after which members that still run are killed; None: the group is up.
        self._deadline: float | None = None
        # Members that have not been started again since the group went down.
        self._due: set[str] = set()

    def note_death(self, now: float) -> None:
        """A member has ended."""
        if self._deadline is None:
            self._deadline = now + GROUP_GRACE_S

    def enforce(self, now: float) -> None:
        """Kills members that outlive another one for too long; they are seen to have ended afterwards."""
        if self._deadline is not None and now > self._deadline:
            for member in self._members:
                if member.pid is not None:
                    member.send_kill()

    def may_restart(self, name: str) -> bool:
        """Whether this member, which has ended, may start now; it has to be told by `note_start`."""
        if self._deadline is not None and all(member.noted_exit for member in self._members):
            self._deadline = None
            self._due = {member.spec.name for member in self._members}
        return self._deadline is None and name in self._due

    def note_start(self, name: str) -> None:
        """A member was started again."""
        self._due.discard(name)
