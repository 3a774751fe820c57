"""What `moebius status` prints: whether a server is ready, and its figures now, in ten lines at most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app.client import ApiClient, Unreachable
from app.top.view import duration, memory_line
from moebius.errors import UserError


def ask(client: ApiClient, replica: int) -> dict[str, Any]:
    """Returns `ready`, `is_sleeping`, why it is not ready (`reason`, empty when it is), `live` as `/v1/live`
    gives it without layers, and why there are no such figures (`figures`, empty when there are).

    Raises UserError where no Moebius answers.
    """
    found: dict[str, Any] = {"ready": True, "is_sleeping": False, "reason": "", "live": None, "figures": ""}
    try:
        found["is_sleeping"] = client.get_json("/ready").get("is_sleeping", False)
    except Unreachable as error:
        found |= {"ready": False, "reason": str(error)}
    try:
        found["live"] = client.get_json(f"/v1/live?layers=false&replica={replica}")
    except UserError as error:
        found["figures"] = str(error)
    return found


def lines(found: Mapping[str, Any], url: str) -> list[str]:
    """Returns lines for people of what `ask` has found."""
    live = found["live"]
    name = f"{live['model']} at {url}" if live else url
    state = "asleep" if found["is_sleeping"] else "ready"
    head = f"{name}: {state if found['ready'] else 'not ready'}"
    rows = [("because", found["reason"])] if found["reason"] else []
    if found["is_sleeping"]:
        rows.append(("GPU memory", "given back; the next request, or `moebius wake`, loads the model"))
    elif live:
        rows += _rows(live)
    elif found["figures"] != found["reason"]:
        rows.append(("no figures", found["figures"]))
    return [head, *(f"{title:<13}{text}" for title, text in rows)]


def _rows(live: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    replica = f", engine {live['replica'] + 1} of {live['replicas']}" if live.get("replicas", 1) > 1 else ""
    yield "version", f"{live['version']}{replica}"
    requests, kv, first = live["requests"], live["kv_cache"], live["time_to_first_token"]
    running = f"{requests['running']} running, {requests['waiting']} waiting"
    yield "requests", f"{running}, at most {requests['max_running']} at once"
    yield (
        "tokens/s",
        f"{live['tokens_per_second']:.1f} output, {live['prompt_tokens_per_second']:.1f} prompt",
    )
    if first:
        yield "first token", f"p50 {duration(first['p50_s'])}, p95 {duration(first['p95_s'])}"
    used = kv["used_tokens"] / max(1, kv["total_tokens"])
    yield "KV cache", f"{used:.0%} of {kv['total_tokens']:,} tokens, prefix hits {kv['prefix_hit_rate']:.0%}"
    drafts = live.get("draft_tokens")  # None: of an older server
    if drafts and drafts["verified"]:
        share = drafts["accepted"] / drafts["verified"]
        yield "draft tokens", f"{share:.0%} of {drafts['verified']:,} verified ones were accepted"
    if live["experts"]:
        servers = live["experts"]["servers"]
        formats = sorted({server["weight_format"] for server in servers if server["is_up"]})
        up = sum(server["is_up"] for server in servers)
        yield "experts", f"{up} of {len(servers)} servers up{', ' if formats else ''}{', '.join(formats)}"
    if live.get("memory"):
        yield "GPU memory", memory_line(live["memory"])
