"""What a comparison found, as a verdict, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

# Of an expert's allowed error, the part that may be a common factor of its answers.
GAIN_SHARE = 3.0


@dataclass(frozen=True)
class Thresholds:
    """From when on a model is refused; filled from the command line, None: the table of `verify.allowed`."""

    max_expert_error: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None  # Share of tokens with the same most probable next token; None: not judged.


@dataclass(frozen=True)
class ExpertError:
    """One expert asked alone; filled by `compare_experts`."""

    expert: int
    # Tokens of the text that chose it; 0: it was asked about rows of others.
    tokens: int
    error: float
    # How many times as large its answers are as they should be, whatever else is wrong with them.
    gain: float


@dataclass(frozen=True)
class LayerResult:
    """One decoder layer; filled by `Comparison`. None: the layer has nothing of the kind, or was left out."""

    layer: int
    # Packed formats of gate and up, and of down; empty: no experts were compared.
    formats: tuple[str, ...] = ()
    weight_error: float | None = None  # What rounding cost the weights themselves.
    # Of the experts' weighted sum, given the reference's rows and choices: of servers' experts, of the GPU's.
    cpu_error: float | None = None
    gpu_error: float | None = None
    allowed_error: float | None = None
    experts: tuple[ExpertError, ...] = ()  # Every expert of the layer alone; empty: none was compared.
    # Share of the reference's chosen experts that ours chose, too, each given its own hidden states.
    routing_agreement: float | None = None
    hidden_error: float = 0.0  # Of the residual stream after the layer: all that has come together so far.

    @property
    def worst_expert(self) -> ExpertError | None:
        """The one that is farthest off."""
        return max(self.experts, key=lambda found: found.error, default=None)

    @property
    def num_chosen(self) -> int:
        """Experts that tokens of the text chose."""
        return sum(found.tokens > 0 for found in self.experts)

    @property
    def allowed_gain(self) -> float | None:
        """How far from 1 an expert's gain may be.

        Rounding errs in all directions, so little of its error is along the answer itself; a wrong scale's is
        all of it, and would be smaller than what is allowed for coarse formats.
        """
        return None if self.allowed_error is None else self.allowed_error / GAIN_SHARE

    def expert_checks(self) -> list[Check]:
        """Returns, of each expert that is beyond a threshold, the one that it exceeds most."""
        allowed, allowed_gain = self.allowed_error, self.allowed_gain
        if allowed is None or allowed_gain is None:
            return []
        found: list[Check] = []
        for expert in self.experts:
            where = f"layer {self.layer}, expert {expert.expert}"
            if not expert.error <= allowed:
                found.append(Check(f"{where}: error", expert.error, allowed, False))
            elif not abs(expert.gain - 1.0) <= allowed_gain:
                what = f"{where}: its answers are {expert.gain:.3g} times as large, off by"
                found.append(Check(what, abs(expert.gain - 1.0), allowed_gain, False))
        return found


@dataclass(frozen=True)
class OutputResult:
    """Next-token distributions; filled by `summarise`. Nats per token."""

    mean_kl: float
    p99_kl: float
    max_kl: float
    allowed_kl: float
    # Share of tokens with the same most probable next token.
    top1_agreement: float
    reference_perplexity: float
    perplexity: float


@dataclass(frozen=True)
class DeferralResult:
    """Next-token distributions with late experts, against the same experts without; no threshold applies."""

    defer_experts: int
    # Norm of the difference of all logits over the norm of those without late experts.
    logits_error: float
    mean_kl: float  # nats per token
    p99_kl: float
    max_kl: float
    top1_agreement: float  # share of tokens with the same most probable next token
    perplexity: float


@dataclass(frozen=True)
class Check:
    """One threshold; filled by `VerifyResult.checks`."""

    what: str
    found: float
    # At most so much; for shares, at least.
    allowed: float
    passed: bool


@dataclass(frozen=True)
class VerifyResult:
    """Filled by `verify_model`."""

    model: str
    reference: str
    expert_dtype: str
    rows_dtype: str
    device: str
    # How the text became token ids: "tokenizer", or "bytes" where the checkpoint has none.
    tokens_from: str
    tokens: int
    layers: tuple[LayerResult, ...]
    # None: layers after the compared ones were left out.
    output: OutputResult | None
    thresholds: Thresholds
    # Most memory this process has taken, bytes.
    peak_memory: int
    seconds: float
    # None: no expert is late, or layers after the compared ones were left out.
    deferral: DeferralResult | None = None

    def checks(self) -> list[Check]:
        """Returns every threshold that applies, the worst layer for all."""
        found: list[Check] = []
        for layer in self.layers:
            for where, error in (("servers", layer.cpu_error), ("GPU", layer.gpu_error)):
                if error is not None and layer.allowed_error is not None:
                    passed = error <= layer.allowed_error
                    name = f"layer {layer.layer}, experts of the {where}"
                    found.append(Check(name, error, layer.allowed_error, passed))
            found += layer.expert_checks()
        failed = [check for check in found if not check.passed]
        # The one with the least room speaks for those that pass.
        tightest = sorted(found, key=lambda check: check.found / check.allowed if check.allowed else 0.0)
        checks = failed or tightest[-1:]
        if self.output is not None:
            out = self.output
            checks.append(Check("mean KL", out.mean_kl, out.allowed_kl, out.mean_kl <= out.allowed_kl))
            wanted = self.thresholds.min_top1
            if wanted is not None:
                checks.append(
                    Check("top-1 agreement", out.top1_agreement, wanted, out.top1_agreement >= wanted)
                )
        return checks

    @property
    def passed(self) -> bool:
        """Returns whether every check passed."""
        return all(check.passed for check in self.checks())

    def document(self) -> dict[str, Any]:
        """Returns the result as the JSON file has it."""
        found = asdict(self)
        for layer, written in zip(self.layers, found["layers"], strict=True):
            worst = layer.worst_expert
            written |= {"worst_expert": worst and asdict(worst), "num_chosen": layer.num_chosen}
        checks = [asdict(check) for check in self.checks()]
        return found | {"checks": checks, "passed": self.passed}


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
            "KL divergence and perplexity: not measured, because layers after --layers were left out"
        )
    else:
        lines += [
            f"KL divergence, nats per token: mean {out.mean_kl:.3e}, 99th percentile {out.p99_kl:.3e}, "
            f"largest {out.max_kl:.3e}",
            f"same most probable token: {out.top1_agreement:.2%}",
            f"perplexity: {out.perplexity:.4f}, reference {out.reference_perplexity:.4f} "
            f"({out.perplexity / out.reference_perplexity - 1:+.3%})",
        ]
    if (late := result.deferral) is not None:
        lines += [
            f"defer_experts {late.defer_experts}, against none late: KL divergence, nats per token: "
            f"mean {late.mean_kl:.3e}, 99th percentile {late.p99_kl:.3e}, largest {late.max_kl:.3e}",
            f"  same most probable token: {late.top1_agreement:.2%}; logits differ by "
            f"{late.logits_error:.2e}; perplexity: {late.perplexity:.4f}",
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
    return [*lines, *check_lines(result.checks())]


def check_lines(checks: Sequence[Check]) -> list[str]:
    """Returns a line for each threshold, and the verdict: whether every one is kept."""
    words = ["passed" if check.passed else "FAILED" for check in checks]
    lines = [
        f"{word}: {check.what} {check.found:.3g}, allowed {check.allowed:.3g}"
        for word, check in zip(words, checks, strict=True)
    ]
    return [*lines, f"verdict: {'FAILED' if 'FAILED' in words else 'passed'}"]
