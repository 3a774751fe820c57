"""`quantization_config` of a checkpoint, turned into the schemes its tensors may follow.

What is stored decides: a matrix whose plain tensor holds floats is unquantised whatever the configuration
says about it, so lists of modules that were left alone need not be understood. What is not known is refused
by key and value.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moebius.checkpoint import weight_schemes as schemes
from moebius.checkpoint.config_file import read_config_file
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.files import is_gguf
from moebius.checkpoint.gguf.schemes import GGUF_SCHEMES
from moebius.checkpoint.weight_schemes import StoredRole, WeightScheme

Config = Mapping[str, Any]
# Weights that share a scale, along a row.
GROUP_SIZES = (32, 64, 128)
# Rows and columns that share a scale of fp8 blocks, where nothing says otherwise.
BLOCK = (128, 128)
# DeepSeek-V4's, next to `quantization_config` or in it.
_EXPERT_DTYPE = "expert_dtype"
# Of a method that is not the dense matrices'.
_EXPERT_METHODS = ("routed_experts_quant_method", "store_dtype")


def unsupported(key: str, value: object, allowed: str) -> CheckpointError:
    """Returns the error for a value that is not known."""
    return CheckpointError(f"config.json: quantization_config: {key} is {value!r}; allowed: {allowed}")


def require(config: Config, key: str, allowed: tuple[object, ...], default: object = None) -> Any:
    """Returns the value of a key. Raises CheckpointError naming key, value and what is allowed."""
    value = config.get(key, default)
    if value not in allowed:
        raise unsupported(key, value, ", ".join(map(str, allowed)))
    return value


def require_object(config: Config, key: str, default: Config | None = None) -> Config:
    """Returns the value of a key that is an object. Raises CheckpointError naming key and value."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, dict):
        raise unsupported(key, value, "an object")
    return value


# Where configurations keep it: text models, and the text part of multimodal ones.
_KEYS = ("quantization_config", "compression_config")


def read_schemes(directory: str | Path) -> tuple[WeightScheme, ...]:
    """Returns the schemes of a checkpoint's quantised matrices; empty when nothing is quantised.

    Raises CheckpointError naming the scheme, or the key and its value, that is not supported.
    """
    if is_gguf(directory):
        return GGUF_SCHEMES
    found = quantisation_config(directory)
    if found is None:
        return ()
    method = found.get("quant_method")
    if method is None and "config_groups" in found:
        method = "compressed-tensors"
    reader = _METHODS.get(str(method))
    if reader is None:
        raise unsupported("quant_method", method, ", ".join(sorted(_METHODS)))
    return reader(found)


def quantisation_config(directory: str | Path) -> Config | None:
    """Returns what a quantiser wrote into or next to config.json; None: nothing.

    Raises CheckpointError for a file that cannot be read.
    """
    config = read_config_file(directory)
    for place in (config, config.get("text_config")):
        if isinstance(place, dict):
            for key in _KEYS:
                if isinstance(place.get(key), dict):
                    outside = {_EXPERT_DTYPE: place[_EXPERT_DTYPE]} if _EXPERT_DTYPE in place else {}
                    return {**outside, **place[key]}
    for name, read in _OWN_FILES.items():
        path = Path(directory) / name
        if path.is_file():
            return _own_file(path, read)
    return None


def _own_file(path: Path, read: Callable[[Config], Config]) -> Config:
    try:
        return dict(read(json.loads(path.read_bytes())))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as a quantiser's configuration: {error}") from error


# Files that quantisers wrote next to config.json before they wrote into it.
_OWN_FILES: Mapping[str, Callable[[Config], Config]] = {
    "hf_quant_config.json": lambda content: {"quant_method": "modelopt", **content["quantization"]},
    "quantize_config.json": lambda content: {"quant_method": "gptq", **content},
    "quant_config.json": lambda content: {"quant_method": "awq", **content},
}


def _block(config: Config, key: str) -> tuple[int, int]:
    """Returns rows and columns that share a scale of fp8. Raises CheckpointError naming key and value."""
    value = config.get(key)
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        rows, columns = value
        if columns % 16 == 0:
            return rows, columns
    raise unsupported(key, value, "[rows, columns], of which columns are a multiple of 16")


