"""Invariant: every published model would load completely: its configuration is read, its layers compose, each
tensor they need is there with its shape, none is left over, and all experts are found in a known format."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gpu_service.loader.load import find_sources
from gpu_service.loader.names import expected_names, wanted_name
from gpu_service.models.compose import build_model
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import NUMPY_DTYPES, CheckpointIndex
from moebius.checkpoint.matrix_finder import MatrixFinder
from moebius.checkpoint.quantisation import read_schemes
from moebius.models.checkpoint import find_layout
from moebius.models.config import ModelConfig, ModelOverrides
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry, read_model_config
from moebius.models.registry import FAMILIES
from tests.helpers.layer_values import router_of
from tests.helpers.published_checkpoints import FIXTURES, Published, count, expand

NAMES = sorted(file.stem for file in FIXTURES.glob("*.json"))
# How the experts of a model are kept, where not as plain numbers of 16 bits.
FORMATS = {
    "deepseek-v3": "fp8_block",
    "deepseek-v3.2": "fp8_block",
    "deepseek-v4-flash": "mxfp4",
    "deepseek-v4-pro": "mxfp4",
    "deepseek-v4.1-flash": "mxfp4",
    "glm-5.3-flash": "fp8_block",
    "gpt-oss-120b": "mxfp4",
    "gpt-oss-20b": "mxfp4",
    "kimi-k2": "fp8_block",
    "kimi-k2.5": "int4_g32",
    "kolibri-1": "fp8_block",
    "mimo-v2-flash": "fp8_block",
    "minimax-m2": "fp8_block",
    "minimax-m3-mxfp8": "mxfp8",
    "qwen3-30b-a3b-fp8": "fp8_block",
}
# What inventories of the published files count.
PUBLISHED_TENSORS = {
    "deepseek-v3.2": 92425,
    "deepseek-v4-flash": 69187,
    "deepseek-v4-pro": 145116,
    "deepseek-v4.1-flash": 96085,
    "gemma-4-26b-a4b": 1013,
    "glm-4.7-flash": 9703,
    "glm-5": 59870,
    "gpt-oss-20b": 459,
    "kimi-k2": 139644,
    "kimi-k2.5": 208550,
    "glm-4.5v": 18106,
    "glm-5.3-flash": 76108,
    "minimax-m2": 96103,
    "minimax-m3": 23416,
    "minimax-m3-mxfp8": 45838,
    "nemotron-3-super-120b-a12b": 42683,
    "qwen3-30b-a3b-fp8": 37491,
    "qwen3-next-80b-a3b": 75944,
    "qwen3-vl-30b-a3b": 882,
    "qwen3.5-35b-a3b": 1811,
    "qwen3.8-flash-next": 1658,
    "step-3.5-flash": 804,
    "step-3.7-flash": 1471,
}
# What the headers of all files come to, or their index says.
PUBLISHED_BYTES = {
    "deepseek-v4-flash": 159_609_485_896,
    "deepseek-v4-pro": 864_704_792_696,
    "gemma-4-26b-a4b": 51_611_872_412,
    "glm-5.3-flash": 328_326_771_576,
    "minimax-m3": 854_172_958_720,
    "qwen3.8-flash-next": 359_999_963_128,
}
# The numbers that all tensors hold, as the publishers' pages and headers of GGUF files count them.
PUBLISHED_PARAMETERS = {
    "laguna-xs.2": 33_442_617_088,
    "llama-4-maverick": 401_583_781_376,
    "llama-4-scout": 108_641_793_536,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
}
TEXT_ONLY = ModelOverrides(language_model_only=True)


def _check_dense(index: CheckpointIndex, config: ModelConfig) -> None:
    """What the engine's loader does before it reads the first weight."""
    model = build_model(config)
    present = {}
    for name, info in index.tensors.items():
        canonical = wanted_name(name, config)
        if canonical is not None:
            assert canonical not in present, f"{name} and another are both {canonical}"
            present[canonical] = info
    expected = expected_names(model.config)
    sources = find_sources(index.directory, present, expected, read_schemes(index.directory))
    assert sources.keys() == expected.keys()


@pytest.mark.parametrize("name", NAMES)
def test_dense_layers_load_completely(name: str, tmp_path: Path) -> None:
    index = Published.load(name).index(tmp_path)
    config = read_model_config(tmp_path, TEXT_ONLY)
    # Each key is read, or known to change nothing.
    assert config.unread_keys == ()
    _check_dense(index, config)


@pytest.mark.parametrize("name", list(PUBLISHED_TENSORS))
def test_there_are_as_many_tensors_as_were_published(name: str) -> None:
    """A naming rule that is wrong somewhere hardly gives the right number of names."""
    assert sum(count(pattern) for pattern, _, _ in Published.load(name).tensors) == PUBLISHED_TENSORS[name]


