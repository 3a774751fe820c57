"""Guards captured decode steps on real tiny models: a replay gives the tokens of the eager step.

All of a step, its copies to the host included, is launched with the stream active.

The host's recording replays operations, not Python, so what a graph must not see (lengths and lists of the
captured step) would show here as it would on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.core.request import Request, SamplingParams
from gpu_service.core.step import ForwardInputs, StepPlan
from gpu_service.device.graphs import graph_sizes
from gpu_service.device.stream import DeviceEvent, HostDeviceStream
from gpu_service.engine.decode_graphs import DecodeGraph, DecodeGraphs
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.experts.choice_samples import ChoiceSamples
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.fetching.step import FetchedStep
from gpu_service.models.common import CausalLM
from tests.helpers.capturable_attention import CapturableAttention
from tests.helpers.capturable_mla import make_capturable_attention
from tests.helpers.constraints import constrain_some
from tests.helpers.device_experts import DenseExperts, DoomedDenseExperts
from tests.helpers.drafters import AnswerDrafter
from tests.helpers.host_graphs import RecordedOperations
from tests.helpers.tiny_engine import Setup, tiny_engine, tiny_model
from tests.helpers.tiny_models import make_tiny_model

HOST = torch.device("cpu")
Tiny = tuple[CausalLM, DenseExperts]


class OrderedStream(HostDeviceStream):
    """Only what is launched while it is active runs in its order, as on a GPU: downloads must be."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = threading.local()

    @contextmanager
    def active(self) -> Iterator[None]:
        self._depth.value = getattr(self._depth, "value", 0) + 1
        try:
            yield
        finally:
            self._depth.value -= 1

    def record(self) -> DeviceEvent:
        assert getattr(self._depth, "value", 0), "what the event ends was launched on no stream"
        return super().record()


GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.7, "logprobs": 2}


