"""The settings of the HTTP process; `moebius/config/__init__.py` has them in the one tree."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from moebius.config.operations import Section
from moebius.config.parser_names import AUTO, REASONING_PARSERS, TOOL_CALL_PARSERS, parser_name
from moebius.network.web_origins import checked_hosts, checked_origins, checked_urls

ToolCallParser = Annotated[str, AfterValidator(partial(parser_name, parsers=TOOL_CALL_PARSERS))]
ReasoningParser = Annotated[str, AfterValidator(partial(parser_name, parsers=REASONING_PARSERS))]


class ImageConfig(Section):
    """Images in requests to a model that takes them."""

    max_images_per_request: int = Field(default=16, ge=1, description="Images in one request")
    max_image_mib: float = Field(default=15.0, gt=0, description="Size of an image file, MiB")
    max_image_megapixels: float = Field(
        default=50.0, gt=0, description="Width times height of an image, millions"
    )
    image_url_hosts: tuple[str, ...] = Field(
        default=(),
        description="Hosts, also private ones, from which image URLs are fetched; *: all public; empty: none",
    )
    image_url_timeout_s: float = Field(
        default=10.0, gt=0, description="Longest wait for an image to be fetched"
    )
    image_dir: str = Field(
        default="", description="Directory below which file: URLs may name images; empty: none"
    )
    image_cache_mib: int = Field(
        default=256, ge=0, description="Encoded images kept on the device for later requests, MiB"
    )


class GatewayConfig(Section):
    """The HTTP process."""

    host: str = Field(default="127.0.0.1", description="Address the HTTP server binds to")
    port: int = Field(default=8000, ge=0, le=65535, description="Port of the HTTP server; 0 takes a free one")
    engine_address: str = Field(
        default="127.0.0.1:50051", description="gRPC address of gpu_service (host:port or unix:path)"
    )
    engines: tuple[str, ...] = Field(
        default=(),
        description="Addresses of several engines (gRPC); a host name: all of its own; empty: engine_address",
    )
    api_key: str = Field(
        default="", description="Bearer token that clients need; as a flag it shows in `ps`; empty: none"
    )
    api_key_file: str = Field(
        default="",
        description="File of API keys, or of their hashes (`moebius keys`); read again when it changes",
    )
    key_requests_in_flight: int | None = Field(
        default=None, ge=1, description="Requests of one API key at the same time"
    )
    key_requests_per_minute: int | None = Field(
        default=None, ge=1, description="Requests of one API key per minute"
    )
    key_tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Tokens (prompt and output) of one API key per minute",
    )
    cache_isolation: Literal["key", "none"] = Field(
        default="key",
        description="Who shares cached prefixes: key: requests of one API key; none: those of all keys",
    )
    max_queued_requests: int = Field(
        default=256,
        ge=1,
        description="Requests in progress at once; more get 429, unless of a client with less than its share",
    )
    max_connections: int | None = Field(
        default=None,
        ge=1,
        description="HTTP connections at once, including idle ones; unset: as many as ulimit -n allows",
    )
    header_timeout_s: float = Field(
        default=10.0, gt=0, description="Longest wait for the headers of an HTTP request, seconds"
    )
    body_timeout_s: float = Field(
        default=30.0, gt=0, description="Longest wait for a request's body, seconds; 1 s more per 16 KiB"
    )
    idle_timeout_s: int = Field(
        default=60,
        ge=1,
        description="Longest wait for the next request, or for a client to read its answer, seconds",
    )
    gateway_metrics_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port for the gateway's metrics and probes; 0: the HTTP port",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins of web pages that may send requests, * for any part; empty: this server's own",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host names that requests may be for, *.NAME, *; empty: any, on loopback only localhost",
    )
    max_body_mib: float = Field(
        default=32.0, gt=0, description="Size of a request's body without its images, MiB"
    )
    workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Gateway processes that share the port, each with its own prompt_workers",
    )
    prompt_workers: int = Field(
        default=2,
        ge=1,
        description="Processes that parse requests and tokenise prompts; of several, one is for small ones",
    )
    prompt_timeout_s: float = Field(
        default=20.0, gt=0, description="CPU time limit for parsing one request, seconds"
    )
    prompt_memory_gib: float = Field(
        default=4.0, gt=0, description="Memory limit for parsing one request, GiB"
    )
    chat_template: str = Field(
        default="", description="File with a Jinja chat template; empty: the tokenizer's own"
    )
    strict_parameters: bool = Field(
        default=False,
        description="Refuse requests with unknown or ineffective fields, instead of logging each field once",
    )
    tool_call_parser: ToolCallParser = Field(
        default=AUTO,
        description="Format of tool calls; auto: detected from the chat template; none: no parsing",
    )
    reasoning_parser: ReasoningParser = Field(
        default=AUTO,
        description="Format of reasoning; auto: detected from the chat template; none: no parsing",
    )
    stored_responses: int = Field(
        default=1000, ge=0, description="Newest responses kept for previous_response_id; 0: none"
    )
    stored_responses_mib: float = Field(
        default=256.0, gt=0, description="Size of all kept responses and conversations, MiB"
    )
    stored_responses_s: float = Field(
        default=86400.0, gt=0, description="How long a response is kept, seconds"
    )
    stored_responses_dir: str = Field(
        default="",
        description="Directory of kept responses, of all workers; empty: a private one, removed at exit",
    )
    batch_dir: str = Field(
        default="",
        description="Directory of files and batches, of all workers; off: none; empty: `serve` has one for "
        "the served name in the user's state directory, a gateway alone has none",
    )
    batch_dir_gib: float = Field(
        default=16.0, gt=0, description="Size of all files and batches together, GiB; more is refused"
    )
    batch_file_mib: float = Field(default=200.0, gt=0, description="Size of an uploaded file, MiB")
    batch_requests: int = Field(
        default=32,
        ge=1,
        description="Requests of batches in progress at once, less those of clients, but at least one",
    )
    slot_save_path: str = Field(
        default="",
        description="Directory where clients save contexts of slots by name (/slots/ID?action=save); empty: "
        "refused",
    )
    sse_keepalive_s: float = Field(
        default=15.0,
        gt=0,
        description="Seconds without output after which a stream gets an SSE comment (keep-alive)",
    )
    web_page: bool = Field(default=True, description="Serve a page at / to chat and to watch the engine")
    live_view: bool = Field(
        default=True,
        description="Serve /v1/live: load, and where experts are computed; needs an API key if there are any",
    )

    web_mcp_servers: tuple[str, ...] = Field(
        default=(),
        description="URLs of MCP servers (streamable HTTP) whose tools the page offers; this server calls "
        "them, for all who may use it; empty: none",
    )
    web_mcp_timeout_s: float = Field(
        default=60.0, gt=0, description="Longest listing or call of an MCP server's tools, seconds"
    )
    web_mcp_result_kib: int = Field(default=256, ge=1, description="Size of an MCP server's answer, KiB")

    _urls_of_mcp = field_validator("web_mcp_servers")(checked_urls)
    _origins_as_sent = field_validator("cors_origins")(checked_origins)
    _names_of_hosts = field_validator("allowed_hosts")(checked_hosts)

    @property
    def batch_directory(self) -> Path | None:
        """The absolute path of `batch_dir`, or None where no files and batches are kept."""
        return None if self.batch_dir in ("", "off") else Path(self.batch_dir).absolute()
