"""`quantization_config` of a checkpoint, turned into the schemes its tensors may follow.

What is stored decides: a matrix whose plain tensor holds floats is unquantised whatever the configuration
says about it, so lists of modules that were left alone need not be understood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moebius.checkpoint import weight_schemes as schemes
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.moe_config import read_config
from moebius.checkpoint.weight_schemes import StoredRole, WeightScheme

Config = Mapping[str, Any]
GROUP_SIZES = (32, 64, 128)
# Where configurations keep it: text models, and the text part of multimodal ones.
_KEYS = ("quantization_config", "compression_config")


def read_schemes(directory: str | Path) -> tuple[WeightScheme, ...]:
    """The schemes of a checkpoint's quantised matrices; empty when nothing is quantised.

    Raises CheckpointError naming the scheme, or the key and its value, that is not supported.
    """
    found = _quantisation_config(directory)
    if found is None:
        return ()
    method = found.get("quant_method")
    if method is None and "config_groups" in found:
        method = "compressed-tensors"
    reader = _METHODS.get(str(method))
    if reader is None:
        raise _unsupported("quant_method", method, ", ".join(sorted(_METHODS)))
    return reader(found)


def _quantisation_config(directory: str | Path) -> Config | None:
    config = read_config(directory)
    for place in (config, config.get("text_config")):
        if isinstance(place, dict):
            for key in _KEYS:
                if isinstance(place.get(key), dict):
                    return dict(place[key])
    path = Path(directory) / "hf_quant_config.json"  # ModelOpt's own file
    if not path.is_file():
        return None
    try:
        return {"quant_method": "modelopt", **json.loads(path.read_bytes())["quantization"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has no 'quantization' object") from error


def _unsupported(key: str, value: object, allowed: str) -> CheckpointError:
    return CheckpointError(f"config.json: quantization_config: {key} is {value!r}; allowed: {allowed}")


def _require(config: Config, key: str, allowed: tuple[object, ...], default: object = None) -> Any:
    value = config.get(key, default)
    if value not in allowed:
        raise _unsupported(key, value, ", ".join(map(str, allowed)))
    return value


def _fp8(config: Config) -> tuple[WeightScheme, ...]:
    """Blocks as DeepSeek-V3 has them, or one scale per row or tensor: the scale's shape tells."""
    _require(config, "fmt", ("e4m3", "float8_e4m3fn", None))
    block = config.get("weight_block_size")
    if block is not None:
        if list(block) != [128, 128]:
            raise _unsupported("weight_block_size", block, "[128, 128]")
        return (schemes.fp8("fp8", "block", "weight_scale_inv"),)
    return tuple(
        schemes.fp8("fp8", strategy, suffix)
        for suffix in ("weight_scale", "weight_scale_inv")
        for strategy in ("channel", "tensor")
    )


def _compressed_tensors(config: Config) -> tuple[WeightScheme, ...]:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unsupported("config_groups", groups, "an object with at least one group")
    return tuple(_compressed_group(config, group) for group in groups.values())


def _compressed_group(config: Config, group: Config) -> WeightScheme:
    """One entry of `config_groups`; keys as compressed-tensors' QuantizationArgs."""
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise _unsupported("weights", weights, "an object")
    kind = (weights.get("type", "int"), weights.get("num_bits", 8))
    stored = str(group.get("format") or config.get("format"))
    build = _COMPRESSED.get((*kind, stored))
    if build is None:
        known = ", ".join(f"{name} ({bits}-bit {of})" for of, bits, name in sorted(_COMPRESSED))
        raise _unsupported("format", f"{stored} ({kind[1]}-bit {kind[0]})", known)
    if weights.get("actorder") in ("group", "dynamic", True):
        raise _unsupported("actorder", weights.get("actorder"), "null, weight, static")
    return schemes.for_targets(build(group, weights), tuple(map(str, group.get("targets") or ())))


