"""Guards the memory ledger on a real GPU: what it measures, and that service allocates nothing more."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from gpu_service.memory.device_memory import CudaMemory
from lab.bench.engine.drive import running_engine
from lab.bench.engine.measure import random_prompts
from lab.random_model import RandomModelOptions, write_random_model
from moebius.config import MoebiusConfig
from moebius.config.loader import load_config
from moebius.errors import UserError

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, with all experts fit for the GPU."""
    directory = tmp_path_factory.mktemp("random") / "model"
    write_random_model(directory, RandomModelOptions("small", "bfloat16"))
    return directory


def settings(model: Path, **flags: object) -> MoebiusConfig:
    own: dict[str, object] = {
        "model": str(model),
        "device": "cuda",
        "gpu_experts_ratio": 1.0,
        "max_num_seqs": 16,
        "cuda_graph_max_batch_size": 16,
        "max_num_batched_tokens": 1024,
        "kv_cache_gib": 1.0,
    }
    return load_config(None, own | flags)


def test_device_tells_what_torch_allocates() -> None:
    """A tensor shows in allocated, in reserved and in what is free; its end shows in allocated only."""
    memory = CudaMemory(torch.device("cuda", 0))
    memory.release_cache()
    memory.reset_peak()
    before = memory.use()
    tensor = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    during = memory.use()
    del tensor
    after = memory.use()
    assert during.allocated - before.allocated == 512 * MIB
    assert before.free - during.free >= 512 * MIB
    assert after.allocated == before.allocated
    assert after.reserved == during.reserved
    assert after.peak - before.allocated >= 512 * MIB
    assert during.device_allocations > before.device_allocations
    memory.release_cache()
    assert memory.use().free >= before.free - 2 * MIB


def test_service_allocates_nothing_more(model: Path) -> None:
    """Full steps, long prompts and every batch size after readiness: the device is never asked for memory."""
    with running_engine(settings(model)) as engine:
        ledger = engine.built.memory.ledger
        assert ledger is not None
        for streams, length in ((16, 500), (1, 1000), (5, 3), (16, 64)):
            prompts = random_prompts(streams, length, 2048, streams)
            engine.submit(prompts, 24, 1.0).wait(24)
        assert ledger.late_allocations() == 0
        planned, measured = ledger.plan, ledger.measured
    # Weights are planned exactly; the allocator rounds each tensor up.
    for part in ("dense weights", "resident experts", "KV cache"):
        assert measured[part] == pytest.approx(planned.of(part), rel=0.05, abs=4 * MIB), part
    assert 0 < measured["activations"] < 1.5 * planned.of("activations")


def test_pool_takes_what_is_left(model: Path) -> None:
    """Without a size of its own the KV cache fills the planned share of the GPU, and not more."""
    total = torch.cuda.mem_get_info(0)[1]
    share = 0.2
    with running_engine(
        settings(model, kv_cache_gib=None, gpu_memory_utilization=share, max_num_seqs=512)
    ) as e:
        use = CudaMemory(torch.device("cuda", 0)).use()
        used = use.total - use.free
        assert used <= share * total
        assert used > 0.5 * share * total or e.built.num_pages >= 2 * 512 * 4096 // 16


def test_too_large_steps_are_refused_before_loading(model: Path) -> None:
    """A plan that cannot fit names what would; nothing was allocated for it."""
    gc.collect()  # an earlier test's engine
    config = settings(model, gpu_memory_utilization=0.02, max_num_batched_tokens=262144, kv_cache_gib=None)
    before = CudaMemory(torch.device("cuda", 0)).use().allocated
    with (
        pytest.raises(UserError, match=r"GiB are missing: it fits with .*--max-num-batched-tokens"),
        running_engine(config),
    ):
        pass
    assert CudaMemory(torch.device("cuda", 0)).use().allocated == before
