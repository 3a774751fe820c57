"""What common GPUs are: vendor's figures, dense, of bfloat16 products with float32 sums.

Sources: NVIDIA's data sheets of H200, H100 (SXM) and A100 (80 GB SXM), where figures "with sparsity" are
halved; NVIDIA's architecture papers on GA102, AD102 and RTX Blackwell (table of peak rates) for the others.
Memory is what the driver reports as total. Links are 16 lanes of PCIe in one direction: 64 GB/s for
generation 5, 32 for 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moebius.errors import UserError


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One kind of GPU; filled by the table below, or from options."""

    name: str
    memory_bytes: int
    # Bytes per second of its own memory, and of the link to the host in one direction.
    bandwidth: float
    link: float
    # Operations per second, a multiplication and an addition being two.
    flops: float


def _gpu(name: str, mib: int, gigabytes: float, teraflops: float, link: float) -> GpuModel:
    return GpuModel(name, mib * 2**20, gigabytes * 1e9, link * 1e9, teraflops * 1e12)


GPU_MODELS: Mapping[str, GpuModel] = {
    "h200": _gpu("H200", 143771, 4800, 989, 64),
    "h100": _gpu("H100", 81559, 3350, 989, 64),
    "a100": _gpu("A100", 81920, 2039, 312, 32),
    "rtxpro6000": _gpu("RTX PRO 6000", 97887, 1792, 503.8, 64),
    "5090": _gpu("RTX 5090", 32607, 1792, 209.5, 64),
    "4090": _gpu("RTX 4090", 24564, 1008, 165.2, 32),
    "3090": _gpu("RTX 3090", 24576, 936, 71, 32),
}


def find_gpu_model(text: str) -> GpuModel | None:
    """The model that a name such as "NVIDIA GeForce RTX 4090" or "h200" means; None: not in the table."""
    plain = "".join(character for character in text.lower() if character.isalnum())
    return next((model for key, model in GPU_MODELS.items() if key in plain), None)


def parse_gpus(text: str) -> tuple[int, GpuModel | None]:
    """Number and kind of `h200`, `2xh200`, `4` or `none`; the kind is None where only a number is given.

    Raises UserError naming what is not known.
    """
    count, times, name = text.strip().lower().partition("x")
    if text.strip().lower() == "none":
        return 0, None
    if text.strip().isdecimal():
        return int(text), None
    if not (times and count.strip().isdecimal() and name):
        count, name = "1", text
    model = find_gpu_model(name)
    if model is None or int(count) < 1:
        raise UserError(
            f"--gpus: {text!r} is not allowed; allowed: auto, none, a number, or NAME or NUMBERxNAME "
            f"with NAME one of {', '.join(GPU_MODELS)} (others: a number and --gpu-memory, --gpu-bandwidth, "
            "--gpu-tflops)"
        )
    return int(count), model
