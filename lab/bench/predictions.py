"""`moebius bench plan`: what `moebius plan` predicts, what an engine then does here, and their ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from app.bench.output import BenchTable, Column, write_json
from app.cli_options import log_warnings_only
from app.commands.models import with_checkpoint
from app.planning.capacity import CapacityPlan, Wish
from app.planning.fill import with_filled_gpus, with_free_memory
from app.planning.gpu_use import plan_capacity
from app.planning.hardware import HardwareOptions, hardware
from app.planning.measured_products import with_measured_products
from app.planning.report import hardware_line, quiet
from lab.bench.engine.run import EngineBench, EngineBenchOptions, run, with_room
from moebius.config import MoebiusConfig
from moebius.errors import UserError

# How far a prediction may be from what was measured.
TOLERANCE = 0.15


@dataclass(frozen=True)
class PredictionOptions:
    """Filled by the command line."""

    models: Sequence[str]  # As MODEL of `serve`.
    devices: Sequence[str]  # Values of `device`.
    ratios: Sequence[int]  # Percent of experts on GPUs; empty: what `serve` chooses.
    engine: EngineBenchOptions
    repeats: int  # Measurements of each number of streams, of which the fastest counts.
    fetch: str  # Value of `fetch_experts`: no plan counts with experts that decode steps fetch.


@dataclass(frozen=True)
class Case:
    """One configuration that is planned and measured; filled by `cases`."""

    name: str
    config: MoebiusConfig


@dataclass(frozen=True)
class Compared:
    """One figure of one case, tokens/s; filled by `compared`. The keys of the JSON rows."""

    case: str
    figure: str  # "decode 8": of 8 streams together; "prefill 512": of a prompt of 512 tokens.
    predicted: float
    measured: float
    bound_by: str  # The part of the predicted step that takes longest.
    expert_kernels: str  # Where the plan has their times from.

    @property
    def ratio(self) -> float:
        """Returns predicted over measured: above 1, the plan promises too much."""
        return self.predicted / self.measured


_TABLE = BenchTable[Compared](
    Column("figure", lambda row: row.figure, 13, left=True),
    Column("predicted", lambda row: f"{row.predicted:.1f}", 9),
    Column("measured", lambda row: f"{row.measured:.1f}", 9),
    Column("ratio", lambda row: f"{row.ratio:.2f}", 6),
    Column("", lambda row: "" if abs(row.ratio - 1) <= TOLERANCE else "*", 1),
    Column("bound by", lambda row: row.bound_by, 20, left=True),
    Column("expert kernels", lambda row: row.expert_kernels, 21, left=True),
)


def cases(config: MoebiusConfig, options: PredictionOptions) -> list[Case]:
    """Returns every model on every device, on a GPU with each share of its experts there."""
    found = []
    for model in options.models:
        for device in options.devices:
            for ratio in (None,) if device == "cpu" or not options.ratios else options.ratios:
                found.append(_case(config, options.fetch, model, device, ratio))
    return found


def _case(config: MoebiusConfig, fetch: str, model: str, device: str, ratio: int | None) -> Case:
    placement = config.placement
    if ratio is not None:
        placement = placement.model_copy(update={"gpu_experts_ratio": ratio / 100})
    sections = {
        "model": config.model.model_copy(update={"model": model}),
        "gpu": config.gpu.model_copy(update={"device": device, "fetch_experts": fetch}),
        "placement": placement,
    }
    share = "" if ratio is None else f", {ratio} % of the experts on GPUs"
    return Case(f"{model}, {device}{share}", config.model_copy(update=sections))


def run_cases(config: MoebiusConfig, options: PredictionOptions, json_file: Path | None) -> list[Compared]:
    """Measures and plans each case in a process of its own, and prints every figure as it is known.

    A case that is refused, or whose process ends, is named, and the others go on. Raises UserError where
    none could be measured.
    """
    rows: list[Compared] = []
    for case in cases(config, options):
        print(f"\n{case.name}", flush=True)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                found = pool.submit(measure_case, case, options).result()
            except BrokenProcessPool:
                print("its process ended; the lines above say why", flush=True)
                continue
            except (UserError, RuntimeError, OSError) as error:  # such as a GPU's memory that ran out
                print(f"refused: {error}", flush=True)
                continue
        rows += found
        _TABLE.print_all(found)
        # After every case: an interrupted run keeps what it has.
        write_json([asdict(row) | {"ratio": row.ratio} for row in rows], json_file)
    if not rows:
        raise UserError("no configuration could be measured; the lines above say why")
    print(f"\n{verdict(rows)}", flush=True)
    return rows


def measure_case(case: Case, options: PredictionOptions) -> list[Compared]:
    """Returns the figures of one case: measured first, so that the plan has the times that its servers
    measured of their kernels, as the plan of a machine that has served a model has.
    """
    log_warnings_only("bench")
    streams = [count for count in options.engine.streams for _ in range(options.repeats)]
    bench = replace(options.engine, streams=streams)
    config = with_room(with_filled_gpus(with_checkpoint(case.config)), bench)
    measured = run(config, bench)
    # Decode streams are on average as long as in the middle of their outputs.
    wish = Wish(bench.prompt_len + bench.max_tokens // 2, None, tuple(options.engine.streams))
    plans = {0: planned(config, measured, wish)}
    for row in measured.prefill:
        plans[row.prompt_len] = planned(config, measured, Wish(row.prompt_len, None, (1,)))
    print(hardware_line(plans[0]), flush=True)
    return compared(case.name, plans, measured)


def planned(config: MoebiusConfig, measured: EngineBench, wish: Wish) -> CapacityPlan:
    """Returns the plan for this host, with the bandwidth of RAM that was measured beside the engine."""
    with quiet():
        options = HardwareOptions(gpus="none" if measured.device == "cpu" else "auto")
        host = with_free_memory(hardware(options), config.gpu)
        host = with_measured_products(config, host)
        origin = {**host.origin, "bandwidth": "measured"}
        host = replace(host, bandwidth=measured.bandwidths.cpu, origin=origin)
        return plan_capacity(config, host, wish, fill=False)


def compared(case: str, plans: dict[int, CapacityPlan], measured: EngineBench) -> list[Compared]:
    """Returns a row for each number of streams, the fastest measurement of it, and for each prompt.

    `plans`: of the streams by 0, of prompts by their tokens.
    """
    kernels, found = plans[0].expert_kernels, []
    for speed in plans[0].decode:
        best = max(row.tokens_per_second for row in measured.decode if row.streams == speed.rows)
        found.append((f"decode {speed.rows}", speed, best))
    for prompt in measured.prefill:
        speed = plans[prompt.prompt_len].prefill
        found.append((f"prefill {prompt.prompt_len}", speed, prompt.tokens_per_second))
    return [
        Compared(case, figure, speed.tokens_per_second, best, speed.seconds.bound_by, kernels)
        for figure, speed, best in found
    ]


def verdict(rows: Sequence[Compared]) -> str:
    """Returns how many figures are within the tolerance, and the worst and the middle one."""
    within = sum(abs(row.ratio - 1) <= TOLERANCE for row in rows)
    worst = max(rows, key=lambda row: max(row.ratio, 1 / row.ratio))
    middle = statistics.median(row.ratio for row in rows)
    return (
        f"{within} of {len(rows)} figures are predicted within {TOLERANCE:.0%} of what was measured; "
        f"ratio in the middle {middle:.2f}, worst {worst.ratio:.2f} ({worst.figure} of {worst.case})"
    )
