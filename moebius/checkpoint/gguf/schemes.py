"""Quantisation types of GGUF whose codes a packed format keeps, as schemes like other checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping

from moebius.checkpoint.gguf.block_parts import BLOCK_PARTS
from moebius.checkpoint.weight_schemes import StoredRole, WeightScheme
from moebius.kernels_source import SourceLayout

# Packed formats of the types, and how their codes are laid out for the packer.
_PACKED: Mapping[str, tuple[str, SourceLayout]] = {
    "Q4_0": ("int4_g32_f16", "compressed_int4"),
    "Q4_1": ("int4_g32_mins", "compressed_int4"),
    "Q4_K": ("int4_g32_mins_products", "compressed_int4"),
    "Q5_0": ("int8_g32_f16", "plain"),
    "Q5_1": ("int8_g32_mins", "plain"),
    "Q5_K": ("int8_g32_mins_products", "plain"),
    "Q6_K": ("int8_g16_products", "plain"),
    "Q8_0": ("int8_g32_f16", "plain"),
    "Q2_K": ("int4_g16_mins_products", "compressed_int4"),
    "Q3_K": ("int4_g16_products", "compressed_int4"),
    "IQ4_NL": ("int8_g32_f16", "plain"),
    "IQ4_XS": ("int8_g32_products", "plain"),
    "MXFP4": ("mxfp4", "mxfp4"),
}


def _scheme(kind: str) -> WeightScheme:
    packed_format, layout = _PACKED[kind]
    parts = BLOCK_PARTS[kind]
    return WeightScheme(
        f"GGUF {kind}",
        # Suffixes are those of no other type: they tell which one a matrix has.
        tuple(
            StoredRole(role, f"{kind.lower()}_{role}", (part.dtype,), 1, part.step)
            for role, part in parts.items()
        ),
        layout=layout,
        group_size=parts["scales"].step,
        packed_format=packed_format,
        # Packed scales that are products have a factor for two groups.
        groups_together=2 if parts["scales"].dtype == "I32" else 1,
    )


# `tensors` derives the tensors that they ask for.
KEPT_SCHEMES: Mapping[str, WeightScheme] = {kind: _scheme(kind) for kind in BLOCK_PARTS}
# What quantised experts of GGUF models may look like.
GGUF_SCHEMES: tuple[WeightScheme, ...] = tuple(KEPT_SCHEMES.values())
