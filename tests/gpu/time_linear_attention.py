"""Times linear attention of one layer on the GPU that is here: `python -m tests.gpu.time_linear_attention`.

Not a test. At the sizes of Qwen3-Next and of the largest Qwen3.5, bfloat16, it prints per step microseconds
of the convolution and of the recurrence, by Triton and by torch (medians of launches in a queue), and least
times: of the bytes that must be read and written, and of the products that chunks of 64 need, on an H200.
Then microseconds of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_service.ops.linear_attention import CHUNK, causal_conv_extend, gated_delta_extend
from gpu_service.ops.triton.table import IMPLEMENTATIONS
from tests.gpu.time_attention import device_us
from tests.helpers.linear_cases import QWEN3_5_LARGE, QWEN3_NEXT, DeltaCase, LinearSizes, make_delta_case

# Of an H200, as published: bytes and dense bfloat16 operations per second.
BANDWIDTH, OPERATIONS = 4.8e12, 989e12
MODELS = {"Qwen3-Next": QWEN3_NEXT, "Qwen3.5 large": QWEN3_5_LARGE}
STEPS = {
    "4096 tokens": [4096],
    "8 x 512 tokens": [512] * 8,
    "448 tokens, 64 decodes": [1] * 64 + [448],
    "64 decodes": [1] * 64,
}


def least_us(sizes: LinearSizes, lengths: list[int]) -> tuple[float, float]:
    """Returns the least time of the bytes, and of the products."""
    tokens, heads = sum(lengths), sizes.value_heads
    state = heads * sizes.key_dim * sizes.value_dim
    rows = 2 * tokens * (sizes.conv_size + heads * (sizes.value_dim + 2))
    within = 2 * CHUNK * (3 * sizes.key_dim + 2 * sizes.value_dim)  # of keys, queries and changes
    with_state = 3 * 2 * sizes.key_dim * sizes.value_dim
    operations = tokens * heads * (within + with_state)
    return (rows + 8 * state * len(lengths)) / BANDWIDTH * 1e6, operations / OPERATIONS * 1e6


def kernels_us(step: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Mean of ten calls."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
    return {event.key: event.device_time_total / 10 for event in profiler.key_averages()}


def steps(case: DeltaCase) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns the four things that are timed."""
    channels = case.qkv.shape[1]
    taps = torch.randn(channels, 4, device="cuda", dtype=case.qkv.dtype)
    recent = torch.zeros(case.states.shape[0], 3, channels, device="cuda", dtype=case.qkv.dtype)
    conv = (case.qkv, recent, taps, *case[6:])
    return {
        "convolution, Triton": lambda: IMPLEMENTATIONS["causal_conv_extend"].function(*conv),
        "convolution, torch": lambda: causal_conv_extend.reference(*conv),
        "recurrence, Triton": lambda: IMPLEMENTATIONS["gated_delta_extend"].function(*case),
        "recurrence, torch": lambda: gated_delta_extend.reference(*case),
    }


def main() -> None:
    """All steps of all models."""
    for model, sizes in MODELS.items():
        for name, lengths in STEPS.items():
            bytes_us, products_us = least_us(sizes, lengths)
            print(f"{model}, {name}: least {bytes_us:.1f} us for bytes, {products_us:.1f} us for products")
            timed = steps(make_delta_case(sizes, lengths, torch.bfloat16, "cuda"))
            for label, step in timed.items():
                step()
                torch.cuda.synchronize()
                print(f"    {label:<24} {device_us(step):10.1f} us", flush=True)
            for kernel, microseconds in kernels_us(timed["recurrence, Triton"]).items():
                print(f"        {kernel:<40} {microseconds:8.1f} us")


if __name__ == "__main__":
    main()
