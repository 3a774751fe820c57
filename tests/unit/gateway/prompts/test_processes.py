"""Guards the start of prompt processes: they read the model's files while the engine loads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from gateway.prompts import worker
from gateway.prompts.fork_server import EarlyServer, ForkServer
from gateway.prompts.pool import PromptPool
from gateway.prompts.process import SMALL_BYTES, Died, ModelFiles, WorkerSetup
from gateway.schemas.errors import ApiError
from moebius.config import ImageConfig
from moebius.errors import WrongIdentity
from moebius.models.identity import text_parts
from protos import engine_pb2 as pb
from tests.helpers.swapped_files import put, swap_tokens
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer


def children() -> set[int]:
    """Returns prompt processes of this test process: what the server forks."""
    found = set()
    for child in servers():
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {each.pid for each in child.children() if "gateway.prompts.worker" in each.cmdline()}
    return found


async def forked(count: int) -> set[int]:
    """Returns `children` once there are that many: their server has to read the libraries first."""
    async with asyncio.timeout(60):
        while len(found := children()) < count:  # noqa: ASYNC110 - it looks by itself
            await asyncio.sleep(0.02)
    return found


def servers() -> list[psutil.Process]:
    """Returns those that this test process's prompt processes are forks of."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended, a moment ago or unnoticed yet
            # Popen returns a moment before the kernel shows the new program's arguments.
            while not (command := child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.001)
            found += [child] if "gateway.prompts.worker" in command else []
    return found


def setup_for(directory: Path) -> tuple[ModelFiles, WorkerSetup]:
    write_tokenizer(directory, byte_level_tokenizer())
    files = ModelFiles(str(directory), "")
    info = pb.GetModelInfoResponse(vocab_size=512, max_context_length=64, served_model_name="tiny")
    return files, WorkerSetup(info.SerializeToString(), files, "tiny", ImageConfig(), 2**20, 2**30, 5.0)


async def token_count(pool: PromptPool) -> int:
    body = json.dumps({"prompt": "hello"}).encode()
    answer = await pool.prepare("tokenize", [body])
    assert isinstance(answer, bytes)
    return int(json.loads(answer)["count"])


async def test_processes_are_there_before_the_engine(tmp_path: Path) -> None:
    """Those that read the files early serve later; once the tokenizer is read its files may go."""
    files, setup = setup_for(tmp_path)
    pool = PromptPool(2, 8)
    try:
        await pool.spawn(files)
        early = await forked(2)
        await pool.start(setup)
        assert children() == early
        assert await token_count(pool) == 3
    finally:
        await pool.close()
    assert children() == set()


async def test_the_first_server_may_be_a_fork_of_the_gateway(tmp_path: Path) -> None:
    """It saves a start; what takes its place, once it was killed, is a program of its own."""
    files, setup = setup_for(tmp_path)
    early = EarlyServer(worker.main)
    pool = PromptPool(1, 8, early)
    try:
        await pool.spawn(files)
        await pool.start(setup)
        assert await token_count(pool) == 3
        assert servers() == []
        (process,) = psutil.Process(early.process.pid).children()
        assert process.name() == worker.COMMAND
        early.process.kill()
        assert early.process.wait() == -signal.SIGKILL
        process.kill()
        assert await token_count(pool) == 3
        assert len(servers()) == 1
    finally:
        await pool.close()


async def test_one_that_died_while_the_engine_loaded_is_replaced(tmp_path: Path) -> None:
    """The engine may take half an hour, in which anything may end an idle process; so may the moment in which
    the others begin to serve, when it has not ended yet as its parent sees it."""
    files, setup = setup_for(tmp_path)
    pool = PromptPool(2, 8)
    try:
        await pool.spawn(files)
        killed, kept = sorted(await forked(2))
        os.kill(killed, signal.SIGKILL)
        await pool.start(setup)
        assert kept in children()
        assert killed not in children()
        assert len(children()) == 2
        assert await token_count(pool) == 3
    finally:
        await pool.close()


