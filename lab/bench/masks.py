"""`moebius bench masks`: what constraints of outputs cost per token, if none, half and all streams have one.

One engine; the three kinds of run take turns, and their medians are compared: what a run without a constraint
takes is the limit. The grammar is a stream of JSON objects that never ends. Texts are sampled at temperature
1: greedy ones repeat themselves, and choose few experts, masked or not.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.bench.output import BenchTable, Column, write_json
from lab.bench.engine.drive import EngineUnderTest, decode_window, running_engine
from lab.bench.engine.measure import random_prompts
from lab.bench.engine.run import EngineBenchOptions, with_room
from lab.bench.engine.servers import running_servers
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.grammar.lark import LarkGrammar
from protos.engine_pb2 import Constraint

if TYPE_CHECKING:
    from gpu_service.core.constraint import ConstraintCompiler

_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "place", "thing"]},
        "size": {"type": "number"},
        "parts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"id": {"type": "integer"}, "label": {"type": "string"}},
                "required": ["id", "label"],
                "additionalProperties": False,
            },
        },
        "checked": {"type": "boolean"},
    },
    "required": ["name", "kind", "size", "parts", "checked"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class MaskOptions:
    """Filled by the command line."""

    streams: Sequence[int] = (1, 8, 32)
    prompt_len: int = 64
    max_tokens: int = 96
    rounds: int = 3


@dataclass(frozen=True)
class MaskResult:
    """One number of streams; filled by `measure`. Medians of the rounds."""

    streams: int
    constrained: int  # how many of them have a constraint
    tokens_per_second: float
    step_seconds: float
    unconstrained_step_seconds: float  # of the same streams without any constraint, in the same run
    # Of the engine's process, all threads, per step and with its share of prefill: not what others take, so
    # that a machine with other work can compare, too. Expert servers are processes of their own.
    cpu_step_seconds: float
    unconstrained_cpu_step_seconds: float

    @property
    def added(self) -> float:
        """Returns what constraints add to a step, as a share of it."""
        return self.step_seconds / self.unconstrained_step_seconds - 1

    @property
    def added_cpu_seconds(self) -> float:
        """Returns what constraints add to a step in processor time."""
        return self.cpu_step_seconds - self.unconstrained_cpu_step_seconds

    @property
    def added_cpu(self) -> float:
        """The same as a share: what a busy machine can tell, too."""
        return self.added_cpu_seconds / self.unconstrained_cpu_step_seconds


_TABLE = BenchTable[MaskResult](
    Column("streams", lambda row: f"{row.streams}"),
    Column("with constraint", lambda row: f"{row.constrained}"),
    Column("tokens/s", lambda row: f"{row.tokens_per_second:.1f}", 9),
    Column("step ms", lambda row: f"{row.step_seconds * 1e3:.2f}", 8),
    Column("limit ms", lambda row: f"{row.unconstrained_step_seconds * 1e3:.2f}", 8),
    Column("added", lambda row: f"{row.added * 100:+.1f} %", 8),
    Column("added CPU ms", lambda row: f"{row.added_cpu_seconds * 1e3:+.2f}", 12),
    Column("added CPU", lambda row: f"{row.added_cpu * 100:+.1f} %", 9),
)


def run(config: MoebiusConfig, options: MaskOptions, json_file: Path | None = None) -> list[MaskResult]:
    """Starts expert servers, builds the engine, measures and prints. Raises UserError."""
    config = with_room(config, EngineBenchOptions(options.streams, max_tokens=options.max_tokens))
    rows: list[MaskResult] = []
    with running_servers(config) as servers, running_engine(servers.config) as engine:
        vocab_size = engine.built.model_config.vocab_size
        compiler = engine.built.compiler or random_vocabulary(vocab_size)
        _TABLE.print_header()
        for streams in options.streams:
            for row in measure(engine, compiler, streams, options):
                _TABLE.print_row(row)
                rows.append(row)
    write_json(rows, json_file)
    return rows


def measure(
    engine: EngineUnderTest, compiler: ConstraintCompiler, streams: int, options: MaskOptions
) -> list[MaskResult]:
    """Measures without constraints, with half of the streams constrained, and with all, in turns."""
    kinds = sorted({0, streams // 2, streams})
    steps: dict[int, list[float]] = {kind: [] for kind in kinds}
    speeds: dict[int, list[float]] = {kind: [] for kind in kinds}
    processors: dict[int, list[float]] = {kind: [] for kind in kinds}
    # The first round pays for what is compiled and loaded at first use, and is not counted.
    for number in range(options.rounds + 1):
        for kind in kinds:
            prompts = random_prompts(
                streams, options.prompt_len, engine.built.model_config.vocab_size, number
            )
            constraints = compiler.make(_endless_records(), kind) if kind else []
            before = time.process_time()
            running = engine.submit(prompts, options.max_tokens, 1.0, constraints)
            running.wait(options.max_tokens)
            try:
                window = decode_window(running.events, streams)
            except ValueError as error:
                raise UserError(
                    f"{streams} streams: {error}; max_num_seqs and the KV pool must hold all"
                ) from None
            if number:
                processors[kind].append((time.process_time() - before) / options.max_tokens)
                steps[kind].append(window.seconds / max(1, window.steps))
                speeds[kind].append(window.tokens_per_second)
    without, cpu_without = statistics.median(steps[0]), statistics.median(processors[0])
    return [
        MaskResult(
            streams,
            kind,
            statistics.median(speeds[kind]),
            statistics.median(steps[kind]),
            without,
            statistics.median(processors[kind]),
            cpu_without,
        )
        for kind in kinds
    ]


def _endless_records() -> Constraint:
    grammar = LarkGrammar()
    record = grammar.json(_RECORD)
    return Constraint(lark=grammar.render(f'{record} ("\\n" {record})*'))


def random_vocabulary(vocab_size: int) -> ConstraintCompiler:
    """Returns a compiler for a checkpoint without a tokenizer: all bytes, and made-up words up to the
    vocabulary's size.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from gpu_service.core.constraint import ConstraintCompiler

    pieces = dict.fromkeys(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    draw = random.Random(1)
    syllables = ["".join(pair) for pair in itertools.product("bcdfghjklmnprstvwz", "aeiou")]
    while len(pieces) < vocab_size:
        word = "".join(draw.choices(syllables, k=draw.randint(1, 4)))
        pieces.setdefault(draw.choice(["\u0120", "", '"']) + word)
    ids = {piece: number for number, piece in enumerate(itertools.islice(pieces, vocab_size))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return ConstraintCompiler(lambda: tokenizer, vocab_size, frozenset({0}))
