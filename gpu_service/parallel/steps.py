"""A rank's part of a step: its sampler, its model runner, and the end of the group when it fails alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

from gpu_service.core.parallel import ParallelContext
from gpu_service.core.results import StepResult
from gpu_service.core.step import PooledRows, PromptLogprobRows, SamplingPlan, StepPlan, TokenMasks
from gpu_service.engine.model_runner import LaneModelRunner, ModelRunner
from gpu_service.engine.sampler import Logprobs, Sampler, StepOutputs
from gpu_service.engine.step_runner import LaunchedStep, StepInFlight, StepRunner
from gpu_service.experts.client import ExpertComputeFailed, ExpertUnavailable
from gpu_service.experts.resident.watch import ResidentDamaged
from gpu_service.layers.context import ForwardContext
from gpu_service.models.common import CausalLM
from gpu_service.parallel.waits import CollectiveWaits


class RankSampler(Sampler):
    """Samples on the last stage's ranks, and spreads the first one's tokens.

    All ranks of that stage have the same gathered logits, but a parallel prefix sum on a GPU may add in
    another order each time; a token that differed between ranks would never be noticed again.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, num_slots: int, parallel: ParallelContext
    ) -> None:
        super().__init__(vocab_size, device, num_slots)
        self._vocab_size = vocab_size
        self._device = device
        self.parallel = parallel

    def greedy(self, logits: torch.Tensor) -> StepOutputs:
        own = super().greedy(logits) if self.parallel.is_last_stage else StepOutputs()
        token_ids, finite = self._share(own, logits.shape[0])
        return StepOutputs(token_ids=token_ids, finite=finite)

    def sample(
        self, logits: torch.Tensor, plan: SamplingPlan, tokens: torch.Tensor | None = None
    ) -> StepOutputs:
        """`logits` is `[R, 0]` on stages without a head."""
        own = super().sample(logits, plan, tokens) if self.parallel.is_last_stage else StepOutputs()
        token_ids, finite = self._share(own, logits.shape[0])
        if plan.penalties is not None and self.parallel.rank != self.parallel.sampling_rank:
            if own.token_ids is not None:
                self.penalties.retract(plan.penalties, own.token_ids)
            self.penalties.advance(plan.penalties, token_ids)
        logprobs = None
        if plan.logprob_rows:
            columns = plan.logprob_columns(self._vocab_size)
            logprobs = self.share_logprobs(own.logprobs, len(plan.logprob_rows), columns)
        return StepOutputs(token_ids=token_ids, finite=finite, logprobs=logprobs)

    def columns(self, num_top: int) -> int:
        """Returns the alternatives that there are for `num_top` wanted ones."""
        return min(num_top, self._vocab_size)

    def _share(self, own: StepOutputs, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sampling rank's token ids int64 `[R]`, and whether their logits were finite, bool `[R]`."""
        shared = torch.zeros((2, rows), dtype=torch.int64, device=self._device)
        if own.token_ids is not None and own.finite is not None:
            shared[0] = own.token_ids
            shared[1] = own.finite
        self.parallel.world_group.broadcast(shared, self.parallel.sampling_rank)
        return shared[0], shared[1].bool()

    def share_logprobs(self, own: Logprobs | None, rows: int, columns: int) -> Logprobs:
        """Log-probabilities of `rows` rows with `columns` alternatives each, from the sampling rank; `own` is
        None on stages without a head."""
        if self.parallel.num_stages == 1:
            assert own is not None
            return own
        # float64 holds ids and float32 values exactly.
        shared = torch.zeros((rows, 1 + 2 * columns), dtype=torch.float64, device=self._device)
        if own is not None:
            chosen, ids, values = own
            shared = torch.cat((chosen.unsqueeze(1).double(), ids.double(), values.double()), dim=1)
        self.parallel.world_group.broadcast(shared, self.parallel.sampling_rank)
        ids, values = shared[:, 1 : 1 + columns], shared[:, 1 + columns :]
        return shared[:, 0].float(), ids.long(), values.float()

    def share_pooled(self, own: torch.Tensor | None, size: int) -> torch.Tensor:
        """Returns the sampling rank's float32 `[size]`; `own` is None on stages without a final norm."""
        if self.parallel.num_stages == 1:
            assert own is not None
            return own
        shared = torch.zeros(size, device=self._device) if own is None else own.contiguous()
        self.parallel.world_group.broadcast(shared, self.parallel.sampling_rank)
        return shared


class RankModelRunner(ModelRunner):
    """A `ModelRunner` among others: its sampler is a `RankSampler`, its experts are `RankExperts` or None."""

    @property
    def notes_overflow(self) -> bool:
        """Ranks decide alike and exchange what they note, and not all need have resident experts."""
        return self.is_float16

    def run(self, plan: StepPlan, resolve: Callable[[StepPlan], StepPlan] = lambda plan: plan) -> StepOutputs:
        """A client that raises does it here, at the end, on all ranks alike."""
        resolved: list[StepPlan] = []

        def keep(plan: StepPlan) -> StepPlan:
            resolved.append(resolve(plan))
            return resolved[0]

        outputs = super().run(plan, keep)
        if self.experts is not None and not self.experts.is_device_driven:
            failure = self.experts.failure()
            if failure is not None:
                self.retract(resolved[0], outputs)
                raise failure
        return outputs

    def first_overflow(self, context: ForwardContext) -> torch.Tensor | None:
        """Each stage knows of its own layers; all ranks end the same requests."""
        own = context.first_overflow
        if own is None:
            return None
        world = cast(RankSampler, self.sampler).parallel.world_group
        return world.all_gather(own).view(-1, own.shape[0]).amin(0)

    def _pool(self, wanted: PooledRows, hidden_states: torch.Tensor) -> torch.Tensor:
        """The last stage's sums: earlier stages have hidden states of other layers, some of another size."""
        sampler = cast(RankSampler, self.sampler)
        own = super()._pool(wanted, hidden_states) if sampler.parallel.is_last_stage else None
        return sampler.share_pooled(own, cast(CausalLM, self.model).config.hidden_size)

    def _score_prompt(self, wanted: PromptLogprobRows, hidden_states: torch.Tensor) -> list[Logprobs]:
        """Returns the sampling rank's scores, in one piece."""
        sampler = cast(RankSampler, self.sampler)
        own: Logprobs | None = None
        if sampler.parallel.is_last_stage:
            pieces = super()._score_prompt(wanted, hidden_states)
            chosen, ids, values = (torch.cat(parts) for parts in zip(*pieces, strict=True))
            own = (chosen, ids, values)
        return [sampler.share_logprobs(own, len(wanted.rows), sampler.columns(wanted.num_top))]


class RankLaneModelRunner(LaneModelRunner, RankModelRunner):
    """The prefill lane's among others."""


# All ranks raise these alike (`RankExperts.failure`), so their engines go on alike. A rank whose device is
# damaged is alone with it.
_AGREED = (ExpertUnavailable, ExpertComputeFailed)


Waiting = Callable[[], AbstractContextManager[None]]


class GuardedRunner(StepRunner):
    """Passes steps on; an error that is this rank's own ends the group through `fail`."""

    def __init__(
        self, inner: StepRunner, fail: Callable[[str], None], waits: CollectiveWaits | None = None
    ) -> None:
        """`waits`: of a device on which steps wait for other ranks, and the host for the device."""
        self._inner = inner
        self._fail = fail
        self._waiting = nullcontext if waits is None else waits.waiting

    def launch(self, plan: StepPlan) -> LaunchedStep:
        try:
            step = self._inner.launch(plan)
        except Exception as error:
            self._fail(f"launching a step failed: {error!r}")
            raise
        # Not only when somebody waits for it: before that, a launch may wait for the other ranks.
        if isinstance(step, StepInFlight) and isinstance(step.error, Exception):
            self._judge(step.error)
        return _GuardedStep(step, self._judge, self._waiting)

    def _judge(self, error: Exception) -> None:
        if not isinstance(error, _AGREED) or isinstance(error, ResidentDamaged):
            self._fail(f"a step failed: {error!r}")

    def zero_pages(self, pages: list[int]) -> None:
        self._inner.zero_pages(pages)

    @property
    def is_recovering(self) -> bool:
        return self._inner.is_recovering

    @property
    def damages(self) -> int:
        return self._inner.damages

    def suspect(self, layers: Collection[int]) -> None:
        self._inner.suspect(layers)

    @property
    def streamed_tokens(self) -> int:
        return self._inner.streamed_tokens

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()


class _GuardedStep(LaunchedStep):
    def __init__(self, inner: LaunchedStep, judge: Callable[[Exception], None], waiting: Waiting) -> None:
        self._inner = inner
        self._judge = judge
        self._waiting = waiting

    def query(self) -> bool:
        return self._inner.query()

    def supply(self, masks: TokenMasks | None) -> None:
        self._inner.supply(masks)
        # As at a launch: what fails here must not wait for somebody who asks.
        if isinstance(self._inner, StepInFlight) and isinstance(self._inner.error, Exception):
            self._judge(self._inner.error)

    def wait(self) -> StepResult:
        try:
            with self._waiting():
                return self._inner.wait()
        except Exception as error:
            self._judge(error)
            raise