def _fp8(config: Config) -> tuple[WeightScheme, ...]:
    """Returns blocks as DeepSeek-V3 has them, or one scale per row or tensor: the scale's shape tells."""
    require(config, "fmt", ("e4m3", "float8_e4m3fn", None))
    if config.get("weight_block_size") is not None:
        block = _block(config, "weight_block_size")
        blocks = tuple(schemes.fp8("fp8", "block", suffix, block) for suffix in ("weight_scale_inv", "scale"))
        # DeepSeek-V4: its experts' pairs of codes have the names of its blocks' codes.
        is_fp4 = require(config, _EXPERT_DTYPE, ("fp4", "fp8", None)) == "fp4"
        # DeepSeek-V4.1's tables: each row has scales of its own.
        rows = schemes.for_targets(schemes.mxfp8("fp8 rows", "scale"), (r"re:.*\.engram\.embed$",))
        # NVIDIA's copies of it, whose experts are of another quantiser and whose rest is as it was.
        own = require(config, "moe_quant_algo", ("NVFP4", None)) and _modelopt_nvfp4()
        experts = [schemes.mxfp4("fp4 experts", "weight", "scale")] if is_fp4 else []
        # Ling-3.0's have the suffix of blocks, MiMo-V2.6's have another.
        if "mxfp4" in {require(config, key, ("mxfp4", None)) for key in _EXPERT_METHODS}:
            for key in ("routed_experts_group_size", "mxfp4_block_size"):
                require(config, key, (32, None))
            names = ("weight_scale_inv", "weight_scale")
            experts += [schemes.mxfp4("mxfp4 experts", "weight", name) for name in names]
        return (*blocks, rows, *experts, *([own] if own else []))
    return tuple(
        schemes.fp8("fp8", strategy, suffix)
        for suffix in ("weight_scale", "weight_scale_inv")
        for strategy in ("channel", "tensor")
    )


def _mxfp8(config: Config) -> tuple[WeightScheme, ...]:
    """MiniMax-M3's, as SGLang and vLLM read it."""
    require(config, "fmt", ("e4m3", "float8_e4m3fn", None))
    require(config, "weight_block_size", ([1, 32], None))
    # Experts of another quantiser.
    require(config, "moe_quant_algo", (None,))
    return tuple(schemes.mxfp8("mxfp8", suffix) for suffix in ("weight_scale_inv", "weight_scale"))


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
    # Which module has which, its tensors tell. Blocks may be what the publisher stored, under its names.
    copied = [_modelopt_blocks("weight_scale_inv")] if "FP8_BLOCK_SCALES" in found else []
    return (*(_MODELOPT[name]() for name in dict.fromkeys(found)), *copied)


def _modelopt_nvfp4() -> WeightScheme:
    return schemes.nvfp4("modelopt NVFP4", "weight", StoredRole("tensor", "weight_scale_2", ("F32",)))


def _modelopt_blocks(scales: str = "weight_scale") -> WeightScheme:
    return schemes.fp8("modelopt FP8 of blocks", "block", scales)


_MODELOPT: Mapping[str, Callable[[], WeightScheme]] = {
    "NVFP4": _modelopt_nvfp4,
    # The same tensors; what differs is what was meant to be done with activations.
    "W4A16_NVFP4": _modelopt_nvfp4,
    "FP8": lambda: schemes.fp8("modelopt FP8", "tensor", "weight_scale"),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda: schemes.fp8("modelopt FP8", "channel", "weight_scale"),
    "FP8_PB_WO": _modelopt_blocks,
    "FP8_BLOCK_SCALES": _modelopt_blocks,
    "MXFP8": lambda: schemes.mxfp8("modelopt MXFP8", "weight_scale"),
}


def _quark(config: Config) -> tuple[WeightScheme, ...]:
    """Returns AMD Quark: one scheme for all modules, and others for those of a pattern or a class."""
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
    strategy = require(weight, "qscheme", ("per_tensor", "per_channel", "per_block", "per_group"))
    if strategy == "per_group":
        require(weight, "group_size", (32,))
        require(weight, "scale_format", ("e8m0",))
        return schemes.mxfp8("quark mxfp8", "weight_scale")
    block = _block(weight, "block_size") if strategy == "per_block" else BLOCK
    return schemes.fp8("quark fp8_e4m3", strategy.removeprefix("per_"), "weight_scale", block)


