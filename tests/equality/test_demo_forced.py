"""Our model picks transformers' greedy token at every step of the golden answers, whatever the expert split.

One forward pass per answer (its tokens given): by induction this is greedy decoding, without a KV history.
"""

from __future__ import annotations

import pytest

from tests.helpers.demo import REPETITION_PENALTIES, GoldenAnswer, golden_answers
from tests.helpers.demo_engine import demo_model, prefill_logits
from tests.helpers.demo_experts import KernelExperts, kernel_experts
from tests.helpers.demo_reference import penalised

pytestmark = pytest.mark.demo


def choices(experts: KernelExperts, answer: GoldenAnswer) -> list[int]:
    """What our model would pick at each step of `answer`."""
    past = answer.prompt_ids + answer.output_ids
    logits = prefill_logits(demo_model(), experts, past[:-1])
    picked = []
    for position in range(len(answer.prompt_ids), len(past)):
        scores = penalised(logits[position - 1], past[:position], answer.repetition_penalty)
        picked.append(int(scores.argmax()))
    return picked


@pytest.mark.covering(1)
@pytest.mark.parametrize("weights", [(1,), (1, 2, 4)])
@pytest.mark.parametrize("penalty", REPETITION_PENALTIES)
def test_greedy_picks_are_those_of_transformers(penalty: float, weights: tuple[int, ...]) -> None:
    """Five prompts, plain greedy and with a repetition penalty: token for token in fp32."""
    experts = kernel_experts("tensor", weights, "float32")
    for answer in golden_answers(penalty):
        assert choices(experts, answer) == answer.output_ids, answer.prompt
