"""Invariant: drafts of a smaller model change no token, and are that model's own greedy continuation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.assembly.draft_model import load_draft_model
from gpu_service.assembly.forecast import Forecast
from gpu_service.assembly.kv_memory import cache_shape
from gpu_service.memory.plan import DRAFTING, ExpertMemory, parameter_bytes
from gpu_service.speculation.draft_model import ModelDrafter
from moebius.config import MoebiusConfig
from tests.helpers.draft_models import (
    DENSE_MODELS,
    DraftReference,
    write_draft_gguf,
    write_draft_model,
)
from tests.helpers.rank_group import Outcome, Script, rank_config, run_group
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import byte_level_tokenizer

MAX_TOKENS = 18
# Of which the others show a part.
OTHERS = ("llama", "llama3", "qwen3")
Noted = list[tuple[list[int], list[int]]]  # Known tokens, and the draft tokens after them.


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of the model that is served."""
    directory = tmp_path_factory.mktemp("target")
    make_tiny_model("qwen3_moe", directory)
    return directory


def drafting(target: Path, small: Path, tp: int = 1, **gpu: Any) -> MoebiusConfig:
    """Returns settings with a draft model, whose drafts are all verified."""
    chosen = {"speculative_method": "draft_model", "num_draft_tokens": 3, "adaptive_drafts": False} | gpu
    return rank_config(target, tp, 1, speculative_model=str(small), **chosen)


@contextmanager
def script(config: MoebiusConfig) -> Iterator[Script]:
    """A running engine of these settings, whose books are checked at the end."""
    running = Script(config)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Returns all that is drafted from now on."""
    found: Noted = []
    propose = ModelDrafter.propose

    def watched(drafter: ModelDrafter, *arguments: Any) -> torch.Tensor | None:
        drafts = propose(drafter, *arguments)
        _, plan, _, _, last_rows = arguments[:5]
        for row, tokens in zip(last_rows.tolist(), [] if drafts is None else drafts.tolist(), strict=False):
            known = drafter._pool.tokens[plan.token_slots[row], : plan.positions[row] + 2]
            found.append((known.tolist(), tokens))
        return drafts

    monkeypatch.setattr(ModelDrafter, "propose", watched)
    return found


def answers(running: Script, **params: Any) -> list[Outcome]:
    """Returns answers to prompts in chunks, and to longer ones that share their beginnings."""
    chosen = {"ignore_eos": True, "max_tokens": MAX_TOKENS} | params
    first = [running.submit(f"a{i}", p, seed=i, **chosen) for i, p in enumerate(running.prompts)]
    found = running.outcomes(first)
    more = [running.submit(f"b{i}", [*p, 5, 6], seed=i, **chosen) for i, p in enumerate(running.prompts)]
    return found + running.outcomes(more)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[Outcome]:
    """Returns the greedy answers without drafts."""
    with script(rank_config(target, 1, 1)) as running:
        return answers(running)


def check(noted: Noted, prompts: list[list[int]], reference: DraftReference) -> None:
    """Every draft token is the small model's, but for those after the end of an output."""
    ends = {tuple(prompt[:3]): len(prompt) + MAX_TOKENS for prompt in prompts}
    noted = [(known, tokens) for known, tokens in noted if tuple(known[:3]) in ends]
    assert len(noted) > 20
    assert max(len(tokens) for _, tokens in noted) == 3
    for known, tokens in noted:
        count = max(0, min(len(tokens), ends[tuple(known[:3])] - len(known)))
        assert tokens[:count] == reference.drafts(known, count), f"after {len(known)} tokens"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in OTHERS else ()) for name in DENSE_MODELS]
)
def test_drafts_change_no_token_and_are_those_of_the_small_model(
    name: str, target: Path, plain: list[Outcome], tmp_path: Path, noted: Noted
) -> None:
    """Over prompts in chunks and cached ones, ends of pages, and drafts of which most are rejected."""
    reference = write_draft_model(name, tmp_path / "small")
    with script(drafting(target, tmp_path / "small")) as running:
        assert answers(running) == plain
        assert running.built.engine.load.draft_tokens > 100
        check(noted, running.prompts, reference)


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2", pytest.param("qwen3", marks=pytest.mark.full)])
def test_a_gguf_file_drafts_too(
    name: str, target: Path, plain: list[Outcome], tmp_path: Path, noted: Noted
) -> None:
    """Drafts are those of the weights that the file says, in the rotation that it says."""
    served, small = tmp_path / "served", tmp_path / "small.gguf"
    served.mkdir()
    for file in target.iterdir():
        (served / file.name).symlink_to(file)
    for directory in (served, tmp_path):
        byte_level_tokenizer(300).save(str(directory / "tokenizer.json"))
    reference = write_draft_gguf(name, small)
    with script(drafting(served, small)) as running:
        assert answers(running) == plain
        assert running.built.engine.load.draft_tokens > 100
        check(noted, running.prompts, reference)


