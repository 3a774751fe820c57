"""A family's tiny model on a device against itself in float32 on the CPU, as the process assembles both.

The device answers prompts greedily; the reference then scores prompt and answer in one piece, so that one
rounded choice does not make all later positions incomparable. Nothing here needs a GPU: with device "cpu"
the same comparisons are dry runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu_service.core.request import Request, SamplingParams, TokenLogprobs
from gpu_service.core.step import StepPlan
from gpu_service.engine.decode_graphs import DecodeGraph, DecodeGraphs
from moebius.config import MoebiusConfig
from tests.helpers.built_engine import running_engine
from tests.tolerances import (
    FAMILY_BFLOAT16_MEAN_RATIO,
    FAMILY_BFLOAT16_MEDIAN_RATIO,
    FAMILY_FLOAT16_MEAN_RATIO,
    FAMILY_FLOAT32_LOGPROBS,
)

# Tokens that no prompt with its answer exceeds.
LONGEST = 96
# Two prompts are longer than this and are computed in chunks, together with decode steps of the others.
TOKEN_BUDGET = 32
LARGEST_GRAPH = 4
IN_PROCESS = {"expert_transport": "local"}


def family_config(
    directory: Path, device: str, dtype: str, experts: dict[str, Any] | None = None, **gpu: Any
) -> MoebiusConfig:
    """Returns a small pool; `experts`: how they are reached, None: all of them are resident on the device."""
    small = {"num_pages": 160, "page_size": 4, "max_num_seqs": 6, "gpu_threads": 1}
    steps = {"max_num_batched_tokens": TOKEN_BUDGET, "cuda_graph_max_batch_size": LARGEST_GRAPH}
    return MoebiusConfig.model_validate(
        {
            # Of families that see, the text model: prompts here are text.
            "model": {"model": str(directory), "dtype": dtype, "language_model_only": True},
            "gpu": {"device": device} | small | steps | gpu,
            "experts": {"expert_dtype": expert_dtype_of(dtype)} | (experts or IN_PROCESS),
            "placement": {"gpu_experts_ratio": 1.0} if experts is None else {},
        }
    )


def expert_dtype_of(dtype: str) -> str:
    """What experts are kept as next to activations of a type: experts in float16 are kept as stored."""
    return "keep" if dtype == "float16" else dtype


def reference_config(directory: Path, dtype: str = "float32", **gpu: Any) -> MoebiusConfig:
    """Returns the CPU path, at parity with transformers, its experts by the reference in process."""
    return family_config(directory, "cpu", dtype, IN_PROCESS, **gpu)


def workload(logprobs: int | None) -> list[Request]:
    """Returns five greedy requests of different lengths; they end one after another, so batches shrink to
    one.
    """
    return [
        Request(
            f"r{i}",
            [3 + (i * 37 + k * k * 5 + k) % 200 for k in range(4 + 11 * i)],
            SamplingParams(temperature=0.0, max_tokens=16 + 4 * i, ignore_eos=True, logprobs=logprobs),
        )
        for i in range(5)
    ]


@dataclass(frozen=True)
class Answers:
    """What an engine made of the workload; filled by `answers`."""

    scored: list[Request]  # with log-probabilities, nothing cached before
    plain: list[list[int]]  # tokens of the same requests without: a graph's own argmax, prefixes cached

    @property
    def tokens(self) -> list[list[int]]:
        """Returns the tokens of the scored requests."""
        return [request.output_token_ids for request in self.scored]

    @property
    def logprobs(self) -> list[list[float]]:
        """Natural log-probability of each token when it was chosen."""
        return [logprobs_of(request.output_logprobs) for request in self.scored]


def answers(config: MoebiusConfig) -> Answers:
    """Returns the workload twice, on one engine."""
    scored = workload(2)
    with running_engine(config) as engine:
        engine.run(scored)
        return Answers(scored, engine.run(workload(None)))


def scores(config: MoebiusConfig, answered: Answers) -> list[list[float]]:
    """Returns the log-probability that the engine gives to each token of each answer, all before it given."""
    with running_engine(config) as engine:
        return scored_by(engine.run, answered.scored)


def scored_by(run: Callable[[list[Request]], object], answered: Sequence[Request]) -> list[list[float]]:
    """Returns the same by an engine that runs: prompt and answer of each request as one prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    known = [[*request.prompt_token_ids, *request.output_token_ids] for request in answered]
    scored = [Request(f"s{i}", tokens, params) for i, tokens in enumerate(known)]
    run(scored)
    return [
        logprobs_of(request.prompt_logprobs[-len(answer.output_token_ids) :])
        for request, answer in zip(scored, answered, strict=True)
    ]


