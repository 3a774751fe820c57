"""Packed experts in a file: one layout for C++ and Python, the same bits after a restart, no wrong ones."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.supervisor.weight_files import free_reserved_bytes
from moebius import _kernels
from moebius.kernels import DamagedExpert, ExpertEngine, SegmentSettings, weight_segment
from moebius.kernels.weight_segment import WeightSegment, WeightSegmentError, segment_path
from tests.helpers.moe_golden import random_expert

HIDDEN, INTERMEDIATE, LAYERS, EXPERTS, FIRST = 24, 20, 3, 4, 2
HELD: Mapping[int, Sequence[int]] = {0: (2, 3, 4, 5), 2: (3, 5)}
IDENTITY = "checkpoint=0123\nexpert_dtype=keep\n"
MIB2 = 2 << 20
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
# MADV_COLLAPSE of shared memory came with Linux 6.1; "deny" forbids it.
COLLAPSES = (
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 1)
    and SHMEM_ENABLED.exists()
    and "[deny]" not in SHMEM_ENABLED.read_text()
)


@pytest.fixture
def path(shared_directory: Path) -> Path:
    return segment_path(str(shared_directory), 0)


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """In memory, where 2 MiB pages and holes exist."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def make(path: Path, **changed: Any) -> ExpertEngine:
    segment = {"identity": IDENTITY, "held": HELD, "intermediate_begin": 40}
    segment.update({name: changed.pop(name) for name in list(changed) if name in segment})
    options: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_layers": LAYERS,
        "expert_begin": FIRST,
        "weight_format": ["float32", "float32", "int8"],
        "num_threads": 1,
        **changed,
    }
    return ExpertEngine(**options, segment=SegmentSettings(str(path), **segment))  # type: ignore[arg-type]


def expert(layer: int, number: int) -> tuple[Any, Any, Any]:
    return random_expert(np.random.default_rng(layer * 100 + number), HIDDEN, INTERMEDIATE)


def load(engine: ExpertEngine, held: Mapping[int, Sequence[int]] = HELD) -> ExpertEngine:
    for layer, numbers in held.items():
        for number in numbers:
            if engine.segment_error(layer, number) is None:
                engine.load_expert(layer, number, *expert(layer, number))
    return engine


def outputs(engine: ExpertEngine) -> list[bytes]:
    rng = np.random.default_rng(7)
    found = []
    for layer, numbers in HELD.items():
        rows = rng.standard_normal((5, HIDDEN)).astype(np.float32)
        ids = np.array([numbers[:2]] * 5, np.int32)
        found.append(engine.forward(layer, rows, ids, np.full((5, 2), 0.5, np.float32)).tobytes())
    return found


def finished(path: Path, **changed: Any) -> list[bytes]:
    """Returns the outputs of a server that loads everything, and ends."""
    engine = load(make(path, **changed))
    engine.finish_load("the record")
    return outputs(engine)


def test_python_reads_what_cpp_writes() -> None:
    """Every field of every structure, the reserved ones too, lies where the other side has it."""
    mirror = {
        "Header": weight_segment.HEADER,
        "LayerRecord": weight_segment.LAYER_RECORD,
        "ExpertRecord": weight_segment.EXPERT_RECORD,
    }
    for name, (size, fields) in _kernels.weight_segment_layout().items():
        dtype = mirror.pop(name)
        assert dtype.fields is not None
        assert dtype.itemsize == size
        assert {field: (at, kind.itemsize) for field, (kind, at, *_) in dtype.fields.items()} == fields
    assert not mirror
    assert weight_segment.ABI_VERSION == _kernels.WEIGHT_SEGMENT_ABI_VERSION


def test_a_reader_finds_every_expert(path: Path) -> None:
    """Experts are found by layer and slot, with formats and channels; layers begin at 2 MiB, no other user
    reads the file.
    """
    engine = load(make(path))
    segment = WeightSegment.open(path)
    assert (segment.identity, segment.generation, segment.is_complete) == (IDENTITY, 1, False)
    engine.finish_load("the record")
    assert segment.is_complete
    assert segment.load_record == "the record"
    assert path.stat().st_mode & 0o777 == 0o600
    assert segment.data.ctypes.data % MIB2 == 0
    assert {layer: found.experts for layer, found in segment.layers.items()} == dict(HELD)
    assert segment.layers[2].gate_up_format == "int8"
    assert not segment.layers[2].has_bias
    for layer, found in segment.layers.items():
        assert found.offset % MIB2 == 0
        assert (found.hidden_size, found.intermediate_begin, found.intermediate_end) == (HIDDEN, 40, 60)
        for slot, number in enumerate(found.experts):
            begin = found.offset + slot * found.expert_bytes
            packed = segment.data[begin : begin + found.expert_bytes]
            np.testing.assert_array_equal(packed, engine.packed_expert(layer, number))


