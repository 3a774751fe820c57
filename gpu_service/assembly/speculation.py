"""Which drafter an engine has, and what it can not be combined with."""

from __future__ import annotations

import torch

from gpu_service.assembly.steps import drafts_attention
from gpu_service.core.parallel import ParallelContext
from gpu_service.core.request import SchedulerLimits
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.experts.choice_samples import ChoiceSamples
from gpu_service.experts.costs import RankMoe
from gpu_service.models.common import CausalLM
from gpu_service.speculation.draft_model import DraftModel, ModelDrafter
from gpu_service.speculation.drafter import DeviceDrafter
from gpu_service.speculation.mtp import MtpDrafter
from gpu_service.speculation.ngram import NGramDrafter
from gpu_service.speculation.pace import DraftPace
from gpu_service.speculation.policy import Speculation
from moebius.config import GpuConfig, ParallelConfig
from moebius.errors import UserError


def check_speculation(gpu: GpuConfig, parallel: ParallelConfig) -> None:
    """Before anything is loaded. Raises UserError where what drafts tokens on the device cannot be run."""
    if gpu.has_draft_layers and parallel.pipeline_parallel_size > 1:
        raise UserError(
            f"speculative_method: {gpu.speculative_method!r} is not supported with pipeline_parallel_size "
            f"{parallel.pipeline_parallel_size}: draft tokens of the device are not sent from the last stage "
            "to the others; allowed: 1, or speculative_method off or ngram"
        )


def make_drafter(
    gpu: GpuConfig,
    runner: ModelRunner,
    drafting: DraftModel | None,
    limits: SchedulerLimits,
    parallel: ParallelContext,
) -> DeviceDrafter | None:
    """Returns the drafter of a model with layers that propose draft tokens, or with a draft model; None:
    drafts come from elsewhere, if at all.
    """
    model, cache = runner.model, runner.kv_cache
    assert isinstance(model, CausalLM)
    attention = drafts_attention(gpu, model, cache, limits)
    if drafting is not None:
        assert cache.beside is not None
        assert attention is not None
        pool = runner.token_pool
        return ModelDrafter(drafting, cache.beside, attention, pool, model.config.vocab_size, parallel)
    if not model.config.num_draft_layers:
        return None
    return MtpDrafter(model, runner.token_pool, parallel, attention)


def make_choice_samples(
    gpu: GpuConfig, moe: RankMoe | None, limits: SchedulerLimits, device: torch.device
) -> ChoiceSamples | None:
    """Returns what samples the rows' experts, by which drafts are chosen; None: nothing is chosen by them."""
    if moe is None or not gpu.may_draft or not gpu.adaptive_drafts:
        return None
    geometry = moe.geometry
    layers = [layer for layer in moe.layers if layer in geometry.passed_layers]
    if not layers:
        return None
    return ChoiceSamples(layers, geometry.num_experts, geometry.top_k, limits.max_rows, device)


def make_speculation(gpu: GpuConfig, limits: SchedulerLimits, runner: ModelRunner) -> Speculation | None:
    """Returns the scheduler's part; None: speculation is off."""
    if not gpu.may_draft:
        return None
    host = None
    if "ngram" in gpu.speculative_method:
        host = NGramDrafter(gpu.ngram_match_min, gpu.ngram_match_max)
    has_device_drafter = runner.drafter is not None
    return Speculation(
        *(limits, gpu.num_draft_tokens, host),
        has_device_drafter=has_device_drafter,
        adaptive=gpu.adaptive_drafts,
    )


def make_draft_pace(gpu: GpuConfig) -> DraftPace | None:
    """Returns what measures steps for it; None: nothing is to follow from what they take."""
    return DraftPace() if gpu.may_draft and gpu.adaptive_drafts else None
