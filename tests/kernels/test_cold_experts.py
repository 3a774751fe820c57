"""Experts that stay in a file: the same bits as with all in memory, whatever is read, evicted or damaged."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.kernels import DamagedExpert, ExpertEngine, SegmentError, SegmentSettings
from moebius.kernels.weight_segment import WeightSegment
from tests.helpers.damaged_memory import repairer
from tests.helpers.moe_golden import random_expert

# An expert takes 160 KiB as float32, 80 KiB as bfloat16: neither a multiple of a block of the disk.
HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, FIRST = 96, 144, 12, 2, 3
HELD = {0: range(FIRST, FIRST + EXPERTS), 1: (4, 5, 9, 10, 12)}
FORMATS = ["float32", "bfloat16"]


def expert(layer: int, number: int) -> tuple[Any, Any, Any]:
    return random_expert(np.random.default_rng(layer * 100 + number), HIDDEN, INTERMEDIATE)


def make(path: Path | None, slot_bytes: int, **changed: Any) -> ExpertEngine:
    segment = SegmentSettings(str(path), "model=a\n", HELD, slot_bytes=slot_bytes) if path else None
    options: dict[str, Any] = {"weight_format": FORMATS, "num_threads": 2, "expert_begin": FIRST, **changed}
    return ExpertEngine(HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, **options, segment=segment)


def load(engine: ExpertEngine) -> ExpertEngine:
    for layer, numbers in HELD.items():
        for number in numbers:
            if engine.segment_error(layer, number) is None:
                engine.load_expert(layer, number, *expert(layer, number))
    engine.finish_load("record")
    return engine


# Five of the first layer's twelve experts, and three of the other's five.
FEW = 5 * (160 << 10) + 3 * (80 << 10) + (200 << 10)


def forward(engine: ExpertEngine, layer: int, ids: Any, dtype: Any = np.float32) -> bytes:
    chosen = np.array(ids, np.int32)
    rng = np.random.default_rng(int(chosen.sum()) + chosen.size)  # -1 is no expert
    rows = rng.standard_normal((len(chosen), HIDDEN)).astype(np.float32)
    hidden: Any = rows if dtype is np.float32 else (rows.view(np.uint32) >> 16).astype(np.uint16)
    weights = rng.random(chosen.shape).astype(np.float32)
    return engine.forward(layer, hidden, chosen, weights).tobytes()


@pytest.fixture(scope="module")
def whole() -> ExpertEngine:
    """All experts in memory."""
    return load(make(None, 0))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all experts, that no engine has open."""
    path = tmp_path_factory.mktemp("cold") / "experts"
    load(make(path, FEW))
    return path


@pytest.fixture
def own_file(file: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    path = tmp_path / "experts"
    path.write_bytes(file.read_bytes())
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def cold(file: Path) -> ExpertEngine:
    """An engine over `file`, with what tests before have left in its slots."""
    engine = make(file, FEW)
    assert engine.segment_state == "complete"
    return engine


def test_memory_holds_a_share_of_each_layer(cold: ExpertEngine, tmp_path: Path) -> None:
    """The budget is kept, and divided by what layers take; only slots count as memory."""
    cold.fill_slots()
    found = cold.cold_slots
    assert found is not None
    assert found[0][0] in (4, 5)
    assert found[0][1] == 3
    assert cold.packed_bytes <= FEW + 2 * (2 << 20), "slots are rounded up to pages of 2 MiB"
    with pytest.raises(ValueError, match="3 of each layer take"):
        make(tmp_path / "experts", 1 << 10)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2**32), st.booleans()), min_size=1, max_size=6))
def test_outputs_have_the_same_bits(
    cold: ExpertEngine, whole: ExpertEngine, calls: list[tuple[int, int, bool]]
) -> None:
    """Whichever experts are in slots, missed, evicted between calls, or more than there are slots."""
    for layer, seed, narrow in calls:
        rng = np.random.default_rng(seed)
        rows, top_k = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        ids = rng.choice([-1, FIRST - 1, *HELD[layer]], (rows, top_k))
        dtype = np.uint16 if narrow else np.float32
        assert forward(cold, layer, ids, dtype) == forward(whole, layer, ids, dtype)


