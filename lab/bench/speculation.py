"""`moebius bench speculation`: decode speed with draft tokens and without, on the same prompts.

What speculation gains is a question of the text. Here it is the kindest one that n-grams can have, an output
that repeats its prompt (as an editor's or a tool's answer does), and the same with a given share of other
tokens. A model with a chained head (`moebius models random --head chain`) continues with what followed its
last token whatever came before, so its prompt can hold the output in advance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from app.bench.bounds import (
    Bandwidths,
    StepTraffic,
    bound_of,
    expected_distinct,
    facts,
    measure_bandwidths,
)
from app.bench.output import BenchTable, Column, or_dash, write_json
from lab.bench.engine.drive import EngineUnderTest, running_engine
from lab.bench.engine.measure import (
    Setting,
    decode_together,
    make_setting,
    random_prompts,
    touched,
)
from lab.bench.engine.run import EngineBenchOptions, with_room
from lab.bench.engine.servers import running_servers
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.models.served import read_served_model, with_drafts, with_own_layers

if TYPE_CHECKING:
    from gpu_service.core.interface import EngineLoad

_PROMPT_LEN = 16
# Runs of the same prompts; the last one counts. The engine learns from the others what steps take.
_RUNS = 2


@dataclass(frozen=True)
class SpeculationOptions:
    """Filled by the command line."""

    streams: Sequence[int] = (1, 4)
    # Percent of the repeated text's tokens that the output has otherwise.
    changed: Sequence[int] = (0, 10)
    text_len: int = 256
    probe_bytes: int = 0  # Of the buffer that bandwidth is measured with; 0: several times the caches.


@dataclass(frozen=True)
class SpeculationResult:
    """One set of prompts with one method; filled by `_row` and `_measure`. The keys of the JSON rows."""

    streams: int
    tokens_per_second: float
    step_seconds: float
    # Of each stream.
    tokens_per_step: float
    draft_tokens_per_step: float
    # Acceptance rate: accepted draft tokens over verified ones; None: none was verified.
    accepted_share: float | None
    cpu_experts_per_layer: float
    bound_tokens_per_second: float
    ratio: float  # Of the bound.
    method: str = "off"  # "off", "ngram" or "mtp".
    changed_percent: int = 0
    # Against the same prompts without speculation; None: this row is without.
    speedup: float | None = None
    same_outputs: bool | None = None


_TABLE = BenchTable[SpeculationResult](
    Column("method", lambda row: row.method, left=True),
    Column("streams", lambda row: f"{row.streams}"),
    Column("changed", lambda row: f"{row.changed_percent} %", 5),
    Column("tokens/s", lambda row: f"{row.tokens_per_second:.1f}", 8),
    Column("step ms", lambda row: f"{row.step_seconds * 1e3:.2f}", 7),
    Column("tokens/step", lambda row: f"{row.tokens_per_step:.2f}"),
    Column("drafts/step", lambda row: f"{row.draft_tokens_per_step:.2f}"),
    Column("accepted", lambda row: or_dash(row.accepted_share, 2)),
    Column("experts/layer", lambda row: f"{row.cpu_experts_per_layer:.1f}"),
    Column("limit", lambda row: f"{row.bound_tokens_per_second:.1f}", 8),
    Column("ratio", lambda row: f"{row.ratio:.3f}", 6),
    Column("times off", lambda row: or_dash(row.speedup, 2)),
    Column("same outputs", lambda row: {True: "yes", False: "no", None: "-"}[row.same_outputs]),
)


def parse_percents(text: str, option: str) -> list[int]:
    """Returns percentages below 100, comma separated. Raises UserError naming `option`."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < 100 for part in parts):
        raise UserError(f"{option}: {text!r} is not allowed; allowed: percentages 0 to 99, comma separated")
    return list(map(int, parts))


def run(
    config: MoebiusConfig, options: SpeculationOptions, json_file: Path | None = None
) -> list[SpeculationResult]:
    """Measures an engine without speculation, then one with the set method (n-grams if none is); prints rows.

    Raises UserError, and what `moebius serve` would refuse.
    """
    from gpu_service.assembly.process import resolve_device
    from gpu_service.assembly.speculation import check_speculation

    config = with_room(config, EngineBenchOptions(options.streams))
    drafting, reason = with_own_layers(config)
    config = with_drafts(config) if drafting is None or reason else drafting
    device = resolve_device(config.gpu)
    method = config.gpu.speculative_method if config.gpu.may_draft else "ngram"
    speculative, parallel = with_method(config, method), config.parallel
    # Draft tokens of others do not follow from what prompts repeat.
    if method in ("mtp", "eagle3", "draft_model"):
        options = replace(options, changed=options.changed[:1])
    # A model without drafts is refused before half of the run is over.
    read_served_model(speculative)
    check_speculation(speculative.gpu, parallel)
    bandwidths = measure_bandwidths(device, options.probe_bytes, parallel.tensor_parallel_size)
    _TABLE.print_header()
    texts: _Texts = {}
    plain = _measure(with_method(config, "off"), options, bandwidths, texts, ())
    rows = plain + _measure(speculative, options, bandwidths, texts, plain)
    results = [row for row, _ in rows]
    write_json({"host": facts(device), "rows": [asdict(row) for row in results]}, json_file)
    return results


