"""Times one layer's attention on the GPU that is here: `python -m tests.gpu.time_attention [--fa3]`.

Not a test. At the sizes of Qwen3-30B-A3B (32 heads, 4 KV heads, 128, bfloat16, pages of 16) it prints per
step: microseconds of a layer on the device (the median of replayed batches of 20), of a plan on the host,
and how many GB of keys and values are read per second (compare with the device's memory bandwidth).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from gpu_service.attention.base import AttentionBackend
from gpu_service.attention.flashinfer_backend import FlashInferAttention
from gpu_service.attention.fused_decode import FusedDecodeAttention
from gpu_service.attention.triton_backend import TritonAttention
from gpu_service.cache.fp8 import E4M3
from tests.helpers.attention_cases import LAYER, Case, Geometry, Shape, make_case
from tests.helpers.fused_decode import Options, unrotated
from tests.helpers.gpu_capture import capture

REPEATS, ROUNDS = 20, 15
STEPS: dict[str, Shape] = {
    "1 decode at 1 k": [(1023, 1)],
    "1 decode at 64": [(63, 1)],
    "1 decode at 16 k": [(16383, 1)],
    "1 decode at 128 k": [(131071, 1)],
    "8 decodes at 4 k": [(4095, 1)] * 8,
    "32 decodes at 1 k": [(1023, 1)] * 32,
    "64 decodes at 4 k": [(4095, 1)] * 64,
    "chunk of 512, first": [(0, 512)],
    "chunk of 512 at 8 k": [(8192, 512)],
    "chunk of  with 64 decodes at 1 k": [(0, 448)] + [(1023, 1)] * 64,
    "chunk of 4096, first": [(0, 4096)],
}


def device_us(step: Callable[[], torch.Tensor]) -> float:
    """Returns median microseconds of a launch in a queue of launches."""
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # the host must not be what is timed
        begin.record()
        for _ in range(REPEATS):
            step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / REPEATS)
    return statistics.median(times)


def host_us(plan: Callable[[], None]) -> float:
    """Returns median microseconds of a plan, with nothing else queued."""
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        plan()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def time_step(name: str, case: Case, label: str, attention: AttentionBackend) -> None:
    """Prints one line."""
    inputs = case.inputs
    captured = inputs.is_uniform_decode
    (attention.plan_capture if captured else attention.plan)(inputs)

    def step() -> torch.Tensor:
        return attention.forward(case.query, case.key, case.value, LAYER)

    step()
    torch.cuda.synchronize()
    launch: Callable[[], object] = step
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        launch = graph.replay
    on_device = device_us(launch)  # type: ignore[arg-type]
    on_host = host_us(lambda: (attention.plan_replay if captured else attention.plan)(inputs))
    read = 2 * sum(inputs.seq_lens) * case.cache.num_kv_heads * case.geometry.head_dim
    gigabytes = read * case.cache.storage_dtype.itemsize / on_device / 1e3
    print(
        f"{name:<40} {label:<16} {on_device:9.1f} us {on_host:8.1f} us host {gigabytes:8.0f} GB/s", flush=True
    )


def time_fused(name: str, case: Case, attention: FlashInferAttention) -> None:
    """Prints microseconds of a layer's decode, norm, rotation and storing included: apart, and as one."""
    given = unrotated(case, Options())
    cells = []
    for forward in (AttentionBackend.forward_unrotated, FusedDecodeAttention.forward_unrotated):
        attention.plan_capture(case.inputs)

        def layers(forward: Callable[..., torch.Tensor] = forward) -> torch.Tensor:
            return [forward(attention, given, case.value, LAYER) for _ in range(REPEATS)][-1]

        graph, _ = capture(layers)
        cells.append(device_us(graph.replay) / REPEATS)
    print(f"{name:<36} apart {cells[0]:9.1f} us, as one {cells[1]:9.1f} us", flush=True)


def main() -> None:
    """All steps with all backends, bfloat16 and 8-bit pages."""
    chunk_kernels = "fa3" if "--fa3" in sys.argv else "fa2"
    for storage in (None, E4M3):
        kernels = "fa2" if storage else chunk_kernels  # 8-bit keys with 16-bit queries: Ampere's only
        print(f"pages of {storage or 'bfloat16'}, chunks by {kernels}")
        for name, shape in STEPS.items():
            case = make_case(Geometry(32, 4, 128, 16, torch.bfloat16, storage, "cuda"), shape)
            config = case.geometry.config()
            time_step(name, case, "Triton", TritonAttention(config.layers, case.cache))
            attention = FlashInferAttention(config.layers, case.cache, chunk_kernels=kernels)
            time_step(name, case, f"FlashInfer {kernels}", attention)
            if case.inputs.is_uniform_decode and storage is None:
                time_fused(name, case, attention)


if __name__ == "__main__":
    main()
