"""What the mailbox raises. `kernels/bindings/bind_mailbox.cc` finds these classes by name."""

from __future__ import annotations


class MailboxError(RuntimeError):
    """The mailbox can not be made, found, entered or used; the message names it and says why.

    Attributes are filled by the C++ side; -1 means that no server or no layer is concerned.
    """

    server_index: int = -1
    layer: int = -1


class AbiMismatch(MailboxError):
    """The segment was made by another version of the layout; names the version found and the one expected."""


class GeometryMismatch(MailboxError):
    """The segment has other sizes than its user; names every size found and expected."""


class IdentityMismatch(MailboxError):
    """A server computes another model, or other parts of it, than the mailbox's other servers; says which."""


class StaleEpoch(MailboxError):
    """An answer, or a slot, carries another epoch than the one asked for."""


class ServerLost(MailboxError):
    """A server died, restarted or kept silent past the deadline; `server_index` says which.

    The request is not lost with it: collect the same epoch again, or submit anew, once the server is ready.
    """

    @property
    def reason(self) -> str:
        """The message; under the name that callers report."""
        return str(self)


class ExpertComputeError(MailboxError):
    """A server's own exception: its text, with `server_index` and `layer`. The server keeps serving."""


class ShutDown(MailboxError):
    """The launcher has shut the mailbox down."""
