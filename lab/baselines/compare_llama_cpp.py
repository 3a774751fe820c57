"""Prefill and decode of llama.cpp and of Moebius from one GGUF file, over HTTP, in turn; see README.md."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from app.cli_options import parse_counts
from app.commands.experts import distinct_experts
from lab.baselines.comparison_results import NOTHING, TABLE, Key, Results
from lab.baselines.llama_cpp import LlamaSettings, run_bench
from lab.baselines.serving_load import (
    Measured,
    Prompts,
    RunningServer,
    TimeLimit,
    ask,
    free_port,
    measure_decode,
    measure_prefill,
    serving,
    time_limit,
)
from lab.random_model.build import MARKER
from moebius.errors import UserError
from moebius.models.read import read_config

# The server's name for the model; llama.cpp takes any.
MODEL = "model"
SYSTEMS = ("llama-server", "moebius", "llama-bench")


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
    # A cell may take the first; no cell begins after the second, counted from the script's start.
    cell_s: float
    budget_s: float
    # Systems that are measured, in this order.
    systems: tuple[str, ...]
    serve: tuple[str, ...]
    logs: Path

    @property
    def context(self) -> int:
        """Tokens of one decoding request."""
        return self.decode_prompt + self.decode_tokens + 8

    def keys(self, *phases: str) -> list[Key]:
        """Returns the cells of these phases."""
        prefill = [Key("prefill", length) for length in self.prefill]
        decode = [Key("decode", streams) for streams in self.streams]
        return [key for key in prefill + decode if key.phase in phases]


@dataclass(frozen=True)
class Load:
    """One kind of server of a system and the cells it answers; filled by `loads_of`."""

    system: str
    keys: list[Key]
    # A context manager: the running server, and the engine's address where it counts experts.
    start: Callable[[float], contextlib.AbstractContextManager[tuple[RunningServer, str]]]


def loads_of(options: Options) -> list[Load]:
    """llama.cpp gets one slot of a long context, then many of short ones: memory that suits each load."""

    def llama(slots: int, context: int, name: str) -> Callable[[float], Any]:
        @contextlib.contextmanager
        def start(timeout_s: float) -> Iterator[tuple[RunningServer, str]]:
            port = free_port()
            log = options.logs / f"llama-server-{name}.log"
            command = options.llama.server(port, slots, context)
            with serving(command, port, "/health", log, timeout_s, {"cache_prompt": False}) as server:
                yield server, ""

        return start

    prefill, decode = options.keys("prefill"), options.keys("decode")
    loads = {
        "llama-server": [
            Load("llama-server", prefill, llama(1, max(options.prefill, default=0) + 64, "prefill")),
            Load("llama-server", decode, llama(max(options.streams, default=1), options.context, "decode")),
        ],
        "moebius": [Load("moebius", prefill + decode, lambda limit: moebius_server(options, limit))],
    }
    return [load for system in options.systems for load in loads.get(system, [])]


@contextlib.contextmanager
def moebius_server(options: Options, timeout_s: float) -> Iterator[tuple[RunningServer, str]]:
    """Yields a running `moebius serve`, and the engine's address."""
    with tempfile.TemporaryDirectory(prefix="mb") as state:
        port = free_port()
        command = [
            *(sys.executable, "-P", "-m", "moebius", "serve", str(options.model)),
            *("--port", str(port), "--state-dir", state, "--served-model-name", MODEL),
            *("--device", options.device, "--max-num-seqs", str(max(64, *options.streams, 1))),
            *options.serve,
        ]
        log = options.logs / "moebius-serve.log"
        with serving(command, port, "/ready", log, timeout_s, {}) as server:
            yield server, f"unix:{state}/serve-{port}/gpu.sock"


class Comparison:
    """Measures what the results lack, within the limits of time."""

    def __init__(self, options: Options, prompts: Prompts, results: Results) -> None:
        self._options, self._prompts, self._results = options, prompts, results
        self._begin = time.monotonic()

    def _left(self) -> float:
        return self._options.budget_s - (time.monotonic() - self._begin)

    def measure(self, load: Load) -> None:
        """All cells of the load. A server that was killed for a cell that took too long is started again.

        Raises TimeLimit when the time of the whole script is over, UserError when a server fails.
        """
        while todo := [key for key in load.keys if (load.system, key) not in self._results.cells]:
            limit = min(self._options.ready_timeout_s, self._left())
            if limit <= 0:
                raise TimeLimit(f"no time is left for {load.system}: {todo}")
            with load.start(limit) as (server, engine):
                self._results.ready_s.setdefault(load.system, server.ready_s)
                print(f"{load.system}: ready after {server.ready_s:.1f} s", flush=True)
                for number, key in enumerate(todo):
                    if not self._cell(load.system, server, engine, key, first=number == 0):
                        break

    def _cell(self, system: str, server: RunningServer, engine: str, key: Key, first: bool) -> bool:
        """False: the server had to be killed."""
        left = self._left()
        limit = min(self._options.cell_s, left)
        if limit <= 0:
            raise TimeLimit(f"no time is left for {system} {key.phase} {key.size}")
        try:
            with time_limit(server, limit):
                self._warm_up(server, key, first)
                measured = self._measured(server, key)
        except TimeLimit:
            if limit == left:
                raise  # a later call may give it the time it needs
            self._results.add(system, key, NOTHING)
            return False
        if engine:  # in requests of their own: counting is not free
            with contextlib.suppress(TimeLimit), time_limit(server, min(self._options.cell_s, self._left())):
                self._results.distinct[key] = self._distinct(server, engine, key)
        self._results.add(system, key, measured)
        return key in self._results.distinct or not engine

    def _warm_up(self, server: RunningServer, key: Key, first: bool) -> None:
        """Pays for what is first used."""
        lengths = [key.size] if key.phase == "prefill" else [self._options.decode_prompt] * first
        for length in lengths * (1 + first):
            ask(server, MODEL, *self._prompts.draw(time.time_ns(), length, 2))

    def _measured(self, server: RunningServer, key: Key) -> Measured:
        options = self._options
        if key.phase == "prefill":
            return measure_prefill(server, MODEL, self._prompts, key.size, options.repeats)
        tokens, repeats, length = options.decode_tokens, options.repeats, options.decode_prompt
        return measure_decode(server, MODEL, self._prompts, key.size, tokens, repeats, length)

    def _distinct(self, server: RunningServer, engine: str, key: Key) -> float:
        if key.phase == "decode":
            return _distinct_of_decode(server, engine, self._options, self._prompts, key.size)
        with distinct_experts(engine) as found:
            ask(server, MODEL, *self._prompts.draw(7, key.size, 1))
        return statistics.mean(found.values())

    def bench(self) -> None:
        """llama-bench, for the cells that it can measure."""
        options = self._options
        keys = [Key("decode", 1), *options.keys("prefill")]
        todo = [key for key in keys if ("llama-bench", key) not in self._results.cells]
        lengths = [key.size for key in todo if key.phase == "prefill"]
        if not todo:
            return
        limit = min(options.cell_s * len(todo), self._left())
        if limit <= 0:
            raise TimeLimit("no time is left for llama-bench")
        tokens = options.decode_tokens if Key("decode", 1) in todo else 0
        found = run_bench(options.llama, lengths, tokens, options.repeats, limit)
        for key in todo:
            speed = found.prefill.get(key.size, 0.0) if key.phase == "prefill" else found.decode
            if speed:
                self._results.add("llama-bench", key, Measured(speed, (speed,), 1.0))


