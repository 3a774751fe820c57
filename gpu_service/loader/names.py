"""Which checkpoint names fill which rows of which parameter, and which names are nobody's here.

How a family spells its names is `moebius.checkpoint.rules`' business; only canonical names are known here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from gpu_service.layers.linear import FusedLinear
from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM
from moebius.checkpoint.rules import FAMILY_RULES, is_routed_expert


@dataclass(frozen=True, slots=True)
class Target:
    """Where one checkpoint tensor goes; filled by `expected_names`."""

    module: nn.Module
    parameter: str
    # Rows of the parameter that the tensor fills: [begin, begin + shape[0]).
    begin: int
    shape: tuple[int, ...]


_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def wanted_name(name: str, config: ModelConfig) -> str | None:
    """The canonical name of a checkpoint tensor, or None where it is right that nothing here reads it.

    Left out are routed experts of MoE layers (the expert servers'), what the family's rules drop (rotary
    frequencies, multi-token prediction), and a copy of the embedding under the head's name where both are
    one.
    """
    canonical = FAMILY_RULES[config.model_type].canonical_name(name, config.num_layers)
    if canonical is None or (config.tie_word_embeddings and canonical == "lm_head.weight"):
        return None
    layer = _LAYER.match(canonical)
    if layer is not None and config.is_moe_layer(int(layer[1])) and is_routed_expert(name):
        return None
    return canonical


def expected_names(model: CausalLM) -> dict[str, Target]:
    """Every checkpoint name the model needs, derived from its modules."""
    expected: dict[str, Target] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            if not isinstance(module, FusedLinear):
                expected[prefix + name] = Target(module, name, 0, shape)
                continue
            parent, begin = prefix.removesuffix(".").rpartition(".")[0], 0
            for part, rows in module.parts.items():
                expected[f"{parent}.{part}.{name}"] = Target(module, name, begin, (rows, *shape[1:]))
                begin += rows
    return expected
