"""Guards which calls are repeated for an engine that sleeps, and which are not."""

from __future__ import annotations

from pathlib import Path

import grpc

from gateway.replicas.engine_client import call_error
from gateway.replicas.replica_set import Patience, SleepRules
from moebius.process.sleep_mark import FORCED, SleepMark

GONE = call_error(grpc.StatusCode.UNAVAILABLE, "the engine is falling asleep")


async def test_calls_are_repeated_from_sleep_to_waking(tmp_path: Path) -> None:
    """From the moment that the mark was seen, also when it has gone since: the engine may be killed as it
    wakes. Without it a lost engine is an error at once."""
    mark = SleepMark(str(tmp_path / "asleep"))
    awake, rules = Patience(SleepRules(mark)), SleepRules(mark)
    assert not await awake.lasts(GONE)
    mark.write("")
    seen = Patience(rules)
    assert await awake.lasts(GONE)
    mark.clear()
    assert await seen.lasts(GONE)
    assert await awake.lasts(GONE)
    assert not await Patience(rules).lasts(GONE)
    assert not await Patience(SleepRules(SleepMark(""))).lasts(GONE)


async def test_some_calls_are_not_repeated(tmp_path: Path) -> None:
    """Those that force has ended, those that are wrong, those that waited too long, and all where requests
    may not wake the engine."""
    mark = SleepMark(str(tmp_path / "asleep"))
    mark.write("")
    assert not await Patience(SleepRules(mark)).lasts(call_error(grpc.StatusCode.UNAVAILABLE, FORCED))
    assert not await Patience(SleepRules(mark)).lasts(call_error(grpc.StatusCode.INVALID_ARGUMENT, "n"))
    assert not await Patience(SleepRules(mark, longest_wait_s=-1)).lasts(GONE)
    assert not await Patience(SleepRules(mark, wakes_on_request=False)).lasts(GONE)
