"""Invariant: on a GPU two steps on two streams say what one says, and decoding never waits for a prompt.

The CPU's synchronous engine without a lane is the reference, in float32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.attention.registry import make_attention
from gpu_service.attention.torch_reference import TorchReferenceAttention
from gpu_service.core.request import Request, SamplingParams
from gpu_service.device.graphs import CudaGraphs
from gpu_service.device.stream import CudaDeviceStream, HostDeviceStream
from gpu_service.ops import backends
from tests.helpers.device_experts import DenseExperts
from tests.helpers.tiny_engine import Setup, TinyEngine, tiny_engine, tiny_model
from tests.helpers.tiny_models import TINY_MODELS, write_tiny_model

pytestmark = pytest.mark.gpu
NUM_EXPERTS = 7
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "presence_penalty": 0.7}
LANE = Setup(largest_graph=6, budget=16, num_pages=120, prefill_chunk_max=48)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose heads every backend can do; of the second, layers with states among them."""
    found = tmp_path_factory.mktemp(request.param)
    tiny = TINY_MODELS[request.param]
    write_tiny_model(replace(tiny, changes=tiny.changes | {"head_dim": 128}), found, seed=5)
    return found


def requests(count: int, params: dict[str, Any], round_: int = 0) -> list[Request]:
    """Every other prompt is long enough for the lane."""
    return [
        Request(
            f"r{round_}-{i}",
            [3 + (i * 37 + k * k * 5 + k + round_) % 200 for k in range(5 + i if i % 2 else 40 + 4 * i)],
            SamplingParams(seed=i, max_tokens=12 + i, ignore_eos=True, **params),
        )
        for i in range(count)
    ]


def on_cpu(directory: Path, wanted: list[Request]) -> list[list[int]]:
    """Returns all tokens of the requests, without a lane."""
    experts, setup = DenseExperts(directory, NUM_EXPERTS), Setup(overlap=False)
    model = tiny_model(directory, torch.device("cpu"))
    with tiny_engine(model, experts, HostDeviceStream(), TorchReferenceAttention, setup) as engine:
        return engine.run(wanted)


@contextmanager
def engine_with_lane(directory: Path, setup: Setup = LANE) -> Iterator[tuple[TinyEngine, CudaDeviceStream]]:
    """A warm engine on two streams, and the lane's."""
    device = torch.device("cuda", 0)
    main, lane = CudaDeviceStream(device, is_urgent=True), CudaDeviceStream(device)
    backends.install(device, "auto", torch.float32)
    try:
        with (
            main.active(),
            tiny_engine(
                tiny_model(directory, device),
                DenseExperts(directory, NUM_EXPERTS, device),
                main,
                lambda layers, cache: make_attention(layers, cache, device, "triton"),
                setup,
                CudaGraphs(main),
                lane_stream=lane,
            ) as engine,
        ):
            # What is made or loaded at first use is there afterwards, whichever stream asked for it: loading
            # a kernel waits for all streams, also for one that a test holds.
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            for number, length in enumerate((9, 3, 60)):
                ids = [3 + (k * k * 7 + 3 * k + 91 + number) % 200 for k in range(length)]
                engine.run([Request(f"warm-{number}", ids, params)])
            torch.cuda.synchronize()
            yield engine, lane
    finally:
        backends.uninstall("cuda")


@pytest.mark.parametrize("params", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_a_lane_does_not_show(directory: Path, params: dict[str, Any], overlap: bool) -> None:
    """Prompts in the lane next to decoding in graphs, several times, so that pages and slots change hands."""
    with engine_with_lane(directory, replace(LANE, overlap=overlap)) as (engine, _):
        for round_ in range(4):
            expected = on_cpu(directory, requests(8, params, round_))
            assert engine.run(requests(8, params, round_)) == expected


def test_few_pages_change_hands_between_lanes(directory: Path) -> None:
    """With preemptions, what one lane gives up is the other's, and never too early."""
    setup = replace(LANE, num_pages=40)
    with engine_with_lane(directory, setup) as (engine, _):
        for round_ in range(4):
            expected = on_cpu(directory, requests(8, {"temperature": 0.0}, round_))
            assert engine.run(requests(8, {"temperature": 0.0}, round_)) == expected


def test_decoding_goes_on_while_the_lane_is_held(directory: Path) -> None:
    """With the lane's stream held by a word, a running stream gets its tokens; the prompt is right then."""
    from gpu_service.device import cuda_driver as driver

    with engine_with_lane(directory) as (engine, lane):
        (expected,) = on_cpu(directory, [long_prompt()])
        running = Request(
            "running", [7, 8, 9], SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        )
        go_on = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        driver.wait_until_equal(go_on.data_ptr(), 1, lane.stream.cuda_stream)
        try:
            engine.engine.submit([running])
            wait_until(lambda: len(running.output_token_ids) >= 5)
            prompt = long_prompt()
            engine.engine.submit([prompt])
            wait_until(lambda: prompt.in_lane)
            seen = len(running.output_token_ids)
            wait_until(lambda: len(running.output_token_ids) >= seen + 30)
            assert prompt.output_token_ids == [], "the lane is held"
        finally:
            go_on.fill_(1)
        engine.wait([running, prompt])
        assert prompt.output_token_ids == expected


def test_an_abort_in_the_lane_keeps_its_pages_until_the_end(directory: Path) -> None:
    """The client hears of it at once and others are computed; no page is given away before the step's end."""
    from gpu_service.device import cuda_driver as driver

    with engine_with_lane(directory) as (engine, lane):
        expected = on_cpu(directory, requests(6, {"temperature": 0.0}, 9))
        go_on = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        driver.wait_until_equal(go_on.data_ptr(), 1, lane.stream.cuda_stream)
        try:
            prompt = long_prompt()
            engine.engine.submit([prompt])
            wait_until(lambda: prompt.in_lane)
            engine.engine.abort(prompt.request_id)
            engine.wait([prompt])
            assert prompt.slot >= 0, "its slot and pages are the step's"
            (short,) = [Request("short", [3, 4, 5], SamplingParams(temperature=0.0, max_tokens=4))]
            engine.run([short])
        finally:
            go_on.fill_(1)
        assert engine.run(requests(6, {"temperature": 0.0}, 9)) == expected
        assert prompt.slot < 0


def long_prompt() -> Request:
    """For the lane."""
    ids = [3 + (k * k * 11 + k) % 200 for k in range(60)]
    return Request("prompt", ids, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))


def wait_until(happened: Any) -> None:
    """Raises AssertionError after a minute."""
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        time.sleep(0.001)
