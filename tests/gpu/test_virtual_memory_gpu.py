"""Invariant: on a GPU tensors and captured graphs stay valid while physical memory moves below them, and an
engine whose KV pages and experts lend each other memory says what one with fixed parts says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_service.assembly import elastic as assembly
from gpu_service.core.request import Request
from gpu_service.device.graphs import CudaGraphs
from gpu_service.device.stream import CudaDeviceStream
from gpu_service.device.virtual_memory import PhysicalPool, VirtualRange, pooled_bytes
from moebius.config import PlacementConfig
from tests.helpers.built_engine import running_engine
from tests.helpers.elastic import (
    ELASTIC,
    FIXED,
    check_memory,
    make_restless,
    request,
    run_with_long_prompt,
    settings,
)
from tests.helpers.expert_cluster import Cluster, running_cluster
from tests.helpers.tiny_models import TINY_MODELS, write_tiny_model
from tests.service.test_streaming_engine import wait_until_streaming

pytestmark = pytest.mark.gpu
MIB = 2**20
LONG = 4000


def pool_of(chunk_bytes: int, chunks: int) -> PhysicalPool:
    """Free chunks of the first GPU."""
    memory = assembly.make_virtual_memory(torch.device("cuda", 0))
    assert memory is not None, "the GPU cannot map memory"
    pool = PhysicalPool(memory, max(chunk_bytes, memory.granularity))
    pool.add(chunks)
    return pool


def test_a_captured_graph_reads_what_is_mapped_now() -> None:
    """A chunk moves to another range with its bytes; replays see it, and what took its place."""
    pool = pool_of(2 * MIB, 3)
    size = pool.chunk_bytes
    first, second = VirtualRange(pool, 4 * size), VirtualRange(pool, 4 * size)
    one, other = first.tensor(), second.tensor()
    first.map([0, 2])
    one[:size] = 1
    one[2 * size : 3 * size] = 2
    stream = CudaDeviceStream(torch.device("cuda", 0))
    total = torch.zeros(1, dtype=torch.int64, device="cuda")

    place = one[2 * size : 3 * size]

    def read() -> None:
        total.copy_(place.sum(dtype=torch.int64))

    with stream.active():
        read()
        graph = CudaGraphs(stream).capture(read)
        graph.replay()
        stream.synchronize()
        assert total.item() == 2 * size
        first.unmap([2])
        second.map([3])
        assert other[3 * size :].sum(dtype=torch.int64).item() == 2 * size
        first.map([2])
        one[2 * size : 3 * size] = 5
        graph.replay()
        stream.synchronize()
        assert total.item() == 5 * size
        graph.close()
    held = pooled_bytes(torch.device("cuda", 0))
    assert held >= 3 * size
    first.unmap([0, 2])
    second.unmap([3])
    assert pool.free == 3
    pool.close()
    assert pooled_bytes(torch.device("cuda", 0)) == held - 3 * size


@pytest.mark.parametrize("chunk_mib", [2, 8, 16])
def test_a_gibibyte_moves_while_a_stream_computes(chunk_mib: int, capsys: pytest.CaptureFixture[str]) -> None:
    """What a busy stream computes is not changed by it; prints how long it takes."""
    count = 1024 // chunk_mib
    pool = pool_of(chunk_mib * MIB, count)
    slots, pages = VirtualRange(pool, 1024 * MIB), VirtualRange(pool, 1024 * MIB)
    tensors = slots.tensor(), pages.tensor()
    slots.map(range(count))
    matrix = torch.eye(2048, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(200):
            matrix = matrix @ matrix
        begin = time.perf_counter()
        slots.unmap(range(count))
        middle = time.perf_counter()
        pages.map(range(count))
        end = time.perf_counter()
        torch.cuda.synchronize()
    assert torch.equal(matrix, torch.eye(2048, device="cuda"))
    tensors[1].fill_(3)
    assert tensors[1][:: 512 * 1024].sum().item() == 3 * 2048
    with capsys.disabled():
        print(
            f"\n1 GiB in chunks of {chunk_mib} MiB: unmapped in {1e3 * (middle - begin):.2f} ms, mapped in "
            f"{1e3 * (end - middle):.2f} ms"
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A server of experts of 1.5 MiB, with memory that is streamed from."""
    directory = tmp_path_factory.mktemp("elastic")
    tiny = TINY_MODELS["qwen3_moe"]
    sizes = {
        "hidden_size": 256,
        "moe_intermediate_size": 512,
        "num_experts": 16,
        "head_dim": 128,
        "max_position_embeddings": 8192,
    }
    write_tiny_model(replace(tiny, changes=tiny.changes | sizes), directory / "model", seed=5)
    memory = directory / "memory"
    memory.mkdir()
    options = {"dtype": "float32", "placement": PlacementConfig(drop_resident="keep")}
    with running_cluster(
        directory / "model", directory, expert_weights_dir=str(memory), expert_threads=8, **options
    ) as running:
        yield running


OPTIONS = {
    "device": "cuda",
    "prefix_caching": False,
    "max_num_batched_tokens": 256,
    "prefill_chunk_max": 1024,
    "cuda_graph_max_batch_size": 4,
}


def requests() -> list[Request]:
    """Three streams, and a prompt that is longer than there is room for at first."""
    return [*(request(f"s{n}", 9, 300, n) for n in range(3)), request("long", LONG, 4, 9)]


@pytest.fixture(scope="module")
def wanted(cluster: Cluster) -> list[list[int]]:
    """Returns what an engine with fixed parts says, one request after another."""
    options = OPTIONS | FIXED | {"prefill_experts": "cpu"}
    with running_engine(settings(cluster, 4, **options)) as engine:
        assert engine.built.elastic is None
        return [engine.run([each])[0] for each in requests()]


@pytest.mark.parametrize("prefill_experts", ["cpu", "stream"])
def test_a_long_prompt_takes_memory_from_experts_and_gives_it_back(
    prefill_experts: str,
    cluster: Cluster,
    wanted: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With captured graphs, and with a lane that streams, the outputs are those of fixed parts."""
    make_restless(monkeypatch, str(tmp_path / "cache"))
    monkeypatch.setattr(assembly, "chunk_bytes", lambda granularity, shape: granularity)
    options = OPTIONS | ELASTIC | {"kv_cache_gib": 0.008, "prefill_experts": prefill_experts}
    with running_engine(settings(cluster, 14, **options)) as engine:
        resident, pool = engine.built.resident, engine.built.engine.scheduler.cache.pool
        assert resident is not None
        assert engine.built.elastic is not None
        if prefill_experts == "stream":
            wait_until_streaming(engine)
        before, at_first = resident.nbytes, pool.usable
        *streams, long = requests()
        most, least = run_with_long_prompt(engine, streams, long)
        assert [each.output_token_ids for each in (*streams, long)] == wanted
        assert most > at_first
        assert least < before
        for number in range(20):
            engine.run([request(f"a{number}", 9, 100, number)])
        assert resident.nbytes > least
        check_memory(engine)
