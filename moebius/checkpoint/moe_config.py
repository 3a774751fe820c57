"""The routed experts' geometry, from any family's config.json.

Families spell the same number differently; the tables below say how. Keys as in the configuration
classes of transformers 5.23.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moebius.checkpoint.errors import CheckpointError, refuse_pointer
from moebius.checkpoint.gguf.files import is_gguf
from moebius.checkpoint.step_layers import clamp_limits, moe_layers
from moebius.checkpoint.text_config import flat_config

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MoeGeometry:
    """What an expert server has to know of a model; filled by `from_config`. Sizes in elements."""

    model_type: str
    hidden_size: int
    # All decoder layers, dense ones included.
    num_layers: int
    # The layers that route to experts, ascending.
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    # "silu": experts compute down(silu(gate(x)) * up(x)); others as in kernels/product/product.h.
    activation: str
    # "float32" or "bfloat16": what the config says weights and activations are.
    dtype: str
    # Of the activations that have them: the sigmoid's slope, and where gate and up are clamped.
    alpha: float = 1.702
    limit: float = 7.0
    # Where the experts of each decoder layer clamp instead; infinite: they do not; empty: `limit` in all.
    layer_limits: tuple[float, ...] = ()

    def limit_of(self, layer: int) -> float:
        """Where the experts of a decoder layer clamp."""
        return self.layer_limits[layer] if self.layer_limits else self.limit

    @staticmethod
    def from_config(directory: str | Path, top_k: int | None = None) -> MoeGeometry:
        """Read `config.json`; `top_k` overrides the checkpoint's.

        Raises CheckpointError naming the file, the key, its value and what is allowed.
        """
        config = read_config(directory)
        model_type = config.get("model_type")
        family = FAMILIES.get(str(model_type))
        if family is None:
            known = ", ".join(sorted(FAMILIES))
            raise CheckpointError(
                f"{Path(directory) / 'config.json'}: model_type is {model_type!r}; known: {known}"
            )
        geometry = _geometry(str(model_type), config, family)
        if top_k is not None:
            if not 1 <= top_k <= geometry.num_experts:
                raise CheckpointError(f"top_k is {top_k}; this model allows 1 to {geometry.num_experts}")
            geometry = replace(geometry, top_k=top_k)
        return geometry


@dataclass(frozen=True, slots=True)
class FamilyKeys:
    """How one family spells its geometry. Of several names the first present counts."""

    num_experts: tuple[str, ...]
    moe_layers: Callable[[Config, int], tuple[int, ...]]
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    moe_intermediate_size: tuple[str, ...] = ("moe_intermediate_size",)
    # Where the code of a family, not its configuration, says what experts compute.
    activation: str | None = None
    # The key of a list that has each layer's clamp.
    layer_limits: str | None = None


def _after_dense(config: Config, num_layers: int) -> tuple[int, ...]:
    """The first `first_k_dense_replace` layers are dense."""
    return tuple(range(_integer(config, ("first_k_dense_replace",), 0), num_layers))


def _by_layer_types(config: Config, num_layers: int) -> tuple[int, ...]:
    """Those that `mlp_layer_types` calls sparse; without it as `_after_dense`."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return _after_dense(config, num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise CheckpointError(
            f"config.json: mlp_layer_types is {kinds!r}; {num_layers} of 'dense' and 'sparse' are allowed"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def _every(config: Config, num_layers: int) -> tuple[int, ...]:
    """No layer is dense."""
    return tuple(range(num_layers))


def _by_sparse_step(config: Config, num_layers: int) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    step = _integer(config, ("decoder_sparse_step",), 1, default=1)
    dense = set(config.get("mlp_only_layers") or ())
    return tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)


def _by_interval(config: Config, num_layers: int) -> tuple[int, ...]:
    """Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index`."""
    step = _integer(config, ("moe_layer_interval",), 1, default=1)
    first = _integer(config, ("moe_layer_start_index",), 0, default=1)
    last = _integer(config, ("moe_layer_end_index",), -1, default=-1)
    end = num_layers if last == -1 else min(last + 1, num_layers)
    return tuple(layer for layer in range(first, end) if (layer + 1) % step == 0)


def _listed(config: Config, num_layers: int) -> tuple[int, ...]:
    """Those that `moe_layers_enum` names."""
    return moe_layers(config.get("moe_layers_enum"), num_layers)


