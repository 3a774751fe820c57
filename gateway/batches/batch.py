"""One batch: its facts on disk, and its shape in OpenAI's and in Anthropic's API."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from gateway.transport.internal import TokenUsage

WINDOW_S = 86_400
Api = Literal["openai", "anthropic"]
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelled"]
UNFINISHED = ("validating", "in_progress", "finalizing")
PREFIXES: dict[Api, str] = {"openai": "batch_", "anthropic": "msgbatch_"}
# The field with the time at which a batch reached a status.
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")


@dataclass
class Batch:
    """The facts of one batch; made by a route, changed only by the process that runs it."""

    id: str
    api: Api
    endpoint: str
    owner: str
    key_name: str  # name of the API key that made it; empty: no keys were required
    created_at: int
    expires_at: int
    input_file_id: str = ""
    metadata: dict[str, str] | None = None
    output_life_s: int = 0  # seconds that its files are kept
    status: Status = "validating"
    ends_as: Status = "completed"  # the status after finalizing
    reached: dict[str, int] = field(default_factory=dict)  # Unix time by status
    errors: list[dict[str, Any]] = field(default_factory=list)  # of its input, in OpenAI's shape
    total: int = 0  # requests
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)  # of requests that succeeded
    output_file_id: str = ""
    error_file_id: str = ""

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Batch:
        """Returns the batch that `facts` describe."""
        return cls(**{**facts, "usage": TokenUsage(**facts.get("usage", {}))})

    def facts(self) -> dict[str, Any]:
        """Returns what `of` reads, as JSON."""
        return asdict(self)

    @property
    def unanswered(self) -> int:
        """Requests that have no result; an uploaded file's count once all its lines are checked."""
        return self.total - self.succeeded - self.errored - self.canceled - self.expired

    @property
    def is_finished(self) -> bool:
        """Whether nothing about it changes any more."""
        return self.status not in UNFINISHED

    def reach(self, status: Status) -> None:
        """Changes the status and notes when."""
        self.status = status
        self.reached[status] = int(time.time())

    def as_openai(self, cancelling_at: int | None) -> dict[str, Any]:
        """Returns OpenAI's batch object. `cancelling_at`: Unix time of the first wish to cancel it."""
        is_cancelling = cancelling_at is not None and not self.is_finished
        failed = self.errored + self.canceled + self.expired
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": "cancelling" if is_cancelling else self.status,
            "output_file_id": self.output_file_id if self.is_finished and self.output_file_id else None,
            "error_file_id": self.error_file_id if self.is_finished and self.error_file_id else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "cancelling_at": cancelling_at,
            **{f"{status}_at": self.reached.get(status) for status in _TIMES},
            "request_counts": {"total": self.total, "completed": self.succeeded, "failed": failed},
            "usage": {
                "input_tokens": self.usage.input_tokens,
                "input_tokens_details": {"cached_tokens": self.usage.cached_tokens},
                "output_tokens": self.usage.output_tokens,
                "output_tokens_details": {"reasoning_tokens": self.usage.reasoning_tokens},
                "total_tokens": self.usage.input_tokens + self.usage.output_tokens,
            },
            "metadata": self.metadata,
        }

    def as_anthropic(self, cancelling_at: int | None, base_url: str) -> dict[str, Any]:
        """Returns Anthropic's object. `base_url`: how the client reaches this server, without a path."""
        has_ended, running = self.is_finished, "in_progress" if cancelling_at is None else "canceling"
        ended = _rfc3339(max(self.reached.values())) if has_ended else None
        counts = {name: getattr(self, name) for name in ("succeeded", "errored", "canceled", "expired")}
        return {
            "id": self.id,
            "type": "message_batch",
            "processing_status": "ended" if has_ended else running,
            "request_counts": {"processing": 0 if has_ended else self.unanswered, **counts},
            "created_at": _rfc3339(self.created_at),
            "expires_at": _rfc3339(self.expires_at),
            "ended_at": ended,
            "cancel_initiated_at": None if cancelling_at is None else _rfc3339(cancelling_at),
            "archived_at": None,
            "results_url": f"{base_url}/v1/messages/batches/{self.id}/results" if has_ended else None,
        }


def _rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
