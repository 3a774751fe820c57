"""HTTP routes of the page's tools: those of the MCP servers in the settings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError

from gateway.app.openapi import refuses, takes
from gateway.schemas.common import JsonError, parse_json
from gateway.schemas.errors import ApiError, bad_request, describe_validation_error
from gateway.schemas.mcp import McpCall
from gateway.transport.admission import BodyReceiver
from gateway.web.mcp import McpError, McpServers

_MAX_BODY_BYTES = 2**20
_bodies = BodyReceiver(_MAX_BODY_BYTES)

router = APIRouter()


def _servers(request: Request) -> McpServers:
    servers: McpServers = request.app.state.mcp_servers
    return servers


@router.get("/v1/mcp/tools", **refuses(401))
async def list_tools(request: Request) -> dict[str, Any]:
    """Lists the tools of each MCP server that the settings name; none are named unless the operator does."""
    return {"object": "list", "data": await _servers(request).listing()}


@router.post("/v1/mcp/calls", **takes(McpCall))
async def call_tool(request: Request) -> dict[str, Any]:
    """Calls a listed tool once, and returns its result as text."""
    call = await _received(request)
    try:
        return {"object": "mcp.result", **await _servers(request).call(call.tool, call.arguments)}
    except KeyError:
        known = "no MCP server of the settings (web_mcp_servers) has it"
        raise ApiError(404, f"unknown tool {call.tool[:80]!r}: {known}", param="tool") from None
    except McpError as error:
        raise ApiError(502, f"the MCP server {error}", code="mcp_server_failed") from error


async def _received(request: Request) -> McpCall:
    """Returns the body. Raises ApiError 400, 413, 415, 429, ClientGone."""
    async with _bodies.receive(request) as pieces:
        try:
            value = parse_json(b"".join(pieces))
        except JsonError as error:
            raise ApiError(400, error.message, param=error.param, code=error.code) from None
    try:
        return McpCall.model_validate(value)
    except ValidationError as error:
        raise bad_request(*describe_validation_error(error.errors())) from None
