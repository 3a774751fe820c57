"""Groups of real rank processes on the CPU, and the script that rank 0 of each runs."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from gpu_service.assembly.build import Built, WarmUpGate, build_engine
from gpu_service.core.images import VisionPrompt
from gpu_service.core.request import Pooling, Request, SamplingParams
from gpu_service.experts.recorder import START, STOP
from gpu_service.main import run_follower
from gpu_service.telemetry.metrics import EngineMetrics, EngineTelemetry
from moebius.config import (
    ExpertConfig,
    GpuConfig,
    ModelConfigSection,
    MoebiusConfig,
    ParallelConfig,
    PlacementConfig,
)
from moebius.network.tls import configure_tls
from moebius.process.operations import ProcessState
from protos.engine_pb2 import Constraint
from tests.helpers.engine_outputs import WAIT_S, EngineOutputs
from tests.helpers.ports import free_port

# Forked from a process that has imported torch, and what files of tests import, whose functions ranks call: a
# fresh interpreter would take seconds per rank.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "tests.helpers.tiny_models", "tests.helpers.rank_group"])
LENGTHS = (5, 33, 18, 12)


@dataclass
class Outcome:
    """What one request gave."""

    token_ids: list[int]
    finish_reason: str
    cached_len: int
    logprobs: list[float | None] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    pooled_states: list[float] = field(default_factory=list)


def rank_config(
    directory: Path,
    tp: int,
    pp: int,
    gpu_experts_ratio: float | None = None,
    gpu_expert_split: Any = "tensor",
    pipeline_layers: tuple[int, ...] = (),
    **gpu: Any,
) -> MoebiusConfig:
    """Returns a small pool, chunked prompts, experts in process; ranks meet at a free port."""
    defaults: dict[str, Any] = {
        "num_pages": 64,
        "page_size": 4,
        "gpu_threads": 1,
        "max_num_batched_tokens": 16,
        "device": "cpu",
    }
    sees = (directory / "preprocessor_config.json").exists()
    return MoebiusConfig(
        model=ModelConfigSection(model=str(directory), dtype="float32", language_model_only=not sees),
        gpu=GpuConfig(**(defaults | gpu)),
        experts=ExpertConfig(expert_transport="local"),
        parallel=ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            pipeline_layers=pipeline_layers,
            rank_address=f"127.0.0.1:{free_port()}",
            rank_timeout_s=60,
            gpu_expert_split=gpu_expert_split,
        ),
        placement=PlacementConfig(gpu_experts_ratio=gpu_experts_ratio),
    )


def with_rank(config: MoebiusConfig, rank: int) -> MoebiusConfig:
    """Returns the same settings for one rank."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"rank": rank})})


