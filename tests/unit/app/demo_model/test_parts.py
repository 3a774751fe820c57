"""The demo builder's parts: rounding, file format, rotary order, and the split's own consistency."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from app.demo_model import DemoModelError, recipe
from app.demo_model.convert import (
    ExpertSplit,
    bfloat16_tensor,
    float32_tensor,
    to_bfloat16_bits,
    unpermute_rotary,
    write_index,
    write_shard,
)
from app.demo_model.download import sha256_file


def test_bfloat16_rounding_equals_torch() -> None:
    """Rounding is to nearest, ties to even, as torch does it: every tie and both neighbours of it."""
    upper = np.arange(0x3F00, 0x4100, dtype=np.uint32) << np.uint32(16)
    bits = np.concatenate([upper | np.uint32(low) for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = np.concatenate([bits.view(np.float32), -bits.view(np.float32), np.zeros(1, np.float32)])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(to_bfloat16_bits(values), expected)


def test_shard_is_read_back_by_safetensors(tmp_path: Path) -> None:
    """A shard written here is a valid safetensors file: names, dtypes, shapes and values survive."""
    generator = np.random.default_rng(3)
    values = generator.standard_normal((5, 7), dtype=np.float32)
    column = values[:, 2:5]  # not contiguous
    path = tmp_path / "model.safetensors"
    write_shard(path, {"a": bfloat16_tensor(column), "router": float32_tensor(column)})
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"a", "router"}
        assert torch.equal(file.get_tensor("a"), torch.from_numpy(column.copy()).to(torch.bfloat16))
        assert torch.equal(file.get_tensor("router"), torch.from_numpy(column.copy()))


def test_index_names_files_and_size(tmp_path: Path) -> None:
    """The index has the two keys that readers of sharded checkpoints need."""
    write_index(tmp_path, {"a": "model-1.safetensors"}, 12)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 12}, "weight_map": {"a": "model-1.safetensors"}}


def test_rotary_order_is_undone_per_head() -> None:
    """Rows of each head come back from interleaved pairs to two halves, heads unmixed."""
    half_order = np.arange(12, dtype=np.float32).reshape(2, 6)  # 2 heads, head_dim 6
    interleaved = half_order[:, [0, 3, 1, 4, 2, 5]].reshape(12, 1)
    np.testing.assert_array_equal(unpermute_rotary(interleaved, 2)[:, 0], half_order.reshape(-1))


def test_packaged_split_is_the_pinned_one() -> None:
    """The packaged split has the pinned checksum, and every layer orders every intermediate channel exactly
    once.
    """
    assert sha256_file(recipe.SPLIT_FILE) == recipe.SPLIT_SHA256
    split = ExpertSplit.load(recipe.SPLIT_FILE)
    assert np.isfinite(split.router).all()
    assert np.isfinite(split.bias).all()


def test_split_that_repeats_a_channel_is_refused() -> None:
    """An intermediate channel used twice (and another never) would silently change the model."""
    split = ExpertSplit.load(recipe.SPLIT_FILE)
    order = split.neuron_order.copy()
    order[4, 0] = order[4, 1]
    with pytest.raises(DemoModelError, match="permutation"):
        ExpertSplit(order, split.router, split.bias)


def test_split_with_a_wrong_shape_is_refused() -> None:
    """The error names the shape found and the one expected."""
    split = ExpertSplit.load(recipe.SPLIT_FILE)
    with pytest.raises(DemoModelError, match=r"\(30, 15, 576\)"):
        ExpertSplit(split.neuron_order, split.router[:, :15], split.bias)


def test_geometry_of_config_and_split_agree() -> None:
    """Shared and routed experts together are exactly the dense MLP."""
    config = recipe.hf_config()
    experts = config["n_shared_experts"] + config["n_routed_experts"]
    assert experts * config["moe_intermediate_size"] == recipe.DENSE_INTERMEDIATE_SIZE
    assert config["num_attention_heads"] * config["head_dim"] == config["hidden_size"]
