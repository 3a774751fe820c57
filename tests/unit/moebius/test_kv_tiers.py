"""Guards how much RAM engines on GPUs have for prefixes where no setting says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from moebius.config import GpuConfig, MoebiusConfig, ParallelConfig
from moebius.kv_tiers import default_tier_bytes, ram_tier_path, rank_tier_bytes, with_tier_bytes
from moebius.process.limits import available_memory, lockable_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "taken", "lockable", "expected"),
    [
        (500, 0, None, 100),
        (500, 400, None, 20),  # Experts that are not loaded yet come first.
        (500, 499, None, 0),
        (500, 600, None, 0),
        (5, 0, None, 1),
        (4.9, 0, None, 0),  # Less than a GiB is left out.
        (107.77, 0, None, 21.5),  # A whole number of tenths.
        (500, 100, 300, 80),  # What can be page-locked bounds it once experts have their part,
        (500, 100, 130, 30),
        (500, 100, 100.5, 0),
        (500, 100, 50, 0),
    ],
)
def test_prefixes_have_a_fifth_of_what_experts_leave(
    free: float, taken: float, lockable: float | None, expected: float
) -> None:
    """Figures by hand: free RAM, what experts take of it, and what a driver page-locks; GiB."""
    limit = None if lockable is None else int(lockable * GIB)
    found = default_tier_bytes(int(free * GIB), int(taken * GIB), limit)
    assert found / GIB == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("limit_gib", "is_windows", "expected"),
    [(None, False, 40), (50, False, 10), (50, True, 10), (None, True, 30)],
)
def test_a_container_and_windows_bound_it(
    limit_gib: int | None, is_windows: bool, expected: float, tmp_path: Path
) -> None:
    """The cgroup's limit counts as free RAM does; below Windows half of the RAM can be page-locked."""
    for path, text in {
        "proc/meminfo": f"MemTotal: {60 * 2**20} kB\nMemAvailable: {200 * 2**20} kB\n",
        "proc/version": "Linux 6.6 microsoft-standard-WSL2" if is_windows else "Linux 6.6",
        "proc/self/cgroup": "0::/pod",
        "sys/fs/cgroup/pod/memory.max": "max" if limit_gib is None else str(limit_gib * GIB),
        "sys/fs/cgroup/pod/memory.current": "0",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert default_tier_bytes(available_memory(tmp_path), 0, lockable_memory(tmp_path)) == expected * GIB


@pytest.mark.parametrize(
    ("parallel", "parts"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 4}, 4),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
        ({"data_parallel_size": 3}, 3),
        ({"tensor_parallel_size": 8, "rank_hosts": 2}, 4),  # Of each host four ranks.
    ],
)
def test_engines_and_ranks_of_a_host_divide_it(parallel: dict[str, int], parts: int) -> None:
    """Each has an equal part of its host's; an explicit number is that of all, and 0 is 0."""
    gpu = GpuConfig(kv_offload_gib="auto")
    config = MoebiusConfig(gpu=gpu, parallel=ParallelConfig(**parallel))  # type: ignore[arg-type]
    assert rank_tier_bytes(config) == 0
    assert rank_tier_bytes(with_tier_bytes(config, 24 * GIB)) == 24 * GIB // parts
    for given in (0.0, 3.0):
        asked = config.model_copy(update={"gpu": GpuConfig(kv_offload_gib=given)})
        assert with_tier_bytes(asked, 24 * GIB) == asked
        count = config.parallel.num_ranks * config.parallel.data_parallel_size
        assert rank_tier_bytes(asked) == int(given * GIB) // count


def test_engines_behind_one_port_have_files_of_their_own() -> None:
    """The first one's name is that of an engine alone."""
    names = [ram_tier_path("/run/x", engine).name for engine in range(3)]
    assert names == ["engine.kv", "engine-1.kv", "engine-2.kv"]
