"""`moebius bench tiers`: time to the first token of a prompt that is in RAM or on disk, beside computing it.

A second prompt takes the pages of the first, which then comes again. The limit is what the prompt's bytes
take at the speed of the tier, measured in the same run: copies over a GPU's link (on a CPU, of pages within
RAM), or reads of the tier's own files, each after the system has dropped them from its cache.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from app.bench.bounds import facts
from app.bench.output import BenchTable, Column, write_json
from lab.bench.engine.drive import EngineUnderTest, running_engine
from lab.bench.engine.measure import random_prompts
from lab.bench.engine.servers import ExpertServers, running_servers
from lab.bench.prefill import link_rate
from moebius.config import MoebiusConfig
from moebius.errors import UserError

if TYPE_CHECKING:
    from gpu_service.cache.tiers.prefix_tiers import PrefixTiers

_COPIED_BYTES, _COPY_TIMEOUT_S = 256 * 2**20, 600.0


@dataclass(frozen=True)
class TiersOptions:
    """Filled by the command line."""

    lengths: Sequence[int] = (1024, 4096)
    repeats: int = 3
    # Of each tier; it has to hold all prompts.
    tier_gib: float = 4.0
    # Where files of the disk tier are made, and removed at the end.
    directory: Path = Path()


@dataclass(frozen=True)
class TiersRow:
    """One tier and length, medians; filled by `run`. The keys of the JSON rows."""

    tier: str  # ram, or disk
    prompt_len: int
    nbytes: int  # Of the prompt's pages and of a state.
    computed_seconds: float  # To the first token; so are the next two.
    device_seconds: float  # The prefix is in the tree still.
    tier_seconds: float
    tier_bytes_per_second: float  # Measured without the engine.
    fetch_seconds: float  # Of `tier_seconds`, until the blocks are in the tree.
    cached_tokens: int

    @property
    def limit_seconds(self) -> float:
        """What the bytes take at the tier's speed."""
        return self.nbytes / self.tier_bytes_per_second

    @property
    def ratio(self) -> float:
        """What the blocks take until they are in the tree, by the limit."""
        return self.fetch_seconds / self.limit_seconds


_TABLE = BenchTable[TiersRow](
    Column("tier", lambda row: row.tier, 6, left=True),
    Column("tokens", lambda row: f"{row.prompt_len}", 7),
    Column("MiB", lambda row: f"{row.nbytes / 2**20:.1f}", 8),
    Column("computed ms", lambda row: f"{row.computed_seconds * 1e3:.1f}"),
    Column("on device ms", lambda row: f"{row.device_seconds * 1e3:.1f}"),
    Column("from tier ms", lambda row: f"{row.tier_seconds * 1e3:.1f}"),
    Column("faster", lambda row: f"{row.computed_seconds / row.tier_seconds:.1f}", 7),
    Column("of it fetch", lambda row: f"{row.fetch_seconds * 1e3:.1f}"),
    Column("tier GB/s", lambda row: f"{row.tier_bytes_per_second / 1e9:.2f}"),
    Column("limit ms", lambda row: f"{row.limit_seconds * 1e3:.1f}"),
    Column("by limit", lambda row: f"{row.ratio:.2f}", 8),
)


def run(config: MoebiusConfig, options: TiersOptions, json_file: Path | None = None) -> list[TiersRow]:
    """One engine for each tier, on the same expert servers. Prints every row; raises UserError."""
    from gpu_service.assembly.process import resolve_device

    if options.repeats < 1:
        raise UserError(f"--repeats: {options.repeats} is not allowed; allowed: 1 or more")
    device, rows = resolve_device(config.gpu), list[TiersRow]()
    directory = options.directory
    with running_servers(config) as servers, tempfile.TemporaryDirectory(dir=directory) as files:
        _TABLE.print_header()
        for tier in ("ram", "disk"):
            with running_engine(_with_tier(servers, tier, Path(files), options)) as engine:
                for length in options.lengths:
                    rows.append(_measure(engine, tier, length, Path(files), options))
                    _TABLE.print_row(rows[-1])
            # After each tier: an interrupted run keeps what it has.
            write_json({"host": facts(device), "rows": [asdict(row) for row in rows]}, json_file)
    return rows


