"""Invariant: what only Qwen4 computes (n-grams, gated streams, means of blocks) is transformers', however a
sequence is cut; what it does not compute is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tests.helpers.triton_interpreter  # noqa: F401
from app.planning.capacity import Wish
from app.planning.gpu_use import plan_capacity
from app.planning.memory import RAM
from gpu_service.assembly.forecast import Forecast
from gpu_service.cache.kv_cache import make_cache, page_bytes
from gpu_service.cache.state_cache import make_states, state_bytes
from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import rank_layers
from gpu_service.device import TORCH_DTYPES
from gpu_service.layers.composition import Composition
from gpu_service.layers.ngrams import NGramRows
from gpu_service.loader.names import Target
from gpu_service.loader.sources import LoadContext, target_rows
from gpu_service.memory.plan import StepSize, activation_bytes, parameter_bytes
from gpu_service.models.compose import build_model
from gpu_service.ops import examples
from gpu_service.ops.block_attention import best_whole_blocks, mean_block_scores
from gpu_service.ops.gated_streams import inject_update, mix_gated_streams, norm_streams
from gpu_service.ops.kv import mean_index_keys
from gpu_service.ops.ngrams import ngram_rows, ngram_table, table_rows
from gpu_service.ops.triton.kv import mean_index_keys as triton_mean_index_keys
from gpu_service.ops.triton.ngrams import ngram_rows as triton_ngram_rows
from gpu_service.ops.triton.ngrams import table_rows as triton_table_rows
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.reader import SliceReader
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.layers.gqa import GQA, BlockIndexer
from moebius.models.layers.layer import Layer, cached
from moebius.models.layers.ngrams import NGramConfig, num_table_rows, table_weights
from moebius.models.layers.norms import RMSNorm
from moebius.models.layers.ranks import ShardRange, even_shard
from moebius.models.layers.recurrent import GatedDeltaNet
from moebius.models.layers.residual import GatedStreams
from moebius.models.read import read_model_config
from tests.equality.test_no_hidden_waits import NoQuestions
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_models import CASES
from tests.helpers.layer_values import first, layers_of, mixers_of
from tests.helpers.paged_runner import load_runner
from tests.helpers.plan_models import hardware, settings
from tests.helpers.published_checkpoints import Published
from tests.helpers.tiny_models import TINY_MODELS, TinyModel, choosing_at_most, write_tiny_model
from tests.tolerances import LOGITS_FLOAT32_SELF, OP_FLOAT32

VOCAB, END = 90, 4
SIZES = NGramConfig((1, 4), 4, 3, 36, 31, 10, 2, 77, END, 3)
# Texts end inside, twice in a row, and at the end.
TOKENS = [7, END, 8, 9, 10, END, END, 3, 80, 12, 5, END, 60, 61]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _text_config(**changes: Any) -> Any:
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    return Qwen4ExpTextConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        ple_layer_ids=[],
        ngram_size=SIZES.size,
        heads_per_ngram=SIZES.heads,
        ngram_vocab_size_base=SIZES.vocab_base,
        make_ngram_vocab_size_divisible_by=SIZES.padded_to,
        seed=SIZES.seed,
        eos_token_id=END,
        rms_norm_eps=1e-3,
        **changes,
    )


def _their_rows(place: int) -> tuple[list[list[int]], Any]:
    """Returns the rows of all tokens in transformers' table, and its module."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    module = Qwen4ExpTextNGramEmbedding(_text_config(), SIZES.embed_dim, 0, place)
    rows = torch.arange(module.ngram_embedding.weight.shape[0], dtype=torch.float32)
    module.ngram_embedding.weight.data = rows[:, None].expand_as(module.ngram_embedding.weight).clone()
    embedded = module(torch.tensor([TOKENS]), None)[0]
    return embedded.view(len(TOKENS), -1, SIZES.row_dim)[..., 0].long().tolist(), module


@pytest.mark.parametrize("place", [0, 1])
def test_hashes_are_transformers(place: int) -> None:
    table, (_, theirs) = ngram_table(SIZES, place, VOCAB, "cpu"), _their_rows(place)
    assert table.factors.tolist() == theirs.layer_multipliers.tolist()
    assert table.primes.tolist() == theirs.ngram_heads_vocab_sizes.tolist()
    assert table.offsets.tolist() == theirs.ngram_heads_offsets.tolist()
    assert num_table_rows(SIZES, place) == theirs.ngram_embedding.weight.shape[0]


