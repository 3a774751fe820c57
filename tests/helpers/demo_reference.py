"""The demo model and its dense original in transformers (fp32): the references of the quality tests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeAlias

import torch
from gguf import GGUFReader
from gguf.quants import dequantize

# transformers is only partly typed.
ReferenceModel: TypeAlias = Any

GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_moe(directory: Path, top_k: int | None = None) -> ReferenceModel:
    """Load the checkpoint as transformers does, in fp32; `top_k` overrides the experts per token."""
    from transformers import Glm4MoeForCausalLM  # takes seconds, which every worker would spend

    overrides: dict[str, Any] = {} if top_k is None else {"num_experts_per_tok": top_k}
    model: ReferenceModel = Glm4MoeForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        **overrides,
    )
    return model.eval()


def load_dense(gguf: Path) -> ReferenceModel:
    """Build the dense original from the GGUF's tensors in fp32, sharing no code with the converter."""
    settings: dict[str, Any] = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "attn_implementation": "eager",
    }
    state: dict[str, torch.Tensor] = {}
    for source in GGUFReader(gguf).tensors:
        value = torch.from_numpy(dequantize(source.data, source.tensor_type).copy()).float()
        state[_llama_name(source.name)] = _half_rotary(source.name, value)
    # `from_pretrained` spares the seconds of a random initialisation; it must have used every tensor.
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**settings)
    loaded: Any = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    assert not any(report.values()), report
    return model.eval()


def _llama_name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{GGUF_LAYER_NAMES[parts[2]]}.weight"
    return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]


def _half_rotary(gguf_name: str, value: torch.Tensor) -> torch.Tensor:
    """Gather rows 0, 2, 4, ... and then 1, 3, 5, ... of each 64-row head of q and k."""
    if ".attn_q." not in gguf_name and ".attn_k." not in gguf_name:
        return value
    heads = value.view(-1, 64, value.shape[-1])
    return torch.cat((heads[:, 0::2], heads[:, 1::2]), dim=1).reshape(value.shape)


@torch.inference_mode()
def perplexity(model: ReferenceModel, ids: list[int]) -> float:
    """Return exp of the mean negative log-likelihood of ids[1:], each given all ids before it."""
    logits = model(torch.tensor([ids])).logits[0].float()
    return perplexity_of_logits(logits, ids)


def perplexity_of_logits(logits: torch.Tensor, ids: list[int]) -> float:
    """Returns the perplexity, as `perplexity`, from logits float32 [T, V] of a forward pass over all
    T ids.
    """
    targets = torch.tensor(ids[1:])
    loss = torch.nn.functional.cross_entropy(logits[:-1].double(), targets)
    return math.exp(loss.item())


def penalised(logits: torch.Tensor, seen: list[int], penalty: float) -> torch.Tensor:
    """Apply the repetition penalty of https://arxiv.org/abs/1909.05858 to logits [V] for all `seen` ids."""
    index = torch.tensor(sorted(set(seen)))
    scores = logits.clone()
    chosen = scores[index]
    scores[index] = torch.where(chosen < 0, chosen * penalty, chosen / penalty)
    return scores


@torch.inference_mode()
def greedy_choices(
    model: ReferenceModel, prompt_ids: list[int], output_ids: list[int], penalty: float
) -> tuple[list[int], float]:
    """Return what greedy decoding picks at every step when the recorded output is its past, and the least
    difference of the two best scores. One forward pass: the picks equal `output_ids` exactly when greedy
    decoding produces `output_ids`, by induction over the steps.
    """
    past = prompt_ids + output_ids
    logits = model(torch.tensor([past[:-1]])).logits[0].float()
    choices, margin = [], math.inf
    for step in range(len(output_ids)):
        position = len(prompt_ids) + step
        best = penalised(logits[position - 1], past[:position], penalty).topk(2)
        choices.append(int(best.indices[0]))
        margin = min(margin, float(best.values[0] - best.values[1]))
    return choices, margin


@torch.inference_mode()
def least_routing_gap(model: ReferenceModel, ids: list[int]) -> float:
    """Return the least distance, over layers and ids, between the last chosen and first refused expert.

    In units of selection score (sigmoid + bias). Scores near 0.5 are rounded to 2**-24: where the gap is only
    a few of those, two correct implementations may choose different experts.
    """
    gaps: list[float] = []

    def measure(gate: Any, inputs: Any, outputs: Any) -> None:
        scores = outputs[0].sigmoid() + gate.e_score_correction_bias
        best = scores.topk(gate.top_k + 1, dim=-1).values
        gaps.append(float((best[:, -2] - best[:, -1]).min()))

    handles = [layer.mlp.gate.register_forward_hook(measure) for layer in model.model.layers]
    try:
        model(torch.tensor([ids]))
    finally:
        for handle in handles:
            handle.remove()
    return min(gaps)
