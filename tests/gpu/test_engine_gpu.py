"""Invariant: on a GPU the engine says what it says on a CPU, however it launches its steps.

The CPU path is the reference. In float32 tokens are compared, because tiny random models have clear winners;
in bfloat16 the reference scores what the GPU says, and may differ as much as from the CPU's own bfloat16
path.
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

from gpu_service.attention.base import AttentionBackend
from gpu_service.attention.registry import make_attention
from gpu_service.attention.torch_reference import TorchReferenceAttention
from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.request import Request, SamplingParams
from gpu_service.core.step import StepPlan
from gpu_service.device.graphs import CudaGraphs
from gpu_service.device.stream import CudaDeviceStream, HostDeviceStream
from gpu_service.engine.decode_graphs import DecodeGraph, DecodeGraphs
from gpu_service.ops import backends
from moebius.errors import UserError
from moebius.models.layers.layer import Layers
from moebius.models.layers.recurrent import Recurrent
from moebius.models.read import read_model_config
from tests.helpers.constraints import constrain_some
from tests.helpers.device_experts import DenseExperts
from tests.helpers.drafters import AnswerDrafter
from tests.helpers.family_answers import assert_as_close, errors, logprobs_of, scored_by
from tests.helpers.layer_values import mixers_of
from tests.helpers.tiny_engine import Setup, TinyEngine, tiny_engine, tiny_model
from tests.helpers.tiny_models import TINY_MODELS, write_tiny_model

pytestmark = pytest.mark.gpu
NUM_EXPERTS = 7
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 30,
    "min_p": 0.01,
    "presence_penalty": 0.7,
    "repetition_penalty": 1.2,
    "logit_bias": ((9, 1.0),),
    "allowed_token_ids": tuple(range(3, 60)),
    "bad_words": ((9,), (5, 7), (5, 5, 8)),
    "min_tokens": 2,
}


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose heads every backend can do; of the second, layers with states among them."""
    found = tmp_path_factory.mktemp(request.param)
    tiny = TINY_MODELS[request.param]
    write_tiny_model(replace(tiny, changes=tiny.changes | {"head_dim": 128}), found, seed=5)
    return found


@pytest.fixture(autouse=True)
def no_reduced_precision() -> None:
    """float32 GEMMs are float32 here, as torch's default is."""
    assert not torch.backends.cuda.matmul.allow_tf32


def requests(count: int, params: dict[str, Any], max_tokens: int = 16) -> list[Request]:
    """Returns the prompts of different lengths, one of them longer than a step's budget."""
    return [
        Request(
            f"r{i}",
            [3 + (i * 37 + k * k * 5 + k) % 200 for k in range(3 + 9 * i)],
            SamplingParams(seed=i, max_tokens=max_tokens + 3 * i, ignore_eos=True, **params),
        )
        for i in range(count)
    ]


@contextmanager
def gpu_engine(
    directory: Path, setup: Setup, *, dtype: str = "float32", attention: str = "auto"
) -> Iterator[TinyEngine]:
    """The engine on the GPU. Skips where the backend cannot serve the model."""
    device = torch.device("cuda", 0)
    stream = CudaDeviceStream(device)
    backends.install(device, attention, getattr(torch, dtype))

    def make(layers: Layers, cache: KVCache) -> AttentionBackend:
        try:
            return make_attention(layers, cache, device, attention)  # type: ignore[return-value]
        except UserError as error:
            pytest.skip(str(error))

    try:
        with (
            stream.active(),
            tiny_engine(
                tiny_model(directory, device, dtype),
                DenseExperts(directory, NUM_EXPERTS, device),
                stream,
                make,
                setup,
                CudaGraphs(stream),
            ) as engine,
        ):
            yield engine
    finally:
        backends.uninstall("cuda")


def on_gpu(directory: Path, setup: Setup, wanted: list[Request], **kind: str) -> list[list[int]]:
    """Returns all tokens of the requests, on the GPU."""
    with gpu_engine(directory, setup, **kind) as engine:
        return engine.run(wanted)


