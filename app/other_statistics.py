"""Counts of chosen experts as SGLang's recorder and KTransformers' placement have them, in our form.

Their files are of `torch.save`: a tensor, or a dict whose `logical_count` is one, int `[layers, experts]` or
`[samples, layers, experts]` (python/sglang/srt/layers/moe/kt_ep_wrapper.py of kvcache-ai/sglang). They are
read by an explicit import alone, with `weights_only`, which runs no code of the file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moebius.errors import UserError
from moebius.experts.placement import ExpertStatistics
from moebius.models.geometry import MoeGeometry

_KEY = "logical_count"


def read_other_statistics(path: Path, geometry: MoeGeometry) -> ExpertStatistics:
    """Returns the counts for a model; steps and different experts of a step are not in such a file.

    Raises UserError naming the file and what is wrong with it.
    """
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # torch raises many kinds for what is no such file
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a file of torch.save with tensors alone: {reason}") from None
    if isinstance(found, dict):
        if _KEY not in found:
            raise UserError(f"{path} has {', '.join(map(str, found)) or 'nothing'}; needed: {_KEY}")
        found = found[_KEY]
    if not isinstance(found, torch.Tensor) or found.ndim not in (2, 3):
        raise UserError(f"{path}: {_KEY} has to be a tensor [layers, experts] or [samples, layers, experts]")
    counts = found.double().reshape(-1, *found.shape[-2:]).sum(0).round().numpy()
    wanted = {geometry.num_layers, len(geometry.passed_layers)}
    if counts.shape[0] not in wanted or counts.shape[1] != geometry.num_experts:
        layers = " or ".join(map(str, sorted(wanted)))
        raise UserError(
            f"{path} has counts of {counts.shape[0]} layers with {counts.shape[1]} experts; the model has "
            f"{layers} layers with {geometry.num_experts}"
        )
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise UserError(f"{path}: counts have to be numbers from 0 on")
    rows = list(geometry.passed_layers) if counts.shape[0] == geometry.num_layers else slice(None)
    chosen = np.zeros((len(geometry.moe_layers), geometry.num_experts), np.int64)
    chosen[: len(geometry.passed_layers)] = counts[rows]
    return ExpertStatistics(
        geometry.model_type,
        geometry.num_experts,
        geometry.top_k,
        geometry.moe_layers,
        mode="stat",
        steps=0,
        tokens=int(chosen.sum(1).max()) // geometry.top_k,
        counts=chosen,
        distinct=np.zeros(len(geometry.moe_layers), np.int64),
    )