async def test_processes_outlive_their_server_and_get_another_one(tmp_path: Path) -> None:
    """The kernel may end it for memory, and a debugger may stop it: neither costs a request."""
    _, setup = setup_for(tmp_path)
    pool = PromptPool(1, 8)
    try:
        await pool.start(setup)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            before = servers()
            os.kill(before[0].pid, number)
            if number == signal.SIGKILL:
                before[0].wait(60)
            assert await token_count(pool) == 3
            (running,) = pool._running.values()
            await running.stop()
            assert await token_count(pool) == 3
            assert servers() != before
    finally:
        await pool.close()
    assert not servers()


@pytest.mark.parametrize("left", [0, 1])
async def test_a_process_that_finds_another_tokenizer_does_not_serve(tmp_path: Path, left: int) -> None:
    """Whichever is left reads requests of any size by the right one; with none left they are refused by the
    file's name, until it is back."""
    files, setup = setup_for(tmp_path)
    files = replace(files, parts=text_parts(tmp_path))
    setup = replace(setup, files=files, max_body_bytes=2**21)
    right = (tmp_path / "tokenizer.json").read_bytes()
    large = b'{"prompt": "hello"' + b" " * 2**17 + b"}"
    pool = PromptPool(2, 8)
    try:
        await pool.spawn(files)
        await pool.start(setup)
        expected = await pool.prepare("tokenize", [large])
        swap_tokens(tmp_path / "tokenizer.json")
        pool._running[1 - left]._process.kill()
        pool._running[1 - left]._process.wait()
        async with asyncio.timeout(60):
            while not pool.refusal:  # whose turn it is notices
                bodies = [large, json.dumps({"prompt": "hello"}).encode()]
                await asyncio.gather(*(pool.prepare("tokenize", [body]) for body in bodies))
        assert pool.refusal.startswith("tokenizer.json has changed since the gateway has read it")
        assert not pool.outage
        for _ in range(3):
            assert await token_count(pool) == 3
            assert await pool.prepare("tokenize", [large]) == expected
        pool._running[left]._process.kill()
        pool._running[left]._process.wait()
        with pytest.raises(ApiError, match=r"tokenizer\.json has changed") as caught:
            await pool.prepare("tokenize", [large])
        assert (caught.value.status, caught.value.code) == (503, "model_files_changed")
        assert pool.outage
        put(tmp_path / "tokenizer.json", right)
        async with asyncio.timeout(60):
            while pool.refusal:  # noqa: ASYNC110 - it looks by itself
                await asyncio.sleep(0.05)
        assert await pool.prepare("tokenize", [large]) == expected
    finally:
        await pool.close()


async def test_a_first_start_with_other_files_is_refused(tmp_path: Path) -> None:
    """They were written between the gateway's look and the process's."""
    files, setup = setup_for(tmp_path)
    files = replace(files, parts=text_parts(tmp_path))
    swap_tokens(tmp_path / "tokenizer.json")
    pool = PromptPool(1, 8)
    try:
        await pool.spawn(files)
        with pytest.raises(WrongIdentity, match=r"tokenizer\.json has changed"):
            await pool.start(replace(setup, files=files))
    finally:
        await pool.close()
    assert children() == set()


async def test_a_gateway_that_ends_before_the_engine_leaves_no_process(tmp_path: Path) -> None:
    """They wait for a message that will not come."""
    files, _ = setup_for(tmp_path)
    pool = PromptPool(1, 8)
    await pool.spawn(files)
    await forked(1)
    await pool.close()
    assert children() == set()
    assert not servers()


class FakeProcess:
    """Stands for a process; one that gets a request with `bad` dies of its processor time."""

    ended = leaving = False
    groups: ClassVar[list[int]] = []  # sizes, in order

    @classmethod
    async def spawn(cls, _server: ForkServer) -> FakeProcess:
        return cls()

    async def begin(self, _setup: WorkerSetup) -> None:
        """Ready at once."""

    async def run(self, jobs: Sequence[Any], _limit_s: float) -> list[bytes]:
        """Echoes the bodies."""
        self.groups.append(len(jobs))
        await asyncio.sleep(0)
        bodies = [b"".join(job.body) for job in jobs]
        if b"bad" in bodies:
            raise Died(-signal.SIGPROF)
        return bodies

    async def stop(self, kill: bool = True) -> int:
        return 0


