"""Invariant: in every checkpoint format, for dense layers and experts, our model is the dequantised model.

The reference is transformers' float32 model that holds the weights which the encoders say they stored.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.model_formats import MODEL_FORMATS
from tests.helpers.quantised_models import (
    QUANTISED_MODELS,
    Models,
    cached_plain_models,
    our_logits,
    reference_logits,
    write_quantised,
)
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cached_plain_models(tmp_path_factory.mktemp("plain"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", list(QUANTISED_MODELS))
@pytest.mark.parametrize("name", list(MODEL_FORMATS))
def test_logits_are_those_of_the_dequantised_weights(
    name: str, model: str, models: Models, tmp_path: Path
) -> None:
    chosen, plain = MODEL_FORMATS[name], models(model)
    reference = write_quantised(plain, tmp_path, lambda _: chosen, chosen.config)
    expected = reference_logits(reference)
    if name != "float32":
        assert (expected - plain.logits).abs().max() > 1e-3, "the format must matter"
    torch.testing.assert_close(our_logits(tmp_path), expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)