def _distinct_of_decode(
    server: RunningServer, engine: str, options: Options, prompts: Prompts, streams: int
) -> float:
    """Returns counted while all streams decode, so that no chunk of a prompt is in it."""
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


def check_model(model: Path) -> Prompts:
    """Returns the prompts for it.

    Raises UserError unless `moebius models random --head chain` wrote it as GGUF.
    """
    marker = model.parent / MARKER
    written = json.loads(marker.read_text()) if marker.is_file() else {}
    if model.suffix != ".gguf" or written.get("head") != "chain":
        raise UserError(
            f"--model {model}: allowed: a GGUF file that `moebius models random DIR --format q4_0 "
            "--head chain` wrote, whose answers are known"
        )
    print(f"{model}: {json.dumps(written)}", flush=True)
    return Prompts(int(read_config(model)["vocab_size"]))


def settings_of(options: Options) -> dict[str, Any]:
    """What two calls must have in common to be one comparison."""
    return {
        "model": options.model.name,
        "written": json.loads((options.model.parent / MARKER).read_text()),
        "device": options.device,
        "decode_prompt": options.decode_prompt,
        "decode_tokens": options.decode_tokens,
        "threads": options.llama.threads,
        "ubatch": options.llama.ubatch,
        "llama": options.llama.extra,
        "serve": options.serve,
    }


def compare(options: Options, results: Results, prompts: Prompts) -> list[str]:
    """All that is not measured yet, then the table. Returns what could not be measured, a line each."""
    comparison = Comparison(options, prompts, results)
    problems = []
    steps: list[Callable[[], None]] = [partial(comparison.measure, load) for load in loads_of(options)]
    if "llama-bench" in options.systems:
        steps.append(comparison.bench)
    TABLE.print_header()
    for step in steps:
        try:
            step()
        except UserError as problem:
            problems.append(str(problem))
            print(problem, flush=True)
    results.write()
    print("ready after: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in results.ready_s.items()))
    TABLE.print_all(results.rows())
    return problems


def parse() -> tuple[Options, Path | None]:
    """Returns the options of the command line."""
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
    add("--cell-seconds", type=float, default=120.0, help="what a cell may take; then it counts as 0")
    add("--budget-seconds", type=float, default=1e9, help="no cell begins later; a later call goes on")
    add("--systems", default=",".join(SYSTEMS), help="measured in this order: " + ", ".join(SYSTEMS))
    add("--logs", type=Path, default=Path(), help="where the servers' output goes")
    add(
        "--json",
        type=Path,
        default=None,
        help="file for the results; what it holds already is not measured again",
    )
    chosen = parser.parse_args()
    systems = tuple(chosen.systems.split(","))
    if unknown := [system for system in systems if system not in SYSTEMS]:
        raise UserError(f"--systems: {unknown} are not allowed; allowed: {', '.join(SYSTEMS)}")
    options = Options(
        chosen.model.resolve(),
        LlamaSettings(
            chosen.llama_dir,
            chosen.model.resolve(),
            chosen.threads,
            tuple(parse_counts(chosen.ubatch, "--ubatch")),
            chosen.device == "cuda",
            tuple(chosen.llama_args.split()),
        ),
        chosen.device,
        tuple(parse_counts(chosen.prefill, "--prefill")),
        tuple(parse_counts(chosen.streams, "--streams")),
        chosen.decode_prompt,
        chosen.decode_tokens,
        chosen.repeats,
        chosen.ready_timeout,
        chosen.cell_seconds,
        chosen.budget_seconds,
        systems,
        tuple(chosen.serve_args.split()),
        chosen.logs,
    )
    return options, chosen.json


def main() -> None:
    """Runs the comparison; errors are one line."""
    try:
        options, json_file = parse()
        prompts = check_model(options.model)
        results = Results(json_file, settings_of(options))
        if problems := compare(options, results, prompts):
            sys.exit("not measured: " + "; ".join(problem.splitlines()[0] for problem in problems))
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
