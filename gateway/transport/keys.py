"""Who sends a request, by API key or else by address, with the limits of each key; and which web pages may.

Requests of other sites' web pages are refused, and those for host names that are not this machine's.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.processes.shared import ALLOWANCES, KeySlot, KeyTable
from gateway.schemas.errors import ApiError
from gateway.telemetry.metrics import GatewayMetrics
from gateway.transport.internal import CALLER, InternalCaller
from moebius.network.api_keys import ApiKey, ApiKeys, KeyLimits
from moebius.network.web_origins import Sender, WebOrigins

_MINUTE_S = 60.0
_KEY_HEADERS = ("x-api-key", "api-key")
_HASH_BYTES = 16  # of a client


class Allowance:
    """A rate limit per minute, with a minute's worth of burst; what is overdrawn has to be waited for."""

    def __init__(self, name: str, per_minute: int | None, clock: Callable[[], float], slot: KeySlot) -> None:
        """`name`: of its place in `slot`, which all processes may share."""
        self._name = name
        self.per_minute = per_minute
        self._clock = clock
        self._slot = slot

    def _refilled(self, state: memoryview[float]) -> float:
        """Returns what is left now; a first use, or one with a changed limit, starts with a full minute's."""
        assert self.per_minute is not None
        rate, left, at = state
        now, most = self._clock(), float(self.per_minute)
        left = min(left + (now - at) * most / _MINUTE_S, most) if rate == most else most
        state[0], state[1], state[2] = most, left, now
        return left

    def wait_s(self) -> float:
        """Returns the seconds until something may be taken; 0: now."""
        if self.per_minute is None:
            return 0.0
        with self._slot.allowance(self._name) as state:
            missing = min(1.0, self.per_minute) - self._refilled(state)
        return 0.0 if missing <= 0 else missing * _MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        """Takes `amount` even if less is left: a request's tokens are only known at its end."""
        if self.per_minute is not None:
            with self._slot.allowance(self._name) as state:
                state[1] = self._refilled(state) - amount


class KeyUse:
    """The current use of one key; made by `KeyMiddleware`, one per key and process."""

    def __init__(
        self,
        name: str,
        limits: KeyLimits,
        clock: Callable[[], float] = time.monotonic,
        table: KeyTable | None = None,
    ) -> None:
        """`table`: the counts that the port's other processes share; `clock`: the same for all of them."""
        self.name = name
        self.limits = limits
        slot = None if table is None else table.slot(name)
        if slot is None:
            slot = KeyTable().slot(name)
            assert slot is not None
        self._slot = slot
        requests, tokens = ALLOWANCES
        self._requests = Allowance(requests, limits.requests_per_minute, clock, slot)
        self._tokens = Allowance(tokens, limits.tokens_per_minute, clock, slot)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts one request while it runs. Raises ApiError 429 if the key's limits allow no more now."""
        most = self.limits.requests_in_flight
        if most is not None and self._slot.in_flight >= most:
            self._refuse("requests_in_flight", most, 1.0)
        for name, allowance in (("tokens_per_minute", self._tokens), ("requests_per_minute", self._requests)):
            wait_s = allowance.wait_s()
            if wait_s > 0 and allowance.per_minute is not None:
                self._refuse(name, allowance.per_minute, wait_s)
        self._requests.take(1)
        self._slot.add(+1)
        try:
            yield
        finally:
            self._slot.add(-1)

    def took(self, tokens: int) -> None:
        """Counts a request's tokens, prompt and output."""
        self._tokens.take(tokens)

    def _refuse(self, limit: str, value: int, wait_s: float) -> None:
        seconds = max(1, math.ceil(wait_s))
        raise ApiError(
            429,
            f"rate limit reached: this key may have {value} {limit.replace('_', ' ')}; "
            f"try again in {seconds} s",
            code="rate_limit_exceeded",
            retry_after_s=seconds,
        )