def on_cpu(directory: Path, wanted: list[Request]) -> list[list[int]]:
    """Returns all tokens of the requests, by the reference in float32."""
    device = torch.device("cpu")
    experts = DenseExperts(directory, NUM_EXPERTS)
    with tiny_engine(
        tiny_model(directory, device), experts, HostDeviceStream(), TorchReferenceAttention, Setup()
    ) as engine:
        return engine.run(wanted)


@pytest.mark.parametrize("attention", ["flashinfer", "triton", "torch"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_float32_tokens_are_those_of_the_cpu(directory: Path, attention: str, params: dict[str, Any]) -> None:
    """Chunked prefills, mixed batches and decode steps, all launched eagerly."""
    expected = on_cpu(directory, requests(5, params))
    assert on_gpu(directory, Setup(), requests(5, params), attention=attention) == expected


def scored_on_cpu(directory: Path, answered: list[Request], dtype: str) -> list[list[float]]:
    """Returns the log-probability of each token of the answers on the CPU path, all before it given."""
    device = torch.device("cpu")
    model, experts = tiny_model(directory, device, dtype), DenseExperts(directory, NUM_EXPERTS)
    with tiny_engine(model, experts, HostDeviceStream(), TorchReferenceAttention, Setup()) as engine:
        return scored_by(engine.run, answered)


@pytest.mark.parametrize("attention", ["flashinfer", "triton"])
@pytest.mark.parametrize("largest_graph", [0, 6], ids=["eager", "graphs"])
def test_bfloat16_is_as_close_as_the_cpu_s_own(directory: Path, attention: str, largest_graph: int) -> None:
    """Log-probabilities of what the GPU says, against float32, next to those of the CPU in bfloat16."""
    found = requests(5, GREEDY | {"logprobs": 1})
    on_gpu(directory, Setup(largest_graph=largest_graph), found, dtype="bfloat16", attention=attention)
    exact = scored_on_cpu(directory, found, "float32")
    ours = errors([logprobs_of(request.output_logprobs) for request in found], exact)
    theirs = errors(scored_on_cpu(directory, found, "bfloat16"), exact)
    assert_as_close(ours, theirs)


@pytest.mark.parametrize("attention", ["flashinfer", "triton"])
def test_padded_graphs_equal_eager(directory: Path, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches from five down to one in graphs of 1, 2, 4 and 6 rows, in float32 where it can be."""
    replayed: list[tuple[int, int]] = []
    original = DecodeGraphs.replay

    def replay(graphs: DecodeGraphs, graph: DecodeGraph, plan: StepPlan) -> Any:
        replayed.append((plan.num_requests, graph.size))
        return original(graphs, graph, plan)

    monkeypatch.setattr(DecodeGraphs, "replay", replay)
    for params in (GREEDY, SAMPLED):
        eager = on_gpu(directory, Setup(), requests(5, params), attention=attention)
        assert on_gpu(directory, Setup(largest_graph=6), requests(5, params), attention=attention) == eager
    assert {(5, 6), (3, 4), (2, 2), (1, 1)} <= set(replayed)


@pytest.mark.parametrize("largest_graph", [0, 6], ids=["eager", "graphs"])
def test_scheduling_does_not_show(directory: Path, largest_graph: int) -> None:
    """Overlap = synchronous, batch 1 = batch 5, preempted = not."""
    expected = on_cpu(directory, requests(5, SAMPLED))
    with gpu_engine(directory, Setup(largest_graph=largest_graph)) as engine:
        assert [engine.run([request])[0] for request in requests(5, SAMPLED)] == expected
    synchronous = Setup(largest_graph=largest_graph, overlap=False)
    assert on_gpu(directory, synchronous, requests(5, SAMPLED)) == expected
    wanted = requests(5, SAMPLED)
    assert on_gpu(directory, Setup(largest_graph=largest_graph, num_pages=24), wanted) == expected
    assert sum(request.num_preemptions for request in wanted) > 0, "the scenario must preempt"


@pytest.mark.parametrize("attention", ["flashinfer", "triton", "torch"])
@pytest.mark.parametrize("params", [GREEDY, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_verified_drafts_do_not_show(directory: Path, attention: str, params: dict[str, Any]) -> None:
    """Right and wrong drafts as rows of eager decode steps and of captured graphs: the tokens of the CPU."""
    config = read_model_config(directory)
    if mixers_of(config, Recurrent):
        pytest.skip("states can not be taken back: refused at start")
    expected = on_cpu(directory, requests(5, params))
    drafter = AnswerDrafter({f"r{i}": tokens for i, tokens in enumerate(expected)}, config.vocab_size, 4)
    # The reference attention takes its sizes from the host: it is not captured.
    for largest_graph in (0,) if attention == "torch" else (0, 16):
        setup = Setup(largest_graph=largest_graph, num_drafts=3, drafter=drafter)
        with gpu_engine(directory, setup, attention=attention) as engine:
            assert engine.run(requests(5, params)) == expected
            load = engine.engine.load
        assert 0 < load.accepted_tokens < load.draft_tokens


def masked(directory: Path, count: int, params: dict[str, Any]) -> list[Request]:
    """Returns what `requests` does, every other one with a constraint."""
    return constrain_some(requests(count, params), read_model_config(directory).vocab_size)


@pytest.mark.parametrize("largest_graph", [0, 6], ids=["eager", "graphs"])
@pytest.mark.parametrize("params", [GREEDY, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_masked_batches_are_those_of_the_cpu(
    directory: Path, largest_graph: int, params: dict[str, Any]
) -> None:
    """Overlapping and not; requests without a constraint say what they say without the others."""
    expected = on_cpu(directory, masked(directory, 5, params))
    for overlap in (True, False):
        setup = Setup(largest_graph=largest_graph, overlap=overlap)
        assert on_gpu(directory, setup, masked(directory, 5, params)) == expected
    free = on_gpu(directory, Setup(largest_graph=largest_graph), requests(5, params))
    assert free[1::2] == expected[1::2]


@pytest.mark.parametrize("largest_graph", [0, 6], ids=["eager", "graphs"])
@pytest.mark.parametrize("attention", ["flashinfer", "triton"])
def test_no_step_makes_the_host_wait(directory: Path, largest_graph: int, attention: str) -> None:
    """torch raises at every call that would synchronise; prefills, decode steps and all of the sampler."""
    params = SAMPLED | {"logprobs": 3, "prompt_logprobs": 2}
    setup = Setup(largest_graph=largest_graph)
    with gpu_engine(directory, setup, dtype="bfloat16", attention=attention) as engine:
        engine.run(requests(3, params))
        engine.engine.flush().result(10)
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.run(requests(5, params))
            engine.run(requests(2, GREEDY))
            engine.run(masked(directory, 4, GREEDY))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("largest_graph", [0, 6], ids=["eager", "graphs"])
def test_the_host_runs_ahead_of_the_device(directory: Path, largest_graph: int) -> None:
    """With the device held up, a step and the one after it are launched before anything is computed."""
    from gpu_service.device import cuda_driver as driver

    with gpu_engine(directory, Setup(largest_graph=largest_graph)) as engine:
        engine.run(requests(1, GREEDY))
        engine.engine.flush().result(10)
        stream = engine.stream
        # Held by a word, not for a time: how long the host takes depends on what else the machine does.
        go_on = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        driver.wait_until_equal(go_on.data_ptr(), 1, stream.stream.cuda_stream)  # type: ignore[attr-defined]
        try:
            (request,) = requests(1, GREEDY)
            engine.engine.submit([request])
            deadline = time.monotonic() + 60
            while (launched := request.scheduled_len - request.prompt_len) < 1:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
        finally:
            go_on.fill_(1)
        assert launched >= 1, "the step that samples the second token was not launched"
        assert engine.wait([request]) == on_cpu(directory, requests(1, GREEDY))
