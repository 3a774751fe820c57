"""Guards what the tiers below the prefix tree hold: never another block than was stored under a name.

`TierMachine` drives a tree with tiers against pages whose bytes say which tokens they stand for, with disks
that fail, requests that are aborted, and steps that stay open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_service.cache.radix_cache import PrefixHandle, RadixCache
from gpu_service.cache.request_cache import PagePool, RequestCache
from gpu_service.cache.request_states import RequestStates, StatePool
from gpu_service.cache.tiers import disk_file, payloads
from gpu_service.cache.tiers.digests import identity_digest, page_digests, root_digest, state_key
from gpu_service.cache.tiers.disk_tier import DiskTier
from gpu_service.cache.tiers.mover import LoadItem, Mover, Speed
from gpu_service.cache.tiers.payloads import DevicePayloads, HostPayloads
from gpu_service.cache.tiers.prefix_tiers import PrefixTiers
from gpu_service.cache.tiers.ram_segment import RamSegment, slots_within
from gpu_service.cache.tiers.ram_tier import RamTier
from gpu_service.core.request import Request, SamplingParams
from gpu_service.core.step import Batch
from gpu_service.device.stream import HostDeviceStream
from moebius.errors import UserError

PAGE, PAGES, SLOTS = 2, 24, 9
PAGE_BYTES, STATE_BYTES = 32, 80
IDENTITY = identity_digest("a model")


def names(count: int, begin: int = 0) -> list[bytes]:
    """A chain of pages."""
    return page_digests(root_digest(IDENTITY, ""), np.arange(begin, begin + count * PAGE), PAGE)


def ram_tier(num_slots: int = 6, path: Path | None = None, identity: bytes = IDENTITY) -> RamTier:
    """Returns a tier of pages that take a slot each."""
    return RamTier(RamSegment(identity, 64, num_slots, path), 64, 160)


def put(tier: RamTier, key: bytes, parent: bytes, fill: int, tokens: int = PAGE) -> bool:
    """Stores a block of equal bytes."""
    if not tier.reserve(key, parent, tokens, tier.clock + 1):
        return False
    for view in tier.views(key):
        view[:] = fill
    tier.complete(key)
    return True


def test_names_depend_on_all_tokens_before_them_and_on_who_may_share() -> None:
    """A page's name is that of one prefix, of one namespace, of one identity."""
    root = root_digest(IDENTITY, "")
    tokens = np.arange(8)
    chain = page_digests(root, tokens, PAGE)
    assert len(set(chain)) == 4
    assert page_digests(chain[1], tokens[4:], PAGE) == chain[2:]
    assert page_digests(root, tokens[:7], PAGE) == chain[:3]
    others = [root_digest(IDENTITY, "salt"), root_digest(identity_digest("another"), "")]
    for other in others:
        assert not set(page_digests(other, tokens, PAGE)) & set(chain)
    assert not set(page_digests(root, tokens + 1, PAGE)) & set(chain)


def test_one_slow_copy_does_not_rule_out_a_tier() -> None:
    """A speed counts bytes rather than copies, and is forgotten when nothing was copied for a while."""
    now = [100.0]
    speed = Speed(lambda: now[0])
    assert speed.now is None
    speed.add(1_000, 1.0)
    assert speed.now == 1_000
    speed.add(1_000_000, 1.0)
    assert (speed.now or 0) > 500_000
    now[0] += 3600
    assert speed.now is None


