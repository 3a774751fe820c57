"""One rank samples, all ranks get its tokens: equal by construction, whatever a device's sums do."""

from __future__ import annotations

import torch

from gpu_service.engine.results import Sampled
from gpu_service.engine.sampler import Sampler
from gpu_service.engine.step import SamplingPlan
from gpu_service.parallel.context import ParallelContext

Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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

    def greedy(self, logits: torch.Tensor) -> Sampled:
        """See the base class."""
        own = super().greedy(logits) if self.parallel.is_last_stage else None
        return Sampled(*self._share(own, logits.shape[0]), None)

    def sample(self, logits: torch.Tensor, plan: SamplingPlan) -> Sampled:
        """See the base class; `logits` is `[R, 0]` on stages without a head."""
        own = super().sample(logits, plan) if self.parallel.is_last_stage else None
        token_ids, finite = self._share(own, logits.shape[0])
        if plan.penalties is not None and self.parallel.rank != self.parallel.sampling_rank:
            if own is not None:
                self.penalties.retract(plan.penalties, own.token_ids)
            self.penalties.advance(plan.penalties, token_ids)
        logprobs = None
        if plan.logprob_rows:
            mine = None if own is None else own.logprobs
            logprobs = self.share_logprobs(mine, len(plan.logprob_rows), plan.num_top_logprobs)
        return Sampled(token_ids, finite, logprobs)

    def _share(self, own: Sampled | None, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sampling rank's token ids int64 `[R]`, and whether their logits were finite, bool `[R]`."""
        shared = torch.zeros((2, rows), dtype=torch.int64, device=self._device)
        if own is not None:
            shared[0] = own.token_ids
            shared[1] = own.finite
        self.parallel.world_group.broadcast(shared, self.parallel.sampling_rank)
        return shared[0], shared[1].bool()

    def share_logprobs(self, own: Logprobs | None, rows: int, num_top: int) -> Logprobs:
        """Log-probabilities of `rows` rows from the sampling rank; `own` is None on stages without a head."""
        if self.parallel.num_stages == 1:
            assert own is not None
            return own
        top = min(num_top, self._vocab_size)
        # float64 holds ids and float32 values exactly.
        shared = torch.zeros((rows, 1 + 2 * top), dtype=torch.float64, device=self._device)
        if own is not None:
            chosen, ids, values = own
            shared = torch.cat((chosen.unsqueeze(1).double(), ids.double(), values.double()), dim=1)
        self.parallel.world_group.broadcast(shared, self.parallel.sampling_rank)
        ids, values = shared[:, 1 : 1 + top], shared[:, 1 + top :]
        return shared[:, 0].float(), ids.long(), values.float()
