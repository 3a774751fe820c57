"""What a CPU's instruction set means for serving, in words: for `moebius doctor` and the start's first lines.

Experts, and dense layers that an engine without a GPU keeps as they are stored, are computed by our kernels,
whose level `moebius.kernels.isa_level` names. Other dense layers are computed by torch and oneDNN
(`gpu_service.ops.linear`), which need other parts of AVX-512.
"""

from __future__ import annotations

from pathlib import Path

from moebius.host.kernel_files import file_text

# Any of these sets of flags lets oneDNN multiply bfloat16, as its `bf16` data type asks.
_BFLOAT16_PRODUCTS = (
    {"avx512bw", "avx512vl", "avx512dq"},
    {"avx_ne_convert", "avx_vnni_int8"},
)

# Measured at each level, 4 bits with AVX2 on a second host: "Without AVX-512" in docs/benchmarks.md.
_MISSING = {
    "scalar": "no AVX2: experts are computed value by value, for trying things out",
    "avx2": "no AVX-512: experts decode up to 16 % slower, "
    "and long prompts take 3 to 7 times as long as with AMX",
    "avx512": "no VNNI and no bfloat16 products: prompts and 4-bit experts take longer",
    "avx512_vnni": "no bfloat16 products: prompts take longer",
    "avx512_bf16": "",
    "amx": "",
}
_IN_FLOAT32 = "dense layers of float16 models are kept in float32 on this CPU, at twice their memory"


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the first processor's flags, as Linux names them; empty where the file does not say."""
    lines = file_text(cpuinfo).splitlines()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


def has_bfloat16_products(flags: frozenset[str]) -> bool:
    """Returns whether dense layers that oneDNN computes stay in bfloat16 on a CPU with these flags."""
    return any(needed <= flags for needed in _BFLOAT16_PRODUCTS)


def what_it_costs(level: str, flags: frozenset[str], on_gpu: bool) -> str:
    """Returns what a host of this level lacks, in one line; empty: nothing.

    level: as `isa_level` names it; flags: as `cpu_flags`, empty where they are not known; on_gpu: whether
    GPUs compute the dense layers.
    """
    parts = [_MISSING.get(level, "")]
    if flags and not on_gpu and not has_bfloat16_products(flags):
        parts.append(_IN_FLOAT32)
    return "; ".join(part for part in parts if part)
