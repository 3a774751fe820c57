"""`moebius models random`: from options to a checkpoint directory."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from moebius.app.random_model.formats import expert_format
from moebius.app.random_model.router import parse_skew
from moebius.app.random_model.shapes import parse_shape
from moebius.app.random_model.tensors import ModelDraw, shards
from moebius.app.random_model.tokenizer import write_tokenizer
from moebius.app.random_model.writer import TensorGroup, write_shards
from moebius.errors import UserError

# Written first: says what the directory is, and that it may be overwritten.
MARKER = "random_model.json"


@dataclass(frozen=True)
class RandomModelOptions:
    """Filled by the command line; names as in `SHAPES` and `FORMATS`."""

    shape: str = "qwen3-30b-a3b"
    # Of routed experts; all other weights are bfloat16.
    weight_format: str = "bfloat16"
    # 0: the model's own number.
    layers: int = 0
    # "none", or "zipf:S".
    skew: str = "none"
    seed: int = 0
    # 0: one per allowed CPU.
    threads: int = 0


@dataclass(frozen=True)
class Written:
    """What was written; filled by `write_random_model`."""

    directory: Path
    nbytes: int
    seconds: float


def write_random_model(
    directory: Path,
    options: RandomModelOptions,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Writes the checkpoint; `on_progress` is told bytes done and in total.

    The same options give the same bytes, however many threads write. Raises UserError: an option is not
    allowed, the directory holds something else, or there is no room.
    """
    begin = time.perf_counter()
    shape = parse_shape(options.shape, options.layers)
    experts = expert_format(options.weight_format)
    draw = ModelDraw(shape, experts, parse_skew(options.skew), options.seed)
    groups = shards(draw)
    total = sum(spec.nbytes for shard in groups for group in shard for spec in group.tensors)
    _prepare(directory, total, json.dumps(asdict(options)))
    write_tokenizer(directory, shape.vocab_size)
    written = _write(directory, groups, options.threads, total, on_progress)
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "temperature": 1.0}
    (directory / "generation_config.json").write_text(json.dumps(generation) + "\n")
    # Last: a directory without it is no checkpoint, so an interrupted one is never taken for one.
    config = shape.hf_config(experts.config)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return Written(directory, written, time.perf_counter() - begin)


def _write(
    directory: Path,
    groups: list[list[TensorGroup]],
    threads: int,
    total: int,
    on_progress: Callable[[int, int], None],
) -> int:
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    return write_shards(directory, groups, threads or len(os.sched_getaffinity(0)), on_bytes)


def _prepare(directory: Path, total: int, marker: str) -> None:
    """An empty directory, or one that an earlier call wrote, with room for `total` bytes."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        present = list(directory.iterdir())
        if present and not (directory / MARKER).exists():
            raise UserError(
                f"DIR {directory}: is not empty; allowed: a new, an empty or an earlier random one"
            )
        for path in present:
            path.unlink()
        (directory / MARKER).write_text(marker + "\n")
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise UserError(f"DIR {directory}: {error.strerror}") from None
    if total > free:
        raise UserError(
            f"DIR {directory}: the model takes {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; "
            "fewer --layers or another --format take less"
        )
