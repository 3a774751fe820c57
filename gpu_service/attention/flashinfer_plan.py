"""What both of FlashInfer's backends (of heads, of latents) need around its planner.

Whether it can run here, asked before anything is allocated; page lists as it wants them; how much memory its
plans take; and `PlanStaging`, the memory that it plans in.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import triton.language as tl

from gpu_service.ops.triton.jit import jit_for_any, next_power_of_2
from moebius.models.layers.gqa import GQA
from moebius.models.layers.layer import Layers
from moebius.models.layers.layer import mixers as layer_mixers

HEAD_DIMS = (64, 128, 256)
HALF_TYPES = (torch.float16, torch.bfloat16)


def missing_compiler() -> str:
    """Why FlashInfer's kernels cannot be had; empty: they are packaged, or nvcc and ninja can build them."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return ""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    has_nvcc = shutil.which("nvcc") or any(home and (Path(home) / "bin/nvcc").exists() for home in homes)
    if not has_nvcc:
        return "FlashInfer compiles its kernels: install nvcc of the CUDA toolkit, or flashinfer-jit-cache"
    if not shutil.which("ninja"):
        return "FlashInfer compiles its kernels: install ninja, or flashinfer-jit-cache"
    return ""


# FlashInfer's kernels for Ampere serve decode, paged and ragged steps from one compiled module; those for
# Hopper ("fa3", chunks only) are another minute of compiling, and pay only where long prompts dominate.
DECODE_KERNELS = "fa2"
CHUNK_KERNELS = "fa2"
# Query heads per KV head from which decode is faster on tensor cores; other sizes have no kernel without.
SCALAR_GROUPS = (1, 2, 3)


def unsupported_types(dtype: torch.dtype, head_dim: int) -> str:
    """Returns why FlashInfer has no kernel for these activations; empty: it has."""
    if dtype not in HALF_TYPES:
        return f"FlashInfer computes in float16 and bfloat16, not in {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer has kernels for head_dim {HEAD_DIMS}, not {head_dim}"
    return ""


def unsupported_layers(mixers: Sequence[GQA]) -> str:
    """Why the wrappers used here cannot compute what some layers need; empty: they can."""
    if any(mixer.has_sinks for mixer in mixers):
        return "this model has attention sinks, which FlashInfer is not used for here"
    sizes = {(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.scale) for mixer in mixers}
    if len(sizes) > 1:
        return "this model's layers have different numbers of heads, which FlashInfer is not used for here"
    if any(mixer.chunk is not None for mixer in mixers):
        return "this model attends within chunks, which FlashInfer is not used for here"
    if any(mixer.blocks is not None for mixer in mixers):
        return "this model chooses blocks of tokens, which FlashInfer is not used for here"
    if any(mixer.window is not None for mixer in mixers):
        return "this model has sliding windows, which FlashInfer is not used for here"
    return ""


def unsupported_device(device: torch.device) -> str:
    """Why FlashInfer cannot run on a device; empty: it can."""
    if device.type != "cuda":
        return f"FlashInfer needs a CUDA device, not {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"FlashInfer needs compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    return missing_compiler()


def attention_modules(layers: Layers, dtype: torch.dtype, storage_dtype: torch.dtype) -> list[Any]:
    """Returns what the wrappers of grouped-query attention will compile (`JitSpec`s), so that it can be done
    before.

    Of a rank's own layers; empty where FlashInfer is not used, for latents, whose wrappers compile
    at their first plan, and for compressed attention.
    """
    mixers = [mixer for mixer in layer_mixers(layers) if isinstance(mixer, GQA)]
    if not mixers or unsupported_layers(mixers) or unsupported_types(dtype, mixers[0].head_dim):
        return []
    mixer = mixers[0]
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    types = dtype, storage_dtype, dtype, torch.int32
    # No rotation in the kernel, no window, no soft cap.
    sizes = mixer.head_dim, mixer.head_dim, 0, False, False
    modules = [gen_batch_prefill_module(CHUNK_KERNELS, *types, *sizes, False)]
    if mixer.num_heads // mixer.num_kv_heads in SCALAR_GROUPS:
        modules.append(gen_batch_decode_module(*types, *sizes))
    elif DECODE_KERNELS != CHUNK_KERNELS:
        modules.append(gen_batch_prefill_module(DECODE_KERNELS, *types, *sizes, False))
    return modules


