"""One step on the device: upload, gather, forward (replayed if an expert server is lost), sample.

Everything here runs inside a stream launch and sees a `StepPlan` only, never a request.
"""

from __future__ import annotations

import time
from typing import Protocol

import structlog
import torch
from opentelemetry import context as otel_context

from gpu_service.attention.base import AttentionBackend
from gpu_service.batch import ForwardInputs
from gpu_service.cache.kv_cache import KVCache
from gpu_service.context import ForwardContext
from gpu_service.engine.input_builder import StepPlan
from gpu_service.engine.logprobs import to_records, token_logprobs
from gpu_service.engine.sampler import Sampled, Sampler
from gpu_service.engine.step_runner import StepResult
from gpu_service.engine.token_pool import TokenPool
from gpu_service.experts.client import ExpertClient, ExpertUnavailable
from gpu_service.request import TokenLogprobs

_log = structlog.get_logger(__name__)
# Rows of prompt logits alive at once: 64 rows of a 150 k vocabulary are 38 MB.
_PROMPT_ROWS = 64


class Model(Protocol):
    """What the engine needs of a model; `models.common.CausalLM` is the real one."""

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Hidden states `[T, H]`; writes the new tokens' KV. Idempotent: may be run again unchanged."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[L, H]` to float32 `[L, V]`."""


class ModelRunner:
    """Owns everything on the device. Not thread-safe: all calls come from the stream."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        attention: AttentionBackend,
        experts: ExpertClient | None,
        token_pool: TokenPool,
        sampler: Sampler,
        recovery_timeout_s: float = 300.0,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.attention = attention
        self.experts = experts
        self.token_pool = token_pool
        self.sampler = sampler
        self.recovery_timeout_s = recovery_timeout_s

    def run(self, plan: StepPlan) -> StepResult:
        """Runs the step. Raises ExpertUnavailable when a lost server did not return in time."""
        started = time.monotonic()
        token = otel_context.attach(plan.trace_context) if plan.trace_context is not None else None
        try:
            with torch.inference_mode():
                result = self._run(plan)
        finally:
            if token is not None:
                otel_context.detach(token)
        result.seconds = time.monotonic() - started
        return result

    def zero_pages(self, pages: list[int]) -> None:
        """Clears the KV of a request that failed with NaN before anyone else gets its pages."""
        with torch.inference_mode():
            self.kv_cache.zero_pages(pages)

    def _run(self, plan: StepPlan) -> StepResult:
        for upload in plan.uploads:
            self.token_pool.upload(upload.slot, upload.token_ids)
            if upload.has_penalties:
                self.sampler.penalties.assign(upload.slot, upload.token_ids, upload.prompt_len)
        result = StepResult()
        hidden_states = self._forward(self._inputs(plan), result)
        self._score_prompts(plan, hidden_states, result)
        if plan.sampling is not None:
            logits = self.model.compute_logits(hidden_states[plan.logits_indices])
            sampled = self.sampler.sample(logits, plan.sampling)
            self.token_pool.scatter(plan.sample_slots, plan.sample_positions, sampled.token_ids)
            self._to_host(plan, sampled, result)
        return result

    def _inputs(self, plan: StepPlan) -> ForwardInputs:
        return ForwardInputs(
            input_ids=self.token_pool.gather(plan.token_slots, plan.positions),
            positions=plan.positions,
            slot_mapping=plan.slot_mapping,
            block_table=plan.block_table,
            query_start_loc=plan.query_start_loc,
            seq_lens=plan.seq_lens,
            logits_indices=plan.logits_indices,
            query_start_loc_tensor=torch.tensor(plan.query_start_loc, dtype=torch.int32),
            seq_lens_tensor=torch.tensor(plan.seq_lens, dtype=torch.int32),
            trace_sampled=plan.trace_context is not None,
        )

    def _forward(self, inputs: ForwardInputs, result: StepResult) -> torch.Tensor:
        """The forward pass; run again, to the same KV slots, after a lost expert server came back."""
        deadline = time.monotonic() + self.recovery_timeout_s
        while True:
            try:
                self.attention.plan(inputs)
                context = ForwardContext(inputs, self.kv_cache, self.attention, self.experts)
                return self.model.forward(context)
            except ExpertUnavailable as error:
                remaining = deadline - time.monotonic()
                if self.experts is None or remaining <= 0:
                    raise
                _log.warning("expert server lost, waiting for it to return", error=str(error))
                self.experts.recover(remaining)
                result.num_replays += 1
                _log.info("expert servers are back, the step is replayed")

    def _score_prompts(self, plan: StepPlan, hidden_states: torch.Tensor, result: StepResult) -> None:
        for wanted in plan.prompt_logprobs:
            records: list[TokenLogprobs] = []
            for begin in range(0, len(wanted.rows), _PROMPT_ROWS):
                rows = wanted.rows[begin : begin + _PROMPT_ROWS]
                targets = wanted.target_ids[begin : begin + _PROMPT_ROWS]
                logits = self.model.compute_logits(hidden_states[rows])
                scored = token_logprobs(logits, targets, wanted.num_top)
                records += to_records(targets.tolist(), scored, [wanted.num_top] * len(rows))
            result.prompt_logprobs[wanted.batch_index] = (wanted.start, records)

    def _to_host(self, plan: StepPlan, sampled: Sampled, result: StepResult) -> None:
        result.token_ids = sampled.token_ids.tolist()
        result.finite = sampled.finite.tolist()
        if plan.sampling is not None and sampled.logprobs is not None:
            rows = plan.sampling.logprob_rows
            token_ids = [result.token_ids[row] for row in rows]
            records = to_records(token_ids, sampled.logprobs, plan.num_top_logprobs)
            result.logprobs = dict(zip(rows, records, strict=True))
