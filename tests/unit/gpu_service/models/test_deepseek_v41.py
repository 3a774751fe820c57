"""Guards parts of DeepSeek-V4.1 that its tiny models can not: published numbers, refusals, kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.compressed.torch_reference import chosen_blocks
from gpu_service.core.parallel import SOLO
from gpu_service.layers.ngrams import NGramRows
from gpu_service.loader.load import plan_weights
from gpu_service.ops.hyper_connections import collapse_streams
from gpu_service.ops.ngrams import ngram_rows, ngram_table, table_rows
from gpu_service.ops.triton.hyper_connections import collapse_streams as triton_collapse_streams
from gpu_service.ops.triton.ngrams import ngram_rows as triton_ngram_rows
from gpu_service.ops.triton.ngrams import table_rows as triton_table_rows
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.token_kinds import read_token_kinds
from moebius.config import ModelConfigSection
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.layers.compressed import EntryBlocks, SharedEntryAttention
from moebius.models.layers.layer import mixers
from moebius.models.layers.ngrams import ENGRAM_GROUP, Engram, NGramConfig, hash_factors, hash_primes
from moebius.models.layers.residual import HyperConnections
from moebius.models.read import read_model_config
from tests.helpers.deepseek_v41_reference import write_tokenizer
from tests.helpers.paged_runner import load_runner
from tests.helpers.published_checkpoints import Published
from tests.helpers.tiny_models import TINY_MODELS, tiny_config, write_tiny_model
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS, OP_FLOAT32

NAME = "deepseek-v4.1-flash"


def _read(directory: Path, **changes: Any) -> ModelConfig:
    config = Published.load(NAME).config
    content = config | {"text_config": config["text_config"] | changes}
    (directory / "config.json").write_text(json.dumps(content))
    return read_model_config(directory)


def _engrams(config: ModelConfig) -> dict[int, Engram]:
    residuals = enumerate(layer.residual for layer in config.layers)
    return {
        number: one.ngrams
        for number, one in residuals
        if isinstance(one, HyperConnections) and one.ngrams is not None
    }


def test_hashes_have_the_published_numbers(tmp_path: Path) -> None:
    """Another factor or prime would read other rows of the tables, and nothing would say so."""
    engrams = _engrams(_read(tmp_path))
    first, second = engrams[1], engrams[14]
    assert [engram.num_rows for engram in (first, second)] == [384006168, 384016682]
    factors = [hash_factors(one.sizes, one.place, one.num_kinds) for one in (first, second)]
    # As files of GGUF have them.
    assert factors == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert hash_primes(first.sizes, 0)[:3] == [16000057, 16000079, 16000081]
    assert hash_primes(second.sizes, 1)[-3:] == [16000877, 16000879, 16000889]


def test_layers_share_entries_and_choices_as_published(tmp_path: Path) -> None:
    found = [mixer for mixer in mixers(_read(tmp_path).layers) if isinstance(mixer, SharedEntryAttention)]
    assert [i for i, mixer in enumerate(found) if mixer.compresses] == [2, 8, 14, 20]
    assert [i for i, mixer in enumerate(found) if mixer.chooses] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [i - mixer.entries_back for i, mixer in enumerate(found) if mixer.rate] == sorted(
        [2, 8, 14] * 6 + [20] * 20
    )
    blocks = [(i, mixer.blocks.chosen_here) for i, mixer in enumerate(found) if mixer.blocks is not None]
    assert blocks == [(20, True), (24, False), (28, False), (32, False), (36, False)]
    shorter = _read(tmp_path).with_max_model_len(2048 * 8)
    kept = [mixer for mixer in mixers(shorter.layers) if isinstance(mixer, SharedEntryAttention)]
    assert not any(mixer.blocks for mixer in kept), "all blocks are kept in every sequence"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_source_layer_ids": [2, 8, 13, 20]}, "kv_source_layer_ids.*some of index_source_layer_ids"),
        (
            {"kv_source_layer_ids": [8, 14, 20]},
            "kv_source_layer_ids.*a layer of the ratio 2 at or before layer 2",
        ),
        ({"index_source_layer_ids": [0, 2, 8, 14, 20]}, "index_source_layer_ids = 0.*compress_ratios"),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id = 21.*index_source_layer_ids"),
        ({"candidate_topk_blocks": 64}, "candidate_topk_blocks = 64.*512"),
        ({"engram_num_embeddings": [384006168, 384016681]}, "engram_num_embeddings.*384016682"),
        ({"engram_layer_ids": [14, 1]}, r"engram_layer_ids = \[14, 1\].*ascending"),
        ({"num_hash_layers": 3}, "num_hash_layers = 3"),
    ],
)
def test_what_would_be_read_of_no_layer_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        _read(tmp_path, **changes)


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    """All hashes' factors follow from the number of kinds: every row would be another one."""
    config = tiny_config("deepseek_v41")
    write_tokenizer(config.vocab_size, tmp_path)
    kinds = config.engram_compressed_vocab_size
    assert len(set(read_token_kinds(tmp_path, config.vocab_size, kinds))) == kinds
    with pytest.raises(CheckpointError, match=f"{kinds} kinds.*engram_compressed_vocab_size {kinds + 1}"):
        read_token_kinds(tmp_path, config.vocab_size, kinds + 1)
    with pytest.raises(CheckpointError, match=f"vocab_size {kinds}"):
        read_token_kinds(tmp_path, kinds, kinds)


