"""Guards that outputs with draft tokens have the distribution that their parameters and constraints define.

Every output has three of three letters: all 27 are counted, and compared with their probabilities as the
formulas give them, by Pearson's chi-square.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_service.core.request import Request, SamplingParams
from protos.engine_pb2 import Constraint
from tests.helpers.constraints import compiler, ids_of
from tests.helpers.drafters import FixedDrafter
from tests.helpers.engine_harness import prompt_of, running_engine
from tests.helpers.fake_model import FakeModel, fake_hidden_states

LETTERS, LENGTH = ids_of("abc"), 3
PROMPT = prompt_of(1, 9)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": 1.3}, ""),
    "truncated": ({"temperature": 2.0, "top_p": 0.9, "logit_bias": ((LETTERS[0], 1.0),)}, ""),
    "penalised": (
        {
            "temperature": 1.5,
            "repetition_penalty": 1.4,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.8,
        },
        "",
    ),
    "constrained": ({"temperature": 1.5}, "a[bc]b|b[ab]c|cca|[bc]cb"),
    "constrained-penalised": ({"temperature": 1.5, "frequency_penalty": 1.0}, "a[bc][abc]|bb[bc]|c[abc]{2}"),
}


def words_of(pattern: str) -> list[tuple[int, ...]]:
    """All outputs that a regular expression allows."""
    spelled = {"".join(letters): letters for letters in itertools.product("abc", repeat=LENGTH)}
    return [tuple(ids_of(text)) for text in spelled if re.fullmatch(pattern or "[abc]{3}", text)]


def next_probabilities(
    tokens: tuple[int, ...], allowed: set[int], params: SamplingParams
) -> dict[int, float]:
    """Returns the probability of each letter after some output tokens, by the formulas of
    `protos/engine.proto`.
    """
    hidden_states = fake_hidden_states([*PROMPT, *tokens])
    logits = FakeModel().compute_logits(hidden_states[-1:])[0].double()
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    for token_id in {*PROMPT, *tokens}:
        penalty = params.repetition_penalty
        logits[token_id] *= 1 / penalty if logits[token_id] > 0 else penalty
    for token_id, count in Counter(tokens).items():
        logits[token_id] -= params.frequency_penalty * count + params.presence_penalty
    weights = {token: math.exp(float(logits[token]) / params.temperature) for token in allowed}
    kept, total, mass = dict[int, float](), sum(weights.values()), 0.0
    for token, weight in sorted(weights.items(), key=lambda item: -item[1]):
        if mass < params.top_p * total:
            kept[token] = weight
        mass += weight
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


def expected(params: SamplingParams, pattern: str) -> dict[tuple[int, ...], float]:
    """The probability of each output."""
    words = words_of(pattern)
    found = {}
    for word in words:
        probability = 1.0
        for length in range(LENGTH):
            allowed = {other[length] for other in words if other[:length] == word[:length]}
            probability *= next_probabilities(word[:length], allowed, params).get(word[length], 0.0)
        if probability > 0:
            found[word] = probability
    assert abs(sum(found.values()) - 1) < 1e-9
    return found


def requests_of(name: str, count: int) -> Iterator[Request]:
    """Four outputs each, with seeds of their own."""
    params, pattern = CASES[name]
    constraint = Constraint(regex=pattern)
    for number in range(count):
        own = SamplingParams(
            **params,
            max_tokens=LENGTH,
            seed=number,
            ignore_eos=True,
            allowed_token_ids=() if pattern else tuple(LETTERS),
            logprobs=1 if number % 16 == 0 else None,
        )
        request = Request(f"r{number // 4}", PROMPT, own, index=number % 4)
        if pattern:
            (request.constraint,) = compiler().make(constraint)
        yield request


@pytest.mark.parametrize("count", [1500, pytest.param(100_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", list(CASES))
def test_outputs_have_their_distribution(name: str, count: int) -> None:
    """Draft tokens that are right at times, and wrong at times, favour no output."""
    params, pattern = CASES[name]
    counts: Counter[tuple[int, ...]] = Counter()
    # The two letters that come most often after the prompt: both accepted and rejected many times.
    wanted = expected(SamplingParams(**params), pattern)
    likeliest = max(wanted, key=lambda word: wanted[word])
    drafter = FixedDrafter(*likeliest[1:])
    with running_engine(max_num_seqs=64, budget=640, num_pages=600, drafter=drafter, num_drafts=2) as harness:
        everyone = requests_of(name, count)
        while batch := list(itertools.islice(everyone, 960)):
            for token_ids in harness.run(batch, together=True):
                counts[tuple(token_ids)] += 1
        speculation = harness.engine.scheduler.speculation
        assert speculation is not None
        assert 0.02 < speculation.num_accepted / speculation.num_verified < 0.98
    assert sum(counts.values()) == count
    assert counts.keys() <= wanted.keys()
    statistic = sum((counts[word] - count * p) ** 2 / (count * p) for word, p in wanted.items())
    freedom = len(wanted) - 1
    # Five standard deviations: seeds are fixed, so the test always sees the same outputs.
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), dict(counts)
