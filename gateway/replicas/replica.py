"""One replica: its connection, whether it may be used, and its load."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.replicas.engine_client import EngineClient
from gateway.replicas.prefixes import SentPrefixes
from moebius.models.identity import changes, identity_parts
from protos import engine_pb2

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# Fields of GetModelInfo that must be equal on all replicas, since a request may go to any of them.
_FACTS = (
    "served_model_name",
    "model_type",
    "architectures",
    "vocab_size",
    "max_context_length",
    "max_req_input_len",
    "eos_token_ids",
    "bos_token_id",
    "pad_token_id",
    "supports_vision",
    "image_token_id",
    "default_sampling_params_json",
)


def difference(wanted: engine_pb2.GetModelInfoResponse, found: engine_pb2.GetModelInfoResponse) -> str:
    """Returns the differences of another replica's model, by name and value; empty: none that matters."""
    for name in _FACTS:
        ours, theirs = getattr(wanted, name), getattr(found, name)
        if ours != theirs:
            shown, other = (
                str(list(value) if hasattr(value, "append") else value)[:100] for value in (ours, theirs)
            )
            return f"{name} is {other}, that of the others is {shown}"
    return other_files(wanted, found)


def other_files(wanted: engine_pb2.GetModelInfoResponse, found: engine_pb2.GetModelInfoResponse) -> str:
    """Returns the model files of an engine that differ from the wanted ones; empty: none."""
    changed = changes(identity_parts(wanted.identity), identity_parts(found.identity))
    return f"the engine has read other files of the model than this gateway: {changed}" if changed else ""


@dataclass(eq=False)
class Replica:
    """The state of one replica; changed by `ReplicaSet` only."""

    address: str
    client: EngineClient
    now: Callable[[], float] = time.monotonic
    prefixes: SentPrefixes = field(default_factory=SentPrefixes)
    in_flight: int = 0  # requests of this process
    is_serving: bool = True  # as last reported; assumed until it was polled
    mismatch: str = ""  # why it cannot be used at all: its model differs
    info: engine_pb2.GetModelInfoResponse | None = None
    identity: str = ""  # digest of its model files, which its requests contain
    is_leaving: bool = False  # its address is no longer a replica's
    # As of its last report: its outputs, running and waiting, and how many of them were this process's.
    reported: int = 0
    reported_own: int = 0
    max_running: int = 64
    failures: int = 0  # in a row
    ejected_until: float = 0.0

    def failed(self) -> None:
        """Notes that a request could not be sent, or was lost: the replica pauses, longer each time."""
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(self.failures, 30), _LONGEST_PAUSE_S)
        self.failures += 1
        self.ejected_until = self.now() + pause_s

    def worked(self) -> None:
        """Notes that it answered a request."""
        self.failures = 0
        self.ejected_until = 0.0

    @property
    def is_on_probation(self) -> bool:
        """Whether its pause is over but no request has been answered since: one at a time may try."""
        return self.failures > 0

    @property
    def may_be_used(self) -> bool:
        """Whether a request may be sent to it now."""
        if self.is_leaving or self.mismatch or not self.is_serving or self.now() < self.ejected_until:
            return False
        return not (self.is_on_probation and self.in_flight)

    @property
    def load(self) -> float:
        """Outputs per place in its batch, other gateways' included; above 1, some wait."""
        others = max(self.reported - self.reported_own, 0)
        return (others + self.in_flight) / max(self.max_running, 1)
