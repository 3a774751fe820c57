"""Typed face of the shared-memory mailbox; described in `kernels/mailbox/layout.h`.

The launcher creates a mailbox, every engine rank attaches as one of its clients, every expert process as one
of its servers. Nothing here needs numpy or torch: arrays are passed by address. The GIL is released in
every call that copies or waits.

`server_health(name)` looks at the servers from outside, for a supervisor: a server whose `progress`
stands still for seconds is frozen or stuck, whatever it computes and however long that takes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from moebius import _kernels
from moebius._kernels import ClientFailure
from moebius.mailbox.server import MailboxServer, TracedCall

__all__ = [
    "MAGIC",
    "MAX_SERVERS",
    "AbiMismatch",
    "ClientFailure",
    "ExpertComputeError",
    "GeometryMismatch",
    "IdentityMismatch",
    "Mailbox",
    "MailboxError",
    "MailboxGeometry",
    "MailboxServer",
    "Regions",
    "ServerLost",
    "ServerState",
    "ShutDown",
    "StaleEpoch",
    "TracedCall",
    "field_offsets",
    "row_begin",
    "server_health",
]

MAGIC = _kernels.MAILBOX_MAGIC  # the first 8 bytes of every segment
MAX_SERVERS = _kernels.MAILBOX_MAX_SERVERS

PayloadDtype = Literal["float32", "bfloat16", "float16"]
ServerPhase = Literal["absent", "loading", "ready", "draining", "dead", "rejected"]
DTYPE_CODES: dict[PayloadDtype, int] = {"float32": 1, "bfloat16": 2, "float16": 3}
_DTYPE_OF_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}


class MailboxError(RuntimeError):
    """The mailbox cannot be made, found, entered or used; the message names it and says why.

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

    The request is not lost with it: collect the same epoch again, or submit again, once the server is ready.
    """

    @property
    def reason(self) -> str:
        """The message without the server's name, for callers that report `server_index`, too."""
        return str(self).removeprefix(f"expert server {self.server_index} lost: ")


class ExpertComputeError(MailboxError):
    """A server's own exception: its text, with `server_index` and `layer`. The server keeps serving."""


class ShutDown(MailboxError):
    """The launcher has shut the mailbox down."""


@dataclass(frozen=True)
class Regions:
    """Where everything of a segment lies, in bytes; filled by `MailboxGeometry.regions`."""

    flags: int
    requests: int
    responses: int
    total: int
    # From a slot's RequestHeader.
    hidden_states: int
    topk_ids: int
    topk_weights: int
    output: int  # From a ResponseHeader.
    # From slot to slot, and from (slot, server) to the next server.
    request_stride: int
    response_stride: int


def field_offsets() -> dict[str, int]:
    """Returns the offsets of fields of layout.h: "Struct.field" to its offset in bytes, "Struct" to its size;
    reserved fields left out.
    """
    found: dict[str, int] = {}
    for structure, (nbytes, offsets) in _kernels.mailbox_layout().items():
        found[structure] = nbytes
        for name, (offset, _) in offsets.items():
            if not name.startswith("reserved"):
                found[f"{structure}.{name}"] = offset
    return found


def row_begin(rows: int, client: int, num_clients: int) -> int:
    """Returns first row of a client's part of a request; that of `num_clients` is the end of the
    last part.
    """
    return _kernels.mailbox_row_begin(rows, client, num_clients)


@dataclass(frozen=True)
class MailboxGeometry:
    """Sizes that every user of one mailbox agrees on; filled by the launcher from model and configuration."""

    num_layers: int  # decoder layers, dense ones included; requests name one of them
    hidden_size: int  # elements of a token row
    top_k: int  # expert ids per row
    num_slots: int  # requests in flight at once, 1..64
    max_rows: int  # token rows a slot holds, 1..65536
    num_servers: int  # answers that one collect sums, 1..16
    dtype: PayloadDtype  # of hidden_states; answers are float32
    num_clients: int = 1  # tensor-parallel ranks that each bring a part of a request's rows, 1..8

    def regions(self) -> Regions:
        """Returns the regions of a segment of this geometry; `total` is its size."""
        sizes = self._sizes()
        del sizes["num_layers"]
        return Regions(**_kernels.mailbox_regions(dtype=DTYPE_CODES[self.dtype], **sizes))

    def to_kernel(self) -> _kernels.MailboxGeometry:
        """The C++ form. Raises ValueError naming the field, its value and what is allowed."""
        if self.dtype not in DTYPE_CODES:
            raise ValueError(f"mailbox geometry: dtype = {self.dtype!r}, allowed {', '.join(DTYPE_CODES)}")
        sizes = self._sizes()
        for field, value in sizes.items():
            if not 0 < value < 2**31:
                raise ValueError(f"mailbox geometry: {field} = {value} must be positive")
        return _kernels.MailboxGeometry(dtype=DTYPE_CODES[self.dtype], **sizes)

    @classmethod
    def from_kernel(cls, kernel: _kernels.MailboxGeometry) -> MailboxGeometry:
        """The Python form of a C++ geometry."""
        return cls(**_fields_of(cls, kernel) | {"dtype": _DTYPE_OF_CODE[kernel.dtype]})

    def _sizes(self) -> dict[str, int]:
        """Returns the fields that are numbers."""
        return {name: value for name, value in asdict(self).items() if name != "dtype"}


