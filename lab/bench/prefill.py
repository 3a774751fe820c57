"""`moebius bench prefill`: prompts by length, and what the link to the GPU would allow for what was streamed.

A prompt cannot be faster than its experts come over the link: the limit is the prompt's tokens over the time
that the bytes really copied for it take at the link's rate, which is measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from app.bench.bounds import Bandwidths, facts
from app.bench.output import BenchTable, Column, or_dash, write_json
from lab.bench.engine.drive import EngineUnderTest, running_engine, wait_until_streaming
from lab.bench.engine.measure import (
    DuringDecodeResult,
    PrefillResult,
    Setting,
    make_setting,
    measure_during_decode,
    measure_prefill,
)
from lab.bench.engine.servers import running_servers
from moebius.config import MoebiusConfig
from moebius.errors import UserError

if TYPE_CHECKING:
    import torch

    from gpu_service.experts.streaming.streamer import ExpertStreamer

Mode = Literal["auto", "cpu", "stream"]
_LINK_BYTES, _LINK_COPIES = 256 * 2**20, 8


@dataclass(frozen=True)
class PrefillOptions:
    """Filled by the command line."""

    lengths: Sequence[int] = (512, 4096, 16384)
    # Values of `prefill_experts` to measure, one engine each.
    modes: Sequence[str] = ("auto",)
    repeats: int = 3
    # Numbers of streams that decode while a prompt of each length prefills; empty: none.
    decoding: Sequence[int] = ()


@dataclass(frozen=True)
class PrefillRow:
    """One length and mode; filled by `run`. The keys of the JSON rows."""

    mode: str
    prompt_len: int
    seconds_to_first_token: float
    tokens_per_second: float
    # Copied to the GPU for one prompt, and in how many steps.
    streamed_bytes: float
    streamed_steps: float
    link_bytes_per_second: float
    # None: nothing was streamed.
    link_tokens_per_second: float | None
    fraction_of_link: float | None
    # Share of the time in which the busiest expert server computed.
    expert_busy: float


_TABLE = BenchTable[PrefillRow](
    Column("experts", lambda row: row.mode, 7, left=True),
    Column("tokens", lambda row: f"{row.prompt_len}", 7),
    Column("first token ms", lambda row: f"{row.seconds_to_first_token * 1e3:.1f}"),
    Column("tokens/s", lambda row: f"{row.tokens_per_second:.1f}", 9),
    Column("GB streamed", lambda row: f"{row.streamed_bytes / 1e9:.2f}"),
    Column("steps", lambda row: f"{row.streamed_steps:.1f}"),
    Column("limit of the link", lambda row: or_dash(row.link_tokens_per_second, 1)),
    Column("ratio", lambda row: or_dash(row.fraction_of_link, 3), 6),
    Column("servers busy", lambda row: f"{row.expert_busy:.2f}"),
)


_DURING_DECODE = BenchTable[DuringDecodeResult](
    Column("tokens", lambda row: f"{row.prompt_len}", 7),
    Column("streams", lambda row: f"{row.streams}"),
    Column("decode tokens/s", lambda row: f"{row.decode_tokens_per_second:.1f}"),
    Column("idle", lambda row: f"{row.idle_decode_tokens_per_second:.1f}", 8),
    Column("ratio", lambda row: f"{row.fraction_of_idle_decode:.3f}", 6),
    Column("prefill tokens/s", lambda row: f"{row.prefill_tokens_per_second:.1f}"),
    Column("idle", lambda row: f"{row.idle_prefill_tokens_per_second:.1f}", 8),
    Column("ratio", lambda row: f"{row.fraction_of_idle_prefill:.3f}", 6),
    Column("longest wait ms", lambda row: f"{row.longest_wait_seconds * 1e3:.1f}"),
    Column("idle", lambda row: f"{row.idle_longest_wait_seconds * 1e3:.1f}", 6),
)


def run(config: MoebiusConfig, options: PrefillOptions, json_file: Path | None = None) -> list[PrefillRow]:
    """The same expert servers for all modes. Prints every row; raises UserError."""
    check(options)
    from gpu_service.assembly.process import resolve_device

    device = resolve_device(config.gpu)
    link = link_rate(device)
    print(f"copies to {device}: {link / 1e9:.1f} GB/s (page-locked memory, {_LINK_BYTES >> 20} MiB)")
    rows: list[PrefillRow] = []
    decoding: list[dict[str, Any]] = []
    with running_servers(config) as servers:
        _TABLE.print_header()
        for mode in options.modes:
            gpu = servers.config.gpu.model_copy(update={"prefill_experts": mode})
            own = type(servers)(servers.config.model_copy(update={"gpu": gpu}))
            with running_engine(own.config) as engine:
                setting = make_setting(engine, own, Bandwidths(0.0, None))
                found = _measure(engine, setting, mode, options, link)
                rows += found
                decoding += [
                    {"mode": mode} | asdict(row) for row in _during_decode(engine, setting, found, options)
                ]
            if json_file is not None:  # after every mode: an interrupted run keeps what it has
                table = {"prefill": [asdict(row) for row in rows], "during_decode": decoding}
                write_json({"host": facts(device)} | table, json_file)
    return rows


def check(options: PrefillOptions) -> None:
    """Raises UserError naming what is not allowed."""
    unknown = [mode for mode in options.modes if mode not in get_args(Mode)]
    if unknown or not options.modes:
        raise UserError(f"--modes: {unknown} are not allowed; allowed: {', '.join(get_args(Mode))}")
    if options.repeats < 1:
        raise UserError(f"--repeats: {options.repeats} is not allowed; allowed: 1 or more")


def _measure(
    engine: EngineUnderTest, setting: Setting, mode: str, options: PrefillOptions, link: float
) -> list[PrefillRow]:
    streamer, rows = engine.built.streamer, []
    if streamer is not None:
        wait_until_streaming(streamer)
        _print_costs(streamer, "measured")
    elif mode != "cpu":
        print(f"prefill_experts {mode}: nothing is streamed with these settings")
    for length in options.lengths:
        if length + 1 > engine.built.context_limit:
            print(f"{length} tokens: longer than the context of {engine.built.context_limit} tokens")
            continue
        # The first run pays for kernels that are compiled at first use.
        measure_prefill(engine, setting, length, 1)
        steps, nbytes = _streamed(streamer)
        found = measure_prefill(engine, setting, length, options.repeats)
        steps, nbytes = (
            (after - before) / options.repeats
            for after, before in zip(_streamed(streamer), (steps, nbytes), strict=True)
        )
        limit = length / (nbytes / link) if nbytes else None
        rows.append(
            PrefillRow(
                mode,
                length,
                found.seconds_to_first_token,
                found.tokens_per_second,
                nbytes,
                steps,
                link,
                limit,
                found.tokens_per_second / limit if limit else None,
                found.expert_busy,
            )
        )
        _TABLE.print_row(rows[-1])
    if streamer is not None:
        _print_costs(streamer, "after these prompts")
    return rows


def _print_costs(streamer: ExpertStreamer, when: str) -> None:
    """Prints what the split of a layer is chosen by."""
    from gpu_service.experts.streaming.share import ShareChooser, describe

    chooser = streamer.chooser
    layer = chooser.costs.layer if isinstance(chooser, ShareChooser) else None
    if layer is not None:
        print(f"a layer, {when}: " + ", ".join(f"{key} {value}" for key, value in describe(layer).items()))


def _during_decode(
    engine: EngineUnderTest, setting: Setting, alone: Sequence[PrefillRow], options: PrefillOptions
) -> list[DuringDecodeResult]:
    """Each length while each number of streams decodes."""
    found: list[DuringDecodeResult] = []
    for row in alone:
        for streams in options.decoding:
            if not found:
                print("prompts while streams decode:")
                _DURING_DECODE.print_header()
            idle = PrefillResult(
                row.prompt_len, row.seconds_to_first_token, row.tokens_per_second, row.expert_busy
            )
            found.append(measure_during_decode(engine, setting, idle, streams))
            _DURING_DECODE.print_row(found[-1])
    return found


def _streamed(streamer: ExpertStreamer | None) -> tuple[float, float]:
    """Returns steps and bytes so far."""
    return (0.0, 0.0) if streamer is None else (streamer.streamed_steps, streamer.streamed_bytes)


def link_rate(device: torch.device) -> float:
    """Returns the bytes per second of copies from page-locked memory to the device; best of some."""
    import torch

    is_cuda = device.type == "cuda"
    source = torch.ones(_LINK_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(_LINK_COPIES):
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize(device)
        best = max(best, _LINK_BYTES / (time.perf_counter() - begin))
    del source, target
    if is_cuda:
        torch.cuda.empty_cache()
    return best