MIB = 2**20
# Latent attention takes 70 MiB on an H200, decode without tensor cores less.
SMALLEST = 128 * MIB
# The planner splits while there are fewer than two programs per multiprocessor and KV head.
_PROGRAMS_PER_SM = 2


def tile_rows(rows_per_request: int, head_dim: int) -> int:
    """Returns the number of rows of a tile, query heads of a group counting as rows."""
    if rows_per_request > 64 and head_dim < 256:
        return 128
    return 64 if rows_per_request > 16 else 16


def _bytes(num_tiles: int, rows: int, num_heads: int, head_dim: int) -> int:
    return num_tiles * rows * num_heads * (head_dim + 1) * 4 + MIB


def eager_bytes(num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> int:
    """Returns the bytes for results of split requests, for any step that is not captured.

    FlashInfer's kernels hand out tiles of rows; where keys are split, every tile's results are kept as
    float32 with one more number per row. The planner refuses a plan that does not fit, so the memory is sized
    for the largest one (`PrefillPlan` and `FA2DetermineCtaTileQ` of 0.6.13).
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    num_tiles = _PROGRAMS_PER_SM * sms // num_kv_heads
    return max(SMALLEST, _bytes(num_tiles, 64 if head_dim >= 256 else 128, num_heads, head_dim))


def captured_bytes(num_requests: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Returns the same for a captured step: every request has its own tiles, all of them as if they were
    split.
    """
    group = num_heads // num_kv_heads
    rows = tile_rows(group, head_dim)
    num_tiles = -(-num_requests * group // rows) + num_requests - 1
    return _bytes(num_tiles, rows, num_heads, head_dim)


# What FlashInfer's own constructors take.
PLAN_BYTES = 8 * 2**20
NUM_BUFFERS = 2


class DeviceEvent(Protocol):
    """The part of `torch.cuda.Event` that is used."""

    def record(self) -> None:
        """Mark the current end of the work queued on the current stream."""

    def synchronize(self) -> None:
        """Blocks until the recorded point has passed; at once if nothing was recorded."""


class PlanStaging:
    """The memory that FlashInfer's planner works in: one wrapper of a backend at a time has it, for one plan.

    A plan is made on the host in a pinned buffer and copied to the device without waiting. Planning the next
    step before that copy ran would corrupt the plan of a step that is still queued: with overlap scheduling
    this happens. So there are two pinned buffers in turn, each with an event recorded after its copy; a
    buffer is written again only once its event has passed. By then the step before the last one has ended, so
    the wait is not felt. On the device one buffer suffices: the copy of the next plan is queued after the
    kernels that read this one, because both are on the forward's stream.
    """

    def __init__(
        self, device: torch.device, result_bytes: int, make_event: Callable[[], DeviceEvent] | None = None
    ) -> None:
        pinned = device.type == "cuda"
        self.results = torch.zeros(result_bytes, dtype=torch.uint8, device=device)
        self.plans = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)
        self._hosts = [
            torch.empty(self.plans.shape, dtype=torch.uint8, pin_memory=pinned) for _ in range(NUM_BUFFERS)
        ]
        make: Callable[[], DeviceEvent] = make_event or torch.cuda.Event
        self._events = [make() for _ in range(NUM_BUFFERS)]
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self.results.nbytes + self.plans.nbytes

    def reserve(self, result_bytes: int) -> None:
        """Gives wrappers adopted from now on at least this much; earlier ones keep what they have."""
        if self.results.nbytes < result_bytes:
            self.results = torch.zeros(result_bytes, dtype=torch.uint8, device=self.results.device)

    def adopt(self, wrapper: Any) -> Any:
        """Makes a new wrapper use the shared buffers. Returns it.

        Raises RuntimeError when this FlashInfer names them otherwise.
        """
        if not hasattr(wrapper, "_pin_memory_int_workspace_buffer"):
            raise RuntimeError(
                f"{type(wrapper).__name__} of this FlashInfer has no pinned plan buffer of the known name; "
                "supported: flashinfer-python >= 0.6.13, < 0.8"
            )
        wrapper._float_workspace_buffer = self.results
        wrapper._int_workspace_buffer = self.plans
        wrapper._pin_memory_int_workspace_buffer = self._hosts[0]
        return wrapper

    def plan(self, wrapper: Any, planner: Callable[..., None], *args: Any, **options: Any) -> None:
        """`planner(*args, **options)`, which plans for the wrapper, in the next free pinned buffer."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        event = self._events[self._turn]
        event.synchronize()
        wrapper._pin_memory_int_workspace_buffer = self._hosts[self._turn]
        planner(*args, **options)
        event.record()


def host_int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns int32 on the host, pinned where a device copies from it without waiting."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")


_MIN_REQUESTS = 256


@jit_for_any("num_requests", "table_stride")
def _list_pages_kernel(  # type: ignore[no-untyped-def]
    block_table, seq_lens, indices, indptr, last_page_len, num_requests, table_stride,
    PAGE_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, WRITE_BOUNDS: tl.constexpr,
):  # fmt: skip
    """Program per request: its pages go after those of the requests before it."""
    request = tl.program_id(0)
    others = tl.arange(0, BLOCK_R)
    before = tl.load(seq_lens + others, mask=(others < request) & (others < num_requests), other=0)
    first = tl.sum((before + PAGE_SIZE - 1) // PAGE_SIZE, 0)
    length = tl.load(seq_lens + request)
    count = tl.cdiv(length, PAGE_SIZE)
    if WRITE_BOUNDS:
        if request == 0:
            tl.store(indptr, 0)
        tl.store(indptr + request + 1, first + count)
        tl.store(last_page_len + request, length - (count - 1) * PAGE_SIZE)
    for begin in range(0, count, BLOCK_P):
        column = begin + tl.arange(0, BLOCK_P)
        page = tl.load(block_table + request * table_stride + column, mask=column < count, other=0)
        tl.store(indices + first + column, page, mask=column < count)


def list_pages(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    page_size: int,
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes the pages in use of int32 `[R, max_pages]` side by side into `indices`, on the device.

    seq_lens int32 `[R]`; the host keeps no copy of the block table, and waits for nothing here. `bounds`:
    device tensors that get what `page_bounds` gives on the host, int32 `[R + 1]` and `[R]`.
    """
    num_requests = seq_lens.shape[0]
    indptr, last_page_len = bounds or (indices, indices)
    _list_pages_kernel[(num_requests,)](
        block_table, seq_lens, indices, indptr, last_page_len, num_requests, block_table.stride(0),
        PAGE_SIZE=page_size, BLOCK_R=max(_MIN_REQUESTS, next_power_of_2(num_requests)), BLOCK_P=256,
        WRITE_BOUNDS=bounds is not None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Host tensors of one step; filled by `page_bounds`."""

    indptr: torch.Tensor  # int32 [R + 1], where each request's pages begin
    last_page_len: torch.Tensor  # int32 [R], tokens on each request's last page
    num_pages: int


def page_bounds(
    seq_lens: Sequence[int], page_size: int, device: torch.device, pinned: bool = True
) -> PageBounds:
    """Returns the bounds of pages from the lengths alone; an empty sequence has no page.

    They are pinned where a device copies from them.
    """
    lengths = np.asarray(seq_lens, dtype=np.int32)
    counts = -(-lengths // page_size)
    indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
    counts.cumsum(out=indptr[1:])
    bounds = torch.from_numpy(indptr), torch.from_numpy(lengths - (counts - 1) * page_size)
    if pinned and device.type == "cuda":
        bounds = bounds[0].pin_memory(), bounds[1].pin_memory()
    return PageBounds(*bounds, int(indptr[-1]))