def read_groups(config: Config) -> tuple[WeightScheme, ...]:
    """compressed-tensors, keys as its QuantizationArgs has them: one scheme per group, limited to its
    targets; then the fp8 of `linear_fp8_config`, which SGLang and KTransformers read for other matrices.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise unsupported("config_groups", groups, "an object with at least one group")
    found = tuple(_compressed_group(config, group) for group in groups.values())
    if config.get("linear_fp8_config") is None:
        return found
    linear = require_object(config, "linear_fp8_config")
    # SGLang quantises layers while it loads where the method is missing; here weights stay as stored.
    if linear.get("quant_method") != "fp8":
        raise unsupported("linear_fp8_config.quant_method", linear.get("quant_method"), "fp8")
    return (*found, *_fp8(linear))


def _compressed_group(config: Config, group: Config) -> WeightScheme:
    if not isinstance(group, dict):
        raise unsupported("config_groups", group, "objects")
    weights = require_object(group, "weights")
    kind = (weights.get("type", "int"), weights.get("num_bits", 8))
    stored = str(group.get("format") or config.get("format"))
    build = _COMPRESSED.get((*kind, stored))
    if build is None:
        known = ", ".join(f"{name} ({bits}-bit {of})" for of, bits, name in sorted(_COMPRESSED))
        raise unsupported("format", f"{stored} ({kind[1]}-bit {kind[0]})", known)
    scheme = build(group, weights)
    if weights.get("actorder") in ("group", "dynamic", True):
        if scheme.layout != "compressed_int4" or not scheme.group_size:
            raise unsupported("actorder", weights.get("actorder"), "null, weight, static")
        scheme = schemes.reordered(scheme, "weight_g_idx")
    return schemes.for_targets(scheme, tuple(map(str, group.get("targets") or ())))


def _compressed_fp8(group: Config, weights: Config) -> WeightScheme:
    name = "compressed-tensors float-quantized"
    strategy = require(weights, "strategy", ("block", "channel", "tensor", "group"))
    if strategy in ("channel", "tensor"):
        return schemes.fp8(name, strategy, "weight_scale")
    if strategy == "block":
        return schemes.fp8(name, strategy, "weight_scale", _block(weights, "block_structure"))
    size = require(weights, "group_size", (16, *GROUP_SIZES))
    return schemes.fp8(name, "block", "weight_scale", (1, size))


def _compressed_mxfp8(group: Config, weights: Config) -> WeightScheme:
    require(weights, "group_size", (32,))
    return schemes.mxfp8("compressed-tensors mxfp8-quantized", "weight_scale")


def _compressed_int8(group: Config, weights: Config) -> WeightScheme:
    strategy, size = _integer_strategy(weights, ("channel", "tensor", "group"))
    activations = group.get("input_activations")
    if activations is not None:
        require(activations, "num_bits", (8,), 8)
        require(activations, "dynamic", (True,), False)
    return schemes.int8("compressed-tensors int-quantized", strategy, activations is not None, size)


def _compressed_words_int8(group: Config, weights: Config) -> WeightScheme:
    strategy, size = _integer_strategy(weights, ("channel", "group"))
    return schemes.packed_int8("compressed-tensors pack-quantized of 8 bits", strategy, size)


def _integer_strategy(weights: Config, allowed: tuple[str, ...]) -> tuple[str, int]:
    """How scales are shared by symmetric integers: strategy, and group size where it is "group"."""
    require(weights, "symmetric", (True,), True)
    strategy = str(require(weights, "strategy", allowed))
    return strategy, require(weights, "group_size", GROUP_SIZES) if strategy == "group" else 0


def _compressed_int4(group: Config, weights: Config) -> WeightScheme:
    strategy = require(weights, "strategy", ("group", "channel"))
    size = require(weights, "group_size", GROUP_SIZES) if strategy == "group" else 0
    symmetric = require(weights, "symmetric", (True, False), True)
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
    ("int", 8, "pack-quantized"): _compressed_words_int8,
    ("int", 4, "pack-quantized"): _compressed_int4,
    ("float", 8, "mxfp8-quantized"): _compressed_mxfp8,
    ("float", 4, "nvfp4-pack-quantized"): _compressed_nvfp4,
    ("float", 4, "mxfp4-pack-quantized"): _compressed_mxfp4,
}


# -1: a scale per row.
_SIZES = (*GROUP_SIZES, -1)
# Version 1 stores zero points less one.
_ZEROS_OFFSETS: Mapping[str, int] = {"gptq": 1, "gptq_v2": 0}
_FLOAT_BITS = 16


def awq(config: Config) -> tuple[WeightScheme, ...]:
    """AutoAWQ. Raises CheckpointError."""
    require(config, "bits" if "bits" in config else "w_bit", (4,))
    require({"version": str(config.get("version", "gemm")).lower()}, "version", ("gemm",))
    size = require(config, "group_size" if "group_size" in config else "q_group_size", _SIZES)
    return (schemes.awq(max(size, 0), bool(config.get("zero_point", True))),)


def gptq(config: Config) -> tuple[WeightScheme, ...]:
    """AutoGPTQ, and GPTQModel with its rules for single modules (`dynamic`). Raises CheckpointError."""
    return tuple(_gptq_rules(config))


def _gptq_rules(config: Config) -> Iterator[WeightScheme]:
    for pattern, changes in require_object(config, "dynamic", {}).items():
        # "-:": modules that were left alone, which are plain tensors.
        if not pattern.startswith("-:"):
            yield _for_pattern(pattern.removeprefix("+:"), _gptq({**config, **changes}))
    yield _gptq(config)


def _gptq(config: Config) -> WeightScheme:
    bits = require(config, "bits", (4, 8))
    size = require(config, "group_size", _SIZES)
    # Columns in the order of activations: their groups are scattered over the row, unless they were fixed
    # before, or there is but one.
    ordered = require(config, "desc_act", (True, False), False) and not config.get("static_groups")
    offset = _ZEROS_OFFSETS[require(config, "checkpoint_format", tuple(_ZEROS_OFFSETS), "gptq")]
    # Zero points of 8 bits are not known to kernels.
    symmetric = require(config, "sym", (True, False) if bits == 4 else (True,), True)
    scheme = (
        schemes.gptq(max(size, 0), symmetric, offset)
        if bits == 4
        else schemes.gptq_int8(max(size, 0), offset)
    )
    return schemes.reordered(scheme) if ordered and size > 0 else scheme


def _for_pattern(pattern: str, scheme: WeightScheme) -> WeightScheme:
    return schemes.for_targets(scheme, (f"re:{pattern}",))


def auto_round(config: Config) -> tuple[WeightScheme, ...]:
    """AutoRound's own configuration of the tensors of AutoGPTQ or AutoAWQ. Raises CheckpointError."""
    require(config, "data_type", ("int",), "int")
    packing = require(config, "packing_format", tuple(_PACKINGS), "auto_round:auto_gptq")
    return tuple(_auto_round_rules(config, _PACKINGS[packing]))


