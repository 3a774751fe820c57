"""The command: a profiled run of the engine, its trace, and the summary."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from moebius.app.bench.engine.drive import EngineUnderTest, running_engine
from moebius.app.bench.engine.host import facts
from moebius.app.bench.engine.measure import random_prompts
from moebius.app.bench.engine.run import EngineBenchOptions, with_room
from moebius.app.bench.engine.servers import running_servers
from moebius.app.bench.output import write_json
from moebius.app.bench.steps.report import StepsReport, summarise, table
from moebius.app.bench.steps.trace import load_trace
from moebius.config import MoebiusConfig
from moebius.errors import UserError

# Steps beside those that are summarised: the first ones after a prefill, and those launched before the end.
_SPARE_STEPS = 12


@dataclass(frozen=True)
class StepsOptions:
    """Filled by the command line."""

    streams: int = 1
    steps: int = 10
    prompt_len: int = 64
    temperature: float = 0.0
    # Where the trace is kept, for a trace viewer; None: nowhere.
    trace_file: Path | None = None


def run(config: MoebiusConfig, options: StepsOptions, json_file: Path | None = None) -> StepsReport:
    """Raises UserError on a machine without a GPU, and what `moebius serve` would refuse."""
    from gpu_service.assembly.process import resolve_device

    device = resolve_device(config.gpu)
    if device.type != "cuda":
        raise UserError("moebius bench steps looks at a GPU's work; there is none here, or device is 'cpu'")
    config = with_room(config, EngineBenchOptions(streams=(options.streams,)))
    with tempfile.TemporaryDirectory(prefix="moebius-steps-") as directory:
        path = options.trace_file or Path(directory) / "trace.json"
        with running_servers(config) as servers, running_engine(servers.config) as engine:
            profile_decode(engine, options, path)
        report = summarise(load_trace(path), options.steps)
    print(table(report))
    if json_file is not None:
        summary = {"passed": report.passed, "streams": options.streams}
        write_json({"host": facts(device)} | summary | asdict(report), json_file)
    return report


def profile_decode(engine: EngineUnderTest, options: StepsOptions, path: Path) -> None:
    """Writes the trace of one run; an unprofiled one before pays for everything that happens once."""
    from torch.profiler import ProfilerActivity, profile

    tokens = options.steps + _SPARE_STEPS
    vocab_size = engine.built.model_config.vocab_size
    for seed in (7, 8):
        prompts = random_prompts(options.streams, options.prompt_len, vocab_size, seed)
        if seed == 7:
            engine.submit(prompts, tokens, options.temperature).wait(tokens)
            continue
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            engine.submit(prompts, tokens, options.temperature).wait(tokens)
        profiler.export_chrome_trace(str(path))
