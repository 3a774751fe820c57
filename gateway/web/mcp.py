"""Tools of MCP servers that the operator has named, listed and called for the page.

The page's policy lets browsers connect to this server alone, so this server speaks the Model Context
Protocol for it: revision 2025-06-18, transport "Streamable HTTP" (modelcontextprotocol.io/specification),
which is JSON-RPC 2.0 in POST requests, answered by JSON or by a stream of events.

Each listing and each call has a session of its own, so that users of the page share nothing on those servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from moebius import __version__

_PROTOCOL = "2025-06-18"
_SESSION = "Mcp-Session-Id"
_MAX_PAGES = 20  # of a list of tools
_MAX_TOOLS = 128  # of one server
_MAX_DESCRIPTION = 1024  # characters
_MAX_ID = 64  # characters: the limit of function names in OpenAI's API
_CLIENT = {"name": "moebius", "version": __version__}


class McpError(Exception):
    """A server did not do what was asked, with a sentence for the page."""


@dataclass(frozen=True)
class Tool:
    """A tool of one server. `id` is unique among all servers and fit to be a function's name."""

    id: str
    name: str
    description: str
    input_schema: dict[str, Any]


class _Session:
    """A session with one server. Methods raise McpError where the server refuses or breaks the protocol."""

    def __init__(self, client: httpx.AsyncClient, url: str, max_bytes: int) -> None:
        self._client = client
        self._url = url
        self._max_bytes = max_bytes
        self._headers = {"Accept": "application/json, text/event-stream", "Accept-Encoding": "identity"}
        self._last_id = 0

    async def open(self) -> None:
        """Agrees on a revision of the protocol."""
        wanted = {"protocolVersion": _PROTOCOL, "capabilities": {}, "clientInfo": _CLIENT}
        agreed = await self.request("initialize", wanted)
        self._headers["MCP-Protocol-Version"] = str(agreed.get("protocolVersion", _PROTOCOL))
        await self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def close(self) -> None:
        """Ends the session if the server has given it a name; a server may refuse that."""
        if _SESSION in self._headers:
            with contextlib.suppress(httpx.HTTPError):
                await self._client.delete(self._url, headers=self._headers)

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Returns the result of a request."""
        self._last_id += 1
        message = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}
        answer = await self._send(message)
        if answer is None:
            raise McpError(f"gave no answer to {method}")
        error, result = answer.get("error"), answer.get("result")
        if isinstance(error, dict):
            raise McpError(f"refused {method}: {str(error.get('message', error))[:500]}")
        if not isinstance(result, dict):
            raise McpError(f"answered {method} with something that is no result")
        return result

    async def _send(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the answer to the message, None where there is none, as to a notification."""
        async with self._client.stream("POST", self._url, json=message, headers=self._headers) as response:
            if response.status_code >= httpx.codes.BAD_REQUEST or response.has_redirect_location:
                raise McpError(f"answered with status {response.status_code}")
            if session := response.headers.get(_SESSION):
                self._headers[_SESSION] = session
            if "id" not in message:
                return None
            pieces = self._bounded(response)
            if response.headers.get("Content-Type", "").startswith("text/event-stream"):
                return await _event_with_id(pieces, message["id"])
            return _parsed(b"".join([piece async for piece in pieces]))

    async def _bounded(self, response: httpx.Response) -> AsyncIterator[bytes]:
        size = 0
        async for piece in response.aiter_bytes():
            size += len(piece)
            if size > self._max_bytes:
                raise McpError(f"answered with more than {self._max_bytes // 1024} KiB (web_mcp_result_kib)")
            yield piece


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise McpError("answered with something that is no JSON") from None
    if not isinstance(value, dict):
        raise McpError("answered with JSON that is no object")
    return value


async def _event_with_id(pieces: AsyncIterator[bytes], wanted: int) -> dict[str, Any] | None:
    """Returns the message with this id among those of a stream of events; None: it ended without one."""
    rest = b""
    async for piece in pieces:
        rest += piece.replace(b"\r", b"")  # JSON has none within a line
        *events, rest = rest.split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            message = _parsed(b"\n".join(lines)) if any(lines) else {}
            if message.get("id") == wanted and "method" not in message:
                return message
    return None


