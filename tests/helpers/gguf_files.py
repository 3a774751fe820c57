"""GGUF files of transformers models, written by the package `gguf` under the names that its own tables give.

Weights are quantised on the way, and the model gets the values that the package dequantises, so that it says
what the file says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
    quants,
)
from numpy.typing import NDArray

from tests.helpers.deepseek_v41_reference import write_tokenizer
from tests.helpers.gguf_conversion import Converted
from tests.helpers.gguf_linear import linear_tensors
from tests.helpers.gguf_metadata import ARCHITECTURES, NEWER, write_metadata
from tests.helpers.gguf_newer import ARCHITECTURES_OF_TODAY, newer_tensors

# Position of the float16 factors in a block of types that the package can only dequantise.
_FACTORS = {
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S"), (0,)),
    "IQ1_M": (48,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
# What codes with mins lie around, which is the second factor's.
_MIDDLES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}


@dataclass(frozen=True)
class GgufTypes:
    """Quantisation types by what tensors are; vectors and routers are float32 as llama.cpp writes them."""

    gate_up: str = "F32"
    down: str = "F32"
    other: str = "F32"
    # Of the first layer, where it is not `down`: llama.cpp gives some layers more bits.
    first_down: str = ""
    up: str = ""  # Where it is not `gate_up`.
    # Of gate, up and down of each layer, instead of all of these.
    experts: tuple[tuple[str, str, str], ...] = ()

    def of(self, name: str, shape: tuple[int, ...]) -> str:
        """Returns the type of a GGUF tensor."""
        is_plain = ".ffn_gate_inp." in name or ".ssm_conv1d" in name or name.endswith("_norm.weight")
        if len(shape) == 1 or is_plain or not name.endswith(".weight"):
            return "F32"
        if "_exps." in name:
            if self.experts:
                which = ("gate", "up", "down").index(name.split("_")[1])
                return self.experts[int(name.split(".")[1])][which]
            down = self.first_down if self.first_down and name.startswith("blk.0.") else self.down
            gate_up = self.up if self.up and ".ffn_up_exps." in name else self.gate_up
            return down if ".ffn_down_exps." in name else gate_up
        weights, _ = GGML_QUANT_SIZES[GGMLQuantizationType[self.other]]
        # llama.cpp falls back likewise where a row is no multiple of the block.
        return self.other if shape[-1] % weights == 0 else "F16"


def random_blocks(kind: str, rows: int, cols: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Returns uint8 `[rows, bytes]` of a type that only dequantises, its values about as large as a
    layer's.
    """
    weights, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (rows * cols // weights, nbytes), np.uint8)
    factor = np.float32(1)
    for _ in range(2):
        for number, place in enumerate(_FACTORS[kind]):
            value = factor * (1 if number == 0 else _MIDDLES[kind])
            _write_factor(kind, blocks[:, place:], np.float16(value))
        values = quants.dequantize(blocks, GGMLQuantizationType[kind])
        factor = factor * np.float32(1.5 / cols**0.5) / values.std()
    return blocks.reshape(rows, -1)


def _write_factor(kind: str, at: NDArray[np.uint8], factor: np.float16) -> None:
    """IQ1_M has a factor in the upper four bits of four words, other types in two bytes."""
    if kind != "IQ1_M":
        at[:, :2] = factor.reshape(1).view(np.uint8)
        return
    for word in range(4):
        nibble = int(factor.view(np.uint16)) >> (4 * word) & 15
        at[:, 2 * word + 1] = at[:, 2 * word + 1] & 15 | nibble << 4


def encode(kind: str, values: NDArray[np.float32], random: np.random.Generator) -> NDArray[Any]:
    """Returns what a file stores: rows of blocks, near `values` unless the type only dequantises."""
    if kind in _FACTORS:
        rows = values.size // values.shape[-1]
        blocks = random_blocks(kind, rows, values.shape[-1], random)
        return blocks.reshape(*values.shape[:-1], -1)
    return quants.quantize(values, GGMLQuantizationType[kind])


# Names that the package's table has without what follows them.
_GEMMA4_NAMES = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}
_GEMMA4 = tuple(_GEMMA4_NAMES)