def test_ram_gives_up_the_end_of_what_was_used_least_lately() -> None:
    """Never the middle of a prefix; a block that saves more tokens by byte stays longer."""
    tier, chain, other = ram_tier(), names(4), names(3, 100)
    root = root_digest(IDENTITY, "")
    for index, key in enumerate(chain):
        assert put(tier, key, ([root, *chain])[index], index)
    for index, key in enumerate(other[:2]):
        assert put(tier, key, ([root, *other])[index], 10 + index)
    tier.touch(reversed(chain))
    assert put(tier, other[2], other[1], 12)  # its own beginning is not given up for it
    assert [key in tier for key in chain] == [True, True, True, False]
    assert all(key in tier for key in other)
    tier.check_integrity()
    # A state of three slots goes for the last pages of both.
    assert put(tier, state_key(chain[0]), chain[0], 50, tokens=1000)
    assert chain[0] in tier
    assert sum(key in tier for key in [*chain, *other]) == 3
    tier.check_integrity()
    left = [key for key in [*chain, *other] if key in tier]
    for number in range(20):
        put(tier, names(1, 1000 + 10 * number)[0], root, 1)
    assert state_key(chain[0]) in tier, "it saves 1000 tokens, each page 2"
    assert not all(key in tier for key in left)


def test_what_is_read_or_filled_stays() -> None:
    """Pinned blocks are never given up; there is no room then, and nothing is lost by asking."""
    tier, root = ram_tier(2), root_digest(IDENTITY, "")
    first, second, third = (names(1, 10 * i)[0] for i in range(3))
    assert put(tier, first, root, 1)
    tier.pin([first])
    assert tier.reserve(second, root, PAGE, tier.clock + 1)
    assert second not in tier, "it is not filled yet"
    assert not put(tier, third, root, 3)
    tier.drop()
    assert first in tier
    tier.abandon(second)
    tier.unpin([first])
    tier.discard([first])
    assert len(tier) == 0
    tier.check_integrity()


def test_a_successor_finds_what_was_complete(tmp_path: Path) -> None:
    """It finds the blocks of its identity in their order of use, none that was half filled; else nothing."""
    path, chain, root = tmp_path / "engine.kv", names(3), root_digest(IDENTITY, "")
    tier = ram_tier(8, path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="in use by another engine"):
        ram_tier(8, path)
    for index, key in enumerate(chain):
        put(tier, key, ([root, *chain])[index], index + 1)
    put(tier, state_key(chain[1]), chain[1], 77)
    tier.reserve(names(1, 500)[0], root, PAGE, tier.clock + 1)
    tier.segment.close()
    # Another size that was asked for does not matter as long as there is something to keep.
    successor = ram_tier(5, path)
    assert len(successor) == 4
    assert [int(successor.views(key)[0][5]) for key in chain] == [1, 2, 3]
    assert [len(view) for view in successor.views(state_key(chain[1]))] == [64, 64, 32]
    assert all((view == 77).all() for view in successor.views(state_key(chain[1])))
    successor.check_integrity()
    successor.segment.close()
    assert len(ram_tier(8, path, identity_digest("another model"))) == 0


def test_a_segment_has_as_many_slots_as_fit() -> None:
    assert slots_within(0, 64) == 0
    segment = RamSegment(IDENTITY, 4096, slots_within(2**20, 4096))
    assert 2**20 - 3 * 4096 <= segment.data.nbytes <= 2**20
    with pytest.raises(UserError, match="less than a page"):
        RamSegment(IDENTITY, 64, 0)


