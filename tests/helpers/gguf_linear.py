"""What llama.cpp's converter does to the weights of linear attention and of norms around it.

Rearrangements are given as positions: the converter's steps applied to the numbers of a tensor's elements, so
that values that were quantised find their way back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.helpers.gguf_conversion import Converted, Function, same
from tests.helpers.gguf_metadata import LINEAR, MAMBA2


def _tiled(config: Any, places: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Value heads of one key head, which are neighbours, apart."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    shape = places.shape
    parts = places.reshape(*shape[:axis], keys, values // keys, -1, *shape[axis + 1 :])
    return parts.transpose(axis, axis + 1).reshape(shape)


def _after_keys(config: Any, places: torch.Tensor) -> torch.Tensor:
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat((places[:before], _tiled(config, places[before:])))


def _by_kind(config: Any, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, keys and values of all heads; gates of all."""
    keys = config.linear_num_key_heads
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    widths = [config.linear_key_head_dim] * 2 + [values] * 2
    width = places.shape[-1]
    by_head = places.view(keys, -1, width)
    *mixed, gates = (part.reshape(-1, width) for part in torch.split(by_head, widths, dim=1))
    return torch.cat(mixed), gates


def linear_tensors(config: Any, name: str, shape: torch.Size, split: bool) -> Iterator[Converted]:
    """Nothing where the converter takes a tensor as any other; `split`: not as early files had it."""
    places = torch.arange(shape.numel()).reshape(shape)
    if config.model_type == "jamba" and name.endswith("A_log"):
        yield Converted(name, places, lambda values: -values.exp(), lambda values: (-values).log())
    elif config.model_type == "jamba" and name.endswith("conv1d.weight"):
        yield Converted(name, places.squeeze(1))
    elif config.model_type == "jamba" and ".feed_forward.experts." in name:
        # Gate, then up, in memory; in the file apart, under the names of most families.
        block, last = f"blk.{name.split('.')[2]}", name.rpartition(".")[2]
        parts = (
            {"down": places}
            if last == "down_proj"
            else dict(zip(("gate", "up"), places.chunk(2, dim=1), strict=True))
        )
        for which, part in parts.items():
            yield Converted(f"{block}.ffn_{which}_exps.weight", part, gguf=True)
    elif config.model_type == "lfm2_moe":
        yield from _lfm2_tensors(name, places)
    if config.model_type == "step3p5" and name.endswith("norm.weight"):
        yield Converted(name, places, lambda values: values + 1, lambda values: values - 1)
    if config.model_type == "kimi_linear":
        yield from _kimi_tensors(name, places)
    if config.model_type in MAMBA2:
        yield from _mamba2_tensors(config, name, places)
    if config.model_type not in LINEAR:
        return
    tiled = config.model_type != "qwen3_next"
    if config.model_type == "qwen4_exp_text" and (own := list(_qwen4_tensors(config, name, places))):
        yield from own
        return
    stem, _, last = name.partition("linear_attn.")
    if name.endswith("norm.weight") and last != "norm.weight":
        yield Converted(name, places, lambda values: values + 1, lambda values: values - 1)
    elif last == "A_log":
        order = _tiled(config, places) if tiled else places
        yield Converted(name, order, lambda values: -values.exp(), lambda values: (-values).log())
    elif last == "dt_bias":
        yield Converted(f"{stem}linear_attn.dt_proj.bias", _tiled(config, places) if tiled else places)
    elif last == "conv1d.weight":
        squeezed = places.squeeze(1)
        yield Converted(name, _after_keys(config, squeezed) if tiled else squeezed)
    elif last == "in_proj_qkvz.weight" and split:
        block = f"blk.{name.split('.')[2]}"
        mixed, gates = _by_kind(config, places)
        yield Converted(f"{block}.attn_qkv.weight", mixed, gguf=True)
        yield Converted(f"{block}.attn_gate.weight", gates, gguf=True)
    elif last == "in_proj_qkv.weight":
        yield Converted(name, _after_keys(config, places))
    elif last in ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"):
        yield Converted(name, _tiled(config, places))
    elif last == "out_proj.weight" and tiled:
        yield Converted(name, _tiled(config, places, axis=1))


# Of modules that no other family has, below their layer or in the place of the last norm.
_MIXED = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}


