"""Invariant: on every family's tiny random checkpoint our float32 model is transformers' model.

Prefill logits agree within the tolerance, greedy tokens are identical, and the way a sequence is cut
into steps (chunks, batches, a reused prefix) changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.experts.local_client import LocalExpertClient
from moebius.models.read import read_geometry
from tests.helpers.paged_runner import Decoding, PagedRunner, load_runner
from tests.helpers.tiny_models import TINY_MODELS, cached_tiny_models, greedy_answer
from tests.parity.test_tiny_models_engine import cached
from tests.tolerances import LOGITS_FLOAT32_SELF, LOGITS_FLOAT32_VS_TRANSFORMERS

PROMPTS = [
    [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77, 31, 9, 180, 12, 13, 14, 15],
    [10, 210, 4],
    [101, 55, 55, 55, 7, 90, 33, 160, 20],
]


# Tokens that are compared with transformers', and tokens that are decoded alone and in a batch: of `make
# test-all`, and otherwise. The fewer ones fill several pages, too, and leave every window of the models.
GREEDY, DECODED = (64, 12), (24, 3)


def family(name: str) -> str:
    """Returns the family of a tiny model: what its variants have in common."""
    return TINY_MODELS[name].model_type


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    return cached_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str, tiny: Callable[[str], tuple[Path, Any]]) -> PagedRunner:
    """Weights are loaded once; no test computes with this runner."""
    return load_runner(tiny(name)[0])


@pytest.fixture
def runner(loaded: PagedRunner) -> PagedRunner:
    """A runner with pages and states of its own."""
    return PagedRunner(loaded.model, loaded.experts)


@torch.inference_mode()
def _reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def test_prefill_logits_match_transformers(
    name: str, runner: PagedRunner, tiny: Callable[[str], tuple[Path, Any]]
) -> None:
    for prompt in PROMPTS:
        expected = _reference_logits(tiny(name)[1], prompt)
        _, logits = runner.prefill(prompt)
        assert expected.std() > 0.5, "flat logits would hide errors"
        torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


@pytest.mark.covering(1, name=family)
def test_greedy_decoding_matches_transformers(
    name: str, runner: PagedRunner, tiny: Callable[[str], tuple[Path, Any]], pytestconfig: pytest.Config
) -> None:
    prompt, count = PROMPTS[0], GREEDY[not pytestconfig.getoption("--full")]
    sequence, logits = runner.prefill(prompt)
    tokens, reference = runner.greedy([sequence], logits[-1:], count)[0], tiny(name)[1]
    assert tokens == greedy_answer(reference, prompt, count, tokens)
    if len(set(tokens)) <= 3:
        # Such an answer alone would prove little, so that all logits of steps of one token are compared, too.
        _, logits = runner.prefill([*prompt, *tokens], chunk=1)
        expected = _reference_logits(reference, [*prompt, *tokens])
        torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


@pytest.mark.covering(1, name=family)
def test_the_in_process_expert_client_completes_the_same_model(
    name: str, tiny: Callable[[str], tuple[Path, Any]]
) -> None:
    directory, reference = tiny(name)
    geometry = read_geometry(directory)
    runner = load_runner(directory, experts=LocalExpertClient(str(directory), geometry, torch.float32))
    _, logits = runner.prefill(PROMPTS[0])
    expected = _reference_logits(reference, PROMPTS[0])
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


@pytest.mark.covering(1, name=cached)
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_chunked_prefill_is_unchunked_prefill(runner: PagedRunner, chunk: int) -> None:
    _, whole = runner.prefill(PROMPTS[0])
    _, chunked = runner.prefill(PROMPTS[0], chunk=chunk)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=LOGITS_FLOAT32_SELF)


@pytest.mark.covering(1, name=cached)
def test_a_reused_prefix_gives_the_logits_of_a_fresh_one(runner: PagedRunner) -> None:
    donor, _ = runner.prefill(PROMPTS[0], chunk=8)
    tokens = [*PROMPTS[0][:8], 77, 5, 6]
    _, fresh = runner.prefill(tokens)
    # Two full pages of the donor are shared; the rest is computed into pages of its own.
    sharer = donor.shared(tokens, 8, page_size=4)
    reused = runner.step([(sharer, 3)])
    torch.testing.assert_close(reused, fresh[8:], rtol=0, atol=LOGITS_FLOAT32_SELF)


@pytest.mark.covering(1, name=cached)
def test_decoding_alone_equals_decoding_in_a_batch(runner: PagedRunner, pytestconfig: pytest.Config) -> None:
    count = DECODED[not pytestconfig.getoption("--full")]
    alone, sequences, last = [], [], []
    for prompt in PROMPTS:
        sequence, logits = runner.prefill(prompt)
        alone += runner.greedy([sequence], logits[-1:], count)
        sequence, logits = runner.prefill(prompt)
        sequences.append(sequence)
        last.append(logits[-1])
    assert runner.greedy(sequences, torch.stack(last), count) == alone


@pytest.mark.covering(1, name=cached)
def test_a_mixed_step_equals_separate_steps(runner: PagedRunner) -> None:
    """One step with a decode, a first chunk, a later chunk and another decode."""
    wanted = [runner.prefill(prompt)[1] for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0])]
    decode_long, chunk_first = Decoding(PROMPTS[0]), Decoding(PROMPTS[1])
    chunk_later, decode_short = Decoding(PROMPTS[2]), Decoding(PROMPTS[0][:6])
    runner.step([(decode_long, 20), (chunk_later, 5), (decode_short, 5)])
    mixed = runner.step([(decode_long, 1), (chunk_first, 3), (chunk_later, 4), (decode_short, 1)])
    expected = torch.cat([wanted[0][20:21], wanted[1], wanted[2][5:9], wanted[3][5:6]])
    torch.testing.assert_close(mixed, expected, rtol=0, atol=LOGITS_FLOAT32_SELF)
