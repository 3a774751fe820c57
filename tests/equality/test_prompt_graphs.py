"""Guards graphs of steps with prompts on real tiny models: a replay gives the tokens of the eager step.

The host's recording replays operations, not Python: what a graph must not see of the captured step would show
here as it would on a GPU. Attention is launched between pieces, by the backend that eager steps use.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.core.request import Request
from gpu_service.device.graphs import Cut, prompt_graph_sizes
from gpu_service.device.stream import HostDeviceStream
from tests.equality.test_decode_graphs import GREEDY, HOST, SAMPLED, OrderedStream, Tiny, prefixed
from tests.helpers.capturable_attention import CapturableAttention
from tests.helpers.device_experts import DenseExperts
from tests.helpers.host_graphs import RecordedOperations
from tests.helpers.tiny_engine import Replay, Setup, TinyEngine, noted_replays, tiny_engine, tiny_model
from tests.helpers.tiny_models import make_tiny_model

GRAPHS = (12, 30, 32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Returns a model and its experts."""
    directory: Path = tmp_path_factory.mktemp("qwen3_moe")
    make_tiny_model("qwen3_moe", directory)
    return tiny_model(directory, HOST), DenseExperts(directory, 7)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """Returns the steps that are replayed in a test."""
    return noted_replays(monkeypatch)


def run(
    tiny: Tiny,
    setup: Setup,
    wanted: list[Request],
    look: Callable[[TinyEngine], None] = lambda engine: None,
) -> list[list[int]]:
    """Returns all at once in an engine on the host's twins of stream and graphs, twice in a row."""
    model, experts = tiny
    again = [Request(r.request_id + "again", r.prompt_token_ids, r.params) for r in wanted]
    with tiny_engine(
        model, experts, OrderedStream(), CapturableAttention, setup, RecordedOperations()
    ) as engine:
        look(engine)
        return engine.run(wanted) + engine.run(again)