FAMILIES: Mapping[str, FamilyKeys] = {
    # transformers 5 writes num_local_experts for what the published checkpoints call num_experts.
    "qwen3_moe": FamilyKeys(num_experts=("num_experts", "num_local_experts"), moe_layers=_by_sparse_step),
    "qwen2_moe": FamilyKeys(num_experts=("num_experts", "num_local_experts"), moe_layers=_by_sparse_step),
    "qwen3_vl_moe": FamilyKeys(num_experts=("num_experts", "num_local_experts"), moe_layers=_by_sparse_step),
    "qwen3_next": FamilyKeys(num_experts=("num_experts", "num_local_experts"), moe_layers=_by_sparse_step),
    "qwen3_5_moe": FamilyKeys(num_experts=("num_experts", "num_local_experts"), moe_layers=_every),
    "qwen3_5_moe_text": FamilyKeys(num_experts=("num_experts", "num_local_experts"), moe_layers=_every),
    "mixtral": FamilyKeys(
        num_experts=("num_local_experts", "num_experts"),
        moe_layers=_every,
        moe_intermediate_size=("intermediate_size",),
    ),
    "olmoe": FamilyKeys(
        num_experts=("num_experts", "num_local_experts"),
        moe_layers=_every,
        moe_intermediate_size=("intermediate_size",),
    ),
    "dots1": FamilyKeys(num_experts=("n_routed_experts", "num_local_experts"), moe_layers=_after_dense),
    "ernie4_5_moe": FamilyKeys(
        num_experts=("moe_num_experts", "num_experts"),
        moe_layers=_by_interval,
        top_k=("moe_k", "num_experts_per_tok"),
    ),
    "minimax_m2": FamilyKeys(
        num_experts=("num_local_experts", "num_experts"),
        moe_layers=_every,
        moe_intermediate_size=("intermediate_size",),
    ),
    "glm4_moe": FamilyKeys(num_experts=("n_routed_experts", "num_local_experts"), moe_layers=_after_dense),
    "glm4v_moe": FamilyKeys(num_experts=("n_routed_experts", "num_local_experts"), moe_layers=_after_dense),
    "deepseek_v2": FamilyKeys(num_experts=("n_routed_experts", "num_experts"), moe_layers=_after_dense),
    "deepseek_v3": FamilyKeys(num_experts=("n_routed_experts", "num_local_experts"), moe_layers=_after_dense),
    "kimi_k2": FamilyKeys(num_experts=("n_routed_experts", "num_local_experts"), moe_layers=_after_dense),
    "kimi_k25": FamilyKeys(num_experts=("n_routed_experts", "num_local_experts"), moe_layers=_after_dense),
    "glm4_moe_lite": FamilyKeys(
        num_experts=("n_routed_experts", "num_local_experts"), moe_layers=_by_layer_types
    ),
    "deepseek_v32": FamilyKeys(
        num_experts=("n_routed_experts", "num_local_experts"), moe_layers=_by_layer_types
    ),
    "glm_moe_dsa": FamilyKeys(
        num_experts=("n_routed_experts", "num_local_experts"), moe_layers=_by_layer_types
    ),
    "gpt_oss": FamilyKeys(
        num_experts=("num_local_experts",),
        moe_layers=_every,
        top_k=("num_experts_per_tok", "experts_per_token"),
        moe_intermediate_size=("intermediate_size",),
        activation="gpt_oss",
    ),
    "step3p5": FamilyKeys(
        num_experts=("moe_num_experts", "n_routed_experts"),
        moe_layers=_listed,
        top_k=("moe_top_k", "num_experts_per_tok"),
        activation="silu_clamped",
        layer_limits="swiglu_limits",
    ),
}


def read_config(directory: str | Path) -> Config:
    """`config.json`, or a GGUF model's metadata, as a mapping; see `flat_config`.

    Raises CheckpointError naming the file.
    """
    if is_gguf(directory):
        # Here, because few processes need the package that knows the format's types.
        from moebius.checkpoint.gguf.config import gguf_config

        return gguf_config(directory)
    path = Path(directory) / "config.json"
    refuse_pointer(path)
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return flat_config(content)


def _integer(config: Config, names: tuple[str, ...], smallest: int, default: int | None = None) -> int:
    """The first present key's value. Raises CheckpointError naming key and value."""
    for name in names:
        if config.get(name) is not None:
            value = config[name]
            if type(value) is not int or value < smallest:
                raise CheckpointError(
                    f"config.json: {name} is {value!r}; an integer >= {smallest} is allowed"
                )
            return value
    if default is not None:
        return default
    raise CheckpointError(f"config.json: {' or '.join(names)} is missing")


def _positive(config: Config, name: str, default: float) -> float:
    """A number. Raises CheckpointError naming key and value."""
    value = config.get(name, default)
    if not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {name} is {value!r}; a number > 0 is allowed")
    return float(value)


def _geometry(model_type: str, config: Config, family: FamilyKeys) -> MoeGeometry:
    """Read every number once, and refuse what no expert server could serve."""
    num_layers = _integer(config, ("num_hidden_layers",), 1)
    num_experts = _integer(config, family.num_experts, 1)
    top_k = _integer(config, family.top_k, 1)
    if top_k > num_experts:
        raise CheckpointError(
            f"config.json: {family.top_k[0]} is {top_k}, but there are {num_experts} experts"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"config.json: hidden_act is {activation!r}; allowed: 'silu'")
    return MoeGeometry(
        model_type=model_type,
        hidden_size=_integer(config, ("hidden_size",), 1),
        num_layers=num_layers,
        moe_layers=family.moe_layers(config, num_layers),
        num_experts=num_experts,
        top_k=top_k,
        moe_intermediate_size=_integer(config, family.moe_intermediate_size, 1),
        activation=family.activation or activation,
        dtype=_dtype(config),
        alpha=_positive(config, "swiglu_alpha", 1.702),
        limit=_positive(config, "swiglu_limit", 7.0),
        layer_limits=_layer_limits(config, family, num_layers),
    )


def _layer_limits(config: Config, family: FamilyKeys, num_layers: int) -> tuple[float, ...]:
    """One for each layer where the family has them, none of them finite where the checkpoint has no list."""
    if family.layer_limits is None:
        return ()
    listed = clamp_limits(family.layer_limits, config.get(family.layer_limits), num_layers)
    return listed or (math.inf,) * num_layers


# AWQ and GPTQ checkpoints say float16, which their authors' kernels compute in.
COMPUTED_IN: Mapping[str, str] = {"float16": "bfloat16"}


def _dtype(config: Config) -> str:
    """The checkpoint's activation type: transformers 5 writes `dtype`, earlier ones `torch_dtype`."""
    value = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    value = COMPUTED_IN.get(str(value), value)
    allowed = ("float32", "bfloat16")
    if value not in allowed:
        raise CheckpointError(f"config.json: dtype is {value!r}; allowed: {', '.join(allowed)}")
    return str(value)
