"""Pages of items, as the Responses API has them of responses and of conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Depends, Query

from gateway.schemas.errors import bad_request


@dataclass(frozen=True)
class Paging:
    """Which items of a list are wanted; filled from a request's query by FastAPI."""

    limit: Annotated[int, Query(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None

    def page(self, items: Sequence[dict[str, Any]], where: str) -> dict[str, Any]:
        """Returns the page in OpenAI's shape; `items` are oldest first.

        Raises ApiError 400 where `after` is no item; `where` says of what.
        """
        ordered = list(items) if self.order == "asc" else list(items)[::-1]
        places = [number for number, item in enumerate(ordered, 1) if item["id"] == self.after]
        if self.after is not None and not places:
            raise bad_request(f"'after' names no item of the {where}: {self.after[:100]!r}", "after")
        start = places[0] if places else 0
        return item_list(ordered[start : start + self.limit], start + self.limit < len(ordered))


PagingQuery = Annotated[Paging, Depends()]


def item_list(items: Sequence[dict[str, Any]], has_more: bool = False) -> dict[str, Any]:
    """Returns OpenAI's list of items; `has_more`: whether others come after them."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
