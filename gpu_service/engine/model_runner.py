"""The device's work of one step: upload, gather, forward, sample.

Runs in stream order, reads a `StepPlan` only, never a request, and waits for nothing: what the host wants to
know is read from the returned tensors once the step has ended (`results.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

import structlog
import torch
from opentelemetry import context as otel_context

from gpu_service.attention.registry import Attention
from gpu_service.cache.kv_cache import PagedCache
from gpu_service.cache.state_cache import StateSlots
from gpu_service.core.step import Feature, ForwardInputs, PooledRows, PromptLogprobRows, StepPlan, TokenPool
from gpu_service.engine.sampler import Logprobs, Sampler, StepOutputs, token_logprobs
from gpu_service.engine.step_runner import StepRunner
from gpu_service.experts.adaptive.placement import AdaptivePlacement
from gpu_service.experts.choice_samples import ChoiceSamples
from gpu_service.experts.client import ExpertClient, ExpertUnavailable
from gpu_service.experts.fetching.fetcher import MOST_ROWS, ExpertFetcher
from gpu_service.experts.fetching.step import FetchedStep
from gpu_service.experts.recorder import ExpertRecorder
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.resident.watch import ResidentWatch
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.experts.streaming.streamer import ExpertStreamer
from gpu_service.layers.context import ForwardContext
from gpu_service.ops.overflow import NO_OVERFLOW
from gpu_service.speculation.drafter import DeviceDrafter
from gpu_service.speculation.rows import last_rows
from gpu_service.vision.features import ImageEncoder

_log = structlog.get_logger(__name__)
# Rows of prompt logits alive at once: 64 rows of a 150 k vocabulary are 38 MB.
_PROMPT_ROWS = 64


class Model(Protocol):
    """What the engine needs of a model; `models.common.CausalLM` is the real one."""

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Returns hidden states `[T, H]` and writes the new tokens' KV. Idempotent: may be run again."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps `[L, H]` to float32 `[L, V]`."""


class Forwarded(NamedTuple):
    """What a step's rows have become; filled by `ModelRunner`, or by a graph whose memory it is."""

    hidden_states: torch.Tensor  # [T, H]
    # As `StepOutputs` says.
    first_overflow: torch.Tensor | None
    # What the drafter reads, `[T, H]`; None: there is no drafter.
    drafter_inputs: torch.Tensor | None
    streamed: StreamedExperts | None = None


