"""Guards random checkpoints: complete, the same for any number of threads, sane, and skewed as asked."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from tokenizers import Tokenizer

from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.layers.moe import MoE
from lab.random_model import RandomModelOptions, write_random_model
from lab.random_model.build import CHAT_TEMPLATE, shards, write_tokenizer
from lab.random_model.gguf import GGUF_FORMATS
from lab.random_model.shapes import SHAPES, parse_shape
from lab.random_model.tensors import FIRST_WORD, ModelDraw, successor
from lab.random_model.values import (
    FLOAT8_STD,
    FORMATS,
    INT4_STD,
    bfloat16_normal,
    fitted_biases,
    float8_normal,
    generator,
    int4_words,
    parse_skew,
    wanted_shares,
)
from moebius.checkpoint.gguf.tokenizer import read_tokenizer
from moebius.errors import UserError
from moebius.models.config import ModelConfig, ModelOverrides
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.mtp_models import head_logits
from tests.helpers.paged_runner import PagedRunner, load_runner
from tests.helpers.published_checkpoints import Published, expand
from tests.tolerances import ROUTER_SHARES_FITTED

EMBEDDING = "model.embed_tokens.weight"


def write(
    directory: Path,
    weight_format: str = "bfloat16",
    skew: str = "none",
    threads: int = 2,
    shape: str = "tiny",
) -> Path:
    options = RandomModelOptions(shape, weight_format, skew=skew, threads=threads, seed=3)
    write_random_model(directory, options)
    return directory


def write_gguf_model(directory: Path, head: str = "random") -> Path:
    return write_random_model(directory, RandomModelOptions("tiny", "q4_0", head=head, seed=3)).path


def runner_on(directory: Path) -> PagedRunner:
    geometry = read_geometry(directory)
    client = LocalExpertClient(str(directory), geometry, torch.bfloat16)
    return load_runner(directory, experts=client)


@pytest.mark.parametrize("shape", ["tiny", "glm-4.5-air-tiny", "glm-5.3-flash-tiny"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_format_loads_and_predicts(tmp_path: Path, weight_format: str, shape: str) -> None:
    """All tensors are accounted for, logits are finite, neither flat nor certain, nothing explodes."""
    runner = runner_on(write(tmp_path / "model", weight_format, shape=shape))
    tokens = torch.randint(3, 512, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    _, logits = runner.prefill(tokens)
    assert torch.isfinite(logits).all()
    assert 2.0 < logits.std(dim=-1).mean() < 8.0
    largest = logits.softmax(-1).amax(-1).mean()
    assert 5 / 512 < largest < 0.9


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        # The layer of multi-token prediction reads the model's own embedding and head.
        ("glm-4.5-air", (".layers.46.embed_tokens", ".layers.46.shared_head.head")),
        # Its language model, of its release in 16 bits and without that layer.
        ("glm-5.3-flash", ("visual", "scale_inv", ".layers.45.")),
    ],
)
def test_glm_has_the_tensors_that_were_published(
    tmp_path: Path, name: str, left_out: tuple[str, ...]
) -> None:
    """Names, types and shapes, and the configuration as it is read."""
    shape = parse_shape(name, 0)
    draw = ModelDraw(shape, FORMATS["bfloat16"], 0.0, 0)
    found = {
        spec.name: (spec.dtype, spec.shape)
        for shard in shards(draw)
        for group in shard
        for spec in group.tensors
    }
    published = Published.load(name)
    wanted = {
        name: ("BF16" if dtype == "F8_E4M3" else dtype, size)
        for pattern, dtype, size in published.tensors
        if not any(part in pattern for part in left_out)
        for name in expand(pattern)
    }
    assert found == wanted

    def read(config: dict[str, Any]) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_model_config(tmp_path)

    ours, theirs = read(shape.hf_config(None)), read(published.config)
    ours = replace(ours, bos_token_id=theirs.bos_token_id, eos_token_ids=theirs.eos_token_ids)
    assert replace(ours, num_mtp_layers=1, vision=theirs.vision) == theirs


@pytest.mark.parametrize("percent", [0, 80, 100])
def test_a_layer_of_prediction_is_right_as_often_as_asked(tmp_path: Path, percent: int) -> None:
    """With a chained head the acceptance rate of its draft tokens is the one that was asked for."""
    directory = tmp_path / "model"
    options = RandomModelOptions("glm-4.5-air-tiny", head="chain", mtp_acceptance=percent)
    write_random_model(directory, options)
    client = LocalExpertClient(str(directory), read_geometry(directory, mtp_heads=1), torch.bfloat16)
    runner = load_runner(directory, experts=client, overrides=ModelOverrides(mtp_heads=1))
    tokens = torch.randint(3, 512, (201,), generator=torch.Generator().manual_seed(1))
    (logits,) = head_logits(runner, tokens.tolist())
    # Row p predicts what follows the token after p.
    is_right = logits[:-1].argmax(-1).numpy() == successor(tokens[1:].numpy(), 512)
    # A draft token may be accepted by chance; of 200 tokens the share differs by a few percent.
    assert float(is_right.mean()) == pytest.approx(percent / 100, abs={0: 0.02, 80: 0.08, 100: 0.0}[percent])


def test_threads_do_not_change_the_bytes(tmp_path: Path) -> None:
    """Every tensor has a random stream of its own."""
    first, second = (write(tmp_path / str(threads), "int4_g32", threads=threads) for threads in (1, 3))
    for path in sorted(first.glob("*.safetensors")):
        digests = {hashlib.sha256((root / path.name).read_bytes()).digest() for root in (first, second)}
        assert len(digests) == 1, path.name


def test_draws_have_the_spread_they_say() -> None:
    """What the scales are computed from: standard deviations of three kinds of codes, and their middle."""
    values = torch.from_numpy(bfloat16_normal(generator(0), (300, 301), 0.5).view(np.int16))
    floats = values.view(torch.bfloat16).float()
    eighths = torch.from_numpy(float8_normal(generator(0), (300, 301))).view(torch.float8_e4m3fn).float()
    words = int4_words(generator(0), 300, 304).view(np.uint8)
    nibbles = np.concatenate([words & 15, words >> 4]).astype(float) - 8
    for found, std in ((floats.numpy(), 0.5), (eighths.numpy(), FLOAT8_STD), (nibbles, INT4_STD)):
        assert np.isfinite(found).all()
        assert float(found.std()) == pytest.approx(std, rel=0.02)
        assert abs(float(found.mean())) < 0.02 * std
    assert np.abs(nibbles).max() == 7


def test_shares_follow_the_law_up_to_all_tokens() -> None:
    """Zipf where it is below one; an expert cannot be chosen twice by a token, so the rest is moved on."""
    shares = wanted_shares(128, 8, 1.2)
    assert shares.sum() == pytest.approx(8)
    assert shares.max() == 1.0
    below = shares[shares < 1]
    ranks = np.arange(128 - len(below) + 1, 129)
    assert np.allclose(below * ranks**1.2, below[0] * ranks[0] ** 1.2)


def test_biases_give_the_shares_wanted() -> None:
    """New random scores, top 8 of 128: every expert is chosen about as often as the law says."""
    biases = fitted_biases(128, 8, 1.2)
    scores = generator(9).standard_normal((8192, 128)) * 1.5 + biases
    chosen = np.argpartition(scores, -8, axis=1)[:, -8:]
    found = np.bincount(chosen.ravel(), minlength=128) / 8192
    assert np.abs(found - wanted_shares(128, 8, 1.2)).max() < ROUTER_SHARES_FITTED


def test_skew_survives_in_the_model(tmp_path: Path) -> None:
    """In a real forward pass a skewed router's favourite takes far more tokens than an even one's."""

    def largest_share(directory: Path) -> float:
        runner = runner_on(directory)
        chosen: list[torch.Tensor] = []

        for module in runner.model.modules():
            if isinstance(module, MoE):
                module.on_routed = lambda rows, ids, weights: chosen.append(ids)
        tokens = torch.randint(3, 512, (200,), generator=torch.Generator().manual_seed(1)).tolist()
        runner.prefill(tokens)
        shares = [torch.bincount(ids.flatten().long(), minlength=8) / 200 for ids in chosen]
        return float(torch.stack(shares).amax(dim=1).mean())

    even = largest_share(write(tmp_path / "even"))
    skewed = largest_share(write(tmp_path / "skewed", skew="zipf:1.2"))
    assert even < 0.55
    assert skewed > 0.75


@pytest.mark.parametrize("overlap", [0, 26, 45])
def test_neighbours_share_experts_as_asked(tmp_path: Path, overlap: int) -> None:
    """In a real forward pass along the chain, in every layer; without the option as chance has it."""
    options = RandomModelOptions("small", head="chain", overlap=overlap, topic_tokens=32, seed=3)
    write_random_model(tmp_path / "model", options)
    geometry = read_geometry(tmp_path / "model")
    runner, chosen = runner_on(tmp_path / "model"), list[torch.Tensor]()
    for module in runner.model.modules():
        if isinstance(module, MoE):
            module.on_routed = lambda rows, ids, weights: chosen.append(ids)
    vocab_size, tokens = runner.model.config.vocab_size, [FIRST_WORD]
    for _ in range(300):
        tokens.append(int(successor(np.array([tokens[-1]]), vocab_size)[0]))
    runner.prefill(tokens)
    shared = []
    for ids in chosen:
        masks = torch.zeros(len(ids), geometry.num_experts).scatter_(1, ids.long(), 1.0)
        shared.append(float((masks[1:] * masks[:-1]).sum(1).mean()) / geometry.top_k)
    wanted = overlap / 100 or geometry.top_k / geometry.num_experts
    assert np.mean(shared) == pytest.approx(wanted, abs=0.08)
    assert np.abs(np.array(shared) - wanted).max() < 0.2


def test_every_id_decodes(tmp_path: Path) -> None:
    """Text comes back as it was, and an id that no text encodes to is a word of its own."""
    write_tokenizer(tmp_path, 512)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.decode(tokenizer.encode("Grüße, 東京").ids) == "Grüße, 東京"
    assert tokenizer.decode([400, 511]) == " w400 w511"


def test_only_its_own_directory_is_overwritten(tmp_path: Path) -> None:
    """An earlier random model is replaced; anybody else's files stay, and so does the marker's word."""
    directory = write(tmp_path / "model", "bfloat16")
    write(directory, "int4_g32")
    assert json.loads((directory / "random_model.json").read_text())["weight_format"] == "int4_g32"
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is not empty"):
        write(other)
    assert (other / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RandomModelOptions(shape="huge"), "--shape: 'huge' is not allowed; allowed: qwen3-30b-a3b"),
        (
            RandomModelOptions(weight_format="int3"),
            "--format: 'int3' is not allowed; allowed: bfloat16, int4_g32",
        ),
        (RandomModelOptions(skew="zipf"), "--skew: 'zipf' is not allowed; allowed: none, or zipf:S"),
        (RandomModelOptions(layers=-1), "--layers: -1"),
        (
            RandomModelOptions("tiny", max_gb=1e-6),
            "--max-gb: 1e-06 is not allowed; allowed: 0.0 or more here",
        ),
        (
            RandomModelOptions("glm-5.3-flash", layers=3),
            "--layers: 3 is not allowed; allowed: 0 .* or 4 or more",
        ),
        (
            RandomModelOptions("glm-5.3-flash", max_gb=5),
            "--max-gb: 5 is not allowed; allowed: 19.1 or more here",
        ),
        (
            RandomModelOptions("glm-5.3-flash", "q4_0"),
            "--format: 'q4_0' is not allowed with --shape glm-5.3-flash; allowed: bfloat16, int4_g32",
        ),
        (RandomModelOptions(mtp_acceptance=101), "--mtp-acceptance: 101 is not allowed; allowed: 0 to 100"),
        (RandomModelOptions(head="next"), "--head: 'next' is not allowed; allowed: random, chain"),
        (RandomModelOptions(overlap=45), "--overlap is allowed with --head chain"),
        (
            RandomModelOptions("glm-4.5-air", head="chain", overlap=45),
            "--overlap is allowed with --head chain, .* and shapes of Qwen3-MoE",
        ),
        (
            RandomModelOptions(head="chain", overlap=3),
            "--overlap: 3 is not allowed; allowed here: 7 to 8., and 0 for what chance gives",
        ),
        (RandomModelOptions("tiny", "q4_k"), "--format q4_k: blk.0.attn_q.weight has rows of 64"),
    ],
)
def test_options_are_refused_by_name(tmp_path: Path, options: RandomModelOptions, message: str) -> None:
    """Nothing is written before the options are known to be right."""
    with pytest.raises(UserError, match=message):
        write_random_model(tmp_path / "model", options)
    assert not (tmp_path / "model").exists()


def test_skew_exponents() -> None:
    """`none` is even; zero or beyond 4 is refused."""
    assert (parse_skew("none"), parse_skew("zipf:1.2"), parse_skew("zipf:4")) == (0.0, 1.2, 4.0)
    for text in ("zipf:0", "zipf:5", "zipf:-1", "normal"):
        with pytest.raises(UserError, match="--skew"):
            parse_skew(text)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`moebius models random DIR` writes what is asked for; what is not allowed ends in one line."""
    from app.cli import main

    directory = tmp_path / "model"
    with pytest.raises(SystemExit) as ended:
        main(
            ["models", "random", str(directory), "--shape", "tiny", "--format", "fp8_block", "--layers", "3"]
        )
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"{directory}: 0.00 GB in")
    config = json.loads((directory / "config.json").read_text())
    assert (config["num_hidden_layers"], config["quantization_config"]["quant_method"]) == (3, "fp8")
    with pytest.raises(SystemExit) as ended:
        main(["models", "random", str(directory), "--shape", "tiny", "--skew", "steep"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("moebius: error: --skew: 'steep'")


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_gguf_blocks_have_the_spread_they_say(name: str) -> None:
    """The package `gguf` reads the blocks as normal-looking values of that deviation around zero."""
    rows = GGUF_FORMATS[name].draw(generator(0), 64, 512, 0.02, True)
    values = dequantize(rows, GGMLQuantizationType(GGUF_FORMATS[name].blocks.number))
    assert values.shape == (64, 512)
    assert not values[0].any()
    assert float(values[1:].std()) == pytest.approx(0.02, rel=0.05)
    assert abs(float(values[1:].mean())) < 0.02 * 0.02


def test_gguf_file_has_the_safetensors_model(tmp_path: Path) -> None:
    """One shape in two files: the same configuration, vocabulary and, within Q8_0, the same embedding."""
    plain = write(tmp_path / "plain")
    path = write_gguf_model(tmp_path / "gguf")
    theirs, ours = read_model_config(str(plain)), read_model_config(str(path))
    assert replace(ours, eos_token_ids=theirs.eos_token_ids) == theirs
    found = read_tokenizer(path)
    reference = Tokenizer.from_file(str(plain / "tokenizer.json"))
    assert found.backend.get_vocab() == reference.get_vocab()
    assert found.backend.encode("<|start|> w400 東京").ids == reference.encode("<|start|> w400 東京").ids
    assert found.chat_template == CHAT_TEMPLATE
    one, other = (runner_on(model).model.get_parameter(EMBEDDING).float() for model in (plain, path))
    torch.testing.assert_close(one, other, rtol=0, atol=0.03)


def test_a_chained_head_names_every_successor(tmp_path: Path) -> None:
    """Each position's best token is the successor of its own, by a margin that no rounding bridges."""
    path = write_gguf_model(tmp_path / "gguf", head="chain")
    runner = runner_on(path)
    tokens = torch.randint(3, 512, (48,), generator=torch.Generator().manual_seed(1))
    _, logits = runner.prefill(tokens.tolist())
    best, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    assert logits.argmax(-1).tolist() == successor(tokens.numpy(), 512).tolist()
    assert float((best - second).min()) > 2.0


@pytest.mark.parametrize("shape", ["tiny", "small", "qwen3-30b-a3b", "glm-4.5-air", "glm-5.3-flash"])
def test_a_chain_goes_through_all_words(shape: str) -> None:
    """No word comes twice before all others have, so that an output's experts are as many as a text's."""
    vocab_size = SHAPES[shape].vocab_size
    following = successor(np.arange(vocab_size), vocab_size).tolist()
    token, seen = vocab_size - 1, 0
    while seen == 0 or token != vocab_size - 1:
        token, seen = following[token], seen + 1
    assert seen == vocab_size - FIRST_WORD
    assert sorted(following) == list(range(vocab_size))


@pytest.mark.parametrize(
    ("shape", "weight_format", "share"),
    [("small", "int4_g32", 0.6), ("small", "q4_0", 0.6), ("glm-5.3-flash-tiny", "int4_g32", 0.9)],
)
def test_as_many_layers_as_fit(tmp_path: Path, shape: str, weight_format: str, share: float) -> None:
    """The bytes asked for are not exceeded, one layer more would; a shape has no more than its own."""
    whole = write_random_model(tmp_path / "m", RandomModelOptions(shape, weight_format))
    limit = share * whole.nbytes
    cut = write_random_model(tmp_path / "m", RandomModelOptions(shape, weight_format, max_gb=limit / 1e9))
    layers = read_model_config(str(cut.path)).num_layers
    per_layer = (whole.nbytes - cut.nbytes) / (parse_shape(shape, 0).num_layers - layers)
    assert cut.nbytes <= limit < cut.nbytes + per_layer
    roomy = RandomModelOptions(shape, weight_format, max_gb=1.0)
    assert write_random_model(tmp_path / "m", roomy).nbytes == whole.nbytes


def test_an_unfinished_gguf_file_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is stopped leaves nothing that could be served."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lab.random_model.build.write_arrays", stop)
    with pytest.raises(KeyboardInterrupt):
        write_gguf_model(tmp_path / "gguf")
    assert not list((tmp_path / "gguf").glob("*.gguf"))
