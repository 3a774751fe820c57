"""Tiny random checkpoints of every family, written by transformers: the reference that needs no download.

All dimensions differ from one another so that a transposition cannot pass unseen; weights are drawn large
enough that greedy choices have clear winners; the router's correction bias is random, because
transformers initialises it to zero and would hide a bias that leaks into the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.helpers.deepseek_v41_reference import DeepseekV41Config, DeepseekV41ForCausalLM
from tests.helpers.tables import read_table
from tests.helpers.tiny_multimodal_text import TEXT_TOWERS

_COMMON = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
# Families whose norms, but for the one inside linear attention, hold their weight less 1.
_ONE_PLUS_WEIGHT_NORMS = (
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen4_exp",
    "qwen4_exp_text",
    "step3p7",
    "minimax_m3_vl",
)


@dataclass(frozen=True)
class TinyModel:
    """One configuration: `model_type` and what differs from the common sizes."""

    model_type: str
    changes: dict[str, Any]
    # Bytes per shard file; None: one file.
    shard_bytes: int | None = None
    # The family that transformers writes it as, where it knows it by another name only.
    written_as: str | None = None


def read_models(families: dict[str, dict[str, Any]]) -> dict[str, TinyModel]:
    """Returns models of a table, family by family, by their names."""
    found = {}
    for model_type, models in families.items():
        for name, changes in models.items():
            own = {key: changes.pop(key) for key in ("shard_bytes", "written_as") if key in changes}
            found[name] = TinyModel(model_type, changes, **own)
    return found


# By what is kept of a sequence.
KINDS = {kind: read_models(families) for kind, families in read_table("tiny_models.yaml").items()}
TINY_MODELS = {name: tiny for models in KINDS.values() for name, tiny in models.items()}
TINY_MODELS |= read_models(read_table("tiny_multimodal_models.yaml"))


def attending_to_all(name: str, num_tokens: int) -> TinyModel:
    """Returns the configuration with room for `top_k` tokens in what sparse attention chooses.

    A choice may turn with one rounding, and much with it: what is compared in fewer bits must leave none.
    """
    return choosing_at_most(TINY_MODELS[name], num_tokens)


def choosing_at_most(tiny: TinyModel, num_tokens: int) -> TinyModel:
    """Returns the same with `pool` tokens per choice; without sparse attention as it is."""
    if "indexer_budget" in tiny.changes:
        whole = -(-num_tokens // (ratio := tiny.changes["indexer_compress_ratio"])) * ratio
        return replace(tiny, changes=tiny.changes | {"indexer_budget": whole})
    if "index_topk" not in tiny.changes:
        return tiny
    # In whole pools, where tokens are chosen in pools.
    whole = -(-num_tokens // (pool := tiny.changes.get("index_kpool", 1))) * pool
    return replace(tiny, changes=tiny.changes | {"index_topk": whole})


def common_sizes(tiny: TinyModel) -> dict[str, Any]:
    """Returns all values of the configuration, also those of transformers' defaults where its class can be
    asked.
    """
    values, tower = _COMMON | tiny.changes, TEXT_TOWERS.get(tiny.model_type)
    if tower is not None:
        whole = tower.config(values).to_dict()
        return dict(whole.get("text_config", whole)) | values
    config_class, _ = _classes(tiny.written_as or tiny.model_type)
    return dict(config_class(**values).to_dict()) | values


def _classes(model_type: str) -> tuple[type[Any], type[Any]]:
    if model_type == "deepseek_v41":
        return DeepseekV41Config, DeepseekV41ForCausalLM
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # Text models that are only published inside of others have no entry.
    stem = "".join(part.capitalize() for part in model_type.split("_"))
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, f"{stem}ForCausalLM"))
    return model.config_class, model


def randomize(model: Any, seed: int, model_type: str) -> None:
    """Gives all tensors of a module of transformers values, those of a model of this family."""
    adds_one = model_type in _ONE_PLUS_WEIGHT_NORMS
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if ".ple_embedding." in name and not tensor.is_floating_point():
            # Follows from the configuration.
            continue
        if name.endswith(("slope_rate", "query_decay", "key_decay", "diagonal_decay")):
            # Follows from the configuration, too.
            continue
        if name.endswith(".tid2eid"):
            # Experts of each token, all of them different.
            experts = torch.rand(tensor.shape[0], model.config.n_routed_experts, generator=generator)
            tensor.copy_(experts.argsort(-1)[:, : tensor.shape[1]])
        elif name.endswith(("norm.weight", "norm_f.weight")):
            tensor.copy_((0 if adds_one and ".linear_attn." not in name else 1) + 0.2 * noise)
        elif name.endswith("router.e_score_correction_bias"):
            # LongCat's, next to scores of a softmax: it must not decide alone.
            tensor.copy_(0.05 * noise)
        elif name.endswith("bias"):
            tensor.copy_(0.5 * noise)
        else:
            tensor.copy_(noise * (1.5 / tensor.shape[-1] ** 0.5))


def add_image_outputs(model: Any) -> None:
    """Llama4ForConditionalGeneration of transformers 5.24 reads a field of its language model's outputs that
    they do not have; other models stay as they are.
    """

    def add(module: Any, inputs: Any, outputs: Any) -> None:
        if not hasattr(outputs, "image_outputs"):
            outputs.image_outputs = None

    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model.language_model.register_forward_hook(add)


def make_tiny_model(name: str, directory: Path, *, publish: bool = True) -> Any:
    """Write the checkpoint into `directory` and return transformers' own float32 model of it.

    `publish`: as the family was released, where transformers writes it otherwise.
    """
    return write_tiny_model(TINY_MODELS[name], directory, seed=sum(name.encode()), publish=publish)


def tiny_config(name: str) -> Any:
    """Transformers' configuration of a tiny model."""
    tiny = TINY_MODELS[name]
    values, tower = _COMMON | tiny.changes, TEXT_TOWERS.get(tiny.model_type)
    if tower is not None:
        return tower.config(values)
    return _classes(tiny.written_as or tiny.model_type)[0](**values)


