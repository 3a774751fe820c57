"""Where declared weights go, rows of which parameter, and which names are read by no parameter.

How a family spells its names is `moebius.models.names`' business; only canonical names are known here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import stage_layers
from gpu_service.models.common import CausalLM
from moebius.checkpoint.expert_layouts import is_routed_expert
from moebius.models.config import ModelConfig
from moebius.models.layers.ranks import ShardRange
from moebius.models.layers.residual import Sequential
from moebius.models.layers.weights import Weight
from moebius.models.registry import family_of
from moebius.models.weights import EMBEDDING, HEAD, model_weights, outside_weights


@dataclass(frozen=True, slots=True)
class Target:
    """Where (a part of) one checkpoint tensor goes; filled by `expected_names`."""

    weight: Weight
    # The part of it that is read; None: a tensor of one dimension.
    rows: ShardRange
    cols: ShardRange | None
    begin: int  # Rows of the parameter that it fills: [begin, begin + rows.size).

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return self.weight.shape

    @property
    def parameter(self) -> str:
        """Canonical name of the parameter that it fills."""
        return self.weight.parameter


_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
# Stored in all layers by models that use it in MoE layers only.
_MLP_NORM = ".post_mlp_layernorm"


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
        name, config.num_stored_layers, config.num_mtp_heads
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
    module, is_first, is_last = _module(canonical), parallel.is_first_stage, parallel.is_last_stage
    own = _modules_outside(config, is_first, is_last)
    return module in own or module not in _modules_outside(config, True, True)


@lru_cache(maxsize=8)
def _modules_outside(config: ModelConfig, is_first: bool, is_last: bool) -> frozenset[str]:
    """Returns the modules of no layer that such a stage has."""
    weights = outside_weights(config, is_first=is_first, is_last=is_last)
    return frozenset(_module(weight.name) for weight in weights)


def _module(canonical: str) -> str:
    return canonical.rpartition(".")[0]


def expected_names(config: ModelConfig, parallel: ParallelContext = SOLO) -> dict[str, Target]:
    """Returns where every declared weight of a model, or of a rank's part of one, goes, by canonical name."""
    expected: dict[str, Target] = {}
    filled: dict[str, int] = {}
    for weight in model_weights(config, stage_layers(config, parallel)):
        rows, cols = weight.parts(parallel.tp_rank, parallel.tp_size)
        begin = filled.get(weight.parameter, 0)
        filled[weight.parameter] = begin + rows.size
        expected[weight.name] = Target(weight, rows, cols, begin)
    return expected


def module_of(model: CausalLM, name: str) -> nn.Module:
    """Returns the module of a parameter by its canonical name: a stage counts its own layers."""
    first = stage_layers(model.config, model.parallel).start
    path = _LAYER.sub(lambda match: f"model.layers.{int(match[1]) - first}.", name)
    return model.get_submodule(_module(path))