# By number of streams, the token ids that each of them will generate.
_Texts = dict[int, list[list[int]]]
# A row, and the outputs that its streams gave.
_Measured = tuple[SpeculationResult, list[list[int]]]


def with_method(config: MoebiusConfig, method: str) -> MoebiusConfig:
    second = config.gpu.speculative_model if method.endswith(("eagle3", "draft_model")) else ""
    gpu = config.gpu.model_copy(update={"speculative_method": method, "speculative_model": second})
    return config.model_copy(update={"gpu": gpu})


def _measure(
    config: MoebiusConfig,
    options: SpeculationOptions,
    bandwidths: Bandwidths,
    texts: _Texts,
    others: Sequence[_Measured],
) -> list[_Measured]:
    """Returns every row of one engine, next to those of an engine without speculation, `others`; fills
    `texts`.

    Its servers are its own: those of an engine with MTP hold the layers for it, too.
    """
    found: list[_Measured] = []
    kept = config.gpu.ngram_match_min
    with running_servers(config) as servers, running_engine(servers.config) as engine:
        longest = engine.built.context_limit // 2
        if options.text_len > longest:
            raise UserError(
                f"--text-len: {options.text_len} is not allowed; allowed: 128 to {longest}, since a prompt "
                f"and its output share a context of {engine.built.context_limit} tokens"
            )
        setting = make_setting(engine, servers, bandwidths)
        for streams in options.streams:
            if streams not in texts:
                begins = random_prompts(streams, _PROMPT_LEN, setting.vocab_size, 5)
                texts[streams] = decode_together(engine, setting, begins, options.text_len, 0.0).outputs
            for changed in options.changed:
                prompts = [repeated(text, changed, kept, setting.vocab_size) for text in texts[streams]]
                row, outputs = _row(engine, setting, prompts, options.text_len - kept)
                row = replace(row, method=config.gpu.speculative_method, changed_percent=changed)
                if others:
                    plain, same = others[len(found)]
                    speedup = row.tokens_per_second / plain.tokens_per_second
                    row = replace(row, speedup=speedup, same_outputs=outputs == same)
                found.append((row, outputs))
                _TABLE.print_row(row)
    return found


def repeated(text: Sequence[int], changed: int, kept: int, vocab_size: int) -> list[int]:
    """Returns a prompt whose output is likely the text from its token `kept` on.

    It holds the text, in which `changed` percent of the tokens are others, and then the text's beginning.
    """
    rng = np.random.default_rng([len(text), changed, *text[:4]])
    others = rng.integers(3, vocab_size, len(text))
    is_changed = rng.random(len(text)) < changed / 100
    return [*np.where(is_changed, others, text).tolist(), *text[:kept]]


def _load_when_idle(engine: EngineUnderTest) -> EngineLoad:
    """The engine counts a step after it has given out its tokens."""
    while engine.built.engine.load.num_running:
        time.sleep(0.001)
    return engine.built.engine.load


def _row(
    engine: EngineUnderTest, setting: Setting, prompts: Sequence[Sequence[int]], max_tokens: int
) -> _Measured:
    for _ in range(_RUNS):
        early = _load_when_idle(engine)
        decoded = decode_together(engine, setting, prompts, max_tokens, 0.0)
        late = _load_when_idle(engine)
    verified = late.draft_tokens - early.draft_tokens
    streams, window = len(prompts), decoded.window
    steps = max(1, window.steps)
    drafts = verified / streams / steps
    cpu_experts, cpu_bytes = touched(decoded.before, decoded.after, setting)
    gpu_experts = 0.0
    if setting.has_resident_experts:
        geometry = setting.geometry
        chosen = expected_distinct(geometry.num_experts, geometry.mean_top_k, round(streams * (1 + drafts)))
        gpu_experts = max(0.0, chosen - cpu_experts) * len(geometry.moe_layers)
    context = len(prompts[0]) + max_tokens / 2
    dense = setting.weights.dense + streams * context * setting.kv_bytes_per_token
    traffic = StepTraffic(cpu_bytes, gpu_experts * setting.expert_bytes, dense)
    bound = window.tokens / steps / bound_of(traffic, setting.bandwidths).step
    return (
        SpeculationResult(
            streams=streams,
            tokens_per_second=window.tokens_per_second,
            step_seconds=window.seconds_per_step,
            tokens_per_step=window.tokens / steps / streams,
            draft_tokens_per_step=drafts,
            accepted_share=(late.accepted_tokens - early.accepted_tokens) / verified if verified else None,
            cpu_experts_per_layer=cpu_experts,
            bound_tokens_per_second=bound,
            ratio=window.tokens_per_second / bound,
        ),
        decoded.outputs,
    )
