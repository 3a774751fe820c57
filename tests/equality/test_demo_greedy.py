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


def ask(serving: Serving, shares: tuple[int, ...], together: bool) -> Outcome:
    """Ask all prompts, one after another or all at once."""
    requests = [greedy_request(str(number), answer) for number, answer in enumerate(ANSWERS)]
    found: list[list[int]] = []
    with demo_engine(kernel_experts("tensor", shares, "float32"), serving) as (engine, collector):
        for group in [requests] if together else [[request] for request in requests]:
            engine.submit(group)
            found += collector.wait(group)
    tokens = [[token for token in tokens if token != EOS] for tokens in found]
    return Outcome(tokens, engine.load.num_preemptions)


def expected() -> list[list[int]]:
    """What transformers generated, without the end token."""
    return [[token for token in answer.output_ids if token != EOS] for answer in ANSWERS]


def test_one_by_one_synchronous() -> None:
    """Batch 1, whole prompts, no overlap, undivided experts: the plainest order of steps."""
    assert ask(Serving(overlap=False), (1,), together=False).tokens == expected()


def test_all_together_overlapped() -> None:
    """Ten requests in one batch with overlap, experts in three unequal shares."""
    assert ask(Serving(), (1, 2, 4), together=True).tokens == expected()


def test_chunked_and_preempted() -> None:
    """A budget of 24 tokens cuts every prompt, and 20 pages are too few for ten requests at once."""
    outcome = ask(Serving(budget=24, num_pages=21), (1, 1), together=True)
    assert outcome.tokens == expected()
    assert outcome.num_preemptions > 0
