"""Guards `moebius bench serve`: arrivals, lengths, what is counted, goodput, errors by name, plots."""

from __future__ import annotations

import json
import math
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.bench.serve import sweep
from app.bench.serve.client import EndpointOptions, Sample
from app.bench.serve.dataset import Dataset, LengthOptions, TokenScale, sharegpt_lengths
from app.bench.serve.plot import plot
from app.cli import main
from moebius.errors import UserError
from tests.helpers.http_server import LocalServer, QuietHandler, serving

OVERHEAD = 7  # tokens of this server's chat template


class CountingServer(LocalServer):
    """Streams as many tokens as are asked for; a token is a word. Each `refuse_every`th is refused."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.refuse_every = 0
        self.break_off = False
        self.most_at_once = self._at_once = 0
        self.together = 0  # Answers are held back until this many requests are under way.
        self._changed = threading.Condition()

    def enter(self, body: dict[str, Any]) -> int:
        with self._changed:
            self.bodies.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self._changed.notify_all()
            number = len(self.bodies)
            # The first two tell how this server counts tokens.
            self._changed.wait_for(lambda: number <= 2 or self.most_at_once >= self.together, 30)
            return number

    def leave(self) -> None:
        with self._changed:
            self._at_once -= 1


class _Handler(QuietHandler):
    server: CountingServer

    def do_GET(self) -> None:
        self.answer(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.headers.get("Authorization", ""))
        number = self.server.enter(body)
        try:
            self._answer(body, number)
        finally:
            self.server.leave()

    def _answer(self, body: dict[str, Any], number: int) -> None:
        if self.server.refuse_every and number % self.server.refuse_every == 0:
            self.answer(429, b'{"error": {"message": "too many requests are waiting"}}')
            return
        is_chat = self.path == "/v1/chat/completions"
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        content = {"delta": {"content": "a "}} if is_chat else {"text": "a "}
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [content]}] * body["max_tokens"]
        if not self.server.break_off:
            events.append({"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]})
            tokens = len(prompt.split()) + OVERHEAD
            usage = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}
            events.append({"choices": [], "usage": usage})
        self.answer(200, "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())


@pytest.fixture
def server() -> Iterator[CountingServer]:
    server = CountingServer()
    with serving(server):
        yield server


def measured(server: CountingServer, tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """Returns the JSON rows of a run of the command."""
    path = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", server.url, "--json", str(path), *options])
    assert ended.value.code == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_fixed_lengths_are_those_asked_for(server: CountingServer, tmp_path: Path, endpoint: str) -> None:
    """Prompts have the tokens asked for although no tokenizer is known; warm-up is not counted."""
    options = ["--dataset-name", "random", "--random-input-len", "50", "--random-output-len", "6"]
    options += [
        "--num-prompts",
        "8",
        "--num-warmups",
        "2",
        "--endpoint",
        endpoint,
        "--extra-body",
        '{"top_k": 3}',
    ]
    (row,) = measured(server, tmp_path, *options)
    assert (row["completed"], row["failed"], row["errors"]) == (8, 0, {})
    assert row["total_input_tokens"] == 8 * 50
    assert row["total_output_tokens"] == 8 * 6
    assert row["output_throughput"] == pytest.approx(48 / row["duration"])
    assert len(server.bodies) == 2 + 2 + 8
    assert all(body["ignore_eos"] and body["top_k"] == 3 and body["stream"] for body in server.bodies)
    texts = [json.dumps(body.get("messages", body.get("prompt"))) for body in server.bodies]
    assert len(set(texts)) == len(texts)


def test_sweep_has_a_row_for_each_rate_and_concurrency(server: CountingServer, tmp_path: Path) -> None:
    """No more requests are under way than allowed; a finite rate is the limit of what is answered."""
    options = ["--dataset-name", "random", "--random-input-len", "20", "--random-output-len", "2"]
    options += ["--request-rate", "200,inf", "--max-concurrency", "1,4", "--num-prompts", "12"]
    figure = tmp_path / "sweep.svg"
    rows = measured(server, tmp_path, *options, "--plot", str(figure), "--goodput", "ttft:60000")
    assert [(row["request_rate"], row["max_concurrency"]) for row in rows] == [
        *((200, 1), (200, 4)),
        *(("inf", 1), ("inf", 4)),
    ]
    assert server.most_at_once <= 4
    for row in rows[:2]:
        assert row["limit_of"] == "request rate"
        assert row["ratio"] == pytest.approx(row["request_throughput"] / 200)
    assert [row["ratio"] for row in rows[2:]] == [None, None]
    for row in rows:
        assert row["request_goodput"] == pytest.approx(row["request_throughput"])
        assert row["median_ttft_ms"] <= row["p99_ttft_ms"] <= row["p99_e2el_ms"]
    root = ElementTree.fromstring(figure.read_text())
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert "200 requests/s, at most 1" in texts
    assert any(text.startswith("Inter-token latency") for text in texts)


def test_without_a_bound_all_requests_are_under_way_at_once(server: CountingServer, tmp_path: Path) -> None:
    """`--request-rate inf` waits for no answer: the server holds all back until the last has arrived."""
    server.together = 16
    options = ["--dataset-name", "random", "--random-input-len", "10", "--random-output-len", "1"]
    options += ["--num-prompts", "16", "--num-warmups", "0"]
    (row,) = measured(server, tmp_path, *options)
    assert row["completed"] == 16
    assert server.most_at_once == 16


def test_errors_are_counted_by_name(
    server: CountingServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused requests are no part of throughput or latencies, and the message says why."""
    server.refuse_every = 4
    options = ["--dataset-name", "random", "--random-input-len", "10", "--random-output-len", "1"]
    (row,) = measured(server, tmp_path, *options, "--num-prompts", "13", "--num-warmups", "0")
    assert (row["completed"], row["failed"]) == (10, 3)
    assert row["errors"] == {"HTTP 429: too many requests are waiting": 3}
    assert row["total_output_tokens"] == 10
    assert "3 of 13 failed: HTTP 429" in capsys.readouterr().out