def test_a_restarted_server_computes_the_same_bits(path: Path) -> None:
    """It has every expert at once, the digest and the errors, and may not load any again."""
    first = load(make(path))
    first.calibrate()
    first.finish_load("the record")
    plan = [(row.kernel, row.nanoseconds) for row in first.plan()]
    expected, digest, error = outputs(first), first.weights_digest, first.segment_error(2, 5)
    del first
    second = make(path)
    assert second.segment_state == "complete"
    assert second.restore_plan(plan)
    assert [(row.kernel, row.nanoseconds) for row in second.plan()] == plan
    assert outputs(second) == expected
    assert second.weights_digest == digest
    assert second.segment_error(2, 5) == error
    assert all(second.verify_expert(layer, number) for layer in HELD for number in HELD[layer])
    assert WeightSegment.open(path).generation == 1
    with pytest.raises(ValueError, match="loaded already"):
        second.load_expert(0, 2, *expert(0, 2))


def test_a_plan_that_does_not_fit_changes_nothing(path: Path) -> None:
    """Another number of rows, or a kernel that is no candidate there."""
    engine = make(path)
    plan = [(row.kernel, row.nanoseconds) for row in engine.plan()]
    assert not engine.restore_plan(plan[1:])
    assert not engine.restore_plan([*plan[:-1], ("none of ours", 1.0)])
    assert [(row.kernel, row.nanoseconds) for row in engine.plan()] == plan


def poke(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def spoil(path: Path, what: str) -> dict[str, Any]:
    """Changes the file, or returns what the next server is started with."""
    fields = weight_segment.HEADER.fields
    assert fields is not None
    if what == "abi":
        poke(path, fields["abi_version"][1], (99).to_bytes(4, "little"))
    elif what == "boot":
        poke(path, fields["boot_id"][1], b"another")
    elif what == "record":
        begin = int(WeightSegment.open(path)._header["load_record_offset"])
        poke(path, begin, b"THE")
    elif what == "truncated":
        os.truncate(path, path.stat().st_size - MIB2)
    elif what == "short":
        os.truncate(path, 100)
    elif what == "broken off":
        poke(path, 0, bytes(8))
    else:
        options: dict[str, dict[str, Any]] = {
            "model": {"identity": IDENTITY.replace("0123", "4567")},
            "slice": {"intermediate_begin": 60},
            "experts": {"held": {0: (2, 3, 4, 5), 2: (3, 4)}},
            "format": {"weight_format": ["float32", "float32", "int8_w8a8"]},
        }
        return options[what]
    return {}


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("abi", "abi_version is 99, expected 6"),
        ("boot", "before the machine was rebooted"),
        ("record", "the checksum of its load record is wrong"),
        ("truncated", r"it is truncated: \d+ bytes"),
        ("short", "it is truncated: 100 bytes"),
        ("broken off", "its making was broken off"),
        ("model", "it holds other weights: checkpoint=0123, expected checkpoint=4567"),
        ("slice", "intermediate_begin is 40, expected 60"),
        ("experts", "an expert's id is 5, expected 4"),
        ("format", "layer 2 is stored differently"),
    ],
)
def test_what_differs_is_named_and_reloaded(path: Path, what: str, reason: str) -> None:
    """Nothing of it is used, and a reader learns of it by the generation."""
    finished(path)
    changed = spoil(path, what)
    engine = make(path, **changed)
    assert engine.segment_state == "replaced"
    assert re.search(reason, engine.segment_difference), engine.segment_difference
    held = changed.get("held", HELD)
    assert all(engine.segment_error(layer, number) is None for layer in held for number in held[layer])
    engine.load_expert(0, 2, *expert(0, 2))
    segment = WeightSegment.open(path)
    assert not segment.is_complete
    assert segment.generation == (1 if what == "short" else 2)
    load(engine, held).finish_load("")
    assert segment.is_complete


def test_who_packs_nothing_replaces_nothing(path: Path) -> None:
    """A server of another model that the mailbox sends away leaves what the others use."""
    expected = finished(path)
    intruder = make(path, identity="checkpoint=4567\n")
    assert intruder.segment_state == "replaced"
    del intruder
    segment = WeightSegment.open(path)
    assert (segment.identity, segment.generation, segment.is_complete) == (IDENTITY, 1, True)
    assert outputs(make(path)) == expected


