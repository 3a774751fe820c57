"""Tiny EAGLE-3 heads as they are published, and what they propose, computed plainly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

# The layers whose output a head reads, as SGLang's `eagle_config` numbers them.
OUTPUTS = (0, 1, 2)
DRAFT_VOCAB_SIZE = 90


@dataclass(frozen=True)
class Eagle3Reference:
    """Transformers' model in float32, and a head's tensors by their name in the layer."""

    model: Any
    tensors: dict[str, torch.Tensor]
    described: dict[str, Any]

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """What may follow; each draft token's pass sees all earlier ones again from their inputs."""
        ids = torch.tensor([list(tokens)])
        streams = self.model(ids[:, :-1], output_hidden_states=True).hidden_states
        # `hidden_states[i]` is the stream at the beginning of layer i, the output of the one before.
        read = torch.cat([streams[layer + 1][0] for layer in OUTPUTS], dim=-1)
        inputs, next_ids = read @ self.tensors["fc.weight"].T, list(tokens[1:])
        found: list[int] = []
        for _ in range(count):
            made = self._layer(inputs, next_ids)
            found.append(self._best(made[-1]))
            inputs, next_ids = torch.cat((inputs, made[-1:])), [*next_ids, found[-1]]
        return found

    def _layer(self, hidden: torch.Tensor, next_ids: Sequence[int]) -> torch.Tensor:
        table = self.tensors.get("embed_tokens.weight")
        table = self.model.get_input_embeddings().weight if table is None else table
        normed = self._norm("hidden_norm", hidden)
        both = torch.cat((self._norm("input_layernorm", table[torch.tensor(next_ids)]), normed), dim=-1)
        residual = normed if self.described["norm_before_residual"] else hidden
        residual = residual + self._attention(both)
        read = self._norm("post_attention_layernorm", residual)
        gate, up = (
            functional.linear(read, self.tensors[f"mlp.{name}_proj.weight"]) for name in ("gate", "up")
        )
        return residual + functional.silu(gate) * up @ self.tensors["mlp.down_proj.weight"].T

    def _attention(self, both: torch.Tensor) -> torch.Tensor:
        head_dim, rows = self.described["head_dim"], both.shape[0]
        query, key, value = (
            functional.linear(both, *self._projection(name)).view(rows, -1, head_dim).transpose(0, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        groups = query.shape[0] // key.shape[0]
        key, value = (part.repeat_interleave(groups, 0) for part in (_rotated(key), value))
        attended = functional.scaled_dot_product_attention(_rotated(query), key, value, is_causal=True)
        return functional.linear(attended.transpose(0, 1).reshape(rows, -1), *self._projection("o_proj"))

    def _projection(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.tensors[f"self_attn.{name}.weight"], self.tensors.get(f"self_attn.{name}.bias")

    def _norm(self, name: str, values: torch.Tensor) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"]
        return functional.rms_norm(values, weight.shape, weight, self.described["rms_norm_eps"])

    def _best(self, made: torch.Tensor) -> int:
        head = self.tensors.get("lm_head.weight")
        head = self.model.get_output_embeddings().weight if head is None else head
        best = int((head @ self._norm("norm", made)).argmax())
        differences = self.tensors.get("d2t")
        return best if differences is None else best + int(differences[best])


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    """Rotates `[heads, rows, head_dim]` by the row's number."""
    size = heads.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(heads.shape[1])[:, None] * torch.cat((frequencies, frequencies))
    first, second = heads.chunk(2, dim=-1)
    return heads * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def write_head(
    model: Any,
    directory: Path,
    *,
    prefix: str = "midlayer.",
    own: Sequence[str] = ("head", "ids"),
    **keys: Any,
) -> Eagle3Reference:
    """Writes a head of random values for transformers' `model`.

    `own`: what its checkpoint has of `head`, `ids` (of part of the vocabulary) and `embedding`; `prefix`: of
    the decoder layer's tensors; `keys`: of config.json.
    """
    config = model.config
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": DRAFT_VOCAB_SIZE if "ids" in own else config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 56,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "norm_before_residual": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(OUTPUTS), "use_aux_hidden_state": True},
    } | keys
    tensors = _random_tensors(described, own)
    write_tensors(directory, described, tensors, prefix)
    return Eagle3Reference(model, tensors, described)


def write_tensors(
    directory: Path, described: dict[str, Any], tensors: dict[str, torch.Tensor], prefix: str = "midlayer."
) -> None:
    """Writes a checkpoint of tensors by their name in the layer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(described))
    of_layer = ("self_attn.", "mlp.", "input_layernorm.", "hidden_norm.", "post_attention_layernorm.")
    named = {prefix + n if n.startswith(of_layer) else n: t for n, t in tensors.items()}
    if "d2t" in tensors:
        # The same the other way round, which is not read.
        named["t2d"] = torch.zeros(described["vocab_size"], dtype=torch.bool)
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})


def _random_tensors(described: dict[str, Any], own: Sequence[str]) -> dict[str, torch.Tensor]:
    size, inner, head_dim = (described[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    query, key = (described[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    shapes = {
        "fc": (size, 3 * size),
        "self_attn.q_proj": (query, 2 * size),
        "self_attn.k_proj": (key, 2 * size),
        "self_attn.v_proj": (key, 2 * size),
        "self_attn.o_proj": (size, query),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    if "head" in own:
        shapes["lm_head"] = described["draft_vocab_size"], size
    if "embedding" in own:
        shapes["embed_tokens"] = described["vocab_size"], size
    generator = torch.Generator().manual_seed(described["vocab_size"] + len(own))
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(size, generator=generator)
    if described.get("attention_bias"):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            rows = shapes[f"self_attn.{name}"][0]
            tensors[f"self_attn.{name}.bias"] = 0.1 * torch.randn(rows, generator=generator)
    if "ids" in own:
        chosen = torch.randperm(described["vocab_size"], generator=generator)[: described["draft_vocab_size"]]
        tensors["d2t"] = chosen.sort().values - torch.arange(described["draft_vocab_size"])
    return tensors


def write_foreseeing_head(model: Any, directory: Path) -> None:
    """Writes a head for a model in which a token follows from the one before it alone: it knows which.

    Its stream is the embedding of the next token: queries and keys are one vector in all rows, so that each
    row attends to itself alone, and values are the normed embedding.
    """
    size, heads, weights = model.config.hidden_size, 3, model.state_dict()
    reference = write_head(
        model,
        directory,
        own=("head",),
        attention_bias=True,
        norm_before_residual=True,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    tensors = {name: torch.zeros_like(tensor) for name, tensor in reference.tensors.items()}
    tensors["self_attn.v_proj.weight"][:, :size] = torch.eye(size)
    tensors["self_attn.o_proj.weight"] += torch.eye(size)
    for name in ("q_proj", "k_proj"):
        tensors[f"self_attn.{name}.bias"] += 30.0
    tensors["input_layernorm.weight"] += 1.0
    tensors["norm.weight"] += weights["model.norm.weight"]
    tensors["lm_head.weight"] += weights["lm_head.weight"]
    write_tensors(directory, reference.described, tensors)


def drop_tensors(directory: Path, *names: str) -> None:
    """Takes tensors out of a head's checkpoint."""
    file = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in names}
    save_file(tensors, file, metadata={"format": "pt"})
