"""Invariant: drafts of an EAGLE-3 head change no token, and are those of the head computed plainly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_service.core.step import TokenPool
from gpu_service.device.stream import HostDeviceStream
from gpu_service.models.common import CausalLM
from gpu_service.speculation.mtp import MtpDrafter
from gpu_service.speculation.ngram import NGramDrafter
from tests.equality.test_mtp_drafts import (
    GREEDY,
    HOST,
    SAMPLED,
    WatchedDrafter,
    check_drafts,
    requests,
    run,
    within_page,
)
from tests.helpers.capturable_mla import make_capturable_attention
from tests.helpers.device_experts import DenseExperts
from tests.helpers.eagle3_heads import Eagle3Reference, write_foreseeing_head, write_head
from tests.helpers.host_graphs import RecordedOperations
from tests.helpers.layer_values import router_of
from tests.helpers.mtp_models import make_foreseen, write_mtp_model
from tests.helpers.rank_group import Outcome, Script, rank_config, run_group
from tests.helpers.tiny_engine import Setup, tiny_engine, tiny_model
from tests.helpers.tiny_models import TINY_MODELS, write_tiny_model

# The model of each case, and how its head is published.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sglang": ("qwen3_moe", {}),
    "vllm": (
        "glm4_moe",
        {"prefix": "layers.0.", "own": ("head", "ids", "embedding"), "norm_before_residual": True},
    ),
    "shared": ("gpt_oss", {"own": (), "attention_bias": True}),
    "states": ("qwen3_next", {"own": ("head",)}),
    "latents": ("deepseek_v3", {}),
}
Written = dict[str, tuple[Path, str, Eagle3Reference]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Returns of each case the model's directory, the head's, and what it proposes."""
    found: Written = {}
    for case, (name, options) in CASES.items():
        root = tmp_path_factory.mktemp(case)
        tiny = TINY_MODELS[name]
        # One layer more than the head reads: transformers norms what comes out of the last one.
        changes = tiny.changes | {"num_hidden_layers": 4, "layer_types": None}
        model = write_tiny_model(replace(tiny, changes=changes), root / "model", seed=5)
        found[case] = root / "model", str(root / "head"), write_head(model, root / "head", **options)
    return found


def _drafting(script: Script) -> dict[str, list[Outcome]]:
    """Returns answers to prompts in chunks, and the draft tokens that were verified and accepted."""
    names = [script.submit(f"a{i}", p, ignore_eos=True, max_tokens=16) for i, p in enumerate(script.prompts)]
    answers, load = script.outcomes(names), script.built.engine.load
    return {"answers": answers, "drafts": [Outcome([load.draft_tokens, load.accepted_tokens], "", 0)]}


@pytest.mark.covering(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", list(CASES))
def test_drafts_change_no_token_and_are_those_of_the_head(
    case: str, params: dict[str, Any], written: Written
) -> None:
    """Over prompts in chunks and shared ones, and decode steps in which most drafts are rejected."""
    directory, head, reference = written[case]
    plain, _, _ = run(directory, 0, 0, params)
    tokens, (watched,), _ = run(directory, 0, 1, params, draft_model=head)
    assert tokens == plain
    check_drafts(watched.noted, reference.drafts)


def test_a_head_goes_on_with_what_it_made(written: Written) -> None:
    """Further drafts are those of the head's own stream, also beside n-grams, and change no token."""
    directory, head, reference = written["sglang"]
    plain, _, _ = run(directory, 0, 0, GREEDY)
    tokens, (watched,), _ = run(directory, 0, 3, GREEDY, draft_model=head)
    assert tokens == plain
    assert max(len(found) for _, found in watched.noted) == 3
    for known, found in watched.noted:
        assert found == within_page(known, len(found), reference, found), f"after {len(known)} tokens"
    with_text, _, _ = run(directory, 0, 2, GREEDY, draft_model=head, drafter=NGramDrafter(1, 2))
    assert with_text == plain


def test_replayed_steps_leave_what_the_head_reads(written: Written) -> None:
    """Drafts after a graph, which holds what the head made of the layers, are those after an eager step."""
    directory, head, _ = written["sglang"]
    model = tiny_model(directory, HOST, draft_model=head)
    experts = DenseExperts(directory, router_of(model.config).num_experts)
    found = []
    for largest in (0, 8):
        made = list[WatchedDrafter]()

        def make(model: CausalLM, token_pool: TokenPool, made: list[WatchedDrafter] = made) -> WatchedDrafter:
            made.append(WatchedDrafter(model, token_pool))
            return made[-1]

        setup = Setup(largest, budget=16, num_drafts=1, device_drafter=make)
        with tiny_engine(
            model, experts, HostDeviceStream(), make_capturable_attention, setup, RecordedOperations()
        ) as engine:
            found.append((engine.run(requests(SAMPLED)), made[0].noted))
    assert found[0] == found[1]
    assert len(found[0][1]) > 8


def test_drafts_that_are_right_are_accepted_also_after_replayed_steps(tmp_path: Path) -> None:
    """A head that knows what follows gives as many tokens as it proposes, with graphs and without."""
    reference = write_mtp_model("glm4_moe", tmp_path / "model")
    make_foreseen(tmp_path / "model")
    write_foreseeing_head(reference.model, tmp_path / "head")
    model = tiny_model(tmp_path / "model", HOST, draft_model=str(tmp_path / "head"))
    experts = DenseExperts(tmp_path / "model", router_of(model.config).num_experts)
    found = []
    for largest in (0, 8):
        setup = Setup(largest, budget=16, num_drafts=3, device_drafter=MtpDrafter)
        with tiny_engine(
            model, experts, HostDeviceStream(), make_capturable_attention, setup, RecordedOperations()
        ) as engine:
            assert engine.speculation is not None
            tokens = engine.run(requests(GREEDY))
            found.append((tokens, engine.speculation.num_verified, engine.speculation.num_accepted))
    assert found[0] == found[1]
    _, verified, accepted = found[0]
    assert accepted == verified > 5


def test_two_ranks_draft_what_one_does(written: Written) -> None:
    """From settings on; a rank has some of the head's heads, of its MLP, and of its vocabulary."""
    directory, head, _ = written["sglang"]
    drafts = {"num_draft_tokens": 3, "adaptive_drafts": False}
    settings: dict[str, Any] = drafts | {"speculative_method": "eagle3", "speculative_model": head}
    one, two = (run_group(rank_config(directory, ranks, 1, **settings), cases=_drafting) for ranks in (1, 2))
    assert one == two
    (counts,) = one["drafts"]
    assert counts.token_ids[0] > 30
