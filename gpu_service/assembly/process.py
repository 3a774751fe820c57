"""What has to be set for the whole process before anything of the model exists: device, threads, and where
libraries keep the GPU kernels they compile at run time.

Both libraries take that place from a variable of the process's environment, which Triton reads at every
compilation (`triton.knobs.cache.dir`) and FlashInfer once, when it is imported (`flashinfer.jit.env`).
Our own CUDA kernels have it from `cuda_program.keep_compiled_in`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import structlog
import torch

from gpu_service.attention.registry import check_attention_backend
from gpu_service.device.cuda_program import keep_compiled_in
from moebius.config import GpuConfig, MoebiusConfig, ParallelConfig
from moebius.errors import UserError
from moebius.host.topology import Topology
from moebius.process.progress import phase

_log = structlog.get_logger(__name__)


def use_jit_cache(directory: str) -> None:
    """Keeps compiled kernels under `directory`, which is made; empty: the libraries' own places.

    Must be called before FlashInfer is imported. Raises UserError when nothing can be written there.
    """
    if not directory:
        return
    root = Path(directory).expanduser().resolve()
    try:
        for part in ("triton", "flashinfer"):
            (root / part).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"jit_cache_dir: cannot write to {directory!r}: {error}") from error
    if not os.access(root / "triton", os.W_OK):
        raise UserError(f"jit_cache_dir: cannot write to {directory!r}; a writable directory is needed")
    place = str(root / "flashinfer")
    if "flashinfer" in sys.modules and os.environ.get("FLASHINFER_WORKSPACE_BASE") != place:
        _log.warning("FlashInfer is imported already, its kernels stay where they were", directory=directory)
    keep_compiled_in(str(root))
    os.environ["TRITON_CACHE_DIR"] = str(root / "triton")
    os.environ["FLASHINFER_WORKSPACE_BASE"] = place


def resolve_device(gpu: GpuConfig, local_rank: int = 0) -> torch.device:
    """Returns the device of this rank; `auto` takes a GPU where torch sees one.

    Raises UserError when `device: cuda` is set and there is none, or fewer than the ranks of this host.
    """
    if gpu.device == "cpu":
        return torch.device("cpu")
    # As drivers number GPUs: CUDA's own order begins with the fastest, and plans are for GPUs by number.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        if gpu.device == "auto":
            return torch.device("cpu")
        raise UserError("device: 'cuda' is set, but torch sees no CUDA device; allowed here: auto, cpu")
    if local_rank >= count:
        raise UserError(f"rank {local_rank} of this host needs GPU {local_rank}; torch sees {count}")
    return torch.device("cuda", local_rank)


def local_rank(parallel: ParallelConfig) -> int:
    """Returns the number of the rank's GPU on its host, whose ranks have their order."""
    each = max(1, parallel.num_ranks // parallel.rank_hosts)
    return parallel.data_parallel_rank * each + parallel.rank % each


# torch leaves these untyped.
_cuda: Any = torch.cuda


def prepare_process(config: MoebiusConfig) -> torch.device:
    """The rank's device, made current; threads and the place of compiled kernels. Raises UserError."""
    use_jit_cache(config.gpu.jit_cache_dir)
    device = resolve_device(config.gpu, local_rank(config.parallel))
    check_attention_backend(config.gpu.attention_backend, device)
    if device.type == "cuda":
        # The host only fills small tensors; more threads would spin on the cores of the expert servers.
        torch.set_num_threads(1)
        _cuda.set_device(device)
        with phase("opening the GPU"):  # which else the first tensor does
            _cuda.synchronize(device)
    else:
        _set_threads(config.gpu)
    return device


def _set_threads(gpu: GpuConfig) -> None:
    """One for each physical core; a CPU is left to the engine's and the event loop's threads if possible."""
    cores = Topology.detect().recommended_threads()
    allowed = len(os.sched_getaffinity(0))
    torch.set_num_threads(gpu.gpu_threads or max(1, min(cores, allowed - 1)))
