"""The result as people read it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from moebius.app.verify.result import LayerResult, VerifyResult

_COLUMNS = (
    "layer",
    "experts",
    "weights",
    "CPU experts",
    "GPU experts",
    "allowed",
    "worst expert",
    "chosen",
    "routing",
    "hidden states",
)

# Of the table, where the terminal is narrower or there is none.
_WIDTH = 120


def print_result(result: VerifyResult, console: Console) -> None:
    """A row for every layer, then distributions and verdict; lines are longer than a narrow terminal's."""
    title = f"{result.model} ({result.expert_dtype}, rows {result.rows_dtype}) against {result.reference}"
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "experts" else "right", no_wrap=True)
    for layer in result.layers:
        table.add_row(*_cells(layer))
    console.width = max(console.width, _WIDTH)
    console.print(table)
    for line in _lines(result):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _cells(layer: LayerResult) -> list[str]:
    found = layer.worst_expert
    worst = "-" if found is None else f"{found.expert}: {_error(found.error)}"
    chosen = "-" if found is None else f"{layer.num_chosen}/{len(layer.experts)}"
    return [
        str(layer.layer),
        "/".join(layer.formats) or "-",
        _error(layer.weight_error),
        _error(layer.cpu_error),
        _error(layer.gpu_error),
        _error(layer.allowed_error),
        worst,
        chosen,
        "-" if layer.routing_agreement is None else f"{layer.routing_agreement:.2%}",
        _error(layer.hidden_error),
    ]


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _lines(result: VerifyResult) -> list[str]:
    lines = [""]
    if result.tokens_from == "bytes":
        lines.append("The checkpoint has no tokenizer: bytes stood for tokens, and perplexity means nothing.")
    out = result.output
    if out is None:
        lines.append(
            "KL divergence and perplexity: not measured, because layers behind --layers were left out"
        )
    else:
        lines += [
            f"KL divergence, nats per token: mean {out.mean_kl:.3e}, 99th percentile {out.p99_kl:.3e}, "
            f"largest {out.max_kl:.3e}",
            f"same most probable token: {out.top1_agreement:.2%}",
            f"perplexity: {out.perplexity:.4f}, reference {out.reference_perplexity:.4f} "
            f"({out.perplexity / out.reference_perplexity - 1:+.3%})",
        ]
    experts = [expert for layer in result.layers for expert in layer.experts]
    chosen = sum(expert.tokens > 0 for expert in experts)
    others = f"; the other {len(experts) - chosen} with rows of tokens that chose others"
    lines.append(
        f"{len(experts)} experts compared one by one: {chosen} with rows of tokens that chose them"
        + (others if chosen < len(experts) else "")
    )
    lines.append(
        f"{result.tokens} tokens in {result.seconds:.1f} s; "
        f"most memory taken {result.peak_memory / 2**30:.2f} GiB"
    )
    for check in result.checks():
        words = "passed" if check.passed else "FAILED"
        lines.append(f"{words}: {check.what} {check.found:.3g}, allowed {check.allowed:.3g}")
    lines.append(f"verdict: {'passed' if result.passed else 'FAILED'}")
    return lines
