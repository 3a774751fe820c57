"""Which checkpoint names fill which rows of which parameter, and which names are nobody's here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from gpu_service.layers.linear import FusedLinear
from gpu_service.models.common import CausalLM


@dataclass(frozen=True, slots=True)
class Target:
    """Where one checkpoint tensor goes; filled by `expected_names`."""

    module: nn.Module
    parameter: str
    # Rows of the parameter that the tensor fills: [begin, begin + shape[0]).
    begin: int
    shape: tuple[int, ...]


# Routed experts belong to the expert servers: per expert (any spelling) or stacked.
_ROUTED_EXPERT = re.compile(r"\.experts\.(\d+\.|(gate_up|gate|up|down)_proj)")
_ROTARY = re.compile(r"\.rotary_emb\.inv_freq$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def is_skipped(name: str, model: CausalLM) -> bool:
    """Whether a name that no parameter asks for is nevertheless right to be there.

    Routed experts, rotary frequencies (computed), multi-token prediction layers behind the last decoder
    layer, and a copy of the embedding under the head's name where the two are tied.
    """
    if _ROTARY.search(name):
        return True
    config = model.config
    if config.tie_word_embeddings and name == "lm_head.weight":
        return True
    layer = _LAYER.match(name)
    if layer is None:
        return False
    layer_id = int(layer[1])
    if config.num_layers <= layer_id < config.num_layers + config.num_mtp_layers:
        return True
    return config.is_moe_layer(layer_id) and _ROUTED_EXPERT.search(name) is not None


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
