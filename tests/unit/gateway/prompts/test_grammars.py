"""Guards that grammars that take long to compile are paid for by those who send them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.prompts.pool import PromptPool
from gateway.prompts.process import SMALL_BYTES, Postponed
from gateway.schemas.errors import ApiError
from tests.helpers.heavy_grammars import heavy_requests
from tests.helpers.waiting import until
from tests.unit.gateway.prompts.test_processes import FakeProcess, children, setup_for, token_count


@pytest.mark.parametrize("fields", heavy_requests()[:4], ids=["ebnf", "grammar", "regex", "schema"])
async def test_small_requests_do_not_wait_for_heavy_grammars(tmp_path: Path, fields: dict[str, Any]) -> None:
    """However many grammars of seconds there are, requests behind them are read while those are compiled, and
    no process ends of it."""
    files, setup = setup_for(tmp_path)
    pool = PromptPool(2, 64)
    try:
        await pool.spawn(files)
        await pool.start(setup)
        before = children()
        bodies = [json.dumps({"prompt": "hello", **fields, "seed": seed}).encode() for seed in range(3)]
        heavy = [asyncio.create_task(pool.prepare("completions", [body])) for body in bodies]
        for _ in range(20):
            assert await token_count(pool) == 3
            light = json.dumps({"prompt": "hello", "response_format": {"type": "json_object"}}).encode()
            assert not isinstance(await pool.prepare("completions", [light]), bytes)
        answers = await asyncio.gather(*heavy, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, ApiError)]
        assert {answer.status for answer in refused} <= {400}
        pool.check_integrity()
        assert children() == before
    finally:
        await pool.close()


class PatientProcess(FakeProcess):
    """Postpones a request with `heavy` until it is sent as `patient`, and then takes its time."""

    async def run(self, jobs: Sequence[Any], _limit_s: float) -> list[Any]:
        """Echoes the bodies, or postpones."""
        answers: list[Any] = []
        for job in jobs:
            body = b"".join(job.body)
            if b"heavy" in body and not job.patient:
                answers.append(Postponed())
            else:
                await asyncio.sleep(0.05 if b"heavy" in body else 0)
                answers.append(body)
        return answers


async def test_grammars_that_take_long_have_a_bounded_number_of_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of those that may wait: others are refused at once, and small requests still have theirs."""
    monkeypatch.setattr("gateway.prompts.pool.Process", PatientProcess)
    files, setup = setup_for(tmp_path)
    pool = PromptPool(2, 16)
    await pool.spawn(files)
    await pool.start(setup)
    try:
        heavy = [asyncio.create_task(pool.prepare("tokenize", [b"heavy"])) for _ in range(14)]
        await asyncio.sleep(0.01)
        pool.check_integrity()
        assert await pool.prepare("tokenize", [b"light"]) == b"light"
        answers = await asyncio.gather(*heavy, return_exceptions=True)
        done = [answer for answer in answers if answer == b"heavy"]
        refused = [answer for answer in answers if isinstance(answer, ApiError)]
        assert len(done) + len(refused) == 14
        assert len(done) >= 16 // 4
        assert {(answer.status, answer.code) for answer in refused} == {(429, "queue_full")}
        assert pool.waiting == 0
    finally:
        await pool.close()


class HangingProcess(FakeProcess):
    """Never answers until it is let go."""

    let_go: asyncio.Event

    async def run(self, jobs: Sequence[Any], _limit_s: float) -> list[bytes]:
        """Echoes the bodies, in the end."""
        await self.let_go.wait()
        return [b"".join(job.body) for job in jobs]


async def test_a_pool_that_cannot_answer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all processes are at work for long, or are gone; and no more once one of them answers."""
    monkeypatch.setattr("gateway.prompts.pool.Process", HangingProcess)
    monkeypatch.setattr("gateway.prompts.pool._STUCK_S", 0.05)
    monkeypatch.setattr(HangingProcess, "let_go", asyncio.Event(), raising=False)
    files, setup = setup_for(tmp_path)
    pool = PromptPool(2, 16)
    await pool.spawn(files)
    await pool.start(setup)
    try:
        assert pool.problem() == ""
        bodies = [b"small", b"x" * (SMALL_BYTES + 1)]
        waiting = [asyncio.create_task(pool.prepare("tokenize", [body])) for body in bodies]
        await until(lambda: "no process" in pool.problem())
        waiting.append(asyncio.create_task(pool.prepare("tokenize", [b"behind"])))
        await until(lambda: "wait to be read" in pool.problem())
        HangingProcess.let_go.set()
        await asyncio.gather(*waiting)
        assert pool.problem() == ""
        pool._running.clear()
        assert "no process" in pool.problem()
    finally:
        await pool.close()