async def test_one_bad_request_of_a_group_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small requests that wait are given to a process together; when it dies of one of them, the others are
    answered all the same, whatever their place."""
    files, setup = setup_for(tmp_path)
    monkeypatch.setattr("gateway.prompts.pool.Process", FakeProcess)
    monkeypatch.setattr(FakeProcess, "groups", [])
    pool = PromptPool(1, 100)
    await pool.spawn(files)
    await pool.start(setup)
    try:
        bodies = [b"%d" % number for number in range(20)]
        bodies[9] = b"bad"
        answers = await asyncio.gather(
            *(pool.prepare("tokenize", [body]) for body in bodies), return_exceptions=True
        )
    finally:
        await pool.close()
    assert [answer for answer in answers if not isinstance(answer, ApiError)] == bodies[:9] + bodies[10:]
    refusal = answers[9]
    assert isinstance(refusal, ApiError)
    assert refusal.code == "request_too_expensive"
    assert FakeProcess.groups[:2] == [8, 8]  # the second one has `bad`, and is repeated one by one
    assert FakeProcess.groups[2:].count(1) == 8


@pytest.mark.parametrize("failures", [1, 2, 5])
async def test_a_process_that_is_killed_while_it_starts_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """It is started again until that succeeds, and requests wait for it."""
    files, setup = setup_for(tmp_path)
    deaths = [Died(-signal.SIGKILL)] * failures

    async def begin(_process: FakeProcess, _setup: WorkerSetup) -> None:
        if pool._tasks and deaths:
            raise deaths.pop()

    monkeypatch.setattr("gateway.prompts.pool.Process", FakeProcess)
    monkeypatch.setattr("gateway.prompts.pool._RESTART_S", 0.01)
    monkeypatch.setattr(FakeProcess, "begin", begin)
    pool = PromptPool(1, 100)
    await pool.spawn(files)
    await pool.start(setup)
    pool._running.clear()  # killed, as by the kernel for memory
    try:
        assert await pool.prepare("tokenize", [b"next"]) == b"next"
        assert deaths == []
    finally:
        await pool.close()


async def test_those_that_run_take_all_requests_while_others_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small and large requests are answered by the first of two processes, whose place is for small ones,
    while the second does not start; none of them is refused."""
    files, setup = setup_for(tmp_path)

    async def begin(_process: FakeProcess, _setup: WorkerSetup) -> None:
        if pool._tasks:
            raise Died(-signal.SIGKILL)

    monkeypatch.setattr("gateway.prompts.pool.Process", FakeProcess)
    monkeypatch.setattr("gateway.prompts.pool._RESTART_S", 0.01)
    monkeypatch.setattr("gateway.prompts.pool._PATIENCE_S", 0.0)
    monkeypatch.setattr(FakeProcess, "begin", begin)
    pool = PromptPool(2, 100)
    await pool.spawn(files)
    await pool.start(setup)
    del pool._running[1]
    try:
        async with asyncio.timeout(60):
            while pool._failed_starts.get(1, 0) < 3:  # noqa: ASYNC110 - it is started by itself
                await asyncio.sleep(0.01)
            for body in (b"x", b"x" * (SMALL_BYTES + 1)):
                assert await pool.prepare("tokenize", [body]) == body
    finally:
        await pool.close()