@pytest.mark.parametrize("name", list(PUBLISHED_BYTES))
def test_there_are_as_many_bytes_as_were_published(name: str) -> None:
    """Types, too, each of a tensor's."""
    tensors = Published.load(name).tensors
    sizes = [count(one) * math.prod(shape) * NUMPY_DTYPES[dtype].itemsize for one, dtype, shape in tensors]
    assert sum(sizes) == PUBLISHED_BYTES[name]


@pytest.mark.parametrize("name", list(PUBLISHED_PARAMETERS))
def test_there_are_as_many_parameters_as_were_published(name: str) -> None:
    tensors = Published.load(name).tensors
    assert sum(count(one) * math.prod(shape) for one, _, shape in tensors) == PUBLISHED_PARAMETERS[name]


def _experts(index: CheckpointIndex, geometry: MoeGeometry) -> ExpertCheckpoint:
    finder = MatrixFinder(index.tensors, index.directory, read_schemes(index.directory))
    return ExpertCheckpoint(geometry, find_layout(index, geometry.model_type), finder)


@pytest.mark.parametrize("name", NAMES)
def test_all_experts_are_found(name: str, tmp_path: Path) -> None:
    """Every MoE layer has the first and the last of them; the fixture numbers as many as there are."""
    published = Published.load(name)
    index = published.index(tmp_path)
    geometry = read_geometry(tmp_path)
    config = read_model_config(tmp_path, TEXT_ONLY)
    assert (geometry.moe_layers, geometry.num_experts) == (
        config.moe_layer_ids,
        router_of(config).num_experts,
    )
    # Of two kinds of experts, each has its last one.
    last, _, _ = geometry.stored_place(geometry.num_experts - 1)
    assert published.last_experts <= {last, last // 2 if geometry.kinds else last}
    checkpoint = _experts(index, geometry)
    for layer in geometry.moe_layers:
        for expert in (0, geometry.num_experts - 1):
            found = checkpoint.expert(layer, expert)
            found.check_kept()
            assert found.formats[0] == FORMATS.get(name, "bfloat16")


# Spellings that transformers has no configuration class for, and where it knows them as others.
_KNOWN_AS = {
    "AXK1": "axk1",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe",
    "kimi_k2": "deepseek_v3",
    "minimax_m1": "minimax",
}
# No release of transformers reads it.
_UNKNOWN = "deepseek-v4.1-flash"
# Read of generation_config.json or the tokenizer as well; classes have defaults where a model has none.
_OF_ENDS = ("bos_token_id", "eos_token_ids", "unread_keys")


def _saved_again(raw: dict[str, Any]) -> dict[str, Any]:
    """By transformers 5: `dtype`, `rope_parameters`, lists for layers, and every default spelled out."""
    known = _KNOWN_AS.get(raw["model_type"], raw["model_type"])
    found = CONFIG_MAPPING[known].from_dict(copy.deepcopy(raw) | {"model_type": known})
    saved: dict[str, Any] = json.loads(found.to_json_string(use_diff=False))
    return saved | {"model_type": raw["model_type"]}


def _with_base(saved: dict[str, Any], factor: float, *, old: bool) -> dict[str, Any]:
    """With another base of rotation, if `old` in keys of transformers 4: `torch_dtype`, `rope_theta` and
    `rope_scaling`. By kinds of layers, rotation has always been spelled as now and stays as it is.
    """
    found = dict(saved)
    if isinstance(found.get("text_config"), dict):
        found["text_config"] = _with_base(found["text_config"], factor, old=old)
    rope = found.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        found["rope_parameters"] = rope = {**rope, "rope_theta": rope["rope_theta"] * factor}
        if old:
            del found["rope_parameters"]
            outside = ("rope_theta", "partial_rotary_factor")
            found |= {key: rope[key] for key in outside if key in rope}
            found["rope_scaling"] = {key: value for key, value in rope.items() if key not in outside}
    if old and "dtype" in found:
        found["torch_dtype"] = found.pop("dtype")
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name != _UNKNOWN])
def test_new_and_old_spellings_are_read_alike(name: str, tmp_path: Path) -> None:
    """What was published, and the same saved again by transformers 5 or in the keys of transformers 4, as
    fine-tunes and quantised copies are. A key that only one spelling is read from would keep its default.
    """

    def read(config: dict[str, Any] | None = None) -> dict[str, Any]:
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        found = read_model_config(tmp_path, TEXT_ONLY)
        assert found.unread_keys == ()
        return {key: value for key, value in asdict(found).items() if key not in _OF_ENDS}

    Published.load(name).index(tmp_path)
    published = read()
    saved = _saved_again(json.loads((tmp_path / "config.json").read_text()))
    assert read(saved) == read(_with_base(saved, 1.0, old=True)) == published
    if "rope_theta" in ((saved.get("text_config") or saved).get("rope_parameters") or {}):
        new, old = (read(_with_base(saved, 3.0, old=old)) for old in (False, True))
        assert new == old
        rotates = any((layer["mixer"] or {}).get("rope") for layer in published["layers"])
        assert (new != published) == rotates