def _qwen4_tensors(config: Any, name: str, places: torch.Tensor) -> Iterator[Converted]:
    """Norms have one added; one projection of queries and a key is two."""
    module, _, _ = name.removesuffix(".weight").rpartition(".")
    last, block = name.removesuffix(".weight").rpartition(".")[2], ""
    if ".layers." in name:
        block = f"blk.{name.split('.')[2]}"
    plus_one: tuple[Function, Function] = (lambda values: values + 1), (lambda values: values - 1)
    if last in _MIXED:
        kind = {"attn_hyper_connection": "hc_attn", "mlp_hyper_connection": "hc_ffn"}
        stem = f"{block}.{kind[module.rpartition('.')[2]]}" if ".layers." in name else "output_hc"
        forward, backward = plus_one if last == "hc_norm" else (same, same)
        yield Converted(f"{stem}_{_MIXED[last]}.weight", places, forward, backward, gguf=True)
    elif last == "index_qk_proj":
        rows = config.indexer_n_heads * config.indexer_head_dim
        for part, own in (("q", places[:rows]), ("k", places[rows:])):
            yield Converted(f"{block}.indexer.{part}_proj.weight", own, gguf=True)
    elif last in ("q_layernorm", "k_layernorm"):
        yield Converted(f"{block}.indexer.{last[0]}_norm.weight", places, *plus_one, gguf=True)
    elif last == "ngram_embedding":
        yield Converted("per_layer_token_embd.weight", places, gguf=True)
    elif ".ple." in name and last.startswith("norm_"):
        yield Converted(f"{block}.ple_{last}.weight", places, *plus_one, gguf=True)
    elif ".ple." in name:
        stored = places.squeeze(1) if last == "conv1d" else places
        yield Converted(f"{block}.ple_{last.removesuffix('_proj')}.weight", stored, gguf=True)


def _mamba2_tensors(config: Any, name: str, places: torch.Tensor) -> Iterator[Converted]:
    """Numbers of heads are columns, the norm has a row for each group; modules have Nemotron's published
    names.
    """
    is_granite = config.model_type == "granitemoehybrid"
    published = name if is_granite else name.replace("model.", "backbone.")
    stem, _, last = published.rpartition(".")
    block = f"blk.{name.removeprefix('model.layers.').partition('.')[0]}"
    if last == "A_log":
        yield Converted(
            published, places[:, None], lambda values: -values.exp(), lambda values: (-values).log()
        )
    elif last == "D":
        yield Converted(published, places[:, None])
    elif last == "dt_bias":
        yield Converted(f"{stem}.dt_proj.bias" if is_granite else f"{stem}.dt.bias", places)
    elif published.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        yield Converted(published, places.view(config.mamba_n_groups if is_granite else config.n_groups, -1))
    elif published.endswith("conv1d.weight"):
        yield Converted(published, places.squeeze(1))
    elif ".experts." in published and not is_granite:
        # In memory all experts are one tensor without a suffix.
        yield Converted(
            f"{published.replace('backbone.', 'model.').replace('.mixer.', '.mlp.')}.weight", places
        )
    elif last == "e_score_correction_bias":
        yield Converted(f"{stem}.e_score_correction.bias", places)
    elif published.endswith("block_sparse_moe.router.weight"):
        yield Converted(f"{stem}.layer.weight", places)
    elif published.endswith("block_sparse_moe.experts.down_proj"):
        yield Converted(f"{block}.ffn_down_exps.weight", places, gguf=True)
    elif published.endswith(("shared_mlp.input_linear.weight", "block_sparse_moe.experts.gate_up_proj")):
        gate, up = places.chunk(2, dim=-2)
        kind = "shexp" if "shared" in published else "exps"
        yield Converted(f"{block}.ffn_gate_{kind}.weight", gate, gguf=True)
        yield Converted(f"{block}.ffn_up_{kind}.weight", up, gguf=True)
    elif is_granite and published.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in published else config.num_key_value_heads
        pairs = places.view(heads, 2, -1, places.shape[1]).transpose(1, 2)
        yield Converted(published, pairs.reshape(places.shape))
    elif published != name:
        yield Converted(published, places)


def _lfm2_tensors(name: str, places: torch.Tensor) -> Iterator[Converted]:
    """Yields the experts by names that most families have, one number per tap and channel."""
    block, (stem, _, last) = (
        f"blk.{name.removeprefix('model.layers.').partition('.')[0]}",
        name.rpartition("."),
    )
    if name.endswith("conv.conv.weight"):
        yield Converted(name, places.squeeze(1))
    elif last == "expert_bias":
        yield Converted(f"{block}.exp_probs_b.bias", places, gguf=True)
    elif stem.endswith("experts"):
        gate_up = dict(zip(("gate", "up"), places.chunk(2, dim=1), strict=True))
        for which, part in ({"down": places} if last == "down_proj" else gate_up).items():
            yield Converted(f"{block}.ffn_{which}_exps.weight", part, gguf=True)


def _kimi_tensors(name: str, places: torch.Tensor) -> Iterator[Converted]:
    """In memory one convolution, and a module for decays, which were published as part of the layer."""
    stem, _, last = name.replace("forget_gate.", "").rpartition(".")
    if last == "A_log":
        yield Converted(f"{stem}.A_log", places, lambda values: -values.exp(), lambda values: (-values).log())
    elif last == "dt_bias":
        yield Converted(f"{stem}.dt_proj.bias", places)
    elif name.endswith("conv1d.weight"):
        block = f"blk.{name.split('.')[2]}"
        for part, own in zip("qkv", places.chunk(3), strict=True):
            stored = own.squeeze(1)[None, :, None]
            yield Converted(f"{block}.ssm_conv1d_{part}.weight", stored, gguf=True)
    elif "forget_gate." in name:
        yield Converted(f"{stem}.{last}", places)
