"""A rank's part of a step."""

from __future__ import annotations

from typing import cast

import torch

from gpu_service.engine.model_runner import ModelRunner
from gpu_service.engine.results import Logprobs, StepOutputs
from gpu_service.engine.step import PromptLogprobRows, StepPlan
from gpu_service.parallel.sampler import RankSampler


class RankModelRunner(ModelRunner):
    """A `ModelRunner` among others: its sampler is a `RankSampler`, its experts are `RankExperts` or None."""

    def run(self, plan: StepPlan) -> StepOutputs:
        """See the base class. A client that raises does it here, at the end, on all ranks alike."""
        outputs = super().run(plan)
        if self.experts is not None and not self.experts.is_device_driven:
            failure = self.experts.failure()
            if failure is not None:
                self.retract(plan, outputs)
                raise failure
        return outputs

    def _score_prompt(self, wanted: PromptLogprobRows, hidden_states: torch.Tensor) -> list[Logprobs]:
        """See the base class; the sampling rank's scores, in one piece."""
        sampler = cast(RankSampler, self.sampler)
        own: Logprobs | None = None
        if sampler.parallel.is_last_stage:
            pieces = super()._score_prompt(wanted, hidden_states)
            chosen, ids, values = (torch.cat(parts) for parts in zip(*pieces, strict=True))
            own = (chosen, ids, values)
        return [sampler.share_logprobs(own, len(wanted.rows), wanted.num_top)]
