"""Which drafter an engine has, and models whose steps can not verify drafts."""

from __future__ import annotations

from gpu_service.engine.model_runner import ModelRunner
from gpu_service.scheduler.limits import SchedulerLimits
from gpu_service.speculation.ngram import NGramDrafter
from gpu_service.speculation.pace import DraftPace
from gpu_service.speculation.policy import Speculation
from moebius.config import GpuConfig
from moebius.errors import UserError
from moebius.models.config import ModelConfig


def check_speculation(gpu: GpuConfig, model: ModelConfig) -> None:
    """Before anything is loaded. Raises UserError where a step can not take back a wrong draft."""
    method = gpu.speculative_method
    if method == "off":
        return
    kept = None
    if model.linear is not None:
        kept = "layers that keep one state per request"
    elif model.compressed is not None:
        kept = "attention over entries that stand for several tokens each"
    if kept is not None:
        raise UserError(
            f"speculative_method: {method!r} is not supported for {model.model_type}, which has {kept}: "
            "a wrong guess could not be taken back; allowed: off"
        )
    if method == "mtp":
        raise UserError(
            "speculative_method: 'mtp' is not supported yet: no checkpoint's MTP layers make guesses; "
            "allowed: off, ngram"
        )


def make_speculation(gpu: GpuConfig, limits: SchedulerLimits, runner: ModelRunner) -> Speculation | None:
    """The scheduler's part; None: speculation is off."""
    if gpu.speculative_method == "off":
        return None
    host = None if runner.drafter is not None else NGramDrafter(gpu.ngram_match_min, gpu.ngram_match_max)
    return Speculation(limits, gpu.num_draft_tokens, host, adaptive=gpu.adaptive_drafts)


def make_draft_pace(gpu: GpuConfig) -> DraftPace | None:
    """What measures steps for it; None: nothing is to follow from what they take."""
    return None if gpu.speculative_method == "off" or not gpu.adaptive_drafts else DraftPace()
