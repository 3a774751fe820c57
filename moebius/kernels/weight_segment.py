"""Packed experts that an expert server keeps in memory which others map, too; kernels/moe/weight_segment.h.

`WeightSegment` reads it, for a GPU process, which needs the weights themselves, and for the server that
starts in the place of an earlier one. Readers write nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from moebius import _kernels

MAGIC = _kernels.WEIGHT_SEGMENT_MAGIC
ABI_VERSION = 6

HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("abi_version", "<u4"),
        ("header_bytes", "<u4"),
        ("total_bytes", "<u8"),
        ("num_layers", "<u4"),
        ("num_experts", "<u4"),
        ("layers_offset", "<u8"),
        ("experts_offset", "<u8"),
        ("load_record_offset", "<u8"),
        ("data_offset", "<u8"),
        ("hidden_size", "<u4"),
        ("intermediate_begin", "<u4"),
        ("intermediate_end", "<u4"),
        ("numa_node", "<i4"),
        ("boot_id", "S40"),
        ("reserved0", "<u8"),
        ("generation", "<u8"),
        ("complete", "<u4"),
        ("pid", "<i4"),
        ("load_record_bytes", "<u8"),
        ("load_record_digest", "<u8"),
        ("experts_digest", "<u8"),
        ("checked", "<u4"),
        ("reserved1", "<u4"),
        ("reserved2", "<u8", 2),
        ("identity", "S1024"),
    ]
)
LAYER_RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("expert_bytes", "<u8"),
        ("down_offset", "<u8"),
        ("layer", "<u4"),
        ("num_slots", "<u4"),
        ("first_expert", "<u4"),
        ("has_bias", "<u4"),
        ("gate_up_format", "S64"),
        ("down_format", "S32"),
        ("reserved", "<u8", 3),
    ]
)
EXPERT_RECORD = np.dtype(
    [
        ("expert", "<u4"),
        ("state", "<u4"),
        ("digest", "<u8"),
        ("squared_error", "<f8"),
        ("squared_reference", "<f8"),
    ]
)


class WeightSegmentError(RuntimeError):
    """The file is missing, or is no segment of this version; one line that names it and says why."""


def segment_path(directory: str, index: int) -> Path:
    """Returns where expert server `index` keeps its weights."""
    return Path(directory) / f"expert-{index}.weights"


@dataclass(frozen=True, slots=True)
class SegmentLayer:
    """One layer's experts, side by side: `[len(experts), expert_bytes]`; filled by `WeightSegment`."""

    layer: int
    # Bytes from the segment's begin; a multiple of 2 MiB.
    offset: int
    expert_bytes: int
    # Global id of the expert in slot 0, 1, ...; ascending.
    experts: tuple[int, ...]
    # Names of kernels/format/weight_format.h.
    gate_up_format: str
    down_format: str
    has_bias: bool
    hidden_size: int
    # Channels of every expert that are held here.
    intermediate_begin: int
    intermediate_end: int

    @property
    def nbytes(self) -> int:
        """The packed size of the layer's experts in bytes."""
        return self.expert_bytes * len(self.experts)


def digest_seed(layer: int, place: int) -> int:
    """Returns what a checksum of an expert's packed bytes begins with (digest_seed in
    kernels/moe/expert_store.cc).

    `place`: the expert's id, counted from the first one of its server's range.
    """
    return layer << 32 | place


