"""Malformed headers of safetensors and GGUF files, given to what `moebius plan` proves before it plans."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from moebius.models.checkpoint import open_index
from tests.drills import mutations
from tests.drills.load import Fate, Outcome

CASE_S = 20
# Above what a process with torch and the checkpoint takes: what one header may make it allocate.
CASE_MEMORY_BYTES = 2**31
# Cases that one process reads, so that one that grows shows as a figure and not as an error.
_CHUNK = 250
# Characters of a refusal: names and shapes, not whole headers.
_LONGEST_SENTENCE = 4000
# What is planned for, so that this machine is not looked at.
_MACHINE = [
    "--gpus=none",
    "--ram=64",
    "--sockets=1",
    "--cores=8",
    "--bandwidth=50",
    "--cpu-tflops=1",
    "--isa=avx2",
    "--streams=1",
]
SAFETENSORS, GGUF = "model.safetensors", "model.gguf"


class _TooSlow(BaseException):
    """Raised in the middle of a case; no Exception, so that nothing in between handles it."""


def write_gguf_checkpoint(directory: Path) -> Path:
    """A tiny GGUF model with its tokenizer; returns the file."""
    from tests.helpers.gguf_files import GgufTypes, write_gguf
    from tests.helpers.gguf_models import CASES
    from tests.helpers.gguf_tokenizers import add_byte_level
    from tests.helpers.tiny_models import TinyModel, write_tiny_model
    from tests.helpers.tiny_tokenizer import byte_level_tokenizer

    tokenizer = byte_level_tokenizer()
    vocabulary = tokenizer.get_vocab_size()
    changes = CASES["qwen3_moe_tied"].changes | {"vocab_size": vocabulary, "eos_token_id": 2}
    directory.mkdir(parents=True)
    model = write_tiny_model(TinyModel("qwen3_moe", changes), directory / "published", seed=15)
    describe = partial(add_byte_level, tokenizer=tokenizer, pre="gpt-2", vocab_size=vocabulary)
    write_gguf(model, directory / GGUF, GgufTypes("Q4_0", "Q4_0", "F32"), describe=describe)
    return directory / GGUF


def _safetensors_case(rng: random.Random, whole: bytes) -> bytes:
    """Returns the file with another header, whose length mostly agrees."""
    length = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + length], whole[8 + length :]
    kind = rng.randrange(10)
    if kind < 2:
        return mutations.changed_bytes(rng, whole[: 8 + length]) + data
    if kind == 2:
        return whole[: rng.randrange(len(whole))]
    if kind < 6:
        document = json.loads(header)
        name = rng.choice(list(document))
        document[name] = mutations.document(rng, document[name])
        changed = json.dumps(document).encode()
    else:
        changed = mutations.json_bytes(rng, json.loads(header))
    return len(changed).to_bytes(8, "little") + changed + data


def _gguf_case(rng: random.Random, whole: bytes, header_bytes: int) -> bytes:
    """Returns the file with changed bytes in its header, most of them where numbers and lengths stand."""
    header, data = bytearray(whole[:header_bytes]), whole[header_bytes:]
    kind = rng.randrange(6)
    if kind == 0:
        return whole[: rng.randrange(len(whole))]
    if kind == 1:  # arrays within arrays
        depth = rng.choice([10, 2000, 100_000])
        nest = (
            b"\x01\x00\x00\x00\x00\x00\x00\x00a\x09\x00\x00\x00"
            + (b"\x09\x00\x00\x00" + (1).to_bytes(8, "little")) * depth
        )
        return bytes(header[:24]) + nest + data
    if kind == 2:  # another type or value after a key
        key = rng.choice([b"split.no", b"split.count", b"general.alignment", b"general.architecture"])
        number = rng.choice([0, 1, 7, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
        kinds = rng.choice([4, 5, 6, 7, 8, 9, 10, 12, 77]).to_bytes(4, "little")
        entry = len(key).to_bytes(8, "little") + key + kinds + number
        count = int.from_bytes(header[16:24], "little") + 1
        return bytes(header[:16]) + count.to_bytes(8, "little") + entry + bytes(header[24:]) + data
    if kind == 3:
        header[4:24] = mutations.changed_bytes(rng, bytes(header[4:24]))
    else:
        # The vocabulary takes most of the header: half of the changes go to its ends.
        ends = [(0, 2000), (max(0, header_bytes - 4000), header_bytes), (0, header_bytes)]
        begin, end = rng.choice(ends)
        header[begin:end] = mutations.changed_bytes(rng, bytes(header[begin:end]))
    return bytes(header) + data


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Memory and time of one case."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(CASE_S)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + CASE_MEMORY_BYTES, hard))
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _judge(model: Path) -> tuple[Fate, str]:
    """Right: a plan, or one sentence about what is wrong with the file."""
    from app.cli import main

    said = io.StringIO()
    try:
        with _limits(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            main(["plan", str(model), *_MACHINE])
    except SystemExit as end:
        lines = said.getvalue().strip().splitlines()
        if end.code in (0, None) or (len(lines) == 1 and len(lines[0]) < _LONGEST_SENTENCE):
            return "right", ""
        return "broken", f"status {end.code}, {len(lines)} lines: {said.getvalue()[:300]!r}"
    except _TooSlow:
        return "late", f"longer than {CASE_S} s"
    except Exception as error:
        return "broken", f"{type(error).__name__}: {str(error)[:300]} {_where(error)}"
    return "broken", "no exit status"


def _where(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""


def _chunk(directory: Path, model: Path, numbers: range, seed: int) -> tuple[list[Outcome], float]:
    """Runs in a process of its own; also returns its memory's growth, MiB."""
    import psutil

    work = directory / f"work-{numbers.start}"
    is_gguf = model.suffix == ".gguf"
    whole = (model if is_gguf else model / SAFETENSORS).read_bytes()
    if is_gguf:
        work.mkdir()
        begin = min(info.offset for info in _index(model).tensors.values())
        build: Callable[[random.Random], bytes] = lambda rng: _gguf_case(rng, whole, begin)  # noqa: E731
        target = tested = work / GGUF
    else:
        shutil.copytree(model, work)
        build = lambda rng: _safetensors_case(rng, whole)  # noqa: E731
        target, tested = work / SAFETENSORS, work
    outcomes, before = [], 0.0
    for place, number in enumerate(numbers):
        rng = random.Random(f"{seed}/{model.name}/{number}")
        # A fresh file each time: readers may remember one by its inode and time.
        target.unlink(missing_ok=True)
        target.write_bytes(build(rng))
        started = time.monotonic()
        fate, detail = _judge(tested)
        seen = "" if fate == "right" else f"{detail} [seed {seed}/{model.name}/{number}]"
        outcomes.append(Outcome(fate, started, time.monotonic() - started, seen))
        if place == len(numbers) // 5:
            before = psutil.Process().memory_info().rss / 2**20
    grown = psutil.Process().memory_info().rss / 2**20 - before
    shutil.rmtree(work)
    return outcomes, grown


def _index(model: Path) -> Any:

    return open_index(model)


def _entry(directory: Path, model: Path, numbers: range, seed: int, results: Any) -> None:
    sys.setrecursionlimit(1000)
    results.send(_chunk(directory, model, numbers, seed))


def read_all(directory: Path, model: Path, count: int, seed: int) -> tuple[list[Outcome], list[float]]:
    """Returns the outcomes of `count` malformed files, and the growth of each process that read a chunk of
    them, MiB.
    """
    context = multiprocessing.get_context("spawn")
    outcomes: list[Outcome] = []
    growth: list[float] = []
    for begin in range(0, count, _CHUNK):
        numbers = range(begin, min(begin + _CHUNK, count))
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_entry, args=(directory, model, numbers, seed, sender))
        process.start()
        sender.close()
        try:
            found, grown = receiver.recv()
            outcomes += found
            growth.append(grown)
        except EOFError:
            process.join()
            started = time.monotonic()
            text = f"the process died ({process.exitcode}) in cases {numbers.start}..{numbers.stop}"
            outcomes.append(Outcome("broken", started, 0.0, text))
        process.join()
    return outcomes, growth
