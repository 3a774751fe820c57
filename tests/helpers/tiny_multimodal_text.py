"""Makes and publishes the text towers of multimodal families, for `tiny_models.TINY_MODELS`.

Transformers writes some of these checkpoints otherwise than they were released; `TextTower.publish` puts
names and layouts right. Vision towers are as small as they get: prompts here are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.helpers.tables import read_table

_VISION = read_table("tiny_text_towers.yaml")
Tensor = torch.Tensor


def _as_is(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    return name, tensor


def _transpose_experts(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Qwen3-VL: released as `[E, H, 2I]` and `[E, I, H]`."""
    return name, tensor.mT.contiguous() if ".experts." in name else tensor


def _kimi_names(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Kimi: decoder layers are `.layers.`, and the projector hangs outside of everything."""
    name = re.sub(r"^(language_model\.model\.)blocks\.", r"\1layers.", name)
    return name.removeprefix("model.") if name.startswith("model.mm_projector.") else name, tensor


def _without_vision(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    return None if name.startswith(("vision_model.", "vit_large_projector.")) else (name, tensor)


def _step_3_7_config(written: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    inner = _step_config(written, text)
    return {key: written[key] for key in ("vision_config", "image_token_id", "dtype")} | {
        "model_type": "step3p7",
        "text_config": inner,
    }


def _step_config(written: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    groups = {"num_attention_groups": text["num_key_value_heads"]}
    rest = {key: value for key, value in text.items() if key != "num_key_value_heads"}
    return {"model_type": "step3p5", "dtype": written["dtype"], **groups, **rest}


def _minimax_config(written: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """MiniMax-M3: sparse attention in a section, layers as lists of 0 and 1."""
    inner = dict(written["text_config"])
    sparse = {
        "use_sparse_attention": True,
        "sparse_num_index_heads": inner.pop("index_n_heads"),
        "sparse_index_dim": inner.pop("index_head_dim"),
        "sparse_block_size": inner.pop("index_block_size"),
        "sparse_topk_blocks": inner.pop("index_topk_blocks"),
        "sparse_local_block": inner.pop("index_local_blocks"),
        "sparse_init_block": 0,
        "sparse_score_type": "max",
        "sparse_attention_freq": [int(kind == "minimax_m3_sparse") for kind in inner.pop("layer_types")],
    }
    freq = [int(kind == "sparse") for kind in inner.pop("mlp_layer_types")]
    inner |= {"sparse_attention_config": sparse, "moe_layer_freq": freq, "hidden_act": "swigluoai"}
    inner.pop("moe_intermediate_size", None)
    return {key: value for key, value in written.items() if key != "merged_hidden_size"} | {
        "text_config": inner
    }


@dataclass(frozen=True)
class TextTower:
    """How a family nests its text model."""

    # Of transformers' classes.
    stem: str
    vision: dict[str, Any]
    # From what transformers writes to what was released: name and tensor, or None for what was not.
    published: Callable[[str, Tensor], tuple[str, Tensor] | None] = _as_is
    text_model_type: str | None = None
    # Whether experts were released as `[E, 2I, H]` and `[E, H, I]`, but are written one by one.
    fuses_experts: bool = False
    # Transformers' class of the model, where it is called otherwise.
    model_class: str | None = None
    # The same for config.json: of what was written and of what the model was made from.
    published_config: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None

    def config(self, text: dict[str, Any]) -> Any:
        """Transformers' configuration of the whole model."""
        import transformers

        if self.text_model_type is not None:
            text = {**text, "model_type": self.text_model_type}
        return getattr(transformers, f"{self.stem}Config")(
            text_config=text,
            vision_config=dict(self.vision),
            tie_word_embeddings=text.get("tie_word_embeddings", False),
        )

    def model(self, config: Any) -> Any:
        """Transformers' model of it."""
        import transformers

        name = self.model_class or f"{self.stem}ForConditionalGeneration"
        return getattr(transformers, name)(config)

    def publish(self, directory: Path, text: dict[str, Any] | None = None) -> None:
        """Rewrite what `save_pretrained` left; `text` is what the configuration was made from."""
        from safetensors.torch import load_file, save_file

        for file in directory.glob("*.safetensors"):
            renamed = (self.published(*item) for item in load_file(file).items())
            tensors = dict(item for item in renamed if item is not None)
            save_file(_fuse_experts(tensors) if self.fuses_experts else tensors, file)
        if self.published_config is not None:
            path = directory / "config.json"
            path.write_text(json.dumps(self.published_config(json.loads(path.read_text()), text or {})))
        index = directory / "model.safetensors.index.json"
        if index.exists():
            content = json.loads(index.read_text())
            nothing = torch.empty(0, 0)
            renamed = ((self.published(name, nothing), file) for name, file in content["weight_map"].items())
            names = {item[0]: file for item, file in renamed if item is not None}
            index.write_text(json.dumps(content | {"weight_map": names}))


class TextModel(TextTower):
    """A text model by itself, which was released with other names than transformers writes."""

    def config(self, text: dict[str, Any]) -> Any:
        import transformers

        return getattr(transformers, f"{self.stem}Config")(**text)

    def model(self, config: Any) -> Any:
        import transformers

        return getattr(transformers, f"{self.stem}ForCausalLM")(config)


def _ernie_config(written: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Returns the ernie config as Baidu writes it: in one level, sizes of either kind of experts in lists."""
    inner, vision = dict(written["text_config"]), dict(written["vision_config"])
    kinds, ropes = inner.pop("mlp_layer_types"), inner.pop("rope_parameters")
    sparse = [index for index, kind in enumerate(kinds) if kind == "sparse"]
    assert sparse == list(range(sparse[0], sparse[-1] + 1)), "a range of layers"
    inner |= {
        "moe_num_experts": [inner["moe_num_experts"]] * 2,
        "moe_layer_start_index": [sparse[0]] * 2,
        "moe_layer_end_index": [sparse[-1], sparse[0]],
        "moe_layer_interval": 1,
        "moe_use_aux_free": True,
        "rope_theta": ropes["rope_theta"],
        "rope_3d": True,
        "freq_allocation": ropes["mrope_section"][2],
    }
    merges = {"spatial_conv_size": vision.pop("spatial_merge_size"), "temporal_conv_size": 2}
    vision["mlp_ratio"] = vision.pop("intermediate_size") / vision["hidden_size"]
    tokens = {key: value for key, value in written.items() if key.endswith("_token_id")}
    tokens["im_patch_id"] = tokens.pop("image_token_id")
    top = {"model_type": "ernie4_5_moe_vl", "dtype": written["dtype"], "vision_config": vision}
    return inner | tokens | merges | top


class LongcatModel(TextModel):
    """Transformers also writes gate and up of choices without weights, which were never released."""

    def publish(self, directory: Path, text: dict[str, Any] | None = None) -> None:
        experts = (text or {})["n_routed_experts"]

        def published(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
            found = re.search(r"\.experts\.(\d+)\.", name)
            return None if found is not None and int(found[1]) >= experts else (name, tensor)

        TextModel(self.stem, {}, published, published_config=_longcat_config).publish(directory, text)


def _longcat_config(written: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Returns the longcat config as Meituan writes it."""
    own = {"attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
    return written | own | {"zero_expert_type": "identity"}


_HY_GATED = re.compile(r"\.(mlp|shared_experts)\.linear_gate\.")


def _hy_v4_names(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Hy4: transformers takes gates of MLPs for those of attention, and puts `hc_pre` elsewhere."""
    name = _HY_GATED.sub(r".\1.gate_proj.", name)
    if ".hc_pre.hc_head." in name:
        return name.replace(".hc_pre.hc_head.", ".hc_head."), tensor
    return re.sub(r"\.hc_pre\.(hc_\w+_layer)\.", r".\1.hc_pre.", name), tensor


def _hy_v4_config(written: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """With keys that transformers does not know, and another name of the attention."""
    kinds = ["deepseek_sparse_attention"] * written["num_hidden_layers"]
    own = {"enable_ihc": True, "gated_mla": True, "gating_type": "elementwise", "learnable_sink": True}
    return written | own | {"enable_lm_head_fp32": True, "layer_types": kinds}


class HyModel(TextModel):
    """Released with neighbours as rotary pairs, where transformers has them half a head apart."""

    def publish(self, directory: Path, text: dict[str, Any] | None = None) -> None:
        from safetensors.torch import load_file, save_file

        assert text is not None, "the sizes of heads say which rows are rotated"
        size, head = text["qk_rope_head_dim"], text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
        # Rows of a head, or of all that there is, whose last are rotated.
        rows = {"q_b_proj": head, "indexer.wq_b": text["index_head_dim"]}
        whole = ("kv_a_proj_with_mqa", "indexer.wk", "indexer.k_norm")
        for file in directory.glob("*.safetensors"):
            tensors = load_file(file)
            for name, tensor in tensors.items():
                module = name.split(".self_attn.")[-1].rpartition(".")[0]
                if module in rows or module in whole:
                    shape = (-1, rows.get(module, tensor.shape[0]), *tensor.shape[1:])
                    heads = tensor.view(shape).clone()
                    halves = heads[:, -size:].clone().chunk(2, dim=1)
                    heads[:, -size::2], heads[:, 1 - size :: 2] = halves
                    tensors[name] = heads.flatten(0, 1)
            save_file(tensors, file)
        super().publish(directory, text)


def _deepseek_v4_names(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """DeepSeek-V4: without a prefix, and norms of keys called so."""
    name = name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.")
    for written, released in (("embed_tokens.", "embed."), ("hc_head.hc_", "hc_head_")):
        name = name.replace(written, released)
    return name, tensor


def _deepseek_v4_config(written: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Returns the deepseek v4 config as DeepSeek writes it, where transformers has other keys since."""
    rates, ropes = written["compress_rates"], written["rope_parameters"]
    new = ("compress_rates", "rope_parameters", "partial_rotary_factor", "mlp_layer_types")
    kept = {key: value for key, value in written.items() if key not in new}
    scaling = {key: value for key, value in ropes["compress"].items() if key not in ("rope_theta", *new)}
    hashed = [kind == "hash_moe" for kind in written["mlp_layer_types"]]
    assert hashed == sorted(hashed, reverse=True), "hash layers come first"
    return kept | {
        "compress_rate_csa": rates["compressed_sparse_attention"],
        "compress_rate_hca": rates["heavily_compressed_attention"],
        "num_hash_layers": sum(hashed),
        "rope_scaling": {key: scaling[key] for key in scaling if key != "attention_factor"},
    }


def _fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Qwen3.5-MoE, in one file: all experts of a layer in two tensors."""
    apart = [name for name in tensors if re.search(r"\.experts\.\d+\.", name)]
    fused = {name: tensor for name, tensor in tensors.items() if name not in apart}
    for stem in sorted({re.split(r"\d+\.[a-z_]+\.weight$", name)[0] for name in apart}):
        experts = range(sum(name.startswith(stem) and name.endswith("up_proj.weight") for name in apart))
        gate, up, down = (
            torch.stack([tensors[f"{stem}{expert}.{part}_proj.weight"] for expert in experts])
            for part in ("gate", "up", "down")
        )
        fused |= {stem + "gate_up_proj": torch.cat((gate, up), dim=1), stem + "down_proj": down}
    return fused


TEXT_TOWERS: dict[str, TextTower] = {
    "deepseek_v4": TextModel("DeepseekV4", {}, _deepseek_v4_names, published_config=_deepseek_v4_config),
    "ernie4_5_vl_moe": TextTower("Ernie4_5_VLMoe", _VISION["ernie"]),
    "ernie4_5_moe_vl": TextTower("Ernie4_5_VLMoe", _VISION["ernie"], published_config=_ernie_config),
    "longcat_flash": LongcatModel("LongcatFlash", {}),
    "hy_v4": HyModel("HYV4", {}, _hy_v4_names, published_config=_hy_v4_config),
    "qwen3_5_moe": TextTower("Qwen3_5Moe", _VISION["qwen3_5"], fuses_experts=True),
    "qwen4_exp": TextTower("Qwen4Exp", _VISION["qwen3_5"], fuses_experts=True),
    "qwen3_vl_moe": TextTower("Qwen3VLMoe", _VISION["qwen3"], _transpose_experts),
    "glm4v_moe": TextTower("Glm4vMoe", _VISION["glm4"]),
    "glm5_next": TextTower("Glm5Next", _VISION["glm5"]),
    "kimi_k25": TextTower("Kimi_K25", _VISION["kimi"], _kimi_names, "deepseek_v3"),
    # A text model; transformers knows it as the text tower of its successor, with keys of its own.
    "step3p5": TextTower("Step3p7", _VISION["step"], _without_vision, published_config=_step_config),
    "step3p7": TextTower("Step3p7", _VISION["step"], published_config=_step_3_7_config),
    "llama4": TextTower("Llama4", _VISION["llama4"]),
    "minimax_m3_vl": TextTower(
        "MiniMaxM3VL",
        _VISION["minimax"],
        model_class="MiniMaxM3SparseForConditionalGeneration",
        published_config=_minimax_config,
    ),
    "gemma4": TextTower("Gemma4", {}),
    "mistral_large4": TextTower("MistralLarge4", _VISION["pixtral"]),
    "mistral3": TextTower("Mistral3", _VISION["pixtral"], text_model_type="mistral4"),
}
