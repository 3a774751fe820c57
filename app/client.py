"""A small streaming client of the OpenAI-compatible API, for `moebius chat`, `demo` and `bench`."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from moebius.errors import StartupError, UserError
from moebius.network.web_origins import LOOPBACK_HOSTS

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 600.0
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")


@dataclass(frozen=True)
class StreamPiece:
    """One server-sent event; filled by `ApiClient.stream`."""

    text: str
    # Tokens generated so far by the server's own count; None unless this event carried usage.
    completion_tokens: int | None
    finish_reason: str | None
    reasoning: str = ""
    # Deltas of tool calls as they came: index, and of function the name or a piece of the arguments.
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class ListedModel:
    """One entry of `/v1/models`; filled by `ApiClient.first_model`."""

    name: str
    root: str  # The checkpoint directory on the server's machine; empty when it does not say.

    @property
    def local_directory(self) -> Path | None:
        """The checkpoint, when it can be read on this machine."""
        return Path(self.root) if self.root and (Path(self.root) / "config.json").is_file() else None


@dataclass(frozen=True)
class ClientTls:
    """Files for an https server, PEM; empty: none. Filled by options of the command line."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def context(self) -> ssl.SSLContext:
        """Raises UserError naming the option and the file that cannot be used."""
        context = ssl.create_default_context()
        try:
            if self.ca_file:
                context.load_verify_locations(self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise UserError(f"--ca-file: {self.ca_file} cannot be used: {error}") from None
        if bool(self.cert_file) != bool(self.key_file):
            raise UserError("--client-cert-file and --client-key-file are needed together")
        try:
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            files = f"{self.cert_file}, {self.key_file}"
            raise UserError(f"--client-cert-file, --client-key-file: {files}: {error}") from None
        return context


class Unreachable(UserError):
    """The server is not there, or has a trouble of its own: it may be back soon."""


class ApiClient:
    """Talks to one server. Every error is a UserError that names the address and what it answered."""

    def __init__(
        self, base_url: str, api_key: str = "", keep_alive: bool = True, tls: ClientTls | None = None
    ) -> None:
        """Without `keep_alive` every request has a connection of its own: some servers end them unasked.

        `tls`: for an https server; None checks it by the CAs that everybody trusts.
        """
        if not base_url.startswith(("http://", "https://")):
            raise UserError(
                f"server: {base_url!r} is not allowed; allowed: http://HOST:PORT or https://HOST:PORT"
            )
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None if keep_alive else 0)
        try:
            self._http = httpx.Client(
                base_url=self._base_url,
                headers=headers,
                timeout=timeout,
                limits=limits,
                trust_env=False,
                verify=True if tls is None else tls.context(),
            )
        except httpx.InvalidURL as error:
            raise UserError(f"--base-url {base_url!r} is not a URL: {error}") from None

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    def first_model(self) -> ListedModel:
        """Returns the first model the server lists."""
        try:
            response = self._http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        self._check(response)
        entry = response.json()["data"][0]
        return ListedModel(str(entry["id"]), str(entry.get("root") or ""))

    def get_json(self, path: str) -> dict[str, Any]:
        """What GET of `path` answers. Raises Unreachable for what may pass, else UserError."""
        try:
            response = self._http.get(path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if response.status_code >= 500:
            raise Unreachable(f"{self._base_url} answered {response.status_code}: {_message_of(response)}")
        self._check(response)
        document: dict[str, Any] = response.json()
        return document

    def post_json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What POST of `path` answers, however long that takes. Raises UserError."""
        try:
            response = self._http.post(
                path, json=body, timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        self._check(response)
        document: dict[str, Any] = response.json()
        return document

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[StreamPiece]:
        """POSTs `body` with streaming and usage switched on; yields the events as they arrive."""
        for event in self.events(path, body):
            yield _piece(event)

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the same as `stream`, as the JSON objects that the server sends."""
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            headers = {"Content-Type": "application/json"}
            with self._http.stream("POST", path, content=_encoded(request), headers=headers) as response:
                if response.status_code != 200:
                    response.read()
                self._check(response)
                for line in response.iter_lines():
                    if line.startswith("data:") and line != "data: [DONE]":
                        event = json.loads(line.removeprefix("data:"))
                        if "error" in event:
                            message = event["error"].get("message", event["error"])
                            raise UserError(f"{self._base_url}: {message}")
                        yield event
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _check(self, response: httpx.Response) -> None:
        """Raises UserError with the server's own message unless the status is 200."""
        if response.status_code == 200:
            return
        message = _message_of(response)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message += " (here: --api-key-file FILE, or --api-key KEY)"
        raise UserError(f"{self._base_url} answered {response.status_code}: {message}")

    def _unreachable(self, error: Exception) -> UserError:
        reason = _ERRNO.sub("", str(error))
        hint = _served_here(self._base_url) or "is `moebius serve` running there?"
        return Unreachable(f"cannot reach {self._base_url}: {reason}; {hint}")


def _piece(event: dict[str, Any]) -> StreamPiece:
    text, reasoning, reason = "", "", None
    calls: list[dict[str, Any]] = []
    for choice in event.get("choices", []):
        delta = choice.get("delta") or {}
        text += choice.get("text") or delta.get("content") or ""
        # Two names that servers have for one thing.
        reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        calls += delta.get("tool_calls") or []
        reason = choice.get("finish_reason") or reason
    usage = event.get("usage") or {}
    return StreamPiece(text, usage.get("completion_tokens"), reason, reasoning, tuple(calls))


def _served_here(base_url: str) -> str:
    """Returns the addresses of systems that this user runs on this host, where nothing answers at `base_url`;
    empty: none.
    """
    from app.supervisor.plan import default_state_dir

    if urlsplit(base_url).hostname not in LOOPBACK_HOSTS:
        return ""
    try:
        found = [path.parent.name for path in default_state_dir().glob("serve-*/gpu.sock")]
    except StartupError:
        return ""
    ports = sorted(int(name.removeprefix("serve-")) for name in found)
    return f"`moebius serve` runs here on port {' and '.join(map(str, ports))}" if ports else ""


def _encoded(body: dict[str, Any]) -> bytes:
    """Returns JSON in UTF-8. Raises UserError for text that is none.

    Where the locale has another encoding, Python carries the bytes of arguments and of lines as surrogates:
    they are sent as the bytes that they were.
    """
    try:
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogateescape")
        data.decode()
    except UnicodeError:
        raise UserError("the message is not valid UTF-8; allowed: text in UTF-8") from None
    return data


def _message_of(response: httpx.Response) -> str:
    """The server's own words."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
