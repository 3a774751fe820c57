"""Quantisation types of GGUF whose codes a packed format keeps, as schemes like other checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping

from moebius.checkpoint.gguf.block_parts import BLOCK_PARTS
from moebius.checkpoint.weight_schemes import Role, StoredRole, WeightScheme
from moebius.kernels.source import SourceLayout
from moebius.kernels.weight_formats import WEIGHT_FORMATS

# Packed formats of the types, and how their codes are laid out for the packer where they are not one a byte.
_PACKED: Mapping[str, tuple[str, SourceLayout]] = {
    "Q4_0": ("int4_g32_f16", "compressed_int4"),
    "Q4_1": ("int4_g32_mins", "compressed_int4"),
    "Q4_K": ("int4_g32_mins_products", "compressed_int4"),
    "Q5_0": ("int5_g32_f16", "plain"),
    "Q5_1": ("int5_g32_mins", "plain"),
    "Q5_K": ("int5_g32_mins_products", "plain"),
    "Q6_K": ("int6_g16_products", "plain"),
    "Q8_0": ("int8_g32_f16", "plain"),
    "Q2_K": ("int2_g16_mins_products", "plain"),
    "Q3_K": ("int3_g16_products", "plain"),
    "IQ4_NL": ("iq4_g32_f16", "plain"),
    "IQ4_XS": ("iq4_g32_products", "plain"),
    "IQ3_S": ("iq3_s_grid_products", "grid_words"),
    "IQ3_XXS": ("iq3_xxs_grid_products", "grid_words"),
    "IQ2_S": ("iq2_s_grid_products", "grid_words"),
    "IQ2_XS": ("iq2_xs_grid_products", "grid_words"),
    "IQ2_XXS": ("iq2_xxs_grid_products", "grid_words"),
    "IQ1_M": ("iq1_m_grid_products", "grid_words"),
    "IQ1_S": ("iq1_s_grid_products", "grid_words"),
    "TQ1_0": ("tq1_products", "grid_words"),
    "TQ2_0": ("int2_g128_f16", "plain"),
    "MXFP4": ("mxfp4", "mxfp4"),
    "NVFP4": ("nvfp4", "plain"),
}


# What matrices are multiplied by besides, where the packed format has a place for it.
FACTORS: Role = "channel"


def _scheme(kind: str) -> WeightScheme:
    packed_format, layout = _PACKED[kind]
    parts = BLOCK_PARTS[kind]
    # Suffixes are those of no other type: they tell which one a matrix has.
    roles = [
        StoredRole(role, f"{kind.lower()}_{role}", (part.dtype,), 1, part.step)
        for role, part in parts.items()
    ]
    if WEIGHT_FORMATS[packed_format].column_scale:
        roles.append(StoredRole(FACTORS, f"{kind.lower()}_{FACTORS}", ("F32",)))
    return WeightScheme(
        f"GGUF {kind}",
        tuple(roles),
        layout=layout,
        code=WEIGHT_FORMATS[packed_format].code if layout in ("plain", "grid_words") else None,
        group_size=parts["scales"].step,
        packed_format=packed_format,
        # Packed scales that are products have a factor for at least two groups.
        groups_together=2 if parts["scales"].dtype == "I32" else 1,
    )


# `tensors` derives the tensors that they ask for.
KEPT_SCHEMES: Mapping[str, WeightScheme] = {kind: _scheme(kind) for kind in BLOCK_PARTS}
# What quantised experts of GGUF models may look like.
GGUF_SCHEMES: tuple[WeightScheme, ...] = tuple(KEPT_SCHEMES.values())
