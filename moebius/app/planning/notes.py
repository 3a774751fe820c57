"""What a reader of a plan has to know beside its numbers."""

from __future__ import annotations

from moebius.app.planning.capacity import KvPool
from moebius.app.planning.hardware import Hardware
from moebius.config import MoebiusConfig


def make_notes(
    config: MoebiusConfig, hardware: Hardware, kv: KvPool, context: int, has_weights: bool
) -> tuple[str, ...]:
    """One sentence each."""
    notes = []
    if not has_weights:
        notes.append("no files of weights are there: types and formats are what config.json says")
        if config.model.dense_weights == "keep":
            notes.append("dense_weights keep: which layers are stored in fp8 is not known, they count whole")
    assumed = [name for name, origin in hardware.origin.items() if origin == "assumed"]
    if assumed:
        notes.append(f"assumed: {', '.join(assumed)}; --measure measures here, options say otherwise")
    if problem := hardware.origin.get("kernel_times"):
        notes.append(f"measured times of the expert kernels {problem}")
    if config.experts.expert_addresses:
        notes.append("expert servers of expert_addresses are on other hosts: their memory is not counted")
    if kv.tokens < context:
        notes.append(f"the KV cache holds {kv.tokens} tokens, less than one stream of {context}")
    notes.append("even routing is assumed; skewed routing touches fewer experts and is faster")
    return tuple(notes)