def test_a_small_model_that_is_right_is_accepted(target: Path, plain: list[Outcome]) -> None:
    """The model drafts for itself: every draft token is accepted."""
    with script(drafting(target, target)) as running:
        assert answers(running) == plain
        load = running.built.engine.load
        assert load.accepted_tokens == load.draft_tokens > 80


def test_text_and_a_small_model_draft_together(target: Path, plain: list[Outcome]) -> None:
    """Also where requests give up their pages for one another, and some have none for a draft's entries."""
    settings = drafting(target, target, speculative_method="ngram+draft_model", num_pages=20, max_num_seqs=3)
    with script(settings) as running:
        assert [found.token_ids for found in answers(running)] == [one.token_ids for one in plain]
        load = running.built.engine.load
        assert load.accepted_tokens > 50
        assert load.num_preemptions > 0


def test_its_memory_is_planned(target: Path, tmp_path: Path) -> None:
    """Weights, experts and keys and values, on a CPU and in the ledger of a GPU."""
    write_draft_model("moe", tmp_path / "small")
    config = drafting(target, tmp_path / "small")
    forecast, device = Forecast(config, on_gpu=False), torch.device("cpu")
    model, small = forecast.model_config, load_draft_model(config, forecast.model_config, device)
    assert small is not None
    assert small.resident is not None
    taken = parameter_bytes(small.model) + small.resident.nbytes
    assert forecast.ranks[0].drafting_bytes == taken
    shape = cache_shape(config.gpu, model, model.layers, device)
    cache = shape.make(4)
    assert cache.beside is not None
    assert cache.nbytes == 4 * shape.page_bytes > cache.beside.nbytes > 0
    everything = [ExpertMemory(is_everything=True)]
    (ledger,) = Forecast(config, on_gpu=True).device_plans(config, [2**35], everything)
    assert ledger.of(DRAFTING) == taken


# States divided over ranks are in test_parallel_ranks.py, states with drafts in test_speculation_states.py.
@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("qwen3_next", marks=pytest.mark.full)])
def test_ranks_draft_whole_models_beside_latents_and_states(name: str, tmp_path: Path) -> None:
    """Two ranks with a draft model each give what one gives without: over shared prefixes, an abort, seeds,
    penalties, biases and log-probabilities.
    """
    make_tiny_model(name, tmp_path / "model")
    write_draft_model("qwen2", tmp_path / "small")
    one = run_group(rank_config(tmp_path / "model", 1, 1))
    two = run_group(drafting(tmp_path / "model", tmp_path / "small", tp=2))
    for case in ("chunked", "prefix", "flushed", "aborted"):
        assert two[case] == one[case], case
    for case in ("sampled", "scored"):
        assert [outcome.token_ids for outcome in two[case]] == [outcome.token_ids for outcome in one[case]]