def test_every_family_has_a_published_model() -> None:
    """But for the text models of DeepSeek-V4.1, Gemma 4, Llama 4, Mistral Small 4, Qwen3.5 and Qwen3.8 by
    themselves, two relatives of Granite 3 whose sizes no source in reach quotes (names are what transformers
    writes), and other spellings of A.X K1 and MiniMax-M1.
    """
    covered = {str(Published.load(name).config["model_type"]) for name in NAMES}
    texts = {
        "deepseek_v41_text",
        "gemma4_text",
        "llama4_text",
        "mistral4",
        "qwen3_5_moe_text",
        "qwen4_exp_text",
    }
    others = {"axk1", "granitemoe_swa", "granitemoeshared", "minimax_text_01"}
    assert set(FAMILIES) - covered <= texts | others


def test_nvidias_copy_of_step_3_7_has_its_names_inside_of_model(tmp_path: Path) -> None:
    """What is read is the same: text below `model.language_model`, the tower below `model`, no MTP layers."""
    published = Published.load("step-3.7-flash")
    stored = [entry for entry in published.tensors if "layers.{45..47}" not in entry[0]]
    inside = {"model": "model.language_model", "vi": "model.vi"}
    moved = [
        (re.sub("^(model|vi)", lambda match: inside[match[1]], name), dtype, shape)
        for name, dtype, shape in stored
    ]
    assert moved != stored
    family = FAMILIES["step3p7"]
    assert family.vision is not None
    for (name, *_), (old, *_) in zip(moved, stored, strict=True):
        for one, other in zip(expand(name), expand(old), strict=True):
            assert family.vision.tower_name(one) == family.vision.tower_name(other)
            assert family.names.canonical_name(one, 45) == family.names.canonical_name(other, 45)
    index = Published(published.config, moved).index(tmp_path)
    _check_dense(index, read_model_config(tmp_path, TEXT_ONLY))
    assert _experts(index, read_geometry(tmp_path)).expert(44, 287).formats[0] == "bfloat16"


def test_patterns() -> None:
    assert expand("a.{0..2}.b.{4,7}") == [f"a.{i}.b.{j}" for i in range(3) for j in (4, 7)]
    assert expand("plain") == ["plain"]
    assert [count(pattern) for pattern in ("a.{0..2}.b.{4,7}", "plain")] == [6, 1]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3-30b-a3b", {"num_hidden_layers": 49}, "missing: model.layers.48.input_layernorm.weight"),
        ("qwen3-30b-a3b", {"num_hidden_layers": 47}, "unused: model.layers.47"),
        ("mixtral-8x7b", {"num_key_value_heads": 4}, "mis-shaped.*k_proj"),
    ],
)
def test_a_configuration_that_does_not_fit_is_noticed(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Or the tests above would prove nothing."""
    published = Published.load(name)
    index = Published(published.config | change, published.tensors).index(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        _check_dense(index, read_model_config(tmp_path, TEXT_ONLY))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """One more than the checkpoint has."""
    published = Published.load("deepseek-v2-lite")
    index = Published(published.config | {"n_routed_experts": 65}, published.tensors).index(tmp_path)
    geometry = read_geometry(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.64\.gate_proj"):
        _experts(index, geometry).expert(1, 64)


@pytest.mark.parametrize(
    "name", ["glm-5.3-flash", "qwen3.8-flash-next", "deepseek-v3.2", "hy4-preview", "mistral-large-4"]
)
def test_layers_with_an_indexer_have_three_names(name: str, tmp_path: Path) -> None:
    """That of transformers 5.23, and those of published files and of its releases before."""
    published = Published.load(name).config
    text = published.get("text_config", published)
    kinds = text.get("layer_types") or ["indexed_attention"] * text["num_hidden_layers"]
    read = []
    for attends in ("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"):
        text["layer_types"] = [kind if kind == "linear_attention" else attends for kind in kinds]
        (tmp_path / "config.json").write_text(json.dumps(published))
        read.append(read_model_config(tmp_path))
    assert read[0] == read[1] == read[2]
