"""Write bf16 and fp32 tensors to safetensors shards without torch.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
with dtype, shape and byte range of every tensor, then the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it lies on disk; filled by `bfloat16_tensor` or `float32_tensor`.

    `dtype` is safetensors' name ("BF16" or "F32"), `data` a C-contiguous array whose bytes are the content
    (uint16 bit patterns for BF16).
    """

    dtype: str
    data: NDArray[np.uint16] | NDArray[np.float32]


def to_bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 `values` to bfloat16 (nearest, ties to even); return bit patterns, same shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Adding half of the dropped part, plus the lowest kept bit, makes ties go to the even neighbour.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def bfloat16_tensor(values: NDArray[np.float32]) -> StoredTensor:
    """Return `values` (float32, any shape) as a BF16 tensor."""
    return StoredTensor("BF16", to_bfloat16_bits(values))


def float32_tensor(values: NDArray[np.float32]) -> StoredTensor:
    """Return `values` (float32, any shape) as an F32 tensor."""
    return StoredTensor("F32", np.ascontiguousarray(values, dtype="<f4"))


def write_shard(path: Path, tensors: dict[str, StoredTensor]) -> None:
    """Write one safetensors file holding `tensors`; raises OSError (for one: disk full)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.data.shape, "data_offsets": (offset, end)}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # data starts aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values():
            tensor.data.tofile(file)


def write_index(directory: Path, weight_map: dict[str, str], total_size: int) -> None:
    """Write the index of a sharded checkpoint: tensor name -> file name, and the data's size in bytes."""
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