def test_the_block_of_the_latest_entry_is_always_chosen() -> None:
    scores = torch.tensor([[5.0, 1, 4, 0, 3, 2, -9], [5, 1, 4, 0, 3, 2, -9], [5, 1, 4, 0, 3, 2, -9]])
    chosen = chosen_blocks(scores, torch.tensor([7, 5, 0]), EntryBlocks(2, 2, chosen_here=True))
    assert chosen.int().tolist() == [[1, 1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 1, 1, 0], [0] * 7]


def test_kernels_agree_where_the_weights_are_given() -> None:
    generator = torch.Generator().manual_seed(5)
    streams, num = torch.randn(5, 3, 20, generator=generator), 3
    rows = (2 + num) * num
    weights = [torch.randn(*shape, generator=generator) for shape in ((rows, 60), (rows,), (3,))]
    given = torch.rand(5, num, generator=generator)
    own = streams, *weights, 1e-3, 1e-4, 4, 2.0, given
    expected, got = collapse_streams.reference(*own), triton_collapse_streams(*own)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=OP_FLOAT32)
    torch.testing.assert_close(expected.hidden_states, (given[..., None] * streams).sum(1))


@pytest.mark.parametrize("compute", [ngram_rows.reference, triton_ngram_rows], ids=["torch", "triton"])
def test_ngrams_reach_beyond_the_token_that_stands_for_none(compute: Any) -> None:
    """A padding token ends no text in DeepSeek-V4.1."""
    config = tiny_config("deepseek_v41")
    sizes = NGramConfig((1,), 3, 2, 8, 60, 1, 1, 10007, 2, 0, "pcg64")
    table = ngram_table(sizes, 0, config.vocab_size, "cpu")
    tokens, states = torch.tensor([9, 2, 5]), torch.zeros(3, 2, dtype=torch.int64)
    where = tokens, torch.arange(3), states, torch.tensor([0]), torch.tensor([1])
    rows = compute(*where, torch.tensor([0, 3], dtype=torch.int32), *table, 2, False)
    factors = table.factors.tolist()
    mixed = 5 * factors[0] ^ 2 * factors[1] ^ 9 * factors[2]
    assert rows[2, 2].item() == mixed % table.primes[2].item() + table.offsets[2].item()
    ended = compute(*where, torch.tensor([0, 3], dtype=torch.int32), *table, 2)
    assert ended[2, 2] != rows[2, 2]


def test_tables_stay_as_they_are_stored(tmp_path: Path) -> None:
    """In 8 bits with scales of each row, in memory and in the plan; values are those of the codes."""
    size = 2 * ENGRAM_GROUP
    tiny = TINY_MODELS["deepseek_v41"]
    tiny = replace(tiny, changes=tiny.changes | {"engram_head_dim": size})
    reference = write_tiny_model(tiny, tmp_path, seed=4)
    stored, state = load_file(tmp_path / "model.safetensors"), reference.state_dict()
    names = [name for name in stored if name.endswith("engram.embed.weight")]
    for name in names:
        codes = stored[name].to(torch.float8_e4m3fn)
        scale = torch.randint(124, 130, (len(codes), 2), generator=torch.Generator().manual_seed(1))
        values = codes.float().unflatten(1, (2, -1)) * (scale - 127).float().exp2()[..., None]
        state[name].copy_(values.flatten(1))
        stored |= {name: codes, name.replace("weight", "scale"): scale.to(torch.uint8)}
    save_file(stored, tmp_path / "model.safetensors")
    runner, tokens = load_runner(tmp_path), [3, 17, 200, 5, 99, 42]
    _, logits = runner.prefill(tokens)
    expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)
    tables = [module for module in runner.model.modules() if isinstance(module, NGramRows)]
    assert {table.weight.dtype for table in tables} == {torch.float8_e4m3fn}
    chosen, device = ModelConfigSection(model=str(tmp_path)), torch.device("cpu")
    planned = plan_weights(chosen, runner.model.config, SOLO, device)
    held = [one for one in planned.parameters if ".engram.embed." in one.weights[0].name]
    assert sum(one.nbytes for one in held) == sum(len(table.weight) for table in tables) * (size + 2)


@pytest.mark.parametrize("compute", [table_rows.reference, triton_table_rows], ids=["torch", "triton"])
def test_rows_have_scales_of_their_own(compute: Any) -> None:
    codes = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    scale = torch.tensor([[120, 127], [126, 130], [127, 127], [125, 128], [127, 129]], dtype=torch.uint8)
    rows = torch.tensor([[1, 4, 0], [-1, 5, 3]])
    found = compute(rows, codes, scale, torch.float32)
    values = codes.float() * (scale.float() - 127).exp2().repeat_interleave(32, dim=1)
    assert torch.equal(found[0], values[[1, 4, 0]])
    assert torch.equal(found[1], torch.stack((torch.zeros(64), torch.zeros(64), values[3])))
