"""Memory of experts that an engine holds itself changes while greedy streams run; the device is the host."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Sequence

import torch

from gpu_service.core.parallel import SOLO
from gpu_service.experts.resident.make import expert_source
from gpu_service.experts.resident.source import PackedExpertSource
from gpu_service.experts.resident.watch import FILLED_AGAIN
from moebius.checkpoint.reader import SliceReader
from moebius.config import ModelConfigSection, MoebiusConfig, PlacementConfig
from moebius.experts.placement import make_placement
from moebius.models.read import read_geometry
from tests.drills.checkpoint import GreedyCase
from tests.drills.memory import (
    INTERVAL_S,
    LATE_S,
    MAX_TOKENS,
    flip_under_load,
    greedy_load,
    note_damage,
    promise_unharmed,
)
from tests.drills.report import Report
from tests.drills.session import Session, served, undisturbed, wait_for
from tests.helpers.process_memory import places_in, read, write

_PLACEMENT = PlacementConfig(gpu_experts=3, placement_strategy="uniform")
_FLAGS = ("--gpu-experts", "3", "--placement-strategy", "uniform")
_ENGINE = "gpu"


class Slots:
    """Where the engine's process has its experts, found by their packed bytes."""

    def __init__(self, session: Session) -> None:
        """Reads the checkpoint as the engine does."""
        model = str(session.model)
        config = MoebiusConfig(model=ModelConfigSection(model=model), placement=_PLACEMENT)
        geometry = read_geometry(session.model)
        self._session = session
        self._source: PackedExpertSource = expert_source(config, geometry, torch.float32, SOLO)
        resident = make_placement(_PLACEMENT, geometry).resident
        self._experts = [(layer, expert) for layer, held in resident.items() for expert in held]

    def damage(self, chosen: random.Random, change: Callable[[bytes], bytes], count: int) -> bool:
        """Changes `count` float32 weights of an expert; False: the engine has it nowhere."""
        engine = self._session.one(_ENGINE)
        layer, expert = chosen.choice(self._experts)
        with SliceReader() as reader:
            packed = self._source.read(layer, expert, reader).tobytes()
        places = [] if engine is None else places_in(engine.pid, packed)
        for at in chosen.sample(range(len(packed) // 4), count):
            for place in places:
                assert engine is not None
                write(engine.pid, place + 4 * at, change(read(engine.pid, place + 4 * at, 4)))
        return bool(places)


def run(report: Report, duration_s: float, period_s: float, streams: int, seed: int) -> None:
    """Half of the time each: NaN, and flipped bits."""
    chosen = random.Random(seed)
    with served(report, "--verify-interval-s", f"{INTERVAL_S:g}", *_FLAGS) as session:
        cases, slots = undisturbed(session, streams, MAX_TOKENS), Slots(session)
        _nan(session, slots, cases, duration_s / 2, period_s, chosen)
        flip_under_load(
            session,
            cases,
            duration_s / 2,
            period_s,
            lambda: _damage(session, slots, chosen, "bits flipped in a slot", _flip, 2000),
        )
        injected = report.facts["experts damaged"]
        found = session.log().count(FILLED_AGAIN)
        report.promise("each damage is named once", found == injected, f"{found} lines for {injected}")
        report.promise("the engine serves", wait_for(session.ready, 30))


def _to_nan(weight: bytes) -> bytes:
    return struct.pack("<f", float("nan"))


def _flip(weight: bytes) -> bytes:
    """Returns the sign, and the second highest bit of the fraction: outputs stay finite."""
    return bytes([*weight[:2], weight[2] ^ 0x20, weight[3] ^ 0x80])


def _damage(session: Session, slots: Slots, chosen: random.Random, what: str, *how: object) -> float:
    """Returns the seconds until a log line says that it is repaired."""
    before, begin = session.log().count(FILLED_AGAIN), time.monotonic()
    if not slots.damage(chosen, *how):  # type: ignore[arg-type]
        session.report.promise("the engine's memory has the expert", False, what)
        return 0.0
    note_damage(session, what)
    wait_for(lambda: session.log().count(FILLED_AGAIN) > before, INTERVAL_S + 6 * LATE_S)
    return time.monotonic() - begin


def _nan(
    session: Session,
    slots: Slots,
    cases: Sequence[GreedyCase],
    duration_s: float,
    period_s: float,
    chosen: random.Random,
) -> None:
    """The step that meets it is not answered."""
    with greedy_load(session, cases) as load:
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            _damage(session, slots, chosen, "NaN in a slot", _to_nan, 1)
            time.sleep(period_s)
    promise_unharmed(session.report, load, "NaN")
