"""Guards that ranks hold their parts of dequantised matrices, wherever groups, blocks and words end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpu_service.core.parallel import ParallelContext
from gpu_service.layers.linear import RowParallelLinear
from gpu_service.loader import sources
from gpu_service.loader.load import load_weights
from gpu_service.models.compose import build_model
from moebius import _kernels
from moebius.checkpoint.errors import CheckpointError
from moebius.kernels.source import SourceMatrix
from moebius.models.read import read_model_config
from tests.helpers.model_formats import MODEL_FORMATS
from tests.helpers.quantised_models import Models, cached_plain_models, quantise
from tests.tolerances import DEQUANTISED_FLOAT32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cached_plain_models(tmp_path_factory.mktemp("plain"))


def parameters(directory: Path, parallel: ParallelContext) -> dict[str, torch.Tensor]:
    """Returns a rank's, out of their packed layouts."""
    model = build_model(read_model_config(directory), parallel=parallel)
    load_weights(model, directory)
    found = dict(model.named_parameters())
    return {name: value.to_dense() if value.is_mkldnn else value for name, value in found.items()}


def check(quantised: Path, plain: Path, parallel: ParallelContext) -> None:
    expected = parameters(plain, parallel)
    for name, value in parameters(quantised, parallel).items():
        torch.testing.assert_close(value, expected[name], rtol=DEQUANTISED_FLOAT32, atol=0, msg=name)


@pytest.mark.parametrize("name", list(MODEL_FORMATS))
def test_ranks_hold_their_parts(name: str, models: Models, tmp_path: Path) -> None:
    """Four ranks cut groups, blocks of 128 and words of eight; the last one has padded rows of the head."""
    chosen = MODEL_FORMATS[name]
    model = quantise(models("deepseek_v3"), lambda _: chosen, chosen.config)
    quantised, plain = model.write(tmp_path / "quantised"), model.dequantised().write(tmp_path / "plain")
    for rank in (2, 3):
        check(quantised, plain, ParallelContext(rank, 4, 0, 1))


def test_a_part_of_a_sum_is_in_no_call_of_several_layers(models: Models, tmp_path: Path) -> None:
    """On a CPU a rank's product is summed over ranks by itself: one call for several layers would leave the
    sum out, and answers would be wrong in silence.
    """
    chosen = MODEL_FORMATS["awq_int4_g32"]
    directory = quantise(models("qwen3_moe"), lambda _: chosen, chosen.config).write(tmp_path)
    for parallel, is_whole in ((ParallelContext(), True), (ParallelContext(1, 2), False)):
        model = build_model(read_model_config(directory), parallel=parallel)
        load_weights(model, directory, "packed")
        sums = [m for m in model.modules() if isinstance(m, RowParallelLinear) and m.packed is not None]
        assert len(sums) > 1
        assert all((module.projection is not None) == is_whole for module in sums)


@pytest.mark.parametrize("name", ["fp8_block", "awq_int4_g32", "int8_words", "nvfp4"])
def test_blocks_and_threads_change_nothing(
    name: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a few rows, which no bound of groups or ranks falls on, dequantised three at a time."""
    chosen = MODEL_FORMATS[name]
    model = quantise(models("qwen3_moe"), lambda _: chosen, chosen.config)
    quantised, plain = model.write(tmp_path / "quantised"), model.dequantised().write(tmp_path / "plain")
    sizes: list[int] = []
    original = _kernels.dequantise_matrix

    def spy(source: SourceMatrix) -> NDArray[np.float32]:
        values = original(source)
        sizes.append(values.size)
        return values

    monkeypatch.setattr(_kernels, "dequantise_matrix", spy)
    monkeypatch.setattr(sources, "_BLOCK_ELEMENTS", 24 * 160)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    check(quantised, plain, ParallelContext(1, 2, 0, 1))
    assert max(sizes) <= 24 * 160, "no more is held in float32 than the threads' blocks"


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_read_their_quantised_ends(stage: int, models: Models, tmp_path: Path) -> None:
    """The embedding's tensors are the first stage's, the head's the last one's, none of them unused."""
    chosen = MODEL_FORMATS["int8"]
    model = quantise(models("qwen3_moe"), lambda _: chosen, chosen.config)
    quantised, plain = model.write(tmp_path / "quantised"), model.dequantised().write(tmp_path / "plain")
    check(quantised, plain, ParallelContext(0, 1, stage, 2))


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_quantised_head_with_a_tied_embedding(is_copy: bool, models: Models, tmp_path: Path) -> None:
    """A copy is left out with all of its tensors, scales included; one of other values is used."""
    chosen = MODEL_FORMATS["int8"]
    model = quantise(models("qwen3_moe"), lambda _: chosen, chosen.config)
    model.config["tie_word_embeddings"] = True
    for part in ("weight", "weight_scale") if is_copy else ():
        model.tensors[f"lm_head.{part}"] = model.tensors[f"model.embed_tokens.{part}"]
    loaded = parameters(model.write(tmp_path), ParallelContext())
    assert ("lm_head.weight" in loaded) is not is_copy
    for name in ("model.embed_tokens.weight", *(() if is_copy else ("lm_head.weight",))):
        meant = torch.from_numpy(model.meant[name])
        torch.testing.assert_close(loaded[name], meant, rtol=DEQUANTISED_FLOAT32, atol=0)


def test_what_quantisers_leave_next_to_weights_is_left_aside(models: Models, tmp_path: Path) -> None:
    """Scales of activations and of 8-bit caches change no weight; a plain checkpoint has none of them."""
    chosen = MODEL_FORMATS["fp8_tensor"]
    model = quantise(models("qwen3_moe"), lambda _: chosen, chosen.config)
    attention, one = "model.layers.0.self_attn", np.ones(1, np.float32)
    extra = dict.fromkeys((f"{attention}.q_proj.input_scale", f"{attention}.k_proj.k_scale"), one)
    expected = parameters(model.write(tmp_path / "without"), ParallelContext())
    model.tensors |= extra
    found = parameters(model.write(tmp_path / "with"), ParallelContext())
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    plain = model.dequantised()
    with pytest.raises(CheckpointError, match=r"2 unused: .*k_proj\.k_scale, .*q_proj\.input_scale"):
        parameters(plain.write(tmp_path / "plain"), ParallelContext())
