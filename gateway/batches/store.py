"""All batches of a directory: made and asked for by any process, run by one at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from gateway.batches.batch import PREFIXES, UNFINISHED, Api, Batch
from gateway.batches.files import FileStore
from gateway.batches.records import Records, make_private, new_id, write_facts
from moebius.config import GatewayConfig

INPUT, OUTPUT, ERRORS = "input.jsonl", "output.jsonl", "errors.jsonl"
_CANCEL = "cancel"
_LONGEST_S = 90 * 86_400  # finished batches are kept for
_ABANDONED_S = 60.0


class RunningLock:
    """The right to run one batch, held by one process; the kernel releases it when the process ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Lets another process run it."""
        os.close(self._descriptor)


class BatchStore:
    """Methods block on the disk: the event loop calls them in threads. All may raise OSError."""

    def __init__(self, root: Path, most_bytes: int, most_file_bytes: int) -> None:
        """Takes the arguments of `FileStore`."""
        self._records = Records(root, "batches")
        self._open = root / "unfinished"
        self.files = FileStore(root, most_bytes, most_file_bytes)

    @classmethod
    def of(cls, settings: GatewayConfig) -> BatchStore | None:
        """Returns the store in the configured directory, or None where there is none."""
        directory = settings.batch_directory
        if directory is None:
            return None
        most = int(settings.batch_dir_gib * 2**30)
        return cls(directory, most, int(settings.batch_file_mib * 2**20))

    def path(self, batch: Batch) -> Path:
        """Returns the directory of a batch's data."""
        return self._records.path(batch.owner, batch.id)

    def make(self, batch: Batch, fill: Callable[[Path], None]) -> None:
        """Stores a new batch, whose input `fill` writes or links at the path that it gets."""
        make_private(self._open)
        mark = self._mark(batch.owner, batch.id)
        mark.touch(mode=0o600)  # before the batch, which would else never be run after a kill in between
        try:
            with self._records.new(batch.owner, batch.id) as directory:
                fill(directory / INPUT)
                write_facts(directory, batch.facts())
        except BaseException:
            mark.unlink(missing_ok=True)
            raise

    def _mark(self, owner: str, batch_id: str) -> Path:
        return self._open / f"{owner}.{batch_id}"

    def find(self, owner: str, batch_id: str, api: Api) -> Batch | None:
        """Returns an owner's batch of an API, or None."""
        if not batch_id.startswith(PREFIXES[api]):
            return None
        facts = self._records.facts(owner, batch_id)
        return None if facts is None else Batch.of(facts)

    def ids(self, owner: str, api: Api) -> list[str]:
        """Returns the ids of an owner's batches of an API, newest first."""
        return [name for name in reversed(self._records.ids(owner)) if name.startswith(PREFIXES[api])]

    def save(self, batch: Batch) -> None:
        """Replaces a batch's facts; only for the process that runs it."""
        write_facts(self.path(batch), batch.facts())

    def delete(self, batch: Batch) -> None:
        """Deletes a batch that is finished."""
        self._records.delete(batch.owner, batch.id)

    def cancel(self, batch: Batch) -> None:
        """Notes that a batch is to be cancelled, for whichever process runs it."""
        with contextlib.suppress(FileExistsError):
            (self.path(batch) / _CANCEL).touch(exist_ok=False)

    def cancelling_at(self, batch: Batch) -> int | None:
        """Returns the Unix time at which a batch was first to be cancelled, or None."""
        try:
            return int((self.path(batch) / _CANCEL).stat().st_mtime)
        except FileNotFoundError:
            return None

    def unfinished(self) -> list[tuple[str, str]]:
        """Returns owner and id of each batch that is not finished, oldest first."""
        try:
            names = os.listdir(self._open)
        except FileNotFoundError:
            return []
        found = [(owner, batch_id) for owner, _, batch_id in (name.partition(".") for name in names)]
        return sorted(found, key=lambda one: one[1].partition("_")[2])

    def lock(self, owner: str, batch_id: str) -> tuple[Batch, RunningLock] | None:
        """Returns a batch and the right to run it, or None if another process has it or it is finished."""
        mark = self._mark(owner, batch_id)
        try:
            descriptor = os.open(mark, os.O_RDWR)
        except FileNotFoundError:
            return None
        held = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            facts = self._records.facts(owner, batch_id)
            if facts is None:  # it is being made, or was deleted
                if time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_S:
                    mark.unlink(missing_ok=True)
                return None
            if facts["status"] not in UNFINISHED:  # the process was killed just before `close`
                self.close(Batch.of(facts))
                return None
            held = True
            return Batch.of(facts), RunningLock(descriptor)
        except BlockingIOError:
            return None
        finally:
            if not held:
                os.close(descriptor)

    def close(self, batch: Batch) -> None:
        """Frees what a finished batch does not need any more, after its facts say that it is finished.

        Results of OpenAI's batches are files of their own by then.
        """
        for name in (INPUT, OUTPUT, ERRORS) if batch.api == "openai" else (INPUT,):
            (self.path(batch) / name).unlink(missing_ok=True)
        self._mark(batch.owner, batch.id).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Deletes expired files, batches that ended long ago, and what killed processes have left."""
        self.files.sweep()
        self._records.sweep()
        for owner in self._records.owners():
            for batch_id in self._records.ids(owner):
                facts = self._records.facts(owner, batch_id)
                is_old = facts is not None and facts["expires_at"] + _LONGEST_S < time.time()
                if facts is not None and is_old and facts["status"] not in UNFINISHED:
                    self._records.delete(owner, batch_id)


def new_batch_id(api: Api) -> str:
    """Returns an id for a new batch."""
    return new_id(PREFIXES[api])