def logprobs_of(records: Sequence[TokenLogprobs]) -> list[float]:
    """Natural log-probabilities of tokens that must have one, as all but a prompt's first do."""
    found = [record.logprob for record in records if record.logprob is not None]
    assert len(found) == len(records)
    return found


@dataclass(frozen=True)
class Errors:
    """Absolute differences of log-probabilities over all positions of all answers; filled by `errors`."""

    mean: float
    median: float
    largest: float
    # The first difference above ten times the median: which request, which of its tokens.
    first: tuple[int, int] | None

    def __str__(self) -> str:
        where = "nowhere" if self.first is None else "request {}, token {}".format(*self.first)
        numbers = f"mean {self.mean:.2e}, median {self.median:.2e}, largest {self.largest:.2e}"
        return f"{numbers}, first above ten medians: {where}"


def errors(found: Sequence[Sequence[float]], exact: Sequence[Sequence[float]]) -> Errors:
    """Returns the errors of one engine's log-probabilities against another's."""
    differences = {
        (request, token): abs(a - b)
        for request, pair in enumerate(zip(found, exact, strict=True))
        for token, (a, b) in enumerate(zip(*pair, strict=True))
    }
    median = statistics.median(differences.values())
    first = next((place for place, value in differences.items() if value > 10 * median), None)
    return Errors(statistics.fmean(differences.values()), median, max(differences.values()), first)


def check_float32(directory: Path, config: MoebiusConfig) -> None:
    """Asserts the reference's tokens, from both ways of choosing them, and its log-probabilities."""
    reference, found = answers(reference_config(directory)), answers(config)
    for kind, tokens in (("scored", found.tokens), ("plain", found.plain)):
        difference = first_difference(reference, tokens)
        assert not difference, f"{kind} requests: {difference}"
    report = errors(found.logprobs, reference.logprobs)
    print(f"{directory.name}: {report}")
    assert report.median <= FAMILY_FLOAT32_LOGPROBS, str(report)


def first_difference(reference: Answers, tokens: list[list[int]]) -> str:
    """Returns where an answer first is not the reference's, and by how much it liked its own best; empty:
    nowhere.
    """
    for request, (expected, found) in enumerate(zip(reference.scored, tokens, strict=True)):
        for place, record in enumerate(expected.output_logprobs):
            if found[place] == record.token_id:
                continue
            margin = record.top_logprobs[0] - record.top_logprobs[1]
            before = f"request {request} ({expected.prompt_len} tokens), token {place}"
            return (
                f"{before}: {found[place]}, not {record.token_id}, which the reference prefers by "
                f"{margin:.5f}"
            )
    return ""


def check_half(directory: Path, config: MoebiusConfig) -> None:
    """Asserts that the reference's log-probabilities are missed by no more than the CPU's own path does.

    That path scores the same tokens, with the same kind of KV cache.
    """
    found = answers(config)
    exact = scores(reference_config(directory), found)
    kv_cache_dtype = config.gpu.kv_cache_dtype
    half = scores(reference_config(directory, config.model.dtype, kv_cache_dtype=kv_cache_dtype), found)
    ours, theirs = errors(found.logprobs, exact), errors(half, exact)
    print(f"{directory.name}, {config.gpu.device}:")
    is_float16 = config.model.dtype == "float16"
    assert_as_close(ours, theirs, FAMILY_FLOAT16_MEAN_RATIO if is_float16 else FAMILY_BFLOAT16_MEAN_RATIO)


def assert_as_close(ours: Errors, theirs: Errors, mean_ratio: float = FAMILY_BFLOAT16_MEAN_RATIO) -> None:
    """16 bits on a device against the same on the CPU, both against float32; prints both."""
    report = f"{ours}; the CPU's own path: {theirs}"
    print(report)
    assert ours.median <= FAMILY_BFLOAT16_MEDIAN_RATIO * theirs.median, report
    assert ours.mean <= mean_ratio * theirs.mean, report


@contextmanager
def watched_replays() -> Iterator[set[tuple[int, int]]]:
    """Rows of each step that a decode graph replays, and the graph's size."""
    replayed: set[tuple[int, int]] = set()
    original = DecodeGraphs.replay

    def replay(graphs: DecodeGraphs, graph: DecodeGraph, plan: StepPlan) -> Any:
        replayed.add((plan.num_requests, graph.size))
        return original(graphs, graph, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeGraphs, "replay", replay)
        yield replayed
