"""What vLLM's `--kv-events-config` says, for the engine that publishes and for those who check settings."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moebius.errors import ConfigError


class KvEventsConfig(BaseModel):
    """The keys and defaults of vLLM's KVEventsConfig, and `event_format`; filled by `read_kv_events`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    # Bound where it has a wildcard or is no TCP address, as vLLM does; else a subscriber binds it.
    endpoint: str = Field(default="tcp://*:5557", min_length=1)
    replay_endpoint: str | None = None
    # Batches that can be asked for again.
    buffer_steps: int = Field(default=10_000, ge=1)
    hwm: int = Field(default=100_000, ge=0)
    max_queue_size: int = Field(default=100_000, ge=1)
    topic: str = ""
    # Events by the names of their fields, as vLLM since 0.23, or by position, as earlier.
    event_format: Literal["map", "array"] = "map"

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def read_kv_events(text: str) -> KvEventsConfig:
    """Returns what a value of `kv_events_config` says; the empty text: nothing is published.

    Raises ConfigError for what is no such JSON object.
    """
    if not text:
        return KvEventsConfig()
    try:
        return KvEventsConfig.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        raise ConfigError(f"kv_events_config: no JSON object: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the value"
        names = ", ".join(KvEventsConfig.model_fields)
        raise ConfigError(f"kv_events_config: {key}: {first['msg']}; keys: {names}") from None
