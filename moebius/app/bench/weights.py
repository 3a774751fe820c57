"""How many bytes of weights one decode step has to read, from the checkpoint's headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moebius.checkpoint.index import CheckpointIndex
from moebius.checkpoint.moe_config import MoeGeometry


@dataclass(frozen=True)
class WeightBytes:
    """Bytes as stored in the checkpoint; filled by `of`."""

    # Read once per step: attention, norms, routers, shared experts, output projection.
    dense: int
    # All routed experts of all layers.
    routed: int
    num_experts: int
    top_k: int

    @staticmethod
    def of(directory: Path) -> WeightBytes:
        """Sums up a checkpoint. Raises CheckpointError."""
        sizes = {name: info.nbytes for name, info in CheckpointIndex.open(directory).tensors.items()}
        geometry = MoeGeometry.from_config(directory)
        routed = sum(size for name, size in sizes.items() if ".experts." in name)
        dense = sum(sizes.values()) - routed
        if any(name.startswith("lm_head.") for name in sizes):
            # A step looks up one row per stream of the input embedding; a tied one is the output projection.
            dense -= sum(size for name, size in sizes.items() if "embed_tokens" in name)
        return WeightBytes(dense, routed, geometry.num_experts, geometry.top_k)

    def per_step(self, rows: int) -> float:
        """Bytes one step of `rows` tokens reads.

        The share of experts that at least one row chose is 1 - (1 - top_k / experts)^rows for rows that
        choose evenly and independently; real rows choose more alike, which reads less.
        """
        touched = 1.0 - (1.0 - self.top_k / self.num_experts) ** rows
        return self.dense + self.routed * touched
