"""Inboxes of several ranks: rank 0 decides what each iteration of the loop applies, the others repeat it.

The scheduler is deterministic, so equal messages at equal iterations give equal batches on every rank, and
no batch is ever sent. A rank's loop may run behind rank 0's by what the connection holds; the collectives
of the steps bound that.
"""

from __future__ import annotations

from gpu_service.engine.interface import Inbox, Message, Stop
from gpu_service.parallel.control import RankControl
from gpu_service.parallel.messages import decode_messages, encode_messages


class LeaderInbox(Inbox):
    """Rank 0's: what a drain returns is sent to all others first, also when it is nothing."""

    def __init__(self, control: RankControl) -> None:
        super().__init__()
        self._control = control

    def drain(self, wait: bool) -> list[Message]:
        """See the base class."""
        messages = super().drain(wait)
        self._control.publish(encode_messages(messages))
        return messages


class FollowerInbox(Inbox):
    """Every other rank's: a drain returns what rank 0 drained in the same iteration."""

    def __init__(self, control: RankControl) -> None:
        super().__init__()
        self._control = control

    def post(self, message: Message) -> None:
        """Nothing enters here; the end comes from rank 0, so an engine that has ended may post its own."""
        if not isinstance(message, Stop):
            raise RuntimeError(f"messages enter at rank 0, not here: {message!r}")

    def drain(self, wait: bool) -> list[Message]:
        """Blocks until rank 0 is at the same iteration."""
        return decode_messages(self._control.next_iteration())
