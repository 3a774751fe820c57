"""Weight formats of kt-kernel 0.7.2, how they are handed over, and the one of ours each is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Its builds, best first, and the level of ours that says whether a build can run here.
VARIANTS = (
    ("amx", "amx"),
    ("avx512_bf16", "avx512_bf16"),
    ("avx512_vnni", "avx512_vnni"),
    ("avx512_base", "avx512"),
    ("avx2", "avx2"),
)


@dataclass(frozen=True)
class PeerFormat:
    """One way to hold weights; filled by `FORMATS`."""

    method: str  # Class in the module's `moe`.
    ours: str  # The format of ours with the same information per weight.
    # Bits of a weight's code, for the random source weights; int8 is quantised by the baseline, from
    # bfloat16.
    source_bits: int
    # Of `quant_config`; 0: none.
    bits: int = 0
    group_size: int = 0
    # What scales are: nothing, one float32 per group_size x group_size block, one float32 per output feature,
    # or one bfloat16 per group of inputs.
    scales: str = "none"


FORMATS = {
    "BF16": PeerFormat("AMXBF16_MOE", "bfloat16", 16),
    "FP8": PeerFormat("AMXFP8_MOE", "fp8_block", 8, bits=8, group_size=128, scales="block"),
    "FP8_PERCHANNEL": PeerFormat("AMXFP8PerChannel_MOE", "fp8_channel", 8, bits=8, scales="channel"),
    "INT8": PeerFormat("AMXInt8_MOE", "int8_w8a8", 16),
    "RAWINT4": PeerFormat("AMXInt4_KGroup_MOE", "int4_g32", 4, bits=4, group_size=32, scales="group"),
    "MXFP4": PeerFormat("AMXFP4_KGroup_MOE", "mxfp4", 4, bits=4, group_size=32, scales="group"),
    # Per channel, rounded to nearest: 29 % error of a layer. Ours has no such format; the nearest is exact.
    "INT4": PeerFormat("AMXInt4_MOE", "int4_g32", 16),
}


@dataclass(frozen=True)
class Source:
    """Weights and scales of one matrix of all experts, as the baseline reads them; filled by
    `random_source`.
    """

    weights: NDArray[Any]
    scales: NDArray[Any] | None


def random_source(
    form: PeerFormat, experts: int, rows: int, columns: int, random: np.random.Generator
) -> Source:
    """Returns random weights of `experts` matrices [rows, columns]; finite, of moderate size."""
    nbytes = experts * rows * columns * form.source_bits // 8
    raw = np.frombuffer(random.bytes(nbytes), dtype=np.uint8)
    if form.source_bits == 16:
        # Either sign, 2^-7 to 2^-5.
        weights: NDArray[Any] = (raw.view(np.uint16) & 0x80FF) | 0x3C00
    elif form.source_bits == 8:
        weights = raw & 0xBF  # e4m3 below 2, so no NaN
    else:
        weights = raw
    return Source(weights, _scales(form, experts, rows, columns))


def _scales(form: PeerFormat, experts: int, rows: int, columns: int) -> NDArray[Any] | None:
    size = form.group_size
    if form.scales == "block":
        return np.full((experts, -(-rows // size), -(-columns // size)), 0.01, dtype=np.float32)
    if form.scales == "channel":
        return np.full((experts, rows), 0.01, dtype=np.float32)
    if form.scales == "group":
        return np.full((experts, rows, columns // size), 0x3C24, dtype=np.uint16)  # 0.01 in bfloat16
    return None


def find_module(directory: Path, isas: Sequence[str], tag: str) -> Path:
    """Returns the best build below `directory` for levels `isas` and interpreter `tag`, e.g. "cpython-311".

    Raises:
        FileNotFoundError: none, naming what was looked for.
    """
    for variant, level in VARIANTS:
        found = sorted(directory.rglob(f"_kt_kernel_ext_{variant}.{tag}-*.so"))
        if level in isas and found:
            return found[0]
    raise FileNotFoundError(
        f"{directory} holds no _kt_kernel_ext_<variant>.{tag}-*.so that runs here; unpack the wheel of this "
        f"interpreter there (variants: {', '.join(variant for variant, _ in VARIANTS)})"
    )
