"""How well a layer's hidden state says which experts the next layer chooses: whether fetching ahead can pay.

    python -m tests.tools.next_layer_routing [--model DIR] [--text FILE] [--top-k 2,4]

Computes a text with transformers, routes each layer's input of its experts also by the next layer's norm and
router, and prints shares of the next layer's choices. Of a `glm4_moe` checkpoint; the demo model by default,
whose 12 of 16 experts a token are too many to learn from, so that fewer are chosen.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.demo_model.build import default_directory

# Tokens of the text; an expert that one of this many earlier tokens chose is taken to be in a fetch slot.
TOKENS, KEPT = 768, 4


def recorded(model: Any, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """By layer, `[T, H]`: what goes into the norm before the experts, and what comes out of it."""
    before: dict[int, Tensor] = {}
    after: dict[int, Tensor] = {}
    hooks = []
    for number, layer in enumerate(model.model.layers):

        def keep_input(module: Any, given: Any, number: int = number) -> None:
            before[number] = given[0][0].detach()

        def keep_normed(module: Any, given: Any, number: int = number) -> None:
            after[number] = given[0][0].detach()

        hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(keep_input))
        hooks.append(layer.mlp.register_forward_pre_hook(keep_normed))
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return list(before.values()), list(after.values())


def scores(layer: Any, normed: Tensor) -> Tensor:
    """Returns float32 `[T, E]`: what the layer's router ranks experts by."""
    gate = layer.mlp.gate
    return (normed.float() @ gate.weight.float().T).sigmoid() + gate.e_score_correction_bias


def mask_of(ids: Tensor, num_experts: int) -> Tensor:
    """Returns bool `[T, E]` of ids `[T, K]`."""
    return torch.zeros(ids.shape[0], num_experts, dtype=torch.bool).scatter_(1, ids, True)


@torch.no_grad()
def shares(model: Any, ids: Tensor, top_k: int) -> Tensor:
    """float64 `[layers - 1, 4]`: of the next layer's choices those that are named ahead, those that the
    previous token chose, and those that none of the `KEPT` tokens before chose; and how often the best named
    one of the experts that none of these chose is chosen.
    """
    before, after = recorded(model, ids)
    rows = []
    for layer, given, normed in zip(model.model.layers[1:], before, after[1:], strict=False):
        ahead = scores(layer, layer.post_attention_layernorm(given))
        actual = scores(layer, normed).topk(top_k).indices
        chosen = mask_of(actual, ahead.shape[1])
        named = mask_of(ahead.topk(top_k).indices, ahead.shape[1])
        held = torch.stack([chosen.roll(step, 0) for step in range(1, KEPT + 1)]).any(0)
        best = ahead.masked_fill(held, -torch.inf).argmax(1, keepdim=True)
        can = ~held.all(1)
        total = chosen.sum()
        rows.append(
            [
                float((chosen & named).sum() / total),
                float((chosen & chosen.roll(1, 0)).sum() / total),
                float((chosen & ~held).sum() / total),
                float(chosen.gather(1, best)[can].float().mean()),
            ]
        )
    return torch.tensor(rows, dtype=torch.float64)


def main() -> None:
    """Prints a line for each number of experts a token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=default_directory())
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[2] / "docs" / "operations.md")
    parser.add_argument("--top-k", default="2,4")
    given = parser.parse_args()
    text = given.text.read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(given.model)(text, return_tensors="pt").input_ids[:, :TOKENS]
    for top_k in map(int, given.top_k.split(",")):
        model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
        for layer in model.model.layers:
            for part in (layer.mlp, layer.mlp.gate):
                if hasattr(part, "top_k"):
                    part.top_k = top_k
        found = shares(model, ids, top_k)
        ahead, previous, new, best = found.nanmean(0).tolist()
        print(
            f"{top_k} experts a token: {ahead:.2f} are named ahead (by layer {found[:, 0].min():.2f} to "
            f"{found[:, 0].max():.2f}), {previous:.2f} are the previous token's, {new:.2f} are none of the "
            f"last {KEPT} tokens'; the best named of such is chosen with {best:.2f}"
        )


if __name__ == "__main__":
    main()
