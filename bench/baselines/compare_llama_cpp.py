"""Prefill and decode of llama.cpp and of Moebius from one GGUF file, over HTTP, in turn; see README.md."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_cpp import BenchFigures, LlamaSettings, run_bench
from serving_load import (
    Measured,
    Prompts,
    RunningServer,
    ask,
    free_port,
    measure_decode,
    measure_prefill,
    serving,
)

from moebius.app.bench.kernels_inputs import parse_counts
from moebius.app.bench.output import BenchTable, Column, or_dash, write_json
from moebius.app.commands.experts import distinct_experts
from moebius.app.random_model.build import MARKER
from moebius.errors import UserError
from moebius.models.read import read_config

# The server's name for the model; llama.cpp takes any.
MODEL = "model"


@dataclass(frozen=True)
class Options:
    """Filled by the command line."""

    model: Path
    llama: LlamaSettings
    device: str
    prefill: tuple[int, ...]
    streams: tuple[int, ...]
    decode_prompt: int
    decode_tokens: int
    repeats: int
    ready_timeout_s: float
    serve: tuple[str, ...]
    logs: Path

    @property
    def context(self) -> int:
        """Tokens of one decoding request."""
        return self.decode_prompt + self.decode_tokens + 8


@dataclass(frozen=True)
class Cell:
    """One thing measured of one system; filled by `measure_cells`."""

    # "prefill" of so many tokens, "decode" of so many streams.
    phase: str
    size: int
    measured: Measured


@dataclass(frozen=True)
class Row:
    """The keys of the JSON rows; filled by `rows_of`. Speeds in tokens per second."""

    phase: str
    size: int
    moebius: float
    llama_server: float
    # 0: not measured (llama-bench decodes one stream only).
    llama_bench: float
    # Ours over the better of theirs.
    ratio: float
    moebius_repetitions: tuple[float, ...]
    llama_repetitions: tuple[float, ...]
    # Share of generated tokens that are the ones the model's head prefers.
    moebius_correct: float
    llama_correct: float
    # Different experts that a step (or chunk) touches, a mean over layers.
    distinct_experts: float


def measure_cells(
    server: RunningServer, options: Options, prompts: Prompts, phases: Sequence[str]
) -> list[Cell]:
    """All cells of the phases, after one request that pays for what is first used."""
    for length in options.prefill if "prefill" in phases else (options.decode_prompt,):
        ask(server, MODEL, *prompts.draw(0, length, 2))
    cells = []
    if "prefill" in phases:
        for length in options.prefill:
            cells.append(
                Cell("prefill", length, measure_prefill(server, MODEL, prompts, length, options.repeats))
            )
    if "decode" in phases:
        for streams in options.streams:
            found = measure_decode(
                server,
                MODEL,
                prompts,
                streams,
                options.decode_tokens,
                options.repeats,
                options.decode_prompt,
            )
            cells.append(Cell("decode", streams, found))
    return cells


def run_llama(options: Options, prompts: Prompts) -> tuple[list[Cell], BenchFigures, float]:
    """Cells, what llama-bench says, and seconds until the server was ready."""
    cells: list[Cell] = []
    ready_s = 0.0
    # One slot of a long context, then many of short ones: each kind of load gets the memory that suits it.
    kinds = (("prefill", 1, max(options.prefill) + 64), ("decode", max(options.streams), options.context))
    for phase, slots, context in kinds:
        port = free_port()
        command = options.llama.server(port, slots, context)
        log = options.logs / f"llama-server-{phase}.log"
        body = {"cache_prompt": False}
        with serving(command, port, "/health", log, options.ready_timeout_s, body) as server:
            ready_s = ready_s or server.ready_s
            cells += measure_cells(server, options, prompts, (phase,))
    return cells, run_bench(options.llama, options.prefill, options.decode_tokens, options.repeats), ready_s


@contextlib.contextmanager
def moebius_server(options: Options) -> Iterator[tuple[RunningServer, str]]:
    """A running `moebius serve`, and the engine's address."""
    with tempfile.TemporaryDirectory(prefix="mb") as state:
        port = free_port()
        command = [
            *(sys.executable, "-m", "moebius", "serve", str(options.model)),
            *("--port", str(port), "--state-dir", state, "--served-model-name", MODEL),
            *("--device", options.device, "--max-num-seqs", str(max(64, *options.streams))),
            *options.serve,
        ]
        log = options.logs / "moebius-serve.log"
        with serving(command, port, "/ready", log, options.ready_timeout_s, {}) as server:
            yield server, f"unix:{state}/serve-{port}/gpu.sock"


def run_moebius(options: Options, prompts: Prompts) -> tuple[list[Cell], dict[tuple[str, int], float], float]:
    """Cells, distinct experts by (phase, size), seconds until ready."""
    with moebius_server(options) as (server, engine):
        cells = measure_cells(server, options, prompts, ("prefill", "decode"))
        # Counted in requests of their own: counting is not free.
        distinct = {}
        for length in options.prefill:
            with distinct_experts(engine) as found:
                ask(server, MODEL, *prompts.draw(7, length, 1))
            distinct["prefill", length] = statistics.mean(found.values())
        for streams in options.streams:
            distinct["decode", streams] = _distinct_of_decode(server, engine, options, prompts, streams)
        return cells, distinct, server.ready_s