class McpServers:
    """The servers of the settings. Nothing is kept between two calls but names of tools."""

    def __init__(self, urls: Iterable[str], timeout_s: float, max_bytes: int) -> None:
        """`timeout_s` bounds a whole listing or call, `max_bytes` each answer of a server."""
        self._urls = tuple(urls)
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._tools: dict[str, tuple[str, str]] = {}  # id -> (URL, name)

    async def listing(self) -> list[dict[str, Any]]:
        """Returns {"name", "error", "tools"} of each server; one that fails has a sentence and no tools."""
        return await asyncio.gather(*(self._listed(index, url) for index, url in enumerate(self._urls)))

    async def _listed(self, index: int, url: str) -> dict[str, Any]:
        listed: dict[str, Any] = {"name": server_name(url), "error": None, "tools": []}
        try:
            async with self._session(url) as session:
                tools = tools_of(await _all_tools(session), index)
        except McpError as error:
            return {**listed, "error": f"{listed['name']} {error}"}
        self._tools.update({tool.id: (url, tool.name) for tool in tools})
        return {**listed, "tools": [vars(tool) for tool in tools]}

    async def call(self, tool_id: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns {"text", "is_error"} of a tool's call. Raises KeyError for an unknown tool, McpError."""
        if tool_id not in self._tools:
            await self.listing()  # another process of this port may have listed it
        url, name = self._tools[tool_id]
        async with self._session(url) as session:
            result = await session.request("tools/call", {"name": name, "arguments": arguments})
        return {"text": text_of(result), "is_error": result.get("isError") is True}

    @contextlib.asynccontextmanager
    async def _session(self, url: str) -> AsyncIterator[_Session]:
        """Yields an open session. Raises McpError, also for failures of the connection within the context."""
        try:
            # No proxies of the environment, and no redirects: the operator's URL is what is asked.
            async with (
                asyncio.timeout(self._timeout_s),
                httpx.AsyncClient(timeout=self._timeout_s, trust_env=False) as client,
            ):
                session = _Session(client, url, self._max_bytes)
                await session.open()
                yield session
                await session.close()
        except TimeoutError:
            raise McpError(f"did not answer within {self._timeout_s:g} s (web_mcp_timeout_s)") from None
        except httpx.HTTPError as error:
            raise McpError(f"cannot be reached ({type(error).__name__})") from error


async def _all_tools(session: _Session) -> list[dict[str, Any]]:
    """Returns the descriptions of a server's tools, from all pages."""
    found: list[dict[str, Any]] = []
    params: dict[str, Any] = {}
    for _ in range(_MAX_PAGES):
        page = await session.request("tools/list", params)
        tools = page.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise McpError("answered tools/list without a list of tools")
        found += tools
        if len(found) > _MAX_TOOLS:
            raise McpError(f"has more than {_MAX_TOOLS} tools")
        if not page.get("nextCursor"):
            return found
        params = {"cursor": page["nextCursor"]}
    raise McpError(f"has more than {_MAX_PAGES} pages of tools")


def tools_of(described: list[dict[str, Any]], index: int) -> list[Tool]:
    """Returns the tools of the server with this index in the settings; ids depend on no other server.

    Raises:
        McpError: a tool has no name or no schema.
    """
    tools: dict[str, Tool] = {}
    for one in described:
        name, schema = one.get("name"), one.get("inputSchema")
        if not isinstance(name, str) or not name or not isinstance(schema, dict):
            raise McpError("has a tool without a name or without an inputSchema")
        wanted = f"mcp{index + 1}_" + re.sub(r"[^A-Za-z0-9_-]", "_", name)
        tool_id, number = wanted[:_MAX_ID], 2
        while tool_id in tools:
            tool_id, number = f"{wanted[: _MAX_ID - 4]}_{number}", number + 1
        description = str(one.get("description") or one.get("title") or "")[:_MAX_DESCRIPTION]
        tools[tool_id] = Tool(tool_id, name, description, schema)
    return list(tools.values())


def text_of(result: dict[str, Any]) -> str:
    """Returns a call's result as text for the model; of images, sounds and files their kind and address."""
    parts = []
    for part in result.get("content") or ():
        if not isinstance(part, dict):
            continue
        inner = part.get("resource")
        resource: dict[str, Any] = inner if isinstance(inner, dict) else part
        text = part.get("text") or resource.get("text")
        kind = f"{part.get('type', 'content')} {resource.get('mimeType', '')} {resource.get('uri', '')}"
        parts.append(text if isinstance(text, str) else f"[{' '.join(kind.split())}]")
    if not parts and "structuredContent" in result:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(parts)


def server_name(url: str) -> str:
    """Returns a server's name on the page: host, port and path, without user, password and query."""
    parsed = httpx.URL(url)
    return parsed.netloc.decode() + parsed.path.rstrip("/")
