"""How figures look: text that fits 80 columns, with less of it 60; for a refreshed terminal or one print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.top.figures import Figures, ServerRates
from app.top.layers import layer_table, moves_experts

UNKNOWN = "not measured"
_BAR, _LAYER_WIDTH = 9, 25
# Columns of servers that a narrower terminal does without.
_WIDE_COLUMNS, _WIDE = ("format", "while busy"), 80
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def render(
    now: Mapping[str, Any], figures: Figures, rows: int = 100, problem: str = "", width: int = _WIDE
) -> RenderableType:
    """`rows`: lines that layers may take; `problem`: why these are old figures, empty: they are not.

    `width`: of the terminal, columns.
    """
    parts: list[RenderableType] = [_heading(now)]
    if problem:
        parts.append(Text(problem, style="bold red", overflow="ellipsis", no_wrap=True))
    parts.append(_figures(now, figures))
    if now.get("experts"):
        parts += [Text(), _servers(now, figures, width)]
        if moves_experts(figures.placement) and width >= _WIDE:
            parts += [Text(), *_placement(figures, max(1, rows - 1))]
        elif figures.layers:
            parts += [Text(), *_layers(figures.layers, max(1, rows), width)]
    return Group(*parts)


def _heading(now: Mapping[str, Any]) -> Text:
    replica = f", engine {now['replica'] + 1} of {now['replicas']}" if now.get("replicas", 1) > 1 else ""
    asleep = ", asleep" if now.get("is_sleeping") else ""
    return Text(f"{now.get('model', 'Moebius')}{replica}{asleep}, Moebius {now['version']}", style="bold")


def _figures(now: Mapping[str, Any], figures: Figures) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    requests, kv = now["requests"], now["kv_cache"]
    first = now["time_to_first_token"]
    starts = f"; first token p50 {duration(first['p50_s'])}, p95 {duration(first['p95_s'])}" if first else ""
    speeds = f"{now['tokens_per_second']:.1f} output, {now['prompt_tokens_per_second']:.1f} prompt"
    table.add_row("tokens/s", f"{speeds}{starts}")
    table.add_row(
        "requests",
        f"{requests['running']} running, {requests['waiting']} waiting, at most {requests['max_running']} at "
        f"once, {requests['preemptions']} preemptions",
    )
    used = kv["used_tokens"] / max(1, kv["total_tokens"])
    hits = f"prefix hits {kv['prefix_hit_rate']:.0%}"
    table.add_row("KV cache", f"{_bar(used, 20)} {used:.0%} of {kv['total_tokens']:,} tokens, {hits}")
    below = kv.get("tiers", [])[1:]  # An older server names none.
    if below:
        table.add_row("below it", "; ".join(map(tier_line, below)))
    table.add_row("step", _step(figures))
    drafts = now.get("draft_tokens")  # Verified and accepted draft tokens. None: of an older server.
    if drafts and drafts["verified"]:
        share = drafts["accepted"] / drafts["verified"]
        table.add_row("draft tokens", f"{share:.0%} of {drafts['verified']:,} verified ones were accepted")
    if now.get("experts"):
        table.add_row("CPU reads", _bandwidth(now, figures))
    if figures.predicted_share is not None:
        table.add_row("predicted", f"{figures.predicted_share:.0%} of what steps take")
    if figures.link_bytes_per_second:
        table.add_row("copies", _copies(now, figures))
    if now.get("memory"):
        table.add_row("GPU memory", memory_line(now["memory"]))
    table.add_row("limited by", Text(figures.limit, style="bold yellow"))
    return table


def _step(figures: Figures) -> str:
    if figures.step is None or figures.steps_per_second is None:
        return "none computed"
    text = f"{duration(figures.step)} ({figures.steps_per_second:.1f}/s)"
    if figures.experts_per_step is not None:
        text += f", experts {duration(figures.experts_per_step)}"
    if figures.hand_off_per_call is not None and figures.hand_off_per_step is not None:
        each = f"{1e6 * figures.hand_off_per_call:.0f} µs each"
        text += f", hand-off {duration(figures.hand_off_per_step)} ({each})"
    return text


def _bandwidth(now: Mapping[str, Any], figures: Figures) -> str:
    if not now["experts"]["servers"]:
        return "no expert server computes here"
    if figures.bytes_per_second is None:
        return UNKNOWN
    roof = figures.roofline_bytes_per_second
    if not roof:
        return f"{figures.bytes_per_second / 1e9:.2f} GB/s; roofline: {UNKNOWN}"
    share = figures.bytes_per_second / roof
    return f"{_bar(share, 20)} {figures.bytes_per_second / 1e9:.2f} of {roof / 1e9:.1f} GB/s (roofline)"


def memory_line(memory: Mapping[str, Any]) -> str:
    """Returns who has the memory of pages and experts now."""
    parts = (
        ("KV pages", "kv_bytes"),
        ("experts", "expert_bytes"),
        ("streaming ring", "stream_bytes"),
        ("fetch slots", "fetch_bytes"),
        ("free", "free_bytes"),
    )
    said = ", ".join(f"{name} {memory[key] / 2**30:.2f}" for name, key in parts if memory[key])
    return f"{said or 'none'} GiB{' (pages and experts share)' if memory['is_shared'] else ''}"


def tier_line(tier: Mapping[str, Any]) -> str:
    """Returns what a tier of the prefix cache below the device holds, and what it gave back."""
    held, total = tier["bytes"] / 2**30, tier["total_bytes"] / 2**30
    name = tier["name"] if tier["name"] == "disk" else tier["name"].upper()
    return f"{name} {tier['tokens']:,} tokens, {held:.2f} of {total:.2f} GiB, {tier['hit_tokens']:,} hit"


def costs_line(now: Mapping[str, Any], figures: Figures) -> str:
    """What experts cost now, by the engine's own measurement."""
    costs = now.get("costs") or {}
    link, price = costs.get("link_bytes_per_second"), costs.get("copy_price")
    cpu, gpu = costs.get("cpu_expert_seconds"), costs.get("gpu_expert_seconds")
    parts = [
        f"an expert and row {duration(cpu) if cpu else UNKNOWN} on the CPU",
        f"{duration(gpu) if gpu else UNKNOWN} on the GPU",
        f"link {_giga(link)} GB/s" if link else f"link {UNKNOWN}",
    ]
    if price:
        parts.append(f"a copy has to bring {price:.1f} choices")
    if figures.predicted_share is not None:
        parts.append(f"predicted {figures.predicted_share:.0%} of what steps take")
    return "; ".join(parts)


