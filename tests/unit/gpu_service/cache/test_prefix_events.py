"""Guards the stream of what the prefix tree has, read by a client of vLLM's documented format."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gpu_service.assembly.kv_tiers import follow_prefixes
from gpu_service.cache.prefix_events import PrefixEvents
from gpu_service.cache.radix_cache import RadixCache
from gpu_service.cache.request_cache import PagePool, RequestCache
from gpu_service.cache.tiers.digests import identity_digest
from gpu_service.parallel.group import SoloGroup
from gpu_service.telemetry.kv_event_stream import KvEventStream
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import ConfigError, UserError
from moebius.kv_events import KvEventsConfig, read_kv_events
from tests.helpers.waiting import wait_until

PAGE = 4
IDENTITY = identity_digest("a model")


class Listed:
    """Stands for a stream."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def add(self, event: dict[str, Any]) -> None:
        self.events.append(event)


class Subscriber:
    """What a router knows: reads a stream in either form of its events."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], Any]] = {}
        self.numbers: list[int] = []

    def take(self, number: bytes, payload: bytes) -> None:
        """Applies a batch."""
        msgspec = pytest.importorskip("msgspec")
        self.numbers.append(int.from_bytes(number, "big"))
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert ts > 1e9
        assert rank == 0
        for event in events:
            self.apply(event)

    def apply(self, event: Any) -> None:
        if isinstance(event, list):
            names = {
                "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name "
                "extra_keys",
                "BlockRemoved": "block_hashes medium",
                "AllBlocksCleared": "",
            }[event[0]].split()
            event = {"type": event[0], **dict(zip(names, event[1:], strict=False))}
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        assert event["medium"] == "GPU"
        hashes = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            for block in hashes:
                del self.blocks[block]
            return
        size, tokens = event["block_size"], event["token_ids"]
        assert size == PAGE
        assert len(tokens) == size * len(hashes)
        extra = event.get("extra_keys") or [None] * len(hashes)
        parents = [event["parent_block_hash"], *hashes]
        for index, block in enumerate(hashes):
            assert 0 <= block < 2**64
            part = tuple(tokens[index * size : (index + 1) * size])
            self.blocks[block] = parents[index], part, extra[index]

    @property
    def prefixes(self) -> set[tuple[tuple[int, ...], Any]]:
        """All prefixes that end with a block, and whose they are."""
        found = set()
        for block in self.blocks:
            tokens: tuple[int, ...] = ()
            at: int | None = block
            while at is not None:
                at, part, owner = self.blocks[at]
                tokens = part + tokens
            found.add((tokens, owner[0] if owner else None))
        return found


def cache_of(stream: Any) -> RequestCache:
    """Returns a cache that is followed."""
    cache = RequestCache(PagePool(64), RadixCache(PAGE), True)
    cache.tree.events = PrefixEvents(stream, PAGE, IDENTITY)
    return cache


def put(cache: RequestCache, tokens: list[int], namespace: str = "") -> None:
    """The tree gets a prefix."""
    pages = cache.pool.alloc(len(tokens) // PAGE)
    known = cache.tree.insert(tokens, pages, namespace).already_cached // PAGE
    cache.pool.hand_to_cache(pages[known:])
    cache.pool.free(pages[:known])


def history(cache: RequestCache) -> set[tuple[tuple[int, ...], Any]]:
    """Prefixes come and go; returns those that are left."""
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8, 90, 91, 92, 93])
    put(cache, [1, 2, 3, 4], "salt")
    put(cache, [20, 21, 22, 23])
    handle = cache.tree.match([20, 21, 22, 23])
    cache.tree.lock(handle)
    cache.pool.free(cache.tree.evict(1))
    cache.tree.unlock(handle)
    whole = [1, 2, 3, 4, 5, 6, 7, 8, 90, 91, 92, 93]
    return {(tuple(whole[:end]), None) for end in (4, 8, 12)} | {
        ((1, 2, 3, 4), "salt"),
        ((20, 21, 22, 23), None),
    }


def test_events_say_what_the_tree_has() -> None:
    """A follower has all prefixes of the tree, by whose they are, through splits, evictions and a flush."""
    stream, subscriber = Listed(), Subscriber()
    cache = cache_of(stream)
    left = history(cache)
    for event in stream.events:
        subscriber.apply(event)
    assert subscriber.prefixes == left
    count = len(stream.events)
    cache.flush()
    for event in stream.events[count:]:
        subscriber.apply(event)
    assert not subscriber.blocks
    assert stream.events[-1] == {"type": "AllBlocksCleared"}


def test_pages_of_images_are_not_published() -> None:
    """What stands for an image is no token: its page and those after it are left out, also when they go."""
    stream = Listed()
    cache = cache_of(stream)
    put(cache, [1, 2, 3, 4, 5, -6, -6, 7])
    put(cache, [1, 2, 3, 4, 5, -6, -6, 7, 8, 9, 10, 11])
    assert [event["token_ids"] for event in stream.events] == [[1, 2, 3, 4]]
    cache.pool.free(cache.tree.evict(3))
    assert [len(event["block_hashes"]) for event in stream.events] == [1, 1]


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_client_of_vllms_format_follows_the_stream(form: str, tmp_path: Path) -> None:
    """It subscribes to a topic, gets batches of ascending numbers, and asks for those that it missed."""
    zmq = pytest.importorskip("zmq")
    endpoints = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    config = read_kv_events(
        '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv@pod@model", "endpoint": '
        f'"{endpoints[0]}", "replay_endpoint": "{endpoints[1]}", "event_format": "{form}"}}'
    )
    assert config.is_on
    stream = KvEventStream(config)
    context, live, missed = zmq.Context(), Subscriber(), Subscriber()
    with context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as replay:
        sub.setsockopt_string(zmq.SUBSCRIBE, "kv@pod@")
        sub.connect(endpoints[0])
        replay.connect(endpoints[1])
        sub.setsockopt(zmq.RCVTIMEO, 60_000)
        replay.setsockopt(zmq.RCVTIMEO, 60_000)
        cache = cache_of(stream)
        # Until the subscription has arrived, what is published is missed.
        while not sub.poll(10):
            cache.flush()
        left = history(cache)
        put(cache, [40, 41, 42, 43])
        left |= {((40, 41, 42, 43), None)}
        while not any(tokens[0] == 40 for tokens, _ in live.prefixes):
            topic, number, payload = sub.recv_multipart()
            assert topic == b"kv@pod@model"
            live.take(number, payload)
        assert live.prefixes == left
        assert live.numbers == list(range(live.numbers[0], live.numbers[-1] + 1))
        replay.send_multipart((b"", (0).to_bytes(8, "big")))
        empty, number, payload = replay.recv_multipart()
        while payload:
            assert empty == b""
            missed.take(number, payload)
            empty, number, payload = replay.recv_multipart()
        assert number == (-1).to_bytes(8, "big", signed=True)
        assert missed.prefixes == left
        assert missed.numbers == list(range(live.numbers[-1] + 1))
    stream.close()
    context.destroy(linger=0)


def test_settings_let_an_engine_publish(tmp_path: Path) -> None:
    """An engine's cache is followed from its making to its close if settings say so, and else by nothing."""
    pytest.importorskip("zmq")
    given = f'{{"enable_kv_cache_events": true, "endpoint": "ipc://{tmp_path}/pub"}}'
    for text, is_followed in ((given, True), ("{}", False), ("", False)):
        cache = RequestCache(PagePool(64), RadixCache(PAGE), True)
        config = MoebiusConfig(gpu=GpuConfig(kv_events_config=text))
        follow_prefixes(config, "a model", cache, SoloGroup())
        assert (cache.tree.events is not None) == is_followed
        put(cache, [1, 2, 3, 4])
        if cache.tree.events is not None:
            cache.tree.events.close()