class ModelRunner:
    """Owns everything on the device. Not thread-safe: all calls come in stream order.

    A plan's tensors are on the device already. Idempotent but for the penalties' counts.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: PagedCache,
        attention: Attention,
        experts: ExpertClient | None,
        token_pool: TokenPool,
        sampler: Sampler,
        *,
        resident: ResidentExperts | None = None,
        streamer: ExpertStreamer | None = None,
        recorder: ExpertRecorder | None = None,
        encoder: ImageEncoder | None = None,
        has_mrope: bool = False,
        states: StateSlots | None = None,
        watch: ResidentWatch | None = None,
        is_float16: bool = False,
        drafter: DeviceDrafter | None = None,
        placement: AdaptivePlacement | None = None,
        fetcher: ExpertFetcher | None = None,
    ) -> None:
        """`encoder`: of a model with vision; `has_mrope`: its plans bring positions by axis.

        `watch`: over `resident`. `is_float16`: rows that leave the numbers that activations can be end their
        requests.
        """
        self.model = model
        self.kv_cache = kv_cache
        self.attention = attention
        self.experts = experts
        self.token_pool = token_pool
        self.sampler = sampler
        self.resident = resident
        # None: nothing is resident.
        self.watch = watch
        # None: no step streams experts.
        self.streamer = streamer
        self.recorder = recorder
        self.encoder = encoder
        self.has_mrope = has_mrope
        # None: the model has no linear attention.
        self.states = states
        self.is_float16 = is_float16
        self.drafter = drafter
        # None: experts on the device stay, or another runner of the same ones moves them.
        self.placement = placement
        # None: decode steps copy no experts.
        self.fetcher = fetcher
        # None: no policy asks what rows choose; set before any step.
        self.samples: ChoiceSamples | None = None
        # As `ForwardContext` says; set by who launches the steps.
        self.between_layers: Callable[[], None] | None = None

    @property
    def features(self) -> frozenset[Feature]:
        """Which tensors only some models read are in its steps."""
        present = {Feature.MROPE: self.has_mrope, Feature.LINEAR_ATTENTION: self.states is not None}
        return frozenset(feature for feature, is_present in present.items() if is_present)

    @property
    def notes_overflow(self) -> bool:
        """Returns whether steps say after which layer rows first were not finite."""
        return self.is_float16 or self.watch is not None

    @property
    def damages(self) -> int:
        """Experts found damaged so far, by servers and on this device."""
        servers = 0 if self.experts is None else self.experts.damages()
        return servers + (0 if self.watch is None else self.watch.damages)

    def suspect(self, layers: Collection[int]) -> None:
        """Experts on the device are compared with their checksums: `layers` are where values that are not
        finite were noted, as `notes_overflow` says.
        """
        if self.watch is not None:
            self.watch.suspect(layers, self.is_float16)
        if self.fetcher is not None:
            self.fetcher.distrust()

    def interrupt(self) -> None:
        """Ends waits for experts, the one under way and later ones. Any thread."""
        if self.experts is not None:
            self.experts.interrupt()
        if self.watch is not None:
            self.watch.interrupt()

    def run(self, plan: StepPlan, resolve: Callable[[StepPlan], StepPlan] = lambda plan: plan) -> StepOutputs:
        """Runs the step. Raises what the expert client raises.

        `resolve` gives the masks to a plan that awaits them, once there are logits.
        """
        outputs = self.compute(plan)
        return self.draw(resolve(plan), outputs)

    def compute(self, plan: StepPlan, replay: Callable[[], Forwarded] | None = None) -> StepOutputs:
        """Returns the step as far as its logits. `replay`: what computes the layers instead of `forward`."""
        self.begin_step()
        self.upload(plan)
        found = self._forwarded(plan) if replay is None else replay()
        hidden_states = found.hidden_states
        prompt_logprobs = [self._score_prompt(wanted, hidden_states) for wanted in plan.prompt_logprobs]
        pooled = [self._pool(wanted, hidden_states) for wanted in plan.pooled]
        logits = None
        if plan.sampling is not None:
            logits = self.model.compute_logits(hidden_states[plan.logits_indices])
        return StepOutputs(
            logits,
            found.drafter_inputs,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            streamed=found.streamed,
            first_overflow=found.first_overflow,
        )

    def _forwarded(self, plan: StepPlan) -> Forwarded:
        context = self.context(self._on_device(plan), self._stream(plan))
        return self.forwarded(self.forward(context), context)

    def forwarded(self, hidden_states: torch.Tensor, context: ForwardContext) -> Forwarded:
        """Returns all that is read of a step whose layers have been launched."""
        return Forwarded(
            hidden_states,
            self.first_overflow(context),
            None if self.drafter is None else self.drafter.inputs(hidden_states, context),
            context.streamed,
        )

    def draw(self, plan: StepPlan, outputs: StepOutputs) -> StepOutputs:
        """The rest of it: tokens, unless a graph has drawn them already, and drafts of those after them."""
        if outputs.token_ids is None and outputs.logits is not None:
            sampled = self.sample(plan, outputs.logits)
            outputs.token_ids, outputs.finite = sampled.token_ids, sampled.finite
            outputs.logprobs = sampled.logprobs
        # Before the drafter's own rows.
        outputs.choices = None if self.samples is None else self.samples.take(plan)
        if self.drafter is not None and plan.runs_drafter:
            outputs.drafts = self._draft(self.drafter, plan, outputs, outputs.token_ids)
        outputs.logits = outputs.hidden_states = outputs.replay_first_pass = None
        outputs.is_float16 = self.is_float16
        outputs.has_copies = False if self.placement is None else self.placement.has_copies
        return outputs

    def begin_step(self) -> None:
        """Moves experts between device and expert servers before every step, replayed or not.

        Raises ResidentDamaged.
        """
        if self.watch is not None:
            self.watch.begin_step()
        if self.placement is not None:
            self.placement.begin_step()

    def upload(self, plan: StepPlan) -> None:
        """Known tokens of requests that were given a slot, and drafts that the step verifies."""
        for upload in plan.uploads:
            self.token_pool.upload(upload.slot, upload.token_ids)
            if upload.has_penalties:
                self.sampler.penalties.assign(upload.slot, upload.token_ids, upload.prompt_len)
        if plan.drafts is not None:
            self.token_pool.scatter(plan.drafts.slots, plan.drafts.positions, plan.drafts.token_ids)

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Returns hidden states `[T, H]` of all rows."""
        self.attention.plan(context.inputs)
        hidden_states = self.model.forward(context)
        if context.streamed is not None:
            # Before anything is sampled, which could not be run again just so.
            context.streamed.launched()
        return hidden_states

    def first_overflow(self, context: ForwardContext) -> torch.Tensor | None:
        """Once the model has run: what `StepOutputs` says, the same on all ranks."""
        return context.first_overflow

    def _stream(self, plan: StepPlan) -> StreamedExperts | None:
        """Copies of the step's first layers begin here, of one that is planned."""
        rows, is_decode = plan.query_start_loc[-1], plan.is_uniform_decode
        planned = None if self.streamer is None else self.streamer.begin(rows, is_decode)
        return self.fetch(rows) if planned is None and is_decode else planned

    def fetch(self, rows: int) -> FetchedStep | None:
        """Returns the copies of a step of `rows` decoding rows before its launch; None: it copies nothing."""
        return self.fetcher.begin() if self.fetcher is not None and rows <= MOST_ROWS else None

    def context(self, inputs: ForwardInputs, streamed: StreamedExperts | None = None) -> ForwardContext:
        """What the model's layers may touch in this step; a captured one streams nothing that is planned."""
        recorder = self.recorder
        return ForwardContext(
            inputs,
            self.kv_cache,
            self.attention,
            self.experts,
            resident=self.resident,
            streamed=streamed,
            recorder=None if recorder is None or recorder.mode is None else recorder,
            samples=self.samples,
            states=self.states,
            first_overflow=self._no_overflow(inputs) if self.notes_overflow else None,
            between_layers=self.between_layers,
        )

    def _no_overflow(self, inputs: ForwardInputs) -> torch.Tensor:
        rows = inputs.positions.shape[0]
        return torch.full((rows,), NO_OVERFLOW, dtype=torch.int32, device=self.token_pool.tokens.device)

    def sample(self, plan: StepPlan, logits: torch.Tensor) -> StepOutputs:
        """Draws from float32 `[S, V]` logits, and puts the tokens where the next step reads them."""
        assert plan.sampling is not None
        sampled = self.sampler.sample(logits, plan.sampling, self.token_pool.tokens)
        assert sampled.token_ids is not None
        self.token_pool.scatter(plan.sample_slots, plan.sample_positions, sampled.token_ids)
        return sampled

    def _draft(
        self, drafter: DeviceDrafter, plan: StepPlan, outputs: StepOutputs, token_ids: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns what `DeviceDrafter.propose` says, of a step whose tokens are in the token pool."""
        assert outputs.hidden_states is not None
        pool = self.token_pool
        staged = replace(plan, input_ids=pool.gather(plan.token_slots, plan.positions))
        context = self.context(staged, outputs.streamed)
        first = None if outputs.replay_first_pass is None else outputs.replay_first_pass()
        if first is None:
            self.attention.plan(staged)
        next_ids = pool.gather(plan.token_slots, plan.positions + 1)
        rows = plan.logits_indices[:0] if token_ids is None else last_rows(plan, token_ids)
        try:
            return drafter.propose(context, staged, outputs.hidden_states, next_ids, rows, first)
        except ExpertUnavailable as error:
            _log.warning("no drafts: an expert server is lost", error=str(error))
            return None

    def retract(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """Undoes the part of a step that is not idempotent, so that it can be run again."""
        penalties = None if plan.sampling is None else plan.sampling.penalties
        if penalties is not None and outputs.token_ids is not None:
            self.sampler.penalties.retract(penalties, outputs.token_ids)

    def zero_pages(self, pages: list[int]) -> None:
        """Clears the KV of a request that failed with NaN before anyone else gets its pages."""
        self.kv_cache.zero_pages(pages)

    def _on_device(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with what only the device knows; images not encoded yet are encoded."""
        features = None
        if plan.images is not None:
            assert self.encoder is not None, "requests with images are refused where there is no tower"
            features = self.encoder.features_of(plan.images)
        ids = self.token_pool.gather(plan.token_slots, plan.positions)
        return replace(plan, input_ids=ids, image_features=features)

    def _pool(self, wanted: PooledRows, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the rows' hidden states, float32 `[H]`."""
        return hidden_states[wanted.rows].sum(0, dtype=torch.float32)

    def _score_prompt(self, wanted: PromptLogprobRows, hidden_states: torch.Tensor) -> list[Logprobs]:
        scored = []
        for begin in range(0, len(wanted.rows), _PROMPT_ROWS):
            rows = wanted.rows[begin : begin + _PROMPT_ROWS]
            targets = wanted.target_ids[begin : begin + _PROMPT_ROWS]
            logits = self.model.compute_logits(hidden_states[rows])
            scored.append(token_logprobs(logits, targets, wanted.num_top))
        return scored


class ModelStepRunner(StepRunner):
    """Runs the steps of a `ModelRunner` of this process, of whose experts it knows the same."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def interrupt(self) -> None:
        self._runner.interrupt()

    @property
    def damages(self) -> int:
        return self._runner.damages

    def suspect(self, layers: Collection[int]) -> None:
        self._runner.suspect(layers)


class LaneModelRunner(ModelRunner):
    """The prefill lane's: every expert that is not resident is streamed, and no server is asked."""

    # The step that keeps the ring of buffers from others until `end_step`.
    _streamed: StreamedExperts | None = None
    # Whether the latest step was not begun because experts can not be streamed, on some rank.
    is_refused = False
    # As `LaneRunner.wait_until`; set by who launches the steps.
    wait_until: Callable[[Callable[[], bool]], None] = staticmethod(lambda has_come: None)

    def end_step(self) -> None:
        """The latest step has ended on the device, or never began."""
        if self._streamed is not None:
            self._streamed.end()
        self._streamed = None

    def _stream(self, plan: StepPlan) -> StreamedExperts | None:
        if self.streamer is not None:
            self._streamed = self.streamer.begin_whole(plan.query_start_loc[-1], self.wait_until)
            self.is_refused = self._streamed is None
            if self._streamed is None:
                raise ExpertUnavailable(-1, "the experts of a prefill step can not be streamed any more")
        return self._streamed


@contextmanager
def launching(plan: StepPlan) -> Iterator[None]:
    """Runs every launch of a step: without gradients, and in the span its expert spans hang under."""
    token = otel_context.attach(plan.trace_context) if plan.trace_context is not None else None
    try:
        with torch.inference_mode():
            yield
    finally:
        if token is not None:
            otel_context.detach(token)
