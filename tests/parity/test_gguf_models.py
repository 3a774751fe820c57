"""Invariant: a GGUF file serves the model that transformers has with the weights the file stands for.

For every architecture: the configuration made from metadata is that of config.json, and float32 logits are
transformers' own, whatever the quantisation types, the number of parts and the form of latent attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.loader import sources
from gpu_service.model_config import ModelConfig
from moebius.checkpoint.gguf.families import FAMILIES
from moebius.checkpoint.moe_config import MoeGeometry
from tests.helpers.gguf_models import CASES, GgufFile, cached_gguf_files, oracle_logits
from tests.helpers.paged_runner import load_runner
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS

PROMPT = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77, 31, 9, 180, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufFile]:
    return cached_gguf_files(tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize("name", sorted(CASES))
def test_logits_are_those_of_the_dequantised_weights(name: str, gguf: Callable[[str], GgufFile]) -> None:
    """Dense weights through the loader, experts through the reference that the expert servers are held to."""
    file = gguf(name)
    geometry = MoeGeometry.from_config(file.path)
    experts = LocalExpertClient(str(file.path), geometry, torch.float32)
    _, logits = load_runner(file.path, experts=experts).prefill(PROMPT)
    expected = oracle_logits(file.oracle, PROMPT)
    assert expected.std() > 0.3, "flat logits would hide errors"
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


@pytest.mark.parametrize("name", sorted(CASES))
def test_metadata_gives_the_configuration_of_config_json(name: str, gguf: Callable[[str], GgufFile]) -> None:
    file = gguf(name)
    ours, published = ModelConfig.from_dir(file.path), ModelConfig.from_dir(file.published)
    assert ours.unread_keys == (), "the tables should know every key that converters write"
    predicting = int(CASES[name].prediction_layer)
    assert ours == replace(published, unread_keys=(), num_mtp_layers=predicting)
    assert MoeGeometry.from_config(file.path) == MoeGeometry.from_config(file.published)


@pytest.mark.parametrize("name", ["deepseek_v2", "mixtral"])
def test_dense_weights_may_be_computed_in_small_blocks(
    name: str, gguf: Callable[[str], GgufFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are computed go into parameters some rows at a time; blocks may end inside of heads."""
    monkeypatch.setattr(sources, "_DERIVED_ELEMENTS", 700)
    test_logits_are_those_of_the_dequantised_weights(name, gguf)


def test_every_architecture_is_tried() -> None:
    """The table promises no architecture that no file was read of."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES

    from tests.helpers.gguf_metadata import ARCHITECTURES

    names = {case.architecture or ARCHITECTURES[case.model_type] for case in CASES.values()}
    assert {MODEL_ARCH_NAMES[MODEL_ARCH[name]] for name in names} == set(FAMILIES)