def test_what_waits_too_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more waits than may, subscribers get that all blocks are gone, and nothing that is not there."""
    pytest.importorskip("zmq")
    stream = KvEventStream(
        KvEventsConfig(enable_kv_cache_events=True, endpoint="inproc://events", max_queue_size=3)
    )
    wait_until(lambda: stream._num_batches == 1)
    published: list[Any] = []
    held = threading.Event()

    def publish(events: list[Any]) -> None:
        held.wait(60)
        published.append(events)

    monkeypatch.setattr(stream, "_publish", publish)
    stream.add({"type": "first"})
    wait_until(lambda: stream._events.qsize() == 0)
    for number in range(5):
        stream.add({"type": str(number)})
    held.set()
    stream.close()
    assert published == [[{"type": "first"}], [{"type": "AllBlocksCleared"}]]


def test_what_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing packages, endpoints that cannot be used and settings of another form."""
    with pytest.raises(ConfigError, match="kv_events_config: no JSON object"):
        read_kv_events("zmq")
    with pytest.raises(ConfigError, match=r"kv_events_config: buffer: Extra inputs .*; keys: .*buffer_steps"):
        read_kv_events('{"buffer": 3}')
    with pytest.raises(ConfigError, match="kv_events_config: publisher"):
        read_kv_events('{"publisher": "kafka"}')
    assert not read_kv_events("").is_on
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.setitem(sys.modules, "msgspec", type(sys)("msgspec"))
    with pytest.raises(UserError, match=r"needs the package zmq: pip install 'moebius\[kv-events\]'"):
        KvEventStream(KvEventsConfig(enable_kv_cache_events=True))
