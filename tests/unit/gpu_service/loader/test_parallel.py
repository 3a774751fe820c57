"""Guards that ranks hold a model's parts, all of them and nothing else, and that none reads what it lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_service.attention.base import grouped_queries
from gpu_service.core.parallel import ParallelContext
from gpu_service.core.partition import rank_layers
from gpu_service.loader.load import load_weights
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.reader import SliceReader
from moebius.config import ParallelConfig
from moebius.errors import ConfigError
from moebius.models.layers.layer import routed
from moebius.models.read import read_model_config
from tests.unit.gpu_service.loader import test_weights as solo

# Two query heads per KV head; 11 tokens, 10 intermediate channels and 5 shared ones do not divide evenly by
# four.
CONFIG = solo.CONFIG | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 5,
    "tie_word_embeddings": False,
}
WIDTH = 4


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Returns a dense and a MoE layer, every tensor different."""
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(11, 6), "model.norm.weight": torch.randn(6)}
    tensors |= solo._layer(0) | solo._layer(1) | {"lm_head.weight": torch.randn(11, 6)}
    for name, shape in (("gate", (5, 6)), ("up", (5, 6)), ("down", (6, 5))):
        tensors[f"model.layers.1.mlp.shared_experts.{name}_proj.weight"] = torch.randn(shape)
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        tensors[f"{attention}.q_proj.weight"] = torch.randn(16, 6)
        tensors[f"{attention}.k_proj.weight"] = torch.randn(8, 6)
        tensors[f"{attention}.v_proj.weight"] = torch.randn(8, 6)
        tensors[f"{attention}.o_proj.weight"] = torch.randn(6, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def load(directory: Path, tp: int = 1, rank: int = 0, stages: int = 1, stage: int = 0) -> CausalLM:
    """One rank's part; nothing of it is run, so it needs no group."""
    parallel = ParallelContext(rank, tp, stage, stages)
    model = build_model(read_model_config(directory), parallel=parallel)
    load_weights(model, directory)
    return model


def plain(weight: torch.Tensor) -> torch.Tensor:
    """Returns the out of the packed layout."""
    return weight.to_dense() if weight.is_mkldnn else weight


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_together_hold_every_weight(checkpoint: Path, tp: int) -> None:
    """Rows of queries, intermediate channels and tokens, columns of outputs; KV heads are shared by two ranks
    of four.
    """
    stored = load_file(checkpoint / "model.safetensors")
    ranks = [load(checkpoint, tp, rank) for rank in range(tp)]
    heads, kv = 4 // tp, max(1, 2 // tp)
    parts = [plain(model.model.layers[0].self_attn.qkv_proj.weight) for model in ranks]
    split = [part.split([heads * WIDTH, kv * WIDTH, kv * WIDTH]) for part in parts]
    attention = "model.layers.0.self_attn"
    assert torch.equal(torch.cat([q for q, _, _ in split]), stored[f"{attention}.q_proj.weight"])
    for index, name in ((1, "k_proj"), (2, "v_proj")):
        whole = stored[f"{attention}.{name}.weight"].split(kv * WIDTH)
        for rank, part in enumerate(split):
            assert torch.equal(part[index], whole[rank * len(whole) // tp])
    outputs = [plain(model.model.layers[0].self_attn.o_proj.weight) for model in ranks]
    assert torch.equal(torch.cat(outputs, 1), stored[f"{attention}.o_proj.weight"])
    for path, prefix in (("0.mlp", "mlp"), ("1.mlp.shared_experts", "mlp.shared_experts")):
        modules = [model.model.layers.get_submodule(path) for model in ranks]
        down = torch.cat([plain(m.get_parameter("down_proj.weight")) for m in modules], 1)
        assert torch.equal(down, stored[f"model.layers.{path[0]}.{prefix}.down_proj.weight"])
    for name, weights in (
        ("model.embed_tokens.weight", [model.model.embed_tokens.weight for model in ranks]),
        ("lm_head.weight", [plain(model.lm_head.weight) for model in ranks]),
    ):
        assert len({weight.shape for weight in weights}) == 1, "gathered logits need equal parts"
        rows = torch.cat(weights)
        assert torch.equal(rows[:11], stored[name])
        assert not rows[11:].any()


def test_stages_together_hold_every_layer(checkpoint: Path) -> None:
    """The first has the embedding, the last norm and head; a tied head brings the embedding there, too."""
    first, last = load(checkpoint, stages=2, stage=0), load(checkpoint, stages=2, stage=1)
    whole = load(checkpoint)
    for stage, layer in ((first, 0), (last, 1)):
        ours = stage.model.layers[0].input_layernorm.weight
        assert torch.equal(ours, whole.model.layers[layer].input_layernorm.weight)
        assert len(stage.model.layers) == 1
    assert (first.lm_head, first.model.norm, last.model.embed_tokens) == (None, None, None)
    tied = CONFIG | {"tie_word_embeddings": True}
    (checkpoint / "config.json").write_text(json.dumps(tied))
    stored = load_file(checkpoint / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, checkpoint / "model.safetensors")
    last = load(checkpoint, stages=2, stage=1)
    assert torch.equal(last.model.embed_tokens.weight, whole.model.embed_tokens.weight)


def test_a_rank_keeps_only_what_it_needs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is read once, and no more of it than the rank's parameters hold."""
    read: list[tuple[str, int]] = []
    original = SliceReader.read_slice

    def spy(self: SliceReader, info: object, *arguments: object) -> object:
        values = original(self, info, *arguments)  # type: ignore[arg-type]
        read.append((info.name, values.size))  # type: ignore[attr-defined]
        return values

    monkeypatch.setattr(SliceReader, "read_slice", spy)
    model = load(checkpoint, tp=2, rank=1, stages=2, stage=1)
    names = [name for name, _ in read]
    assert len(names) == len(set(names))
    assert not [name for name in names if ".layers.0." in name or "embed" in name]
    held = sum(parameter.numel() for parameter in model.parameters())
    # The second half of 11 tokens is padded to 8 rows.
    assert sum(count for _, count in read) == held - (8 - 3) * 6


Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    ("edit", "stages", "message"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), (1,), "1 missing: .*layers.1.*k_proj"),
        (lambda t: t.update({"model.layers.0.stray": torch.ones(1)}), (0,), "1 unused: model.layers.0.stray"),
        (lambda t: t.update({"model.stray": torch.ones(1)}), (0, 1), "1 unused: model.stray"),
        (lambda t: t.update({"lm_head.weight": torch.ones(6, 11)}), (1,), "mis-shaped: lm_head.weight"),
    ],
)
def test_what_is_wrong_is_seen_by_a_stage(
    checkpoint: Path, edit: Edit, stages: tuple[int, ...], message: str
) -> None:
    """Every defect of a checkpoint is refused by the stages that it concerns, with whole shapes."""
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    for stage in range(2):
        if stage in stages:
            with pytest.raises(CheckpointError, match=message):
                load(checkpoint, tp=2, stages=2, stage=stage)
        else:
            load(checkpoint, tp=2, stages=2, stage=stage)


