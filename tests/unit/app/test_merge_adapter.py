"""Invariant: a merged checkpoint has `W + scale B A` where the adapter has matrices; nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app import cli
from app.merge_adapter import merge_adapter
from moebius.errors import UserError
from tests.helpers.tiny_models import make_tiny_model

RANK = 3
LAYER = "model.layers.0."
QUERY, EXPERT, HEAD, EMBEDDING = (
    f"{LAYER}self_attn.q_proj",
    f"{LAYER}mlp.experts.1.down_proj",
    "lm_head",
    "model.embed_tokens",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint in bfloat16 of two files, one of which holds the head alone."""
    directory = tmp_path_factory.mktemp("base")
    make_tiny_model("qwen3_moe", directory)
    weights: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        weights |= load_file(file)
        file.unlink()
    weights = {name: values.bfloat16() for name, values in weights.items()}
    parts = {"a.safetensors": {HEAD + ".weight"}}
    parts["b.safetensors"] = weights.keys() - parts["a.safetensors"]
    for part, names in parts.items():
        save_file({name: weights[name] for name in names}, directory / part)
    places = {name: part for part, names in parts.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def values_of(directory: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def write_adapter(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Writes an adapter as PEFT does."""
    directory.mkdir()
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", "use_dora": False} | config
    (directory / "adapter_config.json").write_text(json.dumps(described))
    save_file(
        {f"base_model.model.{name}": each for name, each in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    return directory


def low_rank(base: dict[str, torch.Tensor], module: str) -> dict[str, torch.Tensor]:
    """Returns random matrices for a module."""
    rows, columns = base[f"{module}.weight"].shape
    return {
        f"{module}.lora_A.weight": torch.randn(RANK, columns),
        f"{module}.lora_B.weight": torch.randn(rows, RANK),
    }


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (6 / RANK**0.5, 6 / RANK**0.5)),
        ({"alpha_pattern": {"experts.1.down_proj": 9}}, (2.0, 3.0)),
    ],
)
def test_products_are_added_and_all_else_stays(
    model: Path, tmp_path: Path, config: dict[str, Any], scales: tuple[float, float]
) -> None:
    """Products for attention and for an expert are each rounded once; the other file is the same one."""
    base = values_of(model)
    tensors = low_rank(base, QUERY) | low_rank(base, EXPERT)
    done = merge_adapter(model, write_adapter(tmp_path / "adapter", tensors, **config), tmp_path / "merged")
    assert (done.added, done.replaced) == (2, 0)
    merged = values_of(tmp_path / "merged")
    assert merged.keys() == base.keys()
    for module, scale in zip((QUERY, EXPERT), scales, strict=True):
        product = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
        wanted = (base[f"{module}.weight"].float() + scale * product).bfloat16()
        torch.testing.assert_close(merged.pop(f"{module}.weight"), wanted, rtol=2**-8, atol=0)
    assert all(torch.equal(values, base[name]) for name, values in merged.items())
    assert (tmp_path / "merged" / "a.safetensors").samefile(model / "a.safetensors")
    assert not (tmp_path / "merged" / "b.safetensors").samefile(model / "b.safetensors")
    assert (tmp_path / "merged" / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_embeddings_whole_tensors_and_a_tokenizer(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An embedding's product is turned; a head that was trained whole is taken, and so is the tokenizer."""
    base = values_of(model)
    vocabulary, hidden = base[f"{EMBEDDING}.weight"].shape
    a, b, head = torch.randn(RANK, vocabulary), torch.randn(hidden, RANK), torch.randn(vocabulary, hidden)
    adapter = write_adapter(
        tmp_path / "adapter",
        {
            f"{EMBEDDING}.lora_embedding_A": a,
            f"{EMBEDDING}.lora_embedding_B": b,
            f"{HEAD}.modules_to_save.weight": head,
        },
    )
    (adapter / "chat_template.jinja").write_text("other")
    with pytest.raises(SystemExit) as ended:
        cli.main(["models", "merge", str(model), str(adapter), str(tmp_path / "merged")])
    assert not ended.value.code
    assert (
        "1 matrices with the adapter's products, 1 tensors replaced, its tokenizer" in capsys.readouterr().out
    )
    merged = values_of(tmp_path / "merged")
    wanted = (base[f"{EMBEDDING}.weight"].float() + 2 * (b @ a).T).bfloat16()
    torch.testing.assert_close(merged[f"{EMBEDDING}.weight"], wanted, rtol=2**-8, atol=0)
    assert torch.equal(merged[f"{HEAD}.weight"], head.bfloat16())
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "other"


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"use_dora": True}, None, "use_dora is True; allowed: False"),
        ({"peft_type": "LOHA"}, None, "peft_type is 'LOHA'; allowed: 'LORA'"),
        ({"init_lora_weights": "pissa"}, None, "init_lora_weights is 'pissa'"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, None, "target_parameters"),
        ({"lora_alpha": "6"}, None, "lora_alpha is '6'; allowed: a number"),
        (
            {},
            {f"{LAYER}mlp.none.lora_A.weight": (3, 4), f"{LAYER}mlp.none.lora_B.weight": (4, 3)},
            "mlp.none",
        ),
        ({}, {f"{QUERY}.lora_A.weight": (3, 4)}, "only lora_A is there"),
        ({}, {f"{QUERY}.lora_A.weight": (3, 4), f"{QUERY}.lora_B.weight": (4, 2)}, "do not fit"),
        (
            {},
            {f"{QUERY}.lora_A.weight": (3, 4), f"{QUERY}.lora_B.weight": (4, 3)},
            "trained for another model",
        ),
        ({}, {f"{QUERY}.lora_magnitude_vector": (3,)}, "of a kind that cannot be merged"),
    ],
)
def test_what_cannot_be_merged_is_named(
    model: Path, tmp_path: Path, config: dict[str, Any], change: dict[str, Any] | None, message: str
) -> None:
    """Nothing is written then."""
    tensors = {name: torch.ones(shape) for name, shape in (change or {}).items()}
    adapter = write_adapter(tmp_path / "adapter", tensors or low_rank(values_of(model), QUERY), **config)
    with pytest.raises(UserError, match=message):
        merge_adapter(model, adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


def test_values_that_overflow_leave_nothing(model: Path, tmp_path: Path) -> None:
    """A merge that fails midway leaves no directory, and one that is there is not written to."""
    base = values_of(model)
    tensors = {name: values * 1e30 for name, values in low_rank(base, QUERY).items()}
    adapter = write_adapter(tmp_path / "adapter", tensors)
    with pytest.raises(UserError, match=r"q_proj.weight' with the adapter is not finite in BF16"):
        merge_adapter(model, adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
    with pytest.raises(UserError, match="exists; allowed: a new directory"):
        merge_adapter(model, adapter, model)
    assert all(torch.equal(values, base[name]) for name, values in values_of(model).items())
