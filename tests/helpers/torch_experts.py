"""Routed experts in plain torch, read with safetensors: a reference that shares no code with ours."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn import functional

# How the Mixtral line spells the three matrices.
_NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# How Granite spells what all experts have in one tensor.
_STACKED = {"input_linear": "experts.gate_up_proj", "output_linear": "experts.down_proj"}


def _plain_name(name: str) -> str:
    """Returns the name as most families have it."""
    name = name.replace("language_model.model.", "model.").replace("model.language_model.", "model.")
    name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.").replace(".feed_forward.", ".mlp.")
    if re.match(r"layers\.\d+\.experts\.", name):
        name = "model." + name.replace(".experts.", ".mlp.experts.")
    if ".ffn.experts." in name:
        name = "model." + name.removeprefix("model.").replace(".ffn.", ".mlp.")
    if not name.endswith(".weight"):
        return name
    *path, matrix, suffix = name.replace(".block_sparse_moe.", ".mlp.").split(".")
    if matrix in _STACKED:
        return ".".join([*path, _STACKED[matrix]])
    return ".".join([*path, _NUMBERED.get(matrix, matrix), suffix])


class TorchExperts:
    """Has the `submit` and `collect` of an expert client; computes in float32, one token at a time."""

    call_log = None

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.config = config | config.get("text_config", {}) | {"model_type": config["model_type"]}
        self.weights: dict[str, torch.Tensor] = {}
        for file in directory.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    stacked = ".block_sparse_moe." in name and name.endswith("put_linear.weight")
                    if ".experts." in name or ".moe." in name or stacked:
                        self.weights[_plain_name(name)] = tensors.get_tensor(name).float()
        self._parts: dict[tuple[str, int], list[torch.Tensor]] = {}

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Check the contract's types, then compute at once; the ticket is the result `[T, H]`."""
        assert topk_ids.dtype == torch.int32
        assert topk_weights.dtype == torch.float32
        assert topk_ids.shape == topk_weights.shape
        output = torch.zeros(hidden_states.shape, dtype=torch.float32)
        rows = zip(output, hidden_states, topk_ids.tolist(), topk_weights.tolist(), strict=True)
        for total, hidden_state, experts, weights in rows:
            for expert, weight in zip(experts, weights, strict=True):
                if expert >= 0:
                    total += weight * self._expert(layer, expert, hidden_state)
        return output

    def collect(self, ticket: torch.Tensor, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the float32 `[T, H]` of the submit."""
        return ticket if partial is None else partial.add_(ticket)

    def _expert(self, layer: int, expert: int, hidden_state: torch.Tensor) -> torch.Tensor:
        if self.config["model_type"] == "gpt_oss":
            return self._gpt_oss_expert(f"model.layers.{layer}.mlp.experts.", expert, hidden_state.float())
        if self.config["model_type"] == "nemotron_h":
            stem = f"model.layers.{layer}.mlp.experts.{expert}."
            up, down = self.weights[stem + "up_proj.weight"], self.weights[stem + "down_proj.weight"]
            return down @ functional.relu(up @ hidden_state.float()).square()
        stem = f"model.layers.{layer}.mlp.experts."
        if (parts := self._parts.get((stem, expert))) is None:
            parts = self._parts[stem, expert] = self._part(stem, expert)
        gate, up, down = parts
        x = hidden_state.float()
        if self.config["model_type"].startswith("gemma4"):
            return down @ (functional.gelu(gate @ x, approximate="tanh") * (up @ x))
        if self.config["model_type"] in ("deepseek_v4", "deepseek_v41", "glm5_next", "hy_v4"):
            limit = self.config.get("text_config", self.config)["swiglu_limit"]
            return down @ (functional.silu((gate @ x).clamp(max=limit)) * (up @ x).clamp(-limit, limit))
        if self.config["model_type"] == "minimax_m3_vl":
            alpha, limit = self.config["swiglu_alpha"], self.config["swiglu_limit"]
            clamped = (gate @ x).clamp(max=limit)
            return down @ (clamped * torch.sigmoid(alpha * clamped) * ((up @ x).clamp(-limit, limit) + 1))
        limit = (self.config.get("swiglu_limits") or [None] * (layer + 1))[layer] or math.inf
        return down @ (functional.silu(gate @ x).clamp(max=limit) * (up @ x).clamp(-limit, limit))

    def _part(self, stem: str, expert: int) -> list[torch.Tensor]:
        """Returns, of ERNIE 4.5 VL, parts of the text's experts, then of those of images, all
        equally wide.
        """
        widths = self.config["moe_intermediate_size"] if "moe_k" in self.config else 0
        if not isinstance(widths, list):
            return self.matrices(stem, expert)
        experts = self.config["moe_num_experts"]
        experts = experts[0] if isinstance(experts, list) else experts
        size, numbers = math.gcd(*widths), [*[0] * experts, *[1] * experts]
        places = [(n, first) for n, kind in enumerate(numbers) for first in range(0, widths[kind], size)]
        number, first = places[expert]
        gate, up, down = self.matrices(stem, number)
        channels = slice(first, first + size)
        return [gate[channels], up[channels], down[:, channels]]

    def matrices(self, stem: str, expert: int) -> list[torch.Tensor]:
        """Gate, up and down `[out, in]`, whether experts have tensors of their own or one for all."""
        stacked = stem.replace("mlp.experts.", "moe.")
        if stacked + "gate_proj.weight" in self.weights:
            return [self.weights[f"{stacked}{part}_proj.weight"][expert] for part in ("gate", "up", "down")]
        if self.config["model_type"].startswith("gemma4"):
            stem = stem.replace("mlp.", "")
        if self.config["model_type"] == "granitemoe_swa":
            stem = stem.replace("mlp.", "block_sparse_moe.")
        fused = self.weights.get(stem + "gate_up_proj")
        if fused is None:
            return [self.weights[f"{stem}{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")]
        gate_up, down = fused[expert], self.weights[stem + "down_proj"][expert]
        # `[2I, H]`, or `[H, 2I]`: tiny models have no two sizes alike.
        if gate_up.shape[0] == down.shape[1]:
            gate_up, down = gate_up.T, down.T
        return [*gate_up.chunk(2), down]

    def _gpt_oss_expert(self, stem: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Returns the matrices of all experts in one tensor, `[in, out]`, gate and up alternating; biases;
        clamped.
        """
        alpha, limit = self.config["swiglu_alpha"], self.config["swiglu_limit"]
        gate_up, down, gate_up_bias, down_bias = (
            self.weights[stem + name][expert]
            for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
        )
        intermediate = x @ gate_up + gate_up_bias
        gate, up = intermediate[::2].clamp(max=limit), intermediate[1::2].clamp(-limit, limit)
        return (gate / (1 + torch.exp(-alpha * gate)) * (up + 1)) @ down + down_bias

    def interrupt(self) -> None:
        """Nothing is waited for."""
