"""Which drafter an engine has, and models whose steps can not verify drafts."""

from __future__ import annotations

from gpu_service.core.parallel import ParallelContext
from gpu_service.core.request import SchedulerLimits
from gpu_service.core.step import TokenPool
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.models.common import CausalLM
from gpu_service.speculation.drafter import DeviceDrafter
from gpu_service.speculation.mtp import MtpDrafter
from gpu_service.speculation.ngram import NGramDrafter
from gpu_service.speculation.pace import DraftPace
from gpu_service.speculation.policy import Speculation
from moebius.config import GpuConfig, ParallelConfig
from moebius.errors import UserError
from moebius.models.config import ModelConfig
from moebius.models.layers.layer import mixers


def check_speculation(gpu: GpuConfig, parallel: ParallelConfig, model: ModelConfig) -> None:
    """Before anything is loaded. Raises UserError where a step can not take back a wrong draft, or where the
    model's MTP layers cannot be run.
    """
    method = gpu.speculative_method
    if method == "off":
        return
    kept = next((mixer.unrewindable for mixer in mixers(model.layers) if mixer.unrewindable), "")
    if kept:
        raise UserError(
            f"speculative_method: {method!r} is not supported for {model.model_type}, which has {kept}: "
            "a wrong guess could not be taken back; allowed: off"
        )
    if method != "mtp":
        return
    if parallel.pipeline_parallel_size > 1:
        raise UserError(
            f"speculative_method: 'mtp' is not supported with pipeline_parallel_size "
            f"{parallel.pipeline_parallel_size}: an MTP layer needs the embedding, which the first stage has,"
            " and the last stage's hidden states; allowed: 1, or speculative_method off or ngram"
        )


def make_drafter(model: CausalLM, token_pool: TokenPool, parallel: ParallelContext) -> DeviceDrafter | None:
    """Of a model that serves its MTP layers; None: drafts come from elsewhere, if at all."""
    if not model.config.num_mtp_heads:
        return None
    return MtpDrafter(model, token_pool, parallel)


def make_speculation(gpu: GpuConfig, limits: SchedulerLimits, runner: ModelRunner) -> Speculation | None:
    """The scheduler's part; None: speculation is off."""
    if gpu.speculative_method == "off":
        return None
    host = None if runner.drafter is not None else NGramDrafter(gpu.ngram_match_min, gpu.ngram_match_max)
    return Speculation(limits, gpu.num_draft_tokens, host, adaptive=gpu.adaptive_drafts)


def make_draft_pace(gpu: GpuConfig) -> DraftPace | None:
    """What measures steps for it; None: nothing is to follow from what they take."""
    return None if gpu.speculative_method == "off" or not gpu.adaptive_drafts else DraftPace()
