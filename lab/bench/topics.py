"""`moebius bench topics`: decode speed after what is asked for changes, until residents have followed it.

The next prompt is the next topic: random prompts of a model with chained answers begin at distant places of
the chain (`moebius models random --overlap`), where other experts are favourites.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from app.bench.bounds import facts
from app.bench.output import BenchTable, Column, write_json
from lab.bench.engine.drive import EngineUnderTest, TokenEvent, running_engine
from lab.bench.engine.measure import random_prompts
from lab.bench.engine.run import EngineBenchOptions, with_room
from lab.bench.engine.servers import running_servers
from moebius.config import MoebiusConfig
from moebius.errors import UserError

# Rates are of windows of this length; a topic's last ones are its settled rate.
_WINDOW_S = 1.0
_SETTLED_SHARE, _BACK = 1 / 3, 0.95


@dataclass(frozen=True)
class TopicsOptions:
    """Filled by the command line."""

    streams: int = 1
    topics: int = 3
    seconds: float = 40.0  # That each topic lasts.
    prompt_len: int = 64


@dataclass(frozen=True)
class TopicResult:
    """One topic; filled by `result_of`. Rates are tokens per second of all streams together."""

    topic: int
    first: float  # In its first window.
    settled: float  # Mean of its last third.
    # From its first token to the first window from which two in a row reach 95 % of the settled rate.
    seconds_until_back: float | None
    windows: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The first window's rate over the settled one."""
        return self.first / self.settled


def _seconds(value: float | None) -> str:
    return "not" if value is None else f"{value:.0f}"


_TABLE = BenchTable[TopicResult](
    Column("topic", lambda row: f"{row.topic}", 5),
    Column("first second, tokens/s", lambda row: f"{row.first:.1f}"),
    Column("settled", lambda row: f"{row.settled:.1f}", 8),
    Column("ratio", lambda row: f"{row.ratio:.3f}", 6),
    Column("back at 95 % after s", lambda row: _seconds(row.seconds_until_back)),
)


def run(config: MoebiusConfig, options: TopicsOptions, json_file: Path | None = None) -> list[TopicResult]:
    """One engine with the settings' placement; a row per topic, printed as it ends. Raises UserError."""
    from gpu_service.assembly.process import resolve_device

    config = with_room(config, EngineBenchOptions((options.streams,), options.prompt_len, prefill=()))
    device, results = resolve_device(config.gpu), list[TopicResult]()
    with running_servers(config) as servers, running_engine(servers.config) as engine:
        _TABLE.print_header()
        for topic in range(options.topics):
            results.append(result_of(topic, decode_for(engine, options, topic)))
            _TABLE.print_row(results[-1])
    write_json(
        {"host": facts(device), "rows": [asdict(row) | {"ratio": row.ratio} for row in results]}, json_file
    )
    return results


def decode_for(engine: EngineUnderTest, options: TopicsOptions, topic: int) -> list[TokenEvent]:
    """The tokens of one topic's streams, which are aborted at its end.

    Raises UserError when a stream ends before.
    """
    vocab_size = engine.built.model_config.vocab_size
    prompts = random_prompts(options.streams, options.prompt_len, vocab_size, 1000 + topic)
    streams = engine.submit(prompts, engine.built.context_limit - options.prompt_len, 0.0)
    streams.wait(1)
    time.sleep(options.seconds)
    with streams.changed:
        events = list(streams.events)
    if any(event.ended for event in events):
        raise UserError(
            f"a stream filled its context of {engine.built.context_limit} tokens within "
            f"{options.seconds:.0f} s: choose fewer --seconds or a larger max_model_len"
        )
    engine.abort(streams)
    return events


def result_of(topic: int, events: Sequence[TokenEvent]) -> TopicResult:
    """Returns the rates of whole windows from the first token on. Raises UserError for fewer than three."""
    begin = events[0].at
    counts = [0] * int((events[-1].at - begin) / _WINDOW_S)
    if len(counts) < 3:
        raise UserError("a topic lasted less than three seconds: choose more --seconds")
    for event in events:
        window = int((event.at - begin) / _WINDOW_S)
        if window < len(counts):
            counts[window] += event.tokens
    rates = tuple(count / _WINDOW_S for count in counts)
    last = rates[-max(1, round(len(rates) * _SETTLED_SHARE)) :]
    settled = sum(last) / len(last)
    back = (
        number * _WINDOW_S
        for number, pair in enumerate(itertools.pairwise(rates))
        if min(pair) >= _BACK * settled
    )
    return TopicResult(topic, rates[0], settled, next(back, None), rates)
