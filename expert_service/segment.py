"""The record that a server leaves next to its packed experts for its successor.

A successor of the same settings reads one record instead of the checkpoint, so that the time until it serves
does not grow with the model. Any other reads the checkpoint, and packs what is not packed already.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from moebius.checkpoint.gguf.files import companion_directory
from moebius.experts.slices import SliceRequest, expert_identity
from moebius.kernels import ExpertEngine
from moebius.kernels.weight_segment import WeightSegment, WeightSegmentError
from moebius.models.geometry import MoeGeometry
from moebius.models.identity import CHECKPOINT, identity_part

if TYPE_CHECKING:
    from expert_service.loader import LoadPlan

log = structlog.get_logger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".json")
# The factor by which reading packed experts in 4 KiB pages is slower (docs/install-gpu.md).
SMALL_PAGES_COST = "reads about 7 % less a second"
HUGE_PAGES_COMMAND = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
# Below this size, layers are too small for pages of 2 MiB.
PAGES_MATTER_FROM = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """The results of a load; filled by `ExpertHost`, kept in its segment."""

    # As in the segment; its parts include the checkpoint's fingerprint.
    identity: str
    # `checkpoint_signature` at that time, and the settings that the geometry below depends on.
    signature: str
    requested_top_k: int | None
    requested_mtp_heads: int
    model: MoeGeometry
    # Of every decoder layer, as in `LoadPlan`.
    gate_up_formats: tuple[str, ...]
    down_formats: tuple[str, ...]
    has_bias: bool
    group: int
    weight_format: str
    # By layer.
    relative_errors: Mapping[int, float]
    isa: str
    num_threads: int
    # (name, nanoseconds) of every row of `ExpertEngine.plan`; 0 nanoseconds: not measured.
    kernels: tuple[tuple[str, float], ...]

    @staticmethod
    def of(
        plan: LoadPlan,
        identity: str,
        signature: str,
        request: SliceRequest,
        errors: Mapping[int, float],
        engine: ExpertEngine,
    ) -> LoadRecord:
        """Returns the record of a loaded engine with chosen kernels; `errors`: relative errors by layer."""
        return LoadRecord(
            identity=identity,
            signature=signature,
            requested_top_k=request.top_k,
            requested_mtp_heads=request.mtp_heads,
            model=plan.model,
            gate_up_formats=plan.gate_up_formats,
            down_formats=plan.down_formats,
            has_bias=plan.has_bias,
            group=plan.group,
            weight_format=plan.weight_format,
            relative_errors=errors,
            isa=engine.isa,
            num_threads=engine.num_threads,
            kernels=tuple((row.kernel, row.nanoseconds) for row in engine.plan()),
        )

    def fits(self, engine: ExpertEngine) -> bool:
        """Returns whether its kernels were chosen for such an engine, and by measuring."""
        measured = any(nanoseconds > 0 for _, nanoseconds in self.kernels)
        return measured and (self.isa, self.num_threads) == (engine.isa, engine.num_threads)

    def to_json(self) -> str:
        """Returns the text for `ExpertEngine.finish_load`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> LoadRecord:
        """Parses `to_json`'s text. Raises ValueError, KeyError or TypeError for any other text."""
        found: dict[str, Any] = json.loads(text)
        model = {name: _frozen(value) for name, value in found.pop("model").items()}
        errors = {int(layer): float(error) for layer, error in found.pop("relative_errors").items()}
        values = {name: _frozen(value) for name, value in found.items()}
        return LoadRecord(model=MoeGeometry(**model), relative_errors=errors, **values)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list) else value


def checkpoint_signature(request: SliceRequest) -> str:
    """Returns the file system's signature of the files of the checkpoint, and of the one with the experts.

    It consists of names, sizes, inodes and times of change.
    While it stays the same the files' contents, which `checkpoint_fingerprint` reads, have not changed.
    """
    seen = []
    for path in dict.fromkeys(filter(None, (request.model_path, request.expert_checkpoint))):
        found = []
        for entry in os.scandir(companion_directory(path)):
            if entry.name.endswith(WEIGHT_SUFFIXES) and entry.is_file():
                status = entry.stat()
                times = (status.st_mtime_ns, status.st_ctime_ns)
                found.append((entry.name, status.st_size, status.st_dev, status.st_ino, *times))
        seen.append((str(Path(path).absolute()), sorted(found)))
    text = repr(seen)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def find_load_record(path: Path, request: SliceRequest, exact: bool) -> LoadRecord | None:
    """Returns the record of a predecessor with the same settings and model; None: none, or it is unchecked.

    Reads only names and times of the checkpoint's files. The engine checks whether the segment itself
    fits.
    """
    try:
        segment = WeightSegment.open(path)
    except WeightSegmentError as error:
        log.debug("no packed experts are there yet", reason=str(error))
        return None
    text, identity = segment.load_record, segment.identity
    segment.close()
    try:
        record = LoadRecord.from_json(text) if text else None
    except (ValueError, KeyError, TypeError) as error:
        log.info("the predecessor's record is of another version", reason=repr(error))
        return None
    if record is None:
        return None
    if (record.requested_top_k, record.requested_mtp_heads) != (request.top_k, request.mtp_heads):
        return None
    try:
        signature = checkpoint_signature(request)
    except OSError:  # the later read of the checkpoint reports the error
        return None
    if record.signature != signature:
        log.debug("files of the checkpoint were written since; they are read again", path=str(path))
        return None
    wanted = expert_identity(request, record.model, identity_part(identity, CHECKPOINT), exact)
    return record if wanted == identity == record.identity else None


def report_pages(engine: ExpertEngine) -> None:
    """Logs in which pages packed experts are, and what that costs."""
    packed, huge = engine.packed_bytes, engine.huge_page_bytes()
    if huge >= 0.9 * packed or packed < PAGES_MATTER_FROM:
        log.info("pages of packed experts", packed_bytes=packed, in_2_mib_pages=huge)
        return
    log.warning(
        f"packed experts are in pages of 4 KiB, of which a CPU {SMALL_PAGES_COST}",
        packed_bytes=packed,
        in_2_mib_pages=huge,
        remedy=f"{HUGE_PAGES_COMMAND} (as root), then restart",
    )


def report_slots(engine: ExpertEngine, held: Mapping[int, Sequence[int]], path: Path) -> None:
    """Logs how many experts are in memory of those that are in the file."""
    found = engine.cold_slots
    assert found is not None
    log.info(
        "experts are on disk, those in memory that are used most",
        path=str(path),
        in_memory=sum(found[0]),
        of=sum(map(len, held.values())),
        memory_bytes=engine.packed_bytes,
        past_page_cache=found[1],
    )
    if engine.segment_in_memory:
        log.warning("the directory of experts on disk is in memory", remedy="--expert-weights-dir on a disk")


def packed_already(engine: ExpertEngine, held: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
    """Returns the (layer, expert) pairs that a predecessor has packed."""
    return [
        (layer, expert)
        for layer, experts in held.items()
        for expert in experts
        if engine.segment_error(layer, expert) is not None
    ]
