"""Graphs of steps with prompts on a GPU: replays say what eager steps say, whatever batches are made of.

`python -m pytest -m gpu tests/gpu/test_prompt_graphs_gpu.py`
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from gpu_service.core.request import Request, SamplingParams
from gpu_service.device.graphs import CudaGraphs, Cut
from gpu_service.device.pinned import registrar
from gpu_service.device.stream import CudaDeviceStream
from gpu_service.engine.late_graphs import BEGIN_GRAPHS
from tests.gpu.test_engine_gpu import GREEDY, SAMPLED, gpu_engine, on_cpu, on_gpu, scored_on_cpu
from tests.helpers.family_answers import (
    answers,
    assert_as_close,
    check_float32,
    check_half,
    errors,
    family_config,
    logprobs_of,
)
from tests.helpers.tiny_engine import Replay, Setup, noted_replays
from tests.helpers.tiny_models import TINY_MODELS, make_tiny_model, write_tiny_model
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.gpu
GRAPHS = Setup(prompt_graphs=(16, 30, 31), largest_graph=6)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose heads every backend can do."""
    found, tiny = tmp_path_factory.mktemp("qwen3_moe"), TINY_MODELS["qwen3_moe"]
    write_tiny_model(replace(tiny, changes=tiny.changes | {"head_dim": 128}), found, seed=5)
    return found


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """Returns the steps that are replayed in a test."""
    return noted_replays(monkeypatch)


def requests(params: dict[str, Any]) -> list[Request]:
    """Returns prompts of 3 to 76 tokens, more than two steps; the last two begin with an earlier one."""
    prompts = [[3 + (i * 37 + k * k * 5 + k) % 200 for k in range(3 + 9 * i)] for i in range(6)]
    prompts += [prompts[3] + prompts[1], prompts[3] + prompts[5]]
    return [
        Request(f"r{i}", prompt, SamplingParams(seed=i, max_tokens=8 + i, ignore_eos=True, **params))
        for i, prompt in enumerate(prompts)
    ]


def assert_all_kinds(replayed: Sequence[tuple[int, int, int]]) -> None:
    """Several graphs were replayed, exact and padded, and prompts beside other requests."""
    assert len({size for *_, size in replayed}) > 1
    assert any(tokens < size for tokens, _, size in replayed)
    assert any(tokens == size for tokens, _, size in replayed)
    assert any(1 < count < tokens for tokens, count, _ in replayed)


def test_pieces_share_memory_and_see_one_another() -> None:
    """What the host launches between pieces reads what the piece before wrote, although later pieces were
    recorded over it, and the next piece reads what it wrote; other graphs of the pool do not show.
    """
    device = torch.device("cuda", 0)
    stream = CudaDeviceStream(device)
    graphs, largest = CudaGraphs(stream), 4096
    with stream.active(), torch.inference_mode():
        source, result = (torch.zeros(largest, device=device, dtype=torch.bfloat16) for _ in range(2))
        between = torch.zeros(largest, device=device, dtype=torch.bfloat16)

        def work(size: int, cut: Cut) -> None:
            x = source[:size]
            for layer in range(4):
                # A view of something larger, with a step, as queries are of what they are projected with.
                pairs = torch.stack((x + layer, x * 0), 1)[:, 0]
                cut((pairs,), lambda memory, size=size: between[:size].copy_(memory * 2))
                del pairs
                x = between[:size] + 1
            result[:size].copy_(x)

        def expected(value: float) -> float:
            for layer in range(4):
                value = (value + layer) * 2 + 1
            return value

        captured = {}
        for size in (largest, 1000, 16):
            work(size, lambda tensors, launch: launch(*tensors))
            captured[size] = graphs.capture_pieces(lambda cut, size=size: work(size, cut))
        for value in (0.0, 1.0, 2.0):
            source.fill_(value)
            for size, graph in captured.items():
                result.fill_(-1)
                captured[largest].replay()
                result.fill_(-1)
                graph.replay()
                assert bool((result[:size] == expected(value)).all())
                assert bool((result[size:] == -1).all())
        for graph in captured.values():
            graph.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
