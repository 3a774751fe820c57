"""Malformed requests, messages and files by the ten thousand: no 5xx, no hang, no growth, no crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.drills import malformed_files, malformed_grpc, malformed_http
from tests.drills.load import GreedyLoad, Outcome, tally
from tests.drills.report import Report
from tests.drills.session import Session, served, undisturbed, wait_for
from tests.drills.watcher import Drift, Sample, look, processes_of

# Shares of all that is sent, in this order.
SHARES = {"bodies": 48, "sockets": 18, "engine": 16, "expert": 13, "safetensors": 2, "gguf": 3}
# What a process may keep of malformed input, MiB: allocators do not give everything back.
KEPT_MIB = 24.0
# Small limits, so that what happens to be right costs little, and slow clients are cut off soon.
_FLAGS = ("--max-model-len", "256", "--max-waiting-requests", "64")
# Yet long enough that a busy machine, whose clients stand still for seconds, is not cut off for that.
_TIMES = ("--header-timeout-s", "6", "--body-timeout-s", "6", "--idle-timeout-s", "8")
# Rounds, so that growth within a kind shows.
ROUNDS = 4


def run(report: Report, requests: int, seed: int) -> None:
    """Sends `requests` malformed things in ROUNDS rounds of all kinds."""
    with served(report, *_FLAGS, *_TIMES) as session:
        cases = undisturbed(session, 4, 64)
        before_pids = _pids(session)
        samples = []
        directory = session.model.parent
        gguf = malformed_files.write_gguf_checkpoint(directory / "gguf")
        growth: list[float] = []
        for round_ in range(ROUNDS):
            for kind, share in SHARES.items():
                count = max(1, int(requests * share) // 100 // ROUNDS)
                found = _send(session, gguf, kind, count, seed + round_, growth)
                _note(report, kind, found)
            if not wait_for(lambda: _idle(session), 60):
                report.promise(f"round {round_}: idle afterwards", False)
            samples.append(look(session.stack))
        after = _pids(session)
        report.promise("no process died or was replaced", after == before_pids, after)
        with GreedyLoad(session.stack.base_url, cases, 4, deadline_s=120) as load:
            wait_for(lambda: len(load.outcomes) >= 8, 120)
        right = tally(load.outcomes)
        report.promise("texts are what they were", right.sent == right.count("right"), right.fates)
        numbers = tally(report.outcomes)
        report.promise(
            "no 5xx, no crash", numbers.count("broken", "wrong", "refused") == 0, numbers.count("broken")
        )
        report.promise("no hang", numbers.count("late") == 0, numbers.count("late"))
        lines = httpx.get(f"{session.stack.base_url}/metrics").text.splitlines()
        closed = [line for line in lines if line.startswith("moebius:gateway_connections_closed_total")]
        report.facts["connections closed against the client's will"] = closed
        report.promise_flat([*_growth(samples), *_file_growth(growth)])


def _send(
    session: Session, gguf: Path, kind: str, count: int, seed: int, growth: list[float]
) -> list[Outcome]:
    """`count` of one kind."""
    stack = session.stack

    def files(model: Path) -> list[Outcome]:
        outcomes, grown = malformed_files.read_all(session.model.parent, model, count, seed)
        growth.extend(grown)
        return outcomes

    def messages(service: str, socket: str) -> list[Outcome]:
        return asyncio.run(malformed_grpc.send(next(stack.state_dir.rglob(socket)), service, count, seed))

    ways: dict[str, Callable[[], list[Outcome]]] = {
        "bodies": lambda: asyncio.run(malformed_http.send(stack.base_url, "bodies", count, seed)),
        "sockets": lambda: asyncio.run(malformed_http.send(stack.base_url, "sockets", count, seed)),
        "engine": lambda: messages(malformed_grpc.ENGINE, "gpu.sock"),
        "expert": lambda: messages(malformed_grpc.EXPERT, "expert-0.sock"),
        "safetensors": lambda: files(session.model),
        "gguf": lambda: files(gguf),
    }
    return ways[kind]()


def _note(report: Report, kind: str, found: list[Outcome]) -> None:
    report.outcomes += found
    report.inject(kind, len(found))
    slowest = max((outcome.seconds for outcome in found), default=0.0)
    key = f"slowest of {kind} (s)"
    report.facts[key] = max(report.facts.get(key, 0.0), round(slowest, 2))


def _pids(session: Session) -> dict[str, list[int]]:
    """Without the processes for prompts, which end by design when a request takes too much."""
    found = processes_of(session.stack)
    return {name: [one.pid for one in members] for name, members in found.items() if name != "prompts"}


def _idle(session: Session) -> bool:
    sample = look(session.stack)
    return sample.requests == 0 and sample.used_tokens == 0


def _growth(samples: list[Sample]) -> list[Drift]:
    """Between the second round, after which everything was used once, and the last one."""
    if len(samples) < 3:
        return []
    first, last = samples[1], samples[-1]
    found = [Drift("shared_memory_mib", first.shared_memory_mib, last.shared_memory_mib, 0.0)]
    for name in sorted(set(first.processes) & set(last.processes)):
        one, two = first.processes[name], last.processes[name]
        rss_mib = one.rss_mib
        if name == "prompts":  # replaced now and then, and small until it has read a large body
            rss_mib = max(
                sample.processes[name].rss_mib for sample in samples[1:-1] if name in sample.processes
            )
        found.append(Drift(f"{name} rss_mib", rss_mib, two.rss_mib, KEPT_MIB + 0.05 * rss_mib))
        found.append(Drift(f"{name} descriptors", one.descriptors, two.descriptors, 2))
        found.append(Drift(f"{name} threads", one.threads, two.threads, 2))
    return found


def _file_growth(growth: list[float]) -> list[Drift]:
    """Returns the growth of processes that read files, from their fifth part on."""
    return [Drift("readers of files rss_mib", 0.0, max(growth), 2 * KEPT_MIB)] if growth else []
