"""Guards what `moebius verify --long` computes of an output: divergence, trend, repetition, ids, verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lab.verify.long_output import ask_long_output, make_long_output
from lab.verify.long_report import FLAT_FACTOR, REPETITION_EXCESS, report_output
from lab.verify.repetition import mean_seq_rep, rep, seq_rep
from lab.verify.teacher_forcing import OutputScores, kl_of_most_probable
from lab.verify.trend import Window, student_t, trend_of, window_size
from moebius.errors import UserError


def distributions(rows: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities float64 `[L, V]` of two models that differ a little."""
    torch.manual_seed(7)
    logits = 3 * torch.randn(rows, vocab_size, dtype=torch.float64)
    other = logits + 0.3 * torch.randn_like(logits)
    return logits.log_softmax(-1), other.log_softmax(-1)


def test_divergence_of_the_most_probable_tokens() -> None:
    """With all tokens named it is the KL divergence; with some, at most that, more with more of them; with
    equal distributions zero; ids of -1 count as none."""
    reference, served = distributions(20, 50)
    exact = (reference.exp() * (reference - served)).sum(1)
    found = []
    for named in (5, 20, 50):
        logprobs, ids = served.topk(named)
        found.append(kl_of_most_probable(reference, ids, logprobs))
    torch.testing.assert_close(found[2], exact, rtol=1e-5, atol=1e-6)
    assert (found[0] <= found[1] + 1e-9).all()
    assert (found[1] <= exact + 1e-9).all()
    assert (found[1] > 0.5 * exact).all()
    logprobs, ids = reference.topk(5)
    assert float(kl_of_most_probable(reference, ids, logprobs).max()) < 1e-9
    logprobs, ids = served.topk(7)
    ids[:, 5:], logprobs[:, 5:] = -1, -torch.inf
    torch.testing.assert_close(kl_of_most_probable(reference, ids, logprobs), found[0])


