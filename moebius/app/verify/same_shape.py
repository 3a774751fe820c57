"""Whether two checkpoints can be compared token by token and layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moebius.app.verify.staged_model import StagedModel
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.errors import UserError


def check_same_shape(ours: StagedModel, reference: StagedModel, top_k: int | None) -> None:
    """Raises UserError naming everything that differs, with both values."""
    mine, theirs = _shape(ours, top_k), _shape(reference, top_k)
    differing = [f"{key} {theirs[key]}, not {mine[key]}" for key in mine if mine[key] != theirs[key]]
    if differing:
        raise UserError(
            f"--against {reference.directory}: it has to be the same model in another format, but has "
            + "; ".join(differing)
        )


def _shape(model: StagedModel, top_k: int | None) -> Mapping[str, Any]:
    geometry = MoeGeometry.from_config(model.directory, top_k)
    return {
        "vocab_size": model.config.vocab_size,
        "num_layers": geometry.num_layers,
        "hidden_size": geometry.hidden_size,
        "moe_intermediate_size": geometry.moe_intermediate_size,
        "num_experts": geometry.num_experts,
        "top_k": geometry.top_k,
        "MoE layers": list(geometry.moe_layers),
    }
