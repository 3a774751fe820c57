"""Invariant: experts of two kinds and widths are computed as parts of one width, chosen by a token's id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.ops.rope import section_axes
from gpu_service.ops.router import choose_by_kind
from gpu_service.ops.triton.router import choose_by_kind as triton_choose_by_kind
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.reader import SliceReader
from moebius.models.config import ModelConfig, ModelConfigError, ModelOverrides
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.layers.gqa import GQA
from moebius.models.layers.router import ExpertKindsConfig
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.layer_values import first, first_moe, shared_width
from tests.helpers.published_checkpoints import Published
from tests.helpers.quantised_checkpoints import QuantisedMoe
from tests.helpers.tiny_models import make_tiny_model
from tests.tolerances import EXPERTS_FLOAT32

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")
Choice = tuple[torch.Tensor, torch.Tensor]


def _choices(tokens: int, top_k: int, seed: int) -> tuple[torch.Tensor, Choice, Choice]:
    """Returns the ids of 8 tokens, and of 5 experts of either kind; the last row is padding."""
    generator = torch.Generator().manual_seed(seed)

    def choice() -> Choice:
        ids = torch.rand(tokens, 5, generator=generator).argsort(1)[:, :top_k].int().contiguous()
        ids[-1] = -1
        return torch.rand(tokens, top_k, generator=generator), ids

    return torch.randint(0, 8, (tokens,), generator=generator), choice(), choice()


def test_a_token_is_computed_by_the_parts_of_its_experts() -> None:
    """The first kind's experts have three parts each, then the second's one; each weighs as its expert."""
    tokens, first, second = _choices(9, 2, seed=1)
    weights, ids = choose_by_kind.reference(tokens, torch.tensor([2, 5]), first, second, 5, (3, 1))
    assert ids.shape == weights.shape == (9, 6)
    for row, token in enumerate(tokens.tolist()):
        own, parts, begin = (second, 1, 15) if token in (2, 5) else (first, 3, 0)
        pairs = zip(own[0][row].tolist(), own[1][row].tolist(), strict=True)
        wanted = [
            (begin + expert * parts + part, weight)
            for weight, expert in pairs
            if expert >= 0
            for part in range(parts)
        ]
        found = zip(ids[row].tolist(), weights[row].tolist(), strict=True)
        assert [pair for pair in found if pair[0] >= 0] == wanted
    assert {2, 5} & set(tokens[:-1].tolist())


@interpreted
@settings(deadline=None)
@given(
    count=st.integers(1, 6),
    top_k=st.integers(1, 5),
    parts=st.sampled_from([(3, 1), (2, 3), (1, 1), (7, 3)]),
    second=st.sets(st.integers(0, 7), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_the_kernel_is_the_reference(
    count: int, top_k: int, parts: tuple[int, int], second: set[int], seed: int
) -> None:
    tokens, text, images = _choices(count, top_k, seed)
    arguments = tokens, torch.tensor(sorted(second)), text, images, 5, parts
    wanted, found = choose_by_kind.reference(*arguments), triton_choose_by_kind(*arguments)
    assert torch.equal(found[1], wanted[1])
    used = wanted[1] >= 0
    assert torch.equal(found[0][used], wanted[0][used])


def test_parts_have_places_in_the_checkpoint() -> None:
    kinds = ExpertKindsConfig(num_experts=3, top_k=2, widths=(12, 8), tokens=(7,))
    assert (kinds.part_size, kinds.num_parts, kinds.total_parts, kinds.most_parts) == (4, (3, 2), 15, 6)
    places = [kinds.stored_place(part) for part in range(15)]
    assert places[:4] == [(0, 0, 12), (0, 4, 12), (0, 8, 12), (1, 0, 12)]
    assert places[9:12] == [(3, 0, 8), (3, 4, 8), (4, 0, 8)]
    assert len(set(places)) == 15


@pytest.mark.parametrize("name", ["ernie4_5_vl_moe", "ernie4_5_moe_vl_no_shared_tied"])
def test_parts_of_an_expert_add_up_to_it(name: str, tmp_path: Path) -> None:
    """Parts of either kind add up, as the servers' reader has them."""
    make_tiny_model(name, tmp_path)
    geometry = read_geometry(tmp_path)
    assert geometry.kinds is not None
    client = LocalExpertClient(str(tmp_path), geometry, torch.float32)
    layer, rows = geometry.moe_layers[0], torch.randn(5, geometry.hidden_size)
    for number in (0, geometry.kinds.num_experts):
        parts = [p for p in range(geometry.num_experts) if geometry.stored_place(p)[0] == number]
        chosen = parts + [-1] * (geometry.top_k - len(parts))
        ids = torch.tensor([chosen] * 5, dtype=torch.int32)
        answer = client.collect(client.submit(layer, rows, ids, torch.ones(ids.shape)))
        finder, layout = client.checkpoint.finder, client.checkpoint.layout
        whole = []
        for which in ("gate", "up", "down"):
            width = geometry.stored_place(parts[0])[2]
            shape = (geometry.hidden_size, width) if which == "down" else (width, geometry.hidden_size)
            template = layout.layout.template(which)
            found = finder.find(layout.name(layer, number, which), shape, template, number)
            with SliceReader() as reader:
                whole.append(torch.from_numpy(np.array(found.read(reader).codes)))
        gate, up, down = whole
        wanted = (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
        assert (answer - wanted).abs().max() / wanted.abs().max() < EXPERTS_FLOAT32


@pytest.mark.parametrize("encoder", ["bfloat16", "fp8_block", "compressed_int4_g32_zeros", "int8"])
def test_a_part_is_read_as_a_slice_of_the_whole(encoder: str, tmp_path: Path) -> None:
    """Codes and scales, of rows and of columns; its bytes are its share."""
    sizes = TinyMoe(hidden_size=96, moe_intermediate_size=256, num_layers=2, num_experts=3)
    checkpoint = ExpertCheckpoint.open(
        str(model := QuantisedMoe(encoder, sizes).write(tmp_path / "model")), read_geometry(model)
    )
    layer, part = checkpoint.model.moe_layers[0], slice(128, 256)
    found = checkpoint.expert(layer, 1)
    with SliceReader() as reader:
        for matrix, are_columns in ((found.up, False), (found.down, True)):
            own = matrix.channels(range(128, 256), are_columns)
            sliced = (None, part) if are_columns else (part, None)
            read, wanted = own.read(reader), matrix.read(reader, *sliced)
            assert (read.rows, read.cols) == (wanted.rows, wanted.cols)
            assert read.scale_row_begin == wanted.scale_row_begin
            for name in ("codes", "scales", "zeros", "column_scale"):
                ours, theirs = getattr(read, name), getattr(wanted, name)
                assert (ours is None) == (theirs is None)
                assert ours is None or np.array_equal(ours, theirs), name
            # Half of one of them, but for scales of whole rows.
            assert own.nbytes == pytest.approx(matrix.nbytes / 2, rel=0.01)


def test_parts_that_would_divide_groups_are_refused(tmp_path: Path) -> None:
    sizes = TinyMoe(hidden_size=96, moe_intermediate_size=256, num_layers=2, num_experts=3)
    model = QuantisedMoe("compressed_int4_g32_zeros", sizes).write(tmp_path / "model")
    checkpoint = ExpertCheckpoint.open(str(model), read_geometry(model))
    down = checkpoint.expert(checkpoint.model.moe_layers[0], 0).down
    with pytest.raises(CheckpointError, match=r"parts of 48 channels.*multiples of 32"):
        down.channels(range(48, 96), are_columns=True)


def test_pairs_of_height_and_width_alternate_before_those_of_time() -> None:
    assert section_axes((2, 3, 3), False, time_last=True).tolist() == [1, 2, 1, 2, 1, 2, 0, 0]


def _read(tmp_path: Path, name: str, **changes: Any) -> ModelConfig:
    config = Published.load(name).config
    values = {key: value for key, value in (config | changes).items() if value != "absent"}
    if "text_config" in config:
        values = config | {"text_config": config["text_config"] | changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_model_config(tmp_path, ModelOverrides(top_k=changes.get("top_k")))


def test_both_spellings_say_the_same(tmp_path: Path) -> None:
    """The 28B as released and the 424B as transformers writes it are read alike."""
    small, large = _read(tmp_path, "ernie-4.5-vl-28b-a3b"), _read(tmp_path, "ernie-4.5-vl-424b-a47b")
    for config, parts, part, layers, shared in ((small, (3, 1), 512, 27, 3072), (large, (7, 3), 512, 51, 0)):
        assert config.unread_keys == ()
        kinds = first_moe(config).kinds
        assert kinds is not None
        assert (kinds.num_parts, kinds.part_size, first_moe(config).experts.intermediate_size) == (
            parts,
            part,
            part,
        )
        assert kinds.tokens == (100295, 101304, 101305, 101306, 101307, 103367)
        assert (len(config.routed), shared_width(config)) == (layers, shared)
        rope = first(config, GQA).rope
        assert rope is not None
        assert (rope.mrope_sections, rope.mrope_time_last) == ((20, 22, 22), True)
        assert config.vision is not None
        assert (config.vision.image_token_id, config.vision.intermediate_size) == (100295, 5120)
    assert (first_moe(small).router.num_experts, first_moe(small).router.top_k) == (256, 18)


def test_experts_per_token_are_those_of_a_kind(tmp_path: Path) -> None:
    """The number counts experts, not their parts."""
    _read(tmp_path, "ernie-4.5-vl-28b-a3b")
    config = read_model_config(tmp_path, ModelOverrides(top_k=2))
    kinds = first_moe(config).kinds
    assert kinds is not None
    assert (kinds.top_k, first_moe(config).router.top_k) == (2, 6)
    assert read_geometry(tmp_path, top_k=2).top_k == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_intermediate_size": [1536]}, r"moe_intermediate_size = \[1536\].*two integers"),
        ({"moe_num_experts": [64, 32]}, r"moe_num_experts = \[32, 64\].*both kinds"),
        ({"moe_k": 65}, "moe_k = 65.*1 to 64"),
        ({"rope_3d": False}, "rope_3d = False"),
        ({"use_bias": True}, "use_bias = True"),
        ({"temporal_conv_size": 4}, "temporal_conv_size = 4"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        _read(tmp_path, "ernie-4.5-vl-28b-a3b", **changes)
