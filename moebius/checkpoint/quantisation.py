"""`quantization_config` of a checkpoint, turned into the schemes its tensors may follow.

What is stored decides: a matrix whose plain tensor holds floats is unquantised whatever the configuration
says about it, so lists of modules that were left alone need not be understood.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from moebius.checkpoint import weight_schemes as schemes
from moebius.checkpoint.compressed_tensors import read_groups
from moebius.checkpoint.config_file import read_config_file
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.files import is_gguf
from moebius.checkpoint.gguf.schemes import GGUF_SCHEMES
from moebius.checkpoint.integer_methods import auto_round, awq, gptq
from moebius.checkpoint.quantisation_keys import BLOCK, Config, require, require_object, unsupported
from moebius.checkpoint.weight_schemes import StoredRole, WeightScheme

# Where configurations keep it: text models, and the text part of multimodal ones.
_KEYS = ("quantization_config", "compression_config")


def read_schemes(directory: str | Path) -> tuple[WeightScheme, ...]:
    """The schemes of a checkpoint's quantised matrices; empty when nothing is quantised.

    Raises CheckpointError naming the scheme, or the key and its value, that is not supported.
    """
    if is_gguf(directory):
        return GGUF_SCHEMES
    found = _quantisation_config(directory)
    if found is None:
        return ()
    method = found.get("quant_method")
    if method is None and "config_groups" in found:
        method = "compressed-tensors"
    reader = _METHODS.get(str(method))
    if reader is None:
        raise unsupported("quant_method", method, ", ".join(sorted(_METHODS)))
    return reader(found)


def _quantisation_config(directory: str | Path) -> Config | None:
    config = read_config_file(directory)
    for place in (config, config.get("text_config")):
        if isinstance(place, dict):
            for key in _KEYS:
                if isinstance(place.get(key), dict):
                    return dict(place[key])
    for name, read in _OWN_FILES.items():
        path = Path(directory) / name
        if path.is_file():
            return _own_file(path, read)
    return None


def _own_file(path: Path, read: Callable[[Config], Config]) -> Config:
    try:
        return dict(read(json.loads(path.read_bytes())))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no configuration of its quantiser: {error}") from error


# Files that quantisers wrote beside config.json before they wrote into it.
_OWN_FILES: Mapping[str, Callable[[Config], Config]] = {
    "hf_quant_config.json": lambda content: {"quant_method": "modelopt", **content["quantization"]},
    "quantize_config.json": lambda content: {"quant_method": "gptq", **content},
    "quant_config.json": lambda content: {"quant_method": "awq", **content},
}


def _fp8(config: Config) -> tuple[WeightScheme, ...]:
    """Blocks as DeepSeek-V3 has them, or one scale per row or tensor: the scale's shape tells."""
    require(config, "fmt", ("e4m3", "float8_e4m3fn", None))
    block = config.get("weight_block_size")
    if block is not None:
        if list(block) != BLOCK:
            raise unsupported("weight_block_size", block, str(BLOCK))
        return (schemes.fp8("fp8", "block", "weight_scale_inv"),)
    return tuple(
        schemes.fp8("fp8", strategy, suffix)
        for suffix in ("weight_scale", "weight_scale_inv")
        for strategy in ("channel", "tensor")
    )


def _fbgemm_fp8(config: Config) -> tuple[WeightScheme, ...]:
    return (schemes.fp8("fbgemm_fp8", "channel", "weight_scale"),)


def _mxfp4(config: Config) -> tuple[WeightScheme, ...]:
    return (schemes.mxfp4("mxfp4", "blocks", "scales"),)


def _modelopt(config: Config) -> tuple[WeightScheme, ...]:
    algorithm = require(config, "quant_algo", (*_MODELOPT, "MIXED_PRECISION"))
    if algorithm != "MIXED_PRECISION":
        return (_MODELOPT[algorithm](),)
    layers = require_object(config, "quantized_layers")
    found = [require(layer, "quant_algo", tuple(_MODELOPT)) for layer in layers.values()]
    # Which module has which, its tensors tell.
    return tuple(_MODELOPT[name]() for name in dict.fromkeys(found))


def _modelopt_nvfp4() -> WeightScheme:
    return schemes.nvfp4("modelopt NVFP4", "weight", StoredRole("tensor", "weight_scale_2", ("F32",)))


_MODELOPT: Mapping[str, Callable[[], WeightScheme]] = {
    "NVFP4": _modelopt_nvfp4,
    # The same tensors; what differs is what was meant to be done with activations.
    "W4A16_NVFP4": _modelopt_nvfp4,
    "FP8": lambda: schemes.fp8("modelopt FP8", "tensor", "weight_scale"),
}


def _quark(config: Config) -> tuple[WeightScheme, ...]:
    """AMD Quark: one scheme for all modules, and others for those of a pattern or a class."""
    layers = require_object(config, "layer_quant_config", {}).items()
    single = [
        schemes.for_targets(_quark_scheme(layer), (f"re:{fnmatch.translate(pattern)}",))
        for pattern, layer in layers
    ]
    # Every matrix is of a class that is quantised alike; without a scheme for all, theirs or none is it.
    general = [*require_object(config, "layer_type_quant_config", {}).values()]
    if config.get("global_quant_config") is not None or not (single or general):
        general.append(require_object(config, "global_quant_config"))
    return (*single, *dict.fromkeys(map(_quark_scheme, general)))


def _quark_scheme(layer: Config) -> WeightScheme:
    weight = require_object(layer, "weight")
    kind = require(weight, "dtype", ("fp4", "fp8_e4m3", "int8"))
    if kind == "fp4":
        require(weight, "qscheme", ("per_group",))
        require(weight, "group_size", (32,))
        require(weight, "scale_format", ("e8m0",))
        return schemes.mxfp4("quark fp4", "weight", "weight_scale")
    if kind == "int8":
        strategy = require(weight, "qscheme", ("per_tensor", "per_channel"))
        require(weight, "symmetric", (True,), True)
        rows = layer.get("input_tensors") is not None
        return schemes.int8("quark int8", strategy.removeprefix("per_"), rows)
    strategy = require(weight, "qscheme", ("per_tensor", "per_channel", "per_block"))
    if strategy == "per_block" and weight.get("block_size") != BLOCK:
        raise unsupported("block_size", weight.get("block_size"), str(BLOCK))
    return schemes.fp8("quark fp8_e4m3", strategy.removeprefix("per_"), "weight_scale")


_METHODS: Mapping[str, Callable[[Config], tuple[WeightScheme, ...]]] = {
    "auto-round": auto_round,
    "awq": awq,
    "compressed-tensors": read_groups,
    "fbgemm_fp8": _fbgemm_fp8,
    "fp8": _fp8,
    "gptq": gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "quark": _quark,
}
