"""Schemes of compressed-tensors' `config_groups`; keys as its QuantizationArgs has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moebius.checkpoint import weight_schemes as schemes
from moebius.checkpoint.quantisation_keys import (
    BLOCK,
    GROUP_SIZES,
    Config,
    require,
    require_object,
    unsupported,
)
from moebius.checkpoint.weight_schemes import StoredRole, WeightScheme


def read_groups(config: Config) -> tuple[WeightScheme, ...]:
    """One scheme per group, limited to its targets. Raises CheckpointError."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise unsupported("config_groups", groups, "an object with at least one group")
    return tuple(_group(config, group) for group in groups.values())


def _group(config: Config, group: Config) -> WeightScheme:
    if not isinstance(group, dict):
        raise unsupported("config_groups", group, "objects")
    weights = require_object(group, "weights")
    kind = (weights.get("type", "int"), weights.get("num_bits", 8))
    stored = str(group.get("format") or config.get("format"))
    build = _SCHEMES.get((*kind, stored))
    if build is None:
        known = ", ".join(f"{name} ({bits}-bit {of})" for of, bits, name in sorted(_SCHEMES))
        raise unsupported("format", f"{stored} ({kind[1]}-bit {kind[0]})", known)
    if weights.get("actorder") in ("group", "dynamic", True):
        raise unsupported("actorder", weights.get("actorder"), "null, weight, static")
    return schemes.for_targets(build(group, weights), tuple(map(str, group.get("targets") or ())))


def _fp8(group: Config, weights: Config) -> WeightScheme:
    strategy = require(weights, "strategy", ("block", "channel", "tensor"))
    if strategy == "block" and list(weights.get("block_structure") or ()) != BLOCK:
        raise unsupported("block_structure", weights.get("block_structure"), str(BLOCK))
    return schemes.fp8("compressed-tensors float-quantized", strategy, "weight_scale")


def _int8(group: Config, weights: Config) -> WeightScheme:
    strategy, size = _integer_strategy(weights, ("channel", "tensor", "group"))
    activations = group.get("input_activations")
    if activations is not None:
        require(activations, "num_bits", (8,), 8)
        require(activations, "dynamic", (True,), False)
    return schemes.int8("compressed-tensors int-quantized", strategy, activations is not None, size)


def _packed_int8(group: Config, weights: Config) -> WeightScheme:
    strategy, size = _integer_strategy(weights, ("channel", "group"))
    return schemes.packed_int8("compressed-tensors pack-quantized of 8 bits", strategy, size)


def _integer_strategy(weights: Config, allowed: tuple[str, ...]) -> tuple[str, int]:
    """How scales are shared by symmetric integers: strategy, and group size where it is "group"."""
    require(weights, "symmetric", (True,), True)
    strategy = str(require(weights, "strategy", allowed))
    return strategy, require(weights, "group_size", GROUP_SIZES) if strategy == "group" else 0


def _int4(group: Config, weights: Config) -> WeightScheme:
    strategy = require(weights, "strategy", ("group", "channel"))
    size = require(weights, "group_size", GROUP_SIZES) if strategy == "group" else 0
    symmetric = require(weights, "symmetric", (True, False), True)
    return schemes.compressed_int4("compressed-tensors pack-quantized", size, symmetric)


def _nvfp4(group: Config, weights: Config) -> WeightScheme:
    scale = StoredRole("tensor_reciprocal", "weight_global_scale", ("F32",))
    return schemes.nvfp4("compressed-tensors nvfp4-pack-quantized", "weight_packed", scale)


def _mxfp4(group: Config, weights: Config) -> WeightScheme:
    return schemes.mxfp4("compressed-tensors mxfp4-pack-quantized", "weight_packed", "weight_scale")


# By type, bits and format.
_SCHEMES: Mapping[tuple[str, int, str], Callable[[Config, Config], WeightScheme]] = {
    ("float", 8, "float-quantized"): _fp8,
    ("float", 8, "naive-quantized"): _fp8,
    ("int", 8, "int-quantized"): _int8,
    ("int", 8, "naive-quantized"): _int8,
    ("int", 8, "pack-quantized"): _packed_int8,
    ("int", 4, "pack-quantized"): _int4,
    ("float", 4, "nvfp4-pack-quantized"): _nvfp4,
    ("float", 4, "mxfp4-pack-quantized"): _mxfp4,
}
