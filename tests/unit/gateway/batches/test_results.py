"""Guards results on disk: torn lines go, full disks lose nothing, and records appear as a whole."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.batch import Batch
from gateway.batches.files import FileFacts, FileStore, check_directory, storage_error, used_bytes
from gateway.batches.lines import chunks_of
from gateway.batches.outcomes import answered_line, counter_of, unanswered_line
from gateway.batches.records import Records, new_id, write_facts
from gateway.batches.results import ResultFile
from gateway.batches.slots import Slots
from gateway.batches.store import BatchStore, new_batch_id
from gateway.batches.writer import ResultWriter
from gateway.schemas.errors import ApiError
from gateway.transport.internal import InternalAnswer
from moebius.config import GatewayConfig
from moebius.errors import ConfigError
from tests.helpers.gateway_server import gateway_config


@pytest.mark.parametrize("torn", [b"", b'{"custom_id":"c', b"x" * 200_000], ids=["whole", "torn", "long"])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    """After a kill in the middle of a write, complete lines stay and further ones follow them."""
    path = tmp_path / "output.jsonl"
    file = ResultFile(path)
    file.append([b'{"custom_id":"a"}\n', b'{"custom_id":"b"}\n'])
    file.close()
    with path.open("ab") as raw:
        raw.write(torn)
    again = ResultFile(path)
    assert [value["custom_id"] for value in again.values()] == ["a", "b"]
    again.append([b'{"custom_id":"c"}\n'])
    again.close()
    assert path.read_bytes().count(b"\n") == 3
    assert path.read_bytes().endswith(b'"b"}\n{"custom_id":"c"}\n')


class FullDisk:
    """A disk on which half of a write fits, until `has_room`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_room = False
        self.tries = 0
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        """Writes as the system call does, or fails."""
        if self.has_room:
            return self._pwrite(descriptor, data, offset)
        self.tries += 1
        if self.tries % 2:
            return self._pwrite(descriptor, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_no_half_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not fit is not there at all; once there is room it is, whole."""
    disk = FullDisk(monkeypatch)
    file = ResultFile(tmp_path / "output.jsonl")
    with pytest.raises(OSError, match="space"):
        file.append([b'{"custom_id":"a"}\n'])
    assert file.path.read_bytes() == b""
    disk.has_room = True
    file.append([b'{"custom_id":"a"}\n'])
    assert file.path.read_bytes() == b'{"custom_id":"a"}\n'
    file.close()


def test_results_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk is full results wait, with one line in the log; afterwards all are there, once."""
    monkeypatch.setattr("gateway.batches.writer._FULL_S", 0.01)
    said: list[str] = []

    class Log:
        """Notes what is logged."""

        def error(self, event: str, **_: Any) -> None:
            """Notes the event, in place of the logger's."""
            said.append(event)

    async def run() -> None:
        disk = FullDisk(monkeypatch)
        file = ResultFile(tmp_path / "output.jsonl")
        writer = ResultWriter({"output.jsonl": file}, Log())
        lines = [b'{"custom_id":"%d"}\n' % number for number in range(20)]
        tasks = [asyncio.create_task(writer.write("output.jsonl", line)) for line in lines]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in tasks)
        disk.has_room = True
        await asyncio.gather(*tasks)
        await writer.close()
        assert sorted(file.path.read_bytes().splitlines(True)) == sorted(lines)
        file.close()

    asyncio.run(run())
    assert len(said) == 1


def test_lines_are_cut_into_chunks(tmp_path: Path) -> None:
    """Every line is in one chunk, under its number; one above the bound ends the reading."""
    path = tmp_path / "input"
    lines = [b"%d" % number for number in range(1000)]
    path.write_bytes(b"\r\n".join(lines))
    chunks = list(chunks_of(path, 100))
    assert [line for chunk in chunks for line in chunk.lines] == lines
    firsts = [chunk.first for chunk in chunks]
    assert firsts[0] == 1
    assert firsts[1] == 1 + len(chunks[0].lines)
    path.write_bytes(b"ok\n" + b"x" * 101 + b"\nok\n")
    assert [(chunk.first, chunk.is_too_long) for chunk in chunks_of(path, 100)] == [(1, False), (2, True)]


def test_result_lines_say_how_they_count() -> None:
    """The counts of a batch can be found again in its files, for both APIs."""
    answers = [InternalAnswer(status, {"x-request-id": "r"}, b'{"a":1}') for status in (200, 400)]
    for api in ("openai", "anthropic"):
        for answer, counter in zip(answers, ("succeeded", "errored"), strict=True):
            said, line = answered_line(api, 'a"b', answer)  # type: ignore[arg-type]
            assert (said, line.count(b"\n")) == (counter, 1)
            if counter == "errored":
                assert counter_of(json.loads(line)) == counter
        for reason in ("canceled", "expired"):
            said, line = unanswered_line(api, "x", reason)  # type: ignore[arg-type]
            assert said == reason == counter_of(json.loads(line))