def test_stream_that_breaks_off_is_an_error(
    server: CountingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text without an end counts as failed, and a run in which nothing works ends with that and status 1."""
    server.break_off = True
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", server.url])
    assert ended.value.code != 0
    assert "the stream broke off" in capsys.readouterr().err


def test_key_is_sent(server: CountingServer, tmp_path: Path) -> None:
    """Every request brings the API key."""
    measured(server, tmp_path, "--api-key", "k", "--num-prompts", "1", "--sharegpt-output-len", "1")
    assert server.keys == {"Bearer k"}


def test_arrivals_are_poisson_at_the_rate() -> None:
    """Pauses of a Poisson process spread as much as they last; larger `burstiness` spreads them less."""
    times = np.array(sweep.arrivals(50.0, 4000, 1.0, seed=1))
    pauses = np.diff(times)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(80.0, rel=0.01)
    assert pauses.std() / pauses.mean() == pytest.approx(1.0, abs=0.1)
    even = np.diff(sweep.arrivals(50.0, 4000, 100.0, seed=1))
    assert even.std() / even.mean() == pytest.approx(0.1, abs=0.02)
    assert sweep.arrivals(math.inf, 3, 1.0, seed=1) == [0.0, 0.0, 0.0]


def test_sharegpt_file(tmp_path: Path) -> None:
    """First questions with the lengths of their answers; trivial and very long ones are left out."""

    def entry(question: str, answer: str) -> dict[str, Any]:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        return {"id": "x", "conversations": turns}

    path = tmp_path / "sharegpt.json"
    usable = entry("why is the sky blue? " * 4, "b" * 400)
    path.write_text(json.dumps([usable, entry("?", "b" * 400), entry("a" * 90_000, "b" * 400), {"id": "y"}]))
    scale = TokenScale(per_word=1.0, overhead=0.0)
    drawn = Dataset(LengthOptions(dataset_path=path), scale, seed=0).draw(3, 1)
    assert {one.prompt for one in drawn} == {"why is the sky blue? " * 4}
    assert {one.output_len for one in drawn} == {round(400 * scale.per_character)}
    path.write_text("[]")
    with pytest.raises(UserError, match="no usable conversation"):
        Dataset(LengthOptions(dataset_path=path), scale, seed=0)


def test_built_in_lengths() -> None:
    """Lengths are about 200 tokens on average, most of them shorter than that, within the limits."""
    for lengths in sharegpt_lengths(np.random.default_rng(0), 20_000):
        assert lengths.min() >= 4
        assert lengths.max() <= 1024
        assert 180 < lengths.mean() < 230
        assert np.median(lengths) < 150


def test_goodput_counts_requests_within_every_limit() -> None:
    """One is too slow to begin, one too slow to go on, one failed: one of four is good."""
    samples = [
        Sample(begin=0, ttft=0.1, end=1.0, output_tokens=10),
        Sample(begin=0, ttft=0.9, end=1.0, output_tokens=10),
        Sample(begin=0, ttft=0.1, end=9.0, output_tokens=10),
        Sample(begin=0, end=0.1, error="HTTP 503: no"),
    ]
    row = sweep.SweepRow(math.inf, None, samples, 2.0, sweep.parse_goodput("ttft:500 tpot:200"))
    assert row.request_goodput == pytest.approx(0.5)
    assert row.values("tpot") == pytest.approx([100.0, 100 / 9, 8900 / 9])
    assert row.to_json((99,))["mean_ttft_ms"] == pytest.approx((100 + 900 + 100) / 3)


def test_a_plot_without_values_is_a_document() -> None:
    """Outputs of one token have no inter-token latency."""
    row = sweep.SweepRow(1.0, None, [Sample(ttft=0.1, end=0.1, output_tokens=1)], 1.0, {})
    assert ElementTree.fromstring(plot([row])).tag.endswith("svg")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--request-rate", "fast"], "--request-rate: 'fast' is not allowed; allowed: numbers > 0 or inf"),
        (["--max-concurrency", "0"], "--max-concurrency: '0' is not allowed"),
        (["--goodput", "itl:5"], "--goodput: 'itl:5' is not allowed; allowed: ttft:MILLISECONDS"),
        (["--extra-body", "[]"], "--extra-body: '[]' is not allowed; allowed: a JSON object"),
        (["--endpoint", "/v1/embeddings"], "--endpoint: '/v1/embeddings' is not allowed; allowed: /v1/chat"),
        (["--dataset-name", "sonnet"], "--dataset-name: 'sonnet' is not allowed; allowed: sharegpt, random"),
        (["--dataset-path", "/nowhere.json"], "--dataset-path /nowhere.json: No such file"),
    ],
)
def test_bad_options_name_what_is_allowed(
    server: CountingServer, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, status 2 or 1, and no load."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", server.url, *options])
    assert ended.value.code != 0
    assert message in capsys.readouterr().err
    assert len(server.bodies) <= 2


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing listens there."""
    with pytest.raises(SystemExit):
        main(["bench", "serve", "http://127.0.0.1:9"])
    assert "cannot reach http://127.0.0.1:9" in capsys.readouterr().err
    with pytest.raises(UserError, match="allowed: http://HOST:PORT"):
        EndpointOptions("localhost:8000").check()