@dataclass(frozen=True)
class ServerState:
    """One look at a server; filled by `Mailbox.server_state` and `server_health`."""

    pid: int  # in the server's own pid namespace; 0 when absent
    state: (
        ServerPhase  # "dead": its process ended without leaving; "rejected": it computes wrongly, see refusal
    )
    generation: int  # grows with each start; 0: never served
    heartbeat_age_s: float  # seconds since its last sign of life; -1 when absent
    calls: int  # requests answered by this generation
    rows: int  # token rows in them
    busy_s: float  # seconds in its backend
    # Signs of life, counted over all generations: at least 5 a second while the server waits, one for each
    # expert it packs while it loads, one for each small piece of a request while it computes.
    progress: int
    request_s: float  # for how long it has been computing the request it is at; 0: it has none
    damages: int  # experts that it or a predecessor has found damaged in memory
    # Why a process that wanted to become this server, or its present generation, was not let in; of one that
    # is ready, why it does not compute everything.
    refusal: str

    @classmethod
    def from_kernel(cls, kernel: _kernels.MailboxServerState) -> ServerState:
        """The Python form."""
        return cls(**_fields_of(cls, kernel))


def _fields_of(kind: type[MailboxGeometry | ServerState], kernel: object) -> dict[str, Any]:
    """Returns the fields of a record, which its C++ form has under the same names."""
    return {field.name: getattr(kernel, field.name) for field in fields(kind)}


def server_health(mailbox_name: str) -> list[ServerState]:
    """Returns a look at all servers of a mailbox, in order, without becoming one of its users (microseconds).

    The mailbox is mapped read-only and no lock is taken, so that it does not count as used.
    Raises MailboxError (AbiMismatch) when there is none, or one of another version.
    """
    return [ServerState.from_kernel(found) for found in _kernels.mailbox_health(mailbox_name)]


SHARED_MEMORY = Path("/dev/shm")


def more_shared_memory(needed: int) -> str:
    """Returns how each kind of system gets `needed` bytes more of it, for messages."""
    size = f"{1 + (needed >> 30)}g"
    return (
        f"docker, podman: --shm-size={size}; Kubernetes: an emptyDir with medium: Memory there; else: "
        f"mount -o remount,rw,size={size} {SHARED_MEMORY}; or less memory by a smaller --mailbox-rows"
    )


