"""llama.cpp's tensor overrides (`-ot PATTERN=DEVICE`) as layers whose experts are on the GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# More layers than any model with routed experts has: what holds for the last of them holds to a model's end.
_LAYERS = 100
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
# Tensors that are on the GPU whatever is asked for.
_DENSE = ("blk.1.attn_q.weight", "blk.70.attn_kv_b.weight", "token_embd.weight", "output.weight")


@dataclass(frozen=True)
class PlacedExperts:
    """Where overrides put routed experts; filled by `resident_layers`."""

    layers: str  # Those whose experts are all on the GPU, as `gpu_layers` is written; empty: none, or all.
    is_on_cpus: bool  # Whether all experts are on the CPUs.
    notes: list[str]
    differences: list[str]


def resident_layers(overrides: Sequence[str]) -> PlacedExperts:
    """Returns where `PATTERN=DEVICE` overrides put the experts of each layer; of several that match a
    tensor's name the first holds, as in llama.cpp, and a tensor without one is on the GPU."""
    rules, differences = list[tuple[re.Pattern[str], bool]](), list[str]()
    for override in overrides:
        pattern, _, device = override.rpartition("=")
        try:
            rules.append((re.compile(pattern), device.upper().startswith("CPU")))
        except re.error as error:
            differences.append(f"-ot {override}: the pattern is not understood: {error}")

    def is_on_cpu(tensor: str) -> bool:
        return next((cpu for pattern, cpu in rules if pattern.search(tensor)), False)

    divided, resident = list[int](), list[int]()
    for layer in range(_LAYERS):
        on_cpu = {is_on_cpu(f"blk.{layer}.{name}.weight") for name in _EXPERTS}
        if len(on_cpu) == 2:
            divided.append(layer)
        elif on_cpu == {False}:
            resident.append(layer)
    if divided:
        differences.append(
            "-ot: an expert is on the GPU or on a CPU as a whole; both are asked for in layers "
            f"{_ranges(divided)}, whose experts are left on the CPUs"
        )
    if dense := [name for name in _DENSE if is_on_cpu(name)]:
        differences.append(f"-ot: attention and embeddings are always on the GPU ({', '.join(dense)})")
    everywhere = len(resident) == _LAYERS
    notes = ["-ot names GPUs, which share every layer here"] if _names_gpus(overrides) else []
    return PlacedExperts("" if everywhere else _ranges(resident), not resident, notes, differences)


def _names_gpus(overrides: Sequence[str]) -> bool:
    return len({text.rpartition("=")[2].upper() for text in overrides} - {"CPU"}) > 1


def _ranges(layers: Sequence[int]) -> str:
    """Returns `0-3,9,40-` for those layers, the last of which has no end where it reaches the last layer."""
    runs = list[list[int]]()
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(
        f"{first}-" if last == _LAYERS - 1 else str(first) if first == last else f"{first}-{last}"
        for first, last in runs
    )
