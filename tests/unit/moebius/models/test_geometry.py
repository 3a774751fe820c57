"""Guards what is read from config.json, and how sizes are divided."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.split import block_bounds, equal_shares, split_bounds
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import TinyMoe


def geometry(directory: Path, model: TinyMoe, top_k: int | None = None, **changes: Any) -> MoeGeometry:
    """Returns the geometry of the model's config.json with changes; None drops a key."""
    config = {key: value for key, value in {**model.config(), **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return read_geometry(directory, top_k)


def test_both_families(tmp_path: Path) -> None:
    """Each number lands in its field, whatever the family calls it."""
    for family, layers in (("qwen3_moe", (0, 1, 2)), ("glm4_moe", (1, 2))):
        model = TinyMoe(family="glm4_moe" if family == "glm4_moe" else "qwen3_moe")
        found = geometry(tmp_path, model)
        assert (found.hidden_size, found.moe_intermediate_size, found.num_experts) == (48, 56, 7)
        assert (found.num_layers, found.moe_layers, found.top_k, found.dtype) == (3, layers, 3, "float32")
    # transformers 5 writes this name.
    renamed = geometry(tmp_path, TinyMoe(), num_experts=None, num_local_experts=9)
    assert renamed.num_experts == 9


def test_sparse_steps_and_dense_layers(tmp_path: Path) -> None:
    """Qwen3-MoE: every second layer is MoE, except those that are said to be dense."""
    found = geometry(tmp_path, TinyMoe(num_layers=8), decoder_sparse_step=2, mlp_only_layers=[3])
    assert found.moe_layers == (1, 5, 7)


def test_dtype_spellings(tmp_path: Path) -> None:
    """The newer key wins; without any, bfloat16, which is what every published model of these families is."""
    assert geometry(tmp_path, TinyMoe(), dtype="bfloat16").dtype == "bfloat16"
    assert geometry(tmp_path, TinyMoe(), torch_dtype=None).dtype == "bfloat16"
    assert geometry(tmp_path, TinyMoe(), torch_dtype="float16").dtype == "bfloat16", "as AWQ and GPTQ say"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "bert"}, "'bert' is not supported; allowed: .*glm4_moe.*gpt_oss.*qwen3_moe"),
        ({"hidden_size": 0}, "hidden_size = 0 is not"),
        ({"num_experts": None}, "num_experts or num_local_experts is missing"),
        ({"num_experts_per_tok": 8}, r"num_experts_per_tok\) = 8 .* 1 to 7"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' .* allowed: silu"),
        ({"dtype": "int8"}, "dtype = 'int8' .* allowed: bfloat16, float16, float32"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers = '3' is not"),
    ],
)
def test_bad_configurations_name_the_key(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    """Key, value and what is allowed."""
    with pytest.raises(CheckpointError, match=complaint):
        geometry(tmp_path, TinyMoe(), **changes)


def test_top_k_override(tmp_path: Path) -> None:
    """Any number of experts the model has."""
    assert geometry(tmp_path, TinyMoe(), top_k=7).top_k == 7
    with pytest.raises(CheckpointError, match=r"top_k .* = 8 .* 1 to 7"):
        geometry(tmp_path, TinyMoe(), top_k=8)


def test_unreadable_config(tmp_path: Path) -> None:
    """Missing and malformed files are named."""
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_geometry(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        read_geometry(tmp_path)


@given(
    size=st.integers(1, 3000),
    shares=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    multiple=st.sampled_from([1, 16, 64]),
)
def test_bounds_cover_the_size_in_proportion(size: int, shares: list[int], multiple: int) -> None:
    """Consecutive, never empty, aligned where there is room, and within one unit of the exact proportion."""
    if size < len(shares):
        with pytest.raises(ValueError, match="cannot be divided"):
            split_bounds(size, shares, multiple)
        return
    bounds = split_bounds(size, shares, multiple)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(begin < end for begin, end in bounds)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    unit = multiple if size // multiple >= len(shares) else 1
    assert all(end % unit == 0 for _, end in bounds[:-1])
    if size // unit >= sum(shares):
        exact = [size * sum(shares[: i + 1]) / sum(shares) for i in range(len(shares))]
        assert all(abs(end - want) <= unit * 1.5 for (_, end), want in zip(bounds, exact, strict=True))


@given(blocks=st.integers(1, 40), count=st.integers(1, 16), multiple=st.sampled_from([32, 64]))
def test_equal_parts_of_blocks_begin_where_their_factors_do(blocks: int, count: int, multiple: int) -> None:
    """A packed part has a factor for as many weights as divide its length and 256, so of one block each."""
    size = 256 * blocks
    if size // multiple < count:
        return
    bounds = block_bounds(size, (1,) * count, multiple)
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == size
    assert all(begin % math.gcd(end - begin, 256) == 0 for begin, end in bounds)
    lengths = [end - begin for begin, end in bounds]
    assert max(lengths) - min(lengths) <= 2 * multiple
    assert all(length % multiple == 0 for length in lengths)


def test_bad_shares_are_refused() -> None:
    """A share of nothing, no shares, and a list of the wrong length."""
    for shares in ((), (1, 0), (2, -1)):
        with pytest.raises(ValueError, match="shares"):
            split_bounds(10, shares)
    assert equal_shares(3, ()) == (1, 1, 1)
    with pytest.raises(ValueError, match="has 2 entries; split_count is 3"):
        equal_shares(3, (1, 2))
