"""Which checkpoint names fill which rows of which parameter, and which names are read by no parameter.

How a family spells its names is `moebius.models.names`' business; only canonical names are known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import stage_layers
from gpu_service.layers.linear import CheckpointPart, Divided
from gpu_service.models.common import CausalLM
from moebius.checkpoint.expert_layouts import is_routed_expert
from moebius.models.config import ModelConfig
from moebius.models.layers.ranks import ShardRange
from moebius.models.layers.residual import Sequential
from moebius.models.registry import family_of
from moebius.models.tied_head import EMBEDDING, HEAD


@dataclass(frozen=True, slots=True)
class Target:
    """Where (a part of) one checkpoint tensor goes; filled by `expected_names`."""

    module: nn.Module
    parameter: str
    shape: tuple[int, ...]  # Of the checkpoint's tensor.
    # The part of it that is read; None: all columns, or a tensor of one dimension.
    rows: ShardRange
    cols: ShardRange | None
    begin: int  # Rows of the parameter that it fills: [begin, begin + rows.size).


_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
# Stored in all layers by models that use it in MoE layers only.
_MLP_NORM = ".post_mlp_layernorm"
# Modules outside of layers, other than embedding and head.
_LAST = ("model.norm", "model.hc_head")


def wanted_name(
    name: str, config: ModelConfig, parallel: ParallelContext = SOLO, *, head_is_embedding: bool = False
) -> str | None:
    """Returns the canonical name of a checkpoint tensor, or None where it is right that nothing here reads
    it.

    Left out are routed experts of MoE layers (the expert servers'), norms that dense layers have and do not
    use, what the family's rules drop (rotary frequencies; multi-token prediction, unless it is served), a
    copy of the embedding under the head's name where both are one (`tied_head` has compared them), and what
    other pipeline stages read; a name that no stage knows is left out by none. `head_is_embedding`: both are
    one, which is stored under the head's name alone.
    """
    canonical = family_of(config.model_type).names.canonical_name(
        name, config.num_layers, config.num_mtp_heads
    )
    if canonical is not None and config.tie_word_embeddings and _module(canonical) == HEAD:
        canonical = EMBEDDING + canonical.removeprefix(HEAD) if head_is_embedding else None
    if canonical is None:
        return None
    layer = _LAYER.match(canonical)
    if layer is None:
        return canonical if _is_of_stage(canonical, config, parallel) else None
    index = int(layer[1])
    if index < config.num_layers and index not in stage_layers(config, parallel):
        return None
    if config.is_moe_layer(index) and is_routed_expert(name):
        return None
    is_of_dense_layer = _module(canonical).endswith(_MLP_NORM) and not config.is_moe_layer(index)
    return None if is_of_dense_layer and _norms_experts_alone(config) else canonical


def _norms_experts_alone(config: ModelConfig) -> bool:
    """Returns whether only what experts add is normed; checkpoints have the norm in dense layers, too."""
    residuals = (layer.residual for layer in config.layers)
    return any(isinstance(residual, Sequential) and residual.normed_output == "ffn" for residual in residuals)


def _is_of_stage(canonical: str, config: ModelConfig, parallel: ParallelContext) -> bool:
    if _module(canonical) == EMBEDDING:
        return parallel.is_first_stage or (parallel.is_last_stage and config.tie_word_embeddings)
    return parallel.is_last_stage or not f"{canonical}.".startswith(
        tuple(f"{name}." for name in (*_LAST, HEAD))
    )


def _module(canonical: str) -> str:
    return canonical.rpartition(".")[0]


def expected_names(model: CausalLM) -> dict[str, Target]:
    """Every checkpoint name the model (or this rank's part of it) needs, derived from its modules."""
    first_layer = stage_layers(model.config, model.parallel).start
    expected: dict[str, Target] = {}
    for path, module in model.named_modules():
        path = _LAYER.sub(lambda match: f"model.layers.{int(match[1]) + first_layer}.", path)
        parent = path.rpartition(".")[0]
        for part in _parts(module):
            name = f"{parent}.{part.sibling}" if part.sibling else path
            cols = () if part.cols is None else (part.cols.total,)
            shape = (part.rows.total, *cols, *part.rest)
            target = Target(module, part.parameter, shape, part.rows, part.cols, part.begin)
            expected[f"{name}.{part.parameter}"] = target
    return expected


def _parts(module: nn.Module) -> Iterator[CheckpointPart]:
    if isinstance(module, Divided):
        yield from module.checkpoint_parts()
        return
    for name, parameter in module.named_parameters(recurse=False):
        rows, *cols = parameter.shape
        whole = ShardRange.whole(cols[0]) if cols else None
        yield CheckpointPart("", name, ShardRange.whole(rows), whole, rest=tuple(cols[1:]))