@pytest.mark.skipif(free_reserved_bytes() < 8 * MIB2, reason="no reserved 2 MiB pages (vm.nr_hugepages)")
def test_reserved_pages_are_used_like_any_others() -> None:
    """A file on hugetlbfs: all of it in 2 MiB pages, used again, replaced, and read without harm."""
    descriptor = os.memfd_create("segment", os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    try:
        path = Path(f"/proc/self/fd/{descriptor}")
        expected = finished(path)
        for _ in range(50):
            assert WeightSegment.open(path).is_complete
        engine = make(path)
        assert engine.segment_state == "complete"
        assert outputs(engine) == expected
        assert engine.huge_page_bytes() == engine.packed_bytes == 2 * MIB2
        del engine
        assert finished(path, identity="checkpoint=4567\n") == expected
        assert WeightSegment.open(path).generation == 2
    finally:
        os.close(descriptor)


def test_what_is_no_segment_is_left_alone(path: Path) -> None:
    """Somebody's file of that name is not overwritten; nor is a directory."""
    path.write_bytes(b"a letter" * 2**19)
    with pytest.raises(RuntimeError, match="the file is something else; delete it"):
        make(path)
    assert path.read_bytes()[:8] == b"a letter"
    with pytest.raises(WeightSegmentError, match="something else"):
        WeightSegment.open(path)


def test_a_second_server_is_refused_by_name(path: Path) -> None:
    """Two that write one file would mix their weights; the first one's end lets the second in."""
    engine = make(path)
    with pytest.raises(RuntimeError, match=f"{path.name}: another expert server uses this file"):
        make(path)
    del engine
    assert make(path).segment_state == "new"


def test_damage_is_found_and_reloaded(path: Path) -> None:
    """The one expert is missing afterwards, readers see another generation, its successor packs it alone."""
    expected = finished(path)
    segment = WeightSegment.open(path)
    at = segment.layers[0].offset + segment.layers[0].expert_bytes + 5
    engine = make(path)
    segment.data[at] ^= 1
    assert engine.verify_expert(0, 2)
    assert not engine.verify_expert(0, 3)
    assert not segment.is_complete
    assert segment.generation == 2
    del engine
    successor = make(path)
    assert successor.segment_state == "partial"
    assert successor.segment_error(0, 3) is None
    assert successor.segment_error(0, 2) is not None
    load(successor).finish_load("")
    assert outputs(successor) == expected
    assert successor.verify_expert(0, 3)


def test_damage_is_repaired_in_place(path: Path) -> None:
    """Readers see an incomplete segment, then another generation that is complete; a successor finds all."""
    expected = finished(path)
    segment = WeightSegment.open(path)
    at = segment.layers[0].offset + segment.layers[0].expert_bytes + 5
    engine = make(path)
    segment.data[at] ^= 1
    assert not engine.verify_expert(0, 3)
    assert not segment.is_complete
    assert engine.repair_expert(0, 3, *expert(0, 3))
    assert (segment.is_complete, segment.generation) == (True, 2)
    assert segment.load_record == "the record"
    assert outputs(engine) == expected
    del engine
    assert make(path).segment_state == "complete"


def test_what_a_predecessor_packed_is_compared_before_its_first_use(path: Path) -> None:
    """A start that finds packed experts answers with none of them unseen, and says when it has seen all."""
    expected = finished(path)
    segment = WeightSegment.open(path)
    assert segment.is_checked
    segment.data[segment.layers[2].offset + 9] ^= 32
    engine = make(path)
    assert not segment.is_checked
    with pytest.raises(DamagedExpert, match="layer 2: expert 3 is damaged in memory"):
        outputs(engine)
    assert engine.wait_for_damage(0.0) == (2, 3)
    assert engine.repair_expert(2, 3, *expert(2, 3))
    assert outputs(engine) == expected
    assert not segment.is_checked  # layer 0 has experts that were not asked for
    assert all(engine.verify_expert(layer, number) for layer in HELD for number in HELD[layer])
    assert segment.is_checked


def test_a_damaged_table_is_not_believed(path: Path) -> None:
    """Or checksums in it would make sound experts look damaged, for ever."""
    expected = finished(path)
    segment = WeightSegment.open(path)
    table = segment._table("experts_offset", weight_segment.EXPERT_RECORD, "num_experts")
    table["digest"][1] ^= 1
    engine = make(path)
    assert engine.segment_difference == "the checksum of its table of experts is wrong"
    load(engine).finish_load("")
    assert outputs(engine) == expected


def test_an_incomplete_load_is_not_finished(path: Path) -> None:
    """Readers would take memory without weights for experts."""
    engine = make(path)
    engine.load_expert(0, 2, *expert(0, 2))
    with pytest.raises(ValueError, match="expert 3 is not loaded"):
        engine.finish_load("")
    assert not WeightSegment.open(path).is_complete


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"identity": "x" * 1024}, "the identity has 1024 bytes; allowed are 1023"),
        ({"held": {0: (3, 2)}}, "can not hold expert 2 in this place"),
        ({"held": {0: (6,)}}, "can not hold expert 6"),
    ],
)
def test_impossible_settings_are_named(path: Path, changed: dict[str, Any], message: str) -> None:
    """Before a file is made."""
    with pytest.raises(ValueError, match=message):
        make(path, **changed)
    assert not path.exists()


