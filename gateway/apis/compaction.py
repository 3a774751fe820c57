"""OpenAI's compaction: the model writes a summary of a conversation, which takes its place."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.apis.formats import Output, ResponseFormat, Usage
from gateway.apis.responses import NAMES, all_items, encrypted_summary, listed_items, messages_of
from gateway.apis.translation import Context, Translation, text_part, without_none
from gateway.parsers.events import ParsedDelta
from gateway.schemas.errors import ApiError
from gateway.schemas.responses import CompactRequest, MessageItem

_TASK = (
    "Write a summary of the conversation so far, for an assistant that will continue it without seeing it. "
    "Keep what the user wants, decisions, facts, names, file paths, results of tools, and what is left to "
    "do. Answer with the summary only."
)


@dataclass(frozen=True)
class CompactReply:
    """What the answer has besides the summary; filled by `translate`."""

    user_messages: list[dict[str, Any]]  # of the conversation, as clients get items


def translate(body: CompactRequest, context: Context) -> Translation:
    """Returns the chat request that asks for a summary. Raises ApiError 400, 404."""
    before, sent = all_items(body, context)
    items = before + sent
    messages = messages_of(items, body.instructions, context)
    messages.user([text_part(_TASK)])
    users = [item for item in items if isinstance(item, MessageItem) and item.role == "user"]
    request = without_none({"model": body.model, "messages": messages.finished()})
    return Translation(request, NAMES, CompactReply(listed_items(users)))


class CompactFormat(ResponseFormat):
    """Builds the list of the user's messages and a summary of all the rest."""

    operation = "chat"

    def __init__(self, reply: CompactReply) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._reply = reply

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Returns the compacted conversation."""
        summary = {
            "id": f"cmp_{uuid.uuid4().hex}",
            "type": "compaction",
            "encrypted_content": encrypted_summary(outputs[0].text.strip()),
        }
        return {
            "id": self.id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*self._reply.user_messages, summary],
            "usage": usage_of(usage),
        }

    def stream_delta(self, delta: ParsedDelta, usage: Callable[[], Usage]) -> bytes:
        raise AssertionError("a compaction is not streamed")

    def stream_end(self, usage: Usage) -> bytes:
        raise AssertionError("a compaction is not streamed")

    def stream_failure(self, error: ApiError) -> bytes:
        raise AssertionError("a compaction is not streamed")


def usage_of(usage: Usage) -> dict[str, Any]:
    """Returns token counts in the shape of the Responses API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