class Fate:
    """What becomes of the processes of a test, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.starts_fail = False

    def dies(self, share: float) -> bool:
        return self.draws.random() < share


class FatefulProcess(FakeProcess):
    """One whose start fails, and that is killed in or between requests, as `fate` has it."""

    fate: ClassVar[Fate]

    @property
    def ended(self) -> bool:  # type: ignore[override]
        """Killed while it was idle, now and then."""
        return self.fate.dies(0.2)

    async def begin(self, _setup: WorkerSetup) -> None:
        """Ready, unless no process starts."""
        await asyncio.sleep(0)
        if self.fate.starts_fail:
            raise Died(-signal.SIGKILL)

    async def run(self, jobs: Sequence[Any], _limit_s: float) -> list[bytes]:
        """Echoes the bodies, or dies."""
        await asyncio.sleep(0)
        if self.fate.dies(0.3):
            raise Died(self.fate.draws.choice([-signal.SIGKILL, -signal.SIGPROF, None]))
        return [b"".join(job.body) for job in jobs]


def fateful_pool(monkeypatch: pytest.MonkeyPatch, seed: int, processes: int, most: int) -> PromptPool:
    """Returns a pool whose processes are `FatefulProcess`."""
    monkeypatch.setattr("gateway.prompts.pool.Process", FatefulProcess)
    monkeypatch.setattr("gateway.prompts.pool._RESTART_S", 0.005)
    monkeypatch.setattr(FatefulProcess, "fate", Fate(seed), raising=False)
    return PromptPool(processes, most)


async def test_requests_that_were_refused_take_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no process starts, those that wait are answered 503; each that comes after them may wait again,
    as none of them does any more."""
    files, setup = setup_for(tmp_path)
    most = 16
    pool = fateful_pool(monkeypatch, 0, 1, most)
    monkeypatch.setattr("gateway.prompts.pool._PATIENCE_S", 0.0)
    await pool.spawn(files)
    await pool.start(setup)
    pool._running.clear()  # killed, as by the kernel for memory
    FatefulProcess.fate.starts_fail = True
    try:
        for _ in range(3):
            waiting = (pool.prepare("tokenize", [b"one"]) for _ in range(most))
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(answer) for answer in answers] == [ApiError] * most
            assert {answer.status for answer in answers if isinstance(answer, ApiError)} == {503}
            pool.check_integrity()
            assert pool.waiting == 0
    finally:
        await pool.close()


async def test_clients_that_went_away_take_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long no process can serve, only those who still wait are counted."""
    files, setup = setup_for(tmp_path)
    pool = fateful_pool(monkeypatch, 0, 1, 8)
    await pool.spawn(files)
    await pool.start(setup)
    for task in pool._tasks:  # all processes are busy, for ever
        task.cancel()
    try:
        for _ in range(5):
            gone = [asyncio.create_task(pool.prepare("tokenize", [b"x"])) for _ in range(8)]
            await asyncio.sleep(0)
            assert pool.waiting == 8
            for task in gone:  # type: ignore[assignment]
                task.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            pool.check_integrity()
            assert pool.waiting == 0
    finally:
        await pool.close()


@pytest.mark.parametrize("seed", range(20))
async def test_what_waits_is_what_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Each request is answered once whatever becomes of processes and clients; the count is of those that
    wait, and ends at none.
    """
    files, setup = setup_for(tmp_path)
    pool = fateful_pool(monkeypatch, seed, 2, 24)
    fate = FatefulProcess.fate
    await pool.spawn(files)
    await pool.start(setup)
    tasks: list[asyncio.Task[Any]] = []
    try:
        for _ in range(200):
            body = b"x" * fate.draws.choice([1, 1, SMALL_BYTES + 1])
            tasks.append(asyncio.create_task(pool.prepare("tokenize", [body])))
            if fate.dies(0.2):
                fate.draws.choice(tasks).cancel()
            fate.starts_fail = fate.dies(0.3)
            await asyncio.sleep(fate.draws.choice([0, 0, 0.001]))
            pool.check_integrity()
            assert pool.waiting <= sum(not task.done() for task in tasks)
        fate.starts_fail = False
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert pool.waiting == 0
        refused = [answer for answer in answers if isinstance(answer, ApiError)]
        assert {answer.status for answer in refused} <= {400, 429, 503}
        others = [answer for answer in answers if not isinstance(answer, ApiError)]
        assert all(isinstance(answer, bytes | asyncio.CancelledError) for answer in others)
    finally:
        await pool.close()


def test_a_process_starts_without_what_it_does_not_use() -> None:
    """Gateways start several of them: the web framework alone would be a quarter of each start."""
    program = (
        "import sys, gateway.prompts.worker\n"
        "print(sorted({'fastapi', 'uvicorn', 'torch', 'numpy', 'httpx'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[4]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
