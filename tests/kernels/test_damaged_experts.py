"""Guards what is computed while memory changes packed experts: no answer was computed with them."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius import _kernels
from moebius.kernels import DamagedExpert, ExpertEngine
from tests.helpers.damaged_memory import repairer
from tests.helpers.moe_golden import random_expert

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 24, 20, 4, 2


def expert(layer: int, number: int) -> tuple[Any, Any, Any]:
    return random_expert(np.random.default_rng(layer * 100 + number), HIDDEN, INTERMEDIATE)


@pytest.fixture
def engine() -> ExpertEngine:
    """In memory of its own, all experts loaded."""
    made = ExpertEngine(HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, weight_format="float32", num_threads=2)
    for layer in range(LAYERS):
        for number in range(EXPERTS):
            made.load_expert(layer, number, *expert(layer, number))
    return made


def forward(engine: ExpertEngine, layer: int, *chosen: int) -> bytes:
    rows = np.random.default_rng(7).standard_normal((3, HIDDEN)).astype(np.float32)
    ids = np.array([chosen] * 3, np.int32)
    return engine.forward(layer, rows, ids, np.full(ids.shape, 0.5, np.float32)).tobytes()


def flip(engine: ExpertEngine, layer: int, number: int, bit: int = 4) -> None:
    """Flips a bit as a cosmic ray would."""
    address = engine.packed_expert(layer, number).ctypes.data + 37
    ctypes.c_uint8.from_address(address).value ^= bit


def put_nan(engine: ExpertEngine, layer: int, number: int) -> None:
    """In place of a weight of the gate or up matrix."""
    address = engine.packed_expert(layer, number).ctypes.data + 64
    ctypes.c_float.from_address(address).value = float("nan")


def test_checksums_are_the_same_on_every_machine() -> None:
    """They lie in segments, and in what engines compare between servers of several hosts."""
    data = bytes(range(256)) * 3
    assert _kernels.weight_digest(b"", 0) == 0xAE15B953F02F63C9
    assert _kernels.weight_digest(data, 0) == 0xBBB35AC9B7A71ADB
    assert _kernels.weight_digest(data[:77], 5) == 0xC9CECBE221CD3982


@given(
    st.binary(min_size=1, max_size=200),
    st.integers(0, 2**64 - 1),
    st.data(),
)
def test_every_bit_and_its_place_count(data: bytes, seed: int, draw: st.DataObject) -> None:
    """One flipped bit is always found; so is another order of two different words, and another seed."""
    digest = _kernels.weight_digest(data, seed)
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    assert _kernels.weight_digest(bytes(changed), seed) != digest
    assert _kernels.weight_digest(data, seed ^ 1) != digest
    if len(data) >= 16 and data[:8] != data[8:16]:
        assert _kernels.weight_digest(data[8:16] + data[:8] + data[16:], seed) != digest


def test_without_anybody_to_repair_it_a_damaged_expert_is_refused(engine: ExpertEngine) -> None:
    """The expert is refused by name; what does not need it is computed, and what needs it is again once it is
    repaired.
    """
    expected, other = forward(engine, 1, 2), forward(engine, 1, 0, 3)
    flip(engine, 1, 2)
    assert not engine.verify_expert(1, 2)
    with pytest.raises(DamagedExpert, match="layer 1: expert 2 is damaged in memory: its checksum differs"):
        forward(engine, 1, 2, 0)
    assert forward(engine, 1, 0, 3) == other
    assert engine.wait_for_damage(0.0) == (1, 2)
    assert engine.wait_for_damage(0.0) is None
    assert engine.repair_expert(1, 2, *expert(1, 2))
    assert forward(engine, 1, 2) == expected
    assert engine.verify_expert(1, 2)
    stats = engine.stats()
    assert (stats.damaged_experts, stats.repaired_experts) == (1, 1)
    assert stats.verified_bytes == 2 * engine.packed_expert(1, 2).nbytes


def test_a_repair_takes_only_what_was_packed_before(engine: ExpertEngine) -> None:
    """Other weights are no repair, a sound expert needs none; a call that needs it gets the reason."""
    flip(engine, 0, 1)
    assert not engine.verify_expert(0, 1)
    assert not engine.repair_expert(0, 1, *expert(0, 2))
    engine.give_up_expert(0, 1, "the checkpoint is gone")
    engine.expect_repairs(True)
    with pytest.raises(DamagedExpert, match="layer 0: expert 1 is damaged in memory: the checkpoint is gone"):
        forward(engine, 0, 1)
    with pytest.raises(ValueError, match="layer 0: expert 2 is not damaged"):
        engine.repair_expert(0, 2, *expert(0, 2))
    assert engine.repair_expert(0, 1, *expert(0, 1))
    forward(engine, 0, 1)


def test_a_call_waits_for_the_repair(engine: ExpertEngine) -> None:
    """And answers what it would have without the damage."""
    expected = forward(engine, 0, 1, 2)
    flip(engine, 0, 2)
    assert not engine.verify_expert(0, 2)
    with repairer(engine, expert) as repaired:
        assert forward(engine, 0, 1, 2) == expected
    assert repaired == [(0, 2)]


def test_nan_in_memory_never_gets_out(engine: ExpertEngine) -> None:
    """Whichever experts it hits and whenever: the call that met it computes again."""
    chosen = [
        (layer, (number, (number + 1) % EXPERTS)) for layer in range(LAYERS) for number in range(EXPERTS)
    ]
    expected = [forward(engine, layer, *numbers) for layer, numbers in chosen]
    damaged = threading.Event()

    def damage() -> None:
        rng = np.random.default_rng(3)
        for _ in range(200):
            put_nan(engine, int(rng.integers(LAYERS)), int(rng.integers(EXPERTS)))
        damaged.set()

    with repairer(engine, expert) as repaired:
        put_nan(engine, 1, 3)
        thread = threading.Thread(target=damage)
        thread.start()
        while not damaged.is_set():
            assert [forward(engine, layer, *numbers) for layer, numbers in chosen] == expected
        thread.join()
        assert [forward(engine, layer, *numbers) for layer, numbers in chosen] == expected
    assert len(repaired) == engine.stats().repaired_experts >= 1


def test_an_output_that_overflows_is_no_damage(engine: ExpertEngine) -> None:
    """Sound experts are compared, and the values handed on as they are."""
    rows = np.full((1, HIDDEN), 3e38, np.float32)
    with repairer(engine, expert) as repaired:
        found = engine.forward(0, rows, np.array([[1]], np.int32), np.ones((1, 1), np.float32))
    assert not np.isfinite(found).all()
    assert repaired == []