class Mailbox:
    """The launcher's and the client's side. Different slots may be used by different threads at once."""

    def __init__(self, kernel: _kernels.Mailbox, name: str, client: int = 0, group: int = 0) -> None:
        """Use `create` or `attach`."""
        self.kernel = kernel
        self.name = name
        self.client = client
        self.group = group
        self.geometry = MailboxGeometry.from_kernel(kernel.geometry)

    @classmethod
    def create(cls, name: str, geometry: MailboxGeometry, *, spin_ns: int = -1) -> Mailbox:
        """Makes the segment (mode 0600); a leftover of a dead launcher that no process holds is replaced.

        `spin_ns`: how long `collect` spins before it sleeps; -1 decides from the allowed cores.

        Raises:
            MailboxError: the name is in use by a living process, or shared memory is short.
            ValueError: the name or a size is not allowed.
        """
        try:
            return cls(_kernels.Mailbox.create(name, geometry.to_kernel(), spin_ns), name)
        except MailboxError as error:
            if os.strerror(errno.ENOSPC) not in str(error):
                raise
            free = os.statvfs(SHARED_MEMORY)
            free_mib = free.f_bavail * free.f_frsize >> 20
            advice = more_shared_memory(geometry.regions().total)
            raise MailboxError(f"{error}: {free_mib} MiB are free. {advice}") from None

    @classmethod
    def attach(
        cls,
        name: str,
        timeout_s: float,
        expected: MailboxGeometry | None = None,
        *,
        spin_ns: int = -1,
        client: int = 0,
        group: int = 0,
    ) -> Mailbox:
        """Waits up to `timeout_s` seconds for a complete segment and maps it.

        `client` of the geometry's clients is what this process will be, of `group`: clients of one group
        share slots (tensor-parallel ranks), those of another one (pipeline stage) use others.

        Raises:
            MailboxError: there is none, its creator never completed it, or it is truncated.
            AbiMismatch, GeometryMismatch: naming what was found and what was expected.
            ValueError: the segment has no such client.
        """
        wanted = expected.to_kernel() if expected else None
        return cls(
            _kernels.Mailbox.attach(name, timeout_s, wanted, spin_ns, client, group), name, client, group
        )

    @staticmethod
    def unlink(name: str) -> bool:
        """Removes the name; mapped users keep their mapping. False when there was no such segment."""
        return _kernels.mailbox_unlink(name)

    @staticmethod
    def exists(name: str) -> bool:
        """Returns True when there is a segment of that name, used or left over (shm_overview(7): one file
        each).
        """
        return (SHARED_MEMORY / name).exists()

    @staticmethod
    def is_stale(name: str) -> bool:
        """True when the segment exists and no living process uses it."""
        return _kernels.mailbox_is_stale(name)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self.kernel.nbytes

    def submit(
        self,
        slot: int,
        layer: int,
        hidden_states_ptr: int,
        topk_ids_ptr: int,
        topk_weights_ptr: int,
        rows: int,
    ) -> int:
        """Copies one request into `slot`, rings the servers and returns its epoch, which `collect` wants.

        Of several clients each copies its own part of the rows; all submit the same slots, layers and rows.

        Addresses of contiguous arrays, read before the call returns: hidden_states [rows, H] in the
        geometry's dtype, topk_ids [rows, K] int32 (-1: no expert), topk_weights [rows, K] float32.

        Raises:
            ValueError: slot, layer or rows outside the geometry.
            MailboxError: another process is already the client.
            ShutDown: the mailbox is shut down.
        """
        if min(slot, layer, rows) < 0:
            raise ValueError(f"slot {slot}, layer {layer} and rows {rows} must not be negative")
        return self.kernel.submit(slot, layer, hidden_states_ptr, topk_ids_ptr, topk_weights_ptr, rows)

    def collect(self, slot: int, epoch: int, output_ptr: int, deadline_ms: int) -> list[int]:
        """Waits for every server and writes the sum of their answers, added in server order, to the output.

        `output_ptr`: address of float32 [rows, H]. This client's rows are overwritten (undefined content
        after an exception), other clients' rows are left alone.

        Returns:
            Nanoseconds each server spent computing.

        Raises:
            ServerLost: a server died, restarted while awaited, is absent, or passed the deadline.
            ExpertComputeError: a server's own exception.
            StaleEpoch: the slot or an answer carries another epoch.
            ShutDown: the mailbox is shut down.
        """
        return self.kernel.collect(slot, epoch, output_ptr, deadline_ms)

    def set_trace(self, slot: int, trace_id: bytes, span_id: bytes, flags: int = 1) -> None:
        """W3C trace context (16 and 8 bytes) of the next submit into `slot`; call it only when sampled."""
        self.kernel.set_trace(slot, trace_id, span_id, flags)

    def server_state(self, server_index: int) -> ServerState:
        """One look at a server. Raises ValueError for an index beyond the geometry."""
        return ServerState.from_kernel(self.kernel.server_state(server_index))

    def wait_servers_ready(self, timeout_s: float) -> list[int]:
        """Returns each server's generation when all are ready.

        Raises ServerLost naming the first that is not, and why a replacement was refused; or ShutDown.
        """
        return self.kernel.wait_servers_ready(timeout_s)

    def accept_generations(self, generations: Sequence[int]) -> None:
        """From now on `collect` takes answers of these, by server, only: ServerLost for a successor's."""
        self.kernel.accept_generations(generations)

    def reject(self, server_index: int, generation: int, reason: str) -> None:
        """Marks a generation of the server that computes wrongly: it leaves, and no client finds it ready."""
        self.kernel.reject(server_index, generation, reason)

    @property
    def identity(self) -> str:
        """Returns what all servers have agreed on, lines "name=value"; empty before the first one."""
        return self.kernel.identity

    def shut_down(self) -> None:
        """Tells every user of the mailbox to leave; permanent for this segment."""
        self.kernel.shut_down()


OPEN_TIMEOUT_S = 60.0


def open_mailbox(name: str, geometry: MailboxGeometry, client: int = 0, group: int = 0) -> Mailbox:
    """Returns the supervisor's segment, or, where processes are started by hand or in a Pod, in any order,
    one made by the first of them: the engine's first rank (0, 0), or an expert server.

    One made here stays when this process ends, so that a restarted process finds the others still attached;
    once no process holds it any more, the next one of that name replaces it.
    Raises MailboxError naming what does not fit.
    """
    if (client, group) == (0, 0) and (Mailbox.is_stale(name) or not Mailbox.exists(name)):
        try:
            return Mailbox.create(name, geometry)
        except MailboxError:
            # Another process was quicker; what else was wrong is said below.
            if not Mailbox.exists(name):
                raise
    return Mailbox.attach(name, OPEN_TIMEOUT_S, geometry, client=client, group=group)