def payload(fill: int, nbytes: int = 100) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Equal bytes."""
    return np.full(nbytes, fill, np.uint8)


def read(tier: DiskTier, key: bytes, nbytes: int = 100) -> int | None:
    """What the block is filled with; None: it is not here, or cannot be read."""
    record, into = tier.record(key), np.empty(nbytes, np.uint8)
    if record is None or not tier.read(record, into):
        return None
    assert (into == into[0]).all()
    return int(into[0])


def test_engines_share_a_directory(tmp_path: Path) -> None:
    """Each reads what the other has written, as it is written; other models' files are skipped."""
    first, second = (DiskTier(tmp_path / "kv", IDENTITY, 10**6) for _ in range(2))
    other = DiskTier(tmp_path / "kv", identity_digest("another model"), 10**6)
    keys = names(4)
    for index, key in enumerate(keys):
        assert (first, second)[index % 2].append(key, b"p" * 32, PAGE, payload(index))
        assert not (first, second)[index % 2].append(key, b"p" * 32, PAGE, payload(99))
    for tier in (first, second, other):
        tier.refresh()
    for tier in (first, second):
        assert [read(tier, key) for key in keys] == [0, 1, 2, 3]
    assert len(other) == 0
    for path in (tmp_path / "kv").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_hosts_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network's file system a lock needs a file that is open for writing, and a file that another host
    has removed is stale: its blocks are gone, which is no error."""
    real = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY and operation & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, operation)

    monkeypatch.setattr(disk_file.fcntl, "flock", flock)  # type: ignore[attr-defined]
    first, second = (DiskTier(tmp_path, IDENTITY, 10**6) for _ in range(2))
    keys = names(2)
    for index, key in enumerate(keys):
        first.append(key, b"p" * 32, PAGE, payload(index))
    second.refresh()
    assert [read(second, key) for key in keys] == [0, 1]

    def stale(*arguments: Any) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(disk_file.os, "preadv", stale)  # type: ignore[attr-defined]
    assert read(second, keys[0]) is None
    assert (len(second), second.num_errors) == (0, 0)


@pytest.mark.parametrize("harm", ["missing", "short", "torn", "changed"])
def test_an_index_is_built_again(harm: str, tmp_path: Path) -> None:
    """Whatever became of it; and what a killed writer left at a file's end is not read."""
    tier, keys = DiskTier(tmp_path, IDENTITY, 10**6), names(5)
    for index, key in enumerate(keys):
        tier.append(key, b"p" * 32, PAGE, payload(index))
    tier.close()
    (index_file,), (file,) = tmp_path.glob("*.index"), tmp_path.glob("*.kv")
    data, size = index_file.read_bytes(), index_file.stat().st_size // 5
    with file.open("ab") as torn:
        torn.write(data[:size] + b"half a payload")
    if harm == "missing":
        index_file.unlink()
    else:
        changed = data[:size] + bytes([data[size] ^ 1]) + data[size + 1 :]
        index_file.write_bytes(
            {"short": data[: 2 * size], "torn": data[: size + 9], "changed": changed}[harm]
        )
    again = DiskTier(tmp_path, IDENTITY, 10**6)
    assert [read(again, key) for key in keys] == [0, 1, 2, 3, 4]
    assert index_file.read_bytes() == data
    again.close()


