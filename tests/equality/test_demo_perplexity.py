"""With all 16 experts chosen the demo model is the dense original, however its experts are divided.

Guards the whole path of weights: an intermediate channel lost, doubled or misplaced by loader, split, packing
or kernels changes the perplexity by far more than the tolerance.
"""

from __future__ import annotations

import pytest

from tests.helpers.demo import WINDOW_TOKENS, golden, prose_ids
from tests.helpers.demo_engine import demo_model, prefill_logits
from tests.helpers.demo_experts import Split, WeightDtype, kernel_experts
from tests.helpers.demo_reference import perplexity_of_logits

pytestmark = pytest.mark.demo

# bf16 rounding of the checkpoint and the spread of the expert weights around 1; see the transformers test.
DENSE_TOLERANCE = 1.5e-3
# Against transformers on the same weights only the order of fp32 sums differs; measured below 1e-6.
SAME_WEIGHTS_TOLERANCE = 1e-5

DIVISIONS = [
    # The whole, and equal parts, which other tests have too.
    pytest.param("tensor", (1,), "float32", marks=pytest.mark.full),
    ("tensor", (1,), "bfloat16"),
    pytest.param("tensor", (1, 1), "float32", marks=pytest.mark.full),
    ("tensor", (1, 2, 4), "float32"),
    pytest.param("expert", (1, 1), "float32", marks=pytest.mark.full),
    ("expert", (3, 1, 1), "bfloat16"),
]


@pytest.mark.parametrize(("split", "weights", "weight_dtype"), DIVISIONS)
def test_all_experts_equal_the_dense_original(
    split: Split, weights: tuple[int, ...], weight_dtype: WeightDtype
) -> None:
    """Top-16 on one text window: the dense perplexity, for tensor and expert splits into unequal shares."""
    ids = prose_ids()[:WINDOW_TOKENS]
    logits = prefill_logits(demo_model(top_k=16), kernel_experts(split, weights, weight_dtype), ids)
    found = perplexity_of_logits(logits, ids)
    assert found == pytest.approx(golden()["dense"]["window"], rel=DENSE_TOLERANCE)
    assert found == pytest.approx(golden()["top_16"]["window"], rel=SAME_WEIGHTS_TOLERANCE)


@pytest.mark.parametrize(
    "top_k", [4, pytest.param(8, marks=pytest.mark.full), pytest.param(12, marks=pytest.mark.full)]
)
def test_sparse_settings_equal_transformers(top_k: int) -> None:
    """Fewer experts: the perplexity that transformers gives. A rounding may move one token to another expert
    of nearly equal score, hence the wider tolerance; leaving out an expert's share changes it by far more.
    """
    ids = prose_ids()[:WINDOW_TOKENS]
    experts = kernel_experts("tensor", (1, 1), "float32")
    found = perplexity_of_logits(prefill_logits(demo_model(top_k=top_k), experts, ids), ids)
    assert found == pytest.approx(golden()[f"top_{top_k}"]["window"], rel=1e-2)


def test_a_missing_share_is_noticed() -> None:
    """The reference is sharp: without one of three shares the perplexity leaves the tolerance."""
    ids = prose_ids()[:WINDOW_TOKENS]
    whole = kernel_experts("tensor", (1, 2, 4), "float32")
    maimed = type(whole)(whole.engines[1:])
    found = perplexity_of_logits(prefill_logits(demo_model(top_k=16), maimed, ids), ids)
    assert found > (1 + 10 * DENSE_TOLERANCE) * golden()["dense"]["window"]
