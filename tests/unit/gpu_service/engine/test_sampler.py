"""Guards the sampler against plain numpy: which tokens may be drawn, how often, and by which number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gpu_service.core.request import Request, SamplingParams, SchedulerLimits, mark_finish
from gpu_service.engine.input_builder import SampledRows
from gpu_service.engine.sampler import Sampler, StepOutputs, _to_records, token_logprobs
from gpu_service.ops.sampling import derive_seed, mix64, uniform, uniforms

VOCAB = 40
LIMITS = SchedulerLimits(8, 64, 128, 0, frozenset({7}))
LOGITS = torch.from_numpy(np.random.default_rng(3).normal(0, 2, VOCAB).astype(np.float32))


def request_with(slot: int = 0, **params: Any) -> Request:
    """Returns a request that only has parameters and a slot."""
    return Request("r", [1, 2, 2], SamplingParams(**params), slot=slot)  # type: ignore[arg-type]


def draw(requests: list[Request], positions: list[int], logits: torch.Tensor | None = None) -> StepOutputs:
    """Samples one row per request from LOGITS."""
    rows = (LOGITS.expand(len(requests), -1) if logits is None else logits).clone()
    plan = SampledRows(requests).plan(positions, LIMITS)
    return Sampler(VOCAB, torch.device("cpu")).sample(rows, plan, pool_of(requests))


def pool_of(requests: list[Request]) -> torch.Tensor:
    """Returns the token pool that holds what is known of the requests, 0 elsewhere."""
    pool = torch.zeros((1 + max(request.slot for request in requests), 64), dtype=torch.int32)
    for request in requests:
        pool[request.slot, : request.total_len] = torch.tensor(request.known_tokens(0, request.total_len))
    return pool


def reference(params: SamplingParams) -> np.ndarray:
    """Returns the distribution, in float64: temperature, min_p, top_k, top_p, each renormalised."""
    scaled = LOGITS.double().numpy() / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    if params.top_p < 1:
        p[order[(before >= params.top_p) & (np.arange(VOCAB) > 0)]] = 0
    return np.asarray(p / p.sum())


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.7, "min_p": 0.05},
    {"top_k": 1000, "top_p": 0.999},
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_distribution_is_the_reference(params: dict[str, float]) -> None:
    """4000 draws: none outside the support, and chi-square within six standard deviations."""
    count = 4000
    requests = [request_with(seed=seed, **params) for seed in range(count)]
    tokens = draw(requests, [0] * count).token_ids.numpy()
    expected = reference(requests[0].params) * count
    observed = np.bincount(tokens, minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    support = expected > 0
    chi_square = ((observed - expected)[support] ** 2 / expected[support]).sum()
    freedom = max(1, support.sum() - 1)
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom) + 10


def test_a_row_does_not_depend_on_its_batch() -> None:
    """The same request draws the same token alone and among every other kind of row."""
    requests = [request_with(seed=11, **case) for case in CASES]
    requests += [request_with(temperature=0.0), request_with(top_k=1, temperature=2.0)]
    together = draw(requests, [4] * len(requests)).token_ids.tolist()
    alone = [draw([request], [4]).token_ids.item() for request in requests]
    assert together == alone
    assert together[-1] == together[-2] == int(LOGITS.argmax())


def test_uniform_numbers_are_even_and_repeat() -> None:
    """Mean, variance and lag correlation of the counter-based numbers, and their dependence on both keys."""
    numbers = np.array([uniform(5, position) for position in range(20000)])
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(numbers.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert uniform(5, 7) == numbers[7]
    assert uniform(6, 7) != numbers[7]
    assert derive_seed(1, "ab", "c") != derive_seed(1, "a", "bc")


def test_penalties_follow_their_formulas() -> None:
    """Greedy over penalised logits equals numpy, also after tokens were added and a slot was reused."""
    sampler = Sampler(VOCAB, torch.device("cpu"))
    params = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "temperature": 0.0,
    }
    request = request_with(slot=3, **params)
    output = [9, 9, 4]
    sampler.penalties.assign(3, torch.tensor([9, 9, 9]), 1)
    sampler.penalties.assign(3, torch.tensor(request.prompt_token_ids + output), 3)
    plan = SampledRows([request]).plan([3], LIMITS)
    for _ in range(30):
        logits = LOGITS.double().numpy().copy()
        counts = np.bincount(output, minlength=VOCAB)
        seen = counts > 0
        seen[request.prompt_token_ids] = True
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
        logits -= 0.3 * counts + 0.4 * (counts > 0)
        token = sampler.sample(LOGITS.unsqueeze(0).clone(), plan).token_ids.item()
        assert logits[int(token)] == pytest.approx(logits.max(), abs=1e-5), (token, logits.argmax(), output)
        output.append(int(token))
    assert len(set(output)) > 3, "the penalties must have changed the choice"


def test_bias_and_min_tokens() -> None:
    """A bias moves one logit; stop and end-of-sequence ids are impossible before min_tokens, even biased."""
    wanted = request_with(temperature=0.0, logit_bias=((7, 100.0), (9, 90.0)))
    assert draw([wanted], [0]).token_ids.item() == 7
    held = request_with(temperature=0.0, logit_bias=((7, 100.0), (9, 90.0)), min_tokens=2)
    assert [draw([held], [position]).token_ids.item() for position in (0, 1, 2)] == [9, 9, 7]
    stopped = request_with(
        temperature=0.0, logit_bias=((9, 90.0),), min_tokens=2, stop_token_ids=frozenset({9}), ignore_eos=True
    )
    assert draw([stopped], [1]).token_ids.item() not in (9,)


def test_only_allowed_ids_are_drawn() -> None:
    """Each row draws from its own ids, whatever bias and temperature say; the other rows do not change."""
    one = request_with(temperature=0.0, allowed_token_ids=(30,))
    plain = request_with(temperature=0.0)
    drawn = set()
    for seed in range(40):
        few = request_with(temperature=5.0, allowed_token_ids=(3, 11), logit_bias=((9, 100.0),), seed=seed)
        tokens = draw([few, plain, one], [0, 0, 0]).token_ids.tolist()
        drawn.add(tokens[0])
        assert tokens[1:] == [int(LOGITS.argmax()), 30]
    assert drawn == {3, 11}


def test_bad_words_are_not_completed() -> None:
    """The last id of a sequence is impossible exactly where the output ends with the others.

    A prompt that ends with them does not count, as in vLLM; several sequences may end with one id.
    """
    best, second, third = LOGITS.argsort(descending=True)[:3].tolist()
    words = ((5, best), (6, 5, best), (4, 4, 4, 4, best), (1, 2, 2, best))
    cases: list[tuple[list[int], tuple[tuple[int, ...], ...], int]] = [
        ([], ((best,),), second),
        ([], words, best),
        ([5], words, second),
        ([6, 5], words, second),
        ([9, 5], words, second),
        ([5, 9], words, best),
        ([4, 4, 4], words, best),
        ([4, 4, 4, 4], words, second),
        ([], (*words, (best,), (second,)), third),
    ]
    requests, positions = [], []
    for slot, (output, banned, _) in enumerate(cases):
        request = request_with(slot, temperature=0.0, bad_words=banned)
        request.output_token_ids = output
        requests.append(request)
        positions.append(len(output))
    expected = [token for *_, token in cases]
    assert draw(requests, positions).token_ids.tolist() == expected
    assert [draw([r], [p]).token_ids.item() for r, p in zip(requests, positions, strict=True)] == expected, (
        "a row must not depend on its batch"
    )


def test_a_request_that_leaves_no_token_fails_alone() -> None:
    """Nothing that was forbidden is drawn; the row is marked as one without a token."""
    impossible = request_with(temperature=0.0, allowed_token_ids=(3,), bad_words=((3,),))
    sampled = draw([request_with(), impossible, request_with(temperature=0.0)], [0, 0, 0])
    assert sampled.finite.tolist() == [True, False, True]


def test_named_ids_are_scored() -> None:
    """Named ids come after the best ones of the row, in the order in which they were named; rows have their
    own.
    """
    first = request_with(temperature=0.0, logprobs=2, logprob_token_ids=(8, 1, 8))
    second = request_with(temperature=0.0, logprobs=0, logprob_token_ids=(4,))
    sampled = draw([request_with(), first, second], [0, 0, 0])
    assert sampled.logprobs is not None
    _, ids, values = sampled.logprobs
    best = LOGITS.argsort(descending=True)[:2].tolist()
    assert ids.tolist() == [[*best, 8, 1, 8], [*best, 4, 0, 0]]
    raw = LOGITS.double().log_softmax(0)
    assert values[0].tolist() == pytest.approx(raw[ids[0]].tolist(), abs=1e-5)
    records = _to_records([1, 2], sampled.logprobs, [2, 0], [3, 1])
    assert [record.top_ids for record in records] == [(*best, 8, 1, 8), (4,)]


class CountedTuple(tuple[tuple[int, float], ...]):
    """Counts how often somebody goes through it."""

    readings = 0

    def __iter__(self) -> Iterator[tuple[int, float]]:
        type(self).readings += 1
        return super().__iter__()


class CountedSet(frozenset[int]):
    """Counts how often somebody goes through it or makes another set of it."""

    readings = 0

    def __iter__(self) -> Iterator[int]:
        type(self).readings += 1
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        type(self).readings += 1
        return super().__or__(other)


def test_long_parameters_are_read_once_not_in_every_step() -> None:
    """Thousands of biases and stop tokens would hold up everybody else's steps, too."""
    bias = CountedTuple((token, -1.0) for token in range(VOCAB))
    stops = CountedSet(range(1, VOCAB))
    request = request_with(
        temperature=0.0, logit_bias=bias, stop_token_ids=stops, min_tokens=50, max_tokens=99
    )
    request.bound(LIMITS)
    draw([request], [0])
    before = CountedTuple.readings, CountedSet.readings
    for position in range(1, 40):
        assert draw([request], [position]).token_ids.item() == 0
        request.output_token_ids.append(0)
        mark_finish(request, 0)
        assert not request.finished
    assert (CountedTuple.readings, CountedSet.readings) == before


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Neither temperature nor penalties nor bias show in log-probabilities."""
    request = request_with(temperature=3.0, logit_bias=((9, 50.0),), logprobs=4)
    sampled = draw([request_with(), request], [0, 0])
    assert sampled.logprobs is not None
    chosen, ids, values = sampled.logprobs
    raw = LOGITS.double().log_softmax(0)
    assert sampled.token_ids[1].item() == 9
    assert chosen.item() == pytest.approx(raw[9].item(), abs=1e-5)
    assert ids[0].tolist() == raw.argsort(descending=True)[:4].tolist()
    assert values[0].tolist() == pytest.approx(raw.sort(descending=True).values[:4].tolist(), abs=1e-5)
    assert token_logprobs(LOGITS.unsqueeze(0), torch.tensor([2]), 0)[1].shape == (1, 0)


def test_non_finite_rows_are_reported_and_harm_no_other_row() -> None:
    """NaN and Inf are flagged row by row; the other rows draw what they would have drawn."""
    logits = LOGITS.repeat(3, 1)
    logits[0, 3] = float("nan")
    logits[2] = float("inf")
    requests = [request_with(seed=4, top_p=0.9) for _ in range(3)]
    sampled = draw(requests, [0, 0, 0], logits)
    assert sampled.finite.tolist() == [False, True, False]
    assert sampled.token_ids[1].item() == draw(requests[:1], [0]).token_ids.item()
    assert all(0 <= token < VOCAB for token in sampled.token_ids.tolist())


def test_logits_may_be_a_part_of_wider_rows() -> None:
    """Ranks gather logits with padding at the end of each row: tokens are those of rows without, whatever
    changes the logits, and the padding stays as it was."""
    requests = [
        request_with(bad_words=((2, 5), (5,)), logit_bias=((9, 3.0),), seed=1),
        request_with(slot=1, allowed_token_ids=(3, 11), logprobs=2, seed=2),
        request_with(slot=2, temperature=0.0, bad_words=((int(LOGITS.argmax()),),), min_tokens=4),
    ]
    wide = torch.full((3, VOCAB + 8), 7.0)
    wide[:, :VOCAB] = LOGITS
    got, wanted = draw_in_place(wide[:, :VOCAB], requests), draw(requests, [0, 0, 0])
    assert got.token_ids.tolist() == wanted.token_ids.tolist()
    assert got.finite.tolist() == wanted.finite.tolist() == [True] * 3
    assert wide[:, VOCAB:].eq(7.0).all()


def draw_in_place(logits: torch.Tensor, requests: list[Request]) -> StepOutputs:
    """Samples the first output token of each request from just these logits, which are used up."""
    plan = SampledRows(requests).plan([0] * len(requests), LIMITS)
    return Sampler(VOCAB, torch.device("cpu")).sample(logits, plan, pool_of(requests))


def test_arrays_of_uniform_numbers_are_those_of_the_definition() -> None:
    """A row's number is `uniform` of its seed and position alone, with any others in the batch."""
    seeds = [0, 1, 5, 2**62 + 3, 2**63 - 1] * 40
    positions = [int(position) for position in np.random.default_rng(3).integers(0, 2**20, len(seeds))]
    mixed = np.asarray([mix64(seed) for seed in seeds], dtype=np.uint64)
    drawn = uniforms(mixed, np.asarray(positions)).tolist()
    assert drawn == [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