def _distinct_of_decode(
    server: RunningServer, engine: str, options: Options, prompts: Prompts, streams: int
) -> float:
    """Counted while all streams decode, so that no chunk of a prompt is in it."""
    tokens = options.decode_tokens
    asked = [prompts.draw(8 + one, options.decode_prompt, tokens) for one in range(streams)]
    with ThreadPoolExecutor(streams) as pool:
        started = [pool.submit(_first_then_rest, server, pair) for pair in asked]
        events = [future.result() for future in started]
        with distinct_experts(engine) as found:
            for rest in [pool.submit(_count_some, event, tokens // 4) for event in events]:
                rest.result()
        for event in events:
            event.close()
    return statistics.mean(found.values())


def _first_then_rest(server: RunningServer, pair: tuple[list[int], list[int]]) -> Any:
    """The stream of a request whose first token has come."""
    prompt, answer = pair
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4 * len(answer), "temperature": 0}
    pieces = server.client.stream("/v1/completions", {**body, "ignore_eos": True, **server.body})
    next(piece for piece in pieces if piece.text)
    return pieces


def _count_some(pieces: Any, tokens: int) -> None:
    found = 0
    while found < tokens:
        found += next(pieces).text.count("w")


def rows_of(
    ours: Sequence[Cell],
    theirs: Sequence[Cell],
    bench: BenchFigures,
    distinct: dict[tuple[str, int], float],
) -> list[Row]:
    """A row for each cell that both have."""
    baselines = {(cell.phase, cell.size): cell.measured for cell in theirs}
    rows = []
    for cell in ours:
        key = cell.phase, cell.size
        baseline = baselines[key]
        alone = bench.prefill.get(cell.size, 0.0) if cell.phase == "prefill" else 0.0
        if key == ("decode", 1):
            alone = bench.decode
        rows.append(
            Row(
                phase=cell.phase,
                size=cell.size,
                moebius=cell.measured.tokens_per_second,
                llama_server=baseline.tokens_per_second,
                llama_bench=alone,
                ratio=cell.measured.tokens_per_second / max(baseline.tokens_per_second, alone),
                moebius_repetitions=cell.measured.repetitions,
                llama_repetitions=baseline.repetitions,
                moebius_correct=cell.measured.correct,
                llama_correct=baseline.correct,
                distinct_experts=distinct[key],
            )
        )
    return rows


TABLE = BenchTable[Row](
    Column("phase", lambda row: row.phase, 7, left=True),
    Column("tokens/streams", lambda row: f"{row.size}", 8),
    Column("moebius", lambda row: f"{row.moebius:.1f}", 9),
    Column("llama-server", lambda row: f"{row.llama_server:.1f}", 9),
    Column("llama-bench", lambda row: or_dash(row.llama_bench, 1), 9),
    Column("ratio", lambda row: f"{row.ratio:.2f}", 6),
    Column("experts/layer", lambda row: f"{row.distinct_experts:.1f}", 6),
    Column("same tokens", lambda row: f"{min(row.moebius_correct, row.llama_correct):.3f}", 6),
)


def check_model(model: Path) -> Prompts:
    """Prompts for it. Raises UserError unless `moebius models random --head chain` wrote it as GGUF."""
    marker = model.parent / MARKER
    written = json.loads(marker.read_text()) if marker.is_file() else {}
    if model.suffix != ".gguf" or written.get("head") != "chain":
        raise UserError(
            f"--model {model}: allowed: a GGUF file that `moebius models random DIR --format q4_0 "
            "--head chain` wrote, whose answers are known"
        )
    print(f"{model}: {json.dumps(written)}", flush=True)
    return Prompts(int(read_config(model)["vocab_size"]))


def compare(options: Options, json_file: Path | None) -> None:
    """Both systems in turn, then the table. Raises UserError."""
    prompts = check_model(options.model)
    theirs, bench, their_start = run_llama(options, prompts)
    ours, distinct, our_start = run_moebius(options, prompts)
    rows = rows_of(ours, theirs, bench, distinct)
    print(f"ready after: moebius {our_start:.1f} s, llama-server {their_start:.1f} s")
    TABLE.print_all(rows)
    write_json(rows, json_file)


def parse() -> tuple[Options, Path | None]:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="GGUF file of `moebius models random --head chain`")
    add("--llama-dir", type=Path, required=True, help="what llama_cpp.py printed: holds llama-server")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="of both")
    add("--prefill", default="512,4096,16384", help="prompt lengths")
    add("--streams", default="1,8,32,64", help="numbers of concurrent streams")
    add("--decode-prompt", type=int, default=64, help="tokens of a decoding stream's prompt")
    add("--decode-tokens", type=int, default=64, help="tokens that each stream generates")
    add("--repeats", type=int, default=3, help="repetitions of each cell; the median counts")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of llama.cpp")
    add("--ubatch", default="4096", help="of llama.cpp; of several llama-bench tries all, the best counts")
    add("--llama-args", default="", help="further arguments of llama.cpp's programs")
    add("--serve-args", default="", help="further arguments of `moebius serve`")
    add("--ready-timeout", type=float, default=600.0, help="seconds that a server may take to be ready")
    add("--logs", type=Path, default=Path(), help="where the servers' output goes")
    add("--json", type=Path, default=None, help="file for the rows")
    chosen = parser.parse_args()
    options = Options(
        chosen.model.resolve(),
        LlamaSettings(
            chosen.llama_dir,
            chosen.model.resolve(),
            chosen.threads,
            parse_counts(chosen.ubatch, "--ubatch"),
            chosen.device == "cuda",
            tuple(chosen.llama_args.split()),
        ),
        chosen.device,
        parse_counts(chosen.prefill, "--prefill"),
        parse_counts(chosen.streams, "--streams"),
        chosen.decode_prompt,
        chosen.decode_tokens,
        chosen.repeats,
        chosen.ready_timeout,
        tuple(chosen.serve_args.split()),
        chosen.logs,
    )
    return options, chosen.json


def main() -> None:
    """Runs the comparison; errors are one line."""
    try:
        options, json_file = parse()
        compare(options, json_file)
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
