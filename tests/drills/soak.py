"""Mixed load with aborts and disconnects for a long time: everything that is counted stays flat."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.drills.checkpoint import MODEL, GreedyCase
from tests.drills.load import Fate, Outcome, ask, refusal, tally
from tests.drills.report import Report
from tests.drills.session import Session, promise_right, served, undisturbed
from tests.drills.watcher import Sample, drifts, look
from tests.helpers.ports import free_port

CLIENTS = 10
MAX_TOKENS = 64
DEADLINE_S = 120.0
# Share of requests whose client goes away at a random moment.
LEAVES = 0.4
# Of a request that is left, seconds.
LEAVES_WITHIN_S = 1.5
# How long requests that still run at a quiet moment may take to end.
QUIET_S = 60.0
# Counters of the engine that stay at zero.
_ZERO = ("moebius:failed_steps_total", "moebius:nonfinite_logits_total", "moebius:integrity_failures_total")
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "hill", "numbers", "1 2 3", "(yes)")


@dataclass
class Traffic:
    """What the clients did; filled by `_client`."""

    kinds: dict[str, int] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    # Cleared while clients hold still.
    go: asyncio.Event = field(default_factory=asyncio.Event)


def run(report: Report, duration_s: float, period_s: float, seed: int) -> None:
    """Load for `duration_s` seconds, with a quiet moment every `period_s` at which all is counted."""
    port = free_port()
    with served(report, "--gpu-metrics-port", str(port)) as session:
        cases = undisturbed(session, 6, MAX_TOKENS)
        traffic, samples = Traffic(), list[Sample]()
        asyncio.run(_soak(session, traffic, samples, cases, duration_s, period_s, seed))
        report.outcomes = traffic.outcomes
        for kind, count in sorted(traffic.kinds.items()):
            report.inject(kind, count)
        _judge(report, samples, httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text)


async def _soak(
    session: Session,
    traffic: Traffic,
    samples: list[Sample],
    cases: list[GreedyCase],
    duration_s: float,
    period_s: float,
    seed: int,
) -> None:
    end = time.monotonic() + duration_s
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=session.stack.base_url, timeout=None, limits=limits) as client:
        tasks = [
            asyncio.create_task(_client(client, session, traffic, cases, random.Random(f"{seed}/{number}")))
            for number in range(CLIENTS)
        ]
        while time.monotonic() < end:
            traffic.go.set()
            await asyncio.sleep(period_s)
            traffic.go.clear()
            samples.append(await _quiet_sample(session))
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise RuntimeError(f"a client of the drill ended: {ended!r}")


async def _quiet_sample(session: Session) -> Sample:
    """Returns numbers once nothing runs, or after QUIET_S, when something still does."""
    until = time.monotonic() + QUIET_S
    while True:
        sample = await asyncio.to_thread(look, session.stack)
        if (sample.requests == 0 and sample.used_tokens == 0) or time.monotonic() > until:
            return sample
        await asyncio.sleep(0.5)


async def _client(
    client: httpx.AsyncClient,
    session: Session,
    traffic: Traffic,
    cases: list[GreedyCase],
    rng: random.Random,
) -> None:
    """One request after another, of all kinds."""
    where = urlsplit(session.stack.base_url)
    while True:
        await traffic.go.wait()
        choice = rng.random()
        if choice < 0.25:
            traffic.kinds["canary"] = traffic.kinds.get("canary", 0) + 1
            traffic.outcomes.append(await ask(client, rng.choice(cases), DEADLINE_S))
            continue
        if choice < 0.3:
            traffic.kinds["half a request"] = traffic.kinds.get("half a request", 0) + 1
            await _half_a_request(str(where.hostname), int(where.port or 0), rng)
            continue
        kind, path, body = _any_request(rng)
        leaves = rng.random() < LEAVES
        name = f"{kind}{', left' if leaves else ''}"
        traffic.kinds[name] = traffic.kinds.get(name, 0) + 1
        within_s = rng.random() * LEAVES_WITHIN_S if leaves else None
        outcome = await _send(client, path, body, within_s)
        if outcome is not None:
            traffic.outcomes.append(outcome)


def _any_request(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """(kind, path, body)."""
    words = " ".join(rng.choices(_WORDS, k=rng.randint(3, 40)))
    chat = {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": MAX_TOKENS}
    text = {"model": MODEL, "prompt": words, "max_tokens": MAX_TOKENS}
    long = {"model": MODEL, "prompt": " ".join(rng.choices(_WORDS, k=600)), "max_tokens": 8}
    requests = [
        ("chat", "/v1/chat/completions", chat),
        ("chat, streamed", "/v1/chat/completions", chat | {"stream": True}),
        ("text", "/v1/completions", text | {"temperature": 0.8, "seed": rng.randrange(9)}),
        ("text, streamed, n = 3", "/v1/completions", text | {"stream": True, "n": 3, "temperature": 1.0}),
        ("text, logprobs", "/v1/completions", text | {"logprobs": 5, "echo": rng.random() < 0.5}),
        ("long prompt", "/v1/completions", long),
        ("long prompt, streamed", "/v1/completions", long | {"stream": True}),
        ("stop strings", "/v1/chat/completions", chat | {"stop": ["e", "xyz"], "stream": rng.random() < 0.5}),
        ("logit bias", "/v1/completions", text | {"logit_bias": {"9": 5.0}, "frequency_penalty": 0.5}),
        ("tokenize", "/tokenize", {"model": MODEL, "prompt": words}),
        ("refused", "/v1/completions", text | {"max_tokens": "many"}),
    ]
    return rng.choice(requests)  # type: ignore[return-value]


async def _send(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], leave_after_s: float | None
) -> Outcome | None:
    """Reads the whole answer, or goes away; None: went away."""
    started = time.monotonic()
    fate: Fate = "right"
    detail = ""
    try:
        async with asyncio.timeout(leave_after_s if leave_after_s is not None else DEADLINE_S):
            async with client.stream("POST", path, json=body) as response:
                content = await response.aread()
        if response.status_code != 200:
            fate, detail = refusal(response.status_code, content)
            if fate == "refused" and response.status_code == 400 and body["max_tokens"] == "many":
                fate, detail = "right", ""
        elif b'"error"' in content or (body.get("stream") and b"[DONE]" not in content):
            fate, detail = "broken", f"{content[-300:]!r}"
    except TimeoutError:
        if leave_after_s is not None:
            return None
        fate, detail = "late", f"no end within {DEADLINE_S:g} s"
    except httpx.HTTPError as error:
        fate, detail = "broken", f"{type(error).__name__}: {error}"
    return Outcome(fate, started, time.monotonic() - started, detail)


async def _half_a_request(host: str, port: int, rng: random.Random) -> None:
    """Opens a connection, sends the begin of a request and goes away."""
    body = b'{"model": "drill", "prompt": "a", "max_tokens": 200, "stream": true}'
    whole = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    _, writer = await asyncio.open_connection(host, port)
    writer.write(whole[: rng.randrange(len(whole) + 1)])
    await asyncio.sleep(rng.random() * 0.3)
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


def _judge(report: Report, samples: list[Sample], metrics: str) -> None:
    numbers = tally(report.outcomes)
    failed = numbers.count("refused", "broken", "late")
    report.promise("no request failed that its client waited for", failed == 0, f"{failed} of {numbers.sent}")
    promise_right(report, report.outcomes)
    busy = [sample for sample in samples if sample.requests != 0 or sample.used_tokens != 0]
    report.promise("no request and no KV page in use at any quiet moment", not busy, len(busy))
    cached = [float(sample.cached_tokens or 0) for sample in samples]
    report.facts["quiet moments"] = len(samples)
    report.facts["cached tokens at the first and last quiet moment, and the most"] = [
        cached[0],
        cached[-1],
        max(cached),
    ]
    report.facts["gpu rss at quiet moments (MiB)"] = [
        round(sample.processes["gpu"].rss_mib) for sample in samples if "gpu" in sample.processes
    ]
    counters = {name: _counter(metrics, name) for name in _ZERO}
    report.promise(
        "no failed step, no bad logits, the pool's books agree", not any(counters.values()), counters
    )
    # Of quiet moments only, where nothing that belongs to a request counts.
    report.promise_flat(drifts(samples))


def _counter(metrics: str, name: str) -> float:
    """Returns the sum of a counter over its labels; raises when there is none."""
    values = [float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(name)]
    if not values:
        raise LookupError(f"the engine has no metric {name}")
    return sum(values)
