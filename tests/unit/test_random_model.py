"""Guards random checkpoints: complete, the same for any number of threads, sane, and skewed as asked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.layers.moe import Router
from moebius.app.random_model import RandomModelOptions, write_random_model
from moebius.app.random_model.build import write_tokenizer
from moebius.app.random_model.values import (
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
from moebius.errors import UserError
from moebius.models.read import read_geometry
from tests.helpers.paged_runner import PagedRunner, load_runner
from tests.tolerances import ROUTER_SHARES_FITTED


def write(directory: Path, weight_format: str = "bfloat16", skew: str = "none", threads: int = 2) -> Path:
    options = RandomModelOptions("tiny", weight_format, skew=skew, threads=threads, seed=3)
    write_random_model(directory, options)
    return directory


def runner_on(directory: Path) -> PagedRunner:
    geometry = read_geometry(directory)
    client = LocalExpertClient(str(directory), geometry, torch.bfloat16)
    return load_runner(directory, experts=client)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_format_loads_and_predicts(tmp_path: Path, weight_format: str) -> None:
    """All tensors are accounted for, logits are finite, neither flat nor certain, nothing explodes."""
    runner = runner_on(write(tmp_path / "model", weight_format))
    tokens = torch.randint(3, 512, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    _, logits = runner.prefill(tokens)
    assert torch.isfinite(logits).all()
    assert 2.0 < logits.std(dim=-1).mean() < 8.0
    largest = logits.softmax(-1).amax(-1).mean()
    assert 5 / 512 < largest < 0.9


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
    """Zipf where it is below one; an expert can not be chosen twice by a token, so the rest is moved on."""
    shares = wanted_shares(128, 8, 1.2)
    assert shares.sum() == pytest.approx(8)
    assert shares.max() == 1.0
    below = shares[shares < 1]
    ranks = np.arange(128 - len(below) + 1, 129)
    assert np.allclose(below * ranks**1.2, below[0] * ranks[0] ** 1.2)


def test_biases_give_the_shares_wanted() -> None:
    """Scores drawn anew, top 8 of 128: every expert is chosen about as often as the law says."""
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

        def keep(module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            chosen.append(output[1])

        for module in runner.model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(cast("object", keep))  # type: ignore[arg-type]
        tokens = torch.randint(3, 512, (200,), generator=torch.Generator().manual_seed(1)).tolist()
        runner.prefill(tokens)
        shares = [torch.bincount(ids.flatten().long(), minlength=8) / 200 for ids in chosen]
        return float(torch.stack(shares).amax(dim=1).mean())

    even = largest_share(write(tmp_path / "even"))
    skewed = largest_share(write(tmp_path / "skewed", skew="zipf:1.2"))
    assert even < 0.55
    assert skewed > 0.75


def test_every_id_decodes(tmp_path: Path) -> None:
    """Text comes back as it was, and an id that no text encodes to is a word of its own."""
    from tokenizers import Tokenizer

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
    from moebius.app.cli import main

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