def _copies(now: Mapping[str, Any], figures: Figures) -> str:
    text = f"{(figures.link_bytes_per_second or 0.0) / 1e9:.2f} GB/s to the GPU"
    link = (now.get("costs") or {}).get("link_bytes_per_second")
    return f"{text} of {link / 1e9:.1f} (link)" if link else text


def _placement(figures: Figures, rows: int) -> list[RenderableType]:
    """Returns the placement of each layer; where there is no room, of those whose experts take longest."""
    by_time = sorted(figures.placement, key=lambda rate: -(rate.call_microseconds or 0.0))
    chosen = sorted(by_time[:rows], key=lambda rate: rate.layer)
    total = len(figures.placement)
    what = f"the slowest {len(chosen)} of {total} layers" if len(chosen) < total else "by layer"
    return [Text(f"experts, {what}", style="bold"), layer_table(chosen, figures.roofline_bytes_per_second)]


def _servers(now: Mapping[str, Any], figures: Figures, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    titles = ("server", "where", "format", "busy", "GB/s", "while busy", "roofline", "of it")
    shown = [title for title in titles if width >= _WIDE or title not in _WIDE_COLUMNS]
    for title in shown:
        is_text = title in ("where", "format")
        # Words may be cut where there is no room, numbers not.
        least = None if is_text else len(title)
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True, min_width=least)
    rates = {rate.index: rate for rate in figures.servers if rate is not None}
    for server in now["experts"]["servers"]:
        if not server["is_up"]:
            table.add_row(str(server["index"]), Text("does not answer", style="red"))
            continue
        cells = dict(zip(titles, _server(server, rates.get(server["index"])), strict=True))
        table.add_row(*(cells[title] for title in shown))
    return table


def _server(server: Mapping[str, Any], rate: ServerRates | None) -> tuple[str, ...]:
    """Returns a cell for each title."""
    node = "" if server["numa_node"] is None else f"node {server['numa_node']}, "
    roof = server["calibrated_bytes_per_second"]
    busy = None if rate is None else rate.busy_bytes_per_second
    return (
        str(server["index"]),
        f"{node}{server['num_threads']} x {server['isa']}",
        server["weight_format"][:16],
        "…" if rate is None else f"{rate.busy_share:.0%}",
        "…" if rate is None else f"{rate.bytes_per_second / 1e9:.2f}",
        "idle" if busy is None else _giga(busy),
        _giga(roof) if roof else "-",
        "-" if rate is None or rate.of_roofline is None else f"{rate.of_roofline:.0%}",
    )


def _layers(layers: Mapping[int, float], rows: int, width: int) -> list[RenderableType]:
    """Returns the experts' time of each layer; where there is no room, of the slowest."""
    columns = max(1, min(3, (width + 2) // _LAYER_WIDTH))
    chosen = sorted(layers, key=lambda layer: -layers[layer])[: rows * columns]
    longest = max(layers.values())
    what = f"the slowest {len(chosen)} of {len(layers)} layers" if len(chosen) < len(layers) else "by layer"
    cells = [
        f"{layer:>3} {_bar(layers[layer] / longest, _BAR)} {_micro(layers[layer])}"
        for layer in sorted(chosen)
    ]
    lines = -(-len(cells) // columns)
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(columns):
        table.add_column(no_wrap=True)
    for line in range(lines):
        table.add_row(*cells[line::lines])
    return [Text(f"experts' time, {what}", style="bold"), table]


def _bar(share: float, width: int) -> str:
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).ljust(width, "·")[:width]


def _giga(value: float) -> str:
    return f"{value / 1e9:.1f}"


def duration(seconds: float) -> str:
    """Returns a time in the unit that fits: `1.50 s`, `20.0 ms`, `7 µs`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def _micro(microseconds: float) -> str:
    return f"{microseconds:>6.0f} µs" if microseconds < 1e5 else f"{microseconds / 1e3:>6.0f} ms"
