"""The engine's greedy answers to five prompts are those of transformers, token for token in fp32.

The real path from scheduler to sampler on real weights: KV pages, prefix reuse, chunked prefill, mixed
batches, the overlap loop, penalties kept on the device, and experts divided among engines. The prompts were
picked so that no choice of token or expert lies within rounding; a mismatch is a bug.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.helpers.demo import REPETITION_PENALTIES, GoldenAnswer, golden_answers
from tests.helpers.demo_experts import kernel_experts
from tests.helpers.demo_serving import Serving, demo_engine, greedy_request

pytestmark = pytest.mark.demo

EOS = 2
ANSWERS: list[GoldenAnswer] = [
    answer for penalty in REPETITION_PENALTIES for answer in golden_answers(penalty)
]


@dataclass(frozen=True)
class Outcome:
    """Tokens of all answers without the end token, and how often a request was preempted."""

    tokens: list[list[int]]
    num_preemptions: int


def ask(answers: list[GoldenAnswer], serving: Serving, shares: tuple[int, ...], at_once: int) -> Outcome:
    """Ask the answers' prompts, `at_once` of them together."""
    requests = [greedy_request(str(number), answer) for number, answer in enumerate(answers)]
    found: list[list[int]] = []
    with demo_engine(kernel_experts("tensor", shares, "float32"), serving) as (engine, collector):
        for begin in range(0, len(requests), at_once):
            group = requests[begin : begin + at_once]
            engine.submit(group)
            found += collector.wait(group)
    tokens = [[token for token in tokens if token != EOS] for tokens in found]
    return Outcome(tokens, engine.load.num_preemptions)


def expected(answers: list[GoldenAnswer]) -> list[list[int]]:
    """Returns what transformers generated, without the end token."""
    return [[token for token in answer.output_ids if token != EOS] for answer in answers]


@pytest.mark.full
def test_one_by_one_synchronous() -> None:
    """Batch 1, whole prompts, no overlap, undivided experts: the plainest order of steps."""
    answers = golden_answers(1.1)
    assert ask(answers, Serving(overlap=False), (1,), at_once=1).tokens == expected(answers)


def test_all_together_overlapped() -> None:
    """Ten requests in one batch with overlap, experts in three unequal shares."""
    assert ask(ANSWERS, Serving(), (1, 2, 4), at_once=10).tokens == expected(ANSWERS)


@pytest.mark.full
def test_chunked_and_preempted() -> None:
    """A budget of 24 tokens cuts every prompt, and 20 pages are too few for ten requests at once. Tiny models
    of all families have the same in tests/parity/test_tiny_models_engine.py.
    """
    outcome = ask(ANSWERS, Serving(budget=24, num_pages=21), (1, 1), at_once=10)
    assert outcome.tokens == expected(ANSWERS)
    assert outcome.num_preemptions > 0
