"""Invariant: drafts of multi-token prediction change no token, and are those of transformers' heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from gpu_service.attention.registry import make_attention
from gpu_service.core.request import Request, SamplingParams
from gpu_service.core.step import StepPlan, TokenPool
from gpu_service.device.stream import HostDeviceStream
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.layers.context import ForwardContext
from gpu_service.models.common import CausalLM
from gpu_service.speculation.drafter import FirstPass
from gpu_service.speculation.mtp import MtpDrafter
from gpu_service.speculation.ngram import NGramDrafter
from moebius.models.read import read_geometry
from tests.equality.test_no_hidden_waits import NoQuestions
from tests.helpers.capturable_mla import make_capturable_attention
from tests.helpers.device_experts import DenseExperts
from tests.helpers.host_graphs import RecordedOperations
from tests.helpers.layer_values import router_of
from tests.helpers.mtp_models import (
    MtpModels,
    cached_mtp_models,
    make_foreseen,
    write_mtp_model,
)
from tests.helpers.tiny_engine import PAGE_SIZE, Setup, TinyEngine, tiny_engine, tiny_model

HOST = torch.device("cpu")
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> MtpModels:
    return cached_mtp_models(tmp_path_factory.mktemp("mtp"))


class References(Protocol):
    """Transformers' heads, or others that are computed plainly."""

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """What may follow, by the first head, which goes on with what it made itself."""


class WatchedDrafter(MtpDrafter):
    """A drafter that notes its draft tokens, each with the tokens that were known."""

    def __init__(self, model: CausalLM, token_pool: TokenPool) -> None:
        super().__init__(model, token_pool)
        self.noted: list[tuple[list[int], list[int]]] = []

    def propose(
        self,
        context: ForwardContext,
        plan: StepPlan,
        hidden_states: torch.Tensor,
        next_ids: torch.Tensor,
        last_rows: torch.Tensor,
        first: FirstPass | None = None,
    ) -> torch.Tensor | None:
        drafts = super().propose(context, plan, hidden_states, next_ids, last_rows, first)
        for row, found in zip(last_rows.tolist(), [] if drafts is None else drafts.tolist(), strict=False):
            known = self._pool.tokens[plan.token_slots[row], : plan.positions[row] + 2]
            self.noted.append((known.tolist(), found))
        return drafts


def requests(params: dict[str, Any]) -> list[Request]:
    """Returns prompts shorter and longer than a step, and two that share their beginning."""
    shared = [3 + (k * k * 7 + k) % 200 for k in range(22)]
    prompts = [shared, [5, 6, 7], shared[:18]]
    return [
        Request(f"r{i}", prompt, SamplingParams(seed=i, max_tokens=6 + i, ignore_eos=True, **params))
        for i, prompt in enumerate(prompts)
    ]


def run(
    directory: Path,
    heads: int,
    drafts: int,
    params: dict[str, Any],
    draft_model: str = "",
    **changes: Any,
) -> tuple[list[list[int]], list[WatchedDrafter], TinyEngine]:
    """Returns the tokens of all requests, and the draft tokens on the way."""
    model = tiny_model(directory, HOST, mtp_heads=heads, draft_model=draft_model)
    watched = list[WatchedDrafter]()

    def make(model: CausalLM, token_pool: TokenPool) -> WatchedDrafter:
        watched.append(WatchedDrafter(model, token_pool))
        return watched[-1]

    setup = Setup(budget=16, num_drafts=drafts, device_drafter=make if drafts else None, **changes)
    with tiny_engine(
        model,
        LocalExpertClient(str(directory), read_geometry(directory, mtp_heads=heads), torch.float32),
        HostDeviceStream(),
        lambda layers, cache: make_attention(layers, cache, HOST, "torch"),
        setup,
    ) as engine:
        return engine.run(requests(params)), watched, engine


def check_drafts(
    noted: Sequence[tuple[list[int], list[int]]], wanted: Callable[[list[int], int], list[int]]
) -> None:
    """Every draft token is the reference's."""
    assert len(noted) > 8
    for known, found in noted:
        assert found == wanted(known, len(found)), f"after {len(known)} tokens"


@pytest.mark.covering(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "name", ["glm4_moe", "deepseek_v3", "glm_moe_dsa", "qwen3_next", "qwen3_5_moe_text_bias_tied"]
)
def test_drafts_change_no_token_and_are_those_of_transformers(
    name: str, params: dict[str, Any], written: MtpModels
) -> None:
    """Tokens stay the same for a prompt in chunks, for a shared one, and for decode steps in which most
    drafts are rejected.
    """
    directory, reference = written(name, 1)
    plain, _, _ = run(directory, 0, 0, params)
    tokens, (watched,), _ = run(directory, 1, 1, params)
    assert tokens == plain
    check_drafts(watched.noted, reference.drafts)


def test_n_grams_and_layers_change_no_token_together(written: MtpModels) -> None:
    """Drafts that are accepted more often are verified, of each request; tokens are those without any."""
    directory, _ = written("glm4_moe", 1)
    plain, _, _ = run(directory, 0, 0, GREEDY)
    tokens, (watched,), engine = run(directory, 1, 2, GREEDY, drafter=NGramDrafter(1, 2))
    assert tokens == plain
    assert watched.noted
    assert engine.speculation is not None
    assert engine.speculation.num_verified > 0


