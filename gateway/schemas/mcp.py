"""The body of a call of an MCP server's tool."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gateway.schemas.common import StrictModel


class McpCall(StrictModel):
    """A call of a tool, as the user of the page has confirmed it."""

    tool: str = Field(description="Its id in /v1/mcp/tools")
    arguments: dict[str, Any]
