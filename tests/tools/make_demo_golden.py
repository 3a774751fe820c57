"""Record the reference values of the demo model: `python -m tests.tools.make_demo_golden`.

Everything comes from transformers in fp32: perplexities of the bundled text, and greedy answers.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoTokenizer

from tests.helpers.demo import (
    GOLDEN_FILE,
    HALF_TOKENS,
    MAX_NEW_TOKENS,
    PROMPTS,
    REPETITION_PENALTIES,
    WINDOW_TOKENS,
    demo_checkpoint,
    demo_gguf,
    prose_ids,
)
from tests.helpers.demo_reference import (
    ReferenceModel,
    greedy_choices,
    least_routing_gap,
    load_dense,
    load_moe,
    perplexity,
)


def perplexities(model: ReferenceModel) -> dict[str, float]:
    """Return the perplexity of the whole bundled text, of its first half and of its first window."""
    ids = prose_ids()
    return {
        "prose": perplexity(model, ids),
        "half": perplexity(model, ids[:HALF_TOKENS]),
        "window": perplexity(model, ids[:WINDOW_TOKENS]),
    }


def answer(model: ReferenceModel, tokenizer: Any, prompt: str, penalty: float) -> dict[str, Any]:
    """Return one greedy answer in the form of `GoldenAnswer`."""
    messages = [{"role": "user", "content": prompt}]
    prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    inputs = torch.tensor([prompt_ids])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        repetition_penalty=penalty,
    )
    output_ids = output[0, len(prompt_ids) :].tolist()
    _, margin = greedy_choices(model, prompt_ids, output_ids, penalty)
    return {
        "prompt": prompt,
        "repetition_penalty": penalty,
        "prompt_ids": prompt_ids,
        "output_ids": output_ids,
        "text": tokenizer.decode(output_ids, skip_special_tokens=True),
        "min_margin": margin,
        "min_routing_gap": least_routing_gap(model, (prompt_ids + output_ids)[:-1]),
    }


def main() -> None:
    """Write tests/data/demo_golden.json."""
    directory = demo_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    content: dict[str, Any] = {"prose_tokens": len(prose_ids()), "window_tokens": WINDOW_TOKENS}
    content["dense"] = perplexities(load_dense(demo_gguf()))
    for top_k in (4, 8, 16):
        content[f"top_{top_k}"] = perplexities(load_moe(directory, top_k))
    model = load_moe(directory)
    content["top_12"] = perplexities(model)
    content["answers"] = [
        answer(model, tokenizer, prompt, penalty) for penalty in REPETITION_PENALTIES for prompt in PROMPTS
    ]
    text = json.dumps(content, indent=1, ensure_ascii=False)
    GOLDEN_FILE.write_text(text + "\n")


if __name__ == "__main__":
    main()
