"""Guards the formulae of `moebius verify`: relative errors, KL divergence, perplexity, routing agreement."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gpu_service.verify.errors import TokenScores, perplexity, relative_error, score
from lab.verify.experts import gain, routing_agreement
from lab.verify.run import BUNDLED_TEXT, read_tokens
from moebius.errors import UserError
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer


def test_relative_error_is_norm_over_norm() -> None:
    """The error is defined also where there is nothing to divide by."""
    wanted = torch.tensor([3.0, 4.0])
    assert relative_error(wanted, wanted) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5]), wanted) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative_error(torch.tensor([math.nan, 4.0]), wanted) == math.inf


def test_kl_is_what_is_lost_when_ours_is_taken_for_the_reference() -> None:
    """The divergence of two tokens is that computed by hand: P = (3/4, 1/4), Q = (1/2, 1/2); the other
    direction gives another number.
    """
    p, q = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log() + 7
    found = score(logits=q, reference=p, targets=torch.tensor([1]))
    assert found.kl.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert found.reference_loss.item() == pytest.approx(math.log(4))
    assert found.loss.item() == pytest.approx(math.log(2))
    reverse = score(logits=p, reference=q, targets=torch.tensor([1]))
    assert reverse.kl.item() == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2))


def test_perplexity_leaves_out_what_nothing_follows() -> None:
    """Even odds of 5 tokens are perplexity 5; the last row has no next token, but a divergence."""
    logits = torch.zeros(3, 5)
    logits[2, 0] = 50.0
    both = [
        score(logits[:2], logits[:2], torch.tensor([1, 2])),
        score(logits[2:], logits[2:], torch.tensor([-1])),
    ]
    scores = TokenScores.join(both)
    assert perplexity(scores.loss) == pytest.approx(5.0)
    assert scores.kl.shape == (3,)
    assert scores.same_top.all()
    assert perplexity(torch.tensor([1e6])) == math.inf


def test_routing_agreement_ignores_the_order() -> None:
    """Two of three, then all of three."""
    reference = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    ours = torch.tensor([[3, 0, 1], [6, 4, 5]], dtype=torch.int32)
    assert routing_agreement(ours, reference) == pytest.approx(5 / 6)


def test_gain_is_the_common_factor_of_the_answers() -> None:
    """The gain is found whatever else is wrong with the answers; also where there is nothing to divide by."""
    wanted = torch.tensor([3.0, 4.0])
    assert gain(wanted * 1.3, wanted) == pytest.approx(1.3)
    assert gain(wanted * 1.3 + torch.tensor([4.0, -3.0]), wanted) == pytest.approx(1.3)
    assert gain(torch.tensor([4.0, -3.0]), wanted) == pytest.approx(0.0)
    assert gain(torch.zeros(2), torch.zeros(2)) == 1.0
    assert gain(torch.ones(2), torch.zeros(2)) == math.inf
    assert gain(torch.tensor([math.nan, 4.0]), wanted) == math.inf


def test_text_in_the_models_tokens(tmp_path: Path) -> None:
    """Text is in the tokenizer's tokens where there is one, else in bytes; it is limited, and refused where
    too little is left.
    """
    plain = read_tokens(tmp_path, None, 100, 211)
    assert (plain.source, plain.ids.shape) == ("bytes", (100,))
    assert plain.ids.tolist() == [byte % 211 for byte in BUNDLED_TEXT.read_bytes()[:100]]
    write_tokenizer(tmp_path, byte_level_tokenizer())
    found = read_tokens(tmp_path, None, 10_000, 10_000)
    assert found.source == "tokenizer"
    text = byte_level_tokenizer().decode(found.ids.tolist(), skip_special_tokens=True)
    assert "wheel" in text
    with pytest.raises(UserError, match="but the vocabulary has 30 tokens"):
        read_tokens(tmp_path, None, 100, 30)
    short = tmp_path / "short.txt"
    short.write_text("")
    with pytest.raises(UserError, match=r"short.txt: 0 tokens; allowed: 2 or more"):
        read_tokens(tmp_path, short, 100, 10_000)
    with pytest.raises(UserError, match="cannot be read"):
        read_tokens(tmp_path, tmp_path / "none.txt", 100, 10_000)