LOADS_TWO_AND_STOPS = """
import os, sys
from pathlib import Path
from tests.kernels.test_weight_segment import HELD, expert, make
engine = make(Path(sys.argv[1]))
for layer, number in [(0, 4), (2, 3)]:
    engine.load_expert(layer, number, *expert(layer, number))
print("loaded", flush=True)
sys.stdin.read()
"""


def test_a_killed_load_is_gone_on_with(path: Path) -> None:
    """What was packed before SIGKILL stays packed; with the rest loaded, outputs are those of one load."""
    program = [sys.executable, "-c", LOADS_TWO_AND_STOPS, str(path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "loaded\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
    engine = make(path)
    packed = [(layer, n) for layer in HELD for n in HELD[layer] if engine.segment_error(layer, n) is not None]
    assert engine.segment_state == "partial"
    assert packed == [(0, 4), (2, 3)]
    load(engine).finish_load("")
    assert WeightSegment.open(path).generation == 1
    found = outputs(engine)
    del engine
    path.unlink()
    assert finished(path) == found


def test_after_loading_the_server_can_not_write(path: Path) -> None:
    """A stray write ends the process that makes it, instead of changing what all compute with."""
    finished(path)
    program = f"""
import ctypes
from pathlib import Path
from tests.kernels.test_weight_segment import make
engine = make(Path({str(path)!r}))
ctypes.memset(engine.packed_expert(0, 2).ctypes.data, 1, 1)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    assert make(path).verify_expert(0, 2)


def test_memory_is_bound_and_in_large_pages(path: Path) -> None:
    """Memory is on the node that was asked for; large layers are in pages of 2 MiB where the system can make
    them.
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 256, "weight_format": "float32", "numa_node": 0}
    engine = make(path, held={0: (2, 3), 1: (2,)}, num_layers=2, **sizes)
    for layer, number in ((0, 2), (0, 3), (1, 2)):
        engine.load_expert(layer, number, *random_expert(np.random.default_rng(0), 1024, 256))
    assert engine.packed_bytes == 10 << 20  # 6 MiB, and 3 MiB rounded up
    assert WeightSegment.open(path).numa_node == 0
    begin = engine.packed_expert(0, 2).ctypes.data
    if engine.numa_bound:  # containers may forbid it
        assert set(_kernels.page_nodes(begin, 6 << 20)) == {0}
    assert 0 <= engine.huge_page_bytes() <= engine.packed_bytes
    if COLLAPSES:
        assert engine.huge_page_bytes() > 0


def test_a_file_on_a_disk_is_distinguished_from_memory(path: Path, tmp_path: Path) -> None:
    """tmpfs is memory; what pytest gives may be either, as the system says."""
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True
    ).stdout
    assert make(path).segment_in_memory
    assert make(segment_path(str(tmp_path), 0)).segment_in_memory is (kind.strip() == "tmpfs")


def test_without_a_segment_nothing_changes() -> None:
    """Memory is private; the calls of segments do nothing."""
    engine = ExpertEngine(HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, weight_format="float32", num_threads=1)
    engine.load_expert(0, 1, *expert(0, 1))
    engine.finish_load("")
    assert engine.segment_state is None
    assert engine.segment_difference == ""
    assert engine.segment_error(0, 1) is None
    assert engine.verify_expert(0, 1)


def test_reading_what_is_not_there_is_one_line(path: Path) -> None:
    """A file that is missing, empty, of another version or cut off."""
    with pytest.raises(WeightSegmentError, match=r"expert-0\.weights cannot be mapped: No such file"):
        WeightSegment.open(path)
    path.touch()
    with pytest.raises(WeightSegmentError, match="0 bytes are none yet"):
        WeightSegment.open(path)
    path.unlink()
    finished(path)
    for what, reason in (("abi", "version 99 of the layout, expected 6"), ("truncated", "truncated")):
        spoil(path, what)
        with pytest.raises(WeightSegmentError, match=reason):
            WeightSegment.open(path)
        finished(path)


