"""Invariant: a GGUF file serves the model that transformers has with the weights the file stands for.

For every architecture: the configuration made from metadata is that of config.json, and float32 logits are
transformers' own, whatever the quantisation types, the number of parts and the form of latent attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_service.core.parallel import ParallelContext
from gpu_service.device import TORCH_DTYPES
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.layers.linear import StoredWeight
from gpu_service.loader import sources
from gpu_service.loader.load import DenseForm, load_weights
from gpu_service.models.compose import build_model
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.config import gguf_config
from moebius.checkpoint.gguf.model import open_gguf
from moebius.models.config import DTypeName, ModelOverrides
from moebius.models.read import read_geometry, read_model_config
from moebius.models.registry import FAMILIES, GGUF_ARCHITECTURES
from tests.helpers.gguf_models import CASES, GgufFile, cached_gguf_files, reference_logits
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import greedy_answer
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS

PROMPT = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77, 31, 9, 180, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufFile]:
    return cached_gguf_files(tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize("form", ["dequantised", "packed", pytest.param("panels", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", sorted(CASES))
def test_logits_are_those_of_the_dequantised_weights(
    name: str, form: DenseForm, gguf: Callable[[str], GgufFile]
) -> None:
    """Dense weights through the loader, dequantised or kept as the file has them for a CPU or a GPU, whose
    panels the torch reference computes here; experts through the reference that the expert servers are
    compared with.
    """
    file = gguf(name)
    geometry = read_geometry(file.path)
    experts = LocalExpertClient(str(file.path), geometry, torch.float32)
    runner = load_runner(file.path, experts=experts, form=form)
    kept = [module for module in runner.model.modules() if isinstance(module, StoredWeight) and module.packed]
    # A GPU has faster products of values, and bfloat16 is some.
    plain = ("F32", "F16", "BF16") if form == "panels" else ("F32", "F16")
    assert bool(kept) == (form != "dequantised" and CASES[name].types.other not in plain)
    _, logits = runner.prefill(PROMPT)
    expected = reference_logits(file.reference, PROMPT)
    assert expected.std() > 0.3, "flat logits would hide errors"
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


def test_files_are_computed_in_float16(gguf: Callable[[str], GgufFile]) -> None:
    """Dequantised straight to it: its three more digits than bfloat16's are seen in the logits."""
    file = gguf("qwen3_moe")
    expected = reference_logits(file.reference, PROMPT)

    def error(dtype: DTypeName) -> float:
        experts = LocalExpertClient(str(file.path), read_geometry(file.path), TORCH_DTYPES[dtype])
        runner = load_runner(file.path, experts=experts, overrides=ModelOverrides(dtype=dtype))
        _, logits = runner.prefill(PROMPT)
        return (logits - expected).abs().mean().item()

    assert 3 * error("float16") < error("bfloat16")


@pytest.mark.parametrize("name", sorted(CASES))
def test_metadata_gives_the_configuration_of_config_json(name: str, gguf: Callable[[str], GgufFile]) -> None:
    file = gguf(name)
    ours, published = read_model_config(file.path), read_model_config(file.published)
    assert ours.unread_keys == (), "the tables should know every key that converters write"
    predicting = int(CASES[name].prediction_layer)
    # Towers are files of another kind.
    assert ours == replace(published, unread_keys=(), num_mtp_layers=predicting, vision=None)
    assert read_geometry(file.path) == read_geometry(file.published)


def test_what_files_of_deepseek_v41_leave_out_or_have_wrong(gguf: Callable[[str], GgufFile]) -> None:
    """Without keys blocks of entries are those of the published model; other hashes are refused."""
    model = open_gguf(gguf("deepseek_v41").path)
    family = {one.architecture: one for one in FAMILIES["deepseek_v41"].gguf}["deepseek41"]
    kept = {name: value for name, value in model.metadata.items() if ".candidate_" not in name}
    config = gguf_config(replace(model, metadata=kept), "deepseek_v41", family)
    found = [config[f"candidate_{name}"] for name in ("source_layer_id", "topk_blocks", "block_size")]
    assert found == [3, 2048, 8]
    name = "deepseek41.engram.multipliers"
    wrong = kept | {name: [factor + 2 for factor in kept[name]]}
    with pytest.raises(CheckpointError, match=r"engram\.multipliers .* kinds of tokens make"):
        gguf_config(replace(model, metadata=wrong), "deepseek_v41", family)


@pytest.mark.parametrize("name", ["deepseek_v2", "mixtral"])
def test_dense_weights_may_be_computed_in_small_blocks(
    name: str, gguf: Callable[[str], GgufFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are computed go into parameters some rows at a time; blocks may end inside of heads."""
    monkeypatch.setattr(sources, "_DERIVED_ELEMENTS", 700)
    test_logits_are_those_of_the_dequantised_weights(name, "dequantised", gguf)


REARRANGED = (
    "bailing_hybrid",
    "glm_moe_dsa",
    "granitemoehybrid",
    "jamba",
    "nemotron_h",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
)


@pytest.mark.parametrize("name", [*REARRANGED, "deepseek_v4", "hy_v4"])
def test_greedy_answers_are_those_of_transformers(name: str, gguf: Callable[[str], GgufFile]) -> None:
    """A prompt in chunks, then tokens one by one from states and caches."""
    file = gguf(name)
    experts = LocalExpertClient(str(file.path), read_geometry(file.path), torch.float32)
    runner = load_runner(file.path, experts=experts)
    decoding, logits = runner.prefill(PROMPT, chunk=8)
    (answer,) = runner.greedy([decoding], logits[-1:], 12)
    assert answer == greedy_answer(file.reference, PROMPT, 12, answer)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", REARRANGED)
def test_ranks_hold_what_they_read_of_safetensors(
    name: str, rank: int, gguf: Callable[[str], GgufFile], tmp_path: Path
) -> None:
    """Parts of rearranged tensors, after all that becomes of them, are those of the published layout."""
    file = gguf(name)
    file.reference.save_pretrained(tmp_path)
    loaded: list[dict[str, torch.Tensor]] = []
    for path in (file.path, tmp_path):
        model = build_model(read_model_config(path), parallel=ParallelContext(tp_rank=rank, tp_size=2))
        load_weights(model, path)
        loaded.append({key: value.to_dense() for key, value in model.state_dict().items()})
    assert loaded[0].keys() == loaded[1].keys()
    for key, found in loaded[0].items():
        # A norm's weight has 1 added and taken off, a decay its exponential and logarithm.
        torch.testing.assert_close(found, loaded[1][key], rtol=1e-6, atol=1e-6, msg=key)


def test_every_architecture_is_tried() -> None:
    """The table promises no architecture that no file was read of."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES

    from tests.helpers.gguf_metadata import ARCHITECTURES, NEWER

    names = {
        (case.architecture if case.architecture.islower() else None)
        or NEWER.get(case.model_type)
        or NEWER.get(f"{case.model_type}_text")
        or MODEL_ARCH_NAMES[MODEL_ARCH[case.architecture or ARCHITECTURES[case.model_type]]]
        for case in CASES.values()
    }
    assert names == set(GGUF_ARCHITECTURES)