@pytest.mark.parametrize("compute", [ngram_rows.reference, triton_ngram_rows], ids=["torch", "triton"])
@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 7], [6, 12], [2, 5, 11]])
def test_rows_do_not_depend_on_how_a_sequence_is_cut(
    cuts: list[int], compute: Callable[..., torch.Tensor]
) -> None:
    """Texts end within a step and at its ends; slots hold anything before the first token."""
    expected, table = _their_rows(1)[0], ngram_table(SIZES, 1, VOCAB, "cpu")
    states, found = torch.full((len(cuts) + 3, SIZES.size - 1), 55), list[list[int]]()
    for step, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(TOKENS)], strict=True)):
        slots = torch.tensor([step]), torch.tensor([step + 1])
        starts = torch.tensor([0, end - begin], dtype=torch.int32)
        where = torch.tensor(TOKENS[begin:end]), torch.arange(begin, end), states, *slots, starts
        # What interprets kernels asks.
        guard: Any = NoQuestions if compute is ngram_rows.reference else nullcontext
        with guard():
            rows = compute(*where, *table[:3], END)
        found += rows.tolist()
    assert found == expected


def test_streams_are_transformers() -> None:
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

    config = _text_config(hc_count=3, hc_lowrank=10)
    reference: Any = Qwen4ExpTextGatedResidual(config)
    streams, update = _random(5, 3, 24), _random(5, 24)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(0.5 * _random(*parameter.shape))
        mixed, _, weights = reference(streams.flatten(1)[None])
        after = streams + weights[0, :, :, None] * update[:, None]
        normed = norm_streams(streams, reference.hc_norm.weight.view(3, 24) + 1, 1e-3)
        down = torch.nn.functional.silu(reference.input_mix_weight_down(normed.flatten(1)) / 3)
        ours = mix_gated_streams(reference.input_mix_weight_up(down), normed)
        inject_update(update, streams, reference.block_inject_weight(normed.flatten(1)))
    torch.testing.assert_close(ours, mixed[0], rtol=1e-5, atol=OP_FLOAT32)
    torch.testing.assert_close(streams, after, rtol=1e-5, atol=OP_FLOAT32)


