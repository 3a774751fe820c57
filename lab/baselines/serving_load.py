"""Servers started and stopped for a comparison, and the load that each of them is given over HTTP."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from app.client import ApiClient
from lab.random_model.tensors import FIRST_WORD, successor
from moebius.errors import UserError

_POLL_S = 0.1
_STOP_S = 60.0


def free_port() -> int:
    """Returns a TCP port of the loopback address that is not listened on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class RunningServer:
    """An OpenAI-compatible server that is ready; filled by `serving`."""

    client: ApiClient
    # From its start to its first healthy answer.
    ready_s: float
    # Keys that this server wants in every request.
    body: dict[str, Any] = field(default_factory=dict)
    # Ends it at once, and with it every request it has.
    kill: Callable[[], None] = lambda: None


class TimeLimit(UserError):
    """Something took longer than it may."""


@contextlib.contextmanager
def time_limit(server: RunningServer, seconds: float) -> Iterator[None]:
    """Kills the server when the block takes longer, which ends its requests. Raises TimeLimit then."""
    late = threading.Event()

    def end() -> None:
        late.set()
        server.kill()

    timer = threading.Timer(max(0.0, seconds), end)
    timer.start()
    try:
        yield
    except Exception:
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeLimit(f"not finished after {seconds:.0f} s")


@contextlib.contextmanager
def serving(
    command: Sequence[str], port: int, path: str, log: Path, timeout_s: float, body: dict[str, Any]
) -> Iterator[RunningServer]:
    """Starts a server, waits until `path` answers 200, and stops it at the end.

    Its output goes to `log`. Raises UserError with the end of that when it ends or is late.
    """
    base_url = f"http://127.0.0.1:{port}"
    begin = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
    try:
        while not _answers(base_url + path):
            ended = process.poll() is not None
            if ended or time.monotonic() - begin > timeout_s:
                why = "ended" if ended else f"was not ready after {timeout_s:.0f} s"
                words = log.read_text(errors="replace")[-1000:]
                kind = UserError if ended else TimeLimit
                raise kind(f"{' '.join(command)}: {why}; {log} ends with:\n{words}")
            time.sleep(_POLL_S)
        client = ApiClient(base_url, keep_alive=False)
        yield RunningServer(client, time.monotonic() - begin, body, process.kill)
        client.close()
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass(frozen=True)
class Prompts:
    """Prompts of words drawn by seed, the same for every system; filled by the command line."""

    vocab_size: int
    seed: int = 0

    def draw(self, number: int, length: int, following: int) -> tuple[list[int], list[int]]:
        """Returns prompt `number`, and the `following` tokens that a chained model answers."""
        rng = np.random.default_rng([self.seed, number, length])
        tokens = rng.integers(FIRST_WORD, self.vocab_size, length)
        prompt = tokens.tolist()
        for _ in range(following):
            tokens = np.append(tokens, successor(tokens[-1:], self.vocab_size))
        return prompt, tokens[length:].tolist()


@dataclass(frozen=True)
class Stream:
    """One answered request; filled by `ask`."""

    begin: float
    # Time of each event with text, and the tokens known by then.
    arrivals: tuple[tuple[float, int], ...]
    # Tokens that are the expected ones, of `asked`.
    correct: int
    asked: int

    def tokens_until(self, moment: float) -> int:
        """Returns how many had arrived."""
        return max((tokens for at, tokens in self.arrivals if at <= moment), default=0)


def ask(server: RunningServer, model: str, prompt: list[int], answer: list[int]) -> Stream:
    """Returns greedy completion of as many tokens as `answer` has."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": len(answer),
        "temperature": 0,
        "ignore_eos": True,
        **server.body,
    }
    begin, text = time.perf_counter(), ""
    arrivals = []
    for piece in server.client.stream("/v1/completions", body):
        if piece.text:
            text += piece.text
            arrivals.append((time.perf_counter(), text.count("w")))
    if not arrivals:
        raise UserError("the server's stream had no text")
    words = text.split()
    correct = sum(word == f"w{token}" for word, token in zip(words, answer, strict=False))
    return Stream(begin, tuple(arrivals), correct, len(answer))


@dataclass(frozen=True)
class Measured:
    """One cell of one system; filled by the functions below."""

    # Median over the repetitions, and all of them.
    tokens_per_second: float
    repetitions: tuple[float, ...]
    # Share of generated tokens that are the model's.
    correct: float


def measure_prefill(
    server: RunningServer, model: str, prompts: Prompts, length: int, repeats: int
) -> Measured:
    """Returns prompt tokens over the time to the first token, one request at a time."""
    streams = [ask(server, model, *prompts.draw(1000 * (1 + number), length, 1)) for number in range(repeats)]
    return _measured([length / (one.arrivals[0][0] - one.begin) for one in streams], streams)


def measure_decode(
    server: RunningServer, model: str, prompts: Prompts, streams: int, tokens: int, repeats: int, length: int
) -> Measured:
    """Tokens of all streams per second while all decode: from the last first token to the first end."""
    speeds, answered = [], []
    for number in range(repeats):
        asked = [prompts.draw(1_000_000 + number * streams + one, length, tokens) for one in range(streams)]
        with concurrent.futures.ThreadPoolExecutor(streams) as pool:
            done = list(pool.map(lambda pair: ask(server, model, *pair), asked))
        begin = max(one.arrivals[0][0] for one in done)
        end = min(one.arrivals[-1][0] for one in done)
        if end <= begin:
            raise UserError(
                f"{streams} streams of {tokens} tokens never decoded together; more --decode-tokens do"
            )
        counted = sum(one.tokens_until(end) - one.tokens_until(begin) for one in done)
        speeds.append(counted / (end - begin))
        answered += done
    return _measured(speeds, answered)


def _measured(speeds: Sequence[float], streams: Sequence[Stream]) -> Measured:
    correct = sum(one.correct for one in streams) / sum(one.asked for one in streams)
    return Measured(statistics.median(speeds), tuple(speeds), correct)
