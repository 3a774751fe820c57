"""The gateway's side of one prompt process: its start, its end, and the messages between the two.

Messages travel pickled over a socket pair.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gateway.apis.registry import Kind
from gateway.apis.stored_responses import ResponseStore
from gateway.generation.job import Prepared
from gateway.prompts.fork_server import Fork, ForkServer
from moebius.config import ImageConfig
from moebius.config.parser_names import AUTO
from moebius.errors import WrongIdentity
from moebius.models.identity import REMEDY, Parts

HEADER = struct.Struct("!Q")  # length of what follows, bytes
ANSWER_HEADER = struct.Struct("!QI")  # the same, and the number of buffers that follow, each with a HEADER
READY = b"ready"


@dataclass(frozen=True)
class ModelFiles:
    """The message to the server that processes are forked from, which then reads the files; known before the
    engine answers."""

    tokenizer_dir: str
    template_file: str
    # Digests of the files when the gateway read them; a process that finds others does not serve.
    parts: Parts = field(default_factory=dict)


@dataclass(frozen=True)
class OtherFiles:
    """A process's reply instead of `READY` when the files are not those that the gateway has read."""

    changes: str  # file names, for people


@dataclass(frozen=True)
class WorkerSetup:
    """The first message to a process; sent once the gateway knows the model."""

    model_info: bytes  # serialised engine.v1.GetModelInfoResponse
    files: ModelFiles  # which the process has read
    served_name: str
    images: ImageConfig
    max_body_bytes: int  # without images
    memory_bytes: int  # limit of a request, beyond the memory at the process's start
    cpu_s: float  # processor time of one request
    responses: ResponseStore | None = None
    aliases: tuple[str, ...] = ()  # patterns of further names of the model
    parsers: tuple[str, str] = (AUTO, AUTO)  # the settings `tool_call_parser` and `reasoning_parser`
    strict_parameters: bool = False  # unknown fields are refused


@dataclass(frozen=True)
class Refused:
    """The refusal of a request; it has the fields of an `ApiError`."""

    status: int
    message: str
    param: str | None
    code: str | None


def too_expensive(took: str, setting: str) -> Refused:
    """Returns the refusal of a request that exceeded the limit of a setting."""
    return Refused(
        400, f"reading the request took more than {took} ({setting})", None, "request_too_expensive"
    )


def too_much_memory(setup: WorkerSetup) -> Refused:
    """Returns the refusal of a request that exceeded the memory limit."""
    return too_expensive(f"{setup.memory_bytes / 2**30:g} GiB", "prompt_memory_gib")


@dataclass(frozen=True)
class Broken:
    """An internal error met this request; filled with the exception's type and its traceback."""

    kind: str
    details: str


@dataclass(frozen=True)
class Postponed:
    """A grammar of this request takes long to compile: it has to be sent again as `patient`."""


# bytes: the JSON of an answer that needs no engine.
Answer = Prepared | Refused | Broken | Postponed | bytes


def packed(value: Any) -> bytes:
    """Returns one message with its header."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


def packed_answer(value: Any) -> list[bytes | memoryview]:
    """Returns a process's message in pieces: files are separate, so that its reader can take them in turn."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
    pieces: list[bytes | memoryview] = [ANSWER_HEADER.pack(len(data), len(buffers)) + data]
    for buffer in buffers:
        raw = buffer.raw()
        pieces += [HEADER.pack(len(raw)), raw]
    return pieces


SMALL_BYTES = 2**16  # bodies up to this size have a process of their own
_PIECE = 2**18  # bytes written at once, so that the event loop runs in between
_START_S = 120.0  # a large vocabulary on a busy machine takes many seconds


@dataclass(eq=False)
class Job:
    """A request that waits for a process or is in one; made by `PromptPool.prepare`, compared by identity."""

    kind: Kind
    body: Sequence[bytes]
    size: int
    client: str  # the sender
    owner: str  # whose stored responses it may continue
    answer: asyncio.Future[Answer] = field(default_factory=asyncio.Future)
    deaths: int = 0  # processes that ended while they had it, alone
    alone: bool = False  # a process ended with a group it was in: the culprit is unknown
    patient: bool = False  # its grammar takes long: compiled where small requests do not wait
    since: float = field(default_factory=time.monotonic)  # time of arrival

    def end(self, answer: Answer) -> None:
        """Answers it, unless its client has disconnected."""
        if not self.answer.done():
            self.answer.set_result(answer)


def _message_of(jobs: Sequence[Job]) -> list[bytes]:
    """Returns some requests as a process's message; small ones as one piece, which takes one system call."""
    pieces = [packed([(job.kind, job.size, job.patient, job.owner) for job in jobs])]
    for job in jobs:
        pieces += job.body
    return [b"".join(pieces)] if sum(job.size for job in jobs) <= SMALL_BYTES else pieces


class Died(Exception):
    """A process ended while it worked; `status` as `Popen.returncode`, None: it was too slow."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


class Process:
    """One running process; made by `spawn`."""

    def __init__(self, process: Fork, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.leaving = False  # its memory has grown: it ends after its last answer

    @classmethod
    async def spawn(cls, server: ForkServer) -> Process:
        """Starts a process that checks the model's files. Raises OSError if that fails."""
        channel, fork = server.fork()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=channel)
        except BaseException:
            channel.close()
            raise
        return cls(fork, reader, writer)

    async def begin(self, setup: WorkerSetup) -> None:
        """Waits until it can serve. Raises Died or TimeoutError if it cannot; it is then stopped.

        Raises WrongIdentity when its files of the model differ from the gateway's.
        """
        try:
            async with asyncio.timeout(_START_S):
                await self._send([packed(setup)])
                ready = await self._receive()
            if isinstance(ready, OtherFiles):
                raise WrongIdentity(f"{ready.changes} since the gateway has read it: {REMEDY}")
        except BaseException:
            await self.stop()
            raise
        assert ready == READY, ready

    @property
    def ended(self) -> bool:
        """Returns whether the process has ended, by itself or by a signal."""
        return self._process.poll() is not None

    async def run(self, jobs: Sequence[Job], limit_s: float) -> list[Answer]:
        """Returns the answers. Raises Died if the process ended or took `limit_s` of real time for each."""
        try:
            async with asyncio.timeout(limit_s * len(jobs)):
                await self._send(_message_of(jobs))
                answers, self.leaving = await self._receive()
        except TimeoutError:
            await self.stop()
            raise Died(None) from None
        return cast(list[Answer], answers)

    async def _send(self, pieces: Sequence[bytes]) -> None:
        try:
            for piece in pieces:
                for start in range(0, len(piece), _PIECE):
                    self._writer.write(piece[start : start + _PIECE])
                    await self._writer.drain()
        except ConnectionError:
            raise Died(await self.stop()) from None

    async def _receive(self) -> Any:
        try:
            header = await self._reader.readexactly(ANSWER_HEADER.size)
            length, count = ANSWER_HEADER.unpack(header)
            data = await self._reader.readexactly(length)
            buffers = [await self._read_buffer() for _ in range(count)]
        except (asyncio.IncompleteReadError, ConnectionError):
            raise Died(await self.stop(kill=False)) from None
        return pickle.loads(data, buffers=buffers)

    async def _read_buffer(self) -> bytes:
        (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return await self._reader.readexactly(length)

    async def stop(self, kill: bool = True) -> int:
        """Closes the connection and waits for the end; returns the exit status."""
        self._writer.close()
        if kill:
            self._process.kill()
        return await asyncio.to_thread(self._process.wait)