def test_float32_tokens_are_those_of_the_cpu(
    directory: Path, params: dict[str, Any], overlap: bool, replayed: list[Replay]
) -> None:
    """Triton's attention, which computes in float32: every token, in mixed steps, chunks and prefix hits."""
    expected = on_cpu(directory, requests(params))
    setup = replace(GRAPHS, overlap=overlap)
    assert on_gpu(directory, setup, requests(params), attention="triton") == expected
    assert_all_kinds(replayed)


@pytest.mark.parametrize("attention", ["flashinfer", "triton"])
def test_bfloat16_is_as_close_as_eager(directory: Path, attention: str, replayed: list[Replay]) -> None:
    """Log-probabilities of what the GPU says, against float32, next to those of the CPU in bfloat16."""
    found = requests(GREEDY | {"logprobs": 1})
    on_gpu(directory, GRAPHS, found, dtype="bfloat16", attention=attention)
    assert_all_kinds(replayed)
    exact = scored_on_cpu(directory, found, "float32")
    ours = errors([logprobs_of(request.output_logprobs) for request in found], exact)
    theirs = errors(scored_on_cpu(directory, found, "bfloat16"), exact)
    assert_as_close(ours, theirs)


def test_graphs_that_come_late_say_the_same(directory: Path, replayed: list[Replay]) -> None:
    """They are captured by the engine's thread after decode steps' graphs, while host memory is registered
    elsewhere: steps before, between and after them have the tokens of the CPU.
    """
    expected = on_cpu(directory, requests(GREEDY))
    ended, locked = threading.Event(), torch.zeros(2**28, dtype=torch.uint8)

    def register() -> None:
        driver = registrar(torch.device("cuda", 0))
        with driver.active():
            while not ended.is_set():
                assert driver.register(locked.data_ptr(), locked.nbytes) == ""
                driver.unregister(locked.data_ptr())

    with gpu_engine(directory, replace(GRAPHS, captures_later=True), attention="triton") as engine:
        assert engine.run(requests(GREEDY)) == expected
        assert not replayed
        engine.engine.flush().result(10)
        with ThreadPoolExecutor(1) as beside, capture_logs() as logs:
            registering = beside.submit(register)
            try:
                engine.engine.call(BEGIN_GRAPHS).result(60)
                wait_until(lambda: any("are captured" in line["event"] for line in logs))
            finally:
                ended.set()
            registering.result(60)
        assert engine.run(requests(GREEDY)) == expected
        assert_all_kinds(replayed)


def test_no_replay_makes_the_host_wait(directory: Path) -> None:
    """torch raises at every call that would synchronise."""
    with gpu_engine(directory, GRAPHS, dtype="bfloat16", attention="flashinfer") as engine:
        engine.run(requests(GREEDY)[:3])
        engine.engine.flush().result(10)
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.run(requests(GREEDY | {"prompt_logprobs": 2}))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_assembled_with_resident_experts(
    name: str, dtype: str, tmp_path: Path, replayed: list[Replay]
) -> None:
    """What `moebius serve` builds, with kernels of resident experts in the graphs; twice, prefixes cached."""
    make_tiny_model(name, tmp_path)
    config = family_config(tmp_path, "cuda", dtype)
    (check_float32 if dtype == "float32" else check_half)(tmp_path, config)
    assert {size for *_, size in replayed} == {32}
    assert any(tokens < 32 for tokens, *_ in replayed)
    if dtype == "float32":
        count = len(replayed)
        without = family_config(tmp_path, "cuda", dtype, cuda_graph_max_prompt_tokens=0)
        assert answers(without).plain == answers(config).plain
        assert len(replayed) > count