def _auto_round_rules(config: Config, gptq_like: bool) -> Iterator[WeightScheme]:
    """Yields the modules that differ first: those of equal settings share a scheme."""
    alike: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for module, changes in require_object(config, "extra_config", {}).items():
        if not isinstance(changes, dict):
            raise unsupported("extra_config", {module: changes}, "an object per module")
        changed = {key: changes[key] for key in ("bits", "group_size", "sym") if changes.get(key) is not None}
        # Modules of 16 bits were left alone.
        if changed.get("bits", 0) < _FLOAT_BITS:
            alike.setdefault(tuple(sorted(changed.items())), []).append(module)
    for settings, modules in alike.items():
        scheme = _auto_round_scheme({**config, **dict(settings)}, gptq_like)
        yield schemes.for_targets(scheme, tuple(map(_as_target, modules)))
    yield _auto_round_scheme(config, gptq_like)


def _auto_round_scheme(config: Config, gptq_like: bool) -> WeightScheme:
    if gptq_like:
        return _gptq({key: config[key] for key in ("bits", "group_size", "sym") if key in config})
    return awq({"bits": config.get("bits"), "group_size": config.get("group_size")})[0]


def _as_target(module: str) -> str:
    """Returns AutoRound searches patterns anywhere in a name; plain names are whole ones."""
    return f"re:.*(?:{module})" if re.search(r"[*+?^$()\[\]{}|\\]", module) else module


# Whether tensors are AutoGPTQ's; else AutoAWQ's.
_PACKINGS: Mapping[str, bool] = {"auto_round:auto_gptq": True, "auto_round:auto_awq": False}


_METHODS: Mapping[str, Callable[[Config], tuple[WeightScheme, ...]]] = {
    "auto-round": auto_round,
    "awq": awq,
    "compressed-tensors": read_groups,
    "fbgemm_fp8": _fbgemm_fp8,
    "fp8": _fp8,
    "gptq": gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "quark": _quark,
}