def _with_tier(servers: ExpertServers, tier: str, files: Path, options: TiersOptions) -> MoebiusConfig:
    """Returns a pool that holds the longest prompt and half of the shortest one."""
    gpu = servers.config.gpu
    tokens = max(options.lengths) + min(options.lengths) // 2
    sizes: dict[str, object] = {"num_pages": 2 + -(-tokens // gpu.page_size), "elastic_memory": "off"}
    if tier == "ram":
        sizes |= {"kv_offload_gib": options.tier_gib, "kv_disk_gib": 0.0}
    else:
        sizes |= {"kv_offload_gib": 0.0, "kv_disk_gib": options.tier_gib, "kv_disk_dir": str(files)}
    return servers.config.model_copy(update={"gpu": gpu.model_copy(update=sizes)})


def _measure(engine: EngineUnderTest, tier: str, length: int, files: Path, options: TiersOptions) -> TiersRow:
    tiers, built = engine.built.tiers, engine.built
    if tiers is None:
        raise UserError("these settings leave no room for a tier below the KV cache")
    if length + 1 > built.context_limit:
        raise UserError(
            f"--lengths: {length} is more than the context of {built.context_limit} tokens allows"
        )
    size, vocab_size = built.engine.scheduler.cache.page_size, built.model_config.vocab_size
    pages, namespace = (length - 1) // size, f"tiers {tier}"
    payloads = tiers.payloads
    nbytes = pages * payloads.page_bytes + payloads.state_bytes
    seconds: dict[str, list[float]] = {"computed": [], "device": [], "tier": []}
    rates, fetches, hits = list[float](), list[float](), 0
    for repeat in range(options.repeats):
        first, second = (
            random_prompts(1, count, vocab_size, seed)[0]
            for count, seed in ((length, 2 * repeat), (max(options.lengths), 2 * repeat + 1))
        )
        seconds["computed"].append(_first_token(engine, first, namespace))
        seconds["device"].append(_first_token(engine, first, namespace))
        _wait_until_copied(tiers)
        _first_token(engine, second, namespace)
        _wait_until_copied(tiers)
        if tier == "disk":
            rates.append(_disk_rate(files))
        else:
            device = payloads.device
            rates.append(_ram_rate(payloads.page_bytes) if device.type == "cpu" else link_rate(device))
        before, fetched = tiers.hit_tokens[tier], tiers.fetch_seconds
        seconds["tier"].append(_first_token(engine, first, namespace))
        hits = tiers.hit_tokens[tier] - before
        fetches.append(tiers.fetch_seconds - fetched)
    computed, on_device, from_tier = (float(np.median(values)) for values in seconds.values())
    return TiersRow(
        tier=tier,
        prompt_len=length,
        nbytes=nbytes,
        computed_seconds=computed,
        device_seconds=on_device,
        tier_seconds=from_tier,
        tier_bytes_per_second=float(np.median(rates)),
        fetch_seconds=float(np.median(fetches)),
        cached_tokens=hits,
    )


def _first_token(engine: EngineUnderTest, prompt: Sequence[int], namespace: str) -> float:
    streams = engine.submit([prompt], 1, 0.0, namespace=namespace)
    return streams.wait(1) - streams.submitted


def _wait_until_copied(tiers: PrefixTiers) -> None:
    end = time.monotonic() + _COPY_TIMEOUT_S
    while not tiers.is_copied:
        if time.monotonic() > end:
            raise UserError(f"pages are not copied down within {_COPY_TIMEOUT_S:.0f} s")
        time.sleep(0.01)


def _ram_rate(page_bytes: int) -> float:
    """Returns the bytes per second of copies of pages within RAM, by one thread."""
    count = max(1, _COPIED_BYTES // page_bytes)
    source, target = (np.full((count, page_bytes), value, np.uint8) for value in (1, 2))
    begin = time.perf_counter()
    for page in range(count):
        target[page] = source[page]
    return count * page_bytes / (time.perf_counter() - begin)


def _disk_rate(files: Path) -> float:
    """Returns the bytes per second of reading the tier's files, which are dropped from the cache before and
    after it.
    """
    total, seconds = 0, 0.0
    buffer = np.empty(2**20, np.uint8)
    for path in files.glob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            _drop(descriptor)
            begin = time.perf_counter()
            while count := os.readv(descriptor, [buffer.data]):
                total += count
            seconds += time.perf_counter() - begin
            _drop(descriptor)
        finally:
            os.close(descriptor)
    if not total:
        raise UserError("the disk tier has written nothing; the log says why")
    return total / seconds


def _drop(descriptor: int) -> None:
    """From the system's cache, once it has been written."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
