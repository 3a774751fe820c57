"""The messages between the gateway and its prompt processes, pickled, over a socket pair."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass, field
from typing import Any

from gateway.apis.stored_responses import ResponseStore
from gateway.generation.job import Prepared
from moebius.config import ImageConfig
from moebius.model_identity import Parts
from moebius.parser_names import AUTO

HEADER = struct.Struct("!Q")  # length of what follows, bytes
ANSWER_HEADER = struct.Struct("!QI")  # the same, and the number of buffers that follow, each with a HEADER
READY = b"ready"


@dataclass(frozen=True)
class ModelFiles:
    """The first message to a process, which then reads the files; known before the engine answers."""

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
    """The second message to a process; sent once the gateway knows the model."""

    model_info: bytes  # serialised engine.v1.GetModelInfoResponse
    files: ModelFiles  # as in the first message
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