def test_a_budget_is_kept_and_other_models_go_first(tmp_path: Path) -> None:
    """Then this model's least recently used file goes, never one that an engine still writes."""
    clock = [0.0]
    other = DiskTier(tmp_path, identity_digest("another model"), 20_000)
    other.append(names(1)[0], b"p" * 32, PAGE, payload(1, 1000))
    other.close()
    (others,) = tmp_path.glob("*.kv")
    tier, keys = DiskTier(tmp_path, IDENTITY, 20_000, lambda: clock[0]), names(40)
    for index, key in enumerate(keys):
        assert tier.append(key, b"p" * 32, PAGE, payload(index, 1000))
        for age, path in enumerate(sorted(tmp_path.glob("*.kv"), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(path, (age, age))
        clock[0] += 20
        assert read(tier, keys[0], 1000) in (0, None)  # used again and again
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    assert not others.exists()
    assert read(tier, keys[-1], 1000) == 39
    assert read(tier, keys[5], 1000) is None
    busy = DiskTier(tmp_path, IDENTITY, 3000)
    assert not busy.append(b"k" * 32, b"p" * 32, PAGE, payload(7, 1000)), "files in use are no room"
    assert busy.num_errors == 1


def test_files_of_another_version_are_removed(tmp_path: Path) -> None:
    (tmp_path / "0123456789abcdef-0.kv").write_bytes(b"moebius KV of some day" * 100)
    DiskTier(tmp_path, IDENTITY, 10**6)
    assert not list(tmp_path.glob("*.kv"))


def test_a_full_disk_costs_a_pause_and_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before can be read, nothing is written for a minute, then the file goes on."""
    clock, keys = [0.0], names(4)
    tier = DiskTier(tmp_path, IDENTITY, 10**6, lambda: clock[0])
    assert tier.append(keys[0], b"p" * 32, PAGE, payload(0))
    real = os.pwrite

    def full(descriptor: int, data: Any, offset: int) -> int:
        if offset > 250:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(disk_file.os, "pwrite", full)  # type: ignore[attr-defined]
    assert not tier.append(keys[1], b"p" * 32, PAGE, payload(1))
    monkeypatch.setattr(disk_file.os, "pwrite", real)  # type: ignore[attr-defined]
    assert not tier.accepts
    assert not tier.append(keys[2], b"p" * 32, PAGE, payload(2))
    clock[0] += 61
    assert tier.append(keys[3], b"p" * 32, PAGE, payload(3))
    tier.close()
    again = DiskTier(tmp_path, IDENTITY, 10**6)
    assert [read(again, key) for key in keys] == [0, None, None, 3]


def page_tensors(device_pages: int = PAGES) -> list[torch.Tensor]:
    """Two layers and index keys: rows of 16, 8 and 8 bytes, and a layer without any."""
    shapes = [(2, 2, 4), (2, 1, 4), (2, 2, 2), (0, 4)]
    types = [torch.uint8, torch.uint8, torch.int8, torch.float32]
    return [
        torch.zeros((device_pages, *shape), dtype=kind) for shape, kind in zip(shapes, types, strict=True)
    ]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("bytes_at_once", [48 * 2**20, 3 * PAGE_BYTES])
def test_both_ways_of_copying_give_the_same_bytes(
    wide: bool, bytes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU uses, tried here on the host's memory, and what the host uses: pages and states alike,
    whether or not rows are moved by eight bytes, and in how many parts.
    """
    monkeypatch.setattr(payloads, "_BYTES_AT_ONCE", bytes_at_once)
    generator = torch.Generator().manual_seed(1)
    tensors = page_tensors() if wide else [torch.zeros((PAGES, n), dtype=torch.int32) for n in (5, 3)]
    pages = [torch.randint(0, 100, t.shape, generator=generator).to(t.dtype) for t in tensors]
    states = [torch.randn((SLOTS, 3, 2), generator=generator), torch.arange(SLOTS)]
    kinds = [kind(pages, states, HostDeviceStream()) for kind in (HostPayloads, DevicePayloads)]
    assert [(kind.page_bytes, kind.state_bytes) for kind in kinds] == [(32, 32)] * 2
    wanted = list(range(3, 23))
    found = [[kind.scratch(32) for _ in wanted] for kind in kinds]
    state = [kind.scratch(32) for kind in kinds]
    for kind, into, one in zip(kinds, found, state, strict=True):
        kind.read_pages(wanted, into)
        kind.read_state(5, one)
    assert np.array_equal(*found)
    assert np.array_equal(*state)
    for kind in (HostPayloads, DevicePayloads):  # type: ignore[assignment]
        into = [torch.zeros_like(tensor) for tensor in pages], [torch.zeros_like(tensor) for tensor in states]  # type: ignore[assignment]
        other = kind(*into, HostDeviceStream())  # type: ignore[operator]
        other.write_pages(wanted, found[0])
        other.write_state(2, state[0])
        for tensor, copy in zip(pages, into[0], strict=True):
            assert torch.equal(tensor[3:23], copy[3:23])
            assert not copy[:3].any()
        for tensor, copy in zip(states, into[1], strict=True):
            assert torch.equal(tensor[5], copy[2])


def test_no_pages_are_no_work_of_the_device() -> None:
    """The engine's thread asks for the pages that RAM lacks whenever some are given up: mostly for none."""

    class Untouched(HostDeviceStream):
        def active(self) -> Any:
            raise AssertionError("the device was asked for nothing")

    found = DevicePayloads(page_tensors(), [], Untouched())
    found.read_pages([], [])
    found.write_pages([], [])


def test_empty_pages_come_from_a_disk() -> None:
    """A model that attends to nothing has pages without bytes, and states beside them."""
    keys = names(5)
    records = dict.fromkeys(keys)

    class Disk:
        def record(self, key: bytes) -> object:
            return key if key in records else None

        def announce(self, keys: list[bytes]) -> None:
            assert keys == list(records)

        def read(self, record: object, into: Any) -> bool:
            return into.nbytes == 0

    disk: Any = Disk()
    mover = Mover(HostPayloads([], [], HostDeviceStream()), disk, lambda: None, is_direct=True)
    items = [LoadItem(key, place, [], is_on_disk=True) for place, key in enumerate(keys)]
    assert mover.load(items).result() == 5
    mover.close()


class FlakyDisk(DiskTier):
    """Fails now and then, as the machine says."""

    chance = 0.0
    dice = random.Random(0)

    def read(self, record: Any, into: Any) -> bool:
        if self.dice.random() < self.chance:
            self._records.pop(record.key, None)
            return False
        return super().read(record, into)

    def append(self, *block: Any) -> bool:
        return self.dice.random() >= self.chance and super().append(*block)


@dataclass(frozen=True)
class OpenStep:
    """A step in flight: it computes a request's tokens up to `end`."""

    batch: Batch
    request: Request
    end: int
    page: int
    run: int


class TierMachine:
    """Random requests over a small vocabulary through a cache with tiers; a step is a page of one request.

    Every page's first bytes, and every state's, are a digest of the tokens that they stand for, as a model
    would compute them: what a request starts from is compared with its own tokens.
    """

    # Bytes of a state here; other ranks may have other parts of it.
    state_bytes = STATE_BYTES

    def __init__(self, seed: int, directory: Path, has_states: bool) -> None:
        self.dice = random.Random(seed)
        self.tensors = self.make_tensors()
        self.state_tensor = torch.zeros((SLOTS + 1, self.state_bytes), dtype=torch.uint8)
        states = RequestStates(StatePool(SLOTS), 3) if has_states else None
        tree = RadixCache(PAGE, states.forget if states else None, most_kept_pages=PAGES // 2)
        self.cache = RequestCache(PagePool(PAGES), tree, True, states)
        state_tensors = [self.state_tensor] if has_states else []
        self.payloads = HostPayloads(self.tensors, state_tensors, HostDeviceStream())
        self.disk = FlakyDisk(directory, IDENTITY, 40_000)
        self.disk.dice = self.dice
        self.ram, self.tiers = self.make_tiers()
        self.tiers.open()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.open_steps: list[OpenStep] = []
        self.runs: Counter[Request] = Counter()  # how often each was admitted
        self.next_step = self.count = self.checked = 0

    def make_tensors(self) -> list[torch.Tensor]:
        return page_tensors()

    def make_tiers(self) -> tuple[RamTier, PrefixTiers]:
        ram = RamTier(RamSegment(IDENTITY, 64, 12), PAGE_BYTES, STATE_BYTES)
        parts = (self.cache, self.payloads, IDENTITY, ram, self.disk)
        return ram, PrefixTiers(*parts, lambda: None, lambda: 1.0)

    def now_s(self) -> float:
        """What the tree's time is."""
        return time.monotonic()

    def mark(self, tokens: list[int], namespace: str, nbytes: int) -> np.ndarray[Any, Any]:
        """What a model would compute of these tokens."""
        digest = identity_digest(f"{namespace} {tokens}")
        return np.frombuffer((digest * 3)[:nbytes], np.uint8)

    def step(self) -> None:
        """One random thing happens."""
        kinds = [self.arrive, self.admit, self.compute, self.compute, self.compute, self.end, self.end_step]
        kinds += [self.abort] if self.dice.random() < 0.2 else []
        kinds += [self.flush] if self.dice.random() < 0.01 else []
        self.disk.chance = self.dice.choice([0.0, 0.0, 0.3])
        self.dice.choice(kinds)()
        if self.dice.random() < 0.2:
            time.sleep(0.0005)  # the other threads get somewhere
        self.tiers.poll()

    def arrive(self) -> None:
        if len(self.waiting) < 4:
            self.count += 1
            # Eight conversations of different lengths, of which four begin alike.
            which, length = self.dice.randrange(8), self.dice.randint(1, 17)
            tokens = [1 + (k * k + k * (which if k > 6 else which % 4)) % 5 for k in range(length)]
            namespace = self.dice.choice(["", "", "salt"])
            # Shorter than the history, so that keeping ends, too.
            keep_s = self.dice.choice([0.0, 0.0, 0.05])
            request = Request(
                f"r{self.count}", tokens, SamplingParams(), cache_namespace=namespace, keep_prefix_s=keep_s
            )
            self.cache.tree.advance(self.now_s())
            self.waiting.append(request)

    def admit(self) -> None:
        for request in list(self.waiting):
            if self.cache.tiers is not None and self.cache.tiers.awaits(request, self.has_room(request)):
                continue
            handle = self.cache.probe(request)
            if len(self.running) >= 2 or not self.cache.has_free_state or not self.has_room(request)(handle):
                continue
            self.waiting.remove(request)
            self.cache.attach(request, handle)
            self.running.append(request)
            self.runs[request] += 1
            self.check(request)

    def has_room(self, request: Request) -> Any:
        def answer(handle: PrefixHandle | None) -> bool:
            held = len(handle.pages) if handle else 0
            pinned = self.cache.tree.unlocked_pages(handle) if handle else 0
            return self.cache.pages_for(request.total_len) - held <= self.cache.available - pinned

        return answer

    def check(self, request: Request) -> None:
        """What the request starts from is what it would have computed."""
        tokens, namespace = request.prompt_token_ids, request.cache_namespace
        found = self.payloads.scratch(self.payloads.page_bytes)
        for index, page in enumerate(request.pages):
            self.payloads.read_pages([page], [found])
            expected = self.mark(tokens[: (index + 1) * PAGE], namespace, self.payloads.page_bytes)
            assert np.array_equal(found, expected), f"page {index} of {request.key}"
            self.checked += 1
        if self.cache.states is not None and request.cached_len:
            expected = self.mark(tokens[: request.cached_len], f"state {namespace}", self.state_bytes)
            assert np.array_equal(self.state_tensor[request.state_slot].numpy(), expected), request.key

    def compute(self) -> None:
        """Plans a page of a request; the step writes when it ends, whatever became of the request."""
        todo = [r for r in self.running if r.computed_len == r.scheduled_len < r.prompt_len]
        if not todo or not self.cache.has_free_state or len(self.open_steps) >= 2:
            return
        request = self.dice.choice(todo)
        end = min(request.prompt_len, request.computed_len + PAGE)
        if not self.cache.grow(request, end):
            self.leave(request, keep=True)
            self.waiting.append(request)
            return
        batch = Batch([], [], [], [], step=self.next_step)
        self.next_step += 1
        self.cache.scheduled(request, batch)
        self.cache.planned(batch)
        request.scheduled_len = end
        self.open_steps.append(OpenStep(batch, request, end, request.pages[-1], self.runs[request]))

    def end_step(self) -> None:
        """The oldest step writes, and its request goes on if it still runs as it did."""
        if not self.open_steps:
            return
        step = self.open_steps.pop(0)
        request, end, states = step.request, step.end, self.cache.states
        tokens, namespace = request.prompt_token_ids[:end], request.cache_namespace
        mark = self.mark(tokens, namespace, self.payloads.page_bytes)
        self.payloads.write_pages([step.page], [mark if end % PAGE == 0 else mark * 0])
        if states is not None:
            state = self.mark(tokens, f"state {namespace}", self.state_bytes)
            self.payloads.write_state(step.batch.state_writes[0], state)
        if request in self.running and self.runs[request] == step.run:
            request.computed_len = end
            if states is not None:
                self.cache.keep_state(request, step.batch.state_writes[0])
            if end == request.prompt_len:
                self.cache.store(request)
        self.cache.ended(step.batch)

    def leave(self, request: Request, keep: bool) -> None:
        self.running.remove(request)
        self.cache.release(request, keep)

    def end(self) -> None:
        done = [request for request in self.running if request.computed_len == request.prompt_len]
        if done:
            self.leave(self.dice.choice(done), keep=True)

    def abort(self) -> None:
        if self.running and self.dice.random() < 0.5:
            self.leave(self.dice.choice(self.running), keep=self.dice.random() < 0.5)
        elif self.waiting:
            self.waiting.remove(self.dice.choice(self.waiting))

    def flush(self) -> None:
        self.cache.flush()

    def check_integrity(self) -> None:
        self.cache.check_integrity(self.running)
        self.ram.check_integrity()

    def close(self) -> None:
        """Nothing is left on its way, and every page is somewhere."""
        while self.open_steps:
            self.end_step()
        self.tiers.close()
        for request in list(self.running):
            self.leave(request, keep=True)
        self.check_integrity()
        assert not self.tiers.arriving_pages
        assert not self.tiers.copied_states


def test_a_prefix_that_does_not_come_in_time_is_computed(tmp_path: Path) -> None:
    """A fetch that stands behind an open step too long lets its request go, and serves the next one."""
    machine, clock = TierMachine(1, tmp_path, False), [0.0]
    machine.tiers._clock = lambda: clock[0]
    machine.tiers._refreshed_at = 1e9  # this directory has one engine
    tokens = [1, 2, 3, 4, 5, 6, 7]
    machine.waiting.append(Request("first", tokens, SamplingParams()))
    machine.admit()
    for _ in range(8):
        machine.compute()
        machine.end_step()
    machine.end()
    machine.cache.pool.free(machine.cache.tree.evict(PAGES))
    assert machine.tiers.ram is not None
    assert len(machine.tiers.ram) == 3
    batch = Batch([], [], [], [], step=100)
    machine.tiers.planned(batch)
    late, next_one = (Request(name, tokens, SamplingParams()) for name in ("late", "next"))
    assert machine.tiers.awaits(late, lambda _: True)
    assert machine.tiers.is_busy
    clock[0] += 1000.0
    assert not machine.tiers.awaits(late, lambda _: True)
    assert machine.tiers.num_late == 1
    machine.tiers.ended(batch)
    while machine.tiers.arriving_pages:
        machine.tiers.poll()
        time.sleep(0.001)
    assert not machine.tiers.awaits(next_one, lambda _: True)
    handle = machine.cache.probe(next_one)
    assert handle is not None
    assert handle.num_tokens == 6
    machine.close()


@pytest.mark.parametrize("has_states", [False, True], ids=["pages", "pages and states"])
@pytest.mark.parametrize(
    "steps", [4000, pytest.param(50_000, marks=pytest.mark.full)], ids=["thousands", "a hundred thousand"]
)
def test_random_histories_never_give_a_request_another_prefix(
    has_states: bool, steps: int, tmp_path: Path
) -> None:
    """With evictions, failing disks, aborts, flushes and steps in flight; no page or slot is ever lost."""
    machine = TierMachine(7, tmp_path, has_states)
    tiers = machine.tiers
    for number in range(8 * steps):
        machine.step()
        if number % 10 == 0:
            machine.check_integrity()
        # Threads copy meanwhile: on a busy machine it takes more steps until a copy fails.
        if number >= steps and tiers.num_failed and min(tiers.hit_tokens["ram"], tiers.hit_tokens["disk"]):
            break
    machine.close()
    assert machine.checked > steps / 200
    assert tiers.hit_tokens["ram"] > 0
    assert tiers.hit_tokens["disk"] > 0
    assert tiers.num_failed > 0


class FakeGroup:
    """Three ranks' reports, which reach all ranks at the same step as rank 0's do."""

    def __init__(self) -> None:
        self.machines: list[RankMachine] = []
        self.reports: dict[int, list[int]] = {}
        self.given_up: list[int] = []

    def fail(self, reason: str) -> None:
        pytest.fail(reason)

    def report(self, fetch: int, blocks: int) -> None:
        if fetch:
            self.reports.setdefault(fetch, []).append(blocks)

    def give_up(self, fetch: int) -> None:
        self.given_up.append(fetch)

    def step(self) -> None:
        """What has ended on all ranks has ended."""
        for fetch, blocks in list(self.reports.items()):
            if len(blocks) == len(self.machines):
                del self.reports[fetch]
                for machine in self.machines:
                    machine.tiers.agreed(fetch, min(blocks))


class RankMachine(TierMachine):
    """A rank of several: its part of a page is half of it; it has a disk of its own, or none."""

    num_steps = 0

    def __init__(self, directory: Path, has_states: bool, group: FakeGroup, has_disk: bool) -> None:
        self.group, self.has_disk = group, has_disk
        super().__init__(11, directory, has_states)
        group.machines.append(self)
        # What its threads draw is its own.
        self.disk.dice = random.Random(len(group.machines))

    def make_tensors(self) -> list[torch.Tensor]:
        return page_tensors()[:1]

    def make_tiers(self) -> tuple[RamTier, PrefixTiers]:
        tree = self.cache.tree
        payloads, segment = self.payloads, RamSegment(IDENTITY, 64, 12)
        own, counted = (payloads.page_bytes, payloads.state_bytes), (PAGE_BYTES, STATE_BYTES)
        ram = RamTier(segment, *own, lambda: tree.now_s, counted)
        tiers = PrefixTiers(
            *(self.cache, payloads, IDENTITY, ram, self.disk if self.has_disk else None, lambda: None),
            clock=lambda: tree.now_s,
            wall_clock=lambda: tree.now_s,
            ranks=self.group,
        )
        return ram, tiers

    def now_s(self) -> float:
        """Equal on all ranks."""
        return self.num_steps / 1000

    def step(self) -> None:
        self.num_steps += 1
        super().step()

    def arrive(self) -> None:
        """Rank 0 says what is on disk."""
        before = len(self.waiting)
        super().arrive()
        first, position = self.group.machines[0], self.count - 1
        for request in self.waiting[before:]:
            if self is first:
                self.tiers.look([request])
                self.found.append(request.blocks_on_disk)
            request.blocks_on_disk = first.found[position]

    found: list[bytes]

    @property
    def seen(self) -> list[Any]:
        """What has to be equal on all ranks."""
        requests = [(request.key, request.cached_len, request.pages) for request in self.running]
        waiting = [request.key for request in self.waiting]
        return [requests, waiting, self.ram.keys, self.ram.kept_keys, self.tiers.hit_tokens]


class WholeRankMachine(RankMachine):
    """Another rank, which has all of a page."""

    def make_tensors(self) -> list[torch.Tensor]:
        return page_tensors()


class StatelessRankMachine(RankMachine):
    """Another rank, whose layers have no states."""

    state_bytes = 0


@pytest.mark.parametrize("has_disk", [False, True], ids=["RAM", "RAM and disk"])
@pytest.mark.parametrize("has_states", [False, True], ids=["pages", "pages and states"])
def test_ranks_hold_the_same_blocks(has_states: bool, has_disk: bool, tmp_path: Path) -> None:
    """Whatever happens, ranks with different parts of each block start every request from the same prefix,
    give up the same blocks, and keep them alike, though their disks fail at different times."""
    kinds, group = (RankMachine, WholeRankMachine, StatelessRankMachine), FakeGroup()
    first, *others = (kind(tmp_path / kind.__name__, has_states, group, has_disk) for kind in kinds)
    first.found = []
    for number in range(20_000):
        group.step()
        first.step()
        for other in others:
            other.step()
            assert other.seen == first.seen
        if number >= 3000 and (first.tiers.hit_tokens["disk"] or not has_disk):
            break
    assert first.tiers.hit_tokens["ram"] > 0
    assert (first.tiers.hit_tokens["disk"] > 0) == has_disk
    assert first.ram.num_evicted > 0
    for machine in (first, *others):
        assert machine.checked > 0
        machine.close()
