"""Publishes what the prefix cache holds, as vLLM does: routers that follow vLLM's engines follow this one.

    PUB socket      topic | sequence number, 8 bytes, big endian | batch as msgpack
    batch           [seconds since the epoch, [event, …], 0]
    ROUTER socket   a first sequence number -> (number, batch) of each kept batch from there on, then (-1, "")

Any thread adds events and never waits; a thread of its own has the sockets. The format is that of vLLM's
`vllm/distributed/kv_events.py`; events of its versions before 0.23 have no names of fields.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import structlog

from moebius.errors import UserError
from moebius.kv_events import KvEventsConfig

_log = structlog.get_logger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
# How long a request for a replay, or the end, may wait for events, seconds.
_POLL_S = 0.1
# How long the end waits for subscribers that read slowly, milliseconds.
_LINGER_MS = 200
_CLEARED: Mapping[str, Any] = {"type": "AllBlocksCleared"}


class KvEventStream:
    """Open from its making to `close`. First it says that the cache is empty."""

    def __init__(self, config: KvEventsConfig) -> None:
        """Raises UserError where packages are missing or an endpoint cannot be used."""
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise UserError(
                f"kv_events_config needs the package {error.name}: pip install 'moebius[kv-events]'"
            ) from None
        self._encode = msgspec.msgpack.Encoder().encode
        self._config = config
        self._events: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._batches: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_batches = 0
        self._is_full = False
        self._context = zmq.Context()
        self._pub, self._replay = self._context.socket(zmq.PUB), None
        try:
            self._pub.set_hwm(config.hwm)
            # vLLM's rule: a name or address of a host is that of a subscriber, which binds.
            at = config.endpoint
            is_own = "*" in at or "::" in at or not at.startswith("tcp://")
            (self._pub.bind if is_own else self._pub.connect)(at)
            if config.replay_endpoint:
                at = config.replay_endpoint
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(at)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UserError(f"kv_events_config: {at!r} cannot be used: {error}") from None
        # What subscribers know is a predecessor's.
        self.add(_CLEARED)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def add(self, event: Mapping[str, Any]) -> None:
        """Publishes an event soon, in order: fields by name, `type` among them.

        Where too many wait, what waits is dropped, and subscribers get that all blocks are gone: better they
        know of less than there is than of what is gone.
        """
        if self._events.qsize() >= self._config.max_queue_size:
            self._is_full = True
            return
        self._events.put(event)

    def close(self) -> None:
        """Publishes what waits and ends the thread."""
        self._events.put(None)
        self._thread.join()
        self._context.destroy(linger=_LINGER_MS)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            batch: list[Mapping[str, Any]] = []
            try:
                event = self._events.get(timeout=_POLL_S if self._replay is not None else None)
                while event is not None:
                    batch.append(event)
                    event = self._events.get_nowait()
                goes_on = False
            except queue.Empty:
                pass
            if self._is_full:
                _log.warning("KV events were dropped; subscribers forget all blocks", events=len(batch))
                batch, self._is_full = [_CLEARED], False
            if batch:
                self._publish(batch)
            if self._replay is not None and self._replay.poll(0):
                self._answer()

    def _publish(self, events: list[Mapping[str, Any]]) -> None:
        sent = events if self._config.event_format == "map" else [list(event.values()) for event in events]
        number, payload = self._num_batches.to_bytes(8, "big"), self._encode([time.time(), sent, 0])
        self._num_batches += 1
        self._batches.append((number, payload))
        self._pub.send_multipart((self._config.topic.encode(), number, payload))

    def _answer(self) -> None:
        """Sends the batches that a client asks for again. What is no such request is not answered."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            _log.warning("a request for KV events has another form", frames=len(frames))
            return
        client, empty, first = frames
        for number, payload in self._batches:
            if number >= first:
                self._replay.send_multipart((client, empty, number, payload))
        self._replay.send_multipart((client, empty, _END, b""))
