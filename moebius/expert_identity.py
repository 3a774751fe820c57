"""What an expert server computes, as text that can be compared: it must not change while an engine uses it.

The same checkpoint and the same settings give the same text on every host, wherever the files lie and
whenever they were copied: nothing of a path, an inode or a time goes into it. docs/decisions/0009 says why
each part is there, and what finds changes that none of them shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import CheckpointIndex
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.checkpoint.split import equal_shares
from moebius.expert_slices import SliceRequest
from moebius.placement.make import make_placement

CHECKPOINT = "checkpoint"
# Bytes looked at of each sampled place, and how many places of all files together.
_BLOCK = 4096
_BLOCKS = 512
_LEAST_PER_FILE = 4


def checkpoint_fingerprint(index: CheckpointIndex) -> str:
    """32 hexadecimal digits of config.json, of every tensor's name, type and shape, and of sampled contents.

    Reads at most about 2 MiB. Raises CheckpointError naming a file that can not be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = sorted({info.file for info in index.tensors.values()}, key=lambda file: file.name)
    try:
        config = index.directory / "config.json"
        if config.is_file():
            digest.update(config.read_bytes())
        for name, info in sorted(index.tensors.items()):
            digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
        for file in files:
            digest.update(f"{file.stat().st_size}\n".encode())
            for block in _samples(file, max(_LEAST_PER_FILE, _BLOCKS // len(files))):
                digest.update(block)
    except OSError as error:
        raise CheckpointError(f"{error.filename or index.directory} can not be read: {error}") from error
    return digest.hexdigest()


def _samples(file: Path, count: int) -> Iterator[bytes]:
    """Evenly spread blocks, the first and the last bytes among them; a small file as a whole."""
    size = file.stat().st_size
    with file.open("rb", buffering=0) as stream:
        if size <= count * _BLOCK:
            yield stream.read()
            return
        for number in range(count):
            stream.seek((size - _BLOCK) * number // (count - 1))
            yield stream.read(_BLOCK)


def expert_identity(request: SliceRequest, model: MoeGeometry, fingerprint: str, exact: bool) -> str:
    """Lines "name=value" that all servers of one model have in common; `exact`: `batch_invariant_experts`.

    The names are those of the settings, so that a difference can be told to people as it stands.
    Raises ValueError or UserError for settings that do not fit the model.
    """
    shares = equal_shares(request.split_count, request.split_shares)
    lines = {
        CHECKPOINT: fingerprint,
        "expert_split": request.split,
        "split_count": str(request.split_count),
        "split_shares": ",".join(map(str, shares)),
        "expert_dtype": request.weight_dtype,
        "batch_invariant_experts": "yes" if exact else "no",
        "top_k": str(request.top_k or model.top_k),
        "resident_experts": resident_fingerprint(request, model),
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items())


def resident_fingerprint(request: SliceRequest, model: MoeGeometry) -> str:
    """Which experts live on GPUs, so that no server holds them; "none", or 16 hexadecimal digits."""
    resident = make_placement(request.placement, model).resident
    held = [(layer, tuple(experts)) for layer, experts in sorted(resident.items()) if experts]
    return hashlib.blake2b(repr(held).encode(), digest_size=8).hexdigest() if held else "none"


def identity_part(identity: str, name: str) -> str:
    """The value of one line; empty: there is none."""
    for line in identity.splitlines():
        found, _, value = line.partition("=")
        if found == name:
            return value
    return ""