def test_keys_of_blocks_do_not_depend_on_how_a_sequence_is_cut() -> None:
    """Pages of 4, blocks of 6: the last token of a block gets the key of all of them, again and again."""
    pool, size, pairs, length, page_size = 6, 10, 3, 20, 4
    rows, weight, table = _random(length, size + 2 * pairs), _random(size), torch.arange(1, 6)[None].int()
    positions = torch.arange(length)
    slots = table[0, positions // page_size].long() * page_size + positions % page_size

    def stored(cuts: list[int], compute: Callable[..., None]) -> torch.Tensor:
        cache = torch.zeros(6 * page_size, size + 2 * pairs)
        for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
            for _ in range(2):
                cache[slots[begin:end]] = rows[begin:end]
                starts = torch.tensor([0, end - begin], dtype=torch.int32)
                where = positions[begin:end], slots[begin:end], table, starts, page_size
                compute(cache, weight, 1e-3, pool, *where)
        return cache[slots]

    whole = stored([], mean_index_keys.reference)
    for cuts in ([1, 2, 7], [6, 12], [5, 13, 19]):
        assert torch.equal(stored(cuts, mean_index_keys.reference), whole)
    by_kernel = stored([5, 13], triton_mean_index_keys)
    torch.testing.assert_close(by_kernel, whole, rtol=1e-5, atol=OP_FLOAT32)
    key = torch.rms_norm(rows[6:12, :size].mean(0), (size,), weight, 1e-3)
    cos, sin = rows[6, size : size + pairs], rows[6, size + pairs :]
    rotated = (
        key[:pairs] * cos - key[pairs : 2 * pairs] * sin,
        key[pairs : 2 * pairs] * cos + key[:pairs] * sin,
    )
    torch.testing.assert_close(whole[11, :size], torch.cat((*rotated, key[2 * pairs :])))
    others = [token for token in range(length) if (token + 1) % pool]
    assert torch.equal(whole[others], rows[others])


def test_whole_blocks_are_chosen_and_the_tokens_after_them() -> None:
    """Blocks that are not whole are no choice; equal scores are chosen together."""
    sizes = BlockIndexer(12, 5, 2, 0, RMSNorm(1e-6), shared_heads=3, rotary_dim=4)
    low = float("-inf")
    scores = torch.tensor([[[3.0, 5.0, 4.0, low]], [[3.0, low, low, low]], [[1.0, 3.0, 1.0, 0.0]]])
    kept = best_whole_blocks(scores, torch.tensor([16, 8, 19]), sizes)
    assert kept[:, 0].tolist() == [
        [False, True, True, True],
        [True, True, False, False],
        [True, True, True, False],
    ]
    # Products of all heads, those below zero left out.
    arguments = examples.example("mean_block_scores", torch.device("cpu"), torch.float32)
    query, pages, positions, table, _, block, _, first, _ = arguments
    found = mean_block_scores.reference(*arguments)
    key = pages[int(table[1, 2]), 3, : query.shape[2]]
    torch.testing.assert_close(found[2, 0, 1], (query[2] @ key).relu().sum())
    assert found[1, 0].isinf().tolist() == [False, True]
    assert (int(positions[2]), block, first) == (11, 6, 1)


def test_choices_matter(tmp_path: Path) -> None:
    """Rows after few tokens are those of attention to all of them, later ones are not."""
    prompt, tiny = [3 + (k * k * 7 + k) % 200 for k in range(24)], TINY_MODELS["qwen4_exp"]
    logits = []
    for name, model in (("sparse", tiny), ("dense", choosing_at_most(tiny, 512))):
        write_tiny_model(model, tmp_path / name, seed=5)
        logits.append(load_runner(tmp_path / name).prefill(prompt)[1])
    # Two blocks of three tokens, and two tokens of the third.
    torch.testing.assert_close(logits[0][:8], logits[1][:8], rtol=0, atol=LOGITS_FLOAT32_SELF)
    assert (logits[0][9:] - logits[1][9:]).abs().max() > 0.1


def _read(tmp_path: Path, **changes: Any) -> Any:
    config = Published.load("qwen3.8-flash-next").config
    text = {key: value for key, value in (config["text_config"] | changes).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text}))
    return read_model_config(tmp_path)


def _ngrams(config: ModelConfig) -> Any:
    """The sizes of embedded n-grams; None: no layer embeds any."""
    residuals = (layer.residual for layer in config.layers)
    embedding = [each.ngrams for each in residuals if isinstance(each, GatedStreams) and each.ngrams]
    return embedding[0].sizes if embedding else None


def test_qwen3_8_flash_next_is_read(tmp_path: Path) -> None:
    config = _read(tmp_path)
    attention, streams, ngram = first(config, GQA), config.layers[0].residual, _ngrams(config)
    blocks, rope = attention.blocks, attention.rope
    assert [i for i, layer in enumerate(config.layers) if cached([layer])] == sorted(layers_of(config, GQA))
    assert all(mixer.blocks == blocks for mixer in mixers_of(config, GQA))
    assert (blocks.block_size, blocks.top_blocks, blocks.shared_heads) == (4, 512, 4)
    assert (streams.num_streams, streams.rank, config.stream_size) == (4, 320, 4 * 2560)
    assert (ngram.layers, ngram.num_hashes, ngram.row_dim, ngram.conv_width) == ((1,), 16, 160, 10)
    assert (first(config, GatedDeltaNet).sigmoid_gates, rope.mrope_sections) == (True, (11, 11, 10))
    assert config.vision is not None
    assert num_table_rows(ngram, 0) == 128 * 2500012
    states = 36 * (48 * 128 * 128 * 4 + 3 * 10240 * 2) + 9 * 10240 * 2 + 2 * 8
    assert state_bytes(config.layers, TORCH_DTYPES[config.dtype]) == states
    assert page_bytes(config.layers, 16, torch.bfloat16, TORCH_DTYPES[config.dtype]) == 12 * 16 * 2 * (
        2 * 2 * 256 + 192
    )


def _embeds(layer: Layer) -> bool:
    return isinstance(layer.residual, GatedStreams) and layer.residual.ngrams is not None