def test_requests_of_batches_yield() -> None:
    """The rule: at most `max(1, (most - live) / processes)` run; one that ends lets the next one in."""
    live = 0

    async def run() -> None:
        nonlocal live
        slots = Slots(8, 2, lambda: live)
        assert [(live := value, slots.room)[1] for value in (0, 1, 4, 7, 100)] == [4, 3, 2, 1, 1]
        live = 4
        await slots.take()
        await slots.take()
        third = asyncio.create_task(slots.take())
        await asyncio.sleep(0.15)
        assert not third.done()
        live = 2
        await asyncio.wait_for(third, 60)
        fourth = asyncio.create_task(slots.take())
        await asyncio.sleep(0.15)
        assert not fourth.done()
        slots.give()
        await asyncio.wait_for(fourth, 60)

    asyncio.run(run())


def test_a_record_appears_as_a_whole(tmp_path: Path) -> None:
    """What fails half made is not there; what a kill left is removed later, unless it is being made."""
    records = Records(tmp_path, "files")
    with pytest.raises(OSError, match="full"), records.new("a", new_id("file-")):
        raise OSError("full")
    assert used_bytes(tmp_path) == 0
    kept = new_id("file-")
    with records.new("a", kept) as directory:
        write_facts(directory, {"x": 1})
        assert records.ids("a") == []
        os.utime(directory, (0, 0))
        records.sweep()
        assert directory.exists()
    left = tmp_path / "owners" / "a" / "files" / ".new-file-x"
    left.mkdir()
    records.sweep()
    assert left.exists()
    os.utime(left, (0, 0))
    records.sweep()
    assert not left.exists()
    assert records.facts("a", kept) == {"x": 1}
    assert records.facts("b", kept) is None
    assert records.facts("a", f"../files/{kept}") is None


def test_expired_files_are_gone(tmp_path: Path) -> None:
    """A file is not found after its time, and its bytes are freed by the next sweep."""
    files = FileStore(tmp_path, 2**20, 2**20)
    with files.upload("a") as upload:
        upload.write(b"x" * 1000)
        file_id = upload.finish(FileFacts("f", "batch", 3600))["id"]
    assert files.find("a", file_id) is not None
    facts = files.records.facts("a", file_id)
    assert facts is not None
    write_facts(files.records.path("a", file_id), {**facts, "expires_at": time.time() - 1})
    assert files.find("a", file_id) is None
    files.sweep()
    assert used_bytes(tmp_path) == 0


def batch_of(owner: str = "a") -> Batch:
    """A new batch."""
    return Batch(new_batch_id("openai"), "openai", "/v1/completions", owner, "", 0, 2**40)


def test_one_process_runs_a_batch(tmp_path: Path) -> None:
    """The lock of a batch is one process's, until it releases it or ends; finished batches have none."""
    stores = [BatchStore(tmp_path, 2**20, 2**20) for _ in range(2)]
    batch = batch_of()
    stores[0].make(batch, lambda path: path.touch() or None)
    (found,) = stores[1].unfinished()
    first = stores[0].lock(*found)
    assert first is not None
    assert stores[1].lock(*found) is None
    first[1].release()
    second = stores[1].lock(*found)
    assert second is not None
    batch.reach("completed")
    stores[1].save(batch)
    second[1].release()
    assert stores[0].lock(*found) is None
    assert stores[0].unfinished() == []


def test_disk_errors_are_one_clear_line() -> None:
    """A full disk is 507 and says so; other failures may pass."""
    assert storage_error(OSError(errno.ENOSPC, "No space left on device")).status == 507
    passing = storage_error(OSError(errno.EACCES, "Permission denied"))
    assert (passing.status, passing.retry_after_s) == (503, 5)


def test_an_upload_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """What was written of it is removed, and the bound counts each byte once, also of links."""
    files = FileStore(tmp_path, 2**20, 2**20)

    def upload_too_much() -> None:
        with files.upload("a") as half:
            half.write(b"x" * 1000)
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        upload_too_much()
    assert used_bytes(tmp_path) == 0
    with files.upload("a") as upload:
        upload.write(b"x" * 1000)
        file_id = upload.finish(FileFacts("f", "batch"))["id"]
    before = used_bytes(tmp_path)
    os.link(files.data("a", file_id), tmp_path / "link")
    assert used_bytes(tmp_path) == before
    with pytest.raises(ApiError, match="batch_dir_gib"):
        files.check_room(2**20)


@pytest.fixture
def unusable(tmp_path: Path) -> str:
    """A path at which no directory can be."""
    (tmp_path / "file").touch()
    return str(tmp_path / "file" / "batches")


def test_an_unusable_directory_is_refused_at_the_start(unusable: str) -> None:
    """The one line names the setting and what is allowed."""
    from gateway.app.application import create_app

    with pytest.raises(ConfigError, match=r"batch_dir: .* cannot be used: .*; allowed: a directory that"):
        create_app(gateway_config("unix:x", batch_dir=unusable))


def test_the_first_file_makes_the_directory(tmp_path: Path) -> None:
    """Nothing is on the disk before it, and what it makes is for this user alone; `off` is no directory."""
    settings = GatewayConfig(batch_dir=str(tmp_path / "state" / "batches"))
    check_directory(settings)
    store = BatchStore.of(settings)
    assert store is not None
    store.sweep()
    assert (store.unfinished(), list(tmp_path.iterdir())) == ([], [])
    with store.files.upload("a") as upload:
        upload.finish(FileFacts("f", "batch"))
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}
    assert BatchStore.of(GatewayConfig(batch_dir="off")) is None