def test_models_that_can_not_be_divided_are_refused(checkpoint: Path) -> None:
    """Heads and layers set what is allowed; the message lists it."""
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 3 .* 4 .*heads.*allowed .*: 1, 2, 4"):
        load(checkpoint, tp=3)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size: 3 stages for 2 layers; allowed: 1 to 2"):
        load(checkpoint, stages=3)
    (checkpoint / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 3}))
    with pytest.raises(ConfigError, match="4 ranks cannot share an MLP of width 3"):
        load(checkpoint, tp=4)


@pytest.mark.parametrize(
    ("sizes", "refusal"),
    [
        ((1, 2), "1,2 are 3 layers together; allowed: numbers whose sum is 2, the model's layers"),
        ((2,), "2 is not allowed; allowed: a number from 1 on for each of 2 stages"),
        ((2, 0), "2,0 is not allowed; allowed: a number from 1 on"),
    ],
)
def test_layers_of_stages_are_all_of_the_models(
    checkpoint: Path, sizes: tuple[int, ...], refusal: str
) -> None:
    """Explicit numbers are one for each stage, and together the model's; each refusal says so."""
    settings = ParallelConfig(pipeline_parallel_size=2, pipeline_layers=sizes)
    with pytest.raises(ConfigError, match=f"pipeline_layers: {refusal}"):
        rank_layers(read_model_config(checkpoint), ParallelContext.place(settings, 1))


def test_a_ranks_layers_are_its_own(checkpoint: Path) -> None:
    """Cache and attention see local heads and layers, numbered from the stage's first."""
    whole = read_model_config(checkpoint)
    layers = rank_layers(whole, ParallelContext(1, 4, 1, 2))
    assert [(mixer.num_heads, mixer.num_kv_heads) for mixer in grouped_queries(layers)] == [(1, 1)]
    assert list(routed(layers)) == [0]
    assert rank_layers(whole, ParallelContext()) == whole.layers
