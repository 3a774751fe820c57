"""The expert servers' segments as an engine reads them: opened together, watched, and read from.

Content may change under the reader, when a server loads other weights: it says so first (`is_complete` and
`generation`). So a reader notes the generations, and asks afterwards whether they still hold.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_service.experts.resident.content import SlotContent
from gpu_service.experts.resident.panels import LayerFormat, layer_format
from gpu_service.experts.streaming.plan import StoredExperts
from moebius.kernels.weight_formats import split_gate_up
from moebius.kernels.weight_segment import SegmentLayer, digest_seed
from moebius.models.identity import CHECKPOINT, identity_part

# How often a look at the files is worth its system calls: every step asks a few times, and when another file
# has taken a segment's place, the content of the one that is mapped stays as it was.
_LOOKED_EVERY_S = 0.01


class Segment(Protocol):
    """`moebius.kernels.weight_segment.WeightSegment`."""

    @property
    def identity(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def layers(self) -> Mapping[int, SegmentLayer]: ...
    @property
    def data(self) -> NDArray[np.uint8]: ...
    def digest(self, layer: int, slot: int) -> int: ...
    def close(self) -> None: ...


class SegmentsUnusable(RuntimeError):
    """What the segments hold cannot be streamed; the text says why."""


class ExpertSegments:
    """All servers' segments of one generation each. Any thread may ask; `close` ends that."""

    def __init__(
        self, segments: Sequence[Segment], layers: Sequence[int], paths: Sequence[Path] = ()
    ) -> None:
        """`layers`: this rank's. `paths`, in the same order: noticed when another file takes their place.

        Raises SegmentsUnusable when a segment is incomplete, or when they do not fit one another.
        """
        self._segments = segments
        self._lock = threading.Lock()
        self._closed = False
        self._paths = [(str(path), _file(path)) for path in paths]
        self._looked, self._replaced = time.monotonic(), ""
        self._generations = [segment.generation for segment in segments]
        # uint8 [bytes of the file], by segment.
        self.data: Sequence[torch.Tensor] = [torch.from_numpy(segment.data) for segment in segments]
        self.stored: Mapping[int, tuple[StoredExperts, ...]] = {
            layer: tuple(_stored(index, segment.layers[layer]) for index, segment in enumerate(segments)
                         if layer in segment.layers)
            for layer in layers
        }  # fmt: skip
        # By segment and layer: slots by expert.
        self._places = {
            (stored.segment, stored.layer): {expert: slot for slot, expert in enumerate(stored.experts)}
            for parts in self.stored.values()
            for stored in parts
        }
        problem = self._mismatch() or self.problem()
        if problem:
            raise SegmentsUnusable(problem)

    @property
    def nbytes(self) -> int:
        """The bytes of all experts of this rank's layers."""
        return sum(part.nbytes for parts in self.stored.values() for part in parts)

    @property
    def identity(self) -> str:
        """What all servers say they hold."""
        return self._segments[0].identity if self._segments else ""

    def problem(self) -> str:
        """Why nothing may be read now, or what was read since the opening is worthless; empty: neither."""
        with self._lock:
            if self._closed:
                return "the segments were reopened"
            for index, (segment, generation) in enumerate(
                zip(self._segments, self._generations, strict=True)
            ):
                if segment.generation != generation:
                    return f"expert server {index} has reloaded its experts"
                if not segment.is_complete:
                    return f"expert server {index} has not loaded all of its experts"
            if not self._replaced and time.monotonic() - self._looked >= _LOOKED_EVERY_S:
                self._looked = time.monotonic()
                for index, (path, file) in enumerate(self._paths):
                    if _file(path) != file:
                        self._replaced = f"expert server {index} has another segment under {path}"
            return self._replaced

    def find(self, layer: int, expert: int, kind: LayerFormat) -> tuple[StoredExperts, int] | None:
        """Returns the part that has an expert in this format, and its slot there; None: none has.

        A part of an expert's channels is of a format of its own, but two such parts may have the same.
        """
        for stored in self.stored.get(layer, ()):
            if stored.kind == kind and expert in (places := self._places[stored.segment, layer]):
                return stored, places[expert]
        return None

    def packed(
        self, layer: int, expert: int, kind: LayerFormat
    ) -> tuple[NDArray[np.uint8], SlotContent] | None:
        """Returns an expert's bytes where they lie, uint8 `[expert_bytes]`, and what they are meant to be;
        None: no server has it in this format.
        """
        found = self.find(layer, expert, kind)
        content = None if found is None else self.content(*found)
        if found is None or content is None:
            return None
        stored, slot = found
        begin = stored.offset + slot * kind.expert_bytes
        return self.data[stored.segment][begin : begin + kind.expert_bytes].numpy(), content

    def content(self, stored: StoredExperts, slot: int) -> SlotContent | None:
        """Returns what the server has packed there, with its checksum; None: the segments were closed
        meanwhile.

        Experts of `stored` must be all of its server's range, as they are where none lives on GPUs only.
        """
        with self._lock:
            if self._closed:
                return None
            digest = self._segments[stored.segment].digest(stored.layer, slot)
        return SlotContent(stored.experts[slot], digest, digest_seed(stored.layer, slot))

    def close(self) -> None:
        """Nothing is watched any more. What a step still copies from stays mapped until it lets go."""
        with self._lock:
            self._closed = True
            for segment in self._segments:
                segment.close()

    def _mismatch(self) -> str:
        texts = {segment.identity for segment in self._segments}
        if len(texts) > 1:
            return "the expert servers' segments are of different models or settings"
        empty = [layer for layer, parts in self.stored.items() if not parts]
        return f"no segment has experts of layer {empty[0]}" if empty else ""


def identity_problem(identity: str, fingerprint: str) -> str:
    """What of a segment's identity does not fit this engine's checkpoint; empty: nothing."""
    theirs = identity_part(identity, CHECKPOINT)
    if not theirs or not fingerprint or theirs == fingerprint:
        return ""
    return f"its {CHECKPOINT} is {theirs}, this engine has {fingerprint}"


def _file(path: str | Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _stored(segment: int, layer: SegmentLayer) -> StoredExperts:
    width = layer.intermediate_end - layer.intermediate_begin
    sizes = layer.gate_up_format, layer.down_format, layer.hidden_size, width, layer.has_bias
    # Whether experts have a gate, their size says; those whose gate has a format of its own do.
    gate, up = split_gate_up(layer.gate_up_format)
    kinds = [layer_format(*sizes, gated) for gated in ((False, True) if gate == up else (True,))]
    kind = next((found for found in kinds if found.expert_bytes == layer.expert_bytes), None)
    if kind is None:
        raise SegmentsUnusable(
            f"experts of layer {layer.layer} take {layer.expert_bytes} bytes in the segment of expert server "
            f"{segment}, {kinds[-1].expert_bytes} in this version's layout"
        )
    return StoredExperts(layer.layer, segment, layer.offset, layer.experts, kind)
