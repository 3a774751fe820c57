"""Guards that dividing a model over ranks never shows: TP 2, TP 4, PP 2 and TP 2 × PP 2 equal one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from gpu_service.assembly import speculation
from gpu_service.core.constraint import OutputConstraint, Words
from gpu_service.core.request import Request
from gpu_service.engine import token_masks
from protos.engine_pb2 import Constraint
from tests.helpers.drafters import AnswerDrafter, Answers
from tests.helpers.engine_outputs import WAIT_S
from tests.helpers.rank_graphs import use_recordings
from tests.helpers.rank_group import Outcome, Script, rank_config, run_group
from tests.helpers.rank_models import MODELS
from tests.helpers.tiny_models import write_tiny_model
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer
from tests.tolerances import LOGITS_FLOAT32_RANKS

# Half of the experts are resident, each of them on one rank of a stage.
WHOLE = {"gpu_experts_ratio": 0.5, "gpu_expert_split": "expert"}

Truth = Callable[[str], tuple[Path, dict[str, list[Outcome]]]]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """Returns a model's directory, and what one rank says."""

    @cache
    def make(name: str) -> tuple[Path, dict[str, list[Outcome]]]:
        directory = tmp_path_factory.mktemp(name)
        write_tiny_model(MODELS[name], directory, seed=11)
        write_tokenizer(directory, byte_level_tokenizer(300))
        return directory, run_group(rank_config(directory, 1, 1))

    return make


@pytest.mark.parametrize(
    ("name", "tp", "pp", "changes"),
    [
        # Those for `make test-all` divide what others here divide in more ways.
        pytest.param("qwen3_bias_tied", 2, 1, {}, marks=pytest.mark.full),
        pytest.param("qwen3_bias_tied", 4, 1, {"gpu_experts_ratio": 0.5}, marks=pytest.mark.full),
        pytest.param("qwen3_bias_tied", 4, 1, WHOLE, marks=pytest.mark.full),
        pytest.param("qwen3_bias_tied", 1, 2, {}, marks=pytest.mark.full),
        # Stages of one layer and of three, as unequal GPUs have.
        ("qwen3_bias_tied", 2, 2, {"overlap_scheduling": False, "pipeline_layers": (1, 3)}),
        pytest.param("qwen3_bias_tied", 1, 2, {"pipeline_layers": (3, 1)}, marks=pytest.mark.full),
        pytest.param("glm4_shared", 2, 2, {"gpu_experts_ratio": 0.5}, marks=pytest.mark.full),
        pytest.param("gpt_oss", 2, 2, {}, marks=pytest.mark.full),
        pytest.param("step_differing_heads", 2, 2, {}, marks=pytest.mark.full),
        pytest.param("linear_mixed_projections", 2, 1, {}, marks=pytest.mark.full),
        pytest.param("linear_apart", 2, 2, {}, marks=pytest.mark.full),
        pytest.param("latent", 2, 1, {}, marks=pytest.mark.full),
        ("latent_and_linear", 2, 2, {}),
        pytest.param("latent_with_sinks", 2, 2, {}, marks=pytest.mark.full),
        pytest.param("latents_shared", 2, 2, {}, marks=pytest.mark.full),
        pytest.param("entries_shared", 2, 2, {}, marks=pytest.mark.full),
        ("latent_choosing", 2, 2, WHOLE),
        pytest.param("shortcut", 2, 2, {"gpu_experts_ratio": 0.5}, marks=pytest.mark.full),
        pytest.param("minimax", 2, 1, {}, marks=pytest.mark.full),
        pytest.param("minimax_blocks", 2, 2, {}, marks=pytest.mark.full),
        pytest.param("ngrams_and_streams", 2, 2, {}, marks=pytest.mark.full),
        pytest.param("short_convolutions", 2, 2, {}, marks=pytest.mark.full),
        pytest.param("lightning", 2, 2, {}, marks=pytest.mark.full),
        pytest.param("head_bias", 2, 1, {}, marks=pytest.mark.full),
        pytest.param("parallel_halves", 2, 2, {"gpu_experts_ratio": 0.5}, marks=pytest.mark.full),
        pytest.param("gpt_oss", 2, 1, WHOLE, marks=pytest.mark.full),
        pytest.param("qwen2_shared_gate", 2, 1, {}, marks=pytest.mark.full),
    ],
    ids=lambda value: str(value),
)
def test_ranks_do_not_show(truth: Truth, name: str, tp: int, pp: int, changes: dict[str, Any]) -> None:
    """Chunked batches, prefix hits, penalties, constraints, scores, aborts and flushes: as on one rank.

    Also where stages have unequal numbers of layers, and where half of the experts are on the ranks' devices,
    channels of each or whole ones.
    """
    directory, expected = truth(name)
    assert_same(run_group(rank_config(directory, tp, pp, **changes)), expected)


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [("dense", 2, 1), pytest.param("dense", 1, 2, marks=pytest.mark.full), ("glm_sparse_dense", 1, 2)],
)
def test_replayed_decode_steps_do_not_show(truth: Truth, name: str, tp: int, pp: int) -> None:
    """Decode steps recorded with their collectives, as a GPU replays them, of padded batches and stages.

    Also of latent attention, of stages that choose tokens for themselves in their first layers.
    """
    directory, expected = truth(name)
    # Recordings are of torch's operations, and hold no other kernel's.
    assert_same(
        run_group(rank_config(directory, tp, pp, attention_backend="torch"), use_recordings), expected
    )


# In rank 0's process: whose tokens a mask that takes long waits for, and how many came meanwhile.
_others: list[Request] = []
_meanwhile: list[int] = []