def test_caches_take_what_the_plan_says(tmp_path: Path) -> None:
    """Caches of ranks and stages take it, too; a step's scores and masks are in the plan."""
    write_tiny_model(TINY_MODELS["qwen4_exp_text_three_streams_bias_tied"], tmp_path, seed=3)
    config = read_model_config(tmp_path)
    stages = [rank_layers(config, ParallelContext(stage=stage, num_stages=2)) for stage in range(2)]
    assert [[i for i, layer in enumerate(part) if _embeds(layer)] for part in stages] == [[1], [2]]
    dtype = TORCH_DTYPES[config.dtype]
    for part in (config.layers, *stages):
        cache = make_cache(part, 6, 4, torch.float32)
        assert cache.nbytes == 6 * page_bytes(part, 4, torch.float32, dtype)
        states = make_states(part, 4, torch.float32)
        assert states is not None
        assert states.nbytes == 5 * state_bytes(part, dtype)
    more = activation_bytes(_read(tmp_path, indexer_n_heads=64), StepSize(300, 1), SOLO, False)
    less = activation_bytes(_read(tmp_path), StepSize(300, 1), SOLO, False)
    assert more > less


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"indexer_budget": 2047}, "a multiple of indexer_compress_ratio"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"indexer_head_dim": 32}, "at least what is rotated"),
        ({"indexer_n_heads": "absent"}, "indexer_n_heads is missing"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids"),
        ({"ple_embed_dim": 2561}, "a multiple of .ngram_size"),
        ({"split_ngram_parts": 96}, "a divisor of make_ngram_vocab_size_divisible_by"),
        ({"eos_token_id": "absent"}, "eos_token_id"),
        ({"output_gate_type": "relu"}, "sigmoid, silu"),
        ({"hc_count": 1}, "hc_count"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_what_qwen4_has_not_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        _read(tmp_path, **changes)


def test_models_without_ngrams_compose(tmp_path: Path) -> None:
    config = _read(tmp_path, ple_layer_ids=[], eos_token_id="absent")
    assert (_ngrams(config), make_states(config.layers, 2, torch.float32, "meta") is None) == (None, False)
    assert build_model(config).config is config


def test_files_with_other_hashes_are_refused(tmp_path: Path) -> None:
    """GGUF files have their numbers; here they follow from a seed that files do not have."""
    case = CASES["qwen4_exp"]
    reference = write_tiny_model(
        TinyModel(case.model_type, case.changes | {"seed": 5}), tmp_path / "hf", seed=1
    )
    write_gguf(reference, tmp_path / "other.gguf", case.types)
    with pytest.raises(CheckpointError, match=r"ple.layer_multipliers.*which follow from seed 1234"):
        read_model_config(tmp_path / "other.gguf")


def test_tables_in_8_bits_stay_so(tmp_path: Path) -> None:
    """Tables stay as published in fp8, parts of codes and one scale; they are planned as loaded, and the
    values are the codes'.
    """
    tiny, prompt = TINY_MODELS["qwen4_exp"], [3, 17, 200, 7, 99, 42]
    logits, scale, sizes, tables = [], torch.tensor([0.01953125]), [], []
    for name in ("fp8", "plain"):
        write_tiny_model(tiny, tmp_path / name, seed=5)
        (file,) = (tmp_path / name).glob("*.safetensors")
        tensors = load_file(file)
        parts = [part for part in tensors if ".ngram_embedding.shard_" in part]
        codes = {part: (tensors[part] / scale).to(torch.float8_e4m3fn) for part in parts}
        stem = parts[0].partition("shard_")[0]
        tensors |= codes if name == "fp8" else {part: codes[part].float() * scale for part in parts}
        save_file(tensors | ({f"{stem}weight_scale": scale.bfloat16()} if name == "fp8" else {}), file)
        runner = load_runner(tmp_path / name)
        logits.append(runner.prefill(prompt)[1])
        chosen = settings(tmp_path / name, language_model_only="true")
        on_cpu, on_gpu = (Forecast(chosen, on_gpu=there).ranks[0] for there in (False, True))
        # A GPU reads the table in the host's memory.
        assert on_gpu.dense_bytes + on_gpu.host_bytes == on_cpu.dense_bytes
        assert on_cpu.host_bytes == 0
        sizes.append((on_cpu.dense_bytes, parameter_bytes(runner.model)))
        tables.append(on_gpu.host_bytes)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=LOGITS_FLOAT32_SELF)
    config = read_model_config(tmp_path / "fp8")
    ngrams = _ngrams(config)
    weights = num_table_rows(ngrams, 0) * ngrams.row_dim
    for kept, plain in zip(*sizes, strict=True):
        assert plain - kept == 3 * weights - 4
    assert tables == [weights, 4 * weights]


TABLE = torch.Generator().manual_seed(3)


@pytest.mark.parametrize("kind", ["float32", "float16", "e4m3"])
def test_kernels_read_the_rows_of_tables(kind: str) -> None:
    """Bit by bit what the reference says; rows that the table has not are zeros, whatever it holds."""
    table, scale, dtype = torch.randn(13, 20, generator=TABLE), None, torch.float32
    if kind == "float16":
        table, dtype = table.half(), torch.float16
    elif kind == "e4m3":
        table, scale = table.to(torch.float8_e4m3fn), torch.tensor([0.37])
    rows = torch.tensor([[0, 12, 13], [-1, 5, 5], [-9, 2**40, 1]])
    expected = table_rows.reference(rows, table, scale, dtype)
    found = triton_table_rows(rows, table, scale, dtype)
    assert found.dtype == expected.dtype == dtype
    assert torch.equal(found, expected)
    assert not found[0, 2].any()
    assert torch.equal(found[1, 1], table[5].to(dtype) if scale is None else table[5].float() * scale)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_have_parts_of_a_table(ranks: int) -> None:
    """Each row is read by one rank, from the part of the checkpoint that has it; every part is named."""
    num_rows = 60
    whole = torch.randn(num_rows, SIZES.row_dim, generator=TABLE)
    stored = whole.chunk(SIZES.parts)
    rows = torch.randint(0, num_rows, (7, SIZES.num_hashes), generator=TABLE)
    found = torch.zeros(7, SIZES.num_hashes, SIZES.row_dim)
    for rank in range(ranks):
        parallel = ParallelContext(rank, ranks)
        made, declared = Composition(8, torch.float32, parallel), tuple(table_weights(SIZES, num_rows))
        own = made.weights(declared).under("ngram_embedding")
        table = NGramRows(own, even_shard(num_rows, rank, ranks).begin, made)
        values, begin = torch.full_like(table.weight, float("nan"), device="cpu"), 0
        assert [weight.name for weight in declared] == [
            f"ngram_embedding.shard_{i}.weight" for i in range(SIZES.parts)
        ]
        for weight, tensor in zip(declared, stored, strict=True):
            part = weight.parts(rank, ranks)[0]
            assert weight.shape == tensor.shape
            values.narrow(0, begin, part.size).copy_(tensor[part.slice])
            begin += part.size
        table.weight = torch.nn.Parameter(values, requires_grad=False)
        found += table(table.begin(rows))
    assert torch.equal(found, whole[rows])


def test_next_to_a_gpu_tables_stay_in_the_hosts_memory(tmp_path: Path) -> None:
    """Tables are in pages of their own, which are locked; a plan counts them as RAM and leaves them out on
    the GPU.
    """
    made = Composition(8, torch.float32, SOLO, torch.device("cuda"))
    declared = tuple(table_weights(replace(SIZES, parts=1), 60))
    table = NGramRows(made.weights(declared).under("ngram_embedding"), 0, made)
    whole, columns = ShardRange.whole(60), ShardRange.whole(SIZES.row_dim)
    target = Target(declared[0], whole, columns, 0)
    with SliceReader() as reader, ThreadPoolExecutor(1) as workers:
        context = LoadContext(reader, lambda name: table, workers, 1)
        values = target_rows(target, context, torch.device("cuda"))
    assert values.device.type == table.weight.device.type == "cpu"
    assert table.weight.data_ptr() % 4096 == 0
    assert not values.any()
    write_tiny_model(TINY_MODELS["qwen4_exp"], tmp_path, seed=5)
    config = settings(tmp_path, language_model_only="true", device="cuda")
    plan = plan_capacity(config, hardware("h100"), Wish(), fill=False)
    components = {(part.place, part.part): part.nbytes for part in plan.components}
    forecast = Forecast(config, on_gpu=True).ranks[0]
    assert components[RAM, "engine: table of n-grams"] == forecast.host_bytes > 0
    assert components["GPU 0", "dense weights"] == forecast.dense_bytes
