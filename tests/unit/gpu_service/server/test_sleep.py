"""Guards when an engine sleeps, and that it does not where it could not wake."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpu_service.server.sleep import EngineSleep, make_sleep
from moebius.config.loader import load_config
from moebius.errors import UserError
from moebius.process.sleep_mark import ASLEEP, SleepMark
from protos import engine_pb2 as pb

INFO = pb.GetModelInfoResponse(served_model_name="m", vocab_size=7, eos_token_ids=[3])


class Aborted(Exception):
    """A call was refused."""


class Context:
    """A call that can only be refused."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call."""
        raise Aborted(code, details)


def asleep(tmp_path: Path, **settings: Any) -> EngineSleep:
    """Returns the sleep of an engine that finds its predecessor's mark."""
    mark = SleepMark(str(tmp_path / "asleep.json"))
    EngineSleep(mark).ask(INFO, force=False)
    found = EngineSleep(mark, **settings)
    assert found.resume()
    return found


async def test_a_successor_sleeps_on_with_what_was_known(tmp_path: Path) -> None:
    """The mark has the model's description; one that cannot be read is removed, and the engine loads."""
    assert asleep(tmp_path).info == INFO
    mark = tmp_path / "asleep.json"
    mark.write_text("{half")
    assert not EngineSleep(SleepMark(str(mark))).resume()
    assert not mark.exists()
    assert not EngineSleep().resume()


async def test_requests_wake_only_where_they_may(tmp_path: Path) -> None:
    """A request waits until the model is loaded; where it may not wake the engine, it is refused with the way
    out."""
    sleep: Any = asleep(tmp_path)
    waiting = asyncio.create_task(sleep.until_awake(Context()))
    await asyncio.wait_for(sleep.waking.wait(), 60)
    assert not waiting.done()
    sleep.loaded()
    await asyncio.wait_for(waiting, 60)
    refusing: Any = asleep(tmp_path, wakes_on_request=False)
    with pytest.raises(Aborted) as refusal:
        await refusing.until_awake(Context())
    assert refusal.value.args == (grpc.StatusCode.UNAVAILABLE, ASLEEP)
    assert not refusing.waking.is_set()


async def test_idleness_follows_the_latest_wish(tmp_path: Path) -> None:
    """A client's keep_alive counts where the operator lets the engine sleep, until the next one comes; busy
    engines do not sleep."""
    mark = SleepMark(str(tmp_path / "asleep.json"))
    never = EngineSleep(mark)
    never.used(keep_alive_s=0)
    sleep = EngineSleep(mark, after_s=100000)
    sleep.used(keep_alive_s=-1)
    busy = [True]
    watches = [asyncio.create_task(one.watch_idleness(INFO, lambda: busy[0])) for one in (never, sleep)]
    sleep.used(keep_alive_s=0)
    await asyncio.sleep(0.6)
    assert not sleep.wanted.is_set()
    busy[0] = False
    await asyncio.wait_for(sleep.wanted.wait(), 60)
    assert mark.exists
    assert not never.wanted.is_set()
    for watch in watches:
        watch.cancel()


@pytest.mark.parametrize(
    "settings",
    [
        "gpu: {sleep_after_s: 5}",
        "{gpu: {sleep_after_s: 5}, model: {sleep_file: /x}, parallel: {rank_hosts: 2}}",
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: str) -> None:
    """An engine that could not be seen to sleep is refused at its start."""
    file = tmp_path / "config.yaml"
    file.write_text(settings)
    with pytest.raises(
        UserError, match="sleep_after_s: 5 is not allowed: an engine sleeps with a sleep_file"
    ):
        make_sleep(load_config(file))