def write_tiny_model(tiny: TinyModel, directory: Path, *, seed: int, publish: bool = True) -> Any:
    """Returns the same for any configuration."""
    values, tower = _COMMON | tiny.changes, TEXT_TOWERS.get(tiny.model_type)
    if tower is not None:
        model = tower.model(tower.config(values)).eval()
    else:
        config_class, model_class = _classes(tiny.written_as or tiny.model_type)
        model = model_class(config_class(**values)).eval()
    randomize(model, seed, model.config.model_type)
    add_image_outputs(model)
    if tiny.shard_bytes is None:
        model.save_pretrained(directory)
    else:
        model.save_pretrained(directory, max_shard_size=tiny.shard_bytes)
    if tower is not None and publish:
        tower.publish(directory, values)
    if tiny.written_as is not None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": tiny.model_type}))
    return model


@torch.inference_mode()
def greedy_answer(
    model: Any, prompt: list[int], count: int, proposed: Sequence[int] | None = None
) -> list[int]:
    """Returns the tokens that transformers' whole forward finds best, one after another.

    One whole forward judges all that is `proposed`, the tested engine's answer. A token that is not the
    judge's is replaced; from there on, and where nothing is proposed, transformers' decoding with its cache
    proposes: of sparse attention that may differ from the judge as well.
    """
    answer: list[int] = []
    while len(answer) < count:
        known, left = len(prompt) + len(answer), count - len(answer)
        if answer or proposed is None or len(proposed) != count:
            tokens = model.generate(
                torch.tensor([prompt + answer]),
                max_new_tokens=left,
                min_new_tokens=left,
                do_sample=False,
                eos_token_id=None,
            )
        else:
            tokens = torch.tensor([[*prompt, *proposed]])
        judged = tokens[0, known:].tolist()
        best = model(tokens).logits[0, known - 1 : -1].argmax(-1).tolist()
        agreed = next((i for i in range(left) if best[i] != judged[i]), left)
        answer += judged[:agreed] + best[agreed : agreed + 1]
    return answer


def cached_tiny_models(root: Path) -> Callable[[str], tuple[Path, Any]]:
    """`name -> (directory, transformers model)`, each made once under `root`."""

    @cache
    def make(name: str) -> tuple[Path, Any]:
        directory = root / name
        return directory, make_tiny_model(name, directory)

    return make