def _sent_keys(headers: Headers) -> list[bytes]:
    """Returns the keys in the client's headers, OpenAI's, Anthropic's and Azure's."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    keys = [bearer if scheme.lower() == "bearer" else "", *map(headers.get, _KEY_HEADERS)]
    # Headers are read as latin-1; keys are compared by the bytes that were sent.
    return [key.strip().encode("latin-1") for key in keys if key is not None and key.strip()]


class KeyMiddleware:
    """Requires a key on every path but open ones, and keeps its requests within its limits.

    A key is sent as `Authorization: Bearer KEY`, `x-api-key: KEY` or `api-key: KEY`.
    `scope["state"]["key_use"]` is its `KeyUse`, to which the serving code reports tokens.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        is_open: Callable[[str], bool],
        defaults: KeyLimits,
        metrics: GatewayMetrics,
        table: KeyTable | None = None,
    ) -> None:
        """`is_open` returns whether a path needs no key; `defaults` are the limits of keys without any;
        `table` is shared by the processes of a port."""
        self._app = app
        self._keys = keys
        self._is_open = is_open
        self._defaults = defaults
        self._metrics = metrics
        self._table = table or KeyTable()
        self._uses: dict[str, KeyUse] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        key = self._key_of(scope)
        if key is None:
            error = ApiError(
                401,
                "missing or wrong API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
            await error.response(scope)(scope, receive, send)
            return
        use = self._use(key)
        state = scope.setdefault("state", {})
        state["key_name"], state["key_digest"] = use.name, key.digest
        with structlog.contextvars.bound_contextvars(api_key=use.name):
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            state["key_use"] = use
            try:
                with use.request():
                    await self._app(scope, receive, send)
            except ApiError as refusal:  # raised by `use.request`: the application answers its own
                self._metrics.rejected("key_limit")
                await refusal.response(scope)(scope, receive, send)

    def _key_of(self, scope: Scope) -> ApiKey | None:
        """Returns the key that a client sent, or on whose behalf this process acts; None: there is none."""
        caller: InternalCaller | None = scope.get("state", {}).get(CALLER)
        if caller is not None:
            return self._keys.named(caller.key_name)
        found = (self._keys.find(key) for key in _sent_keys(Headers(scope=scope)))
        return next((one for one in found if one is not None), None)

    def _use(self, key: ApiKey) -> KeyUse:
        """Returns the key's use, a new one when its limits have changed."""
        limits = key.limits.or_else(self._defaults)
        use = self._uses.get(key.name)
        if use is None or use.limits != limits:
            names = self._keys.names
            self._uses = {name: one for name, one in self._uses.items() if name in names}
            use = self._uses[key.name] = KeyUse(key.name, limits, table=self._table)
        return use


def client_of(scope: Scope) -> str:
    """Returns a hash that identifies the client, for fair shares; gateways with the same keys agree on it.

    It is that of the key's name, or without keys of the connection's address (of IPv6 the /64 network that a
    site has). `X-Forwarded-For` counts only if a proxy on this machine sends it: anyone else could write
    anything there. All clients behind another proxy count as one, unless they send keys.
    """
    state = scope.get("state", {})
    use: KeyUse | None = state.get("key_use")
    if use is not None:
        return _hashed(f"key {use.name}")
    if CALLER in state:
        return _hashed("batches")
    address = (scope.get("client") or ("",))[0]
    return _hashed(f"address {_network(address)}")


def private_salt(scope: Scope, cache_salt: str) -> str:
    """Returns the salt with which requests of other API keys share no cached prefix: a hash of the key and of
    the request's own `cache_salt`; without keys it is `cache_salt`.

    It has the digest of the key and not its name, which is the next key's when a line of the file goes.
    Gateways with the same keys agree on it, as do the batches of a key.
    """
    key: bytes | None = scope.get("state", {}).get("key_digest")
    if key is None:
        return cache_salt
    return hashlib.blake2b(key + cache_salt.encode(), digest_size=32, person=b"moebius salt").hexdigest()


def owner_of(scope: Scope) -> tuple[str, str]:
    """Returns whose files, batches, stored responses and conversations a request may use, and the name of its
    key.

    The first is a hash of the key's name, which survives a new secret of the key. Without keys all clients
    share everything, and the name is empty.
    """
    name: str = scope.get("state", {}).get("key_name", "")
    return _hashed(f"key {name}") if name else "everyone", name


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address  # of a socket that has none
    if found.version == 6 and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES, person=b"moebius client").hexdigest()


logger = structlog.get_logger(__name__)
_MAX_LOGGED = 32  # different reasons: clients choose the names in them


class OriginMiddleware:
    """Answers such requests with 403, in every API.

    Where a key is needed, the key decides: unlike a cookie, it is not added by the browser to requests of
    foreign pages, so a page that has it was given it. The name in `Host` is checked nevertheless.
    """

    def __init__(self, app: ASGIApp, rules: WebOrigins, needs_key: Callable[[str], bool]) -> None:
        """`needs_key` returns whether a path requires a key."""
        self._app = app
        self._rules = rules
        self._needs_key = needs_key
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        if refusal.message not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(refusal.message)
            logger.warning("a web page was refused", reason=refusal.message, path=scope["path"])
        await refusal.response(scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        for sender in _senders(scope):
            if reason := self._rules.refused_host(sender):
                return ApiError(403, reason, code="host_not_allowed")
            if self._needs_key(scope["path"]) and not sender.asks_first:
                continue
            if reason := self._rules.refused_origin(sender):
                return ApiError(403, reason, code="origin_not_allowed")
        return None


def _senders(scope: Scope) -> list[Sender]:
    """Returns the request's origin headers, one entry per `Host`, since each has to be allowed."""
    hosts: list[str] = []
    forwarded: list[str] = []
    origin = site = ""
    for name, raw in scope["headers"]:
        if name == b"host":
            hosts.append(raw.decode("latin-1"))
        elif name == b"origin":
            # Browsers send one `Origin`: joined, several equal none that is allowed.
            origin = f"{origin}, {raw.decode('latin-1')}" if origin else raw.decode("latin-1")
        elif name == b"sec-fetch-site":
            site = raw.decode("latin-1")
        elif name == b"x-forwarded-host":
            forwarded += [part.strip() for part in raw.decode("latin-1").split(",")]
    return [Sender(scope["method"], host, origin, site, tuple(forwarded)) for host in hosts or [""]]