class WeightSegment:
    """A mapping of one expert server's packed experts.

    Attributes:
        identity: `expert_identity` of what is packed.
        layers: by decoder layer; those of which experts are held there.
        data: uint8 `[total bytes]`, the mapping. Shared, and writable so that CUDA may register it; only the
            server writes. It stays mapped as long as any view of it lives.
        hidden_size, intermediate_begin, intermediate_end, numa_node: as the server that made it was started.
    """

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        header = data[: HEADER.itemsize].view(HEADER)[0]
        self.path = path
        self.data = data
        self._header = header
        self.identity = bytes(header["identity"]).decode()
        self.hidden_size = int(header["hidden_size"])
        self.intermediate_begin = int(header["intermediate_begin"])
        self.intermediate_end = int(header["intermediate_end"])
        self.numa_node = int(header["numa_node"])
        records = self._table("layers_offset", LAYER_RECORD, "num_layers")
        self._first_experts = {int(record["layer"]): int(record["first_expert"]) for record in records}
        self.layers: Mapping[int, SegmentLayer] = MappingProxyType(
            {layer.layer: layer for layer in self._read_layers()}
        )
        # A view: the server may still write them.
        self._digests = self._table("experts_offset", EXPERT_RECORD, "num_experts")["digest"]

    @classmethod
    def open(cls, path: str | Path) -> WeightSegment:
        """Map the segment of a server, which may still be loading. Raises WeightSegmentError."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
            if size < HEADER.itemsize:
                raise WeightSegmentError(f"expert weights {path}: {size} bytes are none yet")
            total = _checked_total(path, _kernels.map_shared(str(path), HEADER.itemsize), size)
            return cls(path, _kernels.map_shared(str(path), total))
        except OSError as error:
            raise WeightSegmentError(f"expert weights {path} cannot be mapped: {error.strerror}") from None

    @property
    def generation(self) -> int:
        """Grows before content is replaced; read from the segment each time."""
        return int(self._header["generation"])

    @property
    def is_complete(self) -> bool:
        """Returns whether every expert is packed; read from the segment each time."""
        return bool(self._header["complete"])

    @property
    def is_checked(self) -> bool:
        """Returns whether its server has packed each expert, or compared its checksum; read each time."""
        return bool(self._header["checked"])

    @property
    def load_record(self) -> str:
        """Returns what its server noted for a successor; empty: it has not ended to load, or the text is
        damaged.
        """
        if not self.is_complete:
            return ""
        begin, size = int(self._header["load_record_offset"]), int(self._header["load_record_bytes"])
        text = self.data[begin : begin + size].tobytes()
        found = _kernels.weight_digest(text, 0)
        return text.decode() if found == int(self._header["load_record_digest"]) else ""

    def digest(self, layer: int, slot: int) -> int:
        """Returns the checksum of an expert's packed bytes, which begins with `digest_seed`; read each time.

        Means nothing unless `is_complete`. Raises KeyError for a layer of which nothing is held.
        """
        return int(self._digests[self._first_experts[layer] + slot])

    def close(self) -> None:
        """Let go of the mapping; it goes with the last view of `data`."""
        self.data = np.zeros(0, np.uint8)
        self._header = np.zeros(1, HEADER)[0]
        self._digests = np.zeros(0, np.uint64)

    def _read_layers(self) -> list[SegmentLayer]:
        records = self._table("layers_offset", LAYER_RECORD, "num_layers")
        experts = self._table("experts_offset", EXPERT_RECORD, "num_experts")["expert"].tolist()
        layers = []
        for record in records:
            first, slots = int(record["first_expert"]), int(record["num_slots"])
            layers.append(
                SegmentLayer(
                    layer=int(record["layer"]),
                    offset=int(record["offset"]),
                    expert_bytes=int(record["expert_bytes"]),
                    experts=tuple(experts[first : first + slots]),
                    gate_up_format=bytes(record["gate_up_format"]).decode(),
                    down_format=bytes(record["down_format"]).decode(),
                    has_bias=bool(record["has_bias"]),
                    hidden_size=self.hidden_size,
                    intermediate_begin=self.intermediate_begin,
                    intermediate_end=self.intermediate_end,
                )
            )
        return layers

    def _table(self, offset: str, dtype: np.dtype[np.void], count: str) -> npt.NDArray[np.void]:
        begin = int(self._header[offset])
        return self.data[begin : begin + int(self._header[count]) * dtype.itemsize].view(dtype)


def _checked_total(path: Path, header_bytes: npt.NDArray[np.uint8], size: int) -> int:
    """Returns the bytes of the segment.

    Raises WeightSegmentError for what is none of this version, or truncated.
    """
    header = header_bytes.view(HEADER)[0]
    if int(header["magic"]) == 0:
        raise WeightSegmentError(f"expert weights {path}: its server has not made it yet")
    if int(header["magic"]) != MAGIC:
        raise WeightSegmentError(f"expert weights {path}: the file is something else")
    if int(header["abi_version"]) != ABI_VERSION:
        raise WeightSegmentError(
            f"expert weights {path}: version {int(header['abi_version'])} of the layout, "
            f"expected {ABI_VERSION}"
        )
    total = int(header["total_bytes"])
    if size < total:
        raise WeightSegmentError(f"expert weights {path}: truncated, {size} of {total} bytes")
    return total