@pytest.fixture(
    scope="module", params=[("qwen3_moe", 7), ("glm4_moe", 10), ("qwen3_next", 7)], ids=lambda p: str(p[0])
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Returns a model and its experts."""
    name, num_experts = request.param
    directory: Path = tmp_path_factory.mktemp(name)
    make_tiny_model(name, directory)
    return tiny_model(directory, HOST), DenseExperts(directory, num_experts)


def requests(count: int, params: dict[str, Any]) -> list[Request]:
    """Returns prompts and outputs of different lengths: batches shrink as they end."""
    return [
        Request(
            f"r{i}",
            [3 + (i * 37 + k * k * 5 + k) % 200 for k in range(3 + 5 * i)],
            SamplingParams(seed=i, max_tokens=6 + 4 * i, ignore_eos=True, **params),
        )
        for i in range(count)
    ]


def run(tiny: Tiny, setup: Setup, wanted: list[Request]) -> list[list[int]]:
    """Returns all at once in an engine on the host's twins of stream and graphs."""
    model, experts = tiny
    with tiny_engine(
        model, experts, OrderedStream(), make_capturable_attention, setup, RecordedOperations()
    ) as engine:
        return engine.run(wanted)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_replayed_equals_eager(tiny: Tiny, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch size from five down to one, exact and padded; other sampling runs on the graph's logits."""
    eager = run(tiny, Setup(), requests(5, params))
    replayed: list[tuple[int, int]] = []
    original = DecodeGraphs.replay

    def replay(graphs: DecodeGraphs, graph: DecodeGraph, plan: StepPlan) -> Any:
        replayed.append((plan.num_requests, graph.size))
        return original(graphs, graph, plan)

    monkeypatch.setattr(DecodeGraphs, "replay", replay)
    wanted = requests(5, params)
    assert run(tiny, Setup(largest_graph=6), wanted) == eager
    assert {(5, 6), (3, 4), (2, 2), (1, 1)} <= set(replayed)
    if params == SAMPLED:
        assert all(len(request.output_logprobs) == len(request.output_token_ids) for request in wanted)


def test_replays_sample_the_choices_of_eager_steps(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows choose is read from a replayed step as from an eager one: its own rows, no padding."""
    routers = {number: layer.router for number, layer in tiny[0].config.routed.items()}
    top_k = next(iter(routers.values())).top_k
    original, take = ModelRunner.__init__, ChoiceSamples.take
    taken: list[torch.Tensor] = []

    def made(runner: ModelRunner, *arguments: Any, **options: Any) -> None:
        original(runner, *arguments, **options)
        runner.samples = ChoiceSamples(list(routers), 1 << 20, top_k, 8, HOST)

    def noted(samples: ChoiceSamples, inputs: ForwardInputs) -> torch.Tensor | None:
        found = take(samples, inputs)
        if found is not None:
            taken.append(found)
        return found

    monkeypatch.setattr(ModelRunner, "__init__", made)
    monkeypatch.setattr(ChoiceSamples, "take", noted)
    run(tiny, Setup(), requests(5, GREEDY))
    eager, taken = taken, []
    run(tiny, Setup(largest_graph=6), requests(5, GREEDY))
    assert len(eager) == len(taken) > 3
    assert all(map(torch.equal, eager, taken))
    assert {found.shape[2] for found in taken} & {3, 5}, "sizes that graphs pad"
    assert all(bool((found[0] >= 0).all()) for found in taken)


@pytest.mark.parametrize("tiny", [("qwen3_moe", 7)], indirect=True, ids=lambda p: str(p[0]))
def test_replays_that_fetch_are_checked(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches are begun before the launch and checked after the end; a step whose experts were replaced is
    run again.
    """
    wanted = run(tiny, Setup(), requests(3, GREEDY))
    noted: list[str] = []

    class Step(FetchedStep):
        def check(self) -> None:
            noted.append("checked")
            if noted.count("checked") == 5:
                raise ExpertUnavailable(-1, "experts were replaced")

    def fetch(runner: ModelRunner, rows: int) -> FetchedStep:
        noted.append("begun")
        nothing: Any = None
        return Step({}, nothing, nothing, None, lambda: noted.append("launched"))

    monkeypatch.setattr(ModelRunner, "fetch", fetch)
    assert run(tiny, Setup(largest_graph=4, overlap=False), requests(3, GREEDY)) == wanted
    steps = noted.count("begun")
    assert steps > 5
    assert noted == ["begun", "launched", "checked"] * steps


@pytest.mark.parametrize("tiny", [("qwen3_moe", 7), ("glm4_moe", 10)], indirect=True, ids=lambda p: str(p[0]))
@pytest.mark.parametrize("params", [GREEDY, {"temperature": 0.8, "logprobs": 2}], ids=["greedy", "sampled"])
def test_verified_drafts_are_rows_of_a_graph(
    tiny: Tiny, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with right and wrong drafts are replayed, and give what steps of one token each give."""
    eager = run(tiny, Setup(), requests(4, params))
    drafter = AnswerDrafter({f"r{i}": tokens for i, tokens in enumerate(eager)}, tiny[0].config.vocab_size, 4)
    with_drafts: list[int] = []
    original = DecodeGraphs.replay

    def replay(graphs: DecodeGraphs, graph: DecodeGraph, plan: StepPlan) -> Any:
        if plan.drafts is not None:
            with_drafts.append(plan.num_requests)
        return original(graphs, graph, plan)

    monkeypatch.setattr(DecodeGraphs, "replay", replay)
    setup = Setup(largest_graph=16, num_drafts=3, drafter=drafter)
    assert run(tiny, setup, requests(4, params)) == eager
    assert max(with_drafts) > 4


@pytest.mark.covering(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_masked_replays_equal_eager_steps(tiny: Tiny, params: dict[str, Any]) -> None:
    """Batches with constraints and without are the same graphs, whose logits are masked afterwards.

    Requests without a constraint say what they say without the others.
    """
    size = tiny[0].config.vocab_size
    eager = run(tiny, Setup(overlap=False), constrain_some(requests(5, params), size))
    assert run(tiny, Setup(largest_graph=6), constrain_some(requests(5, params), size)) == eager
    free = run(tiny, Setup(largest_graph=6), requests(5, params))
    assert eager[1::2] == free[1::2]
    assert all(masked != plain for masked, plain in zip(eager[::2], free[::2], strict=True))


def test_batches_above_the_largest_graph_run_eagerly(tiny: Tiny) -> None:
    """Nothing is lost where graphs end."""
    assert run(tiny, Setup(largest_graph=2), requests(4, GREEDY)) == run(tiny, Setup(), requests(4, GREEDY))


def test_preempted_equals_not(tiny: Tiny) -> None:
    """Requests leave graphs for the queue and come back to other slots and pages."""
    wanted = requests(4, GREEDY)
    tight = run(tiny, Setup(largest_graph=4, num_pages=14), wanted)
    assert sum(request.num_preemptions for request in wanted) > 0, "the scenario must preempt"
    assert tight == run(tiny, Setup(), requests(4, GREEDY))


@pytest.mark.parametrize(
    ("name", "num_experts"),
    [
        ("deepseek_v3", 12),
        ("glm_moe_dsa_shared_groups_biased_tied", 12),
        ("ernie4_5_vl_moe", 28),
        ("hy_v4", 10),
        ("longcat_flash", 7),
        ("mistral_large4", 10),
        ("minimax_m3_vl", 10),
        ("qwen4_exp_text_three_streams_bias_tied", 10),
    ],
)
def test_latents_and_choices(tmp_path: Path, name: str, num_experts: int) -> None:
    """All latents, those that layers choose or take over, and blocks: padded, preempted, chosen again.

    Also with n-grams, whose tokens are those of steps in flight, choices without weights, experts in parts.
    """
    make_tiny_model(name, tmp_path)
    model = tiny_model(tmp_path, HOST), DenseExperts(tmp_path, num_experts)
    wanted = requests(4, GREEDY)
    tight = run(model, Setup(largest_graph=4, num_pages=14), wanted)
    assert sum(request.num_preemptions for request in wanted) > 0, "the scenario must preempt"
    assert tight == run(model, Setup(), requests(4, GREEDY))


@pytest.mark.parametrize(
    ("name", "params"), [("qwen3_moe", GREEDY), ("qwen3_moe", SAMPLED), ("qwen3_next", SAMPLED)]
)
def test_experts_lost_during_replays_do_not_show(tmp_path: Path, name: str, params: dict[str, Any]) -> None:
    """Replayed steps, and those launched after them, are undone and replayed again; so are their states."""
    make_tiny_model(name, tmp_path)
    model, experts = tiny_model(tmp_path, HOST), DoomedDenseExperts(tmp_path, 7)
    setup = Setup(largest_graph=4)
    expected = run((model, experts), setup, requests(4, params))
    begun = experts.steps
    # Relative to the first step after warming up and capturing, which begins nine (twice and once per size).
    experts.lost_at = {begun + 9 + step for step in (1, 4, 8, 9, 15)}
    assert run((model, experts), setup, requests(4, params)) == expected
    assert experts.recoveries >= 4
    size = model.config.vocab_size
    masked = run((model, experts), setup, constrain_some(requests(4, params), size))
    begun = experts.steps
    experts.lost_at = {begun + 9 + step for step in (1, 4, 8, 9, 15)}
    assert run((model, experts), setup, constrain_some(requests(4, params), size)) == masked
    assert experts.recoveries >= 8


def test_experts_lost_while_drafts_are_verified_do_not_show(tmp_path: Path) -> None:
    """A replayed step is undone with its drafts in the token pool, and the same drafts are verified again."""
    make_tiny_model("qwen3_moe", tmp_path)
    model, experts = tiny_model(tmp_path, HOST), DoomedDenseExperts(tmp_path, 7)
    params = {"temperature": 0.8, "top_p": 0.9, "logprobs": 2}
    expected = run((model, experts), Setup(), requests(4, params))
    drafter = AnswerDrafter(
        {f"r{i}": tokens for i, tokens in enumerate(expected)}, model.config.vocab_size, 4
    )
    setup = Setup(largest_graph=4, num_drafts=2, drafter=drafter)
    begun = experts.steps
    # As above.
    experts.lost_at = {begun + 9 + step for step in range(3, 12, 2)}
    assert run((model, experts), setup, requests(4, params)) == expected
    assert experts.recoveries >= 4


def test_padding_touches_no_page_and_no_expert(tiny: Tiny) -> None:
    """Rows of padding write to the dummy page only, and choose no experts."""
    model, experts = tiny
    with tiny_engine(
        model, experts, HostDeviceStream(), CapturableAttention, Setup(largest_graph=4), RecordedOperations()
    ) as engine:
        assert all(not engine.kv_cache.pages(layer)[1:].any() for layer in range(engine.kv_cache.num_layers))
        experts.submitted_ids.clear()
        assert engine.graphs is not None
        engine.graphs.capture_all()
        padded = [ids for ids in experts.submitted_ids if ids.shape[0] == 4]
        assert padded
        assert all(bool((ids == -1).all()) for ids in padded)


def test_a_step_that_can_not_be_captured_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which size, why, and how to go on without."""

    def forward(*_: Any) -> torch.Tensor:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(CapturableAttention, "_attend", forward)
    with pytest.raises(RuntimeError, match=r"2 rows .*no kernel.* cuda_graphs: false"):
        run(tiny, Setup(largest_graph=2), [])


def test_sizes() -> None:
    """Powers of two, then steps of 8, 16 and 32; the limit is always one of them."""
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert graph_sizes(50) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 50]
    assert graph_sizes(256)[10:] == [64, 80, 96, 112, 128, 160, 192, 224, 256]


def prefixed(params: dict[str, Any]) -> list[Request]:
    """Returns prompts of which the later ones begin with an earlier one."""
    *first, earlier, fifth, sixth = requests(6, params)
    longer = [
        Request(later.request_id, earlier.prompt_token_ids + later.prompt_token_ids, later.params)
        for later in (fifth, sixth)
    ]
    return [*first, earlier, *longer]


@pytest.mark.covering(2)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("setup", [Setup(largest_graph=80, budget=80), Setup(largest_graph=16, budget=9)])
def test_short_prompts_are_rows_of_graphs(
    tiny: Tiny, setup: Setup, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with prompts, whole or in chunks, beside rows that decode, give what they give launched one by
    one. A model with states launches them so: its tokens are no rows.
    """
    eager = run(tiny, Setup(budget=setup.budget), prefixed(params))
    with_prompts: list[int] = []
    original = DecodeGraphs.replay

    def replay(graphs: DecodeGraphs, graph: DecodeGraph, plan: StepPlan) -> Any:
        if not plan.is_uniform_decode:
            with_prompts.append(graph.size)
        return original(graphs, graph, plan)

    monkeypatch.setattr(DecodeGraphs, "replay", replay)
    assert run(tiny, setup, prefixed(params)) == eager
    assert bool(with_prompts) == (tiny[0].config.model_type != "qwen3_next")