def test_repetition_is_that_of_the_definitions() -> None:
    """Welleck et al. 2020: shares of repeated 4-grams, and of predictions among the tokens before."""
    assert seq_rep([1, 2, 3, 4, 5, 6, 7]) == 0.0
    # 1234, 2341, 3412, 4123, 1234: one of five has occurred before.
    assert seq_rep([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(0.2)
    assert seq_rep([1, 2]) == 0.0
    assert mean_seq_rep([1] * 10 + list(range(10, 20)), 10) == pytest.approx(6 / 7 / 2)
    sequence, predictions = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([5, 6, 7])
    # At the last three places are 5 6, 5 6 7 and 5 6 7 8; of the last two tokens alone: 5 6, 6 7 and 7 8.
    assert rep(sequence, predictions) == 1.0
    assert rep(sequence, predictions, preceding=2) == pytest.approx(1.0)
    assert rep(sequence, torch.tensor([7, 5, 5]), preceding=2) == 0.0


def test_trend_has_a_slope_with_its_interval() -> None:
    """The slope of a line is found, in thousands of tokens; its interval holds the truth, and t is t's."""
    noise = [0.1, -0.2, 0.15, -0.05, 0.0, 0.1, -0.15, 0.05]
    windows = [Window(1000 * n, 1000 * n + 1000, 2 * n + noise[n], 0, 0, 1, 0) for n in range(8)]
    trend = trend_of(windows)
    assert trend.low < 2.0 < trend.high
    assert trend.high - trend.low < 0.11
    assert trend.first_quarter == pytest.approx(0.95)
    assert trend.last_quarter == pytest.approx(12.95)
    # Tables: 97.5 % of 6, 14 and 30 degrees of freedom.
    for freedom, quantile in ((6, 2.447), (14, 2.145), (30, 2.042)):
        assert student_t(0.975, freedom) == pytest.approx(quantile, rel=2e-3)
    assert [window_size(tokens) for tokens in (16_384, 8128, 80)] == [1024, 1016, 10]


def judged(kl: torch.Tensor, served: list[int], reference: list[int], allowed: float = 1.0) -> list[str]:
    """Returns the checks that an output of these divergences and most probable tokens fails."""
    count = len(kl)
    output = make_long_output("greedy", [300], list(range(count)), [{token: 0.0} for token in served])
    scores = OutputScores(kl, torch.tensor(reference), torch.zeros(count, dtype=torch.float64))
    report = report_output(output, scores, allowed, None, list(range(200)))
    return [check.what for check in report.checks() if not check.passed]


def test_verdict_names_what_is_not_flat_and_what_repeats() -> None:
    """Each threshold fails alone: the mean, one window, the last quarter, and repetition that is the server's
    only; divergence below a tenth of the allowed has no trend."""
    count = 80
    tops = [500] * count
    flat = torch.full((count,), 0.5, dtype=torch.float64)
    assert judged(flat, tops, tops) == []
    assert judged(flat * 2.2, tops, tops) == ["greedy: mean KL"]
    one = flat.clone()
    one[30:40] = FLAT_FACTOR + 0.1
    assert judged(one, tops, tops) == ["greedy: mean KL of tokens 30 to 40"]
    grown = torch.cat([flat[:20] * 0.2, flat[:40], flat[:20] * 0.2 * (2 * FLAT_FACTOR)])
    assert judged(grown, tops, tops) == ["greedy: mean KL of the last quarter"]
    assert judged(grown / 100, tops, tops) == []
    # The last tokens before each place are those of the output: predictions of them are repetitions.
    repeated = [max(0, n - 1) for n in range(count)]
    assert judged(flat, repeated, repeated) == []
    few = round(REPETITION_EXCESS * count) + 2
    assert judged(flat, repeated[:few] + tops[few:], tops) == ["greedy: rep/128"]
    assert judged(flat * float("nan"), tops, tops)[0] == "greedy: mean KL"


class ScriptedClient:
    """Stands for `ApiClient`: keeps what was asked, and answers with events."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events_of, self.bodies = events, list[dict[str, Any]]()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the events, whatever is asked."""
        self.bodies.append(body)
        return self.events_of


def event(tokens: list[str], tops: list[dict[str, float]]) -> dict[str, Any]:
    """Returns an event as the completions API has it."""
    return {"choices": [{"text": "", "logprobs": {"tokens": tokens, "top_logprobs": tops}}]}


def test_output_is_read_from_events() -> None:
    """Ids and log-probabilities of all events; a server that names tokens by their text, or gives too few, is
    refused in its own words."""
    events = [
        event(["token_id:3", "token_id:4"], [{"token_id:3": -0.1, "token_id:9": -3.0}, {"token_id:4": 0.0}]),
        {"choices": [{"text": "", "logprobs": None}], "usage": {}},
        event(["token_id:5"], [{"token_id:8": -0.7, "token_id:5": -0.8}]),
    ]
    client: Any = ScriptedClient(events)
    counts: list[int] = []
    output = ask_long_output(client, "m", "sampled", [1, 2], 3, 11, counts.append)
    assert counts == [2, 2, 3]
    assert output.sequence.tolist() == [1, 2, 3, 4, 5]
    assert output.top_ids.tolist() == [[3, 9], [4, -1], [8, 5]]
    assert output.served_top.tolist() == [3, 4, 8]
    asked = client.bodies[0]
    assert (asked["prompt"], asked["min_tokens"], asked["seed"], asked["temperature"]) == ([1, 2], 3, 11, 1)
    with pytest.raises(UserError, match=r"gave 3 tokens and log-probabilities of 3; needed are 4 of each"):
        ask_long_output(client, "m", "greedy", [1], 4, 0, counts.append)
    by_text: Any = ScriptedClient([event([" the"], [{" the": 0.0}])])
    with pytest.raises(UserError, match=r"calls a token ' the'; needed are ids as in token_id:17"):
        ask_long_output(by_text, "m", "greedy", [1], 1, 0, counts.append)