def _compressed_fp8(group: Config, weights: Config) -> WeightScheme:
    strategy = _require(weights, "strategy", ("block", "channel", "tensor"))
    if strategy == "block" and list(weights.get("block_structure") or ()) != [128, 128]:
        raise _unsupported("block_structure", weights.get("block_structure"), "[128, 128]")
    return schemes.fp8("compressed-tensors float-quantized", strategy, "weight_scale")


def _compressed_int8(group: Config, weights: Config) -> WeightScheme:
    strategy = _require(weights, "strategy", ("channel", "tensor"))
    _require(weights, "symmetric", (True,), True)
    activations = group.get("input_activations")
    if activations is not None:
        _require(activations, "num_bits", (8,), 8)
        _require(activations, "dynamic", (True,), False)
    return schemes.int8("compressed-tensors int-quantized", strategy, activations is not None)


def _compressed_int4(group: Config, weights: Config) -> WeightScheme:
    strategy = _require(weights, "strategy", ("group", "channel"))
    size = _require(weights, "group_size", GROUP_SIZES) if strategy == "group" else 0
    symmetric = _require(weights, "symmetric", (True, False), True)
    return schemes.compressed_int4("compressed-tensors pack-quantized", size, symmetric)


def _compressed_nvfp4(group: Config, weights: Config) -> WeightScheme:
    scale = StoredRole("tensor_reciprocal", "weight_global_scale", ("F32",))
    return schemes.nvfp4("compressed-tensors nvfp4-pack-quantized", "weight_packed", scale)


def _compressed_mxfp4(group: Config, weights: Config) -> WeightScheme:
    return schemes.mxfp4("compressed-tensors mxfp4-pack-quantized", "weight_packed", "weight_scale")


# By type, bits and format.
_COMPRESSED: Mapping[tuple[str, int, str], Callable[[Config, Config], WeightScheme]] = {
    ("float", 8, "float-quantized"): _compressed_fp8,
    ("float", 8, "naive-quantized"): _compressed_fp8,
    ("int", 8, "int-quantized"): _compressed_int8,
    ("int", 8, "naive-quantized"): _compressed_int8,
    ("int", 4, "pack-quantized"): _compressed_int4,
    ("float", 4, "nvfp4-pack-quantized"): _compressed_nvfp4,
    ("float", 4, "mxfp4-pack-quantized"): _compressed_mxfp4,
}


def _awq(config: Config) -> tuple[WeightScheme, ...]:
    _require(config, "bits" if "bits" in config else "w_bit", (4,))
    _require({"version": str(config.get("version", "gemm")).lower()}, "version", ("gemm",))
    size = _require(config, "group_size" if "group_size" in config else "q_group_size", (*GROUP_SIZES, -1))
    return (schemes.awq(max(size, 0), bool(config.get("zero_point", True))),)


def _gptq(config: Config) -> tuple[WeightScheme, ...]:
    _require(config, "bits", (4,))
    size = _require(config, "group_size", (*GROUP_SIZES, -1))
    # Rows in the order of activations: their groups are scattered over the whole row.
    _require(config, "desc_act", (False,), False)
    version = _require(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    symmetric = _require(config, "sym", (True, False), True)
    return (schemes.gptq(max(size, 0), symmetric, 1 if version == "gptq" else 0),)


def _mxfp4(config: Config) -> tuple[WeightScheme, ...]:
    return (schemes.mxfp4("mxfp4", "blocks", "scales"),)


def _modelopt(config: Config) -> tuple[WeightScheme, ...]:
    algorithm = _require(config, "quant_algo", ("NVFP4", "FP8"))
    if algorithm == "FP8":
        return (schemes.fp8("modelopt FP8", "tensor", "weight_scale"),)
    scale = StoredRole("tensor", "weight_scale_2", ("F32",))
    return (schemes.nvfp4("modelopt NVFP4", "weight", scale),)


_METHODS: Mapping[str, Callable[[Config], tuple[WeightScheme, ...]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}
