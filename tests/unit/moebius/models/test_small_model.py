"""Guards which models may draft tokens for which: by configuration, tokenizer and settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from moebius.config import GpuConfig, ModelConfigSection, MoebiusConfig
from moebius.errors import UserError
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.served import read_served_model, with_drafts
from moebius.models.small_model import check_tokenizers
from tests.helpers.tiny_models import tiny_config
from tests.helpers.tiny_tokenizer import byte_level_tokenizer

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 220,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns the directory of a model without weights."""
    directory = tmp_path / "model"
    tiny_config("qwen3_moe").save_pretrained(directory)
    return directory


def small(directory: Path, **changes: Any) -> Path:
    """Returns the directory of a dense model without weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(DENSE | changes))
    return directory


def settings(model: Path, second: object = "", method: Any = "draft_model") -> MoebiusConfig:
    """Returns settings with a second model."""
    return MoebiusConfig(
        model=ModelConfigSection(model=str(model), dtype="float32"),
        gpu=GpuConfig(speculative_method=method, speculative_model=str(second)),
    )


def read(model: Path, second: Path) -> ModelConfig:
    """Returns a model with a small one."""
    return read_served_model(settings(model, second))


def test_the_small_model_is_read_for_the_large_one(model: Path, tmp_path: Path) -> None:
    """It has the large one's type of activations and context, whatever its own are."""
    config = read(model, small(tmp_path / "small"))
    assert config.small_model is not None
    assert config.small_model.directory == str(tmp_path / "small")
    found = config.small_model.config
    assert (found.model_type, found.dtype, found.max_model_len) == ("qwen3", "float32", config.max_model_len)
    assert not found.moe_layer_ids


def test_auto_reads_what_the_second_model_is(model: Path, tmp_path: Path) -> None:
    """A head says so itself; any other model drafts with tokens of its own."""
    head = small(tmp_path / "head", architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=90)
    other = small(tmp_path / "small")
    methods = [
        with_drafts(settings(model, second, "auto")).gpu.speculative_method for second in (head, other)
    ]
    assert methods == ["eagle3", "draft_model"]


@pytest.mark.parametrize(
    ("method", "second", "message"),
    [
        ("draft_model", "", "draft_model needs speculative_model, the directory of a smaller model"),
        ("mtp", "/small", "'/small' is not read by speculative_method mtp; allowed: .*draft_model"),
        ("off", "/small", "'/small' is not read by speculative_method off"),
    ],
)
def test_methods_and_models_that_do_not_go_together_are_refused(
    method: str, second: str, message: str, model: Path
) -> None:
    """Nothing that was named is left aside in silence."""
    with pytest.raises(UserError, match=message):
        read_served_model(settings(model, second, method))


def test_a_dense_model_is_none_to_serve(tmp_path: Path) -> None:
    """Families that only draft are not among those that are served."""
    with pytest.raises(
        ModelConfigError, match=r"is a dense model; only mixture-of-experts models are served"
    ):
        read_served_model(settings(small(tmp_path / "small"), "", "off"))


def test_a_small_model_with_states_is_refused(model: Path, tmp_path: Path) -> None:
    """What it would keep besides pages is no part of the engine's books."""
    tiny_config("qwen3_next").save_pretrained(tmp_path / "small")
    with pytest.raises(ModelConfigError, match=r"a draft model of model_type qwen3_next .* a state"):
        read(model, tmp_path / "small")


def test_tokenizers_are_compared(model: Path, tmp_path: Path) -> None:
    """They may differ in a few tokens that one of them lacks, and in the size that embeddings have."""
    directory = small(tmp_path / "small")
    config = read(model, directory)
    with pytest.raises(ModelConfigError, match="220 tokens, the model's 211, and neither has a tokenizer"):
        check_tokenizers(model, config)
    tokenizer = byte_level_tokenizer(300)
    tokenizer.save(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<think>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    check_tokenizers(model, config)
    tokenizer.add_tokens([f"<more {number}>" for number in range(200)])
    tokenizer.save(str(directory / "tokenizer.json"))
    with pytest.raises(ModelConfigError, match="201 tokens are in one tokenizer only"):
        check_tokenizers(model, config)
    described = json.loads((model / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    one, other = "a", "b"
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (directory / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ModelConfigError, match=r"token \d+ is 'b', in the model it is 'a'"):
        check_tokenizers(model, config)
    check_tokenizers(model, replace(config, small_model=None))
