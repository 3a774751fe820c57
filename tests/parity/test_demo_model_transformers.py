"""The demo checkpoint, read by transformers, is the dense original re-ordered: nothing was lost in the split.

Guards the whole conversion (dequantisation, rotary order, intermediate channel order, router scaling,
tokenizer), and that the golden values used by the engine's tests are what transformers gives.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from app.demo_model import verify_checkpoint
from tests.helpers.demo import (
    HALF_TOKENS,
    PROMPTS,
    REPETITION_PENALTIES,
    WINDOW_TOKENS,
    demo_checkpoint,
    demo_gguf,
    golden,
    golden_answers,
    prose,
    prose_ids,
)
from tests.helpers.demo_reference import ReferenceModel, greedy_choices, load_dense, load_moe, perplexity

pytestmark = pytest.mark.demo

# Measured 5.9e-4: bf16 rounding of the weights, and expert weights 2·sigmoid(x) that are only near 1.
DENSE_TOLERANCE = 1.5e-3
# fp32 sums in another order, on another CPU or thread count.
REPEAT_TOLERANCE = 1e-4
# With fewer than all experts, another rounding of a score may choose another expert for a token.
ROUTED_TOLERANCE = 1e-2
ULP = 2.0**-24  # distance of neighbouring fp32 numbers in [0.5, 1), where the routers' scores lie


@pytest.fixture(scope="module")
def moe() -> ReferenceModel:
    return load_moe(demo_checkpoint())


@pytest.mark.full  # our own engine on the same text: tests/equality/test_demo_perplexity.py
def test_all_experts_give_the_dense_perplexity() -> None:
    """With 16 of 16 experts chosen, the split model is the dense original on half of the bundled text."""
    ids = prose_ids()[:HALF_TOKENS]
    dense = perplexity(load_dense(demo_gguf()), ids)
    split = perplexity(load_moe(demo_checkpoint(), top_k=16), ids)
    assert split == pytest.approx(dense, rel=DENSE_TOLERANCE)
    assert dense == pytest.approx(golden()["dense"]["half"], rel=REPEAT_TOLERANCE)
    assert split == pytest.approx(golden()["top_16"]["half"], rel=REPEAT_TOLERANCE)


def test_fewer_experts_cost_quality_in_order(moe: ReferenceModel) -> None:
    """The routed experts carry information: perplexity rises as fewer are used, slowly at the default."""
    recorded = [golden()[name]["prose"] for name in ("top_16", "top_12", "top_8", "top_4")]
    assert recorded == sorted(recorded)
    assert recorded[1] < 1.25 * recorded[0]
    window = perplexity(moe, prose_ids()[:WINDOW_TOKENS])
    assert window == pytest.approx(golden()["top_12"]["window"], rel=ROUTED_TOLERANCE)


@pytest.mark.full  # our own engine, on the same answers: tests/equality/test_demo_forced.py
@pytest.mark.parametrize("penalty", REPETITION_PENALTIES)
def test_golden_answers_are_what_transformers_gives(moe: ReferenceModel, penalty: float) -> None:
    """The recorded greedy answers are still what the installed transformers computes in fp32."""
    for answer in golden_answers(penalty):
        choices, _ = greedy_choices(moe, answer.prompt_ids, answer.output_ids, penalty)
        assert choices == answer.output_ids, answer.prompt
        assert answer.min_margin > 1e-3, "pick another prompt: two tokens are too close to tell apart"
        assert answer.min_routing_gap > 2.5 * ULP, (
            "pick another prompt: two experts are too close to tell apart"
        )


def test_answers_are_coherent() -> None:
    """The default model (top-12) answers in sentences: the capital is named, and no answer is a loop."""
    answers = {answer.prompt: answer for answer in golden_answers(1.1)}
    assert "The capital of France is Paris" in answers["What is the capital of France?"].text
    for answer in answers.values():
        words = answer.text.lower().split()
        assert len(words) >= 15, answer.text
        assert len(set(words)) > 0.6 * len(words), answer.text


def test_tokenizer_round_trip_and_chat_template() -> None:
    """The tokenizer loses nothing, splits digits, and the chat template gives the recorded prompt ids."""
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_checkpoint())
    samples = [prose(), "naïve café – 東京 🙂\n\tx = 3.14159;", "  two  spaces and 2026 digits "]
    for text in samples:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("2026").input_ids == tokenizer.convert_tokens_to_ids(list("2026"))
    assert tokenizer.eos_token_id == 2
    for prompt, answer in zip(PROMPTS, golden_answers(1.0), strict=True):
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert (answer.prompt, answer.prompt_ids) == (prompt, ids)
        assert tokenizer.decode(answer.output_ids, skip_special_tokens=True) == answer.text


def test_tokenizer_agrees_with_the_gguf_conversion() -> None:
    """On the bundled text our tokenizer gives the ids of transformers' own conversion of the GGUF."""
    gguf = demo_gguf()
    theirs = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert theirs(prose()).input_ids == prose_ids()


def test_built_checkpoint_is_whole() -> None:
    """Every file of the cached checkpoint still has the checksum it was built with."""
    verify_checkpoint(demo_checkpoint(), full=True)
