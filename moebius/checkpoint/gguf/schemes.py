"""Quantisation types of GGUF of which a packed format holds codes and scales as they are."""

from __future__ import annotations

from collections.abc import Mapping

from moebius.checkpoint.weight_schemes import WeightScheme, compressed_int4, mxfp4

# The schemes are those of other checkpoints; `tensors` derives the tensors that they ask for.
EXACT_SCHEMES: Mapping[str, WeightScheme] = {
    "Q4_0": compressed_int4("GGUF Q4_0", 32, True),
    "MXFP4": mxfp4("GGUF MXFP4", "weight_packed", "weight_scale"),
}
# What quantised experts of GGUF models may look like.
GGUF_SCHEMES: tuple[WeightScheme, ...] = tuple(EXACT_SCHEMES.values())