def _views(
    config: Any, name: str, values: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
    """Names as llama.cpp's converter maps them, views in its orientation, and their shapes there."""
    if config.model_type == "gemma4_text" and name.endswith(_GEMMA4):
        layer = name.partition(".layers.")[2].partition(".")[0]
        (stored,) = (gguf for published, gguf in _GEMMA4_NAMES.items() if name.endswith(published))
        yield f"blk.{layer}.{stored}", values, tuple(values.shape)
    elif config.model_type == "gemma4_text" and "experts." in name:
        yield f"{name}.weight", values, tuple(values.shape)
    elif "experts.gate_up_proj" in name:
        kind = "bias" if name.endswith("_bias") else "weight"
        stem = name.partition("gate_up_proj")[0]
        if config.model_type == "llama4_text":
            parts = tuple(values.transpose(1, 2).chunk(2, dim=1))
        elif config.model_type == "gpt_oss":
            last = values.transpose(1, 2) if kind == "weight" else values
            parts = last[:, 0::2], last[:, 1::2]
        else:
            parts = tuple(values.chunk(2, dim=1))
        for which, part in zip(("gate", "up"), parts, strict=True):
            yield f"{stem}{which}_proj.{kind}", part, tuple(part.shape)
    elif "experts.down_proj" in name and "shared" not in name:
        kind = "bias" if name.endswith("_bias") else "weight"
        is_turned = config.model_type in ("gpt_oss", "llama4_text") and kind == "weight"
        turned = values.transpose(1, 2) if is_turned else values
        yield f"{name.removesuffix('_bias')}.{kind}", turned, tuple(turned.shape)
    elif config.model_type in ("llama", "mixtral") and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        pairs = values.view(heads, 2, -1, values.shape[1]).transpose(1, 2)
        yield name, pairs, tuple(values.shape)
    elif name.endswith("e_score_correction_bias"):
        mapped = name.replace("_correction_bias", "_correction.bias").replace(
            "gate.moe_statics", "moe_statics"
        )
        yield mapped, values, (values.numel(),)
    elif name.endswith("shared_expert_gate.weight"):
        yield name, values, (values.numel(),)
    elif name.endswith(("sinks", "attention_sink_bias")):
        yield f"{name}.weight", values, tuple(values.shape)
    else:
        yield name, values, tuple(values.shape)


def _split_latent(config: Any, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """kv_b as newer files have it, in two."""
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    by_head = values.view(heads, -1, values.shape[1])
    return {"attn_k_b": by_head[:, :nope].transpose(1, 2), "attn_v_b": by_head[:, nope:]}


def _named(names: Any, one: Converted) -> str:
    found: str | None = one.name if one.gguf else names.get_name(one.name, try_suffixes=(".weight", ".bias"))
    assert found is not None, f"the package has no name for {one.name}"
    return found


def _converted(
    values: torch.Tensor, one: Converted, types: GgufTypes, names: Any, random: np.random.Generator
) -> tuple[NDArray[Any], str]:
    """Returns what is stored, which the model's weights are rounded to."""
    kind = types.of(_named(names, one), tuple(one.places.shape))
    array = encode(kind, one.forward(values.flatten()[one.places]).numpy(), random)
    exact = torch.from_numpy(np.array(quants.dequantize(array, GGMLQuantizationType[kind])))
    values.view(-1)[one.places.flatten()] = one.backward(exact).flatten()
    return array, kind


def _text_config(model: Any) -> Any:
    """Returns the text config of the language model, which transformers may have inside of another."""
    inner = model.config.get_text_config()
    is_inside = model.config.model_type == "step3p7" or inner.model_type in ARCHITECTURES_OF_TODAY
    return inner if is_inside else model.config


def _gguf_names(config: Any, architecture: str) -> Any:
    """Returns the package's table of the architecture; None: it has none."""
    if config.model_type in ARCHITECTURES_OF_TODAY:
        return None
    return get_tensor_name_map(_package_architecture(config, architecture), config.num_hidden_layers)


def _package_architecture(config: Any, architecture: str) -> MODEL_ARCH:
    return MODEL_ARCH[architecture or ARCHITECTURES[config.model_type]]


def _architecture(config: Any, architecture: str) -> str:
    """`general.architecture`."""
    own = architecture if architecture.islower() else NEWER.get(config.model_type)
    return own or MODEL_ARCH_NAMES[_package_architecture(config, architecture)]


def _text_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names of the language model by itself."""
    for name, values in model.state_dict().items():
        if not name.startswith(("model.vision", "model.visual", "model.multi_modal_projector")):
            yield name.replace("model.language_model.", "model."), values


@torch.no_grad()
def gguf_tensors(
    model: Any, types: GgufTypes, *, latent_split: bool = True, architecture: str = ""
) -> dict[str, tuple[NDArray[Any], str]]:
    """Returns stored arrays and their types by GGUF name; rounds the model's own weights to what they say."""
    random = np.random.default_rng(7)
    config = _text_config(model)
    names = _gguf_names(config, architecture)
    found: dict[str, tuple[NDArray[Any], str]] = {}
    for name, values in _text_tensors(model):
        is_copy = name == "lm_head.weight" and config.tie_word_embeddings
        if name.endswith(".tid2eid"):
            layer = name.split(".")[2]
            found[f"blk.{layer}.ffn_gate_tid2eid.weight"] = values.numpy().astype(np.int32), "I32"
        if is_copy or not values.is_floating_point():
            continue
        if names is None:
            linear = list(newer_tensors(config, name, values.shape))
        else:
            linear = list(linear_tensors(config, name, values.shape, latent_split))
        if linear:
            for one in linear:
                own, (array, kind) = _named(names, one), _converted(values, one, types, names, random)
                # The next expert of a stack, or the whole tensor.
                found[own] = np.concatenate([found[own][0], array]) if own in found else array, kind
            continue
        for mapped, view, shape in _views(config, name, values):
            gguf_name = mapped
            if not mapped.startswith("blk."):
                gguf_name = names.get_name(mapped, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None, f"the package has no name for {mapped}"
            views = {gguf_name: (view, shape)}
            if latent_split and ".attn_kv_b." in gguf_name:
                parts = _split_latent(config, values)
                views = {
                    gguf_name.replace("attn_kv_b", part): (one, tuple(one.shape))
                    for part, one in parts.items()
                }
            for stored_name, (stored, stored_shape) in views.items():
                kind = types.of(stored_name, stored_shape)
                array = encode(kind, stored.reshape(stored_shape).contiguous().numpy(), random)
                exact = quants.dequantize(array, GGMLQuantizationType[kind])
                stored.copy_(torch.from_numpy(np.array(exact)).reshape(stored.shape))
                found[stored_name] = array, kind
    return found


def _fused(tensors: dict[str, tuple[NDArray[Any], str]]) -> dict[str, tuple[NDArray[Any], str]]:
    """Gate and up of all experts one after the other, as the converter writes them when asked to."""
    found = dict(tensors)
    for name in [name for name in tensors if ".ffn_gate_exps." in name]:
        gate, kind = found.pop(name)
        up, _ = found.pop(name.replace("ffn_gate_exps", "ffn_up_exps"))
        found[name.replace("ffn_gate_exps", "ffn_gate_up_exps")] = np.concatenate((gate, up), axis=1), kind
    return found


def _prediction_layer(
    tensors: dict[str, tuple[NDArray[Any], str]], position: int
) -> dict[str, tuple[NDArray[Any], str]]:
    """Returns the last decoder layer once more, and the tensors that join it to the model."""
    last, block = f"blk.{position - 1}.", f"blk.{position}."
    found = {name.replace(last, block): stored for name, stored in tensors.items() if name.startswith(last)}
    norm = tensors["output_hc_norm.weight" if "output_hc_norm.weight" in tensors else "output_norm.weight"]
    joined = prediction_projection(norm[0].shape[0]), "F32"
    found[f"{block}nextn.eh_proj.weight"] = joined
    return found | {f"{block}nextn.{name}.weight": norm for name in ("enorm", "hnorm", "shared_head_norm")}


def prediction_projection(hidden_size: int) -> NDArray[np.float32]:
    """`eh_proj` of the block for multi-token prediction, `[H, 2 H]`."""
    values = np.random.default_rng(5).standard_normal((hidden_size, 2 * hidden_size), np.float32)
    return values / np.float32((2 * hidden_size) ** 0.5)


def write_gguf(
    model: Any,
    path: Path,
    types: GgufTypes,
    *,
    latent_split: bool = True,
    max_tensors: int = 0,
    leave_out: str = "",
    prediction_layer: bool = False,
    architecture: str = "",
    fused: bool = False,
    describe: Callable[[GGUFWriter], None] | None = None,
) -> None:
    """The model's file, or its parts of at most `max_tensors`.

    `leave_out`: a tensor that is forgotten; `prediction_layer`: a block for multi-token prediction follows;
    `architecture`: a name in gguf.MODEL_ARCH that is not the family's first, or in small letters the file's;
    `fused`: gate and up in one; `describe`: adds metadata.
    """
    config = _text_config(model)
    writer = GGUFWriter(path, _architecture(config, architecture), split_max_tensors=max_tensors)
    write_metadata(writer, config, latent_split=latent_split, prediction_layers=int(prediction_layer))
    if describe is not None:
        describe(writer)
    if architecture == "QWEN3VLMOE":
        writer.add_rope_dimension_sections([3, 3, 2, 0])
        writer.add_num_deepstack_layers(3)
    tensors = gguf_tensors(model, types, latent_split=latent_split, architecture=architecture)
    if fused:
        tensors = _fused(tensors)
    if prediction_layer:
        tensors |= _prediction_layer(tensors, config.num_hidden_layers)
    for stored_name, (array, kind) in tensors.items():
        if stored_name != leave_out:
            writer.add_tensor(stored_name, array, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.model_type == "deepseek_v41":
        # Which tokens count as one is read off it.
        write_tokenizer(config.vocab_size, path.parent)
