"""Schemes of AutoAWQ, AutoGPTQ and GPTQModel, and AutoRound: integers in words, everything transposed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from moebius.checkpoint import weight_schemes as schemes
from moebius.checkpoint.quantisation_keys import GROUP_SIZES, Config, require, require_object, unsupported
from moebius.checkpoint.weight_schemes import WeightScheme

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
    # Rows in the order of activations: their groups are scattered over the whole row.
    require(config, "desc_act", (False,), False)
    offset = _ZEROS_OFFSETS[require(config, "checkpoint_format", tuple(_ZEROS_OFFSETS), "gptq")]
    # Zero points of 8 bits are not known to kernels.
    symmetric = require(config, "sym", (True, False) if bits == 4 else (True,), True)
    return (
        schemes.gptq(max(size, 0), symmetric, offset)
        if bits == 4
        else schemes.gptq_int8(max(size, 0), offset)
    )


def _for_pattern(pattern: str, scheme: WeightScheme) -> WeightScheme:
    return schemes.for_targets(scheme, (f"re:{pattern}",))


def auto_round(config: Config) -> tuple[WeightScheme, ...]:
    """AutoRound's own configuration of the tensors of AutoGPTQ or AutoAWQ. Raises CheckpointError."""
    require(config, "data_type", ("int",), "int")
    packing = require(config, "packing_format", tuple(_PACKINGS), "auto_round:auto_gptq")
    return tuple(_auto_round_rules(config, _PACKINGS[packing]))


def _auto_round_rules(config: Config, gptq_like: bool) -> Iterator[WeightScheme]:
    """Modules that differ first: those of equal settings share a scheme."""
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
    """AutoRound searches patterns anywhere in a name; plain names are whole ones."""
    return f"re:.*(?:{module})" if re.search(r"[*+?^$()\[\]{}|\\]", module) else module


# Whether tensors are AutoGPTQ's; else AutoAWQ's.
_PACKINGS: Mapping[str, bool] = {"auto_round:auto_gptq": True, "auto_round:auto_awq": False}