def within_page(known: list[int], count: int, reference: References, found: list[int]) -> list[int]:
    """Returns the reference's drafts; ours from where a pass of the head had no page of the request to write
    to.
    """
    last = len(known) - 2
    exact = sum((last + ahead) // PAGE_SIZE == last // PAGE_SIZE for ahead in range(count))
    return [*reference.drafts(known, exact), *found[exact:]]


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "qwen3_next"])
def test_a_single_head_goes_on_with_what_it_made(name: str, written: MtpModels) -> None:
    directory, reference = written(name, 1)
    plain, _, _ = run(directory, 0, 0, GREEDY)
    tokens, (watched,), _ = run(directory, 1, 3, GREEDY)
    assert tokens == plain
    assert max(len(found) for _, found in watched.noted) == 3
    for known, found in watched.noted:
        assert found == within_page(known, len(found), reference, found), f"after {len(known)} tokens"


def test_each_of_several_heads_has_a_draft(written: MtpModels) -> None:
    """There are as many drafts as heads, though more are asked for; the first one's are exact, as one head's
    are.
    """
    directory, reference = written("glm4_moe", 2)
    plain, _, _ = run(directory, 0, 0, GREEDY)
    tokens, (watched,), _ = run(directory, 2, 3, GREEDY)
    assert tokens == plain
    assert max(len(found) for _, found in watched.noted) == 2
    check_drafts([(known, found[:1]) for known, found in watched.noted], reference.drafts)
    # After a prompt alone no entry was made with a draft.
    known, found = watched.noted[0]
    assert found == reference.chain(known)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_drafts_that_are_right_are_accepted(name: str, tmp_path: Path) -> None:
    """With a head that knows what follows, a step gives as many tokens as it verifies, and one."""
    write_mtp_model(name, tmp_path)
    make_foreseen(tmp_path)
    plain, _, _ = run(tmp_path, 0, 0, GREEDY)
    tokens, _, engine = run(tmp_path, 1, 3, GREEDY)
    assert tokens == plain
    assert engine.speculation is not None
    assert engine.speculation.num_accepted == engine.speculation.num_verified > 5


class CountedModel:
    """Counts passes of heads that the host launches for decode steps of a model, until it is put back."""

    def __init__(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched, inner = 0, model.predict_further

        def predict_further(
            head: int, hidden_states: torch.Tensor, next_ids: torch.Tensor, context: ForwardContext
        ) -> torch.Tensor:
            self.launched += context.inputs.is_uniform_decode
            return inner(head, hidden_states, next_ids, context)

        monkeypatch.setattr(model, "predict_further", predict_further)


@pytest.mark.parametrize(("drafts", "launches_further"), [(1, False), (2, True)])
def test_the_host_launches_no_first_pass_of_a_replayed_step(
    drafts: int, launches_further: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in a graph, which reads the tokens that were drawn after the step's; passes for further draft
    tokens are launches, and so is each pass after a step without a graph.
    """
    write_mtp_model("glm4_moe", tmp_path)
    make_foreseen(tmp_path)
    model = tiny_model(tmp_path, HOST, mtp_heads=1)
    experts = DenseExperts(tmp_path, router_of(model.config).num_experts)
    found = []
    for largest in (0, 16):
        setup = Setup(largest, budget=16, num_drafts=drafts, device_drafter=MtpDrafter)
        with (
            tiny_engine(
                model, experts, HostDeviceStream(), make_capturable_attention, setup, RecordedOperations()
            ) as engine,
            monkeypatch.context() as patch,
        ):
            counted = CountedModel(model, patch)
            tokens = engine.run(requests(SAMPLED))
            assert engine.speculation is not None
            found.append((tokens, engine.speculation.num_accepted, counted.launched))
    (eager, accepted, launched), (replayed, accepted_so, left) = found
    assert (eager, accepted) == (replayed, accepted_so)
    assert (left > 0) == launches_further
    assert left < launched > 5


def test_replayed_decode_steps_leave_the_head_what_it_needs(tmp_path: Path) -> None:
    """The head's first pass is a graph after the step's, on the hidden states that it left, as those of steps
    with prompts do.
    """
    write_mtp_model("glm4_moe", tmp_path)
    make_foreseen(tmp_path)
    model = tiny_model(tmp_path, HOST, mtp_heads=1)
    experts = DenseExperts(tmp_path, router_of(model.config).num_experts)
    found = []
    for largest, prompts in ((0, ()), (8, (9, 16))):
        setup = Setup(largest, prompts, budget=16, num_drafts=3, device_drafter=MtpDrafter)
        with tiny_engine(
            model, experts, HostDeviceStream(), make_capturable_attention, setup, RecordedOperations()
        ) as engine:
            assert engine.speculation is not None
            found.append((engine.run(requests(GREEDY)), engine.speculation.num_accepted))
    assert found[0] == found[1]
    assert found[0][1] > 5


@pytest.mark.parametrize("heads", [1, 2])
def test_no_draft_asks_the_device(heads: int, written: MtpModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows are requests' last, only the device knows: the host waits for nothing of it."""
    directory, _ = written("glm4_moe", heads)
    model, asked = tiny_model(directory, HOST, mtp_heads=heads), []
    experts = DenseExperts(directory, router_of(model.config).num_experts)

    def tolist(tensor: torch.Tensor) -> list[Any]:
        raise AssertionError("tolist makes the host wait for the device")

    def guarded(drafter: MtpDrafter, *arguments: Any) -> torch.Tensor | None:
        asked.append(drafter)
        with monkeypatch.context() as patch, NoQuestions():
            patch.setattr(torch.Tensor, "tolist", tolist)
            return original(drafter, *arguments)

    original = MtpDrafter.propose
    monkeypatch.setattr(MtpDrafter, "propose", guarded)
    setup = Setup(budget=16, num_drafts=3, device_drafter=MtpDrafter)
    with tiny_engine(model, experts, HostDeviceStream(), make_capturable_attention, setup) as engine:
        engine.run(requests(SAMPLED))
    assert len(asked) > 6
