"""Guards the seams of putting an engine together: what is chosen, and what is said when it cannot be."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gpu_service.assembly import process
from gpu_service.assembly.kv_memory import cache_shape, scheduler_limits, scored_token_cost
from gpu_service.assembly.process import prepare_process, use_jit_cache
from gpu_service.assembly.steps import graphs_unsupported_reason
from gpu_service.assembly.warm_up import warm_up_requests, warm_up_tokens
from gpu_service.cache.fp8 import E4M3
from gpu_service.core.request import refuse_impossible
from gpu_service.device import cuda_program
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import UserError
from moebius.models.read import read_model_config
from tests.helpers.fake_model import VOCAB, fake_config
from tests.helpers.published_checkpoints import Published


def runner(captures: bool = True, device_driven: bool | None = True, resident: bool | None = None) -> Any:
    """Returns what `graphs_unsupported_reason` looks at; None: there is no such part."""
    return SimpleNamespace(
        attention=SimpleNamespace(captures=captures),
        experts=None if device_driven is None else SimpleNamespace(is_device_driven=device_driven),
        resident=None if resident is None else SimpleNamespace(captures=resident),
    )


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (runner(), ""),
        (runner(device_driven=None), ""),
        (runner(resident=True), ""),
        (runner(captures=False), "cannot be captured"),
        (runner(device_driven=False), "driven by the host"),
        (runner(resident=False), "resident experts"),
    ],
)
def test_graphs_are_captured_unless_a_part_can_not_be(parts: Any, reason: str) -> None:
    """Every part must be capturable; the one that is not is named."""
    found = graphs_unsupported_reason(MoebiusConfig(), parts)
    assert reason in found
    assert bool(found) == bool(reason)
    assert "cuda_graphs" in graphs_unsupported_reason(MoebiusConfig(gpu=GpuConfig(cuda_graphs=False)), parts)


def test_compiled_kernels_go_where_the_setting_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries are configured before they are imported, and our own kernels; without a setting none is
    touched."""
    monkeypatch.setattr(cuda_program, "_directory", "before")
    names = ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
    for name in names:
        monkeypatch.setenv(name, "before")
    use_jit_cache("")
    assert [os.environ[name] for name in names] == ["before", "before"]
    assert cuda_program.cache_file("source", "a kernel", "sm_90").parts[0] == "before"
    use_jit_cache(str(tmp_path / "a" / "jit"))
    assert all(Path(os.environ[name]).is_dir() for name in names)
    assert all(Path(os.environ[name]).is_relative_to(tmp_path) for name in names)
    assert cuda_program.cache_file("source", "a kernel", "sm_90").is_relative_to(tmp_path)


def test_a_jit_cache_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    """The cache is refused before hours of compiling end nowhere."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="jit_cache_dir"):
        use_jit_cache(str(tmp_path / "file"))


def test_triton_reads_what_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own view of the variable, although it is imported already."""
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(cuda_program, "_directory", "")
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    use_jit_cache(str(tmp_path))
    assert knobs.cache.dir == str(tmp_path / "triton")


@pytest.mark.parametrize("context_limit", [4, 5, 9, 300, 5000])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_warm_up_fits_any_pool(device: str, context_limit: int) -> None:
    """However small the pool, no warm-up request is refused; a GPU gets a chunk as large as it will see."""
    tokens = warm_up_tokens(torch.device(device), 512, context_limit)
    limits = scheduler_limits(
        GpuConfig(page_size=1), fake_config(max_model_len=context_limit), context_limit + 1
    )
    requests = warm_up_requests(VOCAB, tokens)
    for request in requests:
        refuse_impossible(request.prompt_len, request.params.max_tokens, limits)
    assert len({request.key for request in requests}) == len(requests)
    assert tokens <= 512
    if device == "cuda" and context_limit > 1000:
        assert tokens == 512


def test_cache_pages_have_the_form_that_the_settings_ask_for() -> None:
    """Half the bytes as e4m3; the planner and the pool use one number."""
    model = fake_config(), fake_config().layers
    plain = cache_shape(GpuConfig(page_size=8), *model, torch.device("cpu"))
    small = cache_shape(GpuConfig(page_size=8, kv_cache_dtype="fp8_e4m3"), *model, torch.device("cpu"))
    assert small.storage_dtype == E4M3
    assert plain.page_bytes == 4 * small.page_bytes
    for shape in (plain, small):
        cache = shape.make(5)
        assert cache.nbytes == 5 * shape.page_bytes
        assert cast(Any, cache).page_size == 8


@pytest.mark.parametrize(("name", "cost"), [("qwen3-30b-a3b", 2), ("deepseek-v3", 2), ("olmoe-1b-7b", 2)])
def test_a_scored_prompt_token_costs_what_the_head_adds(name: str, cost: int, tmp_path: Path) -> None:
    """Twice a token of a published model; a model that is little more than its head pays more, to a bound."""
    (tmp_path / "config.json").write_text(json.dumps(Published.load(name).config))
    assert scored_token_cost(read_model_config(tmp_path)) == cost
    assert scored_token_cost(fake_config(vocab_size=150_000)) == 8


@pytest.mark.parametrize(
    ("cores", "cpus", "setting", "threads"),
    # SMT; a CPU is left to other threads; a cgroup's quota; one CPU; a setting.
    [(8, 16, 0, 8), (8, 8, 0, 7), (2, 16, 0, 2), (1, 1, 0, 1), (8, 16, 12, 12)],
)
def test_torch_has_a_thread_for_each_physical_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, cpus: int, setting: int, threads: int
) -> None:
    """Only cores that the engine may use count; two threads of a core would wait for one another."""
    found: list[int] = []
    topology = SimpleNamespace(recommended_threads=lambda: cores)
    monkeypatch.setattr(process, "Topology", SimpleNamespace(detect=lambda: topology))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    prepare_process(MoebiusConfig(gpu=GpuConfig(device="cpu", gpu_threads=setting)))
    assert found == [threads]