@pytest.mark.parametrize("largest_graph", [0, 8], ids=["alone", "beside_decode_graphs"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_replayed_equals_eager(
    tiny: Tiny, params: dict[str, Any], largest_graph: int, replayed: list[Replay]
) -> None:
    """Prompts whole, in chunks and after a cached prefix, beside requests that decode; exact and padded."""
    eager = run(tiny, Setup(), prefixed(params))
    assert not replayed
    assert run(tiny, Setup(prompt_graphs=GRAPHS, largest_graph=largest_graph), prefixed(params)) == eager
    assert {size for _, _, size in replayed} == set(GRAPHS)
    assert any(tokens < size for tokens, _, size in replayed)
    assert any(tokens == size for tokens, _, size in replayed)
    assert any(1 < requests < tokens for tokens, requests, _ in replayed)
    # Requests that only decode have graphs of their own, where there are any.
    assert any(requests == tokens for tokens, requests, _ in replayed) == (largest_graph == 0)


def test_what_follows_the_layers_is_the_step_s_own(tiny: Tiny, replayed: list[Replay]) -> None:
    """Log-probabilities of prompts and outputs are those of eager steps, also with a small budget."""
    params = {"temperature": 0.9, "top_k": 5, "logprobs": 2, "prompt_logprobs": 3}
    eager, wanted = prefixed(params), prefixed(params)
    assert run(tiny, Setup(prompt_graphs=(9, 16), budget=16), wanted) == run(tiny, Setup(budget=16), eager)
    assert replayed
    for one, other in zip(eager, wanted, strict=True):
        for expected, found in (
            (one.output_logprobs, other.output_logprobs),
            (one.prompt_logprobs, other.prompt_logprobs),
        ):
            assert expected
            for before, after in zip(expected, found, strict=True):
                if before is None or after is None:
                    assert before is after
                    continue
                assert (before.token_id, before.top_ids) == (after.token_id, after.top_ids)
                assert before.top_logprobs == pytest.approx(after.top_logprobs, abs=1e-5)


def test_larger_steps_run_eagerly(tiny: Tiny, replayed: list[Replay]) -> None:
    """Nothing is lost where graphs end."""
    assert run(tiny, Setup(prompt_graphs=(8, 12)), prefixed(GREEDY)) == run(tiny, Setup(), prefixed(GREEDY))
    assert replayed
    assert max(tokens for tokens, *_ in replayed) <= 12


def test_preempted_equals_not(tiny: Tiny, replayed: list[Replay]) -> None:
    """Requests come back to other slots and pages, and compute what they had in graphs."""
    wanted = prefixed(GREEDY)
    tight = run(tiny, Setup(prompt_graphs=GRAPHS, num_pages=26), wanted)
    assert sum(request.num_preemptions for request in wanted) > 0, "the scenario must preempt"
    assert replayed
    assert tight == run(tiny, Setup(), prefixed(GREEDY))


@pytest.mark.parametrize(
    ("name", "num_experts"), [("glm4_moe", 10), ("gpt_oss", 7), ("ernie4_5_vl_moe", 28)], ids=str
)
def test_other_layers(tmp_path: Path, name: str, num_experts: int, replayed: list[Replay]) -> None:
    """Shared experts and dense layers, sinks and windows, positions along three axes."""
    make_tiny_model(name, tmp_path)
    model = tiny_model(tmp_path, HOST), DenseExperts(tmp_path, num_experts)
    eager = run(model, Setup(), prefixed(GREEDY))
    assert run(model, Setup(prompt_graphs=GRAPHS), prefixed(GREEDY)) == eager
    assert replayed


def test_padding_touches_no_page_and_no_expert(tiny: Tiny) -> None:
    """Rows of padding write numbers to the dummy page only, choose no experts, and attend to nothing."""
    model, experts = tiny

    def look(engine: TinyEngine) -> None:
        pages = [engine.kv_cache.pages(layer) for layer in range(engine.kv_cache.num_layers)]
        assert all(not layer[1:].any() and bool(layer[0].isfinite().all()) for layer in pages)

    experts.submitted_ids.clear()
    attended: list[int] = []

    class Attention(CapturableAttention):
        def _attend(self, query: torch.Tensor, *others: Any) -> torch.Tensor:
            attended.append(query.shape[0])
            return super()._attend(query, *others)

    setup = Setup(prompt_graphs=(16,), largest_graph=0)
    with tiny_engine(model, experts, HostDeviceStream(), Attention, setup, RecordedOperations()) as engine:
        look(engine)
        assert not attended
        assert experts.submitted_ids
        assert all(bool((ids == -1).all()) for ids in experts.submitted_ids)
        engine.run(prefixed(GREEDY)[:2])
    assert attended
    assert max(attended) <= 11, "rows of padding attended"


def test_what_can_not_be_captured_runs_eagerly(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, replayed: list[Replay]
) -> None:
    """A layer that looks at requests costs the graphs and no answer; a device that fails ends the start."""

    def refuses(backend: RecordedOperations, work: Callable[[Cut], None]) -> Any:
        raise IndexError("the step of a graph has no requests")

    eager = run(tiny, Setup(), prefixed(GREEDY))
    monkeypatch.setattr(RecordedOperations, "capture_pieces", refuses)
    assert run(tiny, Setup(prompt_graphs=GRAPHS), prefixed(GREEDY)) == eager
    assert not replayed

    def fails(backend: RecordedOperations, work: Callable[[Cut], None]) -> Any:
        raise torch.AcceleratorError("operation failed due to a previous error during capture")

    monkeypatch.setattr(RecordedOperations, "capture_pieces", fails)
    with pytest.raises(RuntimeError, match=r"32 tokens .*previous error.* cuda_graph_max_prompt_tokens: 0"):
        run(tiny, Setup(prompt_graphs=GRAPHS), [])


def test_sizes() -> None:
    """Four for each doubling, from 256 on; the limit is always one of them."""
    assert prompt_graph_sizes(0) == []
    assert prompt_graph_sizes(100) == [100]
    assert prompt_graph_sizes(256) == [256]
    assert prompt_graph_sizes(512) == [256, 320, 384, 448, 512]
    assert prompt_graph_sizes(2048)[5:] == [640, 768, 896, 1024, 1280, 1536, 1792, 2048]
    assert prompt_graph_sizes(1100)[-2:] == [1024, 1100]
    sizes = prompt_graph_sizes(4096)
    assert all(after - before <= after / 5 for before, after in pairwise(sizes))