def make_masks_slow() -> None:
    """Called in each rank's process: every mask takes long, where it is computed and on the other ranks."""
    computed = token_masks._mask_of

    def late(constraint: OutputConstraint) -> Words:
        time.sleep(0.002)
        end = time.monotonic() + WAIT_S / 2
        for other in _others:
            before = len(other.output_token_ids)
            while len(other.output_token_ids) < before + 3 and not other.finished and time.monotonic() < end:
                time.sleep(0.001)
            _meanwhile.append(len(other.output_token_ids) - before)
        return computed(constraint)

    token_masks._SLOW_S = -1.0
    token_masks._mask_of = late


def outputs_that_skip_steps(script: Script) -> dict[str, list[Outcome]]:
    """Returns the constrained outputs of all cases, then one with a grammar next to one without."""
    found = {"constrained": script.run_constrained()}
    prompts = script.prompts
    slow = script.make("slow", prompts[0], constraint=Constraint(regex="[ab]{6}"))
    _others.append(script.make("other", prompts[1], max_tokens=90, ignore_eos=True))
    script.built.engine.submit([slow, *_others])
    found["slow"] = script.outcomes([slow, *_others])
    found["meanwhile"] = [Outcome(list(_meanwhile), "", 0)]
    return found


@pytest.mark.parametrize(
    ("tp", "pp", "overlap"), [(2, 1, True), pytest.param(1, 2, False, marks=pytest.mark.full)]
)
def test_ranks_let_the_same_outputs_skip_steps(truth: Truth, tp: int, pp: int, overlap: bool) -> None:
    """An output whose mask takes long is left out of the steps of all ranks until rank 0 has the mask: others
    go on meanwhile, and it becomes what it becomes on one rank whose steps wait for it."""
    directory, expected = truth("qwen3_bias_tied")
    config = rank_config(directory, tp, pp, overlap_scheduling=overlap)
    found = run_group(config, make_masks_slow, outputs_that_skip_steps)
    tokens = [outcome.token_ids for outcome in expected["constrained"]]
    assert [outcome.token_ids for outcome in found["constrained"]] == tokens
    assert [outcome.finish_reason for outcome in found["slow"]] == ["stop", "length"]
    assert max(found["meanwhile"][0].token_ids) >= 3


# The requests of each of the script's cases are named by a letter and their place.
_LETTERS = {"chunked": "a", "prefix": "b", "scored": "d", "flushed": "e"}


def draft_answers(answers: Answers) -> None:
    """Called in each rank's process: its drafter proposes these, every fourth token changed."""
    speculation.NGramDrafter = lambda *sizes: AnswerDrafter(answers, 200, 4)  # type: ignore[assignment, attr-defined, misc]


def cases_and_drafts(script: Script) -> dict[str, list[Outcome]]:
    """Returns all cases, and how many drafts were verified and accepted meanwhile."""
    found = script.run_cases()
    load = script.built.engine.load
    return found | {"drafts": [Outcome([load.draft_tokens, load.accepted_tokens], "", 0)]}


@pytest.mark.parametrize(
    ("tp", "pp", "adaptive", "changes"),
    [
        (2, 1, False, WHOLE),
        pytest.param(2, 2, True, {}, marks=pytest.mark.full),
        pytest.param(4, 1, False, WHOLE, marks=pytest.mark.full),
        pytest.param(2, 2, False, WHOLE, marks=pytest.mark.full),
    ],
)
def test_ranks_verify_the_same_drafts(
    truth: Truth, tp: int, pp: int, adaptive: bool, changes: dict[str, Any]
) -> None:
    """Every rank drafts for itself, follows what rank 0 measured, and generates what one rank does."""
    directory, expected = truth("qwen3_bias_tied")
    answers = {
        f"{letter}{index}": outcome.token_ids
        for case, letter in _LETTERS.items()
        for index, outcome in enumerate(expected[case])
    }
    drafts = {"speculative_method": "ngram", "num_draft_tokens": 3, "adaptive_drafts": adaptive}
    config = rank_config(directory, tp, pp, **drafts | changes)
    found = run_group(config, partial(draft_answers, answers), cases_and_drafts)
    verified, accepted = found.pop("drafts")[0].token_ids
    assert_same(found, expected)
    assert adaptive or 20 < accepted < verified


def assert_same(found: dict[str, list[Outcome]], expected: dict[str, list[Outcome]]) -> None:
    """Tokens, ends and cached prefixes are equal, scores nearly so."""
    assert [case for case in expected if case not in found] in ([], ["recorded"])
    for case, outcomes in ((case, expected[case]) for case in found):
        for index, (ours, theirs) in enumerate(zip(found[case], outcomes, strict=True)):
            where = f"{case}[{index}]"
            assert ours.token_ids == theirs.token_ids, where
            assert (ours.finish_reason, ours.cached_len) == (theirs.finish_reason, theirs.cached_len), where
            for kind in ("logprobs", "prompt_logprobs", "pooled_states"):
                expected_scores = pytest.approx(getattr(theirs, kind), abs=LOGITS_FLOAT32_RANKS)
                assert getattr(ours, kind) == expected_scores, f"{where}.{kind}"
    assert any(outcome.cached_len for outcome in expected["prefix"])
    assert all(outcome.pooled_states for outcome in expected["pooled"])
    assert expected["aborted"][0].finish_reason == "abort"
    assert [outcome.finish_reason for outcome in expected["constrained"]] == [
        "stop",
        "length",
        "stop",
        "stop",
    ]
