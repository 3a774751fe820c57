"""Bits that a weight takes in files and in memory, for every type: the table of `docs/gguf.md`.

`python -m tests.helpers.format_bits` writes it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from gpu_service.experts.resident.panels import layer_format
from gpu_service.loader.held import Fp8Form, KeptForm, PackedForm
from gpu_service.ops.linear import GROUP
from gpu_service.ops.packed_weight import PackedPart
from moebius.checkpoint.gguf.schemes import KEPT_SCHEMES
from moebius.kernels.weight_formats import WEIGHT_FORMATS, expert_layout
from tests.helpers.quantised_sources import ENCODERS, random_weights

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gguf.md"
BEGIN, END = "<!-- bits a weight: begin -->\n", "<!-- bits a weight: end -->\n"
# Sizes of experts, and of a dense layer.
_HIDDEN, _INTERMEDIATE = 4096, 2048
# Checkpoints of safetensors: what a type is called, and the encoder of its tensors.
_SAFETENSORS = {
    "fp8, blocks of 128 x 128": "fp8_block",
    "fp8, a scale a row": "fp8_channel",
    "MXFP8": "mxfp8",
    "int8, a scale a row": "int8",
    "int8, groups of 128": "int8_g128",
    "compressed-tensors int4, groups of 32": "compressed_int4_g32",
    "compressed-tensors int4, groups of 128": "compressed_int4_g128",
    "compressed-tensors int4, groups of 64, zero points": "compressed_int4_g64_zeros",
    "AWQ, groups of 128": "awq_int4_g128",
    "GPTQ, groups of 128": "gptq_int4_g128_v2",
    "GPTQ, groups of 64, symmetric": "gptq_int4_g64_symmetric",
    "MXFP4 (gpt-oss, compressed-tensors)": "mxfp4",
    "NVFP4 (ModelOpt, compressed-tensors)": "nvfp4",
}


@dataclass(frozen=True, slots=True)
class FormatBits:
    """Bits a weight of one type, scales included; filled by `format_bits`."""

    type: str
    packed_format: str
    file: float
    server: float  # Experts in the memory of their server.
    resident: float  # Experts on a GPU, resident or streamed.
    dense_cpu: float
    dense_gpu: float

    @property
    def most(self) -> float:
        """Returns the most that a weight takes anywhere in memory."""
        return max(self.server, self.resident, self.dense_cpu, self.dense_gpu)


def format_bits() -> Iterator[FormatBits]:
    """Yields a row for each type of GGUF that is kept, then for those of other checkpoints."""
    for kind, scheme in KEPT_SCHEMES.items():
        elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        yield _bits(kind, scheme.packed_format, 8 * nbytes / elements)
    for kind, encoder in _SAFETENSORS.items():
        weights = random_weights(np.random.default_rng(0), 1024, 1024)
        found = ENCODERS[encoder](weights)
        nbytes = sum(tensor.nbytes for tensor in found.tensors.values())
        yield _bits(kind, found.format, 8 * nbytes / weights.size)


def _bits(kind: str, name: str, file: float) -> FormatBits:
    sizes = _HIDDEN, _INTERMEDIATE, False
    of_expert = 8 / (3 * _HIDDEN * _INTERMEDIATE)
    on_cpu: KeptForm = PackedForm((PackedPart(name, _HIDDEN),))
    # As `loader.sources.keep_stored_fp8` chooses.
    format_ = WEIGHT_FORMATS[name]
    is_fp8 = format_.code == "float8" and format_.group_size in (0, GROUP)
    on_gpu = Fp8Form(0) if is_fp8 else on_cpu
    return FormatBits(
        kind,
        name,
        file,
        expert_layout(name, name, *sizes).expert_bytes * of_expert,
        layer_format(name, name, *sizes).expert_bytes * of_expert,
        8 * on_cpu.nbytes(_HIDDEN, _HIDDEN) / _HIDDEN**2,
        8 * on_gpu.nbytes(_HIDDEN, _HIDDEN) / _HIDDEN**2,
    )


def table() -> str:
    """Returns the table in Markdown."""
    lines = [
        "| type | in the file | experts, server | experts, GPU | dense layers, CPU | dense layers, GPU |",
        "|---|---|---|---|---|---|",
    ]
    for row in format_bits():
        values = row.file, row.server, row.resident, row.dense_cpu, row.dense_gpu
        lines.append(f"| {row.type} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    return "\n".join(lines) + "\n"


def page_text() -> str:
    """Returns the page with the table as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
