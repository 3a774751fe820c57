"""Who sends a request, and how much of it they may: keys, and the limits of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError
from gateway.telemetry import GatewayMetrics
from moebius.api_keys import ApiKey, ApiKeys, KeyLimits

_MINUTE_S = 60.0


class Allowance:
    """So many a minute, up to a minute's worth at once; what is taken beyond that has to be waited for."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute or 0)
        self._at = clock()

    def wait_s(self) -> float:
        """Until something may be taken; 0: now."""
        if self.per_minute is None:
            return 0.0
        now = self._clock()
        refilled = self._left + (now - self._at) * self.per_minute / _MINUTE_S
        self._left, self._at = min(refilled, float(self.per_minute)), now
        missing = min(1.0, self.per_minute) - self._left
        return 0.0 if missing <= 0 else missing * _MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        """Even if there is less: how many tokens a request takes is known at its end only."""
        self._left -= amount


class KeyUse:
    """What one key does at present; made by `KeyMiddleware`, one per key and process."""

    def __init__(self, name: str, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.limits = limits
        self._in_flight = 0
        self._requests = Allowance(limits.requests_per_minute, clock)
        self._tokens = Allowance(limits.tokens_per_minute, clock)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts one request while it runs. Raises ApiError 429 when the key may not have one more now."""
        most = self.limits.requests_in_flight
        if most is not None and self._in_flight >= most:
            self._refuse("requests_in_flight", most, 1.0)
        for name, allowance in (("tokens_per_minute", self._tokens), ("requests_per_minute", self._requests)):
            wait_s = allowance.wait_s()
            if wait_s > 0 and allowance.per_minute is not None:
                self._refuse(name, allowance.per_minute, wait_s)
        self._requests.take(1)
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def took(self, tokens: int) -> None:
        """A request has had so many tokens, prompt and output."""
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
    """The keys a client brought, in OpenAI's header and in Anthropic's."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    keys = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    # Headers are read as latin-1; the bytes that were sent count.
    return [key.strip().encode("latin-1") for key in keys if key.strip()]


class KeyMiddleware:
    """Requires a key on every path but open ones, and keeps its requests within its limits.

    It is sent as `Authorization: Bearer KEY` or as `x-api-key: KEY`. `scope["state"]["key_use"]` is its
    `KeyUse`, to which whoever counts tokens reports them.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        is_open: Callable[[str], bool],
        defaults: KeyLimits,
        metrics: GatewayMetrics,
    ) -> None:
        """`is_open` tells paths that need no key; `defaults` are the limits of keys that name none."""
        self._app = app
        self._keys = keys
        self._is_open = is_open
        self._defaults = defaults
        self._metrics = metrics
        self._uses: dict[str, KeyUse] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        found = (self._keys.find(key) for key in _sent_keys(Headers(scope=scope)))
        key = next((one for one in found if one is not None), None)
        if key is None:
            error = ApiError(
                401,
                "missing or wrong API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
            await error.response(scope)(scope, receive, send)
            return
        use = self._use(key)
        with structlog.contextvars.bound_contextvars(api_key=use.name):
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            scope.setdefault("state", {})["key_use"] = use
            try:
                with use.request():
                    await self._app(scope, receive, send)
            except ApiError as refusal:  # of `use.request`: those of the application are answered in it
                self._metrics.rejected("key_limit")
                await refusal.response(scope)(scope, receive, send)

    def _use(self, key: ApiKey) -> KeyUse:
        """What the key does; begun anew when its limits have changed."""
        limits = key.limits.or_else(self._defaults)
        use = self._uses.get(key.name)
        if use is None or use.limits != limits:
            names = self._keys.names
            self._uses = {name: one for name, one in self._uses.items() if name in names}
            use = self._uses[key.name] = KeyUse(key.name, limits)
        return use
