"""Guards that multi-token prediction drafts alike on all ranks, from settings on, and changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_service.assembly.speculation import check_speculation
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from tests.helpers.mtp_models import make_foreseen, write_mtp_model
from tests.helpers.rank_group import Outcome, Script, rank_config, run_group
from tests.helpers.rank_models import MODELS

DRAFTS: dict[str, Any] = {"num_draft_tokens": 3, "adaptive_drafts": False, "speculative_method": "mtp"}


@pytest.fixture(scope="module")
def foreseen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model whose head knows what follows."""
    directory = tmp_path_factory.mktemp("foreseen")
    write_mtp_model(MODELS["glm4_shared"], directory)
    make_foreseen(directory)
    return directory


def some_cases(script: Script) -> dict[str, list[Outcome]]:
    """Returns chunked prompts in one batch, greedy and drawn; drafts that were verified, and that
    were right.
    """
    greedy = [script.submit(f"a{i}", p, ignore_eos=True, max_tokens=16) for i, p in enumerate(script.prompts)]
    found = {"greedy": script.outcomes(greedy)}
    drawn = [
        script.submit(f"b{i}", p, ignore_eos=True, max_tokens=16, temperature=0.8, seed=i)
        for i, p in enumerate(script.prompts)
    ]
    found["drawn"] = script.outcomes(drawn)
    load = script.built.engine.load
    return found | {"drafts": [Outcome([load.draft_tokens, load.accepted_tokens], "", 0)]}


def _tokens(found: dict[str, list[Outcome]]) -> dict[str, list[list[int]]]:
    return {case: [outcome.token_ids for outcome in outcomes] for case, outcomes in found.items()}


def test_two_ranks_draft_what_one_does(foreseen: Path) -> None:
    plain = _tokens(run_group(rank_config(foreseen, 1, 1), cases=some_cases))
    one = _tokens(run_group(rank_config(foreseen, 1, 1, **DRAFTS), cases=some_cases))
    two = _tokens(run_group(rank_config(foreseen, 2, 1, **DRAFTS), cases=some_cases))
    assert plain.pop("drafts") == [[0, 0]]
    ((verified, accepted),) = one.pop("drafts")
    assert two.pop("drafts") == [[verified, accepted]]
    assert one == two == plain
    assert 30 < accepted <= verified


def test_pipeline_stages_are_refused() -> None:
    """Before anything is loaded, naming the setting and what is allowed."""
    config = MoebiusConfig.model_validate({"gpu": DRAFTS, "parallel": {"pipeline_parallel_size": 2}})
    with pytest.raises(UserError, match=r"not supported with pipeline_parallel_size 2.*allowed: "):
        check_speculation(config.gpu, config.parallel)