def test_a_call_may_need_more_experts_than_there_are_slots(cold: ExpertEngine, whole: ExpertEngine) -> None:
    """It is computed in turns: all twelve experts with four slots, from rows that need one of each."""
    before = cold.stats()
    ids = np.arange(FIRST, FIRST + EXPERTS).reshape(4, 3)
    assert forward(cold, 0, ids) == forward(whole, 0, ids)
    after = cold.stats()
    assert after.cold_used - before.cold_used == EXPERTS
    assert after.cold_missed - before.cold_missed >= EXPERTS - 5
    assert after.cold_read_bytes > before.cold_read_bytes


def test_what_is_used_most_stays(own_file: Path) -> None:
    """Experts of every call are not evicted by others that come once each."""
    engine = make(own_file, FEW)
    for number in HELD[0]:
        for _ in range(5):
            forward(engine, 0, [[4, 5]])
        forward(engine, 0, [[number]])
    before = engine.stats().cold_missed
    forward(engine, 0, [[4, 5]])
    assert engine.stats().cold_missed == before


def test_threads_that_compute_verify_and_wait_agree(cold: ExpertEngine, whole: ExpertEngine) -> None:
    """Callers wait for one another; comparing checksums meanwhile keeps an expert in its slot."""
    wrong, stop = list[str](), threading.Event()

    def verify() -> None:
        while not stop.is_set():
            wrong.extend(f"expert {number}" for number in HELD[0] if not cold.verify_expert(0, number))

    def compute(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            ids = rng.choice(list(HELD[0]), (2, 3))
            if forward(cold, 0, ids) != forward(whole, 0, ids):
                wrong.append(str(ids))

    verifier = threading.Thread(target=verify)
    callers = [threading.Thread(target=compute, args=(seed,)) for seed in range(3)]
    for thread in (verifier, *callers):
        thread.start()
    for thread in callers:
        thread.join()
    stop.set()
    verifier.join()
    assert not wrong


def test_a_restart_packs_nothing_again_and_another_identity_everything(own_file: Path) -> None:
    """Also after a reboot: the file was written through before it was said to be complete."""
    content = own_file.read_bytes()
    at = content.index(Path("/proc/sys/kernel/random/boot_id").read_bytes().strip())
    with own_file.open("r+b") as written:
        written.seek(at)
        written.write(b"0" * 36)
    assert make(own_file, FEW).segment_state == "complete"
    assert make(own_file, 0).segment_state == "replaced", "memory of before a reboot is not trusted"


def damage(path: Path, how: str) -> None:
    """The last expert of the first layer and what follows it, or one byte in its middle."""
    segment = WeightSegment.open(path)
    layer = segment.layers[0]
    segment.close()
    offset = layer.offset + (len(HELD[0]) - 1) * layer.expert_bytes
    if how == "truncated":
        os.truncate(path, offset + 100)
        return
    with path.open("r+b") as file:
        file.seek(offset + layer.expert_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(("how", "why"), [("changed", "checksum differs"), ("truncated", "ended")])
def test_what_can_not_be_read_is_packed_again(
    own_file: Path, whole: ExpertEngine, how: str, why: str
) -> None:
    """No answer is computed with it, calls that do not need it go on, and the file is whole again."""
    engine = make(own_file, FEW)
    damage(own_file, how)
    last = FIRST + EXPERTS - 1
    with pytest.raises(DamagedExpert, match=f"expert {last} is damaged"):
        forward(engine, 0, [[4, last]])
    assert str(own_file) in engine.read_problem
    assert why in engine.read_problem
    assert forward(engine, 0, [[4, 5]]) == forward(whole, 0, [[4, 5]])
    with repairer(engine, expert) as repaired:
        assert forward(engine, 0, [[4, last]]) == forward(whole, 0, [[4, last]])
    assert (0, last) in repaired
    del engine
    again = make(own_file, FEW)
    # What followed it in the file is lost, too, and the file as short as its last expert.
    assert again.segment_state == ("complete" if how == "changed" else "replaced")
    assert forward(load(again), 0, [[last]]) == forward(whole, 0, [[last]])


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    """Packing stops at the first expert that finds no room; the message says how much there is."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = make(tmp_path / "experts", FEW)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, kept[1]))
    try:
        with pytest.raises(SegmentError, match=r"experts can not be written to: File too large|no room"):
            load(engine)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
