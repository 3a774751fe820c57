"""Reads a checkpoint's configuration: config.json, or the metadata of a GGUF model, by its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import structlog

from moebius.checkpoint.config_file import read_config_file, read_json
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.files import companion_directory, is_gguf
from moebius.models.config import DTYPE_BYTES, DTypeName, ModelConfig, ModelConfigError, ModelOverrides
from moebius.models.dense import DENSE_FAMILIES
from moebius.models.eagle3 import with_eagle3
from moebius.models.family import Family
from moebius.models.geometry import MoeGeometry
from moebius.models.keys import HfKeys
from moebius.models.layers.router import RouterConfig
from moebius.models.mtp import check_heads, with_heads
from moebius.models.registry import FAMILIES, dense_refusal, gguf_family, known_families
from moebius.models.small_model import with_small_model
from moebius.models.tied_head import has_own_head
from moebius.models.vision import read_vision

log = structlog.get_logger(__name__)

# AWQ and GPTQ checkpoints say float16, which their authors' kernels compute in. Unless it is asked for by
# name they are computed in bfloat16, in which no activation can overflow.
_COMPUTED_IN: Mapping[str, str] = {"float16": "bfloat16"}

# What a draft model may be besides.
_DENSE = "".join(f"{name}, " for name in DENSE_FAMILIES)


def read_config(directory: str | Path) -> dict[str, Any]:
    """Reads `config.json`, or a GGUF model's metadata, as a mapping; see `flat_config`.

    Raises CheckpointError naming the file.
    """
    if not is_gguf(directory):
        return read_config_file(directory)
    # Here, because few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.config import gguf_config
    from moebius.checkpoint.gguf.model import open_gguf

    model = open_gguf(directory)
    family, spec = gguf_family(model)
    return gguf_config(model, family.model_type, spec)


def read_model_config(directory: str | Path, overrides: ModelOverrides | None = None) -> ModelConfig:
    """Returns what the model in a directory (or GGUF file) is; `generation_config.json` counts where there is
    one.

    Where the head may be the embedding, the stored tensors decide. Raises ModelConfigError naming the key,
    its value and what is allowed, CheckpointError for such tensors that can not be read, and as
    `mtp.check_heads`, `eagle3.with_eagle3` and `small_model.with_small_model`.
    """
    directory = Path(directory)
    config = _described(directory, overrides or ModelOverrides())
    check_heads(config, directory)
    config = _with_own_head(directory, config)
    generation = companion_directory(directory) / "generation_config.json"
    if generation.exists():
        extra = HfKeys(str(generation), read_json(generation)).integers("eos_token_id")
        ids = dict.fromkeys((*config.eos_token_ids, *extra))
        config = replace(config, eos_token_ids=tuple(ids))
    if overrides is not None and overrides.draft_model:
        config = with_eagle3(config, overrides.draft_model)
    if overrides is not None and overrides.small_model:
        config = with_small_model(config, _small(overrides.small_model), overrides.small_model)
    for remark in config.remarks:
        log.warning(remark, model_type=config.model_type)
    if config.unread_keys:
        log.warning(
            "config.json has keys that are not used",
            keys=list(config.unread_keys),
            model_type=config.model_type,
        )
    return config


def read_geometry(directory: str | Path, top_k: int | None = None, mtp_heads: int = 0) -> MoeGeometry:
    """Reads the routed experts' part of the same description; the others are `ModelOverrides`' fields.

    Raises ModelConfigError naming the key, its value and what is allowed, and as `mtp.check_heads`.
    """
    config = _described(Path(directory), ModelOverrides(top_k=top_k, mtp_heads=mtp_heads))
    check_heads(config, directory)
    return MoeGeometry.of(config)


def check_described(directory: str | Path) -> None:
    """Raises ModelConfigError where no model of this configuration could be served, whatever is asked for.

    Reads no weights: they need not be there yet.
    """
    _described(Path(directory), ModelOverrides(language_model_only=True))


def _small(directory: str) -> ModelConfig:
    """Returns what a small model is, which may be dense."""
    families = {**DENSE_FAMILIES, **FAMILIES}
    config = _described(Path(directory), ModelOverrides(language_model_only=True), families)
    return _with_own_head(Path(directory), config)


def _described(
    directory: Path, overrides: ModelOverrides, families: Mapping[str, Family] = FAMILIES
) -> ModelConfig:
    """Reads the configuration alone, and no tensor."""
    source = str(directory if is_gguf(directory) else directory / "config.json")
    try:
        hf = HfKeys(source, read_config(directory))
    except ModelConfigError:
        raise
    except CheckpointError as error:
        raise ModelConfigError(str(error)) from error
    model_type = hf.string("model_type")
    family = families.get(model_type)
    if family is None and model_type in DENSE_FAMILIES:
        raise ModelConfigError(
            f"{source}: model_type {model_type!r} is a dense model; {dense_refusal()}. It can draft "
            "tokens for one of them (speculative_model)"
        )
    if family is None:
        known = _DENSE * (families is not FAMILIES) + known_families()
        raise hf.error("model_type", model_type, known)
    config = _apply_overrides(hf, family.read(hf), overrides)
    vision = read_vision(hf, family, wanted=not overrides.language_model_only)
    if config.routed:
        _check_router(hf, next(iter(config.routed.values())).router)
    if overrides.mtp_heads:
        config = with_heads(config, overrides.mtp_heads, source)
    return replace(config, vision=vision, unread_keys=hf.unread)


def _check_router(hf: HfKeys, router: RouterConfig) -> None:
    experts, groups = router.num_choices, router.num_groups
    if router.weighs_inputs and router.top_k != 1:
        raise hf.error("top_k (num_experts_per_tok)", router.top_k, "1, where experts' inputs are weighed")
    if experts % groups:
        raise hf.error("n_group", groups, f"a divisor of the number of experts ({experts})")
    if router.top_groups > groups:
        raise hf.error("topk_group", router.top_groups, f"at most n_group ({groups})")
    if router.top_groups < groups and experts // groups < 2:
        raise hf.error("n_group", groups, f"groups of at least 2 of the {experts} experts")
    reachable = experts // groups * router.top_groups
    if not 1 <= router.top_k <= reachable:
        raise hf.error("top_k (num_experts_per_tok)", router.top_k, f"1 to {reachable}")


def _apply_overrides(hf: HfKeys, config: ModelConfig, overrides: ModelOverrides) -> ModelConfig:
    if overrides.top_k is not None:
        config = config.with_top_k(overrides.top_k)
    if overrides.max_model_len is not None:
        if overrides.max_model_len > config.max_model_len:
            raise hf.error("max_model_len", overrides.max_model_len, f"at most {config.max_model_len}")
        config = config.with_max_model_len(overrides.max_model_len)
    stored: str = config.dtype
    dtype = _COMPUTED_IN.get(stored, stored) if overrides.dtype == "auto" else overrides.dtype
    if dtype not in DTYPE_BYTES:
        raise hf.error("dtype", dtype, ", ".join(sorted(DTYPE_BYTES)))
    return replace(config, dtype=cast(DTypeName, dtype))


def _with_own_head(directory: Path, config: ModelConfig) -> ModelConfig:
    """Untied where another head is stored than the embedding, as transformers has it."""
    if not (config.tie_word_embeddings and has_own_head(directory, config)):
        return config
    log.warning("tie_word_embeddings is true, but a head of other values is stored: it is used")
    return replace(config, tie_word_embeddings=False)
