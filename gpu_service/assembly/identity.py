"""What this process has read of the model: compared before and after, with other processes, with requests."""

from __future__ import annotations

from dataclasses import dataclass

from moebius.checkpoint.index import CheckpointIndex
from moebius.config import MoebiusConfig
from moebius.models.checkpoint import open_index
from moebius.models.identity import (
    EXPERT_CHECKPOINT,
    IdentityRecord,
    Parts,
    check_unchanged,
    checkpoint_parts,
    expert_fingerprint,
    identity_digest,
    identity_text,
    model_parts,
)
from moebius.process.progress import phase


@dataclass(frozen=True)
class EngineIdentity:
    """Filled by `read_identity`."""

    model: str
    index: CheckpointIndex
    # Of `expert_checkpoint`; None: experts are the model's own.
    expert_index: CheckpointIndex | None
    # As they were before anything was loaded.
    parts: Parts

    @property
    def text(self) -> str:
        """For other processes, as `moebius.models.identity` writes it."""
        return identity_text(self.parts)

    @property
    def experts(self) -> str:
        """The identity of what holds the routed experts, as their servers say it."""
        return expert_fingerprint(self.parts)

    @property
    def digest(self) -> str:
        """Returns what requests bring that were made for this model."""
        return identity_digest(self.text)

    def confirm(self) -> None:
        """Compares the files again once everything is loaded.

        Raises WrongIdentity when they were written meanwhile.
        """
        check_unchanged(self.parts, lambda: _parts(self.model, self.index, self.expert_index))


def read_ahead(config: MoebiusConfig) -> list[CheckpointIndex]:
    """Reads what `read_identity` will, and returns the headers: while somebody holds them, and files stay as
    they are, it will read neither these nor the weights' samples again.

    Raises CheckpointError for what cannot be read.
    """
    chosen = config.model
    indices = [open_index(path) for path in (chosen.model, chosen.expert_checkpoint) if path]
    if indices:
        _parts(chosen.model, indices[0], indices[1] if chosen.expert_checkpoint else None)
    return indices


def read_identity(config: MoebiusConfig) -> EngineIdentity:
    """Reads a few MiB of the model's files and compares them with what other processes have read.

    Raises WrongIdentity naming files that have changed, CheckpointError for what cannot be read.
    """
    chosen = config.model
    with phase("reading the model's identity"):
        index = open_index(chosen.model)
        expert_index = open_index(chosen.expert_checkpoint) if chosen.expert_checkpoint else None
        found = EngineIdentity(chosen.model, index, expert_index, _parts(chosen.model, index, expert_index))
        IdentityRecord(chosen.identity_file).check(found.parts)
    return found


def _parts(model: str, index: CheckpointIndex, expert_index: CheckpointIndex | None) -> Parts:
    parts = {**model_parts(model), **checkpoint_parts(index)}
    if expert_index is not None:
        parts |= checkpoint_parts(expert_index, EXPERT_CHECKPOINT)
    return parts