class Script(EngineOutputs):
    """A running engine of rank 0, and requests through it."""

    def __init__(self, config: MoebiusConfig) -> None:
        gate = WarmUpGate()
        telemetry = EngineTelemetry(EngineMetrics("ranks", CollectorRegistry()))
        super().__init__()
        self.built: Built = build_engine(config, telemetry, gate.on_output)
        self.vocab_size = self.built.model_config.vocab_size
        self.engine = self.built.engine
        self.engine.start()
        gate.run(self.engine, self.vocab_size, WAIT_S)
        self.built.group.serving()
        self.engine.on_output = self.on_output

    def submit(self, name: str, prompt: list[int], *chosen: Any, **params: Any) -> Request:
        """Starts a request, see `make`."""
        request = self.make(name, prompt, *chosen, **params)
        self.built.engine.submit([request])
        return request

    def make(
        self,
        name: str,
        prompt: list[int],
        vision: VisionPrompt | None = None,
        constraint: Constraint | None = None,
        **params: Any,
    ) -> Request:
        """Returns a request."""
        chosen = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | params))
        request = Request(name, prompt, chosen, vision=vision)
        if constraint is not None:
            assert self.built.compiler is not None, "the checkpoint has no tokenizer"
            (request.constraint,) = self.built.compiler.make(constraint)
        return request

    def outcomes(self, requests: list[Request]) -> list[Outcome]:
        """Returns what each request gave, once all have ended without an error."""
        self.wait(requests)
        return [_outcome(request) for request in requests]

    @property
    def prompts(self) -> list[list[int]]:
        """Returns the prompts of the lengths `LENGTHS`."""
        return [
            [(i * 37 + k * k * 5 + k) % (self.vocab_size - 3) + 3 for k in range(n)]
            for i, n in enumerate(LENGTHS)
        ]

    def run_constrained(self) -> list[Outcome]:
        """Returns outputs with grammars, one of them after a thought, and one without."""
        pattern, after = Constraint(regex="[a-f]{2,4}-[0-9]{3}"), {"after_token_ids": [70]}
        thought = Constraint(regex="(ab|cd){3}", max_reasoning_tokens=4, **after)
        grammars = [pattern, None, thought, pattern]
        return self.outcomes(
            [
                self.submit(f"f{i}", p, constraint=grammar, seed=i, temperature=0.9, max_tokens=16)
                for i, (p, grammar) in enumerate(zip(self.prompts, grammars, strict=True))
            ]
        )

    def run_cases(self) -> dict[str, list[Outcome]]:
        """Mixed chunked batches, prefix hits, seeds and penalties, scores, an abort, a flush, a recording."""
        prompts = self.prompts
        cases = {"chunked": self.outcomes([self.submit(f"a{i}", p) for i, p in enumerate(prompts)])}
        cases["prefix"] = self.outcomes([self.submit(f"b{i}", [*p, 5, 6]) for i, p in enumerate(prompts)])
        sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.3}
        sampled |= {"frequency_penalty": 0.3, "logit_bias": ((9, 2.0),), "min_tokens": 3}  # type: ignore[dict-item]
        sampled |= {"allowed_token_ids": tuple(range(5, 60)), "bad_words": ((7,), (9, 8), (8, 8, 9))}  # type: ignore[dict-item]
        cases["sampled"] = self.outcomes(
            [self.submit(f"c{i}", p, seed=i + 1, **sampled) for i, p in enumerate(prompts)]
        )
        scored = [
            self.submit(f"d{i}", p, logprobs=2, logprob_token_ids=(4, 9), prompt_logprobs=1)
            for i, p in enumerate(prompts[:2])
        ]
        cases["scored"] = self.outcomes(scored)
        if self.built.compiler is not None:
            cases["constrained"] = self.run_constrained()
        long = self.submit("long", prompts[0], max_tokens=200, ignore_eos=True)
        concurrent = self.submit("concurrent", prompts[3], ignore_eos=True)
        self.wait_tokens([long], 3)
        self.built.engine.abort("long")
        aborted = self.outcomes([long])[0]
        cases["aborted"] = [Outcome([], aborted.finish_reason, 0), *self.outcomes([concurrent])]
        pooled = [Pooling.LAST, Pooling.MEAN]
        cases["pooled"] = self.outcomes(
            [self.submit(f"p{how}", prompts[0], pooling=how, max_tokens=1) for how in pooled]
        )
        assert self.built.engine.flush().result(WAIT_S) > 0
        recorder = self.built.recorder
        if recorder is not None:  # the first stage may have dense layers only
            self.built.engine.call(START, "stat").result(WAIT_S)
        cases["flushed"] = self.outcomes([self.submit(f"e{i}", p) for i, p in enumerate(prompts)])
        if recorder is not None:
            self.built.engine.call(STOP).result(WAIT_S)
            # How many depends on overlapping: a request that has ended may be computed once more.
            cases["recorded"] = [Outcome([int(recorder.dump().tokens > 0)], "", 0)]
        return cases

    def close(self) -> None:
        """Ends the group in order."""
        self.built.close()
        self.built.engine.scheduler.check_integrity()


Cases = Callable[[Script], dict[str, list[Outcome]]]


def _outcome(request: Request) -> Outcome:
    return Outcome(
        list(request.output_token_ids),
        request.finish_reason.value if request.finish_reason else "",
        request.cached_len,
        [record.logprob for record in request.output_logprobs],
        [record.logprob for record in request.prompt_logprobs],
        [] if request.pooled_states is None else request.pooled_states.tolist(),
    )


def _run_rank(
    config: MoebiusConfig,
    prepare: Callable[[], None],
    results: multiprocessing.connection.Connection,
    cases: Cases,
    is_killed: bool,
) -> None:
    # What was there before the fork stays: collections need not look at all of torch, nor copy its pages.
    gc.freeze()
    prepare()
    configure_tls(config.security)
    if config.parallel.rank:
        sys.exit(run_follower(config, ProcessState()))
    script = Script(config)
    results.send(cases(script))
    if is_killed:
        signal.pause()
    script.close()


def _nothing() -> None:
    """Ranks run as they are."""


def run_group(
    config: MoebiusConfig,
    prepare: Callable[[], None] = _nothing,
    cases: Cases = Script.run_cases,
    is_killed: bool = False,
) -> dict[str, list[Outcome]]:
    """Returns all cases on a group of fresh processes, which call `prepare` first; every rank must end in
    order, unless all of them are killed (SIGKILL) after the cases.
    """
    size = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    receiving, sending = CONTEXT.Pipe(duplex=False)
    ranks = [
        CONTEXT.Process(target=_run_rank, args=(with_rank(config, rank), prepare, sending, cases, is_killed))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    sending.close()
    try:
        cases: dict[str, list[Outcome]] = receiving.recv()  # type: ignore[no-redef]
    finally:
        for rank in ranks:
            if not is_killed:
                rank.join(WAIT_S)
            rank.kill()
            rank.join()
    if not is_killed:
        assert [rank.exitcode for rank in ranks] == [0] * size
    return cases  # type: ignore[return-value]