@settings(deadline=None)
@given(data=st.data())
def test_any_history_ends_in_the_same_weights(data: st.DataObject) -> None:
    """Servers load some experts, crash, find damage or another model, in any order.

    Readers never see `complete` with an expert missing or bytes other than those of one undisturbed load, and
    the generation only grows.
    """
    wanted = sorted((layer, n) for layer in HELD for n in HELD[layer])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path, last = segment_path(directory, 0), 0
        expected = finished(segment_path(directory, 1))
        kept, packed = IDENTITY, set[tuple[int, int]]()
        for _ in range(data.draw(st.integers(1, 5))):
            identity = data.draw(st.sampled_from([kept, kept, IDENTITY, IDENTITY + "x=1\n"]))
            engine = make(path, identity=identity)
            here = set(packed) if identity == kept else set()
            assert {key for key in wanted if engine.segment_error(*key) is not None} == here
            for key in data.draw(st.lists(st.sampled_from(wanted), unique=True)):
                if key not in here:
                    engine.load_expert(*key, *expert(*key))
                    here.add(key)
                    kept, packed = identity, here
            if identity == kept and len(packed) == len(wanted) and data.draw(st.booleans()):
                engine.finish_load("")
                assert outputs(engine) == expected
            if identity == kept and packed and data.draw(st.sampled_from([False, False, True])):
                damage(path, data, sorted(packed), engine, packed)
            if packed:
                segment = WeightSegment.open(path)
                assert segment.generation >= last
                assert not segment.is_complete or len(packed) == len(wanted)
                last = segment.generation
            del engine


def damage(
    path: Path, data: st.DataObject, known: list[tuple[int, int]], engine: ExpertEngine, packed: set[Any]
) -> None:
    """Changes a byte of an expert, which the server notices."""
    segment = WeightSegment.open(path)
    layer, number = data.draw(st.sampled_from(known))
    place = segment.layers[layer]
    begin = place.offset + place.experts.index(number) * place.expert_bytes
    segment.data[begin + data.draw(st.integers(0, place.expert_bytes - 1))] ^= data.draw(st.integers(1, 255))
    generation = segment.generation
    assert not engine.verify_expert(layer, number)
    packed.discard((layer, number))
    assert not segment.is_complete
    assert segment.generation > generation


def mapped_and_resident(path: Path) -> tuple[int, int]:
    """Returns the bytes that this process has mapped of the file, and those whose pages it has touched."""
    sizes, resident, ours = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key in ("Size", "Rss") and ours:
            amount = int(rest.split()[0]) * 1024
            sizes, resident = (sizes + amount, resident) if key == "Size" else (sizes, resident + amount)
        elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
    return sizes, resident


@pytest.mark.parametrize(("layers", "experts"), [(3, 2), (94, 512)])
def test_attaching_touches_no_weights(path: Path, layers: int, experts: int) -> None:
    """What a successor reads is the table, of 50 MB and of 500 GB: no page of data is mapped, or even made.

    One expert is packed; the others are said to be, and are holes of the file.
    """
    held = {0: (0,)} | dict.fromkeys(range(1, layers), tuple(range(experts)))
    shape = {
        "hidden_size": 4096, "intermediate_size": 1536, "num_experts": experts, "num_layers": layers,
        "expert_begin": 0, "weight_format": "int4_g32", "held": held,
    }  # fmt: skip
    first = make(path, **shape)
    first.load_expert(0, 0, *random_expert(np.random.default_rng(0), 4096, 1536))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4 << 20) as begin:
        header = np.frombuffer(begin, weight_segment.HEADER, 1)[0]
        at, count = int(header["experts_offset"]), int(header["num_experts"])
        table = np.frombuffer(begin, weight_segment.EXPERT_RECORD, count, at)
        table["state"] = 1
        del header, table
    first.finish_load("the record")
    del first
    made = path.stat().st_blocks
    second = make(path, **shape)
    assert second.segment_state == "complete"
    assert second.segment_error(layers - 1, experts - 1) is not None
    total, data = path.stat().st_size, int(WeightSegment.open(path).layers[0].offset)
    mapped, resident = mapped_and_resident(path)
    assert mapped >= total > (layers - 1) * experts * (10 << 20)
    assert resident <= 2 * data
    assert path.stat().st_blocks == made
